#!/usr/bin/env bash
# VizDoom ends the whole Python process on a map without a start for a single player.
#
# Versions: vizdoom 1.3.2; Python 3.11. Seen 2026-11-29.
# Guess before: DoomGame.init() raises an exception where a map can't be played.
# Behavior: on maps that have deathmatch starts alone (cig, cig_with_unknown and multi_duel of its own scenarios),
# without "+host" in the game's arguments, init() ends the calling process by a segmentation fault. No try helps.
# Output seen (exit status; -11 is SIGSEGV):
#     basic: 0
#     cig: -11
#     multi_duel: -11
# Exit code: 0 while this holds, 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check vizdoom==1.3.2
cat > "$folder/run.py" <<'PYTHON'
import subprocess
import sys

CODE = """
import os
import sys

import vizdoom

game = vizdoom.DoomGame()
game.set_doom_scenario_path(os.path.join(vizdoom.scenarios_path, sys.argv[1] + ".wad"))
game.set_doom_map("map01")
game.set_available_buttons([vizdoom.Button.ATTACK])
game.set_window_visible(False)
try:
    game.init()
except Exception:
    sys.exit(1)
"""
found = []
for name in ("basic", "cig", "multi_duel"):
    found.append(subprocess.run([sys.executable, "-c", CODE, name], timeout=60, check=False).returncode)
    print(f"{name}: {found[-1]}")
sys.exit(0 if found == [0, -11, -11] else 1)
PYTHON
cd "$folder" && "$folder/venv/bin/python" run.py 2>"$folder/log"
