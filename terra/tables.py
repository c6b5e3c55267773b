"""Prints tables whole: no cell is shortened, and no number is broken over two lines."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

_FOLDED_WIDTH = 24
"""Characters that a column of prose (`overflow="fold"`) needs at least."""
_UNLIMITED = 100_000


def print_table(console: Console, table: Table) -> None:
    """Print a table whole, whatever the width of the console.

    Away from a terminal (a pipe, a file, a log) the table is as wide as its cells. On a terminal that is narrower than
    the table a block of lines is printed for each row: the first cell, then the name and the value of each further
    column. Columns with `overflow="fold"` hold prose, which may take several lines on a terminal.

    Args:
        console: is printed to.
        table: its cells are strings or Text; empty cells and "-" are left out of the blocks.
    """
    options = console.options.update(max_width=_UNLIMITED)
    width = Measurement.get(console, options, table).maximum
    if not console.is_terminal:
        before = console.width
        console.width = max(width, before)
        try:
            console.print(table, highlight=False)
        finally:
            console.width = before
    elif width - sum(_spared(console, column) for column in table.columns) <= console.width:
        console.print(table, highlight=False)
    else:
        _print_rows(console, table)


def _spared(console: Console, column: Column) -> int:
    """How many characters narrower a column can be than its longest cell."""
    if column.overflow != "fold":
        return 0
    longest = max((_text(console, cell).cell_len for cell in column.cells), default=0)
    return max(longest - _FOLDED_WIDTH, 0)


def _print_rows(console: Console, table: Table) -> None:
    if table.title is not None:
        console.print(_text(console, table.title), style="table.title", highlight=False)
    first, *others = table.columns
    names = [_text(console, column.header) for column in others]
    indent = max((name.cell_len for name in names), default=0)
    for title, *cells in zip(first.cells, *(column.cells for column in others), strict=True):
        console.print(_text(console, title), style="bold", highlight=False)
        for name, cell in zip(names, cells, strict=True):
            text = _text(console, cell)
            if text.plain not in ("", "-"):
                space = " " * (indent - name.cell_len)
                console.print(Text.assemble("  ", name, space, "  ", text), highlight=False)


def _text(console: Console, cell: object) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell), highlight=False)
