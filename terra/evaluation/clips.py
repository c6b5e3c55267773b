"""The held-out clips that are evaluated: chosen by a rule from a seed, and read with a few decoders at once."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, UInt8

from decoder.video import to_frames
from terra.actions import ActionSpace, TableSpace
from terra.actions.space import Values
from terra.dataset import Episode
from terra.dataset.format import shard_name
from terra.errors import DatasetError
from terra.evaluation.motion import Steps, steps_of
from terra.prompt import Actions
from terra.training.data import decode_episodes
from tokenizer import Frames

_GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 fall evenly into [0, 1)
MOVING_SPEED = 1.0  # m/s, mean over the generated frames; above, the car counts as moving


@dataclass(frozen=True, eq=False)
class Clip:
    """`num_frames` frames of an episode from `start` on, of which the first `num_context` are given.

    `name` is a file name; `seed` is the rollout's.
    """

    name: str
    episode: Episode
    start: int
    num_frames: int
    num_context: int
    seed: int

    @property
    def place(self) -> str:
        """Source and place of the recording, such as "town_000012": clips of one place are not independent."""
        return place_of(self.episode)

    @property
    def instructed(self) -> Steps:
        """The true motion from the last context frame on, one step for each generated frame."""
        first = self.start + self.num_context - 1
        return steps_of(self.episode.poses, first, self.num_frames - self.num_context + 1)

    @property
    def instructed_values(self) -> Values:
        """The true actions from the last context frame on, one for each generated frame, (frames, columns).

        Raises:
            DatasetError: an episode of driving, whose actions are paths.
        """
        if self.episode.actions is None:
            raise DatasetError(f"{self.episode.video}: expected actions that are no waypoints, got driving")
        return self.episode.actions[self.start + self.num_context - 1 : self.start + self.num_frames - 1]

    @property
    def is_moving(self) -> bool:
        """Whether the clip counts for the metrics `-moving`.

        Driving: the car's mean speed over the generated frames is above 1 m/s. Other worlds: in at least half of the
        generated frames the action is not the neutral one.
        """
        space = self.episode.space
        if isinstance(space, TableSpace):
            return bool((self.instructed_values != space.neutral).any(axis=1).mean() >= 0.5)
        return float(np.abs(self.instructed[:, 0]).mean()) * self.episode.fps > MOVING_SPEED


@dataclass(frozen=True, eq=False)
class LoadedClip:
    """A clip's true frames in [-1, 1], and the action between each two of them."""

    clip: Clip
    frames: Frames
    actions: Actions


def place_of(episode: Episode) -> str:
    """Source and place of a recording, see `Clip.place`."""
    return shard_name(episode.source, episode.place)


def choose_clips(
    episodes: Sequence[Episode], count: int, *, num_frames: int, num_context: int, seed: int
) -> list[Clip]:
    """At most `count` clips, spread evenly over the episodes that are long enough and belong to no group.

    Episodes in order get equally many clips (some get none, if `count` is smaller); where a clip starts follows the
    golden ratio. In order of the episodes.

    Raises:
        DatasetError: no episode is long enough.
    """
    usable = [episode for episode in episodes if episode.group is None and episode.num_frames >= num_frames]
    if not usable and count:
        longest = max((episode.num_frames for episode in episodes if episode.group is None), default=0)
        raise DatasetError(
            f"data: expected an episode of {num_frames} frames or more, as num_frames or drift_frames asks, got "
            f"at most {longest} (counterfactuals do not count; drift_clips=0 makes no long rollouts)"
        )
    chosen = {}
    for index in range(count):
        episode = usable[index * len(usable) // count]
        start = int((index * _GOLDEN % 1) * (episode.num_frames - num_frames + 1))
        name = f"{episode.id}_{start:05d}_{num_frames}"
        chosen[name] = Clip(name, episode, start, num_frames, num_context, clip_seed(seed, name))
    return list(chosen.values())


def clip_seed(seed: int, name: str) -> int:
    """The seed of a clip's rollout, from the evaluation's seed and the clip's name."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6])


def load_clips(clips: Iterable[Clip], workers: int, space: ActionSpace) -> Iterator[LoadedClip | str]:
    """Each clip in order or, if its episode is damaged, one line that says why; an episode is decoded once in a row.

    Args:
        clips: those of one episode after one another.
        workers: videos decoded at once, see `terra.training.data.decode_episodes`.
        space: of the actions.
    """
    by_episode: list[list[Clip]] = []
    for clip in clips:
        if by_episode and by_episode[-1][0].episode is clip.episode:
            by_episode[-1].append(clip)
        else:
            by_episode.append([clip])
    decoded = decode_episodes([group[0].episode for group in by_episode], workers, space)
    for group, episode in zip(by_episode, decoded, strict=True):
        for clip in group:
            yield episode if isinstance(episode, str) else _cut(clip, episode.frames, episode.actions)


def _cut(
    clip: Clip,
    frames: UInt8[np.ndarray, "frames height width 3"],
    actions: Float32[np.ndarray, "frames slots action_dim"],
) -> LoadedClip:
    part = slice(clip.start, clip.start + clip.num_frames)
    return LoadedClip(clip, to_frames(frames[part].copy()), torch.from_numpy(actions[part][:-1].copy()))
