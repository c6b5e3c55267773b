"""The findings of a check, as a table with one row each and as JSON."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from terra.errors import CheckpointError
from terra.output import package_versions
from terra.tables import print_table
from tokenizer.files import write_json

PAIR = "pair"

Status = Literal["passed", "failed", "unknown"]
_COLORS: dict[Status, str] = {"passed": "green", "failed": "red", "unknown": "yellow"}


@dataclass(frozen=True)
class Finding:
    """One finding: the `subject`, the `question`, its `status`, and in `detail` the numbers or the fault."""

    subject: str
    question: str
    status: Status
    detail: str


class Findings(list[Finding]):
    """Findings in the order of the checks."""

    def add(self, subject: str, question: str, status: Status, detail: str) -> None:
        """Append a finding."""
        self.append(Finding(subject, question, status, detail))

    @contextmanager
    def catch(self, subject: str, question: str) -> Iterator[None]:
        """Turn a CheckpointError in the block into a failed finding."""
        try:
            yield
        except CheckpointError as error:
            self.add(subject, question, "failed", str(error))

    @property
    def failed(self) -> bool:
        """Whether any finding failed."""
        return any(finding.status == "failed" for finding in self)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print a table with a row per finding."""
    table = Table("of", "what", "", Column("detail", overflow="fold"), box=None, pad_edge=False)
    for each in findings:
        color = _COLORS[each.status]
        table.add_row(each.subject, each.question, f"[{color}]{each.status}", escape(each.detail))
    print_table(console, table)


def write_findings(path: Path, findings: Sequence[Finding], facts: dict[str, Any]) -> None:
    """Write the findings and further `facts` as JSON. Raises OutputError."""
    content = {"format": "terra-check", **facts, "versions": package_versions()}
    write_json(path, content | {"findings": [asdict(each) for each in findings]})
