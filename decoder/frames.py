"""The frames of a video and their times, by ffmpeg: each shown frame is read once, and damaged files are refused."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

import numpy as np
from jaxtyping import Float64, UInt8

from decoder.containers import find_demuxer
from decoder.ffmpeg import MAX_THREADS, Reading, read_with_ffmpeg, widen
from decoder.showing import Display, display_filters, parse_display, planes_filters
from tokenizer.errors import VideoError
from tokenizer.limits import LIMITS, Limits

# Output as PPM pictures, whose headers give their size. V leaves out cover pictures.
_STREAM = ("-map", "0:V:0")
_AS_PICTURES = (
    *(*_STREAM, "-fps_mode", "passthrough", "-sws_flags", "bicubic+accurate_rnd+full_chroma_int"),
    *("-pix_fmt", "rgb24", "-c:v", "ppm", "-f", "image2pipe"),
)
_AS_PLANES = (*_STREAM, "-fps_mode", "passthrough", "-f", "rawvideo")
_AS_PACKETS = (*_STREAM, "-c", "copy", "-f", "framecrc")
_AS_TIMES = (*_STREAM, "-fps_mode", "passthrough", "-c:v", "wrapped_avframe", "-f", "framecrc")
_DISCARDED = 4  # packet flag of a frame that an edit list removes
# Of these codecs each packet is a frame that is shown. VP8 hides reference frames in packets of their own, and AVI's
# MPEG-4 holds packets that stand for nothing: of all others the frames are decoded to be counted.
_FRAME_EACH = frozenset(
    ("h264", "hevc", "av1", "vp9", "vvc", "gif", "mjpeg", "png", "apng", "webp", "ffv1", "prores", "dnxhd")
)
_BACK = 1.0  # s, by which decoding times may go back
_NO_TIME = -(1 << 63)  # an AVI's packets have only decoding times
_GIF_LEAST, _GIF_DEFAULT = 2, 10  # hundredths of a second: browsers show a frame of less than 20 ms for 100 ms


class FrameChangeError(VideoError):
    """The frames of a video change their size, the shape of their pixels or their color on the way."""


@dataclass(frozen=True, eq=False)
class FrameTimes:
    """When the frames of a video are shown.

    Attributes:
        seconds: the time of each shown frame after the first, in the order in which they are shown.
        fps: their mean rate, frames a second.
        display: what the video says of its showing.
    """

    seconds: Float64[np.ndarray, " frames"]
    fps: float
    display: Display


def stream_frames(
    path: Path,
    *,
    start_seconds: float = 0.0,
    max_frames: int | None = None,
    threads: int = MAX_THREADS,
    limits: Limits = LIMITS,
    seconds: float | None = None,
) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """Yield the frames of a video as they are shown, as RGB in [0, 255], one in memory at a time.

    Args:
        path: the file.
        start_seconds: time of the first frame.
        max_frames: number of frames; None: all.
        threads: ffmpeg's decoding threads.
        limits: bounds on a frame's pixels.
        seconds: how long reading may take; None: without end.

    Raises:
        VideoError: the file is damaged within what is read, is no such video, can't be shown rightly (see
            `decoder.showing`), is larger than the bounds, or takes longer.
    """
    run = _Run(path, start_seconds, max_frames, threads, limits, seconds)
    return _stream(run, _AS_PICTURES, None, _read_picture)


def stream_planes(
    path: Path,
    display: Display,
    box: tuple[float, float, float, float],
    size: tuple[int, int],
    *,
    start_seconds: float = 0.0,
    limits: Limits = LIMITS,
) -> Iterator[UInt8[np.ndarray, "rows width"]]:
    """Yield the frames of a plain video, cropped and resized by ffmpeg, as BT.709 YUV 4:2:0 (`decoder.mp4`'s own).

    From one video to another a frame is never converted to RGB, which takes half of the time.

    Args:
        path: the file.
        display: what `list_frames` found, which must be plain.
        box: (left, top, right, bottom) of what is kept of a frame, in pixels; taken to even ones.
        size: (height, width) of the frames, both even.
        start_seconds, limits: see `stream_frames`; one thread decodes.

    Yields:
        The planes Y (height rows), and U and V (a quarter of its bytes each), below one another.

    Raises:
        VideoError: see `stream_frames`; `FrameChangeError` at a frame of another size, shape or color.
    """
    height, width = size

    def read(pipe: BufferedReader) -> UInt8[np.ndarray, "rows width"] | None:
        planes = np.empty((height * 3 // 2, width), np.uint8)
        count = pipe.readinto(planes.data.cast("B"))
        if 0 < count < planes.size:
            raise EOFError
        return planes if count else None

    run = _Run(path, start_seconds, None, 1, limits, None)
    return _stream(run, _AS_PLANES, planes_filters(display, box, size), read, one_shape=True)


@dataclass(frozen=True)
class _Run:
    """What of a video is read, and within which bounds."""

    path: Path
    start_seconds: float
    max_frames: int | None
    threads: int
    limits: Limits
    seconds: float | None


_Frame = TypeVar("_Frame")


def _stream(
    run: _Run,
    output: tuple[str, ...],
    graph: str | None,
    read: Callable[[BufferedReader], _Frame | None],
    one_shape: bool = False,
) -> Iterator[_Frame]:
    """The frames that `read` takes from ffmpeg's output behind a filter graph; None: the one that the video needs."""
    before = ("-ss", f"{run.start_seconds:.6f}") if run.start_seconds > 0 else ()
    limit = () if run.max_frames is None else ("-frames:v", str(run.max_frames))
    filters = graph
    while True:
        arguments = (*limit, *(("-vf", filters) if filters else ()), *output)
        with read_with_ffmpeg(
            run.path, *arguments, before=before, threads=run.threads, limits=run.limits, seconds=run.seconds
        ) as reading:
            widen(reading.pipe)
            frame = _read(run, read, reading.pipe)
            if filters is None and frame is not None and (filters := _filters(reading, run)):
                # Few videos need it. They are begun again, so that the others take one process.
                reading.is_abandoned = True
                continue
            while frame is not None:
                if one_shape and reading.has_changed():
                    raise FrameChangeError(f"{run.path}: expected frames of one size, shape and color, got a change")
                yield frame
                frame = _read(run, read, reading.pipe)
        return


def _read(run: _Run, read: Callable[[BufferedReader], _Frame | None], pipe: BufferedReader) -> _Frame | None:
    try:
        return read(pipe)
    except EOFError:
        raise VideoError(f"{run.path}: expected a readable video, got one that ends within a frame") from None


def _read_picture(pipe: BufferedReader) -> UInt8[np.ndarray, "height width 3"] | None:
    if pipe.readline() != b"P6\n":
        return None
    width, height = (int(side) for side in pipe.readline().split())
    pipe.readline()
    pixels = np.empty((height, width, 3), np.uint8)
    if pipe.readinto(pixels.data.cast("B")) < pixels.size:
        raise EOFError
    return pixels


def list_frames(path: Path, limits: Limits = LIMITS, seconds: float | None = None) -> FrameTimes:
    """The times of a video's frames, by the container's presentation time stamps.

    Frames are decoded only where packets don't tell which of them is shown. A GIF's frame of less than 20 ms counts as
    one of 100 ms, as browsers show it.

    Args:
        path: the file.
        limits: bounds on the number of frames and their rate.
        seconds: how long it may take; None: without end.

    Raises:
        VideoError: the file is damaged, is no such video, or has more frames or a higher rate than the bounds allow.
    """
    demuxer = find_demuxer(path)
    listing = _list(path, _AS_PACKETS, limits, seconds)
    is_decoded = not listing.tells_frames
    if is_decoded:
        listing = _list(path, _AS_TIMES, limits, seconds)
    if not listing.ticks or listing.time_base is None:
        raise VideoError(f"{path}: expected a video with frames and a frame rate, got {len(listing.ticks)} frames")
    ticks = np.sort(np.array(listing.ticks, np.int64))
    durations = np.array(listing.durations, np.int64)
    if demuxer == "gif":
        durations = np.where(durations < _GIF_LEAST, _GIF_DEFAULT, durations)
        ticks = np.append(0, np.cumsum(durations)[:-1])
    # Of an MP4 or a GIF the durations are right. Of other files, of which they are not always, the times give the rate.
    count, span = len(ticks), int(durations.sum())
    if (demuxer not in ("mov", "gif") or is_decoded) and count > 1:
        count, span = count - 1, int(ticks[-1] - ticks[0])
    if span <= 0:
        raise VideoError(f"{path}: expected a video with frames and a frame rate, got {len(ticks)} frames")
    fps = float(count / (span * listing.time_base))
    if fps > limits.video_fps:
        raise VideoError(f"{path}: expected at most {limits.video_fps:g} frames a second, got {fps:g}")
    return FrameTimes((ticks - ticks[0]) * float(listing.time_base), fps, listing.display)


@dataclass
class _Listing:
    """The packets or the frames that ffmpeg lists."""

    ticks: list[int]
    durations: list[int]
    time_base: Fraction | None = None
    tells_frames: bool = True
    display: Display = field(default_factory=lambda: Display(0, 0))


def _list(path: Path, arguments: tuple[str, ...], limits: Limits, seconds: float | None) -> _Listing:
    listing, first, last = _Listing([], []), None, -(1 << 62)
    with read_with_ffmpeg(
        path, *arguments, threads=1 if "copy" in arguments else 0, limits=limits, seconds=seconds
    ) as (reading):
        for line in reading.pipe:
            if line.startswith(b"#tb 0: "):
                listing.time_base = Fraction(line[7:].decode().strip())
            elif line.startswith(b"#codec_id 0: "):
                listing.tells_frames = line[13:].decode().strip() in _FRAME_EACH
            elif line.startswith(b"0,"):
                # A packet a line: stream, dts, pts, duration, size, checksum and, unless it is a plain keyframe, flags.
                packet = line.decode().split(",")
                flags = _packet_flags(packet)
                ticks, decoding = int(packet[2]), int(packet[1])
                if listing.time_base is not None and (decoding - last) * listing.time_base < -_BACK:
                    raise VideoError(
                        f"{path}: expected times that increase, got a clock that goes back at frame"
                        f" {len(listing.ticks)}: recordings that were joined? Split them"
                    )
                last = decoding
                if ticks == _NO_TIME:
                    listing.tells_frames = False
                    continue
                if first is None:
                    first, listing.tells_frames = ticks, listing.tells_frames and flags % 2 == 1
                # A decoder shows nothing that comes before the first frame that can be decoded alone.
                listing.tells_frames &= ticks >= first
                if flags & _DISCARDED:
                    continue
                listing.ticks.append(ticks)
                listing.durations.append(int(packet[3]))
                if len(listing.ticks) > limits.video_frames:
                    raise VideoError(f"{path}: expected at most {limits.video_frames} frames, got more")
        listing.display = parse_display(reading.description()) or listing.display
    return listing


def _filters(reading: Reading, run: _Run) -> str:
    display = parse_display(reading.description())
    return "" if display is None else display_filters(display, str(run.path), run.limits)


def _packet_flags(packet: list[str]) -> int:
    return int(packet[6].strip().removeprefix("F="), 16) if len(packet) > 6 and "F=" in packet[6] else 1
