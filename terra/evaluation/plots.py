"""The evaluation's pictures: every metric against the frame, and true, re-encoded, generated and held side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from einops import rearrange
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from decoder.video import write_video
from terra.evaluation.measures import HALVES, Measure, curve
from terra.evaluation.scores import GENERATED, PERSISTENCE, RE_ENCODED, TRUE
from tokenizer.files import replacing

Pixels = UInt8[np.ndarray, "frames height width 3"]

_COLORS = {GENERATED: "tab:blue", RE_ENCODED: "tab:green", PERSISTENCE: "tab:red", TRUE: "black", HALVES: "black"}
_UNITS = {
    "psnr": "dB",
    "psnr-moving": "dB",
    "psnr-gain-moving": "dB",
    "displacement": "m",
    "heading-difference": "degrees",
}
_STRIP_FRAMES = 5
_BAR = 14  # pixels above each picture, for its label


def plot_curves(measures: Sequence[Measure], run: str, fps: float, path: Path) -> None:
    """Write a PNG with one plot for each metric of `run` that is measured by frame, with 95 % bands.

    Raises:
        OutputError: the file can't be written.
    """
    by_frame = [each for each in measures if each.run == run and each.first_frame is not None]
    metrics = list(dict.fromkeys(each.metric for each in by_frame))
    cols = min(3, len(metrics)) or 1
    rows = -(-len(metrics) // cols) or 1
    figure = Figure(figsize=(4.6 * cols, 3.2 * rows), layout="constrained")
    panels = figure.subplots(rows, cols, squeeze=False).flatten()
    for axes, metric in zip(panels, metrics, strict=False):
        for variant in _COLORS:
            _draw_curve(axes, curve(by_frame, run, metric, variant), variant, fps)
        axes.set(title=metric, xlabel="seconds after the context", ylabel=_UNITS.get(metric, ""))
        axes.grid(alpha=0.3)
    for axes in panels[len(metrics) :]:
        axes.set_visible(False)
    lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines))
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def _draw_curve(axes: Axes, points: Sequence[Measure], variant: str, fps: float) -> None:
    if not points:
        return
    seconds = [((each.first_frame or 0) + (each.last_frame or 0)) / 2 / fps for each in points]
    # Dots, because a curve may have one point only; what is judged is not to lie under what it is compared with.
    style = {HALVES: ".:", PERSISTENCE: ".--"}.get(variant, ".-")
    order = 3 if variant == GENERATED else 2
    values = [each.estimate.value for each in points]
    axes.plot(seconds, values, style, color=_COLORS[variant], label=variant, zorder=order)
    low, high = ([getattr(each.estimate, end) for each in points] for end in ("low", "high"))
    axes.fill_between(seconds, low, high, color=_COLORS[variant], alpha=0.15, linewidth=0)


def write_grid(rows: Sequence[Mapping[str, Pixels]], folder: Path, name: str, fps: float) -> None:
    """Write NAME.mp4, a row for each clip and a column for each of its labelled videos, and NAME.png, some frames.

    Videos of one row have equal lengths; missing columns and ends stay dark. In the PNG each video is a row.

    Raises:
        OutputError: a file can't be written.
    """
    if not rows:
        return
    shape = next(iter(rows[0].values())).shape
    length = max(len(video) for row in rows for video in row.values())
    cols = max(len(row) for row in rows)
    # H.264 wants even sides.
    height, width = shape[1] + _BAR + shape[1] % 2, shape[2] + shape[2] % 2
    grid = np.zeros((length, len(rows), cols, height, width, 3), np.uint8)
    for row_index, row in enumerate(rows):
        for col_index, (label, video) in enumerate(row.items()):
            grid[: len(video), row_index, col_index] = _labelled(label, video, height, width)
    merged = rearrange(grid, "frames rows cols height width rgb -> frames (rows height) (cols width) rgb")
    write_video(merged, folder / f"{name}.mp4", fps)
    chosen = np.linspace(0, length - 1, min(_STRIP_FRAMES, length)).round().astype(int)
    strip = rearrange(grid[chosen], "frames rows cols height width rgb -> (rows cols height) (frames width) rgb")
    with replacing(folder / f"{name}.png") as temporary:
        Image.fromarray(strip).save(temporary, format="PNG")


def _labelled(label: str, video: Pixels, height: int, width: int) -> Pixels:
    """The video under a bar with its label."""
    bar = Image.new("RGB", (width, _BAR), (16, 20, 27))
    font = ImageFont.load_default(size=_BAR - 3)
    ImageDraw.Draw(bar).text((3, 0), label, fill=(236, 240, 245), font=font)
    framed = np.zeros((len(video), height, width, 3), np.uint8)
    framed[:, :_BAR] = np.asarray(bar)
    framed[:, _BAR : _BAR + video.shape[1], : video.shape[2]] = video
    return framed
