"""A quick comparison of engines that are already loaded, in one process.

`terra benchmark` is the careful measurement: a process for each engine, repeats, quartiles.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from rich.table import Table

from terra.benchmark.measure import time_rollouts
from terra.benchmark.plan import Workload
from terra.benchmark.prompts import prompt_maker
from terra.engine.base import Engine

_T = TypeVar("_T")


@dataclass(frozen=True)
class Speed:
    """Frames a second of all simultaneous rollouts of one engine, without prefill."""

    engine: str
    rollouts: int
    frames_per_second: float


def compare_engines(
    engines: Mapping[str, tuple[Engine, Sequence[int]]],
    wait: Callable[[Coroutine[Any, Any, _T]], _T],
    *,
    num_context: int = 3,
    num_frames: int = 1,
) -> list[Speed]:
    """Measure each engine with each of its numbers of simultaneous rollouts, one after another, on random tokens.

    Args:
        engines: engine and numbers of simultaneous rollouts, by the engine's name.
        wait: runs a coroutine and returns its result, such as `Pipeline.wait`.
        num_context: context frames.
        num_frames: measured frames of a rollout, after one warm-up frame; a speed follows from their median.
    """
    speeds = []
    for name, (engine, counts) in engines.items():
        make_prompt = prompt_maker(engine.spec, None)
        for count in counts:
            workload = Workload("run", count, "start", num_context, num_frames, 1)
            seconds = wait(time_rollouts(engine, workload, count, make_prompt))["seconds"]  # pyright: ignore
            speeds.append(Speed(name, count, count / median(seconds)))
    return speeds


def speed_table(speeds: Sequence[Speed], tokens_per_frame: int) -> Table:
    """A table with a row for each speed and its ratio to the first speed."""
    table = Table("engine", "rollouts at once", "frames a second", "tokens a second", f"times {speeds[0].engine}")
    for each in speeds:
        rate = each.frames_per_second
        ratio = rate / speeds[0].frames_per_second
        table.add_row(each.engine, str(each.rollouts), f"{rate:.3g}", f"{rate * tokens_per_frame:.3g}", f"{ratio:.3g}")
    return table
