"""Policies for `terra record source=gym env=terra.recording.doom:Doom-v0`: one explores, one presses keys at random.

    terra record ... policy=terra.recording.doom.players:explore
    terra record ... policy=terra.recording.doom.players:wander

A policy sees the environment's observation, which tells more than the picture does.
"""

import numpy as np
from gymnasium import spaces
from jaxtyping import Float32, Int8

from terra.recording.doom.environment import DEPTHS, KEYS, OBSERVATION

_AT = {name: index for index, name in enumerate(OBSERVATION)}
_DEPTH = slice(_AT["depth_0"], _AT["depth_0"] + DEPTHS)
_HELD = slice(_AT["held_forward"], _AT["held_forward"] + len(KEYS))
_FORWARD, _BACKWARD, _LEFT, _RIGHT, _FIRE = range(len(KEYS))

_NEAR = 7.0  # of the depth buffer, about 56 map units: a wall so near is turned away from
_SLOW = 1.0  # map units a tic: who walks slower is stuck
_HOLD = 1 / 6  # chance of another key, each frame

Observation = Float32[np.ndarray, " numbers"]
Pressed = Int8[np.ndarray, " keys"]


def explore(observation: Observation, space: spaces.MultiBinary, rng: np.random.Generator) -> Pressed:
    """Walk to where there is room, turn away from walls, stop and step back at times, fire at monsters ahead."""
    depths, held = observation[_DEPTH], observation[_HELD]
    speed = float(np.hypot(observation[_AT["velocity_x"]], observation[_AT["velocity_y"]]))
    ahead = float(depths[DEPTHS // 2 - 2 : DEPTHS // 2 + 2].min())
    turned = _LEFT if held[_LEFT] else _RIGHT if held[_RIGHT] else None
    blocked = ahead < _NEAR or (bool(held[_FORWARD]) and speed < _SLOW)
    keys = np.zeros(len(KEYS), np.int8)

    away = _away(depths)
    if blocked:
        # Who turns goes on turning: the deepest stripe alternates in a corner.
        keys[turned if turned is not None else _LEFT if away < 0 else _RIGHT] = 1
    elif turned is not None and rng.random() < 0.4:
        keys[turned] = 1
    elif abs(away) > 1 and rng.random() < 0.35:
        keys[_LEFT if away < 0 else _RIGHT] = 1
    elif rng.random() < 0.02:
        keys[_LEFT if rng.random() < 0.5 else _RIGHT] = 1

    if rng.random() < (0.85 if held[_BACKWARD] else 0.1 if blocked else 0.004):
        keys[_BACKWARD] = 1
    elif not blocked or rng.random() < 0.2:
        rested = not held[_FORWARD] and not held[_BACKWARD] and turned is None
        keys[_FORWARD] = rng.random() < (0.2 if rested else 0.985)
    if abs(observation[_AT["target"]]) < 0.15:
        keys[_FIRE] = rng.random() < 0.6
    else:
        keys[_FIRE] = rng.random() < (0.4 if held[_FIRE] else 0.006)
    return keys


def wander(observation: Observation, space: spaces.MultiBinary, rng: np.random.Generator) -> Pressed:
    """Press keys at random and hold each for a while, forward more often than backward."""
    held = observation[_HELD].astype(np.int8)
    keys = held.copy()
    if rng.random() < _HOLD:
        keys[[_FORWARD, _BACKWARD]] = ((1, 0), (0, 1), (0, 0))[rng.choice(3, p=(0.55, 0.2, 0.25))]
    if rng.random() < _HOLD:
        keys[[_LEFT, _RIGHT]] = ((1, 0), (0, 1), (0, 0))[rng.choice(3, p=(0.3, 0.3, 0.4))]
    if rng.random() < _HOLD:
        keys[_FIRE] = rng.random() < 0.12
    return keys


def _away(depths: Float32[np.ndarray, " stripes"]) -> float:
    """Stripes from the picture's middle to where there is clearly most room, negative at the left."""
    least = np.minimum(np.minimum(depths[:-2], depths[1:-1]), depths[2:])  # a player is wider than a stripe
    offsets = np.arange(len(least)) - (len(least) - 1) / 2
    return float(offsets[np.argmax(least - 0.5 * np.abs(offsets))])
