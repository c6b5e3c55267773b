"""The windows that a world model is trained on: consecutive frames, or memory frames and then consecutive ones."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from terra.actions import Waypoints
from terra.dataset.tokens import TokenizedDriving
from terra.errors import ConfigError, DatasetError
from terra.memory import (
    choose,
    expected_poses,
    memory_times,
    place_action,
)
from terra.training.world_model_settings import MemoryTraining

_AGE_SECONDS = 1.0  # memory frames are older than the window by at least this; not with kind="recent"
_MOST_CANDIDATES = 256  # of a window; more are thinned out evenly


@dataclass(frozen=True)
class WindowBatch:
    """Some windows.

    Attributes:
        tokens: token ids, int64.
        actions: the action of each frame; that of a memory frame is a place action.
        remembers: whether a window's first frames are memory frames.
        num_memory: the number of memory frames of such a window.
    """

    tokens: Int[Tensor, "batch window rows cols"]
    actions: Float[Tensor, "batch window slots action_dim"]
    remembers: Bool[Tensor, " batch"]
    num_memory: int


class Windows:
    """The windows of tokenized driving, without memory frames.

    Args:
        driving: the tokens.
        length: frames of a window.

    Raises:
        DatasetError: no episode is that long.
    """

    def __init__(self, driving: TokenizedDriving, length: int) -> None:
        self._driving, self._length = driving, length
        self._starts = driving.window_starts(length)

    def draw(self, generator: torch.Generator, count: int, progress: float) -> WindowBatch:
        """Draw windows with replacement, whatever the run's progress."""
        starts = self._starts[torch.randint(len(self._starts), (count,), generator=generator)]
        return WindowBatch(*self._driving.windows(starts, self._length), torch.zeros(count, dtype=torch.bool), 0)


class MemoryWindows:
    """The windows of tokenized driving with memory frames, `[memory frames][consecutive frames]`.

    Args:
        driving: the tokens, with poses.
        length: frames of a window, memory frames included.
        settings: its `frames` is not None.

    Raises:
        ConfigError: actions that are no waypoints, or a window too short for its memory frames.
        DatasetError: tokens without poses, or no episode that is long enough to remember anything.
    """

    def __init__(self, driving: TokenizedDriving, length: int, settings: MemoryTraining) -> None:
        assert settings.rule is not None
        if not isinstance(driving.space, Waypoints):
            raise ConfigError(
                f"memory.frames: expected none for actions of {driving.space.title}, got {settings.frames}"
            )
        if driving.poses is None or driving.place is None:
            raise DatasetError("memory.frames: expected tokens with poses, got none: run terra tokenize again")
        if length - settings.rule.frames <= settings.overlap:
            most = length - settings.overlap - 1
            raise ConfigError(f"memory.frames: expected at most {most} in a window of {length}, got {settings.frames}")
        self._driving, self._length, self._settings = driving, length, settings
        self.rule, self.num_memory, self._space = settings.rule, settings.rule.frames, driving.space
        self._poses, self._places = driving.poses.numpy(), driving.place.numpy()
        self._bounds, self._starts = driving.episode_start.numpy(), driving.window_starts(length)
        generated = length - self.num_memory - settings.overlap
        self._times = memory_times(self.num_memory, generated, driving.fps)
        self._exact = torch.from_numpy((settings.overlap - 1 + self._times * driving.fps).round()).long()
        self._exact_share = 0.0 if self.rule.kind == "recent" else settings.exact
        self._gap = 0 if self.rule.kind == "recent" else round(_AGE_SECONDS * driving.fps)
        self._remembering = self._starts[torch.from_numpy(self._ages(self._starts.numpy()) >= self.num_memory)]
        if not len(self._remembering):
            needed = length + self._gap + self.num_memory
            raise DatasetError(f"memory.frames: expected an episode of at least {needed} frames, got none")

    def draw(self, generator: torch.Generator, count: int, progress: float) -> WindowBatch:
        """Draw windows with replacement; `share` of those that are late enough in their episode have memory frames.

        Until the run's progress, 0 to 1, is `exact_until`, all windows have their own frames as memory.
        """
        starts = self._starts[torch.randint(len(self._starts), (count,), generator=generator)]
        chances = torch.rand((3, count), generator=generator)
        remembers = chances[0] < self._settings.share
        remembers &= torch.from_numpy(self._ages(starts.numpy()) >= self.num_memory)
        exact = remembers & (chances[2] < self._exact_share)
        if self._settings.is_exact(progress):
            remembers = exact = torch.ones_like(exact)
        chosen = remembers & ~exact
        frames = starts[:, None] + torch.arange(self._length)
        frames[remembers] = self._behind_memory(starts[remembers])
        frames[exact, : self.num_memory] = starts[exact, None] + self._exact
        expected = self._expected(starts)
        if chosen.any():
            others = (chances[1] < self._settings.other_drives)[chosen]
            frames[chosen, : self.num_memory] = self._choose(starts[chosen], others, expected[chosen.numpy()])
        actions = self._driving.actions[frames].clone()
        actions[remembers, : self.num_memory] = self._place_actions(frames[remembers], expected[remembers.numpy()])
        return WindowBatch(self._driving.tokens[frames].long(), actions, remembers, self.num_memory)

    def spread(self, count: int) -> tuple[WindowBatch, WindowBatch]:
        """At most `count` windows that remember their own drive, evenly spread, and the same without memory frames."""
        chosen = torch.linspace(0, len(self._remembering) - 1, min(count, len(self._remembering))).round().long()
        starts = self._remembering[chosen]
        frames, expected = self._behind_memory(starts), self._expected(starts)
        frames[:, : self.num_memory] = self._choose(starts, torch.zeros(len(starts), dtype=torch.bool), expected)
        actions = self._driving.actions[frames].clone()
        actions[:, : self.num_memory] = self._place_actions(frames, expected)
        remembers = torch.ones(len(starts), dtype=torch.bool)
        whole = WindowBatch(self._driving.tokens[frames].long(), actions, remembers, self.num_memory)
        alone = self._driving.windows(starts, self._length - self.num_memory)
        return whole, WindowBatch(*alone, ~remembers, 0)

    def _behind_memory(self, starts: Int64[Tensor, " some"]) -> Int64[Tensor, "some window"]:
        """Frame indices of windows with memory: consecutive frames from `starts` on, behind columns to be filled in."""
        return starts[:, None] + torch.arange(-self.num_memory, self._length - self.num_memory)

    def _choose(
        self,
        starts: Int64[Tensor, " some"],
        others: Bool[Tensor, " some"],
        expected: Float64[np.ndarray, "some memory 3"],
    ) -> Int64[Tensor, "some memory"]:
        """The memory frames of windows that are old enough to remember.

        Args:
            starts: the first consecutive frames.
            others: whether a window may remember other drives of the same place.
            expected: see `_expected`.
        """
        overlap = self._settings.overlap
        own = starts.numpy()[:, None] + np.arange(overlap)
        candidates = [self._candidates(int(s), bool(o)) for s, o in zip(starts, others, strict=True)]
        counts = np.array([len(each) for each in candidates])
        poses = np.full((len(starts), counts.max() + overlap, 3), np.nan)
        for row, (each, seen) in enumerate(zip(candidates, own, strict=True)):
            poses[row, : len(each) + overlap] = self._poses[np.concatenate([each, seen])]
        picked = choose(self.rule, poses, counts, expected)
        return torch.from_numpy(np.stack([each[pick] for each, pick in zip(candidates, picked, strict=True)]))

    def _ages(self, starts: Int64[np.ndarray, " some"]) -> Int64[np.ndarray, " some"]:
        """How many earlier frames of its own drive each window may remember."""
        return starts - self._gap - self._bounds[self._episodes(starts)]

    def _episodes(self, starts: Int64[np.ndarray, " some"]) -> Int64[np.ndarray, " some"]:
        return np.searchsorted(self._bounds, starts, side="right") - 1

    def _candidates(self, start: int, others: bool) -> Int64[np.ndarray, " candidates"]:
        """The frames that a window may remember: those near it of other drives, if it may, then those of its own."""
        episode = int(self._episodes(np.array([start]))[0])
        own = np.arange(self._bounds[episode], start - self._gap)
        if self.rule.kind == "recent":
            return own[-self.num_memory :]
        if not others:
            return _thinned(own, _MOST_CANDIDATES)
        drives = [each for each in np.flatnonzero(self._places == self._places[episode]) if each != episode]
        frames = np.concatenate([np.arange(*self._bounds[each : each + 2]) for each in drives] or [own[:0]])
        away = np.hypot(*(self._poses[frames, :2] - self._poses[start, :2]).T)
        near = frames[away < 2 * self.rule.range]
        return np.concatenate([_thinned(near, _MOST_CANDIDATES // 2), _thinned(own, _MOST_CANDIDATES // 2)])

    def _place_actions(
        self, frames: Int64[Tensor, "some window"], expected: Float64[np.ndarray, "some memory 3"]
    ) -> Float[Tensor, "some memory slots 3"]:
        places = place_action(expected, self._poses[frames[:, : self.num_memory].numpy()], self._space)
        return torch.from_numpy(places).to(self._driving.actions)

    def _expected(self, starts: Int64[Tensor, " some"]) -> Float64[np.ndarray, "some memory 3"]:
        """The expected pose of each memory frame's time, from the newest given frame's pose and action."""
        now = (starts + self._settings.overlap - 1).cpu()
        actions = self._driving.actions[now.to(self._driving.actions.device)].cpu().numpy()
        given = zip(self._poses[now.numpy()], actions, strict=True)
        found = [expected_poses(pose, action, self._space, self._times) for pose, action in given]
        return np.reshape(found, (len(starts), self.num_memory, 3))


def windows_of(driving: TokenizedDriving, length: int, memory: MemoryTraining) -> Windows | MemoryWindows:
    """The windows that a model is trained on; see `Windows` and `MemoryWindows`."""
    return Windows(driving, length) if memory.frames is None else MemoryWindows(driving, length, memory)


def _thinned(frames: Int64[np.ndarray, " some"], most: int) -> Int64[np.ndarray, " fewer"]:
    if len(frames) <= most:
        return frames
    return frames[np.linspace(0, len(frames) - 1, most).round().astype(np.int64)]
