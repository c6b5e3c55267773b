"""Reads the actions of a rollout from a file, at the model's rate; needs no torch."""

from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float32, Float64

from terra.actions import ActionSpace, ActionTrack, Waypoints, load_actions, require_waypoints
from terra.errors import ActionError, ConfigError
from terra.trajectory import Trajectory, load_trajectory
from tokenizer.limits import LIMITS, Limits

ActionRows = Float32[np.ndarray, "steps slots action_dim"]

Paths = Float64[np.ndarray, "steps points 2"]
"""The path [x forward, y left] in meters of each frame but a rollout's last, in the frame's own ego frame."""


Drawn = Paths | list[str]
"""What an overlay shows of each action: its path, or in worlds without poses its words."""


def action_field(space: ActionSpace) -> Literal["trajectory", "actions"]:
    """The name by which settings, requests and errors call the file of a world's actions."""
    return "trajectory" if isinstance(space, Waypoints) else "actions"


def action_file(space: ActionSpace, *, trajectory: Path | None, actions: Path | None) -> Path:
    """The file of the actions, of two settings the one that suits the model's space. Raises ConfigError."""
    given = {"trajectory": trajectory, "actions": actions}
    wanted = action_field(space)
    other = "actions" if wanted == "trajectory" else "trajectory"
    path = given[wanted]
    if path is None or given[other] is not None:
        got = "nothing" if given[other] is None else f"{other}=" if path is None else f"{other}= as well"
        raise ConfigError(f"{wanted}: expected the file of the actions, {space.title}, got {got}")
    return path


def read_action_file(
    path: str | Path,
    space: ActionSpace,
    fps: float,
    num_frames: int,
    *,
    sample_id: int | str | None = None,
    limits: Limits = LIMITS,
) -> tuple[ActionRows, Drawn]:
    """The `num_frames` - 1 actions of a rollout from a file of any rate, and what an overlay shows of them.

    Args:
        path: where actions are waypoints a trajectory, see `terra.trajectory`; else see `terra.actions.files`.
        space: what the world model's actions mean.
        fps: the world model's frames a second.
        num_frames: frames of the rollout.
        sample_id: which line of a trajectory's .jsonl.
        limits: bounds on what is read.

    Raises:
        ActionError: the file can't be read, is too short, or has actions of another space.
        ConfigError: `num_frames` below 1.
    """
    if isinstance(space, Waypoints):
        drive = load_trajectory(path, sample_id=sample_id, seconds=num_frames / fps, limits=limits)
        return track_rows(drive, num_frames, space, fps)
    if sample_id is not None:
        raise ActionError(f"{path}: expected no sample_id, which is for trajectories, got {sample_id}")
    return track_rows(load_actions(path, space, limits=limits), num_frames, space, fps)


def track_rows(
    track: Trajectory | ActionTrack, num_frames: int, space: ActionSpace, fps: float
) -> tuple[ActionRows, Drawn]:
    """The `num_frames` - 1 actions of a rollout along a trajectory or a track, and what an overlay shows of them.

    Raises:
        ActionError: it is too short, or a trajectory's paths do not cover the model's waypoints.
        ConfigError: `num_frames` below 1.
    """
    if isinstance(track, Trajectory):
        drive = track.resample(fps, max(num_frames - 1, 1))
        drive.require(num_frames)
        rows = drive.actions(num_frames - 1, require_waypoints(space, "driving").times)
        return rows, drive.paths[: num_frames - 1]
    values = track.at_rate(fps, num_frames - 1)
    return track.space.rows(values), [track.space.text(each) for each in values]
