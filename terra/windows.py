"""Plans and runs sliding windows, so that a model that holds 25 frames makes rollouts of any length.

    window 0   frames  0 .. 24   given: the context frames
    window 1   frames 22 .. 46   given: the last 3 frames of window 0, as tokens
    window 2   frames 44 .. 68   ...

The numbers are those of the shipped model and of `overlap=3`; there may be more context frames. Each window is a
session of its own in the engine, with a seed that follows from the rollout's seed and the window's number, and
positions start at 0 again.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import torch

from terra.engine.base import Engine, Session
from terra.errors import ConfigError
from terra.prompt import Action, Actions, FrameTokens, Prompt, build_prompt
from terra.sampling import SamplingParams, window_seed
from tokenizer.limits import LIMITS, Limits


@dataclass(frozen=True)
class Window:
    """Frames `start` to `start + num_frames - 1` of a rollout; the first `num_given` of them are given."""

    start: int
    num_given: int
    num_frames: int


def check_overlap(overlap: int, max_frames: int) -> None:
    """Refuse an overlap that leaves nothing to read again, or nothing to generate.

    Raises:
        ConfigError: overlap below 1 or not below `max_frames`.
    """
    if not 1 <= overlap < max_frames:
        raise ConfigError(f"overlap: expected 1 to {max_frames - 1} (the window holds {max_frames}), got {overlap}")


def check_frames(num_frames: int, limits: Limits = LIMITS, where: str = "") -> None:
    """Raise ConfigError for a rollout of more frames than `limits` allow; the line begins with `where`."""
    if num_frames > limits.rollout_frames:
        raise ConfigError(f"{where}num_frames: expected at most {limits.rollout_frames}, got {num_frames}")


def plan_windows(num_frames: int, num_context: int, max_frames: int, overlap: int) -> Iterator[Window]:
    """The windows of a rollout of `num_frames` frames, its context included; each generates at least one frame.

    Raises:
        ConfigError: a context that is empty, fills the window, or leaves nothing to generate; see `check_overlap`.
    """
    check_overlap(overlap, max_frames)
    if not 1 <= num_context < max_frames:
        raise ConfigError(
            f"num_context: expected 1 to {max_frames - 1} (the window holds {max_frames}), got {num_context}"
        )
    if num_frames <= num_context:
        raise ConfigError(f"num_frames: expected more than num_context={num_context}, got {num_frames}")
    start, given = 0, num_context
    while True:
        window = Window(start, given, min(max_frames, num_frames - start))
        yield window
        end = start + window.num_frames
        if end == num_frames:
            return
        start, given = end - overlap, overlap


def window_at(last: int, max_frames: int, overlap: int) -> tuple[int, int]:
    """The window (its index, its first frame) of `plan_windows` in which the frame after `last` is generated.

    These windows start `max_frames - overlap` frames apart.
    """
    stride = max_frames - overlap
    index = 0 if last + 1 < max_frames else 1 + (last + 1 - max_frames) // stride
    return index, index * stride


class SlidingSession:
    """A session of any length: implements `Session`, and opens the next window when the current one is full."""

    def __init__(
        self,
        engine: Engine,
        session: Session,
        prompt: Prompt,
        sampling: SamplingParams,
        seed: int,
        overlap: int,
        index: int,
        adapter: str | None,
    ) -> None:
        self._engine = engine
        self._session = session
        self._sampling = sampling
        self._seed = seed
        self._overlap = overlap
        self._index = index
        self._adapter = adapter
        self._max_frames = engine.spec.layout.max_frames
        # The frames of the current window, and the actions between them.
        self._frames = list(prompt.tokens)
        self._actions = list(prompt.actions)

    @classmethod
    async def open(
        cls,
        engine: Engine,
        prompt: Prompt,
        sampling: SamplingParams,
        seed: int,
        overlap: int,
        index: int = 0,
        adapter: str | None = None,
    ) -> "SlidingSession":
        """Start from context frames, or continue window `index` from its frames so far; `seed` is the rollout's.

        All windows are generated with one of the engine's `adapters`, or with None.

        Raises:
            ConfigError: see `check_overlap`, or no such adapter.
            ValueError: the prompt does not fit the model.
        """
        check_overlap(overlap, engine.spec.layout.max_frames)
        session = await engine.open(prompt, sampling, window_seed(seed, index), adapter)
        return cls(engine, session, prompt, sampling, seed, overlap, index, adapter)

    async def step(self, action: Action) -> FrameTokens:
        """See `terra.engine.base.Session.step`; the window never is full."""
        if self._room == 0:
            await self._slide()
        frame = await self._session.step(action)
        self._note(action, frame)
        return frame

    async def run(self, actions: Actions) -> AsyncIterator[FrameTokens]:
        """See `terra.engine.base.Session.run`; any number of actions."""
        while len(actions):
            if self._room == 0:
                await self._slide()
            now, actions = actions[: self._room], actions[self._room :]
            frames = self._session.run(now)
            index = 0
            async for frame in frames:
                self._note(now[index], frame)
                index += 1
                yield frame

    async def close(self) -> None:
        """See `terra.engine.base.Session.close`."""
        await self._session.close()

    @property
    def _room(self) -> int:
        return self._max_frames - len(self._frames)

    def _note(self, action: Action, frame: FrameTokens) -> None:
        self._actions.append(action)
        self._frames.append(frame)

    async def _slide(self) -> None:
        await self._session.close()
        self._index += 1
        self._frames = self._frames[-self._overlap :]
        self._actions = self._actions[len(self._actions) - (self._overlap - 1) :]
        actions = torch.stack(self._actions) if self._actions else torch.zeros(0, *self._engine.spec.action_shape)
        prompt = build_prompt(torch.stack(self._frames), actions)
        seed = window_seed(self._seed, self._index)
        self._session = await self._engine.open(prompt, self._sampling, seed, self._adapter)
