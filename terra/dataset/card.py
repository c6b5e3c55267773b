"""A dataset's card: README.md with statistics, a contact sheet of frames, and a picture of the driven paths."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from terra.dataset.episode import Split
from terra.dataset.format import read_dataset
from terra.dataset.pictures import PATHS_NAME, SHEET_NAME, contact_sheet, draw_paths
from terra.dataset.reading import read_splits
from terra.dataset.statistics import split_statistics, tabulate
from tokenizer.files import make_folder, replacing


def write_card(folder: Path) -> None:
    """Write README.md, contact_sheet.png and paths.png of a dataset.

    Raises:
        DatasetError: no dataset, or none of its episodes can be read.
        OutputError: the files can't be written.
    """
    facts, splits = read_dataset(folder), read_splits(folder)
    episodes = [episode for split in splits.values() for episode in split.episodes]
    sheet, unshown = contact_sheet(episodes)
    save_pictures(folder, sheet, draw_paths([episode.poses for episode in episodes]))
    damaged = [line for split in splits.values() for line in split.damaged] + unshown
    with replacing(folder / "README.md") as temporary:
        temporary.write_text("\n".join(_lines(facts, splits, damaged)) + "\n", encoding="utf-8")


def save_pictures(
    folder: Path, sheet: UInt8[np.ndarray, "height width 3"], paths: UInt8[np.ndarray, "side side 3"]
) -> None:
    """Write contact_sheet.png and paths.png. Raises OutputError."""
    make_folder(folder)
    for name, picture in ((SHEET_NAME, sheet), (PATHS_NAME, paths)):
        with replacing(folder / name) as temporary:
            Image.fromarray(picture).save(temporary, format="PNG")


def _lines(facts: Mapping[str, Any], splits: Mapping[str, Split], damaged: list[str]) -> list[str]:
    height, width = facts["image_size"]
    rows = tabulate({name: split_statistics(split.episodes) for name, split in splits.items()})
    table = [f"| | {' | '.join(splits)} |", f"|---|{'---:|' * len(splits)}"]
    table += [f"| {label} | {' | '.join(cells)} |" for label, cells in rows.items()]
    notices = [f"- {source}: {facts['notices'].get(source, 'none was given')}." for source in facts["sources"]]
    return [
        f"# Driving: {', '.join(facts['sources'])}",
        "",
        f"Videos of {width} x {height} pixels at {facts['fps']:g} frames a second, with the vehicle's pose for each",
        "frame and for three seconds more. The splits share no place.",
        "",
        f"![A frame of some episodes]({SHEET_NAME})",
        "",
        *table,
        "",
        "A frame turns if its heading changes by more than 2 degrees a second.",
        "",
        "Damaged and left out of these numbers:" if damaged else "Nothing is damaged, as far as facts and poses tell.",
        *(f"- {line}" for line in damaged),
        "",
        f"![The paths of some episodes from one start]({PATHS_NAME})",
        "",
        "## Terms",
        "",
        *notices,
        "",
        "## Use",
        "",
        "`terra.dataset.read_split` reads it; `terra.dataset.format` describes the files. To decode and check all:",
        "`terra inspect data=FOLDER verify=true`.",
    ]
