"""The engine of CUDA graphs: sessions ask for frames, one thread computes all that are asked for, pass by pass."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from einops import rearrange
from jaxtyping import Int
from torch import Tensor

from terra.device import has_fp8, torch_device, torch_dtype
from terra.engine.base import EngineCounters, EngineSpec, check_actions, check_prompt
from terra.engine.graph.lanes import Aim, Lanes, Snapshot
from terra.errors import ConfigError, EngineError
from terra.prompt import Action, Actions, FrameTokens, Prompt
from terra.sampling import SamplingParams
from terra.world_model import load_world_model

logger = logging.getLogger(__name__)

_PASSES = 16
"""Passes between two looks at what is asked for."""


class GraphEngine:
    """Runs the world model by passes over the windows of many sessions, captured as CUDA graphs.

    Drafts are those of `terra.engine.jacobi.JacobiEngine`, and so are the tokens. On a CPU the same passes run without
    graphs, slower than other engines, for comparison.

    Args:
        checkpoint: a checkpoint folder.
        drafts: tokens a pass reads in a window beyond the first, at most; 0 is sequential decoding.
        max_sessions: windows computed at once, each with a whole window's KV cache; more sessions than that take turns.
        dtype: element type of the weights, "bfloat16" or "float32".
        device: a torch device, such as "cuda".
        fp8_weights: layers and head are held in 8 bits and multiplied with states in 8 bits (W8A8).
        fp8_cache: keys and values are held in 8 bits.
        batch_invariant: a rollout's tokens are the same to the bit alone, beside others and with drafts. Without it
            that holds in float32 alone, as far as no two tokens are equally good to its rounding; bfloat16 and 8 bits
            round what they sum in another order. Of top-k and top-p torch's sums of probabilities are left to rounding.
            None: on a GPU, unless all is in float32.

    Raises:
        ConfigError: fewer than 0 drafts or 1 session, no such dtype or device, a GPU that has no 8 bits, or batch
            invariance asked of a CPU, whose library sums as it likes.
        CheckpointError: see `terra.world_model.load_config`.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        drafts: int,
        max_sessions: int = 1,
        dtype: str = "bfloat16",
        device: str = "cuda",
        fp8_weights: bool = False,
        fp8_cache: bool = False,
        batch_invariant: bool | None = None,
    ) -> None:
        if drafts < 0:
            raise ConfigError(f"engine.drafts: expected 0 or more, got {drafts}")
        if max_sessions < 1:
            raise ConfigError(f"engine.max_sessions: expected 1 or more, got {max_sessions}")
        place = torch_device(device)
        if (fp8_weights or fp8_cache) and not has_fp8(place):
            raise ConfigError("engine.fp8: expected a GPU of compute capability 8.9 or higher")
        if batch_invariant is None:
            batch_invariant = place.type == "cuda" and (fp8_weights or fp8_cache or dtype != "float32")
        if batch_invariant and place.type != "cuda":
            raise ConfigError(f"engine.batch_invariant: expected a GPU, got engine.device={device}")
        model = load_world_model(checkpoint, dtype=torch_dtype(dtype), device=place)
        self._spec = EngineSpec.of(model.config)
        self._asked: queue.SimpleQueue[_Frame | None] = queue.SimpleQueue()
        self._closed = False
        # A daemon: a program that ends without closing the engine does not wait for it.
        rounding = {"fp8_weights": fp8_weights, "fp8_cache": fp8_cache, "batch_invariant": batch_invariant}
        lanes = Lanes(model, max_sessions, drafts, **rounding)
        self._worker = _Worker(lanes, self._asked)
        self._thread = threading.Thread(target=self._worker.run, name="terra-graph", daemon=True)
        self._thread.start()

    @property
    def spec(self) -> EngineSpec:
        """The model's geometry and rates."""
        return self._spec

    @property
    def failure(self) -> str | None:
        """Why the engine stopped by itself; None while it works."""
        return self._worker.failure

    @property
    def counters(self) -> EngineCounters:
        """Tokens that were prefilled and sampled, and the share of slots that open sessions hold."""
        return self._worker.counters

    async def open(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> "GraphSession":
        """See `terra.engine.base.Engine.open`."""
        if self._closed:
            raise EngineError("the engine is closed")
        check_prompt(prompt, self._spec, seed)
        return GraphSession(self, prompt, sampling, seed)

    async def close(self) -> None:
        """See `terra.engine.base.Engine.close`."""
        if not self._closed:
            self._closed = True
            self._asked.put(None)
            await asyncio.to_thread(self._thread.join)

    def ask(self, window: "_Window", frame: int, action: Action) -> "Future[FrameTokens]":
        """Let a frame of a window be made; those of one window in the order in which they are asked for."""
        if self._closed or self.failure is not None:
            raise EngineError(self.failure or "the engine is closed")
        asked = _Frame(window, frame, action)
        self._asked.put(asked)
        if self.failure is not None:  # it came between, and nobody takes what was put
            raise EngineError(self.failure)
        return asked.made


class GraphSession:
    """One rollout within one window."""

    def __init__(self, engine: GraphEngine, prompt: Prompt, sampling: SamplingParams, seed: int) -> None:
        self._engine = engine
        self._window: _Window | None = _Window(prompt, sampling, seed, last=prompt.num_frames - 1)
        self._num_frames = prompt.num_frames

    async def step(self, action: Action) -> FrameTokens:
        """See `terra.engine.base.Session.step`."""
        async for frame in self.run(action[None]):
            return frame
        raise EngineError("the session is closed")

    async def run(self, actions: Actions) -> AsyncIterator[FrameTokens]:
        """See `terra.engine.base.Session.run`."""
        check_actions(actions, self._num_frames, self._engine.spec)
        window = self._window
        if window is None:
            raise EngineError("the session is closed")
        first = self._num_frames
        asked = [self._engine.ask(window, first + index, action) for index, action in enumerate(actions)]
        try:
            for made in asked:
                frame = await asyncio.wrap_future(made)
                self._num_frames += 1
                yield frame
        finally:
            for made in asked:
                made.cancel()

    async def close(self) -> None:
        """See `terra.engine.base.Session.close`."""
        if self._window is not None:
            self._window.closed = True
            self._window = None  # and with it what is kept of it


@dataclass(eq=False)
class _Window:
    """A session as the worker sees it; `last` is the number of the last frame that is there.

    `lane` and `snapshot` are the worker's: one of them, or none before the first frame.
    """

    prompt: Prompt
    sampling: SamplingParams
    seed: int
    last: int
    closed: bool = False
    lane: int | None = None
    snapshot: Snapshot | None = None


@dataclass(eq=False)
class _Frame:
    """A frame that is asked for."""

    window: _Window
    number: int
    action: Action
    made: "Future[FrameTokens]" = field(default_factory=Future)


@dataclass(eq=False)
class _Made:
    """Frames that are made and not yet handed out; `tokens` waits for their copy."""

    frames: list[_Frame]
    tokens: Callable[[], Int[Tensor, "frames image_tokens"]]


class _Worker:
    """Makes the frames that come in by a queue, until None comes."""

    def __init__(self, lanes: Lanes, asked: "queue.SimpleQueue[_Frame | None]") -> None:
        self._lanes, self._asked = lanes, asked
        self._holders: list[_Window | None] = [None] * lanes.num_lanes
        # Frames that are not handed out yet: all of them, those that wait for a lane, and those that are made in one.
        self._owed: list[_Frame] = []
        self._waiting: list[_Frame] = []
        self._making: dict[int, _Frame] = {}
        self._made: _Made | None = None
        # Tokens that lanes lack, or fewer: as if all drafts had been right since the device was asked.
        self._left: dict[int, int] = {}
        self.failure: str | None = None
        self._prefilled = self._sampled = 0

    @property
    def counters(self) -> EngineCounters:
        held = sum(holder is not None and not holder.closed for holder in self._holders)
        return EngineCounters(self._prefilled, 0, self._sampled, held / len(self._holders))

    def run(self) -> None:
        """Work until None comes; what fails, fails every frame that is asked for, with its reason."""
        try:
            while self._take():
                self._start()
                made = self._advance() if self._making else None
                # The device is at work on the next frames meanwhile.
                self._hand_out()
                self._made = made
            self._hand_out()
            self._fail(EngineError("the engine is closed"))
        except Exception as error:
            logger.exception("the engine failed")
            self.failure = f"the engine failed: {type(error).__name__}: {error}".splitlines()[0]
            self._fail(EngineError(self.failure))
        finally:
            del self._lanes  # the weights

    def _take(self) -> bool:
        """Take what is asked for by now, and wait for it if there is nothing else to do."""
        while True:
            try:
                frame = self._asked.get(block=not (self._making or self._waiting or self._made))
            except queue.Empty:
                return True
            if frame is None:
                return False
            self._owed.append(frame)
            self._waiting.append(frame)

    def _start(self) -> None:
        """Give lanes to frames that wait, first come, first served, one frame of a window at a time."""
        busy = {id(frame.window) for frame in self._making.values()}
        waiting, self._waiting = self._waiting, []
        wanted = {id(frame.window) for frame in waiting}
        aims = []
        for frame in waiting:
            window = frame.window
            if frame.made.cancelled():
                continue
            if window.closed:  # what was in its lane may be lost
                with suppress(InvalidStateError):  # cancelled
                    frame.made.set_exception(EngineError("the session is closed"))
                continue
            if id(window) in busy:
                self._waiting.append(frame)
                continue
            lane = window.lane if window.lane is not None else self._free_lane(wanted)
            if lane is None:
                self._waiting.append(frame)
            elif frame.made.set_running_or_notify_cancel():
                if window.lane is None:
                    self._give(lane, window)
                aims.append(Aim(lane, frame.number, frame.action, window.sampling))
                self._making[lane], self._left[lane] = frame, self._lanes.frame_length
            else:
                continue
            busy.add(id(window))
        if aims:
            self._lanes.aim(aims)

    def _free_lane(self, wanted: set[int]) -> int | None:
        """A lane in which nothing is being made, best one that nobody holds, else one whose window is not wanted."""

        def price(lane: int) -> tuple[bool, bool]:
            holder = self._holders[lane]
            return holder is not None and not holder.closed, id(holder) in wanted

        return min((lane for lane in range(len(self._holders)) if lane not in self._making), key=price, default=None)

    def _give(self, lane: int, window: _Window) -> None:
        holder = self._holders[lane]
        if holder is not None:
            holder.lane = None
            if not holder.closed:
                holder.snapshot = self._lanes.save(lane, holder.last)
        if window.snapshot is None:
            self._lanes.begin(lane, window.prompt, window.seed)
            self._prefilled += window.prompt.num_frames * self._lanes.frame_length
        else:
            self._lanes.load(lane, window.snapshot)
        window.lane, window.snapshot, self._holders[lane] = lane, None, window

    def _advance(self) -> _Made | None:
        """Make some passes; the frames that are done then."""
        lanes = list(self._making)
        passes = min(_PASSES, self._lanes.passes_needed(lanes, self._left))
        samplings = frozenset(frame.window.sampling for frame in self._making.values())
        self._lanes.advance(lanes, samplings, passes)
        most = passes * self._lanes.width(max(lanes) + 1)
        self._left = {lane: self._left[lane] - most for lane in lanes}
        # As long as no lane can have its frame yet, there is no need to wait for the device and ask.
        if min(self._left.values()) <= 0:
            self._left = self._lanes.lacking(lanes)
        made = {lane: self._making.pop(lane) for lane, left in self._left.items() if not left}
        if not made:
            return None
        for frame in made.values():
            frame.window.last = frame.number
        return _Made(list(made.values()), self._lanes.frames([(lane, frame.number) for lane, frame in made.items()]))

    def _hand_out(self) -> None:
        if self._made:
            for frame, grid in zip(self._made.frames, self._made.tokens(), strict=True):
                self._sampled += grid.numel()
                rows = frame.window.prompt.tokens.shape[1]
                frame.made.set_result(rearrange(grid.clone(), "(rows cols) -> rows cols", rows=rows))
            self._made = None
        self._owed = [frame for frame in self._owed if not frame.made.done()]

    def _fail(self, error: EngineError) -> None:
        while not self._asked.empty():
            frame = self._asked.get()
            if frame is not None:
                self._owed.append(frame)
        for frame in self._owed:
            with suppress(InvalidStateError):  # cancelled, or handed out
                frame.made.set_exception(error)
