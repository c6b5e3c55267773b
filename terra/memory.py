"""Spatial memory: where a rollout's camera was at each frame, and which earlier frames a window retrieves by pose.

    window   [M memory frames][frames that the window reads again][frames to be generated]

A pose is [x, y, heading] in meters and radians (counter-clockwise, never wrapped), in the axes of the rollout's first
frame (x forward, y left). Poses follow from the actions alone (`advance`), and memory frames from poses alone
(`choose`), so that every engine, a batch, a fork and a resumed rollout remember the same. On five drives recorded in
the town, at 10 frames a second, poses from actions were off by 0.2, 0.7 and 1.5 m after 10, 20 and 40 s (median; 95th
percentile: 1.3, 2.7 and 3.5 m) and by 0.3, 0.5 and 0.3 degrees (95th percentile: 1.7, 1.8 and 2.0).

Each memory frame is for a time of the window (`memory_times`): it shows most of what will be in view from where the
car will be then, on the path of its next action (`expected_poses`). So what a memory frame is for follows from its
position in the window, and a model need not compare poses to know it. For the model a memory frame is a frame of the
prompt. The slots after it hold a place action (`place_action`): the memory frame's pose, seen from the expected one.
All its times are 0, which no action of a drive has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64
from pydantic import Field

from terra.actions import Waypoints
from terra.errors import ConfigError
from tokenizer.settings import Settings

if TYPE_CHECKING:
    # Settings and config.json hold a `MemoryRule`, and are checked before torch is imported.
    from torch import Tensor

MOST_CANDIDATES = 3000
"""How many of a rollout's newest frames can be remembered, beside a map's: five minutes at 10 frames a second."""

PLACE_METERS = 2.0
"""Distance between the points of a place action, along the heading."""

_MAX_CURVATURE = 0.6  # 1/m; no car turns more tightly, and points that lie closer together are noise
_CURVE_METERS = 0.3  # m; over shorter arcs the change of a curvature is noise
_NEAREST = 4.0  # m; ground that is closer lies below the picture
_DISTANCES, _ANGLES = 4, 5  # of the points that stand for a view
_STANDING_METERS = 0.01  # a car that moves less keeps its heading
_GRID = 1e-6  # shares are compared after rounding to it: equal ones then stay equal in other axes
_CHUNK = 1 << 17  # weights computed at a time: what a processor's cache holds

Pose = Float64[np.ndarray, " 3"]
Poses = Float64[np.ndarray, "frames 3"]

MemoryCount = Annotated[int, Field(ge=1, le=64)]
FieldOfView = Annotated[float, Field(ge=10, le=170)]
ViewRange = Annotated[float, Field(gt=_NEAREST, le=1000)]
Kind = Literal["view", "recent"]


class MemoryRule(Settings):
    """How many memory frames a window has, and how they are chosen.

    Attributes:
        frames: memory frames of a window (M), 1 to 64.
        field_of_view: the camera's horizontal angle of view, 10 to 170 degrees.
        range: distance up to which what is seen counts, more than 4 m, up to 1000 m.
        kind: "view" for the frames that saw most of what will be in view, "recent" for the newest ones, oldest first.
    """

    frames: MemoryCount
    field_of_view: FieldOfView = 90.0
    range: ViewRange = 40.0
    kind: Kind = "view"


def memory_in_use(trained: MemoryRule | None, wanted: Literal["auto"] | int) -> MemoryRule | None:
    """The rule of rollouts, or None for rollouts without memory.

    Args:
        trained: the rule of the model's training; None for a model without memory.
        wanted: the setting `memory`: "auto", or a number of memory frames, 0 or more.

    Raises:
        ConfigError: more memory frames than the model was trained with.
    """
    if wanted == "auto":
        return trained
    most = memory_frames(trained)
    if wanted > most:
        expected = f"at most {most}, as in training" if most else "0 or auto (the model was trained without memory)"
        raise ConfigError(f"memory: expected {expected}, got {wanted}")
    return trained.replace(frames=wanted) if trained is not None and wanted else None


def memory_frames(*rules: MemoryRule | None) -> int:
    """Memory frames of a window, the most of several rules; 0 without a rule."""
    return max((rule.frames for rule in rules if rule is not None), default=0)


def advance(pose: Pose, action: Float[np.ndarray, "slots 3"], space: Waypoints, fps: float) -> Pose:
    """The pose one frame after `pose`.

    The car is taken to drive from its heading through the action's first two waypoints, forward or in reverse, with a
    speed that changes linearly in time and a curvature that changes linearly along the path, 0.6 1/m at most.

    Args:
        pose: [x, y, heading].
        action: rows of [lateral y (left positive), forward x, time t].
        space: what the action means; times are taken from it, not from the rows. Without a time above 0 nothing moves.
        fps: frames a second.
    """
    slots = [slot for slot, time in enumerate(space.times) if time > 0][:2]
    if not slots:
        return pose.copy()
    arcs = [_arc(float(action[slot, 1]), float(action[slot, 0])) for slot in slots]
    times = [space.times[slot] for slot in slots]
    (length, curvature), (farther, other) = arcs[0], arcs[-1]
    speed, change = length / times[0], 0.0
    if len(slots) == 2:
        change = (farther / times[1] - speed) / (times[1] - times[0])
    distance = (speed + change * (1 / fps - times[0])) / fps
    distance = distance if distance * length > 0 else 0.0  # it may stop, and does not turn round
    if min(abs(length), abs(farther - length)) > _CURVE_METERS:
        # An arc has the curvature that a path of linear curvature has at a third of its length.
        curvature += (other - curvature) / (farther - length) * (1.5 * distance - length)
    turn = distance * min(_MAX_CURVATURE, max(-_MAX_CURVATURE, curvature))
    ahead, aside = distance * _sinc(turn), distance * math.sin(turn / 2) * _sinc(turn / 2)
    cosine, sine = math.cos(pose[2]), math.sin(pose[2])
    return np.array([pose[0] + ahead * cosine - aside * sine, pose[1] + ahead * sine + aside * cosine, pose[2] + turn])


def _arc(forward: float, left: float) -> tuple[float, float]:
    """Signed length (m) and curvature (1/m) of the arc from the car to a point that is tangent to its heading."""
    chord = math.hypot(forward, left)
    curvature = 2 * left / chord**2 if chord > 0 else 0.0
    curvature = min(_MAX_CURVATURE, max(-_MAX_CURVATURE, curvature))
    half = math.asin(min(1.0, max(-1.0, chord * curvature / 2)))
    return math.copysign(chord / _sinc(half), forward), curvature


def poses_along(actions: Iterable[Float[np.ndarray, "slots 3"]], space: Waypoints, fps: float) -> Poses:
    """The poses of a rollout's frames, which are one more than its actions; the first is [0, 0, 0]."""
    poses = [np.zeros(3)]
    for action in actions:
        poses.append(advance(poses[-1], action, space, fps))
    return np.stack(poses)


def relative(
    poses: Float64[np.ndarray, "*batch 3"], origin: Float64[np.ndarray, "*batch 3"]
) -> Float64[np.ndarray, "*batch 3"]:
    """Poses as seen from another pose, in its axes; both broadcast. Headings are subtracted, not wrapped."""
    moved = poses - origin
    cosine, sine = np.cos(origin[..., 2]), np.sin(origin[..., 2])
    x, y = moved[..., 0] * cosine + moved[..., 1] * sine, moved[..., 1] * cosine - moved[..., 0] * sine
    return np.stack([x, y, moved[..., 2]], axis=-1)


def place_action(
    expected: Float64[np.ndarray, "*batch 3"], seen_from: Float64[np.ndarray, "*batch 3"], space: Waypoints
) -> Float32[np.ndarray, "*batch slots 3"]:
    """The action behind a memory frame: where it was seen from, in the axes of the pose that it was chosen for.

    Row r is [y, x, 0]: the memory frame's position plus r * 2 m along its heading. A frame of the expected pose itself
    has [0, 2 r, 0].
    """
    seen = relative(seen_from, expected)[..., None, :]
    along = PLACE_METERS * np.arange(space.shape[0])
    x, y = seen[..., 0] + along * np.cos(seen[..., 2]), seen[..., 1] + along * np.sin(seen[..., 2])
    return np.stack([y, x, np.zeros_like(x)], axis=-1).astype(np.float32)


def memory_times(count: int, num_generated: int, fps: float) -> Float64[np.ndarray, " memory"]:
    """The times (s) of a window that its memory frames are for: the middles of equal parts of the generated frames.

    Times are counted from the last given frame.
    """
    return (0.5 + (np.arange(count) + 0.5) / count * num_generated) / fps


def expected_poses(
    pose: Pose, action: Float[np.ndarray, "slots 3"], space: Waypoints, times: Float64[np.ndarray, " moments"]
) -> Float64[np.ndarray, "moments 3"]:
    """Where the car will be `times` seconds after `pose`, on the path of its next action.

    Positions lie on straight lines between the waypoints; the heading is the direction of the line, or in reverse the
    opposite one. Times after the last waypoint mean the last waypoint.
    """
    knots = np.concatenate([[0.0], space.times])
    points = np.concatenate([np.zeros((1, 2)), np.asarray(action, np.float64)[:, 1::-1]])
    headings = [0.0]
    for step in np.diff(points, axis=0):
        heading = headings[-1]
        if math.hypot(*step) >= _STANDING_METERS:
            turn = math.remainder(math.atan2(step[1], step[0]) - heading, math.tau)
            if abs(turn) > math.pi / 2:  # in reverse
                turn = math.remainder(turn + math.pi, math.tau)
            heading += turn
        headings.append(heading)
    forward, left = (np.interp(times, knots, each) for each in points.T)
    line = np.searchsorted(knots, times, side="left").clip(0, len(knots) - 1)
    cosine, sine = math.cos(pose[2]), math.sin(pose[2])
    x, y = pose[0] + forward * cosine - left * sine, pose[1] + forward * sine + left * cosine
    return np.stack([x, y, pose[2] + np.array(headings)[line]], axis=-1)


def choose(
    rule: MemoryRule,
    poses: Float64[np.ndarray, "windows frames 3"],
    num_candidates: Int64[np.ndarray, " windows"],
    expected: Float64[np.ndarray, "windows memory 3"],
) -> Int64[np.ndarray, "windows memory"]:
    """The memory frames of some windows: rows of `poses`, one for each expected pose, in their order; all different.

    With kind="recent" they are the newest candidates. Otherwise points on a flat ground in front of an expected pose
    stand for its field of view; occlusion is ignored. A frame covers a point that lies in its own field of view,
    weighted by how similar distance and direction are. Points that the window's own frames cover count as covered
    already. The candidate that adds most coverage is retrieved, the last of equal ones; so the newest one where none
    adds anything.

    Args:
        rule: how frames are chosen.
        poses: the candidates (a map's frames, then the rollout's, oldest first), then the frames that the window has
            anyway; then any number of rows of NaN.
        num_candidates: how many of each window's rows are candidates.
        expected: see `expected_poses`; as many as `rule.frames`.

    Raises:
        ValueError: a window has fewer candidates than `rule.frames`.
    """
    import torch

    few = num_candidates < rule.frames
    if few.any():
        raise ValueError(f"candidates: expected at least {rule.frames}, got {int(num_candidates[few][0])}")
    if rule.kind == "recent":
        return num_candidates[:, None] - rule.frames + np.arange(rule.frames)
    points = rule.frames * _DISTANCES * _ANGLES
    size = max(1, _CHUNK // (poses.shape[1] * points))
    pieces = [
        _most_seen(rule, *(torch.from_numpy(each[start : start + size]) for each in (poses, num_candidates, expected)))
        for start in range(0, len(poses), size)
    ]
    return torch.cat(pieces).numpy() if pieces else np.zeros((0, rule.frames), np.int64)


def _most_seen(
    rule: MemoryRule,
    poses: Float64[Tensor, "windows frames 3"],
    num_candidates: Int64[Tensor, " windows"],
    expected: Float64[Tensor, "windows memory 3"],
) -> Int64[Tensor, "windows memory"]:
    import torch

    order = torch.arange(poses.shape[1])
    is_candidate = (order < num_candidates[:, None])[..., None]
    weights = _coverage(rule, poses, expected)
    own = weights.masked_fill(is_candidate, 0.0).amax(1, keepdim=True)
    gains = weights.sub_(own).clamp_(min=0.0).unflatten(-1, (rule.frames, -1)).mean(-1)
    # One whole number for gain and age: the highest is the greatest gain, of equal ones the newest.
    ranked = (gains / _GRID).round_().long() * len(order) + order[:, None]
    ranked.masked_fill_(~is_candidate, -1)
    rows, picked = torch.arange(len(poses)), []
    for index in range(rule.frames):
        frame = ranked[..., index].argmax(1)
        ranked[rows, frame] = -1
        picked.append(frame)
    return torch.stack(picked, 1)


def _coverage(
    rule: MemoryRule, poses: Float64[Tensor, "windows frames 3"], targets: Float64[Tensor, "windows targets 3"]
) -> Float64[Tensor, "windows frames points"]:
    """How well each frame shows each point in front of the targets, 0 to 1; 0 for poses of NaN."""
    import torch

    poses = torch.cat([poses[..., :2] - targets[:, :1, :2], poses[..., 2:]], -1)  # far from 0, rounding would count
    targets = torch.cat([targets[..., :2] - targets[:, :1, :2], targets[..., 2:]], -1)
    half = math.radians(rule.field_of_view) / 2
    distance = torch.logspace(math.log(_NEAREST), math.log(rule.range), _DISTANCES, math.e, dtype=torch.float64)
    angle = (torch.arange(_ANGLES, dtype=torch.float64) * 2 + 1 - _ANGLES) / _ANGLES * half
    direction = targets[..., 2, None] + angle
    ray = torch.stack([direction.cos(), direction.sin()], -1)[..., None, :].expand(-1, -1, -1, _DISTANCES, -1)
    points = (targets[:, :, None, None, :2] + distance[:, None] * ray).flatten(1, 3)
    ray, distance = ray.flatten(1, 3), distance.expand(*ray.shape[:-1]).flatten(1)
    # All three are sums of products: positions of points in the frames' axes, and along the targets' rays.
    x, y, heading = poses.unbind(-1)
    cosine, sine, one = heading.cos(), heading.sin(), torch.ones_like(x)
    columns = torch.stack([*points.unbind(-1), torch.ones_like(distance)], 1)
    forward = torch.stack([cosine, sine, -x * cosine - y * sine], -1) @ columns
    left = torch.stack([-sine, cosine, x * sine - y * cosine], -1) @ columns
    along = torch.stack([-x, -y, one], -1) @ torch.stack([*ray.unbind(-1), (points * ray).sum(-1)], 1)
    squared = forward.square().add_(left.square())
    is_seen = (left.abs_() <= forward.mul_(math.tan(half))).logical_and_(squared <= rule.range**2 * (1 + 1e-9))
    is_seen.logical_and_(squared >= 1.0)
    from_there = squared.sqrt_()
    # Half the angle between the two directions, squared cosine: 1 for the same, 1/2 across, 0 for opposite ones.
    alike = along.div_(from_there).add_(1.0).mul_(0.5)
    ratio = from_there.div_(distance[:, None])
    alike.mul_(torch.minimum(ratio, ratio.reciprocal()))
    return torch.where(is_seen, alike, 0.0)


def _sinc(angle: float) -> float:
    return math.sin(angle) / angle if angle else 1.0


def covered(
    rule: MemoryRule, poses: Float64[np.ndarray, "frames 3"], pose: Float64[np.ndarray, " 3"]
) -> Float64[np.ndarray, " frames"]:
    """How much of what is in view from `pose` each frame shows, 0 to 1; 1 for a frame of the same pose."""
    import torch

    return _coverage(rule, torch.from_numpy(poses)[None], torch.from_numpy(pose)[None, None])[0].mean(-1).numpy()
