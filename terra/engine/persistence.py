"""The engine that repeats the last frame: a baseline, and an engine without weights for tests and notebooks."""

from collections.abc import AsyncIterator
from pathlib import Path

from terra.engine.base import EngineCounters, EngineSpec, check_actions, check_adapter, check_prompt
from terra.errors import EngineError
from terra.prompt import Action, Actions, FrameTokens, Prompt
from terra.sampling import SamplingParams
from terra.world_model import load_adapter, load_config


class PersistenceEngine:
    """Predicts that nothing changes. Sampling and seed have no effect, and nothing is counted."""

    failure: str | None = None
    adapters: tuple[str, ...] = ()
    counters = EngineCounters()

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._closed = False

    @classmethod
    def from_pretrained(cls, checkpoint: Path, adapter: Path | None = None) -> "PersistenceEngine":
        """Take the geometry of a world model's checkpoint folder, or of its adapter; weights are checked, not loaded.

        Raises:
            CheckpointError: see `terra.world_model.load_config` and `load_adapter`.
        """
        config = load_config(checkpoint) if adapter is None else load_adapter(adapter, checkpoint).config
        return cls(EngineSpec.of(config))

    @property
    def spec(self) -> EngineSpec:
        """The geometry that the engine was given."""
        return self._spec

    async def open(
        self, prompt: Prompt, sampling: SamplingParams, seed: int, adapter: str | None = None
    ) -> "PersistenceSession":
        """See `terra.engine.base.Engine.open`."""
        if self._closed:
            raise EngineError("the engine is closed")
        check_adapter(adapter, self.adapters)
        check_prompt(prompt, self._spec, seed)
        return PersistenceSession(self, prompt)

    async def close(self) -> None:
        """See `terra.engine.base.Engine.close`."""
        self._closed = True


class PersistenceSession:
    """A session that gives the last context frame again and again."""

    def __init__(self, engine: PersistenceEngine, prompt: Prompt) -> None:
        self._engine = engine
        self._frame = prompt.tokens[-1]
        self._num_frames = prompt.num_frames
        self._closed = False

    async def step(self, action: Action) -> FrameTokens:
        """See `terra.engine.base.Session.step`."""
        if self._closed or self._engine._closed:
            raise EngineError("the session is closed")
        check_actions(action[None], self._num_frames, self._engine.spec)
        self._num_frames += 1
        return self._frame.clone()

    async def run(self, actions: Actions) -> AsyncIterator[FrameTokens]:
        """See `terra.engine.base.Session.run`."""
        check_actions(actions, self._num_frames, self._engine.spec)
        for action in actions:
            yield await self.step(action)

    async def close(self) -> None:
        """See `terra.engine.base.Session.close`."""
        self._closed = True
