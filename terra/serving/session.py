"""Runs a live session: generates frames while the client acknowledges them, sends each one, and follows orders."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from terra.driving.control import Driver, Path, Steering
from terra.errors import ActionError, EngineError, TrajectoryError
from terra.serving.messages import (
    Ack,
    Act,
    Control,
    ForkOrder,
    Message,
    Open,
    PathOrder,
    Plain,
    Rewind,
    Step,
    frame_message,
)
from terra.serving.metrics import Metrics
from terra.serving.model import Model, PictureFormat
from terra.serving.rollout import Choice, Fork, LiveRollout, Moment, Player
from terra.serving.settings import LiveSettings

_DRAWN_SECONDS = np.arange(0, 3.01, 0.25)  # of the path that a frame's header tells
_MAX_STEPS = 256  # that wait to be taken
_RATE_FRAMES = 10
_FLUSH_SECONDS = 2.0  # that a session which ends waits for its client to take what was made

Send = Callable[[str | bytes], Awaitable[None]]


class SessionError(Exception):
    """A client's order that can't be followed; the session continues. `code` is the machine-readable reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class _Frame:
    """A frame to be sent, and when its action was chosen; None for context, fork and rewound frames."""

    moment: Moment
    chosen: float | None


class LiveSession:
    """The live rollout of one client.

    Args:
        model: generates and decodes the frames.
        start: where the session starts; all its frames are sent first, but of a client's fork the last frame alone.
        settings: limits of live sessions.
        metrics: counts the generated frames.
        send: sends the client a message, JSON text or a frame's bytes; waits while the client does not read.
        keep_fork: stores a fork and returns its id; raises SessionError if there are too many.
    """

    def __init__(
        self,
        model: Model,
        start: Fork,
        settings: LiveSettings,
        metrics: Metrics,
        send: Send,
        keep_fork: Callable[[Fork], str],
        *,
        kind: PictureFormat = "jpeg",
        quality: int = 85,
    ) -> None:
        self._model, self._settings, self._metrics, self._send = model, settings, metrics, send
        self._keep_fork = keep_fork
        self._kind: PictureFormat = kind
        self._quality = quality
        self.rollout = LiveRollout(model.pipeline, start, settings.history)
        shown = start.moments if not start.last.generated else (start.last,)
        # Held to a few messages: a client that talks without reading must wait.
        self._outbox: asyncio.Queue[_Frame | dict[str, Any]] = asyncio.Queue(settings.ahead + len(shown) + 8)
        for moment in shown:
            self._outbox.put_nowait(_Frame(moment, None))
        self._mode = "waiting"
        self._steps: deque[Choice] = deque()
        self._acked = start.last.index
        self._changed = asyncio.Event()
        self._times: deque[float] = deque(maxlen=_RATE_FRAMES)
        self._generator: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self) -> str:
        """Run the session until it ends; returns the reason.

        Raises:
            EngineError: the engine failed.
        """
        self._start_generating()
        showing = asyncio.create_task(self._show_all())
        try:
            await asyncio.wait({showing, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if showing.done():
                showing.result()  # raises what ended it
            # What was made is shown, unless nobody reads it.
            await _wait_briefly(self._outbox.join(), showing)
            return self._ended.result()
        finally:
            # Before anything is awaited, which another cancellation may interrupt: nothing must go on without this.
            self.end("cancelled")
            self._ended.exception()  # seen, also where the client went first
            showing.cancel()
            await self._stop_generating()
            await _cancel(showing)

    def end(self, reason: str) -> None:
        """Let `run` return. Ending twice keeps the first reason."""
        if not self._ended.done():
            self._ended.set_result(reason)

    async def handle(self, message: Message) -> None:
        """Follow one order of the client.

        Raises:
            SessionError: the order can't be followed.
        """
        match message:
            case Ack():
                # One that is late, of frames taken back since, must not count for those to come.
                if message.index <= self.rollout.last.index:
                    self._acked = max(self._acked, message.index)
            case Control():
                await self._tell(self._driver(message).told(Steering(message.steering, message.speed)))
            case PathOrder():
                await self._tell(self._driver(message).told(self._path(message)))
            case Act():
                await self._tell(self._acting(message))
            case Step():
                self._add_step(message)
                await self._set_mode("paused")
            case Rewind():
                await self._rewind(message.frame)
            case ForkOrder():
                await self._say(type="forked", fork=self._keep_fork(self._fork(message.frame)))
            case Plain(type="pause"):
                await self._set_mode("paused", always=True)
            case Plain(type="resume"):
                await self._set_mode("running", always=True)
            case Plain():
                self.end("client")
            case Open():
                raise SessionError("already_open", "expected no second open: the session is open")
        self._changed.set()

    async def complain(self, code: str, message: str) -> None:
        """Send the client an error message, in order with all other messages."""
        await self._say(type="error", code=code, message=message)

    async def _tell(self, driver: Driver | Player) -> None:
        self.rollout.tell(driver)
        if self._mode == "waiting":
            await self._set_mode("running")

    def _driver(self, message: Control | PathOrder | Step) -> Driver:
        driver = self.rollout.driver
        if isinstance(driver, Player):
            expected = f"act, for the model's {driver.space.title}"
            raise SessionError("invalid_action", f"{message.type}: expected {expected}, got an order for a car")
        return driver

    def _acting(self, message: Act) -> Player:
        player = self.rollout.driver
        if isinstance(player, Driver):
            expected = f"control or path, for the model's {self._model.spec.space.title}"
            raise SessionError("invalid_action", f"act: expected {expected}, got an act")
        try:
            return player.told(player.space.from_json(message.action, "action"))
        except ActionError as error:
            raise SessionError("invalid_action", str(error)) from None

    def _path(self, message: PathOrder) -> Path:
        try:
            return Path.given(message.points, message.times, self._driver(message).pose, self._model.spec.fps)
        except TrajectoryError as error:
            raise SessionError("invalid_path", str(error)) from None

    def _add_step(self, message: Step) -> None:
        action = None
        if message.action is not None:
            self._driver(message)
            action = np.array(message.action, np.float32)
        slots = self._model.spec.layout.action_slots
        if action is not None and (len(action) != slots or (np.diff(action[:, 2], prepend=0.0) <= 0).any()):
            raise SessionError("invalid_action", f"action: expected {slots} rows of [y, x, t], t increasing from 0 s")
        if len(self._steps) >= _MAX_STEPS:
            raise SessionError("too_many_steps", f"expected at most {_MAX_STEPS} steps that wait")
        self._steps.append("driver" if action is None else action)

    async def _set_mode(self, mode: str, *, always: bool = False) -> None:
        if mode == "running" or always:
            self._steps.clear()
        changed, self._mode = self._mode != mode, mode
        if changed or always:
            self._times.clear()
            await self._say(type="resumed" if mode == "running" else "paused")

    async def _rewind(self, frame: int) -> None:
        self._fork(frame)  # refused before anything stops
        await self._stop_generating()
        moment = await self.rollout.rewind(frame)
        self._start_generating()
        self._steps.clear()
        self._acked = moment.index
        for message in self._unsent():
            self._outbox.put_nowait(message)
        await self._say(type="rewound", frame=moment.index)
        await self._outbox.put(_Frame(moment, None))

    def _unsent(self) -> list[dict[str, Any]]:
        """Empty the outbox; returns its text messages, without the frames."""
        messages = [self._outbox.get_nowait() for _ in range(self._outbox.qsize())]
        for _ in messages:
            self._outbox.task_done()
        return [message for message in messages if isinstance(message, dict)]

    def _fork(self, frame: int) -> Fork:
        try:
            return self.rollout.fork(frame)
        except EngineError as error:
            raise SessionError("invalid_frame", str(error)) from None

    async def _say(self, **message: Any) -> None:
        await self._outbox.put(message)

    def _start_generating(self) -> None:
        if self._ended.done():
            return
        self._generator = asyncio.create_task(self._generate())
        self._generator.add_done_callback(self._note_failure)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._ended.done():
            self._ended.set_exception(error)

    async def _stop_generating(self) -> None:
        if self._generator is not None:
            await _cancel(self._generator)

    async def _generate(self) -> None:
        try:
            while True:
                while not (self._may_follow(self.rollout.last.index) and (self._mode == "running" or self._steps)):
                    if self.rollout.last.index + 1 >= self._settings.max_frames:
                        self.end("max_frames")
                    self._changed.clear()
                    await self._changed.wait()
                chosen_at = deque[float]()
                async with aclosing(self.rollout.run(self._actions(chosen_at))) as moments:
                    async for moment in moments:
                        await self._outbox.put(_Frame(moment, chosen_at.popleft()))
        finally:
            await self.rollout.close()

    def _actions(self, chosen_at: deque[float]) -> Iterator[Choice]:
        """The action of each frame that may begin, None while none may, and in `chosen_at` when each was asked for.

        The engine's thread may ask, and the event loop takes steps away meanwhile.
        """
        last = self.rollout.last.index
        while True:
            action = self._next_step() if self._may_follow(last) else None
            if action is not None:
                last += 1
                chosen_at.append(time.perf_counter())
            yield action

    def _next_step(self) -> Choice:
        try:
            return self._steps.popleft()
        except IndexError:
            return "driver" if self._mode == "running" else None

    def _may_follow(self, index: int) -> bool:
        """Whether a frame may follow this one, as far as limits and acknowledgements go."""
        return index + 1 < self._settings.max_frames and index - self._acked < self._settings.ahead

    async def _show_all(self) -> None:
        while True:
            message = await self._outbox.get()
            if isinstance(message, dict):
                await self._send(json.dumps(message, allow_nan=False))
            else:
                await self._show(message)
            self._outbox.task_done()

    async def _show(self, frame: _Frame) -> None:
        moment = frame.moment
        picture = await self._model.picture(moment.tokens, self._kind, self._quality, self.rollout.adapter)
        latency = None
        if frame.chosen is not None:
            now = time.perf_counter()
            latency = now - frame.chosen
            if not self._times:
                self._metrics.first_frame(latency)
            self._times.append(now)
            self._metrics.live_frame(latency)
        await self._send(frame_message(self._header(moment, latency), picture))

    def _header(self, moment: Moment, latency: float | None) -> dict[str, Any]:
        times = self._times
        pace = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None
        return {
            "type": "frame",
            "index": moment.index,
            "generated": moment.generated,
            **_action_facts(moment),
            **({} if self.rollout.memory is None else {"memory": list(moment.memory)}),
            "latency_ms": None if latency is None else round(1000 * latency, 2),
            "frames_per_second": None if pace is None else round(pace, 2),
        }


def _action_facts(moment: Moment) -> dict[str, Any]:
    """What a frame's header tells about the action that led to it, and about the car, if one is driven."""
    action, driver = moment.action, moment.driver
    if isinstance(driver, Player):
        space = driver.space
        return {"action": None if action is None else space.to_json(space.values(action[None])[0])}
    return {
        "action": None if action is None else action.tolist(),
        "path": np.round(driver.ahead(_DRAWN_SECONDS), 3).tolist(),
        "pose": [round(driver.pose.x, 4), round(driver.pose.y, 4), round(driver.pose.heading, 5)],
        "speed": round(driver.speed, 3),
    }


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # it has ended otherwise already, which was noticed


async def _wait_briefly(work: Coroutine[Any, Any, None], other: asyncio.Task[Any]) -> None:
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task, other}, timeout=_FLUSH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
