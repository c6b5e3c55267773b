"""Policies for `terra record source=gym env=terra.recording.pusht:PushT-v0`: one pushes the block to its goals.

    terra record ... policy=terra.recording.pusht.players:expert
    terra record ... policy=terra.recording.pusht.players:disturbed
    terra record ... policy=terra.recording.pusht.players:weak

The expert knows the block's outline and how it yields: PushT's block has no momentum, so that the disc, where it
touches, moves it as one impulse would.
"""

from dataclasses import dataclass

import numpy as np
from gymnasium import spaces
from jaxtyping import Bool, Float64

from terra.recording.pusht.environment import OBSERVATION

_AT = {name: index for index, name in enumerate(OBSERVATION)}
_AGENT = slice(_AT["agent_x"], _AT["agent_y"] + 1)
_BLOCK = slice(_AT["block_x"], _AT["block_angle"] + 1)
_VELOCITY = slice(_AT["agent_vx"], _AT["agent_vy"] + 1)
_GOAL = slice(_AT["goal_x"], _AT["goal_angle"] + 1)
_LAST = slice(_AT["last_dx"], _AT["last_dy"] + 1)

_SCALE = 100.0  # pixels of an action of 1
_RADIUS = 15.0  # pixels, of the disc
_INERTIA = 3000.0  # of the block about its center of gravity, over its mass; square pixels
_CENTER = np.array([0.0, 45.0])  # of gravity, in the block's own axes
_AROUND = 104.0  # pixels from the center of gravity at which the disc passes the block by
_SPACING = 10.0  # pixels between two contacts that are tried
_ARM = 60.0  # pixels that a radian counts as
_SIDE = (24.0, 488.0)  # where the disc may go
# The largest number of an action, before noise: the standard deviation is then 0.23, in published demonstrations 0.20.
_MAX_ACTION = 0.3
_REACH = np.array([8.0, 16.0, 32.0])  # pixels, pushes that are tried
_TURNS, _HELD = 20, 5  # steps after which the disturbed expert loses or regains control; for which it holds an action

Observation = Float64[np.ndarray, " numbers"]
Points = Float64[np.ndarray, "points 2"]
Point = Float64[np.ndarray, "2"]


@dataclass(frozen=True, eq=False)
class _Contacts:
    """Points of the outline of the T and the outward normals there, in the block's own axes."""

    points: Points
    normals: Points


def _outline() -> _Contacts:
    corners = np.array(
        [(-60, 0), (60, 0), (60, 30), (15, 30), (15, 120), (-15, 120), (-15, 30), (-60, 30)], dtype=np.float64
    )
    points, normals = [], []
    for start, end in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        along = (end - start) / np.hypot(*(end - start))
        count = max(int(np.hypot(*(end - start)) / _SPACING), 2)
        # Not at the ends: there the disc slips off.
        points.append(start + np.linspace(0.12, 0.88, count)[:, None] * (end - start))
        normals.append(np.tile([along[1], -along[0]], (count, 1)))
    return _Contacts(np.concatenate(points), np.concatenate(normals))


_CONTACTS = _outline()


def expert(observation: Observation, space: spaces.Box, rng: np.random.Generator) -> Float64[np.ndarray, "2"]:
    """Push the block to its goal, the push first that brings it nearest; a little noise is added."""
    agent, (x, y, angle) = observation[_AGENT], observation[_BLOCK]
    turn = _turn(angle)
    center = np.array([x, y]) + turn @ _CENTER
    points, normals = _CONTACTS.points @ turn.T + (x, y), _CONTACTS.normals @ turn.T
    gains = _gains(points, normals, center, observation[_BLOCK], observation[_GOAL])
    ready = points + normals * (_RADIUS + 5)
    inside = ((ready > _SIDE[0]) & (ready < _SIDE[1])).all(axis=1)
    distances = np.hypot(*(ready - agent).T)
    blocked = _blocked(agent, ready, center)
    score = np.where(inside, gains - 0.05 * (distances + 80 * blocked), -np.inf)
    best = int(score.argmax())
    at, normal = points[best], normals[best]
    offset = agent - at
    if offset @ normal > 0 and abs(offset @ [normal[1], -normal[0]]) < 7 and offset @ normal < _RADIUS + 16:
        target = at - normal * 22  # into the block, which yields
    elif _touches(agent, points) and distances[best] >= 30:
        target = agent + _off(agent, center)
    else:
        target = _detour(agent, ready[best], center) if blocked[best] else ready[best]
    target = np.clip(target, *_SIDE)
    action = (target - agent - 0.04 * observation[_VELOCITY]) / _SCALE * 2.5
    most = max(float(np.abs(action).max()), 1e-9)
    action *= min(1.0, _MAX_ACTION / most)
    return np.clip(action + rng.normal(0, 0.03, 2), -1, 1).astype(np.float32)


def disturbed(observation: Observation, space: spaces.Box, rng: np.random.Generator) -> Float64[np.ndarray, "2"]:
    """The expert for two seconds, then random actions for two seconds, each held for half a second, and so on.

    Such episodes show what happens near the block when somebody does what the expert would not do, as the candidates of
    a planner do.
    """
    steps = int(observation[_AT["steps"]])
    if steps // _TURNS % 2 == 0:
        return expert(observation, space, rng)
    if steps % _HELD:
        return observation[_LAST].astype(np.float32)
    return np.clip(rng.normal(0, rng.uniform(0.1, 0.4), 2), -1, 1).astype(np.float32)


def weak(observation: Observation, space: spaces.Box, rng: np.random.Generator) -> Float64[np.ndarray, "2"]:
    """Go anywhere within 100 pixels of the block, another place each time: it is touched often and to no end."""
    block, agent = observation[_BLOCK][:2], observation[_AGENT]
    target = np.clip(agent + rng.uniform(-1, 1, 2) * _SCALE, block - _SCALE, block + _SCALE)
    return np.clip((target - agent) / _SCALE, -1, 1).astype(np.float32)


def _gains(
    points: Points,
    normals: Points,
    center: Point,
    pose: Float64[np.ndarray, "3"],
    goal: Float64[np.ndarray, "3"],
) -> Float64[np.ndarray, " points"]:
    """By how many pixels a push at each point brings the block nearer to its goal, the best of several lengths.

    A push of length u against the normal n at the offset r from the center of gravity is an impulse
    j = u / (1 + (r x n)^2 / inertia), which moves the center by -j n and turns the block by -j (r x n) / inertia.
    """
    arms = points - center
    levers = arms[:, 0] * normals[:, 1] - arms[:, 1] * normals[:, 0]
    impulses = _REACH[:, None] / (1 + levers**2 / _INERTIA)
    aim = goal[:2] + _turn(goal[2]) @ _CENTER
    moved = center - impulses[..., None] * normals
    turned = pose[2] - impulses * levers / _INERTIA
    now = _distance(center[None], np.array([pose[2]]), aim, goal[2])
    return (now - _distance(moved, turned, aim, goal[2])).max(axis=0)


def _distance(centers: np.ndarray, angles: np.ndarray, aim: Point, goal_angle: float) -> np.ndarray:
    """Pixels to a goal, a turn counted as the way of a point at a distance of `_ARM`."""
    turns = (angles - goal_angle + np.pi) % (2 * np.pi) - np.pi
    return np.sqrt(((centers - aim) ** 2).sum(axis=-1) + (_ARM * turns) ** 2)


def _blocked(agent: Point, targets: Points, center: Point) -> Bool[np.ndarray, " points"]:
    """Whether the way from the disc to each target leads over the block, which is taken for a disc."""
    ways = targets - agent
    share = np.clip(((center - agent) * ways).sum(axis=1) / np.maximum((ways**2).sum(axis=1), 1e-9), 0, 1)
    passing = np.hypot(*(agent + share[:, None] * ways - center).T)
    return passing < np.minimum(np.hypot(*(targets - center).T) - 4, _RADIUS + 50)


def _touches(agent: Point, points: Points) -> bool:
    """Whether the disc touches the block, or nearly so."""
    return bool(np.hypot(*(points - agent).T).min() < _RADIUS + 3)


def _off(agent: Point, center: Point) -> Point:
    """A way off the block."""
    away = agent - center
    return away / max(float(np.hypot(*away)), 1e-9) * 40


def _detour(agent: Point, target: Point, center: Point) -> Point:
    """The next point of the way around the block, along a circle, on the side where it is shorter."""
    here, there = (np.arctan2(*(point - center)[::-1]) for point in (agent, target))
    way = (there - here + np.pi) % (2 * np.pi) - np.pi
    angle = here + np.clip(way, -0.6, 0.6)
    return center + _AROUND * np.array([np.cos(angle), np.sin(angle)])


def _turn(angle: float) -> Float64[np.ndarray, "2 2"]:
    """The rotation from the block's axes to the picture's."""
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
