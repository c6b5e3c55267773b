"""What `terra record` does: check the settings, then record what `kind` names."""

import importlib
import logging
from typing import Any, Literal, Self

from pydantic import model_validator

from decoder.camera import Camera
from terra.dataset.checks import ImageSize, Names, Seconds, Workers
from terra.dataset.format import FramesASecond
from terra.recording.record import Recording, RecordSettings, parse_maneuvers, record, seeded_places
from terra.recording.weather import WeatherName
from tokenizer.settings import Count, FilePath, Natural, Settings, Share, Text

logger = logging.getLogger(__name__)

_PLACES = 8  # shards, where nothing else is said
# The settings that only one source has; null stands for what is not given.
_ONLY = {
    "town": ("towns", "weather", "revisit", "traffic"),
    "gym": ("seeds", "env", "env_options", "policy", "action_names", "action_space", "fps"),
}


class RecordCommand(Settings):
    """The whole of conf/record.yaml; see `RecordSettings` and `GymSettings` for what is not said here.

    Attributes:
        source: the procedural town, or a Gymnasium environment.
        kind: plain drives, or counterfactuals (several futures of each start), which only the town has.
        seed: number of the first town or seed, counted from the split's first.
        towns: how many towns, each a shard; None: 8.
        weather: the weather of all drives; None draws one for each drive.
        revisit, traffic: see `RecordSettings`; None: no revisits, and traffic.
        seeds: how many seeds of an environment, each a shard; None: 8.
        env, env_options, action_names, action_space: see `terra.recording.gym_world.GymWorld`.
        policy: see `terra.recording.gym_world.load_policy`; None: random.
        fps: frames a second of an environment; None: its own.
        workers: processes; 0 records in this one.
        max_seconds: no place is begun after so long; None for no limit.
    """

    output: FilePath
    kind: Literal["drives", "counterfactuals"]
    split: Literal["train", "held_out"]
    source: Literal["town", "gym"]
    seed: Natural
    towns: Count | None
    weather: WeatherName | None
    revisit: Share | None
    traffic: bool | None
    seeds: Count | None
    env: Text | None
    env_options: dict[str, Any] | None
    policy: Text | None
    action_names: Names | None
    action_space: dict[str, Any] | None
    fps: FramesASecond | None
    episodes_per_place: Count
    frames_per_episode: Count
    image_size: ImageSize
    camera: Camera
    num_context: Count
    maneuvers: Names
    workers: Workers
    max_seconds: Seconds | None

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for source, names in _ONLY.items():
            for name in names:
                if source != self.source and getattr(self, name) is not None:
                    raise ValueError(f"{name}: expected none with source={self.source}, got {getattr(self, name)}")
        if self.source == "gym" and self.env is None:
            raise ValueError("env: expected the id of a Gymnasium environment, such as CartPole-v1, got null")
        if self.source == "gym" and self.kind != "drives":
            raise ValueError(f"kind: expected drives with source=gym, got {self.kind}")
        return self


def run(settings: RecordCommand) -> int:
    """Record as conf/record.yaml says; the same command goes on with an interrupted recording.

    Returns:
        The exit code: 0 all that there was time for is recorded, 2 a place failed, 130 interrupted.

    Raises:
        ConfigError: also where moderngl or Gymnasium is not installed.
        DatasetError, OutputError: see `terra.recording.record`.
    """
    recording = _town(settings) if settings.source == "town" else _gym(settings)
    try:
        outcome = record(recording, workers=settings.workers, max_seconds=settings.max_seconds)
    except KeyboardInterrupt:
        logger.warning("interrupted: what is complete is kept; the same command goes on")
        return 130
    return 2 if outcome.failed else 0


def _town(settings: RecordCommand) -> Recording:
    maneuvers, num_context = parse_maneuvers(settings.kind, settings.maneuvers, settings.num_context)
    recording = RecordSettings(
        output=settings.output,
        split=settings.split,
        source="town",
        places=seeded_places(settings.split, settings.seed, settings.towns or _PLACES),
        episodes_per_place=settings.episodes_per_place,
        frames_per_episode=settings.frames_per_episode,
        image_size=settings.image_size,
        camera=settings.camera,
        maneuvers=maneuvers,
        num_context=num_context,
        weather=settings.weather,
        revisit=settings.revisit or 0.0,
        traffic=settings.traffic is not False,
    )
    importlib.import_module("terra.recording.canvas")  # a missing moderngl is said now, not by every worker
    return recording


def _gym(settings: RecordCommand) -> Recording:
    # The import is here, because the town must be recordable without Gymnasium.
    from terra.recording.gym_record import GymSettings

    return GymSettings.of_world(
        output=settings.output,
        split=settings.split,
        places=seeded_places(settings.split, settings.seed, settings.seeds or _PLACES, "seeds"),
        episodes_per_place=settings.episodes_per_place,
        frames_per_episode=settings.frames_per_episode,
        image_size=settings.image_size,
        env=settings.env,
        env_options=settings.env_options or {},
        policy=settings.policy or "random",
        action_names=settings.action_names,
        action_space=settings.action_space,
        fps=settings.fps,
    )
