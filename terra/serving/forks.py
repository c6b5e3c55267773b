"""Keeps forks, the states of live sessions from which other sessions may start."""

import secrets
import time
from dataclasses import dataclass

from terra.serving.errors import ApiError
from terra.serving.rollout import Fork
from terra.serving.session import SessionError
from terra.serving.settings import LiveSettings


@dataclass(frozen=True)
class _Kept:
    fork: Fork
    client: str
    ends: float


class Forks:
    """Forks by id, kept for `fork_seconds`. A client's fork beyond `forks_per_client` replaces the client's oldest."""

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings
        self._kept: dict[str, _Kept] = {}

    def keep(self, client: str, fork: Fork) -> str:
        """Keep a fork; returns its id. Raises SessionError when the server keeps its maximum."""
        self._expire()
        own = [name for name, each in self._kept.items() if each.client == client]
        for name in own[: max(0, len(own) + 1 - self._settings.forks_per_client)]:
            del self._kept[name]
        if len(self._kept) >= self._settings.forks:
            raise SessionError("too_many_forks", f"expected at most {self._settings.forks} forks that wait")
        name = f"fork_{secrets.token_hex(12)}"
        self._kept[name] = _Kept(fork, client, time.monotonic() + self._settings.fork_seconds)
        return name

    def find(self, name: str) -> Fork:
        """The fork of an id. Raises ApiError (404)."""
        self._expire()
        if name not in self._kept:
            raise ApiError(404, "fork_not_found", "expected the id of an existing fork, got another or an expired one")
        return self._kept[name].fork

    def _expire(self) -> None:
        now = time.monotonic()
        self._kept = {name: each for name, each in self._kept.items() if each.ends > now}
