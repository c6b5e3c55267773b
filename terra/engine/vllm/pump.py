"""Runs vLLM's engine core in a thread: requests go in, token ids come out, frame by frame.

The core runs in this process (or, for tensor parallelism, drives worker processes of its own), so nothing is encoded
between the sessions and the scheduler, and an engine starts in seconds.

vLLM never preempts a streaming request that waits for its next chunk: such an idle request keeps its
sequence slot (one of `max_num_seqs`) and its KV blocks until the request is ended. So the pump itself counts sequence
slots and blocks, and ends idle requests, the longest idle first, when others need the room. The prefix cache keeps the
ended requests' blocks until they are overwritten, and a session that continues an ended request is told to submit its
whole window again.
"""

import asyncio
import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from vllm import SamplingParams as VllmSamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import MultiModalInput
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.llm_engine import LLMEngine

from terra.engine.base import EngineCounters
from terra.errors import EngineError, TerraError

logger = logging.getLogger(__name__)

_STALLED_STEPS = 16
"""Engine core steps in a row without any token after which an idle request is ended, even if room is counted.

More than the steps that a core with asynchronous scheduling has in flight.
"""

_DEAD_STEPS = 200_000
"""Engine core steps in a row without any token after which the engine has failed: half a minute of empty steps.

Prefills need far fewer steps, however long each of them takes.
"""

_LOOKS = 5.0
"""Seconds between two looks at a step that does not end, at most."""

_usage_of = attrgetter("engine_core.scheduler.kv_cache_manager.usage")


class RequestEndedError(EngineError):
    """An idle request was ended to make room: the session has to submit its whole window again."""


@dataclass
class Stream:
    """Receives one request's tokens and hands them over in pieces that each end with a frame.

    Attributes:
        request_id: the engine core's name of the request.
        first: length of the first piece in tokens.
        later: length of each piece after the first.
        loop: the event loop of the waiting session.
        pieces: pieces, or an error, that the session has not taken yet.
        begun: whether the request has reached the engine core (set in the pump's thread).
    """

    request_id: str
    first: int
    later: int
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    pieces: "asyncio.Queue[list[int] | EngineError]" = field(default_factory=asyncio.Queue)
    begun: bool = False
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
        """Raise an error in the session that waits for the next piece (called in the pump's thread)."""
        self._hand_over(error)

    def _hand_over(self, piece: "list[int] | EngineError") -> None:
        with suppress(RuntimeError):  # the event loop is closed, so nobody waits
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)

    async def next_piece(self) -> list[int]:
        """Wait for the next piece (in the event loop).

        Raises:
            RequestEndedError: the request was idle and was ended to make room for others.
            EngineError: vLLM refused the request or ended it early, or the engine stopped.
        """
        piece = await self.pieces.get()
        if isinstance(piece, EngineError):
            raise piece
        return piece


@dataclass
class _Request:
    """A request in the engine core.

    Attributes:
        length: tokens of the window after all requested tokens are sampled.
        owed: tokens still to be sampled; 0 for an idle request.
        more: whether further chunks may follow.
    """

    stream: Stream
    more: bool
    length: int = 0
    owed: int = 0


class Pump:
    """Starts the engine core in a thread of its own and keeps it stepping while any request has work.

    Args:
        engine_args: vLLM's arguments.
        prepare: called with vLLM's configuration before the engine is built, in the pump's thread.
        loras: adapters to load before any request comes.
        step_seconds: time that one step of the engine core may take; the engine has failed after it.

    Attributes:
        failure: why the engine core stopped by itself, in one line; None otherwise.

    Raises:
        EngineError: vLLM could not start, or its KV cache is smaller than one window.
    """

    def __init__(
        self,
        engine_args: EngineArgs,
        prepare: Callable[[Any], None],
        loras: Sequence[LoRARequest] = (),
        step_seconds: float = 600.0,
    ) -> None:
        self.failure: str | None = None
        self._core: Any = None
        self._prefilled = self._cached = self._sampled = 0
        # Each command with the stream that is told if nobody executes it; None ends the thread.
        self._commands: queue.SimpleQueue[tuple[Stream, Callable[[], None]] | None] = queue.SimpleQueue()
        self._requests: dict[str, _Request] = {}  # all that hold or wait for a sequence slot
        self._waiting: set[str] = set()  # those with tokens to come
        self._idle: dict[str, None] = {}  # those that wait for their next chunk, the longest idle first
        self._stopped = False
        self._step_seconds = step_seconds
        self._busy_since: float | None = None  # when the core was given its present work; None while it has none
        self._stuck = False
        self._ended = threading.Event()  # nothing more is to be expected of the thread
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(engine_args, prepare, loras, started), daemon=True)
        self._thread.name = "terra-vllm"
        self._thread.start()
        try:
            started.result()
        except TerraError:
            raise
        except Exception as error:  # whatever vLLM meets: memory, a device, an argument
            raise EngineError(f"vLLM could not start: {_line(error)}") from error
        threading.Thread(target=self._watch, name="terra-vllm-watch", daemon=True).start()
        # A process that ends while the core computes would be aborted.
        atexit.register(self.close)

    @property
    def counters(self) -> EngineCounters:
        """Tokens as the engine core counts them, and the share of KV blocks that requests hold.

        `kv_cache_usage` is None if the core has stopped, runs in another process or does not say.
        """
        usage = None
        if not self._stopped:
            with suppress(AttributeError):
                usage = float(_usage_of(self._core))
        return EngineCounters(self._prefilled, self._cached, self._sampled, usage)

    def check_running(self) -> None:
        """Refuse work when the engine core has stopped.

        Raises:
            EngineError: with the reason.
        """
        if self._stopped:
            raise EngineError(self.failure or "the engine is closed")

    def add(
        self,
        stream: Stream,
        rendered: MultiModalInput,
        max_tokens: int,
        params: dict[str, Any],
        *,
        lora: LoRARequest | None = None,
        more: bool,
    ) -> None:
        """Submit a request, or the next chunk of one (`more` keeps it open for further chunks, of the same `lora`).

        Later errors are raised by `Stream.next_piece`.

        Raises:
            EngineError: the engine has stopped.
        """
        sampling = VllmSamplingParams(
            **params,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.check_running()
        self._commands.put((stream, lambda: self._add(stream, rendered, sampling, lora, more)))
        self.check_running()  # the thread may have looked at its commands for the last time in between

    def drop(self, stream: Stream) -> None:
        """End a request in any state; its KV blocks stay in the prefix cache until they are needed."""
        self._commands.put((stream, lambda: self._end(stream.request_id)))

    def stop(self) -> None:
        """Tell the engine core to stop, without waiting for it. Stopping twice does nothing."""
        if not self._stopped:
            self._stopped = True
            self._commands.put(None)

    def close(self) -> None:
        """Stop the engine core and free its device; blocks until that is done. Closing twice does nothing.

        Nothing is freed of a core that hangs in a step: its thread can't be ended.
        """
        self.stop()
        self._ended.wait()
        if not self._stuck:
            self._thread.join()
        atexit.unregister(self.close)

    def _main(
        self,
        engine_args: EngineArgs,
        prepare: Callable[[Any], None],
        loras: Sequence[LoRARequest],
        started: "Future[None]",
    ) -> None:
        try:
            config = engine_args.create_engine_config()
            prepare(config)
            self._llm = LLMEngine.from_vllm_config(config)
            self._core = self._llm.engine_core
            self._tasks = self._llm.get_supported_tasks()
            self._max_num_seqs = config.scheduler_config.max_num_seqs
            self._block_size = config.cache_config.block_size
            num_blocks = config.cache_config.num_gpu_blocks
            assert num_blocks is not None  # known once the core has started
            self._num_blocks = num_blocks - 1  # vLLM keeps one for padding
            window = config.model_config.max_model_len
            if self._blocks(window) > self._num_blocks:
                raise EngineError(
                    f"the KV cache: expected room for a window of {window} tokens, "
                    f"got {self._num_blocks * self._block_size}"
                )
            for lora in loras:
                self._llm.add_lora(lora)
        except BaseException as error:
            self._free()
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._loop()
        except BaseException as error:
            logger.exception("the vLLM engine failed")
            self.failure = f"the vLLM engine failed: {type(error).__name__}: {_line(error)}"
        finally:
            self._stopped = True
            self._fail_all(EngineError(self.failure or "the engine is closed"))
            self._free()
            self._ended.set()

    def _watch(self) -> None:
        """Fail everyone who waits, in a thread of its own, when the core hangs in a step."""
        while not self._ended.wait(min(_LOOKS, self._step_seconds / 4)):
            since = self._busy_since
            if since is None or time.monotonic() - since < self._step_seconds:
                continue
            self._stuck = self._stopped = True
            self.failure = f"the vLLM engine failed: expected the end of a step in {self._step_seconds:g} s, got none"
            logger.error(self.failure)
            self._fail_all(EngineError(self.failure))
            self._ended.set()

    def _free(self) -> None:
        if self._core is not None:
            self._core.shutdown()
            cleanup_dist_env_and_memory()

    def _loop(self) -> None:
        silent = 0  # steps without a token, in a row
        while True:
            # Block while there is nothing to compute; otherwise take what is there and go on.
            while not self._waiting or not self._commands.empty():
                self._busy_since = None
                command = self._commands.get()
                if command is None or self._stuck:
                    return
                self._busy_since = time.monotonic()
                command[1]()
            self._busy_since = time.monotonic()
            outputs = self._core.get_output().outputs
            if self._stuck:  # it came too late: everyone has been told
                return
            for output in outputs:
                self._receive(output)
            silent = 0 if outputs else silent + 1
            if self._idle and silent >= _STALLED_STEPS:
                self._end(next(iter(self._idle)))
                silent = 0
            elif silent >= _DEAD_STEPS:
                raise RuntimeError(f"vLLM samples nothing for {len(self._waiting)} requests that wait")

    def _fail_all(self, error: EngineError) -> None:
        for request in list(self._requests.values()):
            request.stream.fail(error)
        with suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    command[0].fail(error)

    def _receive(self, output: EngineCoreOutput) -> None:
        tokens = list(output.new_token_ids)
        stats = output.prefill_stats
        if stats is not None:
            self._prefilled += stats.num_computed_tokens
            self._cached += stats.num_cached_tokens
        self._sampled += len(tokens)
        request_id = output.request_id
        request = self._requests.get(request_id)
        if request is None:
            return
        request.owed -= len(tokens)
        request.stream.take(tokens)
        if request.owed > 0:
            if output.finish_reason is not None:
                reason = f"vLLM ended the request {request.owed} tokens early: {output.finish_reason!s}"
                request.stream.fail(EngineError(reason))
                self._end(request_id)
            return
        self._waiting.discard(request_id)
        if request.more:
            self._idle[request_id] = None
            self._make_room()
        else:
            del self._requests[request_id]

    def _add(
        self,
        stream: Stream,
        rendered: MultiModalInput,
        sampling: VllmSamplingParams,
        lora: LoRARequest | None,
        more: bool,
    ) -> None:
        request_id = stream.request_id
        try:
            request = self._requests.get(request_id)
            if request is None:
                if stream.begun:
                    raise RequestEndedError("the request was ended while it was idle")
                stream.begun = True
                request = self._requests[request_id] = _Request(stream, more)
            else:
                request.length -= 1  # the last token sampled comes again, as the first of the chunk
            core_request = self._llm.input_processor.process_inputs(
                request_id, rendered, sampling, supported_tasks=self._tasks, lora_request=lora, resumable=more
            )
            core_request.external_req_id = request_id
            wanted = sampling.max_tokens or 0
            request.owed += wanted
            request.length += len(rendered["prompt_token_ids"]) + wanted
            self._idle.pop(request_id, None)
            self._waiting.add(request_id)
            self._make_room()
            self._core.add_request(core_request)
        except EngineError as error:
            stream.fail(error)
        except Exception as error:  # refused by one of vLLM's checks: other requests are not affected
            stream.fail(EngineError(f"vLLM refused the request: {type(error).__name__}: {_line(error)}"))
            self._end(request_id)

    def _make_room(self) -> None:
        """End idle requests, the longest idle first, until the waiting and the remaining idle requests fit.

        Each request counts with all KV blocks that it will need, as if it shared none.
        """
        while self._waiting and self._idle and self._is_short():
            self._end(next(iter(self._idle)))

    def _is_short(self) -> bool:
        wanted = sum(self._blocks(request.length) for request in self._requests.values())
        return len(self._requests) > self._max_num_seqs or wanted > self._num_blocks

    def _blocks(self, length: int) -> int:
        return -(-length // self._block_size)

    def _end(self, request_id: str) -> None:
        self._waiting.discard(request_id)
        self._idle.pop(request_id, None)
        if self._requests.pop(request_id, None) is not None:
            self._core.abort_requests([request_id])


def _line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type."""
    return (str(error).splitlines() or [type(error).__name__])[0]
