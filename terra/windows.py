"""Plans and runs sliding windows, so that a model that holds 25 frames makes rollouts of any length.

    window 0   frames  0 .. 24   given: the context frames
    window 1   frames 22 .. 46   given: the last 3 frames of window 0, as tokens
    window 2   frames 44 .. 68   ...

The numbers are those of the shipped model, which has no memory, and of `overlap=3`; window 0 may have more context
frames. Each window is a session of its own in the engine, with a seed that follows from the rollout's seed and the
window's number, and positions start at 0 again.

With memory, the prompt of each window but the first begins with memory frames, so that it generates that many
frames fewer; window 0 has them only with a map (see `terra.recall`). A model that
remembers 4 frames, without a map:

    window 0                     frames  0 .. 24
    window 1   4 of 0 .. 21,     frames 22 .. 42
    window 2   4 of 0 .. 39,     frames 40 .. 60
"""

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from itertools import chain

import torch

from terra.engine.base import Engine, Session, check_actions, check_adapter, run_live
from terra.errors import EngineError
from terra.memory import memory_frames
from terra.prompt import Action, Actions, FrameTokens, Prompt, build_prompt
from terra.recall import Recall
from terra.sampling import SamplingParams, window_seed
from terra.window_plan import Window, check_overlap


def remembered(recall: Recall, actions: Actions, windows: Iterable[Window]) -> list[list[int]]:
    """The memory frames of each window that has any, as a rollout's session chooses them, see `Recall.choose`.

    Args:
        recall: knows all of the rollout's frames.
        actions: all of the rollout's.
        windows: see `plan_windows`.
    """
    return [
        recall.choose(window.start, window.num_given, actions[window.start + window.num_given - 1])
        for index, window in enumerate(windows)
        if recall.num_memory(index)
    ]


class SlidingSession:
    """A session of any length: implements `Session` and `RunsLive`, and opens the next window when one is full.

    A window with memory frames is opened when its first action is known, since they are chosen by it.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        sampling: SamplingParams,
        seed: int,
        overlap: int,
        index: int,
        adapter: str | None,
        recall: Recall | None,
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self._overlap = overlap
        self._index = index
        self._adapter = adapter
        self._recall = recall
        self._session: Session | None = None
        self._closed = False
        self._memory: list[int] = []
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
        recall: Recall | None = None,
    ) -> "SlidingSession":
        """Start from context frames, or continue window `index` from its frames so far; `seed` is the rollout's.

        All windows are generated with one of the engine's `adapters`, or with None. `recall` knows the rollout's frames
        up to the prompt's last one; without it there is no memory.

        Raises:
            ConfigError: see `check_overlap`, or no such adapter.
            ValueError: the prompt does not fit the model.
        """
        rule = None if recall is None else recall.rule
        check_overlap(overlap, engine.spec.layout.max_frames, memory_frames(rule))
        check_adapter(adapter, engine.adapters)
        self = cls(engine, prompt, sampling, seed, overlap, index, adapter, recall)
        if not self._num_memory:
            self._session = await self._enter(None)
        return self

    @property
    def memory(self) -> list[int]:
        """The memory frames of the current window, see `Recall.choose`; empty while it is not open."""
        return list(self._memory)

    async def step(self, action: Action) -> FrameTokens:
        """See `terra.engine.base.Session.step`; the window is never full."""
        session = await self._ready(action)
        frame = await session.step(action)
        self._note(action, frame)
        return frame

    async def run(self, actions: Actions) -> AsyncIterator[FrameTokens]:
        """See `terra.engine.base.Session.run`; any number of actions."""
        while len(actions):
            session = await self._ready(actions[0])
            now, actions = actions[: self._room], actions[self._room :]
            frames = session.run(now)
            index = 0
            async for frame in frames:
                self._note(now[index], frame)
                index += 1
                yield frame

    async def run_live(self, actions: Iterator[Action | None]) -> AsyncGenerator[FrameTokens, None]:
        """See `terra.engine.base.RunsLive.run_live`; the first action of a window is chosen before the window opens."""
        while (first := next(actions, None)) is not None:
            session = await self._ready(first)
            taken = deque[Action]()
            now = _noted(chain([first], actions), self._room, taken)
            async with aclosing(run_live(session, now)) as frames:
                async for frame in frames:
                    self._note(taken.popleft(), frame)
                    yield frame

    async def close(self) -> None:
        """See `terra.engine.base.Session.close`."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    @property
    def _num_memory(self) -> int:
        return 0 if self._recall is None else self._recall.num_memory(self._index)

    @property
    def _room(self) -> int:
        return self._engine.spec.layout.max_frames - self._num_memory - len(self._frames)

    def _note(self, action: Action, frame: FrameTokens) -> None:
        self._actions.append(action)
        self._frames.append(frame)
        if self._recall is not None:
            self._recall.add(frame, action)

    async def _ready(self, action: Action) -> Session:
        """The session in which `action` leads to the next frame."""
        if self._room == 0 and self._session is not None:
            await self._session.close()
            self._session = None
            self._index += 1
            self._frames = self._frames[-self._overlap :]
            self._actions = self._actions[len(self._actions) - (self._overlap - 1) :]
        if self._session is None:
            if self._closed:
                raise EngineError("the session is closed")
            check_actions(action[None], len(self._frames), self._engine.spec)  # nothing is chosen by a wrong one
            self._session = await self._enter(action)
        return self._session

    async def _enter(self, action: Action | None) -> Session:
        """Open the current window, whose next action is `action`."""
        tokens = torch.stack(self._frames)
        actions = torch.stack(self._actions) if self._actions else torch.zeros(0, *self._engine.spec.action_shape)
        self._memory = []
        if self._recall is not None and self._num_memory and action is not None:
            num_given = self._overlap if self._index else self._recall.num_context
            start = self._recall.num_frames - len(self._frames)
            ahead = [*self._actions, action][num_given - 1]
            self._memory = self._recall.choose(start, num_given, ahead)
            memory, places = self._recall.prompt(self._memory, start, num_given, ahead)
            tokens, actions = torch.cat([memory, tokens]), torch.cat([places, actions])
        seed = window_seed(self._seed, self._index)
        return await self._engine.open(build_prompt(tokens, actions), self._sampling, seed, self._adapter)


def _noted(actions: Iterator[Action | None], most: int, taken: deque[Action]) -> Iterator[Action | None]:
    """The first actions, so many (1 or more), and each None between; actions are added to `taken`."""
    for action in actions:
        if action is not None:
            taken.append(action)
            most -= 1
        yield action
        if not most:
            return
