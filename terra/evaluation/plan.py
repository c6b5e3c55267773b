"""The plan of an evaluation: clips and groups are chosen, and everything is checked, before any weight is loaded."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from terra.actions import ActionSpace, Waypoints
from terra.dataset import Episode, read_split
from terra.engine.base import EngineSpec
from terra.errors import ConfigError, DatasetError
from terra.evaluation.clips import Clip, choose_clips
from terra.evaluation.contrasts import CONTRASTS, CounterfactualGroup, find_groups
from terra.evaluation.measures import Bootstrap
from terra.evaluation.other_drives import OtherDrive, choose_other_drives
from terra.evaluation.revisits import Revisit, choose_drives, loop_of, returns_of
from terra.evaluation.settings import EvaluationSettings
from terra.locations import DEMO
from terra.memory import memory_frames, memory_in_use
from terra.metrics.bootstrap import LEVEL
from terra.pairing import check_pairing
from terra.views import Views, title_of
from terra.window_plan import plan_windows
from terra.world_model import LlamaActionConfig, load_adapter, load_config
from terra.world_model.adapter import adapter_sha256
from tokenizer import LFQTokenizerConfig
from tokenizer.checkpoint import checkpoint_sha256

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationPlan:
    """Clips and counterfactual groups to generate, the checkpoints' folders, and what to report of the choice.

    Attributes:
        estimator: folder of the estimator of motion or, for any other world, of actions; None: there is none.
        other_drives: the reference of the long rollouts' unpaired distances.
        revisits, loops: returns to what was seen, and whole drives that come back.
        old_clips: clips of `old_data`, which are predicted but not generated.
        groups: counterfactual groups by the contrast's name.
        facts: numbers of clips and groups, and what was left out and why, for metrics.json.
    """

    settings: EvaluationSettings
    tokenizer: Path
    world_model: Path
    estimator: Path | None
    model: LlamaActionConfig
    clips: list[Clip]
    drift: list[Clip]
    other_drives: list[OtherDrive]
    revisits: list[Revisit]
    loops: list[Revisit]
    old_clips: list[Clip]
    groups: dict[str, list[CounterfactualGroup]]
    facts: dict[str, Any]

    @property
    def fps(self) -> float:
        """Frames per second of the world model and of all recordings."""
        return self.model.fps

    @property
    def views(self) -> Views | None:
        """The cameras that share a picture of the recordings; None for one."""
        return next((clip.episode.views for clip in self.clips), None)

    @property
    def bootstrap(self) -> Bootstrap:
        """Settings of the intervals."""
        settings = self.settings
        return Bootstrap(settings.resamples, settings.frechet_resamples, settings.seed)

    def of_model(self, settings: EvaluationSettings, world_model: Path, adapter: Path | None) -> Self:
        """The plan of another model for the same clips and groups.

        Args:
            settings: of the other model's own evaluation.
            world_model, adapter: the other model's folders.

        Raises:
            CheckpointError: an adapter that does not fit its base model.
            ConfigError: a model of other actions or views, another rate or too short a context.
        """
        model = _load_config(world_model, adapter)
        if model.camera_views not in (None, self.views):
            expected, got = title_of(self.views), title_of(model.camera_views)
            raise ConfigError(f"expected views of {expected}, as the recordings, got those of {got}")
        if model.space != self.model.space:
            raise ConfigError(
                f"expected actions of {self.model.space.title}, as the base takes them, got those of "
                f"{model.space.title}"
            )
        if model.fps != self.model.fps:
            raise ConfigError(f"expected {self.model.fps:g} frames a second, as the base, got {model.fps:g}")
        ours, theirs = (min(settings.num_frames, each.layout.max_frames) for each in (model, self.model))
        if ours != theirs:
            raise ConfigError(f"expected a context of {theirs} frames of num_frames={settings.num_frames}, got {ours}")
        _check_windows(settings, model)
        facts = self.facts | _model_facts(settings, self.tokenizer, world_model, adapter)
        return replace(self, settings=settings, world_model=world_model, model=model, facts=facts)


def make_plan(settings: EvaluationSettings, tokenizer: Path, world_model: Path, adapter: Path | None) -> EvaluationPlan:
    """Read and check the data and the checkpoints' configurations, and choose what to generate.

    Raises:
        CheckpointError: checkpoints that don't fit each other.
        DatasetError: no data, or no episode that is long enough.
        ConfigError: lengths that no window fits, recordings of another rate, size or action space than the models
            take, or counterfactual sets without an estimator.
    """
    model = _load_config(world_model, adapter)
    estimator = _choose_estimator(settings, model.space)
    check_pairing(tokenizer, EngineSpec.of(model))
    _check_windows(settings, model)
    split = read_split(settings.data, settings.split)
    for reason in split.damaged:
        logger.warning("left out: %s", reason)
    image_size = LFQTokenizerConfig.load(tokenizer / "config.json").image_size
    _check_kind(split.episodes, model, image_size)
    chosen = {"num_context": settings.num_context, "seed": settings.seed}
    clips = choose_clips(split.episodes, settings.num_clips, num_frames=settings.num_frames, **chosen)
    drift = choose_clips(split.episodes, settings.drift_clips, num_frames=settings.drift_frames, **chosen)
    others = choose_other_drives(split.episodes, drift, settings.drift_reference_frames)
    limits = {"num_frames": settings.group_frames, "agree_within": settings.agree_within, **chosen}
    contrasts = CONTRASTS if isinstance(model.space, Waypoints) else ()
    found = {
        each.name: find_groups(split.episodes, each, max_groups=settings.max_groups, **limits) for each in contrasts
    }
    revisits, loops = _choose_revisits(settings, model, image_size)
    facts = {
        **_model_facts(settings, tokenizer, world_model, adapter),
        "clips": len(clips),
        "moving_clips": sum(clip.is_moving for clip in clips),
        "drift_clips": len(drift),
        "drift_reference": {"drives": len(others), "frames": sum(len(each.frames) for each in others)},
        "revisits": _counts(revisits),
        "loops": _counts(loops),
        "counterfactual_groups": {
            name: {"evaluated": len(groups), "left_out": left_out} for name, (groups, left_out) in found.items()
        },
        "intervals": {"level": LEVEL, "resampled_by": "place"},
        "damaged_episodes": split.damaged,
    }
    groups = {name: groups for name, (groups, _) in found.items()}
    old_clips = _choose_old_clips(settings, model, image_size)
    found_there = (clips, drift, others, revisits, loops, old_clips, groups)
    return EvaluationPlan(settings, tokenizer, world_model, estimator, model, *found_there, facts)


def _load_config(world_model: Path, adapter: Path | None) -> LlamaActionConfig:
    return load_config(world_model) if adapter is None else load_adapter(adapter, world_model).config


def _check_windows(settings: EvaluationSettings, model: LlamaActionConfig) -> None:
    memory = memory_frames(memory_in_use(model.memory_rule, settings.memory))
    for length in (settings.num_frames, settings.drift_frames, settings.group_frames, settings.revisit_frames):
        list(plan_windows(length, settings.num_context, model.layout.max_frames, settings.overlap, memory))


def _model_facts(
    settings: EvaluationSettings, tokenizer: Path, world_model: Path, adapter: Path | None
) -> dict[str, Any]:
    # A model's own evaluation is the same with and without others beside it.
    beside = {"compare"} if settings.old_data is not None else {"compare", "old_data"}
    return {
        "format": "terra-evaluation",
        "tokenizer": str(tokenizer),
        "world_model": str(world_model),
        "settings": settings.model_dump(mode="json", exclude=beside),
        "checkpoints": {
            "tokenizer": checkpoint_sha256(tokenizer),
            "world_model": checkpoint_sha256(world_model),
            **({} if adapter is None else {"adapter": adapter_sha256(adapter)}),
        },
    }


def _choose_old_clips(
    settings: EvaluationSettings, model: LlamaActionConfig, image_size: tuple[int, int]
) -> list[Clip]:
    if settings.old_data is None:
        return []
    split = read_split(settings.old_data, settings.split)
    for reason in split.damaged:
        logger.warning("left out: %s", reason)
    _check_kind(split.episodes, model, image_size)
    lengths = {"num_frames": settings.num_frames, "num_context": settings.num_context}
    try:
        return choose_clips(split.episodes, settings.num_clips, **lengths, seed=settings.seed)
    except DatasetError as error:
        raise DatasetError(f"old_data: {error}") from None


def _choose_revisits(
    settings: EvaluationSettings, model: LlamaActionConfig, image_size: tuple[int, int]
) -> tuple[list[Revisit], list[Revisit]]:
    if not settings.revisit_clips:
        return [], []
    if not isinstance(model.space, Waypoints):
        raise ConfigError(f"revisit_clips: expected 0 for actions of {model.space.title}, which have no poses")
    split = read_split(settings.revisit_data or settings.data, settings.split)
    for reason in split.damaged:
        logger.warning("left out: %s", reason)
    _check_kind(split.episodes, model, image_size)
    drives = choose_drives(split.episodes, settings.revisit_clips)
    options = {"num_context": settings.num_context, "seed": settings.seed}
    returns = [each for drive in drives for each in returns_of(drive, num_frames=settings.revisit_frames, **options)]
    if not returns:
        expected = f"drives of more than revisit_frames={settings.revisit_frames} frames that come back"
        raise DatasetError(f"revisit_clips: expected {expected}, got none")
    count = min(settings.revisit_loops, len(drives))
    loops = [loop_of(drives[index * len(drives) // count], **options) for index in range(count)]
    return returns, [each for each in loops if len(each.frames)]


def _counts(revisits: Sequence[Revisit]) -> dict[str, int]:
    return {"clips": len(revisits), "frames": sum(len(each.frames) for each in revisits)}


def _choose_estimator(settings: EvaluationSettings, space: ActionSpace) -> Path | None:
    """The estimator's folder; the shipped one, which is the default, knows driving alone. Raises ConfigError."""
    if isinstance(space, Waypoints):
        if settings.max_groups and settings.estimator is None:
            raise ConfigError("max_groups: expected 0 without an estimator, which counterfactual sets need")
        return settings.estimator
    if settings.estimator == DEMO / "estimator":
        logger.info("no actions are read back: train an estimator of them (terra train-estimator), give estimator=")
        return None
    return settings.estimator


def _check_kind(episodes: Sequence[Episode], model: LlamaActionConfig, image_size: tuple[int, int]) -> None:
    for episode in episodes:
        if model.camera_views not in (None, episode.views):
            expected, got = title_of(model.camera_views), title_of(episode.views)
            raise ConfigError(f"{episode.video}: expected pictures of {expected}, the world model's views, got {got}")
        if (episode.fps, episode.image_size) != (model.fps, tuple(image_size)):
            raise ConfigError(
                f"{episode.video}: expected {model.fps:g} frames a second of {tuple(image_size)} pixels as the models "
                f"take them, got {episode.fps:g} of {episode.image_size}"
            )
        driven = isinstance(model.space, Waypoints) and isinstance(episode.space, Waypoints)
        if not driven and episode.space != model.space:
            raise ConfigError(
                f"{episode.video}: expected actions of {model.space.title}, as the world model takes them, got those "
                f"of {episode.space.title}"
            )
