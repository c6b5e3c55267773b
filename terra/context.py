"""Loads context frames from a folder or a glob of pictures, or a video, in the model's size and rate."""

import glob
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64, UInt8
from PIL import Image

from decoder.pictures import IMAGE_SUFFIXES, is_picture, list_pictures, missing_pictures, natural_key, read_picture
from decoder.video import VIDEO_SUFFIXES, Pixels, probe_video, stream_video, to_frames
from terra.errors import ConfigError, ContextError, VideoError
from terra.views import Views
from tokenizer.limits import LIMITS, Limits

if TYPE_CHECKING:
    # Inputs are checked, and recordings imported, without torch.
    from tokenizer.types import Frames

Source = str | Path | Sequence[str | Path] | Mapping[str, str | Path]
"""A folder, a glob, a video or a picture; a list of pictures; or one of these for each view, by its name."""

ASPECT_TOLERANCE = 0.02  # stretching by more than this is seen, and no camera the model knows
RATE_TOLERANCE = 0.01  # 29.97 counts as 30
_OFFSET_TOLERANCE = 0.6  # parts of a frame between a video's frame and the instant it stands for
_TIE = 1e-6  # s


def load_context(
    source: Source,
    *,
    num_frames: int,
    image_size: tuple[int, int],
    fps: float,
    limits: Limits = LIMITS,
    views: Views | None = None,
) -> "Frames":
    """Load the first `num_frames` frames of a folder, a glob, a video or a list of pictures.

    Pictures (PNG and JPEG, shown as `decoder.pictures` says) are taken in natural order of their names, frame_2 before
    frame_10, and are assumed to be 1 / fps seconds apart, because a picture has no time. A video is sampled at `fps`
    from its first frame on, each time at its nearest frame. Frames of another size are resized bicubically.

    Where several cameras share a picture, `source` may hold whole pictures, or the pictures of each camera, see
    `view_sources`; these are cropped about their middle to the aspect ratio of their part, as `terra import` does.

    Args:
        source: a folder, a glob such as "drive/*.png", a picture, or a video (MP4, MOV, GIF, MKV, WebM, AVI or TS); a
            list of two or more pictures, which are taken in its order; or one of the first for each view, by its name.
        num_frames: number of frames to take.
        image_size: (height, width) in pixels that the tokenizer takes.
        fps: the model's frames a second.
        limits: bounds on pictures and videos.
        views: the cameras that share a picture; None for one camera.

    Returns:
        `num_frames` frames in [-1, 1] of the given size.

    Raises:
        ContextError: nothing found, too few frames, a picture that is damaged, can't be shown, is larger than the
            bounds or smaller than half of `image_size`, of another aspect ratio (by more than 2 %), of another size
            than the first; a video slower than `fps`, or whose rate varies too much for it; a view that is
            missing or unknown.
        VideoError: a video that can't be read, or is larger than the bounds.
        ConfigError: num_frames, image_size or fps not positive.
    """
    return to_frames(
        read_context(source, num_frames=num_frames, image_size=image_size, fps=fps, limits=limits, views=views)
    )


def read_context(
    source: Source,
    *,
    num_frames: int,
    image_size: tuple[int, int],
    fps: float,
    limits: Limits = LIMITS,
    views: Views | None = None,
) -> Pixels:
    """The frames of `load_context` as 8-bit RGB, channels last; needs no torch. Arguments and errors are the same."""
    if num_frames < 1 or min(image_size) < 1 or not 0 < fps < math.inf:
        raise ConfigError(f"expected positive context settings, got {num_frames = }, {image_size = }, {fps = }")
    source = view_sources(source, views)
    if isinstance(source, Mapping):
        assert views is not None
        return views.tile(
            {
                name: _read(source[name], num_frames, views.tile_size(name), fps, limits, is_cropped=True)
                for name in views.names
            }
        )
    return _read(source, num_frames, image_size, fps, limits)


def view_sources(source: Source, views: Views | None) -> Source:
    """The source of each view by its name, where `source` has one for each; else `source` as it is.

    A folder has one for each if something in it has a view's name: a folder front/ of pictures, or a picture or video
    such as front.png or front.mp4.

    Raises:
        ContextError: a view that is missing, unknown or there twice.
    """
    if isinstance(source, Mapping):
        expected = (
            "one source, for the model's one camera"
            if views is None
            else f"one source for each of {', '.join(views.names)}"
        )
        if views is None or set(source) != set(views.names):
            raise ContextError(f"context: expected {expected}, got those of {', '.join(map(str, source)) or 'nothing'}")
        return source
    if not isinstance(source, str | Path) and len(source) == 1:
        source = source[0]
    if views is None or not isinstance(source, str | Path) or not os.path.isdir(source):  # noqa: PTH112 (a glob, too)
        return source
    found: dict[str, list[Path]] = {name: [] for name in views.names}
    for path in sorted(Path(source).iterdir()):
        is_shown = path.suffix.lower() in IMAGE_SUFFIXES + VIDEO_SUFFIXES
        name = path.name if path.is_dir() else path.stem if is_shown else ""
        if name in found:
            found[name].append(path)
    if not any(found.values()):
        return source
    for name, paths in found.items():
        if len(paths) != 1:
            got = " and ".join(path.name for path in paths) or "none"
            raise ContextError(f"{source}: expected one folder, picture or video of the view {name}, got {got}")
    return {name: path for name, (path,) in found.items()}


def _read(
    source: str | Path | Sequence[str | Path],
    num_frames: int,
    image_size: tuple[int, int],
    fps: float,
    limits: Limits,
    *,
    is_cropped: bool = False,
) -> Pixels:
    """The frames of one source; `is_cropped` cuts out their middle of the wanted aspect ratio."""
    if not isinstance(source, str | Path):
        if len(source) > 1:
            return _load_list(source, num_frames, image_size, fps, limits)
        source = source[0]
    path = Path(source)
    try:
        path.exists()
    except OSError as error:
        raise ContextError(f"{source}: expected a folder, a glob or a video, got: {error.strerror}") from None
    if path.is_dir():
        return _load_pictures(
            _pictures(path.iterdir(), str(source)), str(source), num_frames, image_size, limits, is_cropped
        )
    if path.is_file() and path.suffix.lower() in VIDEO_SUFFIXES:
        return _load_video(path, num_frames, image_size, fps, limits, is_cropped)
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        return _load_pictures([path], str(source), num_frames, image_size, limits, is_cropped)
    if path.exists():
        known = ", ".join(IMAGE_SUFFIXES + VIDEO_SUFFIXES)
        raise ContextError(f"{source}: expected a folder or a file that ends in {known}, got {path.suffix!r}")
    if not any(character in str(source) for character in "*?["):
        raise ContextError(f"{source}: expected a folder, a glob or a video, got no such path")
    if "**" in str(source):
        raise ContextError(f"{source}: expected a glob without **, which goes through whole trees")
    # Path.glob refuses absolute patterns and matches hidden files.
    matches = []
    for match in map(Path, glob.iglob(str(source))):  # noqa: PTH207
        if not is_picture(match):
            raise ContextError(f"{source}: expected a glob of PNG or JPEG pictures, got {match}")
        matches.append(match)
    return _load_pictures(_pictures(matches, str(source)), str(source), num_frames, image_size, limits, is_cropped)


def context_files(source: Source, num_frames: int) -> list[Path]:
    """The files of the first frames that `load_context` takes from `source`; fewer if there are fewer.

    Of views only a mapping is known to have them, see `view_sources`.
    """
    if isinstance(source, Mapping):
        return [path for each in source.values() for path in context_files(each, num_frames)]
    if not isinstance(source, str | Path):
        if len(source) > 1:
            return [Path(each) for each in source[:num_frames]]
        source = source[0]
    path = Path(source)
    try:
        if path.is_file():
            return [path]
        if path.is_dir():
            return sorted(filter(is_picture, path.iterdir()), key=natural_key)[:num_frames]
    except OSError:  # a name that is too long
        return []
    if "**" in str(source):
        return []
    return sorted(filter(is_picture, map(Path, glob.glob(str(source)))), key=natural_key)[:num_frames]  # noqa: PTH207


def nearest_frames(
    times: Float64[np.ndarray, " frames"], video_fps: float, fps: float, num_frames: int, where: str
) -> list[int]:
    """Indices of a video's frames nearest to 0, 1 / fps, ... seconds after the first one.

    Rates within 1 % of each other count as the same. Halfway between two frames the later one is taken.

    Args:
        times: when the video's frames are shown, in seconds after the first.
        video_fps: their mean rate.
        fps: the rate of the frames to choose.
        num_frames: how many to choose.
        where: the beginning of a message.

    Raises:
        ContextError: a video that is slower than `fps`, somewhere or in the mean, or too short.
    """
    if video_fps < fps * (1 - RATE_TOLERANCE):
        raise ContextError(f"{where}: expected a video of {fps:g} or more frames a second, got {video_fps:g}")
    rate = fps if abs(video_fps / fps - 1) > RATE_TOLERANCE else video_fps
    instants = np.arange(num_frames) / rate
    available = int((instants < times[-1] + 0.5 / video_fps - _TIE).sum())
    if available < num_frames:
        raise ContextError(f"{where}: expected {num_frames} or more frames at {fps:g} fps, got {available}")
    index = np.searchsorted((times[1:] + times[:-1]) / 2, instants + _TIE, side="right")
    offsets = np.abs(times[index] - instants)
    bad = (offsets > _OFFSET_TOLERANCE / rate) | np.append(False, np.diff(index) == 0)
    if bad.any():
        first = int(np.argmax(bad))
        expected = f"a frame each {1 / fps:.3g} s"
        raise ContextError(
            f"{where}: expected {expected}, got none of its own at {instants[first]:.2f} s: the video's rate varies"
        )
    return index.tolist()


def _pictures(entries: Iterable[Path], source: str) -> list[Path]:
    try:
        return list_pictures(entries, source)
    except VideoError as error:
        raise ContextError(str(error)) from None


def _load_list(
    source: Sequence[str | Path], num_frames: int, image_size: tuple[int, int], fps: float, limits: Limits
) -> Pixels:
    if len(source) < num_frames:
        raise ContextError(f"context_frames: expected {num_frames} or more pictures, got {len(source)}")
    frames = [
        read_context(each, num_frames=1, image_size=image_size, fps=fps, limits=limits) for each in source[:num_frames]
    ]
    return np.concatenate(frames)


def _load_pictures(
    paths: list[Path],
    source: str,
    num_frames: int,
    image_size: tuple[int, int],
    limits: Limits,
    is_cropped: bool,
) -> Pixels:
    if len(paths) < num_frames:
        raise ContextError(f"{source}: expected {num_frames} or more PNG or JPEG pictures, got {len(paths)}")
    paths = paths[:num_frames]
    places = missing_pictures(paths)
    if places is not None and (jumps := np.diff(places) > 1).any():
        row = int(np.argmax(jumps))
        got = f"{paths[row + 1].name} after {paths[row].name}: are some missing?"
        raise ContextError(f"{source}: expected pictures that follow one another, got {got}")
    frames: list[np.ndarray] = []
    first_size: tuple[int, int] | None = None
    for path in paths:
        picture = _read_picture(path, image_size, limits, is_cropped)
        if first_size is not None and picture.size != first_size:
            raise ContextError(
                f"{path}: expected {_size_text(first_size)} pixels like {paths[0].name}, got {_size_text(picture.size)}"
            )
        first_size = picture.size
        frames.append(_resize(picture, image_size))
    return np.stack(frames)


def _read_picture(path: Path, image_size: tuple[int, int], limits: Limits, is_cropped: bool) -> Image.Image:
    def check_size(size: tuple[int, int]) -> None:
        _check_size(_middle_size(size, image_size) if is_cropped else size, image_size, str(path))

    try:
        picture = Image.fromarray(read_picture(path, limits=limits, check_size=check_size))
    except VideoError as error:
        raise ContextError(str(error)) from None
    return _middle(picture, image_size) if is_cropped else picture


def _check_size(size: tuple[int, int], image_size: tuple[int, int], source: str) -> None:
    """Refuse a (width, height) that would be stretched, or enlarged to more than twice its size."""
    height, width = image_size
    if size[0] * 2 < width or size[1] * 2 < height:
        half = _size_text((math.ceil(width / 2), math.ceil(height / 2)))
        raise ContextError(f"{source}: expected {half} pixels or more, got {_size_text(size)}")
    aspect, expected = size[0] / size[1], width / height
    if abs(aspect / expected - 1) > ASPECT_TOLERANCE:
        raise ContextError(
            f"{source}: expected an aspect ratio of {expected:.3f} ({width}x{height}), got {aspect:.3f}"
            f" ({_size_text(size)}): crop it first"
        )


def _size_text(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _resize(picture: Image.Image, image_size: tuple[int, int]) -> UInt8[np.ndarray, "height width 3"]:
    size = (image_size[1], image_size[0])
    return np.asarray(picture if picture.size == size else picture.resize(size, Image.Resampling.BICUBIC))


def _load_video(
    path: Path, num_frames: int, image_size: tuple[int, int], fps: float, limits: Limits, is_cropped: bool
) -> Pixels:
    def check_size(size: tuple[int, int]) -> None:
        _check_size(_middle_size(size, image_size) if is_cropped else size, image_size, str(path))

    pictures = map(Image.fromarray, sample_video(path, num_frames, fps, check_size, limits))
    kept = (_middle(picture, image_size) if is_cropped else picture for picture in pictures)
    return np.stack([_resize(picture, image_size) for picture in kept])


def _middle(picture: Image.Image, image_size: tuple[int, int]) -> Image.Image:
    """The largest part of a picture, about its middle, of the aspect ratio of `image_size`, to a pixel."""
    width, height = _middle_size(picture.size, image_size)
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.crop((left, top, left + width, top + height))


def _middle_size(size: tuple[int, int], image_size: tuple[int, int]) -> tuple[int, int]:
    """Width and height of `_middle`."""
    (width, height), aspect = size, image_size[1] / image_size[0]
    return min(width, round(height * aspect)), min(height, round(width / aspect))


def sample_video(
    path: Path, num_frames: int, fps: float, check_size: Callable[[tuple[int, int]], None], limits: Limits = LIMITS
) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """Yield the first `num_frames` frames of a video at `fps`, each time the nearest one, as RGB in [0, 255].

    Frames are chosen by the times at which the video shows them. One frame is in memory at a time.

    Args:
        path: an MP4 or a GIF.
        num_frames: number of frames.
        fps: frames a second to sample at.
        check_size: raises an error if a (width, height) is not wanted.
        limits: bounds on the video, and on the time that reading takes.

    Raises:
        ContextError: a video slower than `fps`, somewhere or in the mean, or too short.
        VideoError: a video that can't be read, or is larger than the bounds.
    """
    info = probe_video(path, limits, seconds=limits.context_seconds)
    check_size((info.width, info.height))
    left = set(nearest_frames(info.times, info.fps, fps, num_frames, str(path)))
    for index, frame in enumerate(stream_video(path, limits=limits, seconds=limits.context_seconds)):
        if index in left:
            yield frame
            left.remove(index)
        if not left:
            return
    raise ContextError(f"{path}: expected {num_frames} or more frames at {fps:g} fps, got {num_frames - len(left)}")
