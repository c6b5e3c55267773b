#!/usr/bin/env bash
# The render_fps of a Gymnasium environment is often not its steps a second: videos play 1.5 to 4 times as fast.
#
# Versions: gymnasium 1.4.0, highway-env 1.12.1, ale-py 0.12.1, vizdoom 1.3.2; Python 3.11. Seen 2026-11-29.
# Guess before: a frame for each step, shown at metadata["render_fps"] as RecordVideo does, is the world at its own speed.
# Behavior: highway-env sets render_fps to twice its decisions a second. ALE's is 30 and VizDoom's 35, whatever the
# frameskip, while the console makes 60 frames a second and Doom 35 tics. Pendulum's is 30, and its step is 0.05 s.
# Output seen (render_fps, steps in a second of the world as measured from its state):
#     highway-v0: render_fps 2, steps a second 1.00
#     ALE/Pong-v5: render_fps 30, steps a second 15.00
#     VizdoomBasic-v1 with frame_skip=4: render_fps 35, steps a second 8.75
#     Pendulum-v1: render_fps 30, steps a second 20.00
# Exit code: 0 while this holds, 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  "gymnasium[classic-control]==1.4.0" highway-env==1.12.1 ale-py==0.12.1 vizdoom==1.3.2
cat > "$folder/run.py" <<'PYTHON'
import sys

import gymnasium
import numpy as np


def make(name: str, **options):
    env = gymnasium.make(name, render_mode="rgb_array", disable_env_checker=True, **options)
    env.reset(seed=0)
    return env, env.unwrapped


def highway():
    env, inner = make("highway_env:highway-v0")
    start, speed = inner.vehicle.position[0], inner.vehicle.speed
    env.step(1)  # keep lane and speed
    return env, speed / (inner.vehicle.position[0] - start)


def pong():
    env, inner = make("ale_py:ALE/Pong-v5")
    start = inner.ale.getEpisodeFrameNumber()
    env.step(0)
    return env, 60 / (inner.ale.getEpisodeFrameNumber() - start)


def doom():
    env, inner = make("vizdoom.gymnasium_wrapper:VizdoomBasic-v1", frame_skip=4)
    start = inner.game.get_episode_time()
    env.step(0)
    return env, 35 / (inner.game.get_episode_time() - start)


def pendulum():
    env, inner = make("Pendulum-v1")
    start = inner.state[0]
    env.step(np.zeros(1, np.float32))
    angle, speed = inner.state
    return env, speed / (angle - start)


found = []
names = ("highway-v0", "ALE/Pong-v5", "VizdoomBasic-v1 with frame_skip=4", "Pendulum-v1")
for name, measure in zip(names, (highway, pong, doom, pendulum)):
    env, rate = measure()
    found.append((env.metadata["render_fps"], round(float(rate), 2)))
    print(f"{name}: render_fps {found[-1][0]}, steps a second {found[-1][1]:.2f}")
    env.close()
sys.exit(0 if found == [(2, 1.0), (30, 15.0), (35, 8.75), (30, 20.0)] else 1)
PYTHON
cd "$folder" && SDL_VIDEODRIVER=dummy "$folder/venv/bin/python" -W ignore run.py 2>"$folder/log"
