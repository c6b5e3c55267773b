"""The graph engine's thread: a frame waits for a slot of the batch, is decoded beside others, and goes to its session.

A slot is one window's place in the batch: its KV cache and what the device knows of it, see `terra.engine.graph.slots`.
"""

import asyncio
import hashlib
import logging
import queue
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from terra.engine.base import EngineCounters
from terra.engine.graph.slots import FrameRequest, Slots, Snapshot
from terra.engine.graph.step import DecodeSteps
from terra.engine.graph.transfers import mark
from terra.errors import EngineError
from terra.prompt import Action, FrameTokens, Prompt
from terra.sampling import SamplingParams

logger = logging.getLogger(__name__)

_STEPS_PER_TURN = 16
"""Decode steps of one turn of `Scheduler.run`, at most, besides those queued before a prefill or a frame's begin."""

_MANY_FRAMES, _MIN_STEPS_FOR_MANY = 8, 2
"""While frames of so many slots are decoded with drafts, a turn has at least so many steps.

One of the frames may be complete after nearly every step then, and what the host does about that may take longer than
one step takes the device (so measured with 16 sessions of a model of 160 million parameters). Without drafts it is
known when a frame will be complete.
"""

_STEPS_BEFORE_PREFILL = 3
"""Decode steps of other slots that are queued before a prefill, whose launches may keep the host for milliseconds."""


@dataclass(eq=False)
class Window:
    """A session's window. `last` is the number of its last complete frame; the scheduler alone writes it.

    A window whose frames have begun is in a `slot`; while another window has that slot, its `snapshot` is kept.
    """

    prompt: Prompt
    sampling: SamplingParams
    seed: int
    last: int
    closed: bool = False
    slot: int | None = None
    snapshot: Snapshot | None = None

    @cached_property
    def context_digest(self) -> bytes:
        """Digest of the prompt: windows with the same digest have the same context, tokens and actions."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in (self.prompt.tokens, self.prompt.actions):
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.digest()


@dataclass(eq=False)
class Run:
    """A session's request: consecutive frames of its window.

    Attributes:
        window: the session's.
        first: number, in the window, of this run's first frame.
        actions: asked, in the scheduler's thread, for each frame's action when the frame can begin; None: none yet.
        num_frames: number of frames requested, at least one; None: as many as there are actions.
        loop: the session's event loop.
        frames: receives, in that loop, each frame in order, and what ends the run before `num_frames`: None where there
            is no action and no frame in the making, or an error.
        error: what `actions` raised; ends the run behind the frames before.
        begun: number of frames whose decoding has begun, complete ones included.
        cancelled: the session no longer reads `frames`; set by the event loop, read by the scheduler's thread.
    """

    window: Window
    first: int
    actions: Iterator[Action | None]
    num_frames: int | None
    loop: asyncio.AbstractEventLoop
    frames: "asyncio.Queue[FrameTokens | Exception | None]" = field(default_factory=asyncio.Queue)
    error: Exception | None = None
    begun: int = 0
    cancelled: bool = False

    def next_action(self) -> Action | None:
        """The action of the next frame; None if there is none yet, or none anymore."""
        try:
            return None if self.error else next(self.actions, None)
        except Exception as error:
            self.error = error
            return None


@dataclass(eq=False)
class WarmUp:
    """A request to compile kernels and capture decode steps before there are sessions.

    Attributes:
        prompt: a made-up context, of as many frames as those of the sessions to come.
        done: has a result when that is done, or an EngineError.
    """

    prompt: Prompt
    done: "Future[None]" = field(default_factory=Future)


@dataclass(frozen=True, eq=False)
class _Frame:
    """A frame that is decoded: its run, its number in the window, and the position of its last token."""

    run: Run
    number: int
    last: int


@dataclass(eq=False)
class _Decoding:
    """What is decoded in a slot.

    Attributes:
        frames: the frame in the making, and perhaps the one behind it, which the same steps go on to.
        start: the slot's `start` at most: as if all drafts had been accepted since the last question that the device
            has answered.
    """

    frames: deque[_Frame]
    start: int

    @property
    def tokens_remaining(self) -> int:
        """How many tokens the first frame lacks, at least; 0 or less: it may be complete."""
        return self.frames[0].last - self.start


@dataclass(eq=False)
class _Question:
    """A question to the device after a turn's decode steps: where is `start` of each slot?

    Attributes:
        decoding: what was decoded then, by slot.
        wait: waits for the answer, one number for each slot of the engine.
        tokens_since: how many tokens a slot may have got after the question.
    """

    decoding: dict[int, _Decoding]
    wait: Callable[[], list[int]]
    tokens_since: int = 0


@dataclass(eq=False)
class _Copy:
    """The runs of some complete frames, in order, and what waits for their copies, see `Slots.copy_frames`."""

    runs: list[Run]
    wait: Callable[[], tuple[Tensor, ...]]


class Scheduler:
    """Takes requests for frames, and for a warm-up, from a queue and does what they ask, until None comes.

    A window has one slot at most, and its frames are decoded one after another: the next frame of a run begins when the
    one before may be complete soon, unless more windows wait for a slot than slots are idle. A slot keeps its window
    when a frame is complete, or given up because its run is cancelled, until another window needs the slot.
    """

    def __init__(self, slots: Slots, steps: DecodeSteps, requests: "queue.SimpleQueue[Run | WarmUp | None]") -> None:
        self._slots, self._steps, self._requests = slots, steps, requests
        self._windows: list[Window | None] = [None] * slots.num_slots
        # Runs with frames that are not begun, in the order of their requests.
        self._waiting: list[Run] = []
        self._decoding: dict[int, _Decoding] = {}  # by slot
        self._asked: _Question | None = None  # in the turn before
        self._copies: list[_Copy] = []  # begun in the turn before, and in this one
        self._ended: list[Run] = []  # before they have all their frames; told behind those that they have
        self._warming_up: WarmUp | None = None
        self.failure: str | None = None
        self._prefilled = self._cached = self._sampled = 0
        self._passes: tuple[int, ...] = ()

    @property
    def counters(self) -> EngineCounters:
        """All that is counted; passes as they were when frames were last handed out."""
        held = sum(window is not None and not window.closed for window in self._windows)
        usage = held / len(self._windows)
        return EngineCounters(self._prefilled, self._cached, self._sampled, usage, self._passes)

    def run(self) -> None:
        """Work until None comes. An error fails all runs that lack a frame, and a warm-up, with its reason."""
        try:
            while self._take():
                self._start()
                from_before = len(self._copies)
                self._decode()
                # The device is at work on the next frames meanwhile.
                self._hand_out(from_before)
                if sum(len(decoding.frames) for decoding in self._decoding.values()) == 1:
                    self._end_complete()
            self._hand_out(len(self._copies))
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
                request = self._requests.get(block=not (self._waiting or self._decoding or self._copies))
            except queue.Empty:
                return True
            if request is None:
                return False
            if isinstance(request, WarmUp):
                self._warm_up(request)
            else:
                self._waiting.append(request)

    def _warm_up(self, request: WarmUp) -> None:
        """Prefill the made-up context, and make each kind of decode step once, if no slot has a window yet."""
        if not request.done.set_running_or_notify_cancel():
            return
        self._warming_up = request  # if it fails, `_fail` finds it here
        if not any(self._windows):
            self._steps.warm_up(request.prompt.num_frames)
            self._slots.prefill(0, request.prompt, seed=0)
            mark(self._slots.ids.device)()
        self._warming_up = None
        request.done.set_result(None)

    def _start(self) -> None:
        """Give slots to frames that wait, first come, first served, and begin these frames."""
        for slot, decoding in list(self._decoding.items()):
            if all(frame.run.cancelled for frame in decoding.frames):
                del self._decoding[slot]
        free = self._free_slots()
        lacking = sum(run.window.slot is None and not run.cancelled for run in self._waiting)
        crowded = lacking > len(self._windows) - len(self._decoding)
        begun: list[FrameRequest] = []
        given: dict[int, Window] = {}
        waiting: list[Run] = []
        live: list[Run] = []  # behind the others, as if each frame were a request of its own
        under_way = dict(self._decoding)  # the device does not know yet of those that are added below
        for run in self._waiting:
            window = run.window
            if run.cancelled:
                continue
            if window.closed:  # its slot may have another window by now
                _deliver([(run, EngineError("the session is closed"))])
                continue
            slot = next(free, None) if window.slot is None else window.slot
            decoding = None if slot is None else self._decoding.get(slot)
            if slot is not None and (decoding is None or (not crowded and self._may_go_on(decoding, run))):
                action = run.next_action()
                if action is None:
                    (self._ended if decoding is None else live).append(run)
                    continue
                if window.slot is None:
                    self._give(slot, window)
                    given[slot] = window
                number = run.first + run.begun
                begun.append(FrameRequest(slot, number, action, window.sampling, goes_on=decoding is not None))
                if decoding is None:
                    decoding = self._decoding[slot] = _Decoding(deque(), self._slots.last_of(number - 1))
                decoding.frames.append(_Frame(run, number, self._slots.last_of(number)))
                run.begun += 1
                if run.num_frames is None:
                    live.append(run)
                    continue
            if run.begun != run.num_frames:
                waiting.append(run)
        self._waiting = waiting + live
        self._fill_slots(given, under_way)
        if len(under_way) == 1 and any(request.goes_on for request in begun):
            self._run_steps(under_way, 1)  # the device has nothing else to do while the host begins the frame
        if begun:
            self._slots.begin_frames(begun)

    def _may_go_on(self, decoding: _Decoding, run: Run) -> bool:
        """Whether a run's next frame may begin behind the one that is decoded: the run's own one, and nearly done.

        Not before, because a live run's action is best chosen late.
        """
        if len(decoding.frames) > 1 or decoding.frames[0].run is not run:
            return False
        # Of a frame alone it is known where it is, and that it may be complete after its next step.
        soon = self._steps.width(max(self._decoding) + 1) if len(self._decoding) == 1 else 0
        return decoding.tokens_remaining <= soon

    def _free_slots(self) -> Iterator[int]:
        """Slots to give away: first those without an open window, last those whose window waits for a frame.

        `_start` takes them one by one, and a slot whose own window has begun a frame meanwhile is left out.
        """
        wanted = {id(run.window) for run in self._waiting}

        def cost_of_eviction(slot: int) -> tuple[bool, bool]:
            window = self._windows[slot]
            return window is not None and not window.closed, id(window) in wanted

        idle = [slot for slot in range(len(self._windows)) if slot not in self._decoding]
        for slot in sorted(idle, key=cost_of_eviction):
            if slot not in self._decoding:
                yield slot

    def _give(self, slot: int, window: Window) -> None:
        """Let a window have a slot; `_fill_slots` follows."""
        before = self._windows[slot]
        if before is not None:
            before.slot = None
            if not before.closed:
                before.snapshot = self._slots.swap_out(slot, before.last)
        window.slot, self._windows[slot] = slot, window

    def _fill_slots(self, given: Mapping[int, Window], under_way: Mapping[int, _Decoding]) -> None:
        """Fill the slots that windows were given in this turn: from the window's snapshot, by a copy, or by prefill.

        While the host launches a prefill, the device goes on with the frames under way, unless all may be complete.

        A context that another slot holds is copied (prefix caching): decode steps write behind it only, so that it is
        whole however far that slot's window has gone. Of several new windows with one context, such as a planner's
        candidates, one is prefilled.
        """
        if not given:
            return
        self._slots.release(given)
        holders = {
            window.context_digest: slot
            for slot, window in enumerate(self._windows)
            if window is not None and slot not in given
        }
        copies: dict[bytes, list[int]] = defaultdict(list)
        for slot, window in given.items():
            if window.snapshot is not None:
                self._slots.swap_in(slot, window.snapshot)
                window.snapshot = None
            elif window.context_digest in holders:
                copies[window.context_digest].append(slot)
            else:
                if any(decoding.frames[-1].last > decoding.start for decoding in under_way.values()):
                    self._run_steps(under_way, _STEPS_BEFORE_PREFILL)
                self._slots.prefill(slot, window.prompt, window.seed)
                self._prefilled += window.prompt.num_frames * self._slots.layout.block
                holders[window.context_digest] = slot
        for digest, slots in copies.items():
            num_frames = given[slots[0]].prompt.num_frames
            self._slots.copy_context(holders[digest], slots, num_frames, [given[slot].seed for slot in slots])
            self._cached += len(slots) * num_frames * self._slots.layout.block

    def _decode(self) -> None:
        """Make some decode steps, and begin to copy the frames of which it is known that they are complete.

        If a frame may be complete, the device is asked after the turn's steps, and the answer is read in the next turn,
        once that turn's steps are queued. So the device is not idle while the host waits; the price is that turn's
        steps for a frame that was complete and has none behind it. If there is but one frame, `run` waits for the
        answer in the same turn.
        """
        if not self._decoding:
            return
        remaining = {slot: decoding.tokens_remaining for slot, decoding in self._decoding.items()}
        has_drafts = self._steps.width(max(remaining) + 1) > 1
        least = _MIN_STEPS_FOR_MANY if has_drafts and len(remaining) >= _MANY_FRAMES else 1
        self._run_steps(self._decoding, min(_STEPS_PER_TURN, max(least, self._steps.min_steps(remaining))))
        self._end_complete()
        # As long as no slot can have its frame yet, there is no need to ask.
        if any(decoding.tokens_remaining <= 0 for decoding in self._decoding.values()):
            self._asked = _Question(dict(self._decoding), self._slots.ask_start())

    def _run_steps(self, decoding: Mapping[int, _Decoding], num_steps: int) -> None:
        """Queue decode steps over slots, and note how far they come at most."""
        samplings = frozenset(frame.run.window.sampling for each in decoding.values() for frame in each.frames)
        self._steps.run(list(decoding), samplings, num_steps)
        max_tokens = num_steps * self._steps.width(max(decoding) + 1)
        for each in decoding.values():
            each.start += max_tokens
        if self._asked is not None:
            self._asked.tokens_since += max_tokens

    def _end_complete(self) -> None:
        """Wait for the answer to the last question, if there is one, and begin to copy the frames that are complete."""
        question, self._asked = self._asked, None
        if question is None:
            return
        start = question.wait()
        complete: list[tuple[int, _Frame]] = []
        for slot, decoding in question.decoding.items():
            if self._decoding.get(slot) is not decoding:  # given up since
                continue
            decoding.start = start[slot] + question.tokens_since
            complete += [(slot, frame) for frame in decoding.frames if frame.last <= start[slot]]
        if not complete:
            return
        copies = self._slots.copy_frames([(slot, frame.number) for slot, frame in complete])
        self._copies.append(_Copy([frame.run for _, frame in complete], copies))
        for slot, frame in complete:  # only now: if the copy fails, `_fail` finds the runs here
            frame.run.window.last = frame.number
            self._decoding[slot].frames.popleft()
            if not self._decoding[slot].frames:
                del self._decoding[slot]

    def _hand_out(self, count: int) -> None:
        """Give away the frames of the first copies, so many, and tell runs that have ended behind their last frames."""
        for copy in self._copies[:count]:
            tokens, passes = copy.wait()
            self._sampled += tokens.numel()
            self._passes = tuple(passes.tolist())
            # A clone of each: it is the caller's to change, and keeps no other frame in memory.
            grids = (run.window.prompt.tokens.shape[1:] for run in copy.runs)
            frames = [frame.clone().view(grid) for frame, grid in zip(tokens, grids, strict=True)]
            _deliver(zip(copy.runs, frames, strict=True))
            self._copies.remove(copy)
        if self._ended:
            _deliver([(run, run.error) for run in self._ended])
            self._ended = []

    def _fail(self, error: EngineError) -> None:
        runs = [*self._waiting, *self._ended, *(run for copy in self._copies for run in copy.runs)]
        runs += [frame.run for decoding in self._decoding.values() for frame in decoding.frames]
        if self._warming_up is not None:
            self._warming_up.done.set_exception(error)
        while not self._requests.empty():
            request = self._requests.get()
            if isinstance(request, WarmUp):
                if request.done.set_running_or_notify_cancel():
                    request.done.set_exception(error)
            elif request is not None:
                runs.append(request)
        _deliver([(run, error) for run in dict.fromkeys(runs)])


def _deliver(items: Iterable[tuple[Run, FrameTokens | Exception | None]]) -> None:
    """Hand frames, and ends of runs, to sessions: one call for all of an event loop's, since each call wakes it."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Run, FrameTokens | Exception | None]]] = defaultdict(list)
    for run, item in items:
        by_loop[run.loop].append((run, item))
    for loop, own in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, and nobody waits there
            loop.call_soon_threadsafe(_put, own)


def _put(items: Iterable[tuple[Run, FrameTokens | Exception | None]]) -> None:
    for run, item in items:
        run.frames.put_nowait(item)
