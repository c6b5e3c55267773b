"""Tables are printed whole: in a pipe as wide as they are, on a narrow terminal as blocks of lines."""

import io
import re

from rich.console import Console
from rich.table import Column, Table

from terra.evaluation.criteria import Criterion
from terra.evaluation.measures import Measure
from terra.evaluation.report import print_report
from terra.evaluation.scores import GENERATED, PERSISTENCE, RE_ENCODED, TRUE
from terra.metrics.bootstrap import Estimate
from terra.tables import print_table

HEADS = [f"heading number {index}" for index in range(12)]
CELLS = [f"{index}.25 [-{index}.5, {index}.75]" for index in range(12)]


def table(*more: Column) -> Table:
    made = Table(*HEADS, *more, title="numbers")
    made.add_row(*(cell.replace("[", "\\[") for cell in CELLS), *("word " * 40 for _ in more))
    return made


def printed(made: Table, width: int, terminal: bool) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, legacy_windows=False)
    print_table(console, made)
    assert console.width == width
    return console.file.getvalue()


def whole_line(text: str, parts: list[str]) -> bool:
    """Whether some line is a row of these cells."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)] for line in text.splitlines()]
    return ["", *parts, ""] in rows


def test_in_a_pipe_a_table_is_as_wide_as_its_cells():
    text = printed(table(), 80, terminal=False)
    assert whole_line(text, HEADS)
    assert whole_line(text, CELLS)


def test_a_wide_terminal_shows_the_same():
    assert printed(table(), 400, terminal=True) == printed(table(), 80, terminal=False)


def test_a_narrow_terminal_shows_a_block_for_each_row():
    text = printed(table(), 50, terminal=True)
    assert all(len(line) <= 50 for line in text.splitlines())
    assert text.splitlines()[:2] == ["numbers", CELLS[0]]
    assert [line.split("  ")[-1].strip() for line in text.splitlines()[2:]] == CELLS[1:]
    assert [line.strip().startswith(head) for line, head in zip(text.splitlines()[2:], HEADS[1:], strict=True)]


def test_prose_takes_several_lines_on_a_terminal_and_one_elsewhere():
    made = Table("what", Column("detail", overflow="fold"))
    made.add_row("it", "word " * 40)
    assert ("word " * 40).strip() in printed(made, 80, terminal=False)
    text = printed(made, 60, terminal=True)
    assert "what" in text.splitlines()[1]  # no blocks
    assert text.count("word") == 40
    assert all(len(line) <= 60 for line in text.splitlines())


def test_an_evaluation_in_a_pipe():
    ends = {GENERATED: (20.123, 19.9, 20.4), PERSISTENCE: (18.2, 17.1, 19.3), RE_ENCODED: (30.1, 29.1, 31.1)}
    metric = "psnr-gain-moving-by-clip"
    measures = [Measure("rollouts", metric, name, None, None, Estimate(*each, 2, 2)) for name, each in ends.items()]
    criteria = [
        Criterion("left > straight > right, share of groups", 0.5, "at least 0.95", None, "2 of 20 groups"),
        Criterion("tokenizer PSNR (dB)", 26.0, "at least 27", False),
    ]
    console = Console(file=io.StringIO(), width=80)
    print_report(console, measures, criteria)
    text = console.file.getvalue()
    heads = ["metric", GENERATED, RE_ENCODED, PERSISTENCE, "samples"]
    assert whole_line(text, heads)  # nothing is of the recordings themselves
    assert whole_line(text, [metric, "20.1 [19.9, 20.4]", "30.1 [29.1, 31.1]", "18.2 [17.1, 19.3]", "2"])
    assert whole_line(text, [criteria[0].name, "0.5", "at least 0.95", "too few: 2 of 20 groups"])
    assert whole_line(text, [criteria[1].name, "26", "at least 27", "failed"])
    measures.append(Measure("rollouts", "ADE", TRUE, None, None, Estimate(0.4, 0.3, 0.5, 2, 2)))
    print_report(console, measures, criteria)
    assert whole_line(console.file.getvalue(), [*heads[:-1], TRUE, "samples"])
