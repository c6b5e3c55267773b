"""Videos through ffmpeg: each stored frame is read once, damaged files are refused, and the H.264 plays everywhere.

ffmpeg, from the binary that imageio-ffmpeg brings, runs as a process, because its exit status and error messages are
needed: without them a damaged file reads as a shorter video, and a video on a full disk seems complete. A file's first
bytes choose ffmpeg's demuxer, so that no playlist is followed to other files, and a frame's pixels, the number of
frames and ffmpeg's memory are bounded, because a few kilobytes can unpack to gigabytes.
"""

import fcntl
import re
import resource
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from io import BufferedReader
from pathlib import Path
from typing import IO

import imageio_ffmpeg
import numpy as np
from jaxtyping import UInt8

from tokenizer.errors import VideoError
from tokenizer.limits import LIMITS, Limits

# Output as PPM pictures, whose headers give their size.
_AS_PICTURES = (
    *("-map", "0:v:0", "-fps_mode", "passthrough", "-sws_flags", "bicubic+accurate_rnd+full_chroma_int"),
    *("-pix_fmt", "rgb24", "-c:v", "ppm", "-f", "image2pipe"),
)
_MAX_BOXES = 1 << 16  # of an MP4; a fragmented one has two for each fragment
_RIFF, _EBML, _SEGMENT, _TS_PACKET = b"RIFF", b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67", 188
_DISCARDED = 4  # packet flag of a frame that an edit list removes
_PIPE_BYTES = 1 << 19  # a user may have 64 MB in all pipes, after which new ones are small
_MAX_THREADS = 4  # each one decodes a frame of its own
_FFMPEG_BYTES = 2 << 30  # of address space, when ffmpeg reads


def stream_frames(
    path: Path,
    *,
    start_seconds: float = 0.0,
    max_frames: int | None = None,
    threads: int = _MAX_THREADS,
    limits: Limits = LIMITS,
    seconds: float | None = None,
) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """Yield the frames of a video as RGB in [0, 255], one in memory at a time.

    Args:
        path: the file.
        start_seconds: time of the first frame.
        max_frames: number of frames; None: all.
        threads: ffmpeg's decoding threads.
        limits: bounds on a frame's pixels.
        seconds: how long reading may take; None: without end.

    Raises:
        VideoError: the file is damaged within what is read, is no such video, is larger than the bounds, or takes
            longer.
    """
    seek = ("-ss", f"{start_seconds:.6f}") if start_seconds > 0 else ()
    limit = () if max_frames is None else ("-frames:v", str(max_frames))
    with _ffmpeg_output(
        path, *limit, *_AS_PICTURES, before=seek, threads=threads, limits=limits, seconds=seconds
    ) as pipe:
        _widen(pipe)
        while (header := pipe.readline()) == b"P6\n":
            width, height = (int(side) for side in pipe.readline().split())
            pipe.readline()
            pixels = np.empty((height, width, 3), np.uint8)
            if pipe.readinto(pixels.data.cast("B")) < pixels.size:
                break
            yield pixels
    if header:
        raise VideoError(f"{path}: expected a readable video, got one that ends within a frame")


def count_frames(path: Path, limits: Limits = LIMITS) -> tuple[int, float]:
    """Count the frames of a video and find their mean rate (frames per second), without decoding them.

    A browser shows a GIF's frame of less than 20 ms for 100 ms; so it counts here. The rate of an MP4 or a GIF is that
    of its frames' durations; other files don't always have right ones, so that their rate is that of their times.

    Raises:
        VideoError: the file is damaged, is no such video, or has more frames or a higher rate than the bounds allow.
    """
    count = ticks = first = last = 0
    time_base = None
    has_durations = _demuxer(path) in ("mov", "gif")
    with _ffmpeg_output(path, "-map", "0:v:0", "-c", "copy", "-f", "framecrc", threads=1, limits=limits) as pipe:
        for line in pipe:
            if line.startswith(b"#tb 0: "):
                time_base = Fraction(line[7:].decode().strip())
            elif line.startswith(b"0,"):
                # A packet a line: stream, dts, pts, duration, size, checksum and, unless it is a plain keyframe, flags.
                packet = line.decode().split(",")
                if _packet_flags(packet) & _DISCARDED:
                    continue
                count += 1
                ticks, last = ticks + int(packet[3]), int(packet[1])
                first = last if count == 1 else first
                if count > limits.video_frames:
                    raise VideoError(f"{path}: expected at most {limits.video_frames} frames, got more")
    frames = count
    if not has_durations and count > 1:
        frames, ticks = count - 1, last - first
    if time_base is None or ticks <= 0:
        raise VideoError(f"{path}: expected a video with frames and a frame rate, got {count} frames")
    fps = float(frames / (ticks * time_base))
    if fps > limits.video_fps:
        raise VideoError(f"{path}: expected at most {limits.video_fps:g} frames a second, got {fps:g}")
    return count, fps


class Mp4Sink:
    """Encodes frames as they come; `finish` completes the file, `close` ends the encoder, also after a failure.

    The video is H.264 with 4:2:0 chroma (which browsers and QuickTime play), BT.709 colors, and its index first, for
    streaming.
    """

    def __init__(self, path: Path, fps: float, size: tuple[int, int], crf: int, preset: str, threads: int) -> None:
        rate = str(Fraction(fps).limit_denominator(1001))
        command = [
            *(_ffmpeg(), "-v", "error", "-y", "-filter_threads", str(threads)),
            *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{size[0]}x{size[1]}", "-r", rate, "-i", "pipe:0"),
            *("-vf", "scale=out_color_matrix=bt709:out_range=tv:flags=bicubic+accurate_rnd+full_chroma_inp"),
            *("-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", str(crf), "-preset", preset, "-threads", str(threads)),
            *("-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv"),
            *("-movflags", "+faststart", "-f", "mp4", str(path.absolute())),
        ]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            bufsize=0,
            start_new_session=True,  # Ctrl-C ends this program, which then ends ffmpeg
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        _widen(self._pipe)

    def append(self, frame: UInt8[np.ndarray, "height width 3"]) -> None:
        """Encode one frame. Raises `OSError` with ffmpeg's reason if ffmpeg has exited."""
        rest = np.ascontiguousarray(frame).data.cast("B")
        try:
            while rest:
                rest = rest[self._pipe.write(rest) or 0 :]
        except BrokenPipeError as error:
            self._process.wait()
            raise OSError(self._last_words()) from error

    def finish(self) -> None:
        """Wait until the file is complete. Raises `OSError` with ffmpeg's reason if ffmpeg fails."""
        self._pipe.close()
        if self._process.wait() != 0:
            raise OSError(self._last_words())

    def close(self) -> None:
        """End the ffmpeg process, whatever its state."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._pipe.close()
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        return _ffmpeg_reason(self._log.read(), self._process.returncode)


def _demuxer(path: Path) -> str:
    """ffmpeg's demuxer of a whole video, by its first bytes.

    Raises:
        VideoError: another kind of file, or one that was cut off, as far as its kind can tell.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(3 * _TS_PACKET)
            if head.startswith(b"GIF8"):
                file.seek(-1, 2)
                if file.read() != b";":
                    raise VideoError(f"{path}: expected a whole GIF, got one that was cut off")
                return "gif"
        if head[:4] == _RIFF and head[8:12] == b"AVI ":
            _check_size(path, 8 + int.from_bytes(head[4:8], "little"), size)
            return "avi"
        if head.startswith(_EBML):
            _check_size(path, _matroska_size(head), size)
            return "matroska"
        if len(head) == 3 * _TS_PACKET and {head[0], head[_TS_PACKET], head[2 * _TS_PACKET]} == {ord("G")}:
            _check_size(path, -(-size // _TS_PACKET) * _TS_PACKET, size)
            return "mpegts"
        check_boxes(path)
    except OSError as error:
        raise VideoError(f"{path}: expected a readable video: {error.strerror or error}") from None
    return "mov"


def _check_size(path: Path, expected: int, size: int) -> None:
    if size < expected:
        raise VideoError(f"{path}: expected {expected} bytes, got {size}: the video was cut off")


def _matroska_size(head: bytes) -> int:
    """The bytes that a Matroska or WebM file declares; 0 if it doesn't, as a live recording (RFC 8794)."""
    length, start = _ebml_number(head, 4)
    segment = start + length
    if head[segment : segment + 4] != _SEGMENT:
        return 0
    length, start = _ebml_number(head, segment + 4)
    return start + length if length else 0


def _ebml_number(head: bytes, start: int) -> tuple[int, int]:
    """The number (1 to 8 bytes; 0 where all its bits are set: unknown) that begins at a byte, and the byte after it."""
    first = head[start] if start < len(head) else 0
    width = 9 - first.bit_length()
    if not first:
        return 0, start + 1
    number = int.from_bytes(head[start : start + width], "big") & ((1 << 7 * width) - 1)
    return (0 if number == (1 << 7 * width) - 1 else number), start + width


def check_boxes(path: Path) -> None:
    """Raise `VideoError` if a file is no MP4 or was cut off, even where ffmpeg would read a shorter video.

    An MP4 is a sequence of boxes: 4 bytes of size (0: to the file's end; 1: the size is in 8 more bytes), 4 bytes of
    type (ISO 14496-12).
    """
    size = path.stat().st_size
    kinds: list[bytes] = []
    start = 0
    with path.open("rb") as file:
        while start < size:
            file.seek(start)
            header = file.read(16)
            length, kind = int.from_bytes(header[:4], "big"), header[4:8]
            if length == 1:
                length = int.from_bytes(header[8:16], "big")
            if not kind.isalnum() or 0 < length < 8:
                break
            kinds.append(kind)
            if len(kinds) > _MAX_BOXES:
                raise VideoError(f"{path}: expected at most {_MAX_BOXES} boxes, got more")
            if start + length > size and kinds[0] in (b"ftyp", b"moov", b"wide", b"mdat", b"free", b"skip"):
                raise VideoError(f"{path}: expected {start + length} bytes, got {size}: the video was cut off")
            start += length or size
    if b"moov" not in kinds:
        raise VideoError(f"{path}: expected an MP4 video, got {'another kind of file' if size else 'an empty file'}")


def _packet_flags(packet: list[str]) -> int:
    return int(packet[6].strip().removeprefix("F="), 16) if len(packet) > 6 and "F=" in packet[6] else 0


def _ffmpeg() -> str:
    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise VideoError("expected ffmpeg from imageio-ffmpeg or in IMAGEIO_FFMPEG_EXE, got none") from error


def _widen(pipe: IO[bytes]) -> None:
    """Let a pipe hold half a megabyte, if the system allows.

    Through a pipe of the usual 64 kB a frame comes in many pieces, and between two of them a thread waits for Python's
    global lock: 16 threads read 1.8 times as many frames of 288 x 512 pixels a second through wide pipes.
    """
    if hasattr(fcntl, "F_SETPIPE_SZ"):  # Linux
        with suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


@contextmanager
def _ffmpeg_output(
    path: Path,
    *arguments: str,
    before: tuple[str, ...] = (),
    threads: int,
    limits: Limits,
    seconds: float | None = None,
) -> Iterator[BufferedReader]:
    """ffmpeg's standard output about a video; any damage makes ffmpeg fail (-xerror). ffmpeg ends with the block.

    Args:
        path: the video.
        arguments: ffmpeg's, behind its input.
        before: ffmpeg's, before its input.
        threads: decoding threads, at most four.
        limits: bounds on a frame's pixels.
        seconds: how long it may take; None: without end.

    Raises:
        VideoError: ffmpeg failed or took longer; not if the block ends earlier than ffmpeg.
    """
    count = str(min(threads or _MAX_THREADS, _MAX_THREADS))
    source = ("-v", "error", "-nostdin", "-xerror", "-protocol_whitelist", "file", "-f", _demuxer(path))
    bounds = ("-max_pixels", str(limits.video_pixels), "-filter_threads", count, "-threads", count)
    command = [_ffmpeg(), *source, *bounds, *before, "-i", str(path.absolute()), *arguments, "pipe:1"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
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
            yield process.stdout
            status = process.wait()
            if overdue.is_set():
                raise VideoError(f"{path}: expected frames that are read within {seconds:g} s, got none so soon")
            if status:
                log.seek(0)
                reason = _ffmpeg_reason(log.read(4096), status)
                if size := re.search(r"Picture size (\d+x\d+) exceeds", reason):
                    raise VideoError(f"{path}: expected frames of at most {limits.video_pixels} pixels, got {size[1]}")
                raise VideoError(f"{path}: expected a readable video: {reason}")
        finally:
            if timer is not None:
                timer.cancel()
            process.kill()
            process.wait()
            process.stdout.close()


def _ffmpeg_reason(log: bytes, status: int | None) -> str:
    """ffmpeg's first complaint without its `[part @ address]` prefixes."""
    lines = [re.sub(r"^(\[[^]]*] )+", "", line) for line in log.decode(errors="replace").splitlines()]
    return lines[0] if lines else f"ffmpeg ended with status {status}"
