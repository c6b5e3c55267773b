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
    """The server refused, or could not be reached; `code` is its word for why, `status` that of HTTP (0: none)."""

    def __init__(self, message: str, code: str = "unreachable", status: int = 0) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class LiveFrame:
    """One frame of a live session.

    Attributes:
        index: its place in the rollout, from 0.
        picture: a JPEG, WebP or PNG file's bytes.
        header: all that the server says of it: action, path, pose, speed, latency_ms, ...
    """

    index: int
    picture: bytes
    header: dict[str, Any]


class LiveDrive:
    """A live session for synchronous callers, frame by frame; made by `Client.open`.

    The session stays paused between calls, so that each frame is made with what was asked for. What was sent after
    opening stands in `opened`, and the context's frames in `context`.
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
            self._say(type="open", **settings)
            self.opened = self._word("opened")
            is_fork = "fork" in settings
            count = 1 if is_fork and self.opened["frame"] >= self.opened["num_context"] else self.opened["num_context"]
            self.context = [self._frame() for _ in range(count)]
        except BaseException:
            self._socket.close()
            raise

    @property
    def fps(self) -> float:
        """Frames a second of the model's time."""
        return self.opened["fps"]

    def step(
        self,
        *,
        steering: float | None = None,
        speed: float | None = None,
        path: tuple[Sequence[Sequence[float]], Sequence[float]] | None = None,
        action: Sequence[Sequence[float]] | None = None,
    ) -> LiveFrame:
        """Make one frame.

        Args:
            steering: rad at the wheels, left positive; with `speed`, kept until told otherwise.
            speed: m/s.
            path: points [x forward, y left] and their times in seconds from now; kept likewise.
            action: rows of [y, x, t] for this frame alone.
        """
        if not self.opened.get("paused"):
            self.pause()
        if steering is not None or speed is not None:
            self._say(type="control", steering=steering or 0.0, speed=speed or 0.0)
        if path is not None:
            self._say(type="path", points=[list(map(float, each)) for each in path[0]], times=list(map(float, path[1])))
        rows = None if action is None else [list(map(float, row)) for row in action]
        self._say(**({"type": "step"} if rows is None else {"type": "step", "action": rows}))
        return self._frame()

    def pause(self) -> None:
        """Make no frames but those of `step`."""
        self._say(type="pause")
        self._word("paused")
        self.opened["paused"] = True

    def rewind(self, frame: int) -> LiveFrame:
        """Go back to a frame, which is the last one then."""
        self._say(type="rewind", frame=frame)
        self._word("rewound")
        return self._frame()

    def fork(self, frame: int) -> str:
        """Keep the rollout as it is at a frame; the id is for `Client.open(fork=...)`."""
        self._say(type="fork", frame=frame)
        return self._word("forked")["fork"]

    def close(self) -> None:
        """End the session."""
        self._socket.close()

    def __enter__(self) -> "LiveDrive":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _say(self, **message: Any) -> None:
        try:
            self._socket.send(json.dumps(message))
        except ConnectionClosed:
            self._receive()  # what the server said before it closed

    def _word(self, kind: str) -> dict[str, Any]:
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
        self._say(type="ack", index=message.index)
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
