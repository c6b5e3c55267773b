"""What an import keeps of a recording, and what it doesn't: for its log, for shard.json and for the card."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from tokenizer.settings import Settings


class Losses(Settings):
    """What of a drive an import keeps, and what it doesn't.

    Attributes:
        read: frames that the source has, also those that it can't give.
        kept: frames of the dataset.
        parts: the parts into which the drive was cut, without those that are left out.
        seconds: the time that the kept frames span.
        repeated: kept frames that show the same frame of the source as the one before.
        moved_seconds: largest time between a kept frame and the instant that it stands for.
        gaps: how many gaps were cut out; the longest one's seconds.
        longest_gap: in seconds.
        left_out: frames of the source that are left out, by the reason.
        clock: what is to be said about the times.
    """

    read: int
    kept: int
    parts: int
    seconds: float
    repeated: int = 0
    moved_seconds: float = 0.0
    gaps: int = 0
    longest_gap: float = 0.0
    left_out: dict[str, int] = Field(default_factory=dict)
    clock: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether nothing was left out, shown twice or cut."""
        return not (self.repeated or self.gaps or self.left_out or self.parts > 1)

    def __str__(self) -> str:
        """One line."""
        facts = [f"{self.read} frames read", f"{self.kept} kept ({self.seconds:.1f} s)"]
        if self.parts > 1:
            facts[-1] += f" in {self.parts} stretches"
        if self.gaps:
            facts.append(f"{count_of(self.gaps, 'gap')} cut out, the longest of {self.longest_gap:.2f} s")
        if self.repeated:
            facts.append(f"{self.repeated} of these shown twice")
        if self.moved_seconds >= 0.0005:
            facts.append(f"moved by at most {1000 * self.moved_seconds:.0f} ms")
        facts += [f"{count} left out: {reason}" for reason, count in self.left_out.items()]
        if self.clock:
            facts.append(f"times by {self.clock}")
        return ", ".join(facts)

    @classmethod
    def of_all(cls, each: Sequence["Losses"]) -> "Losses":
        """The losses of several drives together."""
        left_out: Counter[str] = Counter()
        for losses in each:
            left_out.update(losses.left_out)
        return cls(
            read=sum(losses.read for losses in each),
            kept=sum(losses.kept for losses in each),
            parts=sum(losses.parts for losses in each),
            seconds=sum(losses.seconds for losses in each),
            repeated=sum(losses.repeated for losses in each),
            moved_seconds=max(losses.moved_seconds for losses in each),
            gaps=sum(losses.gaps for losses in each),
            longest_gap=max(losses.longest_gap for losses in each),
            left_out=left_out,
            clock=", ".join(dict.fromkeys(losses.clock for losses in each if losses.clock)),
        )

    def to_json(self) -> dict[str, Any]:
        """For shard.json."""
        return self.model_dump(mode="json")


def count_of(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun: "1 gap", "2 gaps"."""
    return f"{number} {noun}{'' if number == 1 else plural}"
