"""A dataset's card: README.md with statistics, a contact sheet of frames, and a picture of the paths or actions."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from terra.actions import Waypoints, read_space
from terra.dataset.action_pictures import Curve, draw_curves
from terra.dataset.episode import Episode, Split
from terra.dataset.format import DATASET_FILE, SHARD_FILE, SPLITS, dataset_views, list_shards, read_dataset
from terra.dataset.losses import Losses
from terra.dataset.pictures import ACTIONS_NAME, PATHS_NAME, SHEET_NAME, contact_sheet, draw_paths
from terra.dataset.reading import read_splits
from terra.dataset.statistics import split_statistics, tabulate
from terra.errors import DatasetError
from tokenizer.files import make_folder, read_json, replacing
from tokenizer.settings import checked


def write_card(folder: Path) -> None:
    """Write README.md, contact_sheet.png and paths.png (actions.png where nothing is driven) of a dataset.

    Raises:
        DatasetError: no dataset, or none of its episodes can be read.
        OutputError: the files can't be written.
    """
    facts, splits = read_dataset(folder), read_splits(folder)
    episodes = [episode for split in splits.values() for episode in split.episodes]
    sheet, unshown = contact_sheet(episodes)
    save_pictures(folder, {SHEET_NAME: sheet} | draw_actions(episodes))
    damaged = [line for split in splits.values() for line in split.damaged] + unshown
    lines = _lines(facts, splits, damaged, _read_losses(folder))
    with replacing(folder / "README.md") as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _read_losses(folder: Path) -> dict[str, Losses]:
    """What imports kept of each source's recordings; nothing for a source that was recorded here."""
    found: dict[str, list[Losses]] = defaultdict(list)
    for shard in (shard for split in SPLITS for shard in list_shards(folder, split)):
        with suppress(DatasetError):  # a damaged shard is named elsewhere
            facts = read_json(shard / SHARD_FILE, DatasetError)
            if facts.get("losses") is not None:
                found[str(facts.get("source"))].append(checked(Losses, facts["losses"], "", DatasetError))
    return {source: Losses.of_all(losses) for source, losses in found.items()}


def draw_actions(episodes: Sequence[Episode]) -> dict[str, UInt8[np.ndarray, "height width 3"]]:
    """The picture of what was done in the episodes, by its file's name: the driven paths, or the actions over time."""
    if episodes[0].motion is not None:
        return {PATHS_NAME: draw_paths([episode.poses for episode in episodes])}
    return {ACTIONS_NAME: draw_curves([Curve.of_episode(episode) for episode in episodes])}


def save_pictures(folder: Path, pictures: Mapping[str, UInt8[np.ndarray, "height width 3"]]) -> None:
    """Write pictures by their files' names. Raises OutputError."""
    make_folder(folder)
    for name, picture in pictures.items():
        with replacing(folder / name) as temporary:
            Image.fromarray(picture).save(temporary, format="PNG")


def _lines(
    facts: Mapping[str, Any], splits: Mapping[str, Split], damaged: list[str], losses: Mapping[str, Losses]
) -> list[str]:
    height, width = facts["image_size"]
    rows = tabulate({name: split_statistics(split.episodes) for name, split in splits.items()})
    table = [f"| | {' | '.join(splits)} |", f"|---|{'---:|' * len(splits)}"]
    table += [f"| {label} | {' | '.join(cells)} |" for label, cells in rows.items()]
    notices = [f"- {source}: {facts['notices'].get(source, 'none was given')}." for source in facts["sources"]]
    space = read_space(facts, "dataset.json", DatasetError)
    views = dataset_views(facts, Path(DATASET_FILE))
    is_driven = isinstance(space, Waypoints)
    content = (
        "with the vehicle's pose for each\nframe and for three seconds more."
        if is_driven
        else f"with the action at each\nframe, which leads to the next: {space.title}."
    )
    turning = ["A frame turns if its heading changes by more than 2 degrees a second.", ""] if is_driven else []
    drawn, caption = (
        (PATHS_NAME, "The paths of some episodes from one start")
        if is_driven
        else (ACTIONS_NAME, "The actions of some episodes over time")
    )
    return [
        f"# {'Driving' if is_driven else 'Video with actions'}: {', '.join(facts['sources'])}",
        "",
        f"Videos of {width} x {height} pixels at {facts['fps']:g} frames a second, {content}",
        "The splits share no drive." if losses else "The splits share no place.",
        *(["", f"Each picture shows several cameras: {views.sizes}."] if views is not None else []),
        "",
        f"![A frame of some episodes]({SHEET_NAME})",
        "",
        *table,
        "",
        *turning,
        "Damaged and left out of these numbers:" if damaged else "Nothing is damaged, as far as facts and poses tell.",
        *(f"- {line}" for line in damaged),
        "",
        f"![{caption}]({drawn})",
        "",
        *(["## What was kept of the recordings", ""] if losses else []),
        *(f"- {source}: {each}." for source, each in losses.items()),
        *([""] if losses else []),
        "## Terms",
        "",
        *notices,
        "",
        "## Use",
        "",
        "`terra.dataset.read_split` reads it; `terra.dataset.format` describes the files. To decode and check all:",
        "`terra inspect data=FOLDER verify=true`.",
    ]
