"""Routes each session to the engine that holds its adapter: each engine merges one adapter into a model at loading.

The base model has an engine, too. `check_factors_alone` is for vLLM, which takes an adapter for each request instead.
"""

import asyncio
from collections.abc import Mapping
from itertools import zip_longest
from statistics import fmean

from terra.engine.base import Engine, EngineCounters, EngineSpec, Session, WarmsUp, check_adapter
from terra.errors import ConfigError, EngineError
from terra.prompt import Prompt
from terra.sampling import SamplingParams
from terra.world_model.adapter import Adapter


class AdaptedEngine:
    """One engine of several that share a spec; a session's adapter says which of them generates its frames.

    When one of the engines fails, no session can be opened anymore; sessions of the others go on.

    Args:
        base: generates the frames of sessions that name no adapter.
        adapted: an engine for each adapter, by the adapter's name; closed with the base.

    Raises:
        ConfigError: an adapter's model has other actions, or another geometry or rate, than the base.
    """

    def __init__(self, base: Engine, adapted: Mapping[str, Engine]) -> None:
        for name, engine in adapted.items():
            check_same_spec(name, engine.spec, base.spec)
        self._base, self._adapted = base, dict(adapted)

    @property
    def spec(self) -> EngineSpec:
        """The geometry and rates that all the models have."""
        return self._base.spec

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of adapters that `open` takes."""
        return tuple(self._adapted)

    @property
    def failure(self) -> str | None:
        """Why the first of the engines that failed stopped; None while all of them work."""
        return next((engine.failure for engine in self._engines if engine.failure is not None), None)

    @property
    def counters(self) -> EngineCounters:
        """The sums of the engines' tokens and passes, and the mean of their shares of the KV cache."""
        counted = [engine.counters for engine in self._engines]
        shares = [each.kv_cache_usage for each in counted if each.kv_cache_usage is not None]
        return EngineCounters(
            prefilled=sum(each.prefilled for each in counted),
            cached=sum(each.cached for each in counted),
            sampled=sum(each.sampled for each in counted),
            kv_cache_usage=fmean(shares) if shares else None,
            passes=tuple(map(sum, zip_longest(*(each.passes for each in counted), fillvalue=0))),
        )

    async def open(self, prompt: Prompt, sampling: SamplingParams, seed: int, adapter: str | None = None) -> Session:
        """See `terra.engine.base.Engine.open`."""
        check_adapter(adapter, self._adapted)
        if (failure := self.failure) is not None:
            raise EngineError(failure)
        engine = self._base if adapter is None else self._adapted[adapter]
        return await engine.open(prompt, sampling, seed)

    async def warm_up(self, num_context: int) -> None:
        """Warm up the engines that can be, one after another. See `terra.engine.base.WarmsUp`."""
        for engine in self._engines:
            if isinstance(engine, WarmsUp):
                await engine.warm_up(num_context)

    async def close(self) -> None:
        """See `terra.engine.base.Engine.close`."""
        await asyncio.gather(*(engine.close() for engine in self._engines))

    @property
    def _engines(self) -> list[Engine]:
        return [self._base, *self._adapted.values()]


def check_factors_alone(name: str | None, adapter: Adapter) -> None:
    """Refuse an adapter that replaces modules, for an engine whose sessions share one model's modules.

    Args:
        name: the adapter's name; None for that of `adapter=`.
        adapter: the checked adapter.

    Raises:
        ConfigError: names the modules.
    """
    if adapter.replaced:
        where = "adapter" if name is None else f"adapters.{name}"
        modules = ", ".join(adapter.replaced_modules)
        expected = "LoRA factors alone, as all sessions of engine=vllm share the other modules"
        raise ConfigError(f"{where}: {adapter.folder}: expected {expected}, got {modules}: use another engine")


def check_same_spec(name: str, spec: EngineSpec, base: EngineSpec) -> None:
    """Refuse an adapter for some sessions of an engine if its actions, geometry or rate are not the base's.

    Memory may differ: to an engine memory frames are frames of a prompt.

    Raises:
        ConfigError: the first fact that differs.
    """
    for fact, expected in vars(base).items():
        if fact != "memory" and (got := getattr(spec, fact)) != expected:
            raise ConfigError(f"adapters.{name}: {fact}: expected the base's {expected!r:.200}, got {got!r:.200}")
