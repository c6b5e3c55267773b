"""Figures for the analysis of models: rows of frames, maps over frames, curves, bars, in color-blind safe colors."""

from collections.abc import Mapping, Sequence

import numpy as np
from einops import repeat
from jaxtyping import Float, UInt8
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

# Okabe and Ito 2008, "Color Universal Design"; black last.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#000000")
_MAP = "viridis"
_WIDTH = 9.0  # inches
_SCALE = 1.1  # inches, width of a color bar with its label
_GAP = 0.08  # inches between rows
_LINE = 0.3  # inches, height of a line of text
_GRAY = 0.35  # opacity of the frame under a map

Pixels = UInt8[np.ndarray, "frames height width 3"]


def frame_rows(rows: Mapping[str, Pixels], columns: Sequence[str] = (), *, title: str = "") -> Figure:
    """Draw frames side by side, with a labeled row for each entry and a label above each column."""
    figure, panels = _panels(rows, columns, title, _WIDTH)
    for line, frames in zip(panels, rows.values(), strict=True):
        for axes, frame in zip(line, frames, strict=False):
            axes.imshow(frame)
    return figure


def maps_over_frames(
    rows: Mapping[str, tuple[Pixels, Float[np.ndarray, "frames rows cols"]]],
    columns: Sequence[str] = (),
    *,
    label: str,
    title: str = "",
    top: float | None = None,
) -> Figure:
    """Draw a map of each frame's token values over its gray picture, with one scale from 0 to `top` for all frames.

    `label` names the values and their unit. The default of `top` is the largest value.
    """
    figure, panels = _panels({name: frames for name, (frames, _) in rows.items()}, columns, title, _WIDTH - _SCALE)
    scale = ScalarMappable(Normalize(0.0, top or max(float(maps.max()) for _, maps in rows.values())), _MAP)
    for line, (frames, maps) in zip(panels, rows.values(), strict=True):
        for axes, frame, values in zip(line, frames, maps, strict=False):
            axes.imshow(_over(frame, scale.to_rgba(values)[..., :3]))
    figure.colorbar(scale, ax=panels, label=label, pad=0.01, aspect=30, fraction=0.1)
    return figure


def curves(
    at: Sequence[float], lines: Mapping[str, Sequence[float]], *, xlabel: str, ylabel: str, title: str = ""
) -> Figure:
    """Draw lines with a dot at each value; `at` are the x values of all lines."""
    figure = Figure(figsize=(0.7 * _WIDTH, 3.0), layout="constrained")
    axes = figure.subplots()
    for (label, values), color, mark in zip(lines.items(), COLORS, "osD^vPX*", strict=False):
        axes.plot(at, values, color=color, marker=mark, label=label)
    _finish(axes, xlabel, ylabel, title)
    if len(lines) > 1:
        figure.legend(loc="outside right center")
    return figure


def bars(
    at: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    stacked: bool = False,
) -> Figure:
    """Draw a bar for each part at each label of `at`, beside one another or `stacked`."""
    figure = Figure(figsize=(0.8 * _WIDTH, 3.2), layout="constrained")
    axes = figure.subplots()
    places, bottom = np.arange(len(at)), np.zeros(len(at))
    width = 0.8 if stacked else 0.8 / len(parts)
    for index, (label, values) in enumerate(parts.items()):
        shift = 0.0 if stacked else (index - (len(parts) - 1) / 2) * width
        axes.bar(places + shift, values, width, bottom, color=COLORS[index % len(COLORS)], label=label)
        bottom = bottom + np.asarray(values) if stacked else bottom
    axes.set_xticks(places, at)
    _finish(axes, xlabel, ylabel, title)
    if len(parts) > 1:
        figure.legend(loc="outside right center")
    return figure


def matrix(values: Float[np.ndarray, "rows cols"], *, xlabel: str, ylabel: str, label: str, title: str = "") -> Figure:
    """Draw a matrix of values as colors, on a scale that begins at 0."""
    figure = Figure(figsize=(0.5 * _WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, cmap=_MAP, vmin=0.0)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title, xticks=range(values.shape[1]), yticks=range(values.shape[0]))
    figure.colorbar(image, label=label)
    return figure


def _panels(rows: Mapping[str, Pixels], columns: Sequence[str], title: str, width: float) -> tuple[Figure, np.ndarray]:
    """Make a figure with labeled axes, without ticks, for each row's frames; together they are `width` inches wide."""
    cols = max(map(len, rows.values()))
    shape = next(iter(rows.values())).shape[1:3]
    height = len(rows) * (width / cols * shape[0] / shape[1] + _GAP) + _LINE * (bool(columns) + bool(title))
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    if title:
        figure.suptitle(title)
    panels = figure.subplots(len(rows), cols, squeeze=False)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[], frame_on=False, box_aspect=shape[0] / shape[1])
    for axes, label in zip(panels[:, 0], rows, strict=True):
        axes.set_ylabel(label)
    for axes, label in zip(panels[0], columns, strict=False):
        axes.set_title(label, fontsize="medium")
    return figure, panels


def _over(
    frame: UInt8[np.ndarray, "height width 3"], colors: Float[np.ndarray, "rows cols 3"]
) -> Float[np.ndarray, "height width 3"]:
    """Blend the frame's gray picture with a map of its tokens' colors."""
    (height, width), (rows, cols) = frame.shape[:2], colors.shape[:2]
    large = repeat(colors, "r c rgb -> (r high) (c wide) rgb", high=height // rows, wide=width // cols)
    return _GRAY * frame.mean(axis=-1, keepdims=True) / 255 + (1 - _GRAY) * large


def _finish(axes: Axes, xlabel: str, ylabel: str, title: str) -> None:
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
