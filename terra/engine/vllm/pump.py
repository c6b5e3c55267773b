"""A thread that owns vLLM's engine core: requests go in, token ids come out, frame by frame.

The core runs in this process (or, for tensor parallelism, drives worker processes of its own), so nothing is encoded
between the sessions and the scheduler, and an engine starts in seconds.
"""

import asyncio
import atexit
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams as VllmSamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import MultiModalInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.llm_engine import LLMEngine

from terra.errors import EngineError

logger = logging.getLogger(__name__)


@dataclass
class Counters:
    """The engine core's own count of its work, since it started.

    Attributes:
        prefilled: prompt tokens that were computed.
        cached: prompt tokens whose KV was found in the prefix cache.
        sampled: tokens that were sampled.
    """

    prefilled: int = 0
    cached: int = 0
    sampled: int = 0


@dataclass
class Stream:
    """Receives one request's tokens and hands them over in pieces that each end with a frame.

    `first` and `later` are the lengths of the first piece and of those after it.
    """

    request_id: str
    first: int
    later: int
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    pieces: "asyncio.Queue[list[int] | EngineError]" = field(default_factory=asyncio.Queue)
    _tokens: list[int] = field(default_factory=list)
    _given: bool = False

    def take(self, tokens: list[int]) -> None:
        """Add tokens (in the pump's thread)."""
        self._tokens += tokens
        while len(self._tokens) >= (length := self.later if self._given else self.first):
            piece, self._tokens = self._tokens[:length], self._tokens[length:]
            self._given = True
            self._hand_over(piece)

    def fail(self, error: EngineError) -> None:
        """Let whoever waits know (in the pump's thread)."""
        self._hand_over(error)

    def _hand_over(self, piece: "list[int] | EngineError") -> None:
        # The waiting side may be gone with its event loop, and then nobody misses the piece.
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    async def next_piece(self) -> list[int]:
        """Wait for the next piece (in the event loop).

        Raises:
            EngineError: the engine stopped.
        """
        piece = await self.pieces.get()
        if isinstance(piece, EngineError):
            raise piece
        return piece


class Pump:
    """Starts the engine core in a thread of its own and keeps it stepping while any request has work.

    Args:
        engine_args: vLLM's arguments.
        prepare: called with vLLM's configuration before the engine is built, in the pump's thread.

    Attributes:
        counters: of the engine core.
        failure: why the engine core stopped by itself, in one line; None otherwise.

    Raises:
        EngineError: vLLM could not start.
    """

    def __init__(self, engine_args: EngineArgs, prepare: Callable[[Any], None]) -> None:
        self.counters = Counters()
        self.failure: str | None = None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._waiting: set[str] = set()  # requests with tokens to come; a paused session is not among them
        self._owed: dict[str, int] = {}  # tokens to come, of each request
        self._stopped = False
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(engine_args, prepare, started), daemon=True)
        self._thread.name = "terra-vllm"
        self._thread.start()
        try:
            started.result()
        except EngineError:
            raise
        except Exception as error:  # whatever vLLM meets: memory, a device, an argument
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise EngineError(f"vLLM could not start: {reason}") from error
        # A process that ends while the core computes would be aborted.
        atexit.register(self.close)

    @property
    def kv_cache_usage(self) -> float | None:
        """Share of the KV cache's blocks that requests hold; None if the core has stopped or is in another process."""
        core = getattr(self._core, "engine_core", None)
        return None if self._stopped or core is None else core.scheduler.kv_cache_manager.usage

    def add(
        self, stream: Stream, rendered: MultiModalInput, max_tokens: int, params: dict[str, Any], *, more: bool
    ) -> None:
        """Submit a request, or the next chunk of one (`more` keeps it open for further chunks)."""
        sampling = VllmSamplingParams(
            **params,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._do(lambda: self._add(stream, rendered, sampling, more))

    def drop(self, request_id: str) -> None:
        """End a request, whatever its state; its KV blocks stay in the prefix cache until they are needed."""
        if not self._stopped:
            self._do(lambda: self._drop(request_id))

    def close(self) -> None:
        """Stop the engine core and free its device. Closing twice does nothing."""
        if not self._stopped:
            self._stopped = True
            self._commands.put(None)
        self._thread.join()
        atexit.unregister(self.close)

    def _do(self, command: Callable[[], None]) -> None:
        if self._stopped:
            raise EngineError("the engine is closed")
        self._commands.put(command)

    def _main(self, engine_args: EngineArgs, prepare: Callable[[Any], None], started: "Future[None]") -> None:
        try:
            config = engine_args.create_engine_config()
            prepare(config)
            self._llm = LLMEngine.from_vllm_config(config)
            self._core = self._llm.engine_core
            self._tasks = self._llm.get_supported_tasks()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._loop()
        except BaseException as error:
            logger.exception("the vLLM engine failed")
            self.failure = f"the vLLM engine failed: {type(error).__name__}: {error}".splitlines()[0]
        finally:
            self._stopped = True
            for stream in self._streams.values():
                stream.fail(EngineError(self.failure or "the engine is closed"))
            self._core.shutdown()
            cleanup_dist_env_and_memory()

    def _loop(self) -> None:
        while True:
            # Block while there is nothing to compute; otherwise take what is there and go on.
            while not self._waiting or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command()
            for output in self._core.get_output().outputs:
                self._receive(output)

    def _receive(self, output: EngineCoreOutput) -> None:
        tokens = list(output.new_token_ids)
        stats = output.prefill_stats
        if stats is not None:
            self.counters.prefilled += stats.num_computed_tokens
            self.counters.cached += stats.num_cached_tokens
        self.counters.sampled += len(tokens)
        request_id = output.request_id
        if request_id not in self._streams:
            return
        self._owed[request_id] -= len(tokens)
        if self._owed[request_id] <= 0:
            self._waiting.discard(request_id)
        self._streams[request_id].take(tokens)

    def _add(self, stream: Stream, rendered: MultiModalInput, sampling: VllmSamplingParams, more: bool) -> None:
        request_id = stream.request_id
        request = self._llm.input_processor.process_inputs(
            request_id, rendered, sampling, supported_tasks=self._tasks, resumable=more
        )
        request.external_req_id = request_id
        self._streams[request_id] = stream
        self._owed[request_id] = sampling.max_tokens or 0
        self._waiting.add(request_id)
        self._core.add_request(request)

    def _drop(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._waiting.discard(request_id)
            del self._owed[request_id]
            self._core.abort_requests([request_id])
