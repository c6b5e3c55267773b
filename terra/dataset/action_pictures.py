"""A picture of actions over time: a plot for each number, a bar for each key or choice, frames above, seconds below."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, UInt8
from PIL import Image, ImageDraw, ImageFont

from decoder.video import stream_video
from terra.actions import ActionTrack, TableSpace, Vector, require_table
from terra.actions.space import Values
from terra.dataset.episode import Episode
from terra.errors import TerraError

_MOST_CURVES, _MOST_PIXELS = 12, 3600
_MOST_SECONDS = 30.0  # of a recording: what is longer would be too narrow to read
_WIDTH, _LEFT, _RIGHT = 960, 150, 60  # pixels: of the picture, and left and right of the plots
_TITLE, _SECONDS, _GAP = 20, 30, 12  # pixels: heights of the title, the time axis, and the gap below
_PLOT, _BAR = 66, 15  # pixels: heights of a number's plot and of a key's bar
_NUM_FRAMES, _FRAME = 8, 92  # frames above the plots, and their width in pixels
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10)  # s, of which the first that gives ten ticks at most is chosen
_FONT = ImageFont.load_default(11)
_BLACK, _GRAY, _PALE = (0, 0, 0), (150, 150, 150), (228, 228, 228)

Picture = UInt8[np.ndarray, "_ _ 3"]


@dataclass(frozen=True, eq=False)
class Curve:
    """The actions of a recording over time.

    Attributes:
        name: the recording's.
        space: what the values mean.
        times: seconds from the recording's start at which each row of values begins, and the end of the last one.
        values: the rows, (times, columns).
        fps: frames a second of `frames`.
        frames: returns an iterator over the frames from the start; None draws none.
        frame_times: seconds from the recording's start of each frame; None: they lie 1 / fps s apart.
    """

    name: str
    space: TableSpace
    times: Float64[np.ndarray, " rows"]
    values: Values
    fps: float = 1.0
    frames: Callable[[], Iterator[Picture]] | None = None
    frame_times: Float64[np.ndarray, " frames"] | None = None

    @classmethod
    def of_episode(cls, episode: Episode) -> "Curve":
        """The actions of an episode, without the last one, which leads nowhere, and its frames."""
        assert episode.actions is not None
        space = require_table(episode.space, "a picture of actions")
        count = max(episode.num_frames - 1, 1)  # one frame alone is drawn with its action
        return cls(
            episode.id,
            space,
            np.arange(count + 1) / episode.fps,
            episode.actions[:count],
            episode.fps,
            lambda: stream_video(episode.video),
        )

    @classmethod
    def of_track(
        cls,
        name: str,
        track: ActionTrack,
        frames: Callable[[], Iterator[Picture]] | None = None,
        frame_times: Float64[np.ndarray, " frames"] | None = None,
    ) -> "Curve":
        """The actions of a file, in its own rate; `frame_times` are by the clock of the file."""
        start = track.times[0]
        times = track.times - start
        end = times[-1] if math.isinf(track.end) else track.end - start
        shown = None if frame_times is None else frame_times - start
        return cls(name, track.space, np.append(times, end), track.values, frames=frames, frame_times=shown)

    @property
    def seconds(self) -> float:
        """How much of the recording is drawn."""
        return min(float(self.times[-1]), _MOST_SECONDS)


def draw_curves(curves: Sequence[Curve]) -> Picture:
    """Draw the actions of some recordings of one space, one below another; all have one scale of seconds.

    Numbers (`Vector`) have a plot each, with a line at zero, over the range of all recordings' values; left of it stand
    unit and declared range, right of it the recording's least and greatest value. Keys and choices have a bar each,
    filled while pressed or chosen, and the share of the time for which they are. Above stand frames at the times of
    their left edges, so that one can see whether left is positive or negative.

    Args:
        curves: evenly spread ones are chosen, up to 12 and as many as fit 3,600 pixels; each is drawn up to 30 s.
    """
    space = curves[0].space
    heights = _PLOT if isinstance(space, Vector) else _BAR
    block = _TITLE + len(space.names) * heights + _SECONDS + _GAP
    count = max(1, min(_MOST_CURVES, len(curves), _MOST_PIXELS // (block + _FRAME)))
    chosen = [curves[index * len(curves) // count] for index in range(count)]
    seconds = max(max(curve.seconds for curve in chosen), 1e-3)
    strips = [_strip(curve, seconds) for curve in chosen]
    frame_height = max((strip.height for strip in strips if strip is not None), default=0)
    block += frame_height
    image = Image.new("RGB", (_WIDTH, count * block), "white")
    draw = ImageDraw.Draw(image)
    ranges = _ranges(space, chosen)
    for number, (curve, strip) in enumerate(zip(chosen, strips, strict=True)):
        top = number * block
        shown, whole = curve.seconds, float(curve.times[-1])
        part = f"first {shown:.0f} of {whole:.0f} s" if whole > shown else f"{whole:.1f} s"
        _text(draw, (4, top + 3), f"{curve.name}: {part}")
        top += _TITLE
        if strip is not None:
            image.paste(strip, (0, top))
        top += frame_height
        bottom = top + len(space.names) * heights
        _time_axis(draw, top, bottom, seconds)
        rows = curve.values if isinstance(space, Vector) else space.rows(curve.values)[:, 0]
        for index, name in enumerate(space.names):
            low = top + index * heights
            if isinstance(space, Vector):
                unit = f" ({space.units[index]})" if space.units[index] else ""
                label = f"{name}{unit}\nrange {space.low[index]:.3g} to {space.high[index]:.3g}"
                _plot(draw, low, curve, rows[:, index], ranges[index], seconds, label)
            else:
                _bar(draw, low, curve, rows[:, index], seconds, name, index)
    return np.asarray(image)


def _ranges(space: TableSpace, curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """The least and greatest value of each column over all curves, with 0 between them or at an end."""
    values = np.concatenate([curve.values for curve in curves])
    if not isinstance(space, Vector):
        return []
    ends = [(min(float(column.min()), 0.0), max(float(column.max()), 0.0)) for column in values.T]
    return [(low, high) if low < high else (-1.0, 1.0) for low, high in ends]


def _strip(curve: Curve, seconds: float) -> Image.Image | None:
    """Frames over the width of the plots, each at the time of its left edge; None without any that can be read."""
    if curve.frames is None:
        return None
    at = np.arange(_NUM_FRAMES) * (_FRAME + 2)  # pixels from the left end of the plots
    times = at / (_WIDTH - _LEFT - _RIGHT) * seconds
    wanted = {_frame_at(curve, time): int(x) for x, time in zip(at, times, strict=True) if time <= curve.seconds}
    strip = None
    frames = curve.frames()
    try:
        for index, frame in enumerate(frames):
            if index > max(wanted):
                break
            if index in wanted:
                height = max(round(_FRAME * frame.shape[0] / frame.shape[1]), 1)
                strip = strip or Image.new("RGB", (_WIDTH, height + 2), "white")
                strip.paste(Image.fromarray(frame).resize((_FRAME, height)), (_LEFT + wanted[index], 0))
    except TerraError:
        return strip  # the contact sheet names what is damaged
    finally:
        if isinstance(frames, Generator):
            frames.close()  # ends what decodes a video
    return strip


def _frame_at(curve: Curve, time: float) -> int:
    """The index of the frame that is nearest to a time."""
    if curve.frame_times is None:
        return round(time * curve.fps)
    return int(np.abs(curve.frame_times - time).argmin())


def _time_axis(draw: ImageDraw.ImageDraw, top: int, bottom: int, seconds: float) -> None:
    step = next((tick for tick in _TICKS if seconds / tick <= 10), _TICKS[-1])
    for index in range(int(seconds / step + 1e-6) + 1):
        x = _x(index * step, seconds)
        draw.line([(x, top), (x, bottom + 3)], fill=_PALE)
        _text(draw, (x, bottom + 4), f"{index * step:g}", anchor="ma")
    _text(draw, (_WIDTH - 4, bottom + 4), "time (s)", anchor="ra")


def _plot(
    draw: ImageDraw.ImageDraw,
    top: int,
    curve: Curve,
    values: np.ndarray,
    ends: tuple[float, float],
    seconds: float,
    label: str,
) -> None:
    low, high = ends
    upper, lower = top + 7, top + _PLOT - 7

    def y(value: float) -> float:
        return lower - (value - low) / (high - low) * (lower - upper)

    for value in dict.fromkeys((high, 0.0, low)):
        draw.line([(_LEFT, y(value)), (_WIDTH - _RIGHT, y(value))], fill=_GRAY if value == 0 else _PALE)
        if value == 0 or abs(y(value) - y(0.0)) >= 12:
            _text(draw, (_LEFT - 5, y(value)), f"{value:.3g}", anchor="rm")
    for row, text in enumerate(label.splitlines()):
        _text(draw, (4, (upper + lower) / 2 - 7 + 15 * row), text[:18], anchor="lm")
    drawn = curve.times[:-1] <= curve.seconds
    points = []
    for start, end, value in zip(curve.times[:-1][drawn], curve.times[1:][drawn], values[drawn], strict=True):
        points += [(_x(start, seconds), y(value)), (_x(min(end, curve.seconds), seconds), y(value))]
    draw.line(points, fill=(0, 84, 166), width=2)
    _text(draw, (_WIDTH - _RIGHT + 5, upper), f"max {values.max():.3g}", anchor="lm")
    _text(draw, (_WIDTH - _RIGHT + 5, lower), f"min {values.min():.3g}", anchor="lm")


def _bar(
    draw: ImageDraw.ImageDraw, top: int, curve: Curve, pressed: np.ndarray, seconds: float, name: str, index: int
) -> None:
    _text(draw, (_LEFT - 5, top + _BAR / 2), name[:22], anchor="rm")
    draw.line([(_LEFT, top + _BAR - 1), (_WIDTH - _RIGHT, top + _BAR - 1)], fill=_PALE)
    color = tuple(int(127 + 100 * math.cos(2.4 * index + shift)) for shift in (0.0, 2.1, 4.2))
    for start, end, value in zip(curve.times[:-1], curve.times[1:], pressed, strict=True):
        if value and start < curve.seconds:
            span = (_x(start, seconds), _x(min(end, curve.seconds), seconds))
            draw.rectangle((span[0], top + 2, max(span[0], span[1] - 1), top + _BAR - 2), fill=color)
    _text(draw, (_WIDTH - _RIGHT + 5, top + _BAR / 2), f"{np.mean(pressed):.0%}", anchor="lm")


def _x(time: float, seconds: float) -> float:
    return _LEFT + time / seconds * (_WIDTH - _LEFT - _RIGHT)


def _text(draw: ImageDraw.ImageDraw, at: tuple[float, float], text: str, anchor: str = "la") -> None:
    draw.text(at, text, fill=_BLACK, font=_FONT, anchor=anchor)
