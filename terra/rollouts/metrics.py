"""Writes a run's progress as a text file of counters for Prometheus, without a Prometheus client library."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from terra.rollouts.source import Tally
from tokenizer.files import replacing

_EVERY_SECONDS = 5.0


@dataclass(frozen=True)
class Metric:
    """A named metric: one number, or several numbers that differ in the value of one label.

    Attributes:
        name: as Prometheus has it, with the unit at its end: "terra_frames_total", "terra_stage_seconds_total".
        text: what it counts, one line.
        kind: a counter only grows, a gauge goes up and down.
        values: the number by the label's value, a plain word; of a metric without label the key is "".
        label: the label's name.
    """

    name: str
    text: str
    kind: Literal["counter", "gauge"]
    values: Mapping[str, float]
    label: str = ""


def prometheus_text(metrics: Iterable[Metric]) -> str:
    """The metrics in the text exposition format 0.0.4 (https://prometheus.io/docs/instrumenting/exposition_formats)."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.text}", f"# TYPE {metric.name} {metric.kind}"]
        for key, value in metric.values.items():
            labels = f'{{{metric.label}="{key}"}}' if metric.label else ""
            lines.append(f"{metric.name}{labels} {_number(value)}")
    return "\n".join(lines) + "\n"


def write_metrics(metrics: Iterable[Metric], path: Path) -> None:
    """Write the metrics as a file, whole at any moment, as node_exporter's textfile collector reads it.

    Raises:
        OutputError: the file can't be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(prometheus_text(metrics))


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def tally_metrics(tally: Tally) -> list[Metric]:
    """The tally of this run as metrics. A server's frame counter has the same name and other label values."""
    ended = {"done": tally.done, "failed": tally.failed, "reused": tally.reused}
    return [
        Metric("terra_rollouts_total", "Rollouts ended, by how they did.", "counter", ended, "status"),
        Metric("terra_rollouts_wanted", "Rollouts that the manifest asks for.", "gauge", {"": tally.total}),
        Metric("terra_frames_total", "Frames generated.", "counter", {"rollout": tally.frames}, "kind"),
        Metric("terra_stage_seconds_total", "Spent on rollouts, by stage.", "counter", tally.seconds, "stage"),
        Metric("terra_worker_restarts_total", "Workers that died and were replaced.", "counter", {"": tally.restarts}),
    ]


class MetricsFile:
    """Writes the tally to a file from time to time.

    Args:
        path: the file; None to write nothing.
        tally: the counters to write.
    """

    def __init__(self, path: Path | None, tally: Tally) -> None:
        self._path, self._tally = path, tally
        self._written = float("-inf")

    def update(self) -> None:
        """Write the file if the last write was some seconds ago. Raises OutputError."""
        if time.monotonic() - self._written >= _EVERY_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the file now. Raises OutputError."""
        if self._path is not None:
            write_metrics(tally_metrics(self._tally), self._path)
            self._written = time.monotonic()
