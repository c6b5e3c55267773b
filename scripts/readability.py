"""Counts the words of a page's sentences: median, 90th percentile, and the longest ones.

    python scripts/readability.py [README.md ...]

Code, tables, headings, pictures and the addresses of links do not count. The exit code is 1 where the README's bar is
missed: a median of at most 14 words, and 90 % of the sentences with at most 28.
"""

import argparse
import math
import re
import statistics
import sys
from pathlib import Path

MEDIAN, MOST = 14, 28
_LEFT_OUT = re.compile(r"^(```.*?^```|#.*?$|\|.*?$|<.*?$|!\[.*?$|---.*?$)", re.MULTILINE | re.DOTALL)
_END = re.compile(r"(?<=[.!?:])\**\s+(?=[\"'(*]*[A-Z`\d])|\n\s*\n|\n(?=- |\d+\. )")


def sentences(markdown: str) -> list[str]:
    """The sentences of a page's prose, without markup. A colon ends a sentence where a whole one follows."""
    prose = _LEFT_OUT.sub("\n\n", markdown)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    parts = (" ".join(part.split()).lstrip("-* ") for part in _END.split(prose))
    return [part for part in parts if re.search(r"\w", part)]


def percentile(counts: list[int], share: float) -> int:
    """The least count that `share` of the counts do not exceed."""
    return sorted(counts)[math.ceil(len(counts) * share) - 1]


def main() -> None:
    """Print the figures of each page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, default=[Path("README.md")])
    missed = False
    for page in parser.parse_args().pages:
        found = sorted(sentences(page.read_text(encoding="utf-8")), key=lambda sentence: -len(sentence.split()))
        counts = [len(sentence.split()) for sentence in found]
        median, most = statistics.median(counts), percentile(counts, 0.9)
        print(f"{page}: {len(counts)} sentences; median {median:g} words, 90 % at most {most}")
        for sentence, count in list(zip(found, counts, strict=True))[:3]:
            print(f"  {count}: {sentence}")
        missed = missed or median > MEDIAN or most > MOST
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
