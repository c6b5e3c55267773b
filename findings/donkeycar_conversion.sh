#!/usr/bin/env bash
# donkeycar's script that converts a tub of version 1 to version 2 ends with AttributeError for every tub.
#
# Versions: donkeycar 5.3.0; Python 3.11. Seen 2026-11-29.
# Guess before: a tub that donkeycar 3 recorded can be converted with the donkeycar of today, and then be imported.
# Behavior: convert_to_tub_v2.py hands the items of meta.json, (key, value), to Tub, which since 2022 splits each at ":"
# as text. A tub of version 1 always has the item "start", so none is converted. (By its source, the script of 2020 to 2022
# gave each record the time of its conversion, and lost the first record after each gap.)
# Output seen:
#     exit code 1: AttributeError: 'tuple' object has no attribute 'split'
# Exit code: 0 while this holds, 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check donkeycar==5.3.0 2>"$folder/log"
cat > "$folder/run.py" <<'PYTHON'
import importlib.util
import subprocess
import sys

from donkeycar.parts.datastore import Tub
import numpy as np

inputs, types = ["cam/image_array", "user/angle", "user/throttle"], ["image_array", "float", "float"]
old = Tub("old", inputs, types)
for index in range(3):
    old.put_record(dict(zip(inputs, [np.full((12, 16, 3), index, np.uint8), 0.1, 0.5])))
script = importlib.util.find_spec("scripts.convert_to_tub_v2").origin
run = subprocess.run([sys.executable, script, "--tub=old", "--output=new"], capture_output=True, text=True)
line = next((line for line in run.stderr.splitlines() if "Error" in line), "no error")
print(f"exit code {run.returncode}: {line}")
sys.exit(0 if run.returncode and line.startswith("AttributeError") else 1)
PYTHON
cd "$folder" && LOGLEVEL=CRITICAL venv/bin/python run.py | grep "exit code"
