"""The evaluation's pictures: every metric against the frame, and true, re-encoded, generated and held side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from einops import rearrange
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from decoder.video import Pixels, write_video
from terra.evaluation.comparison import ModelColumn, higher_is_better, is_clear, unit_of
from terra.evaluation.measures import HALVES, Measure, curve
from terra.evaluation.motion import integrate
from terra.evaluation.remembering import BEST_VIEW, LOOPS, NO_MEMORY, ORACLE, RECENT, REVISIT_VARIANTS, REVISITS
from terra.evaluation.scores import GENERATED, PERSISTENCE, RE_ENCODED, TRUE, ClipScores
from tokenizer.files import replacing

# Colors of Okabe and Ito, which are safe for the color-blind.
_COLORS = {GENERATED: "#0072B2", RE_ENCODED: "#009E73", PERSISTENCE: "#D55E00", TRUE: "black", HALVES: "black"}
_REMEMBERED = _COLORS | {NO_MEMORY: "black", RECENT: "#E69F00", ORACLE: "#CC79A7", BEST_VIEW: _COLORS[PERSISTENCE]}
_UNITS = {
    "psnr": "dB",
    "psnr-moving": "dB",
    "psnr-gain-moving": "dB",
    "displacement": "m",
    "heading-difference": "degrees",
}
_STRIP_FRAMES = 5
_STRIP_COLUMNS = 6
_BAR = 14  # pixels above each picture, for its label

_LEFT, _RIGHT, _TOP, _BOTTOM, _FOOT = 0.8, 0.15, 0.35, 0.55, 0.35  # inches around a panel, and below all


def plot_curves(measures: Sequence[Measure], run: str, fps: float, path: Path) -> None:
    """Write `draw_curves` of all metrics of `run` that are measured by frame as a PNG.

    Raises:
        OutputError: the file can't be written.
    """
    metrics = dict.fromkeys(each.metric for each in measures if each.run == run and each.first_frame is not None)
    figure = draw_curves(measures, run, fps, list(metrics))
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def draw_curves(measures: Sequence[Measure], run: str, fps: float, metrics: Sequence[str]) -> Figure:
    """Plot each of `metrics` of `run` against time, with 95 % bands."""
    by_frame = [each for each in measures if each.run == run and each.first_frame is not None]
    figure, panels = _make_panels(len(metrics), 3, (4.6, 3.2))
    for axes, metric in zip(panels, metrics, strict=False):
        for variant in _COLORS:
            _draw_curve(axes, curve(by_frame, run, metric, variant), variant, fps)
        axes.set(title=metric, xlabel="seconds after the context", ylabel=_UNITS.get(metric, ""))
        axes.grid(alpha=0.3)
    lines = {str(line.get_label()): line for axes in panels for line in axes.get_lines()}
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="lower center", ncols=len(lines))
    return figure


def _make_panels(count: int, most_cols: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """Make a figure of `count` panels, each of so many inches with its margins, and room for a line below them.

    The margins are fixed: a layout that measures every label takes longer than the drawing.
    """
    cols = min(most_cols, count) or 1
    rows = -(-count // cols) or 1
    width, height = size[0] * cols, size[1] * rows + _FOOT
    figure = Figure(figsize=(width, height))
    margins = {
        "left": _LEFT / width,
        "right": 1 - _RIGHT / width,
        "top": 1 - _TOP / height,
        "bottom": (_FOOT + _BOTTOM) / height,
        "wspace": (_LEFT + _RIGHT) / (size[0] - _LEFT - _RIGHT),
        "hspace": (_TOP + _BOTTOM) / (size[1] - _TOP - _BOTTOM),
    }
    panels = list(figure.subplots(rows, cols, squeeze=False, gridspec_kw=margins).flatten())
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels


def plot_columns(columns: Sequence[ModelColumn], path: Path) -> None:
    """Write a PNG with a panel for each row of the table: every model's value with its 95 % interval.

    Raises:
        OutputError: the file can't be written.
    """
    rows = list(columns[0].values)
    figure, panels = _make_panels(len(rows), 4, (3.4, 2.6))
    colors = ("black", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
    for axes, row in zip(panels, rows, strict=False):
        for index, each in enumerate(columns):
            if row not in each.values:
                continue
            value, color = each.values[row], colors[index % len(colors)]
            axes.plot([index], [value.value], "o", color=color)
            axes.plot([index, index], [value.low, value.high], color=color)
            if row in each.differences and is_clear(each.differences[row]):
                axes.annotate("*", (index, value.value), xytext=(5, 0), textcoords="offset points")
        unit = f"{unit_of(row)}, " if unit_of(row) else ""
        axes.set_title(row, fontsize=9)
        axes.set_ylabel(f"{unit}{'higher' if higher_is_better(row) else 'lower'} is better", fontsize=8)
        axes.set_xticks(range(len(columns)), [each.name for each in columns], fontsize=8)
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.grid(alpha=0.3)
    figure.supxlabel("95 % intervals over places; *: the paired difference to the base is clear of 0", fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def plot_revisits(measures: Sequence[Measure], path: Path) -> None:
    """Write a PNG of what is remembered: each metric where drives come back, by variant, over all and some of them.

    Raises:
        OutputError: the file can't be written.
    """
    of = [each for each in measures if each.run.startswith((REVISITS, LOOPS))]
    of = [each for each in of if not each.metric.endswith(("-gain", "-closed"))]
    runs, metrics = (list(dict.fromkeys(getattr(each, name) for each in of)) for name in ("run", "metric"))
    variants = [name for name in REVISIT_VARIANTS if any(each.variant == name for each in of)]
    figure = Figure(figsize=(4.6 * len(metrics), 3.6), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        for offset, variant in enumerate(variants):
            found = {each.run: each.estimate for each in of if (each.metric, each.variant) == (metric, variant)}
            at = np.flatnonzero([run in found for run in runs]) + 0.8 * (offset + 0.5) / len(variants) - 0.4
            color, estimates = _REMEMBERED[variant], [found[run] for run in runs if run in found]
            axes.plot(at, [each.value for each in estimates], "o", color=color, label=variant, markersize=4)
            axes.vlines(at, [each.low for each in estimates], [each.high for each in estimates], color=color)
        names = [run.removeprefix(REVISITS).removeprefix("-").replace("_", " ") or "all" for run in runs]
        axes.set_xticks(range(len(runs)), names, fontsize=8)
        axes.set(title=metric, ylabel=_UNITS.get(metric, ""))
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def draw_paths(scores: Sequence[ClipScores]) -> Figure:
    """Plot for each clip, seen from above, the instructed path and the path recovered from each video."""
    cols = min(3, len(scores))
    rows = -(-len(scores) // cols)
    figure = Figure(figsize=(3.2 * cols, 3.0 * rows), layout="constrained")
    panels = figure.subplots(rows, cols, squeeze=False).flatten()
    for axes, each in zip(panels, scores, strict=False):
        told = integrate(each.clip.instructed)
        axes.plot(told[:, 1], told[:, 0], color="black", linewidth=5, alpha=0.25, label="instructed")
        for variant in (TRUE, GENERATED, PERSISTENCE):
            path = integrate(each.steps[variant])
            axes.plot(path[:, 1], path[:, 0], ".-", color=_COLORS[variant], markersize=4, label=variant)
        reach = max(1.0, 1.1 * float(np.abs(told[:, :2]).max()))
        axes.set(title=each.clip.name, xlabel="left (m)", ylabel="forward (m)", ylim=(-0.1 * reach, reach))
        axes.set_xlim(reach / 2, -reach / 2)  # left is left
        axes.title.set_fontsize(8)
        axes.grid(alpha=0.3)
    for axes in panels[len(scores) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def draw_strip(videos: Mapping[str, Pixels], fps: float, num_context: int) -> Figure:
    """Draw a row of six frames, from the last context frame to the end, for each labeled video; all have one size.

    The titles are seconds after the last context frame.
    """
    first = next(iter(videos.values()))
    chosen = np.unique(np.linspace(num_context - 1, len(first) - 1, _STRIP_COLUMNS).round().astype(int))
    height, width = first.shape[1:3]
    size = (1.6 * len(chosen), 1.6 * height / width * len(videos) + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(videos), len(chosen), squeeze=False)
    for row, (label, video) in zip(panels, videos.items(), strict=True):
        row[0].set_ylabel(label, fontsize=8)
        for axes, index in zip(row, chosen, strict=True):
            axes.imshow(video[index], aspect="equal", interpolation="none")
            axes.set(xticks=[], yticks=[])
    for axes, index in zip(panels[0], chosen, strict=True):
        axes.set_title(f"{(index - num_context + 1) / fps:.1f} s", fontsize=8)
    return figure


def _draw_curve(axes: Axes, points: Sequence[Measure], variant: str, fps: float) -> None:
    if not points:
        return
    seconds = [((each.first_frame or 0) + (each.last_frame or 0)) / 2 / fps for each in points]
    # Markers, because a curve may have one point only; the baselines are drawn below the measured videos.
    style = {HALVES: ".:", PERSISTENCE: ".--"}.get(variant, ".-")
    order = 3 if variant == GENERATED else 2
    values = [each.estimate.value for each in points]
    axes.plot(seconds, values, style, color=_COLORS[variant], label=variant, zorder=order)
    low, high = ([getattr(each.estimate, end) for each in points] for end in ("low", "high"))
    axes.fill_between(seconds, low, high, color=_COLORS[variant], alpha=0.15, linewidth=0)


def write_grid(rows: Sequence[Mapping[str, Pixels]], folder: Path, name: str, fps: float) -> None:
    """Write NAME.mp4, a row for each clip and a column for each of its labeled videos, and NAME.png, some frames.

    Videos of one row have equal lengths; missing columns and ends stay dark. In the PNG each video is a row.

    Raises:
        OutputError: a file can't be written.
    """
    if not rows:
        return
    shape = next(iter(rows[0].values())).shape
    length = max(len(video) for row in rows for video in row.values())
    cols = max(len(row) for row in rows)
    # H.264 with 4:2:0 chroma needs even sides.
    height, width = shape[1] + _BAR + shape[1] % 2, shape[2] + shape[2] % 2
    grid = np.zeros((length, len(rows), cols, height, width, 3), np.uint8)
    for row_index, row in enumerate(rows):
        for col_index, (label, video) in enumerate(row.items()):
            grid[: len(video), row_index, col_index] = _labeled(label, video, height, width)
    merged = rearrange(grid, "frames rows cols height width rgb -> frames (rows height) (cols width) rgb")
    write_video(merged, folder / f"{name}.mp4", fps)
    chosen = np.linspace(0, length - 1, min(_STRIP_FRAMES, length)).round().astype(int)
    strip = rearrange(grid[chosen], "frames rows cols height width rgb -> (rows cols height) (frames width) rgb")
    with replacing(folder / f"{name}.png") as temporary:
        Image.fromarray(strip).save(temporary, format="PNG")


def _labeled(label: str, video: Pixels, height: int, width: int) -> Pixels:
    """The video under a bar with its label."""
    bar = Image.new("RGB", (width, _BAR), (16, 20, 27))
    font = ImageFont.load_default(size=_BAR - 3)
    ImageDraw.Draw(bar).text((3, 0), label, fill=(236, 240, 245), font=font)
    framed = np.zeros((len(video), height, width, 3), np.uint8)
    framed[:, :_BAR] = np.asarray(bar)
    framed[:, _BAR : _BAR + video.shape[1], : video.shape[2]] = video
    return framed
