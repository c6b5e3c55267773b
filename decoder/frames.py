"""The frames of a video and their times, by ffmpeg: each shown frame is read once, and damaged files are refused."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from jaxtyping import Float64, UInt8

from decoder.containers import find_demuxer
from decoder.ffmpeg import MAX_THREADS, Reading, read_with_ffmpeg, widen
from decoder.showing import display_filters, parse_display
from tokenizer.errors import VideoError
from tokenizer.limits import LIMITS, Limits

# Output as PPM pictures, whose headers give their size. V leaves out cover pictures.
_STREAM = ("-map", "0:V:0")
_AS_PICTURES = (
    *(*_STREAM, "-fps_mode", "passthrough", "-sws_flags", "bicubic+accurate_rnd+full_chroma_int"),
    *("-pix_fmt", "rgb24", "-c:v", "ppm", "-f", "image2pipe"),
)
_AS_PACKETS = (*_STREAM, "-c", "copy", "-f", "framecrc")
_AS_TIMES = (*_STREAM, "-fps_mode", "passthrough", "-c:v", "wrapped_avframe", "-f", "framecrc")
_DISCARDED = 4  # packet flag of a frame that an edit list removes
# Of these codecs each packet is a frame that is shown. VP8 hides reference frames in packets of their own, and AVI's
# MPEG-4 holds packets that stand for nothing: of all others the frames are decoded to be counted.
_FRAME_EACH = frozenset(
    ("h264", "hevc", "av1", "vp9", "vvc", "gif", "mjpeg", "png", "apng", "webp", "ffv1", "rawvideo", "prores", "dnxhd")
)
_NO_TIME = -(1 << 63)  # an AVI's packets have only decoding times
_GIF_LEAST, _GIF_DEFAULT = 2, 10  # hundredths of a second: browsers show a frame of less than 20 ms for 100 ms


@dataclass(frozen=True, eq=False)
class FrameTimes:
    """When the frames of a video are shown.

    Attributes:
        seconds: the time of each shown frame after the first, in the order in which they are shown.
        fps: their mean rate, frames a second.
    """

    seconds: Float64[np.ndarray, " frames"]
    fps: float


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
    seek = ("-ss", f"{start_seconds:.6f}") if start_seconds > 0 else ()
    limit = () if max_frames is None else ("-frames:v", str(max_frames))
    graph: tuple[str, ...] = ()
    while True:
        with read_with_ffmpeg(
            path, *limit, *graph, *_AS_PICTURES, before=seek, threads=threads, limits=limits, seconds=seconds
        ) as reading:
            widen(reading.pipe)
            header = reading.pipe.readline()
            if not graph and header and (filters := _filters(reading, path, limits)):
                # Few videos need it. They are begun again, so that the others take one process.
                graph = ("-vf", filters)
                reading.is_abandoned = True
                continue
            while header == b"P6\n":
                width, height = (int(side) for side in reading.pipe.readline().split())
                reading.pipe.readline()
                pixels = np.empty((height, width, 3), np.uint8)
                if reading.pipe.readinto(pixels.data.cast("B")) < pixels.size:
                    break
                yield pixels
                header = reading.pipe.readline()
        if header:
            raise VideoError(f"{path}: expected a readable video, got one that ends within a frame")
        return


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
    return FrameTimes((ticks - ticks[0]) * float(listing.time_base), fps)


@dataclass
class _Listing:
    """The packets or the frames that ffmpeg lists."""

    ticks: list[int]
    durations: list[int]
    time_base: Fraction | None = None
    tells_frames: bool = True


def _list(path: Path, arguments: tuple[str, ...], limits: Limits, seconds: float | None) -> _Listing:
    listing, first = _Listing([], []), None
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
                ticks = int(packet[2])
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
    return listing


def _filters(reading: Reading, path: Path, limits: Limits) -> str:
    display = parse_display(reading.description())
    return "" if display is None else display_filters(display, str(path), limits)


def _packet_flags(packet: list[str]) -> int:
    return int(packet[6].strip().removeprefix("F="), 16) if len(packet) > 6 and "F=" in packet[6] else 1
