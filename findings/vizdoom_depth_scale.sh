#!/usr/bin/env bash
# How far VizDoom's depth buffer sees depends on the height of the picture: at 144 pixels walls end at 76 of 255.
#
# Versions: vizdoom 1.3.2; Python 3.11. Seen 2026-11-29.
# Guess before: the depth buffer has 0 at the eye to 255 far away, at every resolution.
# Behavior: a step is about 7.16 map units at every resolution, but the depth of walls is cut off at 255 x height / 480.
# A wall that is 186 steps away at 640 x 480 is told as 76 at 256 x 144, as is everything beyond 545 map units. Floors
# and ceilings are not cut off, so that a far floor reads as farther than the wall behind it.
# Output seen (the same view of deadly_corridor, the end of the corridor in the picture's middle):
#     RES_160X120: 63
#     RES_256X144: 76
#     RES_320X240: 127
#     RES_640X480: 186
# Exit code: 0 while this holds, 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check vizdoom==1.3.2
cat > "$folder/run.py" <<'PYTHON'
import os
import sys

import vizdoom

found = []
for size in ("160X120", "256X144", "320X240", "640X480"):
    game = vizdoom.DoomGame()
    game.set_doom_scenario_path(os.path.join(vizdoom.scenarios_path, "deadly_corridor.wad"))
    game.set_doom_map("map01")
    game.set_seed(1)
    game.set_available_buttons([vizdoom.Button.ATTACK])
    game.set_screen_resolution(getattr(vizdoom.ScreenResolution, f"RES_{size}"))
    game.set_depth_buffer_enabled(True)
    game.set_render_hud(False)
    game.set_render_weapon(False)
    game.set_window_visible(False)
    game.init()
    depth = game.get_state().depth_buffer
    found.append(int(depth[depth.shape[0] // 2, depth.shape[1] // 2]))
    print(f"RES_{size}: {found[-1]}")
    game.close()
sys.exit(0 if found == [63, 76, 127, 186] else 1)
PYTHON
cd "$folder" && "$folder/venv/bin/python" run.py 2>"$folder/log"
