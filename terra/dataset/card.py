"""A dataset's card: README.md with its numbers, and a contact sheet of its frames."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw

from decoder.video import read_video
from terra.dataset.episode import Episode
from terra.dataset.format import SPLITS, list_shards, read_dataset
from terra.dataset.reading import read_split
from terra.errors import DatasetError, TerraError
from tokenizer.files import replacing

logger = logging.getLogger(__name__)

SHEET_NAME = "contact_sheet.png"
SPEED_EDGES = (0.0, 0.5, 5.0, 10.0, 15.0, 20.0, 30.0, math.inf)  # m/s
_SHEET_COLUMNS, _SHEET_ROWS = 5, 4
_SHEET_FRAME = 20  # frames into an episode: something has begun to happen, and little is decoded
_LABEL_HEIGHT = 14


@dataclass(frozen=True)
class Statistics:
    """What a split holds. `speeds` are frames in each range of `SPEED_EDGES`; the counters are of episodes or events.

    `metres` is the way driven while frames were taken.
    """

    num_shards: int
    num_episodes: int
    num_frames: int
    hours: float
    metres: float
    speeds: tuple[int, ...]
    places: Counter[str]
    weathers: Counter[str]
    events: Counter[str]
    maneuvers: Counter[str]


def split_statistics(episodes: Sequence[Episode]) -> Statistics:
    """Count what is in some episodes, from their facts and poses."""
    speeds = np.zeros(len(SPEED_EDGES) - 1, np.int64)
    metres = 0.0
    for episode in episodes:
        poses, count = episode.poses, episode.num_frames
        speeds += np.histogram(np.abs(poses.speed[:count]), SPEED_EDGES)[0]
        metres += float(np.hypot(np.diff(poses.x[:count]), np.diff(poses.y[:count])).sum())
    return Statistics(
        num_shards=len({episode.video.parent for episode in episodes}),
        num_episodes=len(episodes),
        num_frames=sum(episode.num_frames for episode in episodes),
        hours=sum(episode.seconds for episode in episodes) / 3600,
        metres=metres,
        speeds=tuple(speeds.tolist()),
        places=Counter(source for source, _ in {(episode.source, episode.place) for episode in episodes}),
        weathers=Counter(episode.weather for episode in episodes),
        events=Counter(what for episode in episodes for _, what in episode.events),
        maneuvers=Counter(episode.maneuver for episode in episodes if episode.maneuver is not None),
    )


def write_card(folder: Path) -> None:
    """Write README.md and contact_sheet.png of a dataset.

    Raises:
        DatasetError: no dataset, or nothing of it can be read.
        OutputError: the files can't be written.
    """
    facts = read_dataset(folder)
    splits: dict[str, tuple[Episode, ...]] = {}
    damaged: list[str] = []
    for split in SPLITS:
        if list_shards(folder, split):
            found = read_split(folder, split)
            splits[split] = found.episodes
            damaged += found.damaged
    if not splits:
        raise DatasetError(f"{folder}: expected a dataset with episodes, got none")
    sheet = contact_sheet([episode for episodes in splits.values() for episode in episodes])
    with replacing(folder / SHEET_NAME) as temporary:
        Image.fromarray(sheet).save(temporary, format="PNG")
    height, width = facts["image_size"]
    lines = [
        "# Recorded driving",
        "",
        f"Frames of {width} x {height} pixels at {facts['fps']:g} a second, with the vehicle's pose for each and for",
        f"three seconds more. Sources: {', '.join(facts['sources'])}.",
        "",
        f"![One frame of some episodes]({SHEET_NAME})",
        "",
        *_table({split: split_statistics(episodes) for split, episodes in splits.items()}),
        "",
        "Damaged and left out of these numbers:" if damaged else "Nothing is damaged, as far as facts and poses tell.",
        *(f"- {line}" for line in damaged),
        "",
        "The format is described in `terra.dataset.format`; `terra.dataset.read_split` reads it.",
    ]
    with replacing(folder / "README.md") as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def contact_sheet(episodes: Sequence[Episode]) -> UInt8[np.ndarray, "height width 3"]:
    """One frame each of up to 20 episodes, evenly spread, with their names; what can't be read stays grey."""
    count = min(_SHEET_COLUMNS * _SHEET_ROWS, len(episodes))
    chosen = [episodes[index * len(episodes) // count] for index in range(count)]
    labelled = [(episode.id, _one_frame(episode)) for episode in chosen]
    return tile(labelled, columns=_SHEET_COLUMNS)


def tile(
    labelled: Sequence[tuple[str, UInt8[np.ndarray, "height width 3"] | None]], columns: int
) -> UInt8[np.ndarray, "sheet_height sheet_width 3"]:
    """Pictures of one size in rows, each over its label; a missing one (None) is grey."""
    sizes = [picture.shape[:2] for _, picture in labelled if picture is not None]
    height, width = sizes[0] if sizes else (90, 160)
    rows = math.ceil(len(labelled) / columns)
    sheet = Image.new("RGB", (min(columns, len(labelled)) * width, rows * (height + _LABEL_HEIGHT)), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (label, picture) in enumerate(labelled):
        place = (index % columns * width, index // columns * (height + _LABEL_HEIGHT))
        image = Image.new("RGB", (width, height), "grey") if picture is None else Image.fromarray(picture)
        sheet.paste(image.resize((width, height)), place)
        draw.text((place[0] + 2, place[1] + height + 1), label, fill="black")
    return np.asarray(sheet)


def _one_frame(episode: Episode) -> UInt8[np.ndarray, "height width 3"] | None:
    index = min(_SHEET_FRAME, episode.num_frames - 1)
    try:
        frames = read_video(episode.video, max_frames=index + 1)
    except TerraError as error:
        logger.warning("not on the contact sheet: %s", error)
        return None
    return frames[-1]


def _table(splits: dict[str, Statistics]) -> list[str]:
    """The statistics of all splits as a table in Markdown."""
    rows: dict[str, list[str]] = {
        "shards": [f"{stats.num_shards:,}" for stats in splits.values()],
        "episodes": [f"{stats.num_episodes:,}" for stats in splits.values()],
        "frames": [f"{stats.num_frames:,}" for stats in splits.values()],
        "hours": [f"{stats.hours:.2f}" for stats in splits.values()],
        "kilometres": [f"{stats.metres / 1000:.1f}" for stats in splits.values()],
    }
    for title in ("places", "weathers", "maneuvers", "events"):
        counters = [getattr(stats, title) for stats in splits.values()]
        for word in sorted(set().union(*counters)):
            rows[f"{title.removesuffix('s')}: {word}"] = [f"{counter[word]:,}" for counter in counters]
    for index, (low, high) in enumerate(pairwise(SPEED_EDGES)):
        label = f"speed {low:g} to {high:g} m/s" if math.isfinite(high) else f"speed {low:g} m/s and more"
        shares = [stats.speeds[index] / max(1, stats.num_frames) for stats in splits.values()]
        if any(shares):
            rows[label] = [f"{share:.1%} of frames" for share in shares]
    lines = [f"| | {' | '.join(splits)} |", f"|---|{'---:|' * len(splits)}"]
    return lines + [f"| {label} | {' | '.join(cells)} |" for label, cells in rows.items()]
