"""Bounds the open connections of a server: in all, of one client, and how long one may be silent before its request.

An operating system gives a process some 1,000 file descriptors. Without bounds, connections that send nothing take
them all, and nobody else is answered. At a bound the connection that has been idle for longest is closed for a new one,
so that a client of good will gets in. A connection with a request or a live session at work is never closed here.

asyncio accepts all connections that wait at once, before it reads from any, so a request that has arrived may still be
unread. Connections of one client may therefore be above the client's bound for a moment; then the idle ones go.
"""

import asyncio
import resource
from collections import defaultdict
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from terra.serving.settings import ConnectionSettings

_RESERVED = 128  # file descriptors for the table of jobs, results, libraries
_MOST_DESCRIPTORS = 65_536
_GRACE_SECONDS = 0.2  # from the opening of a connection above the client's bound to the closing of an idle one
_MOST_ABOVE = 64  # connections of one client above its bound


class Connections:
    """The open connections of a server.

    Args:
        settings: the bounds; the number in all is also bounded by the process's file descriptors.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        self.settings = settings
        self._total = min(settings.total, max(_descriptors() - _RESERVED, 1))
        self._by_client: dict[str, dict[BoundedProtocol, None]] = defaultdict(dict)

    def admit(self, protocol: "BoundedProtocol", client: str) -> bool:
        """Count a new connection; False if there is no room for it and none that is idle."""
        own, bound = self._by_client[client], self.settings.per_client
        can_wait = len(own) < bound + _MOST_ABOVE and any(each.is_idle or each.has_ended for each in own)
        if len(own) >= bound and not can_wait and not self._make_room(own):
            return False
        if self._count() >= self._total:
            fullest = max(self._by_client.values(), key=len)
            if not (self._make_room(fullest) or any(map(self._make_room, list(self._by_client.values())))):
                return False
        self._by_client[client][protocol] = None
        return True

    def trim(self, client: str) -> None:
        """Close the oldest idle connections of a client that has more than it may."""
        own = self._by_client.get(client, {})
        while len(own) > self.settings.per_client and self._make_room(own):
            pass

    def release(self, protocol: "BoundedProtocol", client: str) -> None:
        """Forget a connection that has ended."""
        own = self._by_client.get(client, {})
        own.pop(protocol, None)
        if not own:
            self._by_client.pop(client, None)

    def _count(self) -> int:
        return sum(map(len, self._by_client.values()))

    def _make_room(self, connections: dict["BoundedProtocol", None]) -> bool:
        """Close the oldest idle one of some connections, and forget those that have ended as live sessions."""
        for each in list(connections):
            if each.has_ended:
                del connections[each]
                return True
        idle = next((each for each in connections if each.is_idle), None)
        if idle is not None:
            del connections[idle]
            idle.transport.abort()
        return idle is not None


class BoundedProtocol(AutoHTTPProtocol):  # pyright: ignore[reportGeneralTypeIssues]
    """uvicorn's HTTP protocol on a connection that counts among `connections`, an attribute of a subclass."""

    connections_: Connections
    # uvicorn's, in both of its implementations.
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See asyncio."""
        peer = transport.get_extra_info("peername")
        self._client_name = str(peer[0]) if peer else ""
        self._first: asyncio.TimerHandle | None = None
        if not self.connections_.admit(self, self._client_name):
            transport.abort()
            self._is_refused = True
            return
        self._is_refused = False
        super().connection_made(transport)
        self.loop.call_later(_GRACE_SECONDS, self.connections_.trim, self._client_name)
        self._first = self.loop.call_later(self.connections_.settings.header_seconds, self._close_if_silent)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if not self._is_refused:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self._is_refused:
            return
        if self._first is not None:
            self._first.cancel()
        self.connections_.release(self, self._client_name)
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether no request has arrived whole, or all are answered."""
        return self.transport.get_protocol() is self and (self.cycle is None or self.cycle.response_complete)

    @property
    def has_ended(self) -> bool:
        """Whether the connection is closed; of one that became a WebSocket this protocol is not told."""
        return self.transport.is_closing()

    def _close_if_silent(self) -> None:
        if self.transport.get_protocol() is self and self.cycle is None:
            self.transport.abort()


def bounded_protocol(connections: Connections) -> type[Any]:
    """uvicorn's HTTP protocol over these connections."""
    return type("BoundedProtocol", (BoundedProtocol,), {"connections_": connections})


def _descriptors() -> int:
    """How many file descriptors this process may have open, after the soft limit is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
