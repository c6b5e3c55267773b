"""Forks that wait to be opened: frames of live sessions that others may go on from."""

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
    """Keeps them for `fork_seconds`, `forks_per_client` of one client: a further one takes its oldest one's place."""

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings
        self._kept: dict[str, _Kept] = {}

    def keep(self, client: str, fork: Fork) -> str:
        """Remember a fork; returns its id. Raises SessionError when the server has as many as may be."""
        self._expire()
        own = [name for name, each in self._kept.items() if each.client == client]
        for name in own[: len(own) + 1 - self._settings.forks_per_client]:
            del self._kept[name]
        if len(self._kept) >= self._settings.forks:
            raise SessionError("too_many_forks", f"expected at most {self._settings.forks} forks that wait")
        name = f"fork_{secrets.token_hex(12)}"
        self._kept[name] = _Kept(fork, client, time.monotonic() + self._settings.fork_seconds)
        return name

    def find(self, name: str) -> Fork:
        """Raises ApiError (404)."""
        self._expire()
        if name not in self._kept:
            raise ApiError(404, "fork_not_found", "expected the id of an existing fork, got another or an expired one")
        return self._kept[name].fork

    def _expire(self) -> None:
        now = time.monotonic()
        self._kept = {name: each for name, each in self._kept.items() if each.ends > now}
