"""The settings of conf/serve.yaml, checked."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from decoder.camera import Camera
from terra.errors import ConfigError
from terra.sampling import SamplingParams

_T = TypeVar("_T")

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class JobSettings:
    """Of video jobs. Counts of jobs and frames; `lifetime_seconds` is a finished job's."""

    at_once: int
    queue: int
    default_frames: int
    max_frames: int
    lifetime_seconds: float


@dataclass(frozen=True)
class LiveSettings:
    """Of live sessions. `ahead` frames may be unacknowledged; `history` frames can be rewound to."""

    sessions: int
    sessions_per_client: int
    ahead: int
    history: int
    max_frames: int
    idle_seconds: float
    open_seconds: float
    forks: int
    forks_per_client: int
    fork_seconds: float


@dataclass(frozen=True)
class UploadSettings:
    """Of what clients send. `max_frames` are pictures of a context, of which `contexts` are kept."""

    max_bytes: int
    max_json_bytes: int
    max_side: int
    max_pixels: int
    max_frames: int
    contexts: int
    lifetime_seconds: float
    receive_seconds: float


@dataclass(frozen=True)
class ServeSettings:
    """All settings of a server; conf/serve.yaml says what each means."""

    host: str
    port: int
    api_key: str | None
    allowed_hosts: tuple[str, ...] | None
    allowed_origins: tuple[str, ...]
    trusted_proxies: str | None
    data: Path
    scenes: Path
    model_name: str
    num_context: int
    overlap: int
    start_speed: float
    decode_threads: int
    drain_seconds: float
    jobs: JobSettings
    live: LiveSettings
    uploads: UploadSettings
    sampling: SamplingParams
    camera: Camera

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Names that the Host header may have, None for any: a page must not reach a local server by a name of its own.

        See https://en.wikipedia.org/wiki/DNS_rebinding.
        """
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        return LOOPBACK if self.host in LOOPBACK else None


def read_settings(values: Mapping[str, Any], sampling: SamplingParams, camera: Camera) -> ServeSettings:
    """The settings of plain values, as YAML has them.

    Raises:
        ConfigError: a value of another type, negative, or zero where there must be one.
    """
    built: dict[str, Any] = {"sampling": sampling, "camera": camera}
    for name, kind in (("jobs", JobSettings), ("live", LiveSettings), ("uploads", UploadSettings)):
        given = values[name]
        if not isinstance(given, Mapping):
            raise ConfigError(f"{name}: expected settings, got {given!r}")
        built[name] = _build(kind, given, f"{name}.")
    settings = _build(ServeSettings, {**values, **built}, "")
    if not 0 <= settings.port < 65536:
        raise ConfigError(f"port: expected 0 to 65535, got {settings.port}")
    if settings.api_key is not None and (not settings.api_key.isascii() or not settings.api_key.strip()):
        raise ConfigError("api_key: expected ASCII characters, or null")
    return settings


def _build(kind: type[_T], values: Mapping[str, Any], prefix: str) -> _T:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    return kind(**{name: _value(values.get(name), hints[name], prefix + name) for name in names})


def _value(value: Any, hint: Any, name: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(each for each in typing.get_args(hint) if each is not type(None))
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise ConfigError(f"{name}: expected a list of words, got {value!r}")
        return tuple(value)
    if hint is Path:
        return Path(str(value))
    if hint is str:
        return str(value)
    if hint in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole and not (hint is float and isinstance(value, float) and math.isfinite(value)):
            raise ConfigError(f"{name}: expected a {'whole ' if hint is int else ''}number, got {value!r}")
        # Nothing may wait in a queue of length 0, and no port is the system's choice: all else is at least one.
        if value < 0 or (value == 0 and name not in ("port", "jobs.queue", "drain_seconds", "start_speed")):
            raise ConfigError(f"{name}: expected more than 0, got {value!r}")
        return hint(value)
    return value
