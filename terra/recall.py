"""Holds the frames of a rollout and of a map, and chooses the memory frames of its windows from them.

A frame is known by its index in the rollout. Frames of a map have negative ones: its first frame is -1, its second -2.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from jaxtyping import Float64

from terra.actions import require_waypoints
from terra.engine.base import EngineSpec
from terra.errors import ConfigError
from terra.memory import (
    MOST_CANDIDATES,
    MemoryRule,
    Pose,
    Poses,
    advance,
    choose,
    expected_poses,
    memory_times,
    place_action,
    poses_along,
)
from terra.prompt import Action, Actions, FrameTokens
from tokenizer import TokenGrid


@dataclass(frozen=True, eq=False)
class PlaceMap:
    """Frames of a place that a rollout remembers from its beginning.

    Attributes:
        tokens: token ids, int64.
        poses: where each was seen from, in the axes of the rollout's first frame.
    """

    tokens: TokenGrid
    poses: Poses


class Recall:
    """Knows a rollout's frames with their poses, and chooses the memory frames of its windows.

    Args:
        rule: how many frames a window remembers, and how they are chosen.
        spec: the engine's spec.
        num_context: context frames, which window 0 reads.
        frames: the frames so far with their poses, oldest first.
        first: index of the first of them.
        place: a map, or None.

    Raises:
        ActionError: the model's actions are no waypoints, so that no poses follow from them.
        ConfigError: a map of fewer frames than a window remembers.
    """

    def __init__(
        self,
        rule: MemoryRule,
        spec: EngineSpec,
        num_context: int,
        frames: Iterable[tuple[FrameTokens, Pose]],
        first: int = 0,
        place: PlaceMap | None = None,
    ) -> None:
        self.rule, self.num_context, self.place = rule, num_context, place
        self._space, self._fps, self._first = require_waypoints(spec.space, "memory"), spec.fps, first
        self._window = spec.layout.max_frames
        self._most = MOST_CANDIDATES + self._window
        if place is not None and len(place.poses) < rule.frames:
            raise ConfigError(f"map: expected at least {rule.frames} frames (memory), got {len(place.poses)}")
        self._frames = list(frames)

    @classmethod
    def begin(
        cls, rule: MemoryRule, spec: EngineSpec, tokens: TokenGrid, actions: Actions, place: PlaceMap | None = None
    ) -> Self:
        """The start of a rollout: its context frames, and the actions between them."""
        poses = poses_along(actions.numpy(), require_waypoints(spec.space, "memory"), spec.fps)
        return cls(rule, spec, len(tokens), zip(tokens, poses, strict=True), place=place)

    @property
    def pose(self) -> Pose:
        """The pose of the newest frame."""
        return self._frames[-1][1]

    @property
    def num_frames(self) -> int:
        """Frames of the rollout so far."""
        return self._first + len(self._frames)

    def add(self, tokens: FrameTokens, action: Action) -> None:
        """Add the next frame, which `action` led to."""
        self._frames.append((tokens, advance(self.pose, action.numpy(), self._space, self._fps)))
        if len(self._frames) > 2 * self._most:  # seldom, since a list moves all that is left
            self._first += len(self._frames) - self._most
            del self._frames[: -self._most]

    def num_memory(self, window: int) -> int:
        """The number of memory frames of a window, by its index; window 0 has some only with a map."""
        return self.rule.frames if window or self.place is not None else 0

    def choose(self, start: int, num_given: int, action: Action) -> list[int]:
        """The memory frames of a window, one for each of its `terra.memory.memory_times`.

        Args:
            start: index of the window's first frame after its memory frames.
            num_given: frames from `start` on that the window reads.
            action: the action of the last of these.
        """
        oldest = max(start - MOST_CANDIDATES, 0)
        known = self._poses(range(oldest, start + num_given))
        on_map = np.zeros((0, 3)) if self.place is None else self.place.poses
        count = np.array([len(on_map) + start - oldest])
        expected = self._expected(start, num_given, action)
        (rows,) = choose(self.rule, np.concatenate([on_map, known])[None], count, expected[None])
        return [-1 - row if row < len(on_map) else oldest + row - len(on_map) for row in rows.tolist()]

    def prompt(self, indices: list[int], start: int, num_given: int, action: Action) -> tuple[TokenGrid, Actions]:
        """The tokens of the frames that `choose` chose with the same arguments, and the place action after each."""
        found = [self._frame(index) for index in indices]
        poses = np.stack([pose for _, pose in found])
        actions = place_action(self._expected(start, num_given, action), poses, self._space)
        return torch.stack([tokens for tokens, _ in found]), torch.from_numpy(actions)

    def _expected(self, start: int, num_given: int, action: Action) -> Float64[np.ndarray, "memory 3"]:
        """The expected poses that a window's memory frames are retrieved for."""
        times = memory_times(self.rule.frames, self._window - self.rule.frames - num_given, self._fps)
        _, pose = self._frame(start + num_given - 1)
        return expected_poses(pose, action.numpy(), self._space, times)

    def _frame(self, index: int) -> tuple[FrameTokens, Pose]:
        if index < 0 and self.place is not None:
            return self.place.tokens[-1 - index], self.place.poses[-1 - index]
        return self._frames[index - self._first]

    def _poses(self, indices: range) -> Poses:
        return np.stack([pose for _, pose in self._frames[indices.start - self._first : indices.stop - self._first]])
