"""The command `terra serve`: checks the settings of all worlds, loads their weights, serves until SIGTERM or SIGINT."""

import asyncio
import gc
import hashlib
import logging
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import uvicorn

from terra.config.spec import PipelineSpec
from terra.errors import ConfigError, TerraError
from terra.locations import DEMO
from terra.memory import memory_frames
from terra.pipeline import Pipeline
from terra.place_map import MapPictures, load_map
from terra.serving.about import About, load_about
from terra.serving.app import create_app
from terra.serving.connections import Connections, bounded_protocol
from terra.serving.logs import limited_logs
from terra.serving.scenes import Scene, load_scenes
from terra.serving.service import Service, check_names, check_windows
from terra.serving.settings import LOOPBACK, ServeSettings
from terra.worlds.places import packed_worlds

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 << 10  # of a WebSocket; the longest is a path of 512 points
_BACKLOG = 2048  # connections that wait to be accepted


def run(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        TerraError: anything wrong with the configuration, the weights, the data folder or the port.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # a line for each connection is too many
    with limited_logs():
        _run(settings)


def _run(settings: ServeSettings) -> None:
    engines = 1 + len(settings.worlds)
    if Path(settings.world_model.pretrained) == DEMO / "world_model" and (packed := packed_worlds()):
        are = "is" if len(packed) == 1 else "are"
        logger.info("%s %s at hand: terra unpack %s", ", ".join(packed), are, " ".join(packed))
    checked = check(settings, engines)
    worlds = {name: _check_world(settings, name, engines) for name in settings.worlds}
    with bind(settings) as listener:  # now: weights and kernels may take a minute
        service = load(checked, {name: load(each) for name, each in worlds.items()})
        if settings.api_key is None and settings.host not in LOOPBACK:
            logger.warning("host=%s without an api_key: whoever reaches the port can use the server", settings.host)
        try:
            _warm_up(service)
            listen(listener, settings)
        except TerraError:
            for each in (service, *service.worlds.values()):
                each.model.close()
            raise
        # Looking through all modules and weights for garbage would stop the event loop for half a second at a time.
        gc.collect()
        gc.freeze()
        server = Server(service, settings)
        asyncio.run(server.serve(sockets=[listener]))
        logger.info("stopped by %s", server.stopped_by)


def _warm_up(service: Service) -> None:
    began = time.monotonic()
    asyncio.run(service.warm_up())
    if (seconds := time.monotonic() - began) > 1:
        logger.info("compiled and captured what sessions need in %.0f s", seconds)


class Server(uvicorn.Server):
    """A uvicorn server that lets the service end its work before connections are closed.

    Attributes:
        stopped_by: what ended the server, in a word; None while it runs, or when no signal ended it.
    """

    stopped_by: str | None = None

    def __init__(self, service: Service, settings: ServeSettings) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service),
                log_config=None,
                access_log=False,
                proxy_headers=settings.trusted_proxies is not None,
                forwarded_allow_ips=settings.trusted_proxies,
                server_header=False,
                http=bounded_protocol(Connections(settings.connections)),
                ws="websockets-sansio",
                ws_max_size=_MAX_MESSAGE_BYTES,
                ws_per_message_deflate=False,
                timeout_graceful_shutdown=5,
                backlog=_BACKLOG,
            )
        )
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            logger.info("open http://%s:%d", f"[{host}]" if ":" in host else host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn, which would raise the signal again at the end; here a signal is a normal end of the server."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        self.stopped_by = "Ctrl-C" if sig == signal.SIGINT else signal.Signals(sig).name

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the service drain, then close connections and end the application. A second SIGINT ends the draining."""
        watch = asyncio.create_task(self._watch())
        await self._service.drain()
        watch.cancel()
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves this out then
            await self.lifespan.shutdown()

    async def _watch(self) -> None:
        while not self.force_exit:
            await asyncio.sleep(0.1)
        self._service.give_up.set()


class Checked(NamedTuple):
    """What `check` finds out without loading weights."""

    settings: ServeSettings
    spec: PipelineSpec
    scenes: dict[str, Scene]
    place: MapPictures | None
    about: About


def check(settings: ServeSettings, engines: int = 1) -> Checked:
    """Check a world's settings, and read its scenes and map.

    Args:
        settings: the world's, see `ServeSettings.of_world`.
        engines: number of worlds that share the GPU's memory.

    Raises:
        TerraError: anything wrong with the configuration, the scenes or the checkpoints.
    """
    check_names(settings)
    sessions = settings.live.sessions + settings.jobs.at_once
    spec = PipelineSpec.from_settings(settings, sessions=sessions, engines=engines)
    memory = memory_frames(spec.memory, *spec.adapted_memory.values())
    check_windows(settings, spec.spec.layout, memory)
    scenes = load_scenes(
        settings.scenes,
        num_context=settings.num_context,
        image_size=spec.image_size,
        spec=spec.spec,
        adapters=settings.adapters,
        limits=settings.limits,
    )
    place = None
    if settings.map is not None:
        place = load_map(settings.map, spec.image_size, spec.spec.fps, settings.limits, at_least=memory)
    about = load_about(settings.world_model, settings.model_name, settings.limits)
    return Checked(settings, spec, scenes, place, about)


def _check_world(settings: ServeSettings, name: str, engines: int) -> Checked:
    try:
        return check(settings.of_world(name), engines)
    except TerraError as error:
        raise ConfigError(f"worlds.{name}: {error}") from None


def load(checked: Checked, worlds: Mapping[str, Service] | None = None) -> Service:
    """Load a world's weights; the service owns `worlds`, the services of further ones.

    Raises:
        TerraError: anything wrong with the weights or the data folder.
    """
    settings, spec, scenes, place, about = checked
    spec.announce(settings.model_name)
    hashes = [sha256 for name, sha256 in spec.hashes().items() if not name.startswith("adapters.")]
    pipeline = Pipeline.from_spec(spec)
    try:
        model_hash = hashlib.sha256("".join(hashes).encode()).hexdigest()
        return Service(pipeline, settings, scenes, model_hash, place, worlds, about)
    except BaseException:
        pipeline.close()
        raise


def bind(settings: ServeSettings) -> socket.socket:
    """A socket with the address to serve at, which no client reaches before `listen`.

    Raises:
        ConfigError: the address can't be used, or another process serves there.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise _unusable(settings, error) from None
    # Connections inherit it. asyncio sets it only where a socket was made with the protocol's number, and without it
    # the second half of an answer waits for the client's delayed acknowledgement, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def listen(listener: socket.socket, settings: ServeSettings) -> None:
    """Let clients connect to a socket of `bind`.

    Raises:
        ConfigError: another process that was bound to the address at the same time listens there.
    """
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _unusable(settings, error) from None


def _unusable(settings: ServeSettings, error: OSError) -> ConfigError:
    address = f"{settings.host}:{settings.port}"
    return ConfigError(f"{address}: expected an address to listen at, got: {error.strerror or error}")
