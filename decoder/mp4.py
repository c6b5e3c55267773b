"""MP4 through ffmpeg: each stored frame is read once, damaged files are refused, and the H.264 plays everywhere.

ffmpeg, from the binary that imageio-ffmpeg brings, runs as a process, because its exit status and error messages are
needed: without them a damaged file reads as a shorter video, and a video on a full disk seems complete.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from einops import rearrange
from jaxtyping import UInt8

from tokenizer.errors import VideoError

# Output as PPM pictures, whose headers give their size.
_AS_PICTURES = (
    *("-map", "0:v:0", "-fps_mode", "passthrough", "-sws_flags", "bicubic+accurate_rnd+full_chroma_int"),
    *("-pix_fmt", "rgb24", "-c:v", "ppm", "-f", "image2pipe"),
)
_DISCARDED = 4  # packet flag of a frame that an edit list removes


def read_mp4(path: Path, max_frames: int | None, threads: int = 0) -> UInt8[np.ndarray, "frames height width 3"]:
    """Read the frames of `path`, or the first `max_frames`. Raises `VideoError` if the file is damaged or no MP4.

    `threads` is the number of ffmpeg's decoding threads; 0 lets ffmpeg choose by the number of cores.
    """
    _check_boxes(path)
    limit = [] if max_frames is None else ["-frames:v", str(max_frames)]
    pictures = _ffmpeg_output(path, *limit, *_AS_PICTURES, threads=threads)
    header = re.match(rb"P6\s(\d+) (\d+)\s255\s", pictures)
    if header is None:
        raise VideoError(f"{path}: expected a video with at least one frame, got none")
    width, height = int(header[1]), int(header[2])
    rows = np.frombuffer(pictures, np.uint8).reshape(-1, header.end() + height * width * 3)
    return rearrange(rows[:, header.end() :], "f (h w c) -> f h w c", h=height, w=width, c=3).copy()


def stream_mp4(path: Path, start_seconds: float) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """Yield the frames of `path` from `start_seconds` on, for videos that are larger than memory.

    Raises `VideoError` if the file is damaged or no MP4.
    """
    _check_boxes(path)
    source = ("-v", "error", "-nostdin", "-xerror", "-protocol_whitelist", "file")
    seek = ("-ss", f"{start_seconds:.6f}") if start_seconds > 0 else ()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [_ffmpeg(), *source, *seek, "-i", str(path.absolute()), *_AS_PICTURES, "pipe:1"],
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert process.stdout is not None
        try:
            while (header := process.stdout.readline()) == b"P6\n":
                width, height = (int(side) for side in process.stdout.readline().split())
                process.stdout.readline()
                pixels = process.stdout.read(height * width * 3)
                if len(pixels) < height * width * 3:
                    break
                yield rearrange(np.frombuffer(pixels, np.uint8), "(h w c) -> h w c", h=height, w=width, c=3)
            if process.wait() or header:
                log.seek(0)
                raise VideoError(f"{path}: expected a readable video: {_ffmpeg_reason(log.read(), process.returncode)}")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def count_mp4(path: Path) -> tuple[int, float]:
    """Count the frames of `path` and find their mean rate (frames per second), without decoding them."""
    _check_boxes(path)
    listing = _ffmpeg_output(path, "-map", "0:v:0", "-c", "copy", "-f", "framecrc").decode()
    time_base = re.search(r"^#tb 0: (\d+)/(\d+)$", listing, re.MULTILINE)
    # A packet a line: stream, dts, pts, duration, size, checksum and, unless it is a plain keyframe, flags.
    packets = [line.split(",") for line in listing.splitlines() if line.startswith("0,")]
    shown = [packet for packet in packets if not _packet_flags(packet) & _DISCARDED]
    ticks = sum(int(packet[3]) for packet in shown)
    if time_base is None or ticks <= 0:
        raise VideoError(f"{path}: expected a video with frames and a frame rate, got {len(shown)} frames")
    seconds = ticks * Fraction(int(time_base[1]), int(time_base[2]))
    return len(shown), float(len(shown) / seconds)


class Mp4Sink:
    """Encodes frames as they come; `finish` completes the file, `close` ends the encoder, also after a failure.

    The video is H.264 with 4:2:0 chroma (which browsers and QuickTime play), BT.709 colors, and its index first, for
    streaming.
    """

    def __init__(self, path: Path, fps: float, size: tuple[int, int], crf: int, threads: int) -> None:
        rate = str(Fraction(fps).limit_denominator(1001))
        command = [
            *(_ffmpeg(), "-v", "error", "-y", "-filter_threads", str(threads)),
            *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{size[0]}x{size[1]}", "-r", rate, "-i", "pipe:0"),
            *("-vf", "scale=out_color_matrix=bt709:out_range=tv:flags=bicubic+accurate_rnd+full_chroma_inp"),
            *("-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", str(crf), "-threads", str(threads)),
            *("-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv"),
            *("-movflags", "+faststart", "-f", "mp4", str(path.absolute())),
        ]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._log, bufsize=0
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

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


def _check_boxes(path: Path) -> None:
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


def _ffmpeg_output(path: Path, *arguments: str, threads: int = 0) -> bytes:
    """Run ffmpeg on the video at `path` and return its standard output; any damage makes ffmpeg fail (-xerror)."""
    source = ("-v", "error", "-nostdin", "-xerror", "-protocol_whitelist", "file")
    source = (*source, "-filter_threads", str(threads), "-threads", str(threads), "-i", str(path.absolute()))
    done = subprocess.run([_ffmpeg(), *source, *arguments, "pipe:1"], capture_output=True, check=False)
    if done.returncode:
        raise VideoError(f"{path}: expected a readable video: {_ffmpeg_reason(done.stderr, done.returncode)}")
    return done.stdout


def _ffmpeg_reason(log: bytes, status: int | None) -> str:
    """ffmpeg's first complaint without its `[part @ address]` prefixes."""
    lines = [re.sub(r"^(\[[^]]*] )+", "", line) for line in log.decode(errors="replace").splitlines()]
    return lines[0] if lines else f"ffmpeg ended with status {status}"
