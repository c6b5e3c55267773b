"""The client's side of a live session, frame by frame; `terra.serving.client` opens it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from terra.errors import TerraError

_MAX_MESSAGE_BYTES = 64 << 20


class ServerError(TerraError):
    """The server refused a request or can't be reached; `code` is the error's code, `status` HTTP's (0: none)."""

    def __init__(self, message: str, code: str = "unreachable", status: int = 0) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class LiveFrame:
    """One frame of a live session.

    Attributes:
        index: index of the frame in the rollout, from 0.
        picture: bytes of a JPEG, WebP or PNG file.
        header: the frame's facts from the server: action, latency_ms, and of a car path, pose, speed, ...
    """

    index: int
    picture: bytes
    header: dict[str, Any]


class LiveDrive:
    """A live session for synchronous callers, frame by frame; `Client.open` makes it.

    The session is paused between calls, so that each call of `step` makes one frame. `opened` is the server's answer to
    opening the session, with the `model` that drives, and `context` has the context's frames.
    """

    def __init__(self, url: str, headers: dict[str, str], timeout: float, settings: dict[str, Any]) -> None:
        self._timeout = timeout
        try:
            connecting = connect(
                url,
                additional_headers=headers,
                open_timeout=timeout,
                max_size=_MAX_MESSAGE_BYTES,
                compression=None,
            )
            self._socket: ClientConnection = connecting.__enter__()
        except (OSError, WebSocketException, ValueError) as error:
            raise ServerError(f"{url}: expected a server, got: {error}") from None
        self.opened: dict[str, Any] = {}
        self.context: list[LiveFrame] = []
        try:
            self._send_message(type="open", **settings)
            self.opened = self._receive_message("opened")
            is_fork = "fork" in settings
            count = 1 if is_fork and self.opened["frame"] >= self.opened["num_context"] else self.opened["num_context"]
            self.context = [self._frame() for _ in range(count)]
        except BaseException:
            self._socket.close()
            raise

    @property
    def fps(self) -> float:
        """Frames per second of the model."""
        return self.opened["fps"]

    def step(
        self,
        *,
        steering: float | None = None,
        speed: float | None = None,
        path: tuple[Sequence[Sequence[float]], Sequence[float]] | None = None,
        action: Any = None,
    ) -> LiveFrame:
        """Make one frame.

        Args:
            steering: angle of the wheels in rad, left positive; `steering` and `speed` hold until the next order.
            speed: speed in m/s.
            path: points [x forward, y left] (m) and their times in seconds from now; the path holds until the next
                order.
            action: where the model is driven rows of [lateral y, forward x, time t], for this frame alone; else the
                action as the model's space has it in JSON, which holds until the next one: {"throttle": 0.5} or a list
                of all numbers, the names of the pressed keys, or the name of the choice.
        """
        if not self.opened.get("paused"):
            self.pause()
        if steering is not None or speed is not None:
            self._send_message(type="control", steering=steering or 0.0, speed=speed or 0.0)
        if path is not None:
            self._send_message(
                type="path", points=[list(map(float, each)) for each in path[0]], times=list(map(float, path[1]))
            )
        if action is None:
            self._send_message(type="step")
        elif self.opened["action_space"]["kind"] == "waypoints":
            self._send_message(type="step", action=[list(map(float, row)) for row in action])
        else:
            self._send_message(type="act", action=action)
            self._send_message(type="step")
        return self._frame()

    def pause(self) -> None:
        """Pause the session, so that only `step` makes frames."""
        self._send_message(type="pause")
        self._receive_message("paused")
        self.opened["paused"] = True

    def rewind(self, frame: int) -> LiveFrame:
        """Go back to a frame, which becomes the last one, and return it."""
        self._send_message(type="rewind", frame=frame)
        self._receive_message("rewound")
        return self._frame()

    def fork(self, frame: int) -> str:
        """Keep the rollout as it is at a frame on the server; return the id for `Client.open(fork=...)`."""
        self._send_message(type="fork", frame=frame)
        return self._receive_message("forked")["fork"]

    def close(self) -> None:
        """End the session."""
        self._socket.close()

    def __enter__(self) -> "LiveDrive":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send_message(self, **message: Any) -> None:
        try:
            self._socket.send(json.dumps(message))
        except ConnectionClosed:
            self._receive()  # raises the error that the server sent before it closed

    def _receive_message(self, kind: str) -> dict[str, Any]:
        message = self._receive()
        while isinstance(message, LiveFrame):
            message = self._receive()
        if message["type"] != kind:
            raise ServerError(f"expected the word {kind}, got {message['type']}", "protocol")
        return message

    def _frame(self) -> LiveFrame:
        message = self._receive()
        while not isinstance(message, LiveFrame):
            message = self._receive()
        self._send_message(type="ack", index=message.index)
        return message

    def _receive(self) -> LiveFrame | dict[str, Any]:
        try:
            content = self._socket.recv(self._timeout)
        except ConnectionClosed as error:
            reason = error.rcvd.reason if error.rcvd else "the connection broke"
            raise ServerError(f"the session was closed: {reason}", reason) from None
        except TimeoutError:
            raise ServerError(f"expected a message within {self._timeout:g} s, got none", "timeout") from None
        if isinstance(content, bytes):
            header, picture = _read_frame(content)
            return LiveFrame(header["index"], picture, header)
        message = json.loads(content)
        if message["type"] == "error":
            raise ServerError(message["message"], message["code"])
        if message["type"] == "closed":
            raise ServerError(f"the session was closed: {message['reason']}", message["reason"])
        return message


def _read_frame(content: bytes) -> tuple[dict[str, Any], bytes]:
    start = 4 + int.from_bytes(content[:4], "big")
    return json.loads(content[4:start]), content[start:]
