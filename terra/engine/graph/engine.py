"""The graph engine's asynchronous face: sessions request frames, and one thread decodes all that are requested."""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import torch

from terra.device import has_fp8, torch_device, torch_dtype
from terra.engine.base import EngineCounters, EngineSpec, check_actions, check_adapter, check_prompt
from terra.engine.graph.scheduler import Run, Scheduler, WarmUp, Window
from terra.engine.graph.slots import Slots
from terra.engine.graph.step import Backend, DecodeSteps, TorchBackend
from terra.errors import ConfigError, EngineError
from terra.prompt import Action, Actions, FrameTokens, Prompt, build_prompt
from terra.sampling import SamplingParams
from terra.world_model import load_world_model

_MIN_CAPABILITY = (8, 0)
"""Compute capability of a GPU that the kernels need: bfloat16 in tensor cores, asynchronous copies to shared memory."""
_MOST_SESSIONS, _MOST_STEP_TOKENS = 4096, 2**17


class GraphEngine:
    """Decodes the windows of many sessions as one batch, by steps that are captured as CUDA graphs.

    Drafts are those of `terra.engine.jacobi.JacobiEngine`, and so are the tokens. On a GPU the engine is
    batch-invariant: a rollout's tokens are the same to the bit alone, beside others and with drafts (of top-k and top-p
    torch's sums of probabilities are left to rounding). On a CPU the same steps run in torch without graphs, slower
    than other engines, for comparison; a CPU's BLAS guarantees no reduction order, so that there tokens may differ
    where two are equally likely to the rounding of float32.

    A new window's context, and the context of a window that slides, is read (prefill) slot by slot between two decode
    steps, or shared with a slot that holds the same context; the other sessions wait meanwhile. And one session with
    top-k or top-p makes the steps of all sessions slower, see `terra.engine.graph.step.DecodeSteps`.

    Args:
        checkpoint: a checkpoint folder.
        adapter: folder of a LoRA adapter to merge, or None.
        drafts: tokens that a decode step reads in a window beyond the first, at most; 0 is sequential decoding.
        max_sessions: slots of the batch, each with a whole window's KV cache; more sessions than that take turns.
        step_tokens: tokens that one decode step reads, over all slots, at most; with many sessions each has fewer
            drafts, and with more sessions than `step_tokens` each has one token. A step that computes longer than it
            reads weights and keys takes longer with each token.
        dtype: element type of the weights, "bfloat16" or "float32".
        device: a torch device, such as "cuda".
        fp8_weights: hold layers and lm head in 8 bits and multiply them with activations in 8 bits (W8A8).
        fp8_cache: hold keys and values in 8 bits.

    Raises:
        ConfigError: fewer than 0 drafts, 1 session or 1 token a step, no such dtype or device, a GPU without what is
            needed, or an option that this engine does not have.
        CheckpointError: see `terra.world_model.load_config`.
    """

    adapters: tuple[str, ...] = ()

    def __init__(
        self,
        checkpoint: Path,
        *,
        drafts: int,
        adapter: Path | None = None,
        max_sessions: int = 1,
        step_tokens: int = 512,
        dtype: str = "bfloat16",
        device: str = "cuda",
        fp8_weights: bool = False,
        fp8_cache: bool = False,
        **unknown: object,
    ) -> None:
        for name in unknown:
            reason = ": it is always batch-invariant on a GPU" if name == "batch_invariant" else ""
            raise ConfigError(f"engine.{name}: engine=graph has no such option{reason}")
        if drafts < 0:
            raise ConfigError(f"engine.drafts: expected 0 or more, got {drafts}")
        if not 1 <= max_sessions <= _MOST_SESSIONS:
            raise ConfigError(f"engine.max_sessions: expected 1 to {_MOST_SESSIONS}, got {max_sessions}")
        if not 1 <= step_tokens <= _MOST_STEP_TOKENS:
            raise ConfigError(f"engine.step_tokens: expected 1 to {_MOST_STEP_TOKENS}, got {step_tokens}")
        where = torch_device(device)
        check_gpu(where)
        if (fp8_weights or fp8_cache) and not has_fp8(where):
            raise ConfigError("engine.fp8: expected a GPU of compute capability 8.9 or higher")
        model = load_world_model(checkpoint, adapter=adapter, dtype=torch_dtype(dtype), device=where)
        self._spec = EngineSpec.of(model.config)
        self._requests: queue.SimpleQueue[Run | WarmUp | None] = queue.SimpleQueue()
        self._closed = False
        self._compiles = where.type == "cuda"
        fp8 = {"fp8_weights": fp8_weights, "fp8_cache": fp8_cache}
        slots = Slots(model, max_sessions, drafts, step_tokens=step_tokens, **fp8)
        self._scheduler = Scheduler(slots, DecodeSteps(slots, make_backend(where)), self._requests)
        # A daemon: a program that ends without closing the engine does not wait for it.
        self._thread = threading.Thread(target=self._scheduler.run, name="terra-graph", daemon=True)
        self._thread.start()

    @property
    def spec(self) -> EngineSpec:
        """The model's geometry and rates."""
        return self._spec

    @property
    def failure(self) -> str | None:
        """Why the engine stopped by itself; None while it works."""
        return self._scheduler.failure

    @property
    def counters(self) -> EngineCounters:
        """All that `EngineCounters` counts; passes as they were when frames were last handed out."""
        return self._scheduler.counters

    async def open(
        self, prompt: Prompt, sampling: SamplingParams, seed: int, adapter: str | None = None
    ) -> "GraphSession":
        """See `terra.engine.base.Engine.open`."""
        if self._closed or self.failure is not None:
            raise EngineError(self.failure or "the engine is closed")
        check_adapter(adapter, self.adapters)
        check_prompt(prompt, self._spec, seed)
        return GraphSession(self, prompt, sampling, seed)

    async def warm_up(self, num_context: int) -> None:
        """See `terra.engine.base.WarmsUp`. On a CPU, where nothing is compiled, a call does nothing."""
        if not self._compiles:
            return
        tokens = torch.zeros(num_context, 1, self._spec.layout.image_tokens, dtype=torch.int64)
        prompt = build_prompt(tokens, torch.zeros(num_context - 1, *self._spec.action_shape))
        request = WarmUp(prompt)
        self._request(request)
        await asyncio.wrap_future(request.done)

    async def close(self) -> None:
        """See `terra.engine.base.Engine.close`."""
        if not self._closed:
            self._closed = True
            self._requests.put(None)
            await asyncio.to_thread(self._thread.join)

    def request(self, window: Window, first: int, actions: Iterator[Action | None], num_frames: int | None) -> Run:
        """Let the scheduler make frames of a window, see `Run`; called in the event loop that receives them.

        Raises:
            EngineError: the engine is closed or has failed.
        """
        run = Run(window, first, actions, num_frames, asyncio.get_running_loop())
        self._request(run)
        return run

    def _request(self, request: Run | WarmUp) -> None:
        if self._closed or self.failure is not None:
            raise EngineError(self.failure or "the engine is closed")
        self._requests.put(request)
        if self.failure is not None:  # the engine failed in between, and nobody takes the request
            raise EngineError(self.failure)


def check_gpu(device: torch.device) -> None:
    """Refuse a GPU that the kernels do not run on, before any weights load.

    Raises:
        ConfigError: a compute capability below 8.0.
    """
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _MIN_CAPABILITY:
        raise ConfigError(
            f"engine=graph: expected a GPU of compute capability 8.0 or higher, got {'.'.join(map(str, capability))} "
            f"({torch.cuda.get_device_name(device)}): use engine=vllm"
        )


def make_backend(device: torch.device) -> Backend:
    """Triton kernels for a GPU, torch elsewhere."""
    if device.type != "cuda":
        return TorchBackend()
    from terra.engine.graph.kernels.backend import TritonBackend
    from terra.engine.graph.kernels.launch import device_limits

    return TritonBackend(device_limits(device))


class GraphSession:
    """One rollout within one window."""

    def __init__(self, engine: GraphEngine, prompt: Prompt, sampling: SamplingParams, seed: int) -> None:
        self._engine = engine
        self._window: Window | None = Window(prompt, sampling, seed, last=prompt.num_frames - 1)
        self._num_frames = prompt.num_frames

    async def step(self, action: Action) -> FrameTokens:
        """See `terra.engine.base.Session.step`."""
        async for frame in self.run(action[None]):
            return frame
        raise EngineError("the session is closed")

    async def run(self, actions: Actions) -> AsyncIterator[FrameTokens]:
        """See `terra.engine.base.Session.run`."""
        check_actions(actions, self._num_frames, self._engine.spec)
        async with aclosing(self._run(iter(actions), len(actions))) as frames:
            async for frame in frames:
                yield frame

    def run_live(self, actions: Iterator[Action | None]) -> AsyncGenerator[FrameTokens, None]:
        """See `terra.engine.base.RunsLive.run_live`; the engine's thread asks for the actions."""
        return self._run(self._checked(actions), None)

    async def _run(self, actions: Iterator[Action | None], num_frames: int | None) -> AsyncGenerator[FrameTokens, None]:
        window = self._window
        if window is None:
            raise EngineError("the session is closed")
        if num_frames == 0:
            return
        run = self._engine.request(window, self._num_frames, actions, num_frames)
        try:
            while num_frames is None or self._num_frames < run.first + num_frames:
                frame = await run.frames.get()
                if frame is None:
                    return
                if isinstance(frame, Exception):
                    raise frame
                self._num_frames += 1
                yield frame
        finally:
            run.cancelled = True

    def _checked(self, actions: Iterator[Action | None]) -> Iterator[Action | None]:
        num_frames = self._num_frames
        for action in actions:
            if action is not None:
                check_actions(action[None], num_frames, self._engine.spec)
                num_frames += 1
            yield action

    async def close(self) -> None:
        """See `terra.engine.base.Session.close`."""
        if self._window is not None:
            self._window.closed = True
            self._window = None  # frees the window's snapshot
