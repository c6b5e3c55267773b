"""Reading and writing of frames: the only module for videos, GIF and PNG files, and the border of 8-bit frames."""

import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import imageio.v3 as iio
import numpy as np
from einops import rearrange
from jaxtyping import Float64, UInt8

from decoder.frames import list_frames, stream_frames
from decoder.gif import GifSink
from decoder.mp4 import Mp4Sink
from tokenizer.errors import OutputError, VideoError
from tokenizer.files import temporary_name
from tokenizer.limits import LIMITS, Limits

if TYPE_CHECKING:
    # Only conversions need torch, and a process that records should not pay for importing it.
    from tokenizer.types import Frames

Pixels = UInt8[np.ndarray, "frames height width 3"]
"""8-bit RGB frames, channels last."""

VIDEO_SUFFIXES = (".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".ts", ".webm")
_WRITABLE = (".mp4", ".gif")
_GIF_MAX_FPS = 50.0  # browsers show a GIF frame of less than 20 ms for 100 ms


@dataclass(frozen=True, eq=False)
class VideoInfo:
    """Facts about a video file.

    Attributes:
        times: when each frame is shown, in seconds after the first.
        fps: the frames' mean rate, in frames a second.
        width, height: of a frame as it is shown, in pixels.
    """

    times: Float64[np.ndarray, " frames"]
    fps: float
    width: int
    height: int

    @property
    def num_frames(self) -> int:
        """How many frames are shown."""
        return len(self.times)


def probe_video(path: Path | str, limits: Limits = LIMITS, seconds: float | None = None) -> VideoInfo:
    """Find the times of a video's frames, their rate and size; of most kinds only the first frame is decoded.

    With `seconds`, it may take so long. Raises `VideoError` when the file is missing, cut off, not such a video, larger
    than the bounds, or when it takes longer.
    """
    path = _existing(path)
    listing = list_frames(path, limits, seconds)
    frame = read_video(path, max_frames=1, limits=limits)[0]
    return VideoInfo(listing.seconds, listing.fps, width=frame.shape[1], height=frame.shape[0])


def read_video(
    path: Path | str, max_frames: int | None = None, threads: int = 0, limits: Limits = LIMITS
) -> UInt8[np.ndarray, "frames height width 3"]:
    """Read the frames of a video, each stored frame once and in order, as RGB in [0, 255].

    `max_frames` bounds the frames, from the start. `threads` is the number of decoding threads, 1 to 4; 0: four.
    Raises `VideoError` when the file is missing, damaged within what is read, not such a video, or of larger frames
    than the bounds allow.
    """
    if max_frames is not None and max_frames < 1:
        raise VideoError(f"{path}: expected max_frames of at least 1, got {max_frames = }")
    frames = list(stream_frames(_existing(path), max_frames=max_frames, threads=threads, limits=limits))
    if not frames:
        raise VideoError(f"{path}: expected a video with at least one frame, got none")
    return np.stack(frames)


def stream_video(
    path: Path | str, start_seconds: float = 0.0, *, limits: Limits = LIMITS, seconds: float | None = None
) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """Yield the frames of a video from a time on, as RGB in [0, 255], one in memory at a time.

    With `seconds`, reading may take so long. Raises `VideoError` when the file is missing, damaged, not such a video,
    of larger frames than the bounds allow, or when it takes longer.
    """
    return stream_frames(_existing(path), start_seconds=start_seconds, limits=limits, seconds=seconds)


def write_video(frames: UInt8[np.ndarray, "frames height width 3"], path: Path | str, fps: float) -> None:
    """Write RGB frames in [0, 255] as H.264 (`.mp4`, even width and height) or as an endless GIF (`.gif`).

    Raises `VideoError` if the format can't store the frames, `OutputError` if the file can't be written.
    """
    _check_stack(frames, str(path))
    with VideoWriter(path, fps, size=(frames.shape[2], frames.shape[1])) as writer:
        writer.extend(frames)


def write_png_sequence(frames: UInt8[np.ndarray, "frames height width 3"], folder: Path | str) -> None:
    """Write RGB frames in [0, 255] as `frame_0000.png`, `frame_0001.png`, ... in `folder`, new or empty.

    The folder appears complete or not at all. Raises `OutputError` when it can't be written or holds files already.
    """
    folder = Path(folder)
    _check_stack(frames, str(folder))
    unfinished = temporary_name(folder)
    try:
        unfinished.mkdir()
        for index, frame in enumerate(frames):
            with (unfinished / f"frame_{index:04d}.png").open("wb") as file:
                # imageio gets an open file, because it interprets names that contain "~" or ".zip/".
                iio.imwrite(file, frame, plugin="pillow", extension=".png")
        unfinished.replace(folder)
    except OSError as error:
        raise OutputError(f"{folder}: expected a new or empty folder in a writable one: {_reason(error)}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def to_uint8(frames: "Frames") -> UInt8[np.ndarray, "frames height width 3"]:
    """Convert frames in [-1, 1] to 8-bit RGB, channels last: rounded to the nearest of 256 steps, clamped to [0, 255].

    Raises `VideoError` for values that are not finite.
    """
    import torch

    frames = frames.detach().float()
    if not torch.isfinite(frames).all():
        raise VideoError("expected frames in [-1, 1], got values that are not finite")
    return rearrange(to_8_bit(frames), "f c h w -> f h w c").contiguous().cpu().numpy()


def to_frames(frames: UInt8[np.ndarray, "frames height width 3"]) -> "Frames":
    """Convert 8-bit RGB, channels last, to float32 frames in [-1, 1]: x / 127.5 - 1; `to_uint8` inverts it exactly."""
    import torch

    _check_stack(frames, "frames")
    # By NumPy, which takes one core: see `tokenizer.cores`.
    return torch.from_numpy(_in_unit_range(np.ascontiguousarray(rearrange(frames, "f h w c -> f c h w"), np.float32)))


def to_8_bit(frames: "Frames") -> UInt8[Any, "frames 3 height width"]:
    """Frames in [-1, 1] as a uint8 tensor on their device: rounded to the nearest of 256 steps, and clamped."""
    return ((frames.clamp(-1.0, 1.0) + 1.0) * 127.5).round().byte()


def to_unit_range(frames: UInt8[Any, "frames 3 height width"]) -> "Frames":
    """A uint8 tensor as float32 frames in [-1, 1] on its device: x / 127.5 - 1. `to_8_bit` undoes it exactly."""
    return _in_unit_range(frames.float())


def _in_unit_range(levels: Any) -> Any:
    """Levels from 0 to 255, a float32 array or tensor, in [-1, 1]."""
    return levels / 127.5 - 1.0


class VideoWriter:
    """Writes a video frame by frame, as a context manager: MP4 frames are encoded at once, GIF frames at the end.

    The file appears under its name when the block ends without an exception; otherwise nothing new is left, and an
    older file of that name is untouched.
    """

    def __init__(
        self,
        path: Path | str,
        fps: float,
        size: tuple[int, int],
        crf: int = 18,
        preset: str = "medium",
        threads: int = 0,
        planes: bool = False,
    ) -> None:
        """Check that a video of this rate and size (width, height) can be stored in `path`; else `VideoError`.

        `crf` is H.264's constant rate factor, from 0 (lossless) over 18 (visually so,
        trac.ffmpeg.org/wiki/Encode/H.264) to 51; GIF has none. `preset` is x264's, from "ultrafast" to "veryslow".
        `threads` is the number of encoding threads; 0 lets ffmpeg choose by the number of cores, on which the file's
        bytes then depend. `planes`: the frames come as `decoder.frames.stream_planes` yields them, for an MP4.
        """
        self._path = Path(path)
        self._fps = float(fps)
        self._size = size
        self._crf, self._preset = crf, preset
        self._threads = threads
        self._planes = planes
        self._num_frames = 0
        self._sink: Mp4Sink | GifSink | None = None
        self._temporary_path = temporary_name(self._path)
        _check_storable(self._path, self._fps, size, crf)

    def __enter__(self) -> "VideoWriter":
        if not self._path.parent.is_dir():
            raise OutputError(f"{self._path}: expected an existing folder, got {self._path.parent}")
        if self._path.suffix.lower() == ".gif":
            self._sink = GifSink(self._temporary_path, self._fps)
        else:
            self._sink = Mp4Sink(
                self._temporary_path, self._fps, self._size, self._crf, self._preset, self._threads, self._planes
            )
        return self

    def append(self, frame: UInt8[np.ndarray, "..."]) -> None:
        """Add one frame: RGB in [0, 255], or planes. Raises `VideoError` for another type or size than the video's."""
        if self._sink is None:
            raise VideoError(f"{self._path}: expected append inside the writer's with statement")
        width, height = self._size
        shape = (height * 3 // 2, width) if self._planes else (height, width, 3)
        if frame.dtype != np.uint8 or frame.shape != shape:
            expected, got = f"uint8 {shape}", f"{frame.dtype} {frame.shape}"
            raise VideoError(f"{self._path}: expected {expected} for frame {self._num_frames}, got {got}")
        try:
            self._sink.append(frame)
        except OSError as error:
            raise self._output_error(error) from error
        self._num_frames += 1

    def extend(self, frames: Iterable[UInt8[np.ndarray, "..."]]) -> None:
        """Add frames, see `append`."""
        for frame in frames:
            self.append(frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sink, self._sink = self._sink, None
        assert sink is not None
        try:
            if kind is None:
                if not self._num_frames:
                    raise VideoError(f"{self._path}: expected at least one frame, got none")
                sink.finish()
                self._temporary_path.replace(self._path)
        except OSError as failure:
            raise self._output_error(failure) from failure
        finally:
            sink.close()
            self._temporary_path.unlink(missing_ok=True)

    def _output_error(self, error: OSError) -> OutputError:
        return OutputError(f"{self._path}: expected to write {self._num_frames} frames: {_reason(error)}")


def _existing(path: Path | str) -> Path:
    path = Path(path)
    if not path.is_file():
        raise VideoError(f"{path}: expected a video file, got {'a folder' if path.is_dir() else 'no file'}")
    if path.suffix.lower() not in VIDEO_SUFFIXES:
        raise VideoError(f"{path}: expected a video ({', '.join(VIDEO_SUFFIXES)}), got {path.suffix or 'no suffix'}")
    return path


def _check_stack(frames: np.ndarray, where: str) -> None:
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        expected, got = "uint8 (frames, height, width, 3)", f"{frames.dtype} {frames.shape}"
        raise VideoError(f"{where}: expected {expected} with at least one pixel, got {got}")


def _check_storable(path: Path, fps: float, size: tuple[int, int], crf: int) -> None:
    suffix, (width, height) = path.suffix.lower(), size
    if suffix not in _WRITABLE:
        raise VideoError(f"{path}: expected a name that ends in .mp4 or .gif, got {suffix or 'no suffix'}")
    if not (math.isfinite(fps) and fps > 0):
        raise VideoError(f"{path}: expected a positive frame rate, got {fps = }")
    if suffix == ".gif" and fps > _GIF_MAX_FPS:
        raise VideoError(f"{path}: expected at most {_GIF_MAX_FPS:g} frames a second for a GIF, got {fps = }")
    if min(size) < 1:
        raise VideoError(f"{path}: expected a positive width and height, got {width}x{height}")
    if suffix == ".mp4" and (width % 2 or height % 2):
        raise VideoError(f"{path}: expected an even width and height for H.264 (4:2:0), got {width}x{height}")
    if not 0 <= crf <= 51:
        raise VideoError(f"{path}: expected crf from 0 to 51, got {crf = }")


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
