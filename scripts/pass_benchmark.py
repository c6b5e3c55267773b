"""Times decode steps (passes) of `engine=graph` on random weights, also with other kernel constants.

    python scripts/pass_benchmark.py --rollouts 64 --contexts 5 22
    python scripts/pass_benchmark.py --fp8 --try gemm._WARPS=8 --try "gemm._WARPS=8 gemm._LM_HEAD.stages=3"
    python scripts/pass_benchmark.py --rollouts 64 --try attention._CONFIG.num_warps=4

The script is for tuning on another GPU. Each line gives the least and the median of some rounds. The first and the last
line have the current constants, because a GPU that gets warm gets slower. Without drafts a frame takes as many
passes as it has tokens and action slots.
"""

import argparse
import contextlib
import dataclasses
import importlib
import statistics
import time
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from terra.benchmark.passes import Passes, add_arguments, prepare
from terra.errors import ConfigError
from terra.tables import print_table


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--passes", type=int, default=50, help="of a round; all are of one frame")
    parser.add_argument(
        "--try", dest="tries", type=constants_of, action="append", default=[], metavar="MODULE.CONSTANT=NUMBER ..."
    )
    try:
        found = measure(parser.parse_args())
    except ConfigError as error:
        parser.error(str(error))
    table = Table(Column("constants", overflow="fold"), "context frames", "ms a pass, least", "median")
    for constants, context, milliseconds in found:
        row = f"{min(milliseconds):.4f}", f"{statistics.median(milliseconds):.4f}"
        table.add_row(constants or "as they stand", str(context), *row)
    print_table(Console(), table)


@torch.no_grad()
def measure(arguments: argparse.Namespace) -> list[tuple[str, int, list[float]]]:
    """Milliseconds a pass in each round, for each context and each set of constants."""
    found = []
    for passes in prepare(arguments):
        for constants in [{}, *arguments.tries, {}]:
            with changed(constants.values()):
                milliseconds = time_passes(passes, arguments.rounds, arguments.passes)
            found.append((" ".join(constants), passes.context, milliseconds))
    return found


def time_passes(passes: Passes, rounds: int, count: int) -> list[float]:
    """Milliseconds a pass, for each round of `count` passes; compilation and capture come before."""
    passes.steps.clear()  # captured with other constants
    passes.begin()
    passes.run(count)
    milliseconds = []
    for _ in range(rounds):
        passes.wait()
        begun = time.perf_counter()
        passes.run(count)
        passes.wait()
        milliseconds.append((time.perf_counter() - begun) * 1000 / count)
    return milliseconds


@dataclasses.dataclass(frozen=True)
class Constant:
    """Another value for a constant of the graph engine's kernel modules, or for a field of a constant."""

    module: ModuleType
    name: str
    field: str | None
    value: Any


def constants_of(text: str) -> dict[str, Constant]:
    """Parse constants such as "gemm._WARPS=8 attention._CONFIG.stages=2"."""
    found = {}
    for part in text.split():
        try:
            path, value = part.split("=")
            module, name, *fields = path.split(".")
            constant = Constant(
                importlib.import_module(f"terra.engine.graph.kernels.{module}"),
                name,
                next(iter(fields), None),
                int(value),
            )
            getattr(getattr(constant.module, name), constant.field or "__class__")
        except (ValueError, AttributeError, ImportError) as error:
            expected = "expected MODULE.CONSTANT=NUMBER of terra.engine.graph.kernels"
            raise argparse.ArgumentTypeError(f"{expected}, got {part!r}: {error}") from None
        found[part] = constant
    return found


@contextlib.contextmanager
def changed(constants: Iterable[Constant]) -> Iterator[None]:
    """Give the constants their other values within a `with` block."""
    with contextlib.ExitStack() as undo:
        for constant in constants:
            before = getattr(constant.module, constant.name)
            undo.callback(setattr, constant.module, constant.name, before)
            field = constant.field
            now = dataclasses.replace(before, **{field: constant.value}) if field else constant.value
            setattr(constant.module, constant.name, now)
        yield


if __name__ == "__main__":
    main()
