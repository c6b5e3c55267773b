#!/usr/bin/env bash
# rosbags reads an MCAP file of ROS 2 messages only if its header has the profile "ros2", and only if it has a footer.
#
# Versions: rosbags 0.11.9, mcap 1.6.0; Python 3.11. Seen 2026-11-29.
# Guess before: messages in CDR with schemas in ros2msg are read, whatever the profile, which MCAP allows to be empty; of
# a file that was cut off the whole chunks are read.
# Behavior: an empty profile, as Foxglove's tools and the Python writer leave it, is refused ("Profile is not ros2."), and so
# is a file without its last bytes ("File end magic is invalid."), as a recorder leaves it that lost power.
# Output seen:
#     profile 'ros2': 1 message
#     profile '': ReaderError: Profile is not ros2.
#     profile 'ros2', cut off: ReaderError: File end magic is invalid.
# Exit code: 0 while this holds, 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check rosbags==0.11.9 mcap==1.6.0
cat > "$folder/run.py" <<'PYTHON'
import sys
from pathlib import Path

from mcap.writer import Writer
from rosbags.rosbag2 import Reader

path = Path(sys.argv[1]) / "a.mcap"


def outcome(profile, missing):
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start(profile=profile)
        schema = writer.register_schema("std_msgs/msg/Bool", "ros2msg", b"bool data\n")
        writer.add_message(writer.register_channel("/a", "cdr", schema), 1, b"\x00\x01\x00\x00\x01", 1)
        writer.finish()
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - missing])
    try:
        with Reader(path) as reader:
            return f"{len(list(reader.messages()))} message"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


found = [outcome("ros2", 0), outcome("", 0), outcome("ros2", 20)]
for name, what in zip(("profile 'ros2'", "profile ''", "profile 'ros2', cut off"), found):
    print(f"{name}: {what}")
expected = ["1 message", "ReaderError: Profile is not ros2.", "ReaderError: File end magic is invalid."]
sys.exit(0 if found == expected else 1)
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder"
