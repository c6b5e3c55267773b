"""The graph engine's thread: a frame waits for a slot of the batch, is decoded beside others, and goes to its session.

A slot is one window's place in the batch: its KV cache and what the device knows of it, see `terra.engine.graph.slots`.
"""

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto

from einops import rearrange
from jaxtyping import Int
from torch import Tensor

from terra.engine.base import EngineCounters
from terra.engine.graph.slots import FrameRequest, Slots, Snapshot
from terra.engine.graph.step import DecodeSteps
from terra.errors import EngineError
from terra.prompt import Action, FrameTokens, Prompt
from terra.sampling import SamplingParams

logger = logging.getLogger(__name__)

_STEPS_PER_TURN = 16
"""Decode steps between two looks at new requests."""


@dataclass(eq=False)
class Window:
    """A session's window. `last` is the number of its last complete frame; the scheduler alone writes it.

    A window that has frames of its own is in a `slot`, or its `snapshot` is kept, never both; one that has none yet has
    neither.
    """

    prompt: Prompt
    sampling: SamplingParams
    seed: int
    last: int
    closed: bool = False
    slot: int | None = None
    snapshot: Snapshot | None = None


class FrameState(Enum):
    """Where a frame is on its way: it waits for a slot, is decoded in one, or is complete and on its way to the CPU."""

    WAITING = auto()
    DECODING = auto()
    COPYING = auto()


@dataclass(eq=False)
class Frame:
    """A frame that a session has requested.

    `tokens_remaining` is a lower bound while the frame is decoded: as if all drafts had been accepted since the device
    was last asked.
    """

    window: Window
    number: int
    action: Action
    result: "Future[FrameTokens]" = field(default_factory=Future)
    state: FrameState = FrameState.WAITING
    tokens_remaining: int = 0


@dataclass(eq=False)
class _Copy:
    """Complete frames, and what waits for the copy of their tokens."""

    frames: list[Frame]
    tokens: Callable[[], Int[Tensor, "frames image_tokens"]]


class Scheduler:
    """Makes the frames that come in by a queue, until None comes.

    One frame of a window is decoded at a time, and a window has one slot at most. A slot keeps its window when a frame
    is complete, until another window needs the slot.
    """

    def __init__(self, slots: Slots, steps: DecodeSteps, requests: "queue.SimpleQueue[Frame | None]") -> None:
        self._slots, self._steps, self._requests = slots, steps, requests
        self._windows: list[Window | None] = [None] * slots.num_slots
        # All frames that are not handed out yet, in the order of their requests; those of one window stay in order.
        self._frames: list[Frame] = []
        self._copy: _Copy | None = None
        self.failure: str | None = None
        self._prefilled = self._sampled = 0

    @property
    def counters(self) -> EngineCounters:
        """Tokens that were prefilled and sampled, and the share of slots that open sessions hold."""
        held = sum(window is not None and not window.closed for window in self._windows)
        return EngineCounters(self._prefilled, 0, self._sampled, held / len(self._windows))

    def run(self) -> None:
        """Work until None comes. An error fails all frames that are not handed out, with its reason."""
        try:
            while self._take():
                self._start()
                copy = self._decode()
                # The device is at work on the next frames meanwhile.
                self._hand_out()
                self._copy = copy
            self._hand_out()
            self._fail(EngineError("the engine is closed"))
        except Exception as error:
            logger.exception("the engine failed")
            self.failure = f"the engine failed: {type(error).__name__}: {error}".splitlines()[0]
            self._fail(EngineError(self.failure))
        finally:
            del self._slots, self._steps  # the weights

    def _take(self) -> bool:
        """Take the requests that are there; wait for one if no frame is on its way. False when None came."""
        while True:
            try:
                frame = self._requests.get(block=not self._frames)
            except queue.Empty:
                return True
            if frame is None:
                return False
            self._frames.append(frame)

    def _in(self, state: FrameState) -> list[Frame]:
        return [frame for frame in self._frames if frame.state is state]

    def _start(self) -> None:
        """Give slots to frames that wait, first come, first served, one frame of a window at a time."""
        waiting = self._in(FrameState.WAITING)
        decoding = {id(frame.window) for frame in self._in(FrameState.DECODING)}
        wanted = {id(frame.window) for frame in waiting}
        begun = []
        for frame in waiting:
            window = frame.window
            if frame.result.cancelled():
                continue
            if window.closed:  # its slot may have another window by now
                with suppress(InvalidStateError):  # cancelled
                    frame.result.set_exception(EngineError("the session is closed"))
                continue
            if id(window) in decoding:
                continue
            slot = window.slot if window.slot is not None else self._free_slot(decoding, wanted)
            if slot is None or not frame.result.set_running_or_notify_cancel():
                continue
            if window.slot is None:
                self._give(slot, window)
            begun.append(FrameRequest(slot, frame.number, frame.action, window.sampling))
            frame.state, frame.tokens_remaining = FrameState.DECODING, self._slots.layout.block
            decoding.add(id(window))
        if begun:
            self._slots.begin_frames(begun)

    def _free_slot(self, decoding: set[int], wanted: set[int]) -> int | None:
        """A slot where nothing is decoded: best one without a window, else one whose window no waiting frame needs."""

        def price(slot: int) -> tuple[bool, bool]:
            window = self._windows[slot]
            return window is not None and not window.closed, id(window) in wanted

        free = (slot for slot, window in enumerate(self._windows) if id(window) not in decoding)
        return min(free, key=price, default=None)

    def _give(self, slot: int, window: Window) -> None:
        before = self._windows[slot]
        if before is not None:
            before.slot = None
            if not before.closed:
                before.snapshot = self._slots.swap_out(slot, before.last)
        if window.snapshot is None:
            self._slots.prefill(slot, window.prompt, window.seed)
            self._prefilled += window.prompt.num_frames * self._slots.layout.block
        else:
            self._slots.swap_in(slot, window.snapshot)
        window.slot, window.snapshot, self._windows[slot] = slot, None, window

    def _decode(self) -> _Copy | None:
        """Make some decode steps; the frames that are complete then."""
        frames = {frame.window.slot: frame for frame in self._in(FrameState.DECODING) if frame.window.slot is not None}
        if not frames:
            return None
        slots = list(frames)
        min_steps = self._steps.min_steps({slot: frame.tokens_remaining for slot, frame in frames.items()})
        num_steps = min(_STEPS_PER_TURN, min_steps)
        self._steps.run(slots, frozenset(frame.window.sampling for frame in frames.values()), num_steps)
        most = num_steps * self._steps.width(max(slots) + 1)
        for frame in frames.values():
            frame.tokens_remaining -= most
        # As long as no slot can have its frame yet, there is no need to wait for the device and ask.
        if min(frame.tokens_remaining for frame in frames.values()) <= 0:
            for slot, remaining in self._slots.tokens_remaining(slots).items():
                frames[slot].tokens_remaining = remaining
        complete = {slot: frame for slot, frame in frames.items() if not frame.tokens_remaining}
        if not complete:
            return None
        for frame in complete.values():
            frame.state, frame.window.last = FrameState.COPYING, frame.number
        numbers = [(slot, frame.number) for slot, frame in complete.items()]
        return _Copy(list(complete.values()), self._slots.copy_frames(numbers))

    def _hand_out(self) -> None:
        """Give away the frames whose copy was begun in the turn before, and forget all that are done."""
        if self._copy:
            for frame, tokens in zip(self._copy.frames, self._copy.tokens(), strict=True):
                self._sampled += tokens.numel()
                rows = frame.window.prompt.tokens.shape[1]
                frame.result.set_result(rearrange(tokens.clone(), "(rows cols) -> rows cols", rows=rows))
            self._copy = None
        self._frames = [frame for frame in self._frames if not frame.result.done()]

    def _fail(self, error: EngineError) -> None:
        while not self._requests.empty():
            frame = self._requests.get()
            if frame is not None:
                self._frames.append(frame)
        for frame in self._frames:
            with suppress(InvalidStateError):  # cancelled, or handed out
                frame.result.set_exception(error)
