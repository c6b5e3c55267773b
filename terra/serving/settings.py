"""The pydantic models of conf/serve.yaml's settings."""

from typing import Annotated, Self

from pydantic import AfterValidator, Field

from decoder.camera import Camera
from terra.config.groups import Folders, PipelineSettings, Sampling
from tokenizer.limits import LIMITS, Limits
from tokenizer.settings import Count, FilePath, Natural, NonNegative, Positive, Settings, Text, expecting

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_FRAMEWISE = "decoder.FramewiseDecoder"  # a refiner is of one world alone
_MOST_PICTURES = 8  # of a context, where the settings name no number


Words = Annotated[tuple[str, ...], Field(strict=False), expecting("a list of words")]


def _printable(key: str) -> str:
    if not key.isascii() or not key.strip():
        raise ValueError("expected ASCII characters, or null")
    return key


class JobSettings(Settings):
    """Limits of video jobs: numbers of jobs and frames; `lifetime_seconds` is how long a finished job is kept."""

    at_once: Count
    queue: Natural
    queue_per_client: Natural
    default_frames: Count
    max_frames: Count
    lifetime_seconds: Positive


class LiveSettings(Settings):
    """Limits of live sessions: `ahead` frames may be unacknowledged, and a client can rewind to `history` frames."""

    sessions: Count
    sessions_per_client: Count
    ahead: Count
    history: Count
    max_frames: Count
    idle_seconds: Positive
    open_seconds: Positive
    forks: Count
    forks_per_client: Count
    fork_seconds: Positive


class UploadSettings(Settings):
    """Limits of uploads and other bodies.

    `max_frames` pictures may be in a context (None takes what `pictures` says), `contexts` are kept, `at_once` uploads
    are decoded while others queue, `body_bytes` of bodies are held, and a process of `read_bytes` reads a large JSON
    body in `read_seconds`.
    """

    max_bytes: Count
    max_json_bytes: Count
    max_side: Count
    max_pixels: Count
    max_pixels_in_all: Count
    max_frames: Count | None
    contexts: Count
    contexts_per_client: Count
    lifetime_seconds: Positive
    receive_seconds: Positive
    at_once: Count
    queue: Count
    queue_per_client: Count
    body_bytes: Count
    body_bytes_per_client: Count
    read_bytes: Count
    read_seconds: Positive

    def pictures(self, window: int) -> int:
        """The most pictures of a context, for a model whose window holds `window` frames."""
        return min(_MOST_PICTURES, window - 1) if self.max_frames is None else self.max_frames


class ConnectionSettings(Settings):
    """Limits of connections: in `total`, `per_client` address, and `header_seconds` until the first whole request."""

    total: Count
    per_client: Count
    header_seconds: Positive


class ServeSettings(PipelineSettings):
    """All settings of a server; conf/serve.yaml says what each means."""

    host: Text
    port: Annotated[int, Field(ge=0, le=65535)]
    api_key: Annotated[str, AfterValidator(_printable), expecting("ASCII characters")] | None
    allowed_hosts: Words | None
    allowed_origins: Words
    trusted_proxies: str | None
    data: FilePath
    scenes: FilePath | None
    map: FilePath | None = None
    model_name: Text
    worlds: Folders
    num_context: Count
    start_speed: NonNegative
    picture_threads: Count
    drain_seconds: NonNegative
    connections: ConnectionSettings
    jobs: JobSettings
    live: LiveSettings
    uploads: UploadSettings
    sampling: Sampling
    camera: Camera
    limits: Limits = LIMITS

    def of_world(self, name: str) -> Self:
        """The settings of one of `worlds`: its checkpoints, its scenes, and a folder of its own for jobs.

        Map, adapters and a refiner, which are of this world, are left out; all else is the same.
        """
        folder = self.worlds[name]
        scenes = folder / "contexts"
        return self.replace(
            tokenizer=self.tokenizer.replace(pretrained=str(folder), subfolder="tokenizer", revision=None),
            world_model=self.world_model.replace(pretrained=str(folder), subfolder="world_model", revision=None),
            scenes=scenes if scenes.is_dir() else None,
            model_name=name,
            data=self.data / "worlds" / name,
            decoder=self.decoder if self.decoder.get("_target_") == _FRAMEWISE else {"_target_": _FRAMEWISE},
            map=None,
            adapter=None,
            adapters={},
            worlds={},
        )

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Names that the Host header may have, None for any: a page must not reach a local server by a name of its own.

        See https://en.wikipedia.org/wiki/DNS_rebinding.
        """
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        return LOOPBACK if self.host in LOOPBACK else None
