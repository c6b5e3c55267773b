"""ffmpeg as a process, from the binary that imageio-ffmpeg brings: its exit status and its messages are needed.

Without them a damaged file reads as a shorter video, and a video on a full disk seems complete. The container chooses
the demuxer, so that no playlist is followed to other files, and a frame's pixels and ffmpeg's memory are bounded,
because a few kilobytes can unpack to gigabytes.
"""

import fcntl
import os
import re
import resource
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO

import imageio_ffmpeg

from decoder.containers import find_demuxer
from tokenizer.errors import VideoError
from tokenizer.limits import Limits

MAX_THREADS = 4  # each one decodes a frame of its own
_PIPE_BYTES = 1 << 19  # a user may have 64 MB in all pipes, after which new ones are small
_FFMPEG_BYTES = 2 << 30  # of address space, when ffmpeg reads
_LOG_BYTES = 1 << 16
_NEVER = "1000000000"  # s
_CHANGED = b"Reconfiguring filter graph"
_NEEDED = "expected ffmpeg 5.1 or later, as imageio-ffmpeg brings it"
_LEVEL = re.compile(r"\[(panic|fatal|error|warning|info)] ")


@dataclass
class Reading:
    """ffmpeg's standard output about a video, and what it says of the video itself.

    Attributes:
        pipe: the output.
        is_abandoned: set by a reader that needs no more, so that ffmpeg is ended and its exit status means nothing.
    """

    pipe: BufferedReader
    _log: IO[bytes]
    is_abandoned: bool = False
    _read_bytes: int = 0

    def has_changed(self) -> bool:
        """Whether frames of another size, shape or color came, as far as ffmpeg has read; cheap to ask often."""
        size = os.fstat(self._log.fileno()).st_size
        if size == self._read_bytes:
            return False
        text = os.pread(self._log.fileno(), size - self._read_bytes, self._read_bytes)
        self._read_bytes = size
        return _CHANGED in text

    def description(self) -> list[str]:
        """ffmpeg's lines on the input; complete as soon as it has written output."""
        # pread, because ffmpeg writes at the position that both processes share.
        text = os.pread(self._log.fileno(), _LOG_BYTES, 0).decode(errors="replace")
        return re.split(r"^\[info] Output #0", text, maxsplit=1, flags=re.MULTILINE)[0].splitlines()


def ffmpeg_program() -> str:
    """The path of ffmpeg. Raises VideoError if there is none."""
    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise VideoError(f"{_NEEDED} or IMAGEIO_FFMPEG_EXE names it, got none") from error


def start_ffmpeg(
    command: Sequence[str], log: IO[bytes], stdin: int, stdout: int, bufsize: int = -1
) -> "subprocess.Popen[bytes]":
    """Start ffmpeg in a session of its own: Ctrl-C ends this program, which then ends ffmpeg. Raises VideoError."""
    try:
        return subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=log, bufsize=bufsize, start_new_session=True
        )
    except OSError as error:
        got = f"{command[0]}: {error.strerror or error} (see IMAGEIO_FFMPEG_EXE)"
        raise VideoError(f"{_NEEDED}, got {got}") from None


@contextmanager
def read_with_ffmpeg(
    path: Path,
    *arguments: str,
    before: Sequence[str] = (),
    threads: int,
    limits: Limits,
    seconds: float | None = None,
) -> Iterator[Reading]:
    """Run ffmpeg over a video; any damage makes it fail (-xerror). ffmpeg ends with the block.

    Args:
        path: the video.
        arguments: ffmpeg's, behind its input.
        before: ffmpeg's, before its input.
        threads: decoding threads, at most four; 0: four.
        limits: bounds on a frame's pixels.
        seconds: how long it may take; None: without end.

    Raises:
        VideoError: ffmpeg failed or took longer; not if the block ends earlier than ffmpeg.
    """
    count = str(min(threads or MAX_THREADS, MAX_THREADS))
    level = ("-v", "level+info", "-hide_banner", "-nostats", "-nostdin", "-xerror")
    # By itself ffmpeg takes a gap of more than 10 s out of a transport stream's times.
    clock = ("-dts_delta_threshold", _NEVER, "-dts_error_threshold", _NEVER)
    source = ("-protocol_whitelist", "file", "-f", find_demuxer(path))
    bounds = ("-max_pixels", str(limits.video_pixels), "-filter_threads", count, "-threads", count)
    command = [
        ffmpeg_program(),
        *level,
        *clock,
        *source,
        *bounds,
        *before,
        "-i",
        str(path.absolute()),
        *arguments,
        "pipe:1",
    ]
    with tempfile.TemporaryFile() as log:
        process = start_ffmpeg(command, log, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert isinstance(process.stdout, BufferedReader)
        overdue = threading.Event()

        def stop() -> None:
            overdue.set()
            process.kill()

        timer = None if seconds is None else threading.Timer(seconds, stop)
        try:
            if hasattr(resource, "prlimit"):  # Linux
                with suppress(ProcessLookupError):
                    resource.prlimit(process.pid, resource.RLIMIT_AS, (_FFMPEG_BYTES, _FFMPEG_BYTES))
            if timer is not None:
                timer.start()
            reading = Reading(process.stdout, log)
            yield reading
            if reading.is_abandoned:
                return
            status = process.wait()
            if overdue.is_set():
                raise VideoError(f"{path}: expected frames that are read within {seconds:g} s, got none so soon")
            if status:
                log.seek(0)
                raise _failure(path, command[0], first_complaint(log.read(_LOG_BYTES), status), limits)
        finally:
            if timer is not None:
                timer.cancel()
            process.kill()
            process.wait()
            process.stdout.close()


def _failure(path: Path, program: str, reason: str, limits: Limits) -> VideoError:
    """The error of a failed run: not always is the video to blame."""
    if re.search(r"[Uu]nrecognized option|Option not found|No such filter", reason):
        return VideoError(f"{_NEEDED}, got another one: {program} (see IMAGEIO_FFMPEG_EXE): {reason}")
    if size := re.search(r"Picture size (\d+x\d+) exceeds", reason):
        return VideoError(f"{path}: expected frames of at most {limits.video_pixels} pixels, got {size[1]}")
    return VideoError(f"{path}: expected a readable video: {reason}")


def first_complaint(log: bytes, status: int | None) -> str:
    """ffmpeg's first complaint without its `[part @ address]` and `[level]` prefixes."""
    lines = log.decode(errors="replace").splitlines()
    leveled = any(map(_LEVEL.search, lines))
    for line in lines:
        level = _LEVEL.search(line)
        # A line without a level is all that an ffmpeg says that doesn't know this way of speaking.
        if (level is None and leveled) or (level is not None and level[1] in ("info", "warning")):
            continue
        return re.sub(r"^(\[[^]]*] )+", "", line)
    return f"ffmpeg ended with status {status}"


def widen(pipe: IO[bytes]) -> None:
    """Let a pipe hold half a megabyte, if the system allows.

    Through a pipe of the usual 64 kB a frame comes in many pieces, and between two of them a thread waits for Python's
    global lock: 16 threads read 1.8 times as many frames of 288 x 512 pixels a second through wide pipes.
    """
    if hasattr(fcntl, "F_SETPIPE_SZ"):  # Linux
        with suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
