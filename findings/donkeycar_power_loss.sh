#!/usr/bin/env bash
# After a donkey car's battery was pulled, two drives share one _session_id, and deleting record 15 hides record 16.
#
# Versions: donkeycar 5.3.0; Python 3.11. Seen 2026-11-29.
# Guess before: each start of the car has a session of its own, and deleted_indexes holds the _index of deleted records.
# Behavior: the number of the session is saved when the tub is closed, so a start after a loss of power takes the number
# of the one before. deleted_indexes are compared with the positions of lines. A line that was cut off joins the next
# record's line: both are passed over, and from there on positions are one less than _index, by which donkeycar's own
# tools delete.
# Output seen:
#     sessions: 26-11-29_0
#     read: 0 1 2 3 4 5 6 7 8 11 12 13 14 15 16 17 18 19
#     after delete_records([15]): 0 1 2 3 4 5 6 7 8 11 12 13 14 15 17 18 19
# Exit code: 0 while this holds, 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check donkeycar==5.3.0 2>"$folder/log"
cat > "$folder/car.py" <<'PYTHON'
import os
import sys

import numpy as np
from donkeycar.parts.tub_v2 import Tub

inputs, types = ["cam/image_array", "user/angle", "user/throttle"], ["image_array", "float", "float"]
tub = Tub("tub", inputs, types)
for index in range(10):
    tub.write_record(dict(zip(inputs, [np.full((12, 16, 3), index, np.uint8), index / 1000, 0.5])))
if sys.argv[1] == "battery is pulled":
    os.kill(os.getpid(), 9)
tub.close()
PYTHON
cat > "$folder/run.py" <<'PYTHON'
import subprocess
import sys
from pathlib import Path

from donkeycar.parts.tub_v2 import Tub


def drive(ending: str) -> None:
    subprocess.run([sys.executable, "car.py", ending], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def read(note: str) -> list[int]:
    records = list(Tub("tub", read_only=True))
    print(f"{note}:", *(record["_index"] for record in records))
    return [record["_index"] for record in records]


drive("battery is pulled")
catalog = Path("tub/catalog_0.catalog")
catalog.write_bytes(catalog.read_bytes()[:-30])  # what had not reached the card
drive("tub is closed")
sessions = {record["_session_id"] for record in Tub("tub", read_only=True)}
print("sessions:", *sessions)
before = read("read")
tub = Tub("tub")
tub.delete_records([15])
tub.close()
after = read("after delete_records([15])")
sys.exit(0 if len(sessions) == 1 and set(range(20)) - set(before) == {9, 10} and set(before) - set(after) == {16} else 1)
PYTHON
cd "$folder" && LOGLEVEL=CRITICAL venv/bin/python run.py | grep ":"
