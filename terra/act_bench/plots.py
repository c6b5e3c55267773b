"""The confusion matrix as a picture."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from terra.act_bench.report import Results
from terra.act_bench.samples import CLASSES
from terra.act_bench.scores import confusion
from tokenizer.files import replacing

_DARK = 0.5  # shares below are dark in the color map


def plot_confusion(results: Results, path: Path) -> None:
    """Write a PNG with a row per instructed maneuver and a column per estimated one: shares of the row, and counts.

    Rows without videos are empty. The colors (cividis) are safe for the color-blind.

    Raises:
        OutputError: the file can't be written.
    """
    counts = confusion(results.scores)
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)
    figure = Figure(figsize=(9.4, 7.6), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="cividis", vmin=0, vmax=1)
    for row, col in np.argwhere(np.isfinite(shares)):
        color = "white" if shares[row, col] < _DARK else "black"
        text = f"{shares[row, col]:.2f}\n{counts[row, col]}"
        axes.text(col, row, text, ha="center", va="center", color=color, fontsize=8)
    names = [name.replace("_", " ") for name in CLASSES]
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), [f"{name} ({total})" for name, total in zip(names, totals[:, 0], strict=True)])
    accuracy = results.rows[0].accuracy.value
    axes.set(xlabel="estimated", ylabel="instructed (videos)", title=f"accuracy {accuracy:.3f}, {results.coverage}")
    figure.colorbar(image, label="share of the row", shrink=0.8)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
