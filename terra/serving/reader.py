"""A process that reads large JSON bodies, within a limit on its memory and on the time of each.

Python's JSON parser holds the interpreter's lock while it reads, half a second for 4 MB, and the checks of a trajectory
compete for it: in threads, eight such bodies at once kept the event loop from answering for seconds. Neither can bound
its memory or be stopped. One process is enough: a body of 4 MB takes about a second, and the server bounds the bytes of
all bodies that wait. Small bodies are read in a thread, which costs less than sending them to the process.
"""

import asyncio
import gc
import logging
import multiprocessing
import resource
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from terra.serving.documents import Fields, Wanted, read_fields
from terra.serving.errors import ApiError

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0


class Reader:
    """Reads bodies in a process of its own, one at a time; a process that ends or takes too long is replaced.

    Args:
        wanted: what is read of each.
        max_bytes: memory of the process.
        max_seconds: time for each body.
    """

    def __init__(self, wanted: Wanted, max_bytes: int, max_seconds: float) -> None:
        self._wanted, self._max_bytes, self._max_seconds = wanted, max_bytes, max_seconds
        # The one thread that talks to the process is also the queue, which a client that leaves can't disturb.
        self._thread = ThreadPoolExecutor(1, "terra-reader")
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Start the process; nobody waits for it."""
        self._thread.submit(self._connected)

    async def read(self, content: bytes | Mapping[str, str]) -> Fields:
        """Read a JSON body, or the texts of a form by name. Raises ApiError (400, 413)."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read, content)

    def close(self) -> None:
        """End the process."""
        if (process := self._process) is not None:
            with suppress(ValueError):  # the thread has just ended it
                process.kill()
        self._thread.shutdown(cancel_futures=True)
        self._end()

    def _connected(self) -> Connection:
        """The connection to the process, which is started if there is none. Raises ApiError (503)."""
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            try:
                self._connection, other = context.Pipe()
                with other:
                    arguments = (other, self._wanted, self._max_bytes)
                    process = context.Process(target=_serve, args=arguments, name="terra-reader", daemon=True)
                    process.start()
                self._process = process
                if not self._connection.poll(_START_SECONDS):
                    raise TimeoutError(f"expected its start within {_START_SECONDS:g} s")
                self._connection.recv()
            except (EOFError, OSError) as error:
                logger.error("the process that reads large bodies: %s", str(error) or "it ended at its start")
                self._end()
                message = "the server can't read a large body at present"
                raise ApiError(503, "not_ready", message, retry_seconds=30) from None
        return self._connection

    def _read(self, content: bytes | Mapping[str, str]) -> Fields:
        connection = self._connected()
        try:
            connection.send(content)
            answer = connection.recv() if connection.poll(self._max_seconds) else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            self._end()
            limits = f"{self._max_seconds:g} s and {self._max_bytes} bytes of memory"
            raise ApiError(413, "too_large", f"expected a body that can be read in {limits}, got one that takes more")
        if isinstance(answer, ApiError):
            raise answer
        return answer

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


def _serve(connection: Connection, wanted: Wanted, max_bytes: int) -> None:
    """Answer each body by its `Fields` or an ApiError, until the server is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
    gc.disable()  # nearly all that is made here is needed to the end, and looking for garbage takes most of the time
    connection.send(None)
    # The server is gone, or the memory is used up, of which the server tells the client.
    with suppress(EOFError, OSError, MemoryError):
        while True:
            connection.send(_answer(connection.recv(), wanted))
            gc.collect()


def _answer(content: bytes | Mapping[str, str], wanted: Wanted) -> Fields | ApiError:
    try:
        return read_fields(content, wanted)
    except ApiError as error:
        return error
