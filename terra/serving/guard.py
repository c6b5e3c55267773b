"""Middleware that checks every request's host, origin, API key and size, and counts the requests.

It is plain ASGI, so that it also sees WebSockets and can count the bytes of a body as they arrive.
"""

import asyncio
import hmac
import json
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from terra.serving.errors import ApiError
from terra.serving.metrics import Metrics
from terra.serving.settings import ServeSettings, UploadSettings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Bytes of each body that are not counted, so that small requests get in while others fill the room for large ones.
_FREE_BYTES = 64 << 10
WORLDS = "/worlds"
"""Each further world's routes are below this path and the world's name."""

_KEYED = re.compile(rf"({WORLDS}/[^/]+)?(/v1/|/metrics)")
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; style-src 'self' 'unsafe-inline'; "
        b"connect-src 'self' ws: wss:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
)


class Guard:
    """ASGI middleware around an application.

    A page of another site must not use a server on its visitor's machine. Therefore a request's `Origin`, if it has
    one, must be this server's, and `Host` must be one of this server's names. A WebSocket may send the API key in its
    first message instead of a header; scope["terra.has_key"] tells whether the header had it.
    """

    def __init__(self, app: App, settings: ServeSettings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._bodies = _Bodies(settings.uploads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and count a request, then pass it to the application (ASGI)."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        body = _Body(self._bodies, client_of(HTTPConnection(scope)))

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            limited = self._limited(headers, receive, body) if scope["type"] == "http" else receive
            self._check(scope, headers)
            await self._app(scope, limited, sent)
        except ApiError as error:
            await _refuse(scope, receive, sent, error)
        finally:
            body.release()
            if scope["type"] == "http":
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.request(_method(scope), route, status, time.perf_counter() - started)

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        host, settings = headers.get("host", ""), self._settings
        if settings.hosts is not None and _hostname(host) not in settings.hosts:
            raise ApiError(421, "unknown_host", "expected a Host that this server goes by: see allowed_hosts=")
        origin = headers.get("origin")
        if origin is not None and origin not in settings.allowed_origins and _netloc(origin) != host:
            raise ApiError(403, "foreign_origin", "expected this server's own Origin: see allowed_origins=")
        scope["terra.has_key"] = settings.api_key is None or _has_key(headers, settings.api_key)
        is_keyed = scope["type"] == "http" and _KEYED.match(scope["path"]) is not None
        if is_keyed and not scope["terra.has_key"]:
            raise ApiError(401, "invalid_api_key", "expected the header Authorization: Bearer and the API key")

    def _limited(self, headers: dict[str, str], receive: Receive, body: "_Body") -> Receive:
        """Wrap `receive` so that it refuses a body that is too long, arrives too slowly, or finds no room."""
        uploads = self._settings.uploads
        has_files = headers.get("content-type", "").startswith("multipart/form-data")
        limit = uploads.max_bytes if has_files else uploads.max_json_bytes
        error = ApiError(413, "too_large", f"expected a body of at most {limit} bytes")
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise error
        count, ended, deadline = 0, False, time.monotonic() + uploads.receive_seconds

        async def counted() -> Message:
            nonlocal count, ended
            if ended:  # only a disconnect can follow, which has no time limit
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0.001))
            except TimeoutError:
                raise ApiError(408, "too_slow", "expected the body in time, got a part of it") from None
            if message["type"] == "http.request":
                count += len(message.get("body", b""))
                ended = not message.get("more_body", False)
            if count > limit:
                raise error
            body.grow(count)
            return message

        return counted


class _Bodies:
    """Counts the bytes of all bodies that are held, from their arrival to the end of their requests."""

    def __init__(self, settings: UploadSettings) -> None:
        self.settings = settings
        self.by_client: Counter[str] = Counter()


class _Body:
    """One body's share of all that is held."""

    def __init__(self, bodies: _Bodies, client: str) -> None:
        self._bodies, self._client, self._held = bodies, client, 0

    def grow(self, size: int) -> None:
        """Count a body of this size by now. Raises ApiError (429, 503) where there is no room."""
        settings, by_client = self._bodies.settings, self._bodies.by_client
        more = max(size - _FREE_BYTES - self._held, 0)
        if more and by_client[self._client] + more > settings.body_bytes_per_client:
            message = f"expected at most {settings.body_bytes_per_client} bytes on their way from one client"
            raise ApiError(429, "too_many_bytes", message, retry_seconds=5)
        if more and by_client.total() + more > settings.body_bytes:
            raise ApiError(503, "server_full", "the server holds as many bytes as it may", retry_seconds=5)
        self._held += more
        by_client[self._client] += more

    def release(self) -> None:
        """Count the body no more."""
        by_client = self._bodies.by_client
        by_client[self._client] -= self._held
        self._held = 0
        if not by_client[self._client]:
            del by_client[self._client]


def client_of(connection: HTTPConnection) -> str:
    """A client's name in limits: its address."""
    return connection.client.host if connection.client else "unknown"


def _netloc(url: str) -> str | None:
    """Host and port of a URL; None if the URL is invalid."""
    try:
        return urlsplit(url).netloc or None
    except ValueError:
        return None


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _has_key(headers: dict[str, str], key: str) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    # compare_digest accepts only ASCII text, so the keys are compared as bytes.
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE") else "other"


async def _refuse(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    if scope["type"] == "websocket":
        await receive()  # websocket.connect
        await send({"type": "websocket.close", "code": 1008})
        return
    body = json.dumps(error.body).encode()
    given = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    headers = [(name.lower().encode(), value.encode()) for name, value in given.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
