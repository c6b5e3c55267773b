"""Records drives to disk: each place becomes a shard; places run in parallel processes, complete shards are skipped."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from decoder.camera import Camera
from terra.dataset.card import write_card
from terra.dataset.checks import ImageSize, check_workload
from terra.dataset.workers import Outcome, run_jobs
from terra.dataset.writing import ShardWriter, create_dataset
from terra.errors import ConfigError
from terra.progress import frames_shown
from terra.recording.devices import egl_devices
from terra.recording.drives import COUNTERFACTUAL_MANEUVERS, FPS
from terra.recording.source import SceneSource
from terra.recording.weather import WeatherName
from tokenizer.settings import FilePath, Settings, Share, checked, expecting

logger = logging.getLogger(__name__)

# License terms of each source's frames, for the dataset's card.
NOTICES = {
    "town": "drawn by this project's own code; nobody else's pictures or models are in the frames",
}
# The first place's seed of each split.
SPLIT_SEEDS = {"train": 0, "held_out": 900_000}
MAX_EPISODES = 100  # of a place
MAX_NUM_CONTEXT = 25  # frames; the run-up to the junction must fit into the shortest approach


class Recording(Settings):
    """Base of the settings of a recording, which know how to record one of its places.

    Attributes:
        output: folder of the dataset; complete shards in it are kept.
        split: "train" or "held_out".
        places: seeds, see `seeded_places`; each becomes a shard.
        episodes_per_place: number of episodes, or of starts with one episode for each maneuver.
        frames_per_episode: number of frames; an episode that ends by itself has fewer.
        image_size: (height, width), both even.

    Raises:
        ConfigError: a value out of range or unknown.
    """

    output: FilePath
    split: Literal["train", "held_out"]
    places: Annotated[tuple[str, ...], expecting("one or more, each once")]
    episodes_per_place: Annotated[int, Field(ge=1, le=MAX_EPISODES)]
    frames_per_episode: Annotated[int, Field(ge=1, le=100_000)]
    image_size: ImageSize

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if not self.places or len(set(self.places)) != len(self.places):
            raise ValueError(f"places: expected one or more, each once, got {list(self.places)}")
        return self

    @property
    def frames_per_shard(self) -> int:
        """Number of frames of one place, at most."""
        return self.episodes_per_place * self.frames_per_episode

    def create(self) -> None:
        """Write dataset.json, or compare with the one that is there. Raises DatasetError, OutputError."""
        raise NotImplementedError

    def writer(self, place: str) -> ShardWriter:
        """The writer of a place's shard."""
        raise NotImplementedError

    def record_place(self, place: str, worker: int, advance: Callable[[int], None]) -> None:
        """Record one place in worker number `worker`; call `advance` with the number of frames of each episode."""
        raise NotImplementedError


class RecordSettings(Recording):
    """Settings of a recording of towns, at 10 frames per second.

    Attributes:
        source: "town".
        camera: the camera that takes the frames.
        maneuvers: the futures of each start; () records plain drives.
        num_context: frames that the futures of a start share; 0 for plain drives.
        weather: the weather of all drives; None draws one for each drive.
        revisit: share of the drives that come back to what they have seen (`terra.recording.revisits`).
        traffic: whether there are other cars and pedestrians.

    Raises:
        ConfigError: a value out of range or unknown.
    """

    source: Literal["town"]
    camera: Camera
    maneuvers: tuple[str, ...] = ()
    num_context: int = 0
    weather: WeatherName | None = None
    revisit: Share = 0.0
    traffic: bool = True

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        most = min(MAX_NUM_CONTEXT, self.frames_per_episode - 1)
        if self.maneuvers and not 1 <= self.num_context <= most:
            raise ValueError(f"num_context: expected a whole number from 1 to {most}, got {self.num_context!r}")
        unknown = [maneuver for maneuver in self.maneuvers if maneuver not in COUNTERFACTUAL_MANEUVERS]
        if unknown:
            known = ", ".join(COUNTERFACTUAL_MANEUVERS)
            raise ValueError(f"maneuvers: expected some of {known}, got {', '.join(self.maneuvers)}")
        if self.maneuvers and (self.revisit or not self.traffic):
            raise ValueError("kind: expected drives with revisit or traffic=false, got counterfactuals")
        return self

    @property
    def frames_per_shard(self) -> int:
        """Number of frames of one place."""
        return super().frames_per_shard * max(1, len(self.maneuvers))

    def create(self) -> None:
        """Write dataset.json, or compare with the one that is there. Raises DatasetError, OutputError."""
        create_dataset(self.output, FPS, self.image_size, self.source, NOTICES[self.source])

    def writer(self, place: str) -> ShardWriter:
        """The writer of a town's shard."""
        return ShardWriter(
            self.output,
            split=self.split,
            source=self.source,
            place=place,
            fps=FPS,
            image_size=self.image_size,
            camera=self.camera,
            futures=bool(self.maneuvers),
            recipe={
                "episodes": self.episodes_per_place,
                "frames_per_episode": self.frames_per_episode,
                "num_context": self.num_context,
                "maneuvers": list(self.maneuvers),
                "camera": self.camera.to_dict(),
                **({} if self.weather is None else {"weather": self.weather}),
                **({"revisit": self.revisit} if self.revisit else {}),
                **({} if self.traffic else {"traffic": False}),
            },
        )

    def record_place(self, place: str, worker: int, advance: Callable[[int], None]) -> None:
        """Record one town in worker number `worker`; call `advance` with the number of frames of each episode."""
        source = _open_source(self, place, worker)
        with self.writer(place) as writer:
            unknown = set(self.maneuvers) - set(source.maneuvers)
            if unknown:
                where = writer.folder.name
                raise ConfigError(f"{where}: expected maneuvers of {source.maneuvers}, got {self.maneuvers}")
            for number in range(self.episodes_per_place):
                name, weather = f"{writer.name_prefix}_{number:02d}", source.weather(number)
                if not self.maneuvers:
                    drive = source.simulate(number, self.frames_per_episode)
                    frames = source.render(drive, weather)
                    advance(writer.add(name, frames, drive.poses, events=drive.events, weather=weather))
                for maneuver in self.maneuvers:
                    drive = source.simulate_counterfactual(number, maneuver, self.frames_per_episode, self.num_context)
                    num_frames = writer.add(
                        f"{name}_{maneuver}",
                        source.render(drive, weather),
                        drive.poses,
                        events=drive.events,
                        weather=weather,
                        group=name,
                        maneuver=maneuver,
                        num_context=self.num_context,
                    )
                    advance(num_frames)


def seeded_places(split: str, seed: int, count: int, name: str = "towns") -> tuple[str, ...]:
    """Names of `count` places of a split, beginning with the split's number `seed`; `name` is the setting of `count`.

    Raises:
        ConfigError: an unknown split, or numbers out of range.
    """
    if split not in SPLIT_SEEDS:
        raise ConfigError(f"split: expected one of {', '.join(SPLIT_SEEDS)}, got {split!r}")
    checked(Annotated[int, Field(ge=1, le=100_000)], count, name)
    checked(Annotated[int, Field(ge=0, lt=SPLIT_SEEDS["held_out"] // 2)], seed, "seed")
    first = SPLIT_SEEDS[split] + seed
    return tuple(f"{number:06d}" for number in range(first, first + count))


def record(settings: Recording, *, workers: int, max_seconds: float | None = None) -> Outcome:
    """Record what is missing, then describe the dataset (README.md and its pictures).

    Args:
        settings: what to record, and where.
        workers: number of worker processes; 0 records in this process. The files don't depend on the number.
        max_seconds: seconds after which no further place is begun; None for no limit.

    Raises:
        ConfigError: `workers` or `max_seconds` out of range, or maneuvers that the source does not have.
        DatasetError: the output has frames of another rate or size, or a shard made by other settings.
        OutputError: the output can't be written.
    """
    check_workload(workers, max_seconds)
    settings.create()
    jobs = [_Shard(settings, place) for place in settings.places if not settings.writer(place).is_complete()]
    kept = len(settings.places) - len(jobs)
    logger.info("%s: %d places to record, %d complete already", settings.output, len(jobs), kept)
    with frames_shown("recording", len(jobs) * settings.frames_per_shard) as show:
        outcome = run_jobs(
            jobs,
            record_shard,
            workers=workers,
            max_seconds=max_seconds,
            show=lambda frames, done: show(frames),
            describe=_describe,
        )
    if outcome.num_done:
        write_card(settings.output)
    logger.info(
        "%s: %d places recorded, %d failed, %d left for another time",
        *(settings.output, outcome.num_done, len(outcome.failed), outcome.num_left),
    )
    return outcome


@dataclass(frozen=True)
class _Shard:
    """One place to record."""

    settings: Recording
    place: str


def _describe(shard: _Shard) -> str:
    return shard.settings.writer(shard.place).folder.name


def record_shard(shard: _Shard, worker: int, advance: Callable[[int], None]) -> None:
    """Record one place in worker number `worker`; call `advance` with the number of frames of each episode."""
    shard.settings.record_place(shard.place, worker, advance)


def _open_source(settings: RecordSettings, place: str, worker: int) -> SceneSource:
    """Open a place on the EGL device of the worker (round robin), or on the first device if that one can't be used."""
    devices = egl_devices()
    device = devices[worker % len(devices)]
    try:
        return _open_on(settings, place, device)
    except ConfigError as error:
        if device == devices[0]:
            raise
        logger.warning("EGL device %d can't be used, taking %d: %s", device, devices[0], error)
        return _open_on(settings, place, devices[0])


def _open_on(settings: RecordSettings, place: str, device: int) -> SceneSource:
    # The import is here, because settings must be checkable without moderngl.
    from terra.recording.town_source import town_source

    return town_source(
        int(place),
        settings.image_size,
        settings.camera,
        device,
        settings.weather,
        revisit=settings.revisit,
        traffic=settings.traffic,
    )


def parse_maneuvers(
    kind: Literal["drives", "counterfactuals"], maneuvers: tuple[str, ...], num_context: int
) -> tuple[tuple[str, ...], int]:
    """`maneuvers` and `num_context` of the settings for `kind`: drives or counterfactuals. Raises ConfigError."""
    if kind == "drives":
        return (), 0
    if not maneuvers:
        raise ConfigError(f"maneuvers: expected some of {', '.join(COUNTERFACTUAL_MANEUVERS)}, got none")
    return maneuvers, num_context
