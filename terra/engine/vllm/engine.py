"""The engine on vLLM: `VllmEngine` and `VllmSession`.

A session knows its history (token ids and actions) and reaches the engine core in one of two ways:

- `run`, when the actions are known: ONE request for all frames. The actions are registered at their slots beyond the
  prompt; the model runner puts them in when decoding gets there, and what it samples into slots is dropped.
- `step`, when actions arrive live: a streaming-input request. Each step continues it with the last token and the
  slots; the KV of everything before stays where it is.

Both give the same tokens. Going from one way to the other submits the history again, which the prefix cache holds; so
does a session whose request was ended between two steps because others needed its sequence slot (`max_num_seqs`) or
its KV blocks.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from einops import rearrange

from terra.engine.vllm import environment  # noqa: F401

# isort: split
from vllm import ModelRegistry
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from terra.device import torch_dtype
from terra.engine.base import EngineCounters, EngineSpec, check_actions, check_adapter, check_prompt
from terra.engine.vllm import model
from terra.engine.vllm.adapters import Adapters
from terra.engine.vllm.available import check_platform
from terra.engine.vllm.processing import render
from terra.engine.vllm.pump import Pump, RequestEndedError, Stream
from terra.engine.vllm.sampling import request_params
from terra.errors import ConfigError, EngineError
from terra.prompt import SLOT_FILLER, Action, Actions, FrameTokens, Prompt
from terra.sampling import SamplingParams
from terra.world_model import load_config


class VllmEngine:
    """Runs the world model on vLLM, on CUDA or on a CPU, with many sessions batched continuously.

    Args:
        checkpoint: a checkpoint folder.
        adapter: folder of a LoRA adapter for sessions that name none, or None.
        adapters: folders of LoRA adapters by name, of which a session may name one; all share the model's weights.
        dtype: element type of the weights, "float32" or "bfloat16".
        max_sessions: sessions computed at once (vLLM's `max_num_seqs`). Further sessions wait for a sequence slot, or
            take the slot of a session that is between two steps; that session's window is submitted again at its
            next step.
        enforce_eager: run without torch.compile and CUDA graphs; None does so on a CPU alone, where compiling takes
            longer than most rollouts.
        cpu_kv_cache_gib: memory for the KV cache on a CPU.
        gpu_memory_utilization: share of the GPU's memory that vLLM may take.
        tensor_parallel_size: GPUs that share one model.
        step_seconds: time that one step of vLLM may take; after it the engine has failed, and all who wait are told.
        engine_args: further arguments of vLLM's EngineArgs, such as `quantization="fp8"`.

    Raises:
        ConfigError: no such dtype, no device for vLLM, a `max_model_len` in `engine_args` that is shorter than a
            window, or an adapter that replaces modules or has other actions.
        CheckpointError: see `terra.world_model.load_config` and `load_adapter`.
        EngineError: vLLM could not start, its KV cache has no room for a window, or its noise is unknown.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        adapter: Path | None = None,
        adapters: Mapping[str, Path] | None = None,
        dtype: str = "float32",
        max_sessions: int = 64,
        enforce_eager: bool | None = None,
        cpu_kv_cache_gib: int = 1,
        gpu_memory_utilization: float = 0.85,
        tensor_parallel_size: int = 1,
        step_seconds: float = 600.0,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        torch_dtype(dtype)  # vLLM takes the name; a wrong one is to be refused before anything starts
        if not step_seconds > 0:
            raise ConfigError(f"engine.step_seconds: expected more than 0, got {step_seconds}")
        check_platform()
        config = load_config(checkpoint)
        loras = Adapters(checkpoint, config, adapter, adapters or {})
        self._spec = loras.spec or EngineSpec.of(config)
        loras.check_specs(self._spec)
        self._loras = loras.requests
        self._adapters = tuple(adapters or {})
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cpu_kv_cache_gib))
        # As a class rather than by name: vLLM would start a process to look at a named one.
        for name in config.architectures or ():
            ModelRegistry.register_model(name, getattr(model, name))
        on_cpu = current_platform.is_cpu()
        layout = self._spec.layout
        arguments: dict[str, Any] = {
            "model": str(checkpoint),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": dtype,
            "max_model_len": layout.max_length,
            "max_num_seqs": max_sessions,
            "max_num_batched_tokens": loras.batched_tokens(max(layout.max_length, 8192), max_sessions),
            "enforce_eager": on_cpu if enforce_eager is None else enforce_eager,
            "block_size": 32 if on_cpu else None,
            "enable_prefix_caching": True,
            "limit_mm_per_prompt": {"actions": layout.max_frames},
            "mm_processor_cache_gb": 0,
            "use_tqdm_on_load": False,
            "gpu_memory_utilization": gpu_memory_utilization,
            "tensor_parallel_size": tensor_parallel_size,
            "seed": 0,
            **(engine_args or {}),
        }
        for name, value in loras.engine_args().items():
            if name in (engine_args or {}):
                raise ConfigError(f"engine.engine_args.{name}: expected none, as the adapters decide it")
            arguments[name] = value
        length = arguments["max_model_len"]
        if not isinstance(length, int) or length < layout.max_length:
            expected = f"expected {layout.max_length} tokens (a window) or more"
            raise ConfigError(f"engine.engine_args.max_model_len: {expected}, got {length!r}")
        self.native_noise = False
        engine_arguments = EngineArgs(**{k: v for k, v in arguments.items() if v is not None})
        self._pump = Pump(engine_arguments, self._set_sampler, tuple(self._loras.values()), step_seconds)
        self._names = itertools.count()

    def _set_sampler(self, config: Any) -> None:
        """Choose the source of position-keyed noise: vLLM 0.26's V2 runner itself, elsewhere a logits processor."""
        sampler = "terra.engine.vllm.sampling:PositionKeyedSampler"
        if config.use_v2_model_runner:
            try:
                from vllm.v1.worker.gpu.sample import logits_processor  # noqa: F401
            except ImportError:
                from vllm.v1.worker.gpu.sample import gumbel

                if hasattr(gumbel, "murmur3_hash32"):
                    raise EngineError(
                        "this vLLM neither draws Philox noise nor takes logits processors in its V2 runner: "
                        "use 0.26 or 0.32, or set VLLM_USE_V2_MODEL_RUNNER=0"
                    ) from None
                self.native_noise = True
                return
            sampler = "terra.engine.vllm.sampling_v2:PositionKeyedSampler"
        config.model_config.logits_processors = [sampler]

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of adapters that `open` takes."""
        return self._adapters

    @property
    def spec(self) -> EngineSpec:
        """The model's geometry and rates."""
        return self._spec

    @property
    def counters(self) -> EngineCounters:
        """The engine core's own count of its tokens.

        `kv_cache_usage` counts the blocks of open requests; blocks that only the prefix cache keeps count as free.
        """
        return self._pump.counters

    @property
    def failure(self) -> str | None:
        """Why the engine stopped by itself, in one line; None while the engine works."""
        return self._pump.failure

    async def open(
        self, prompt: Prompt, sampling: SamplingParams, seed: int, adapter: str | None = None
    ) -> "VllmSession":
        """See `terra.engine.base.Engine.open`."""
        self._pump.check_running()
        check_adapter(adapter, self.adapters)
        check_prompt(prompt, self._spec, seed)
        return VllmSession(self, prompt, sampling, seed, self._loras.get(adapter))

    async def close(self) -> None:
        """See `terra.engine.base.Engine.close`."""
        self._pump.stop()  # here, not in the thread: a caller that is canceled before the thread starts has closed
        await asyncio.to_thread(self._pump.close)


class VllmSession:
    """One rollout: its history, and the request that continues it."""

    def __init__(
        self, engine: VllmEngine, prompt: Prompt, sampling: SamplingParams, seed: int, lora: LoRARequest | None
    ) -> None:
        self._engine = engine
        self._lora = lora
        self._pump = engine._pump
        self._layout = engine.spec.layout
        self._params = request_params(sampling, seed, native=engine.native_noise)
        self._rows = prompt.tokens.shape[1]
        # The window as the engine core knows it, up to the last frame's tokens.
        self._ids = prompt.ids(self._layout.action_slots).tolist()
        self._actions = list(prompt.actions)
        self._num_frames = prompt.num_frames
        self._live: Stream | None = None  # the streaming-input request, if one is open
        self._closed = False

    async def step(self, action: Action) -> FrameTokens:
        """See `terra.engine.base.Session.step`."""
        self._check(action[None])
        layout = self._layout
        slots = [SLOT_FILLER] * layout.action_slots
        try:
            try:
                tokens = await self._next_live(action, slots)
            except RequestEndedError:  # between two steps, to make room; a request that is not idle is never ended so
                self._live = None
                tokens = await self._next_live(action, slots)
        except BaseException:
            self._end_live()  # cancelled or failed: the history stands, and the next step submits it again
            raise
        self._ids += slots + tokens
        self._actions.append(action)
        self._num_frames += 1
        return self._grid(tokens)

    async def run(self, actions: Actions) -> AsyncIterator[FrameTokens]:
        """See `terra.engine.base.Session.run`."""
        self._check(actions)
        self._end_live()
        if not len(actions):
            return
        layout = self._layout
        slots = [SLOT_FILLER] * layout.action_slots
        known = [*self._actions, *actions]
        stream = self._new_stream(layout.image_tokens, layout.block)
        offsets = [layout.slot_start(frame) for frame in range(len(known))]
        max_tokens = len(actions) * layout.block - layout.action_slots
        self._submit(stream, self._ids + slots, known, offsets, max_tokens, more=False)
        try:
            for count, action in enumerate(actions):
                piece = await stream.next_piece()
                tokens = piece[-layout.image_tokens :]
                # The core's history has what it sampled into the slots, which the prefix cache is keyed by.
                self._ids += piece if count else slots + piece
                self._actions.append(action)
                self._num_frames += 1
                yield self._grid(tokens)
        finally:
            self._pump.drop(stream)

    async def close(self) -> None:
        """See `terra.engine.base.Session.close`."""
        self._end_live()
        self._closed = True

    def _check(self, actions: Actions) -> None:
        if self._closed:
            raise EngineError("the session is closed")
        check_actions(actions, self._num_frames, self._engine.spec)

    async def _next_live(self, action: Action, slots: list[int]) -> list[int]:
        """The next frame's tokens from the streaming request; without one, a new request with the whole history."""
        layout = self._layout
        if self._live is None:
            self._live = self._new_stream(layout.image_tokens, layout.image_tokens)
            chunk, actions = self._ids + slots, [*self._actions, action]
            offsets = [layout.slot_start(frame) for frame in range(len(actions))]
        else:
            # The last token was sampled but never fed: it has no KV yet.
            chunk, actions, offsets = [self._ids[-1], *slots], [action], [1]
        self._submit(self._live, chunk, actions, offsets, layout.image_tokens, more=True)
        return await self._live.next_piece()

    def _new_stream(self, first: int, later: int) -> Stream:
        return Stream(f"terra-{next(self._engine._names)}", first, later)

    def _submit(
        self,
        stream: Stream,
        chunk: list[int],
        actions: Sequence[Action],
        offsets: Sequence[int],
        max_tokens: int,
        *,
        more: bool,
    ) -> None:
        rendered = render(list(chunk), torch.stack(list(actions)), offsets)
        self._pump.add(stream, rendered, max_tokens, self._params, lora=self._lora, more=more)

    def _end_live(self) -> None:
        if self._live is not None:
            self._pump.drop(self._live)
            self._live = None

    def _grid(self, tokens: list[int]) -> FrameTokens:
        return rearrange(torch.tensor(tokens), "(rows cols) -> rows cols", rows=self._rows)
