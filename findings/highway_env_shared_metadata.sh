#!/usr/bin/env bash
# Making one environment of highway-env changes the render_fps of those that were made before.
#
# Versions: highway-env 1.12.1, gymnasium 1.4.0; Python 3.11. Seen 2026-11-29.
# Guess before: an environment's metadata is its own, or at least its class's.
# Behavior: each environment writes its render_fps into one dictionary of their common base class, so that the last
# one made decides for all, and a recording of the first one gets the rate of the last.
# Output seen:
#     parking-v0: render_fps 10
#     parking-v0, once highway-v0 was made: render_fps 2
# Exit code: 0 while this holds, 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check highway-env==1.12.1 gymnasium==1.4.0
cat > "$folder/run.py" <<'PYTHON'
import sys

import gymnasium

parking = gymnasium.make("highway_env:parking-v0", render_mode="rgb_array")
before = parking.metadata["render_fps"]
print(f"parking-v0: render_fps {before}")
gymnasium.make("highway_env:highway-v0", render_mode="rgb_array")
after = parking.metadata["render_fps"]
print(f"parking-v0, once highway-v0 was made: render_fps {after}")
sys.exit(0 if (before, after) == (10, 2) else 1)
PYTHON
cd "$folder" && SDL_VIDEODRIVER=dummy "$folder/venv/bin/python" -W ignore run.py 2>"$folder/log"
