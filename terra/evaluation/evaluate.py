"""The run of `terra evaluate`, for a tokenizer and a world model on recordings that neither was trained on:

held-out episodes --choose_clips--> clips --Bench.examine--> generated | re-encoded | persistence | true
               +--find_groups--> counterfactual futures            |
                                                                   v
scores of clips --> measures with intervals --> criteria --> metrics.json, metrics.csv, plots, videos, a table
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from decoder.video import Pixels, to_uint8
from terra.actions import ActionSpace, TableSpace, Waypoints, require_table
from terra.config.spec import PipelineSpec
from terra.dataset.tokens import TokenizedDriving
from terra.device import torch_device, torch_dtype
from terra.errors import CheckpointError, ConfigError
from terra.evaluation.action_estimator import ActionEstimator
from terra.evaluation.bench import Bench, Examined
from terra.evaluation.candidates import BASE, make_plans
from terra.evaluation.clips import Clip
from terra.evaluation.comparison import Evaluated, ModelColumn, make_column
from terra.evaluation.criteria import CodebookUse, Criterion, evaluate_criteria
from terra.evaluation.estimator import MotionEstimator
from terra.evaluation.kept import KeptFiles
from terra.evaluation.listening import measure_listening
from terra.evaluation.measures import (
    Measure,
    confusions,
    fidelity_measures,
    frame_measures,
    frechet_measures,
    order_measures,
    video_measures,
)
from terra.evaluation.motion import CLASSES
from terra.evaluation.other_drives import Reference, measure_other_drives, unpaired_measures
from terra.evaluation.plan import EvaluationPlan
from terra.evaluation.plots import plot_columns, plot_curves, plot_revisits, write_grid
from terra.evaluation.recovered import action_measures, majority, recovered_line
from terra.evaluation.remembering import (
    LOOPS,
    REVISITS,
    RevisitBench,
    examine_revisits,
    loop_measures,
    revisit_measures,
)
from terra.evaluation.report import print_comparison, print_report, write_comparison, write_metrics
from terra.evaluation.rollouts import KeptRollouts
from terra.evaluation.scores import GENERATED, PERSISTENCE, RE_ENCODED, TRUE, ClipScores, Scorer
from terra.evaluation.settings import EvaluationSettings
from terra.locations import DEMO
from terra.metrics.networks import load_feature_network
from terra.metrics.video_networks import load_video_network
from terra.pipeline import Pipeline
from terra.progress import ProgressLine
from terra.training.prediction import evaluate_world_model
from terra.world_model import load_world_model
from tokenizer.checkpoint import checkpoint_sha256
from tokenizer.files import file_sha256
from tokenizer.lineage import tokens_sha256

logger = logging.getLogger(__name__)

_ROLLOUT_BIN_SECONDS, _DRIFT_BIN_SECONDS = 0.5, 2.0


@dataclass
class _Found:
    """Results of one run over clips: scores, the true tokens and actions, and the videos of a few clips."""

    scores: list[ClipScores] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)
    actions: list[torch.Tensor] = field(default_factory=list)
    shown: list[dict[str, Pixels]] = field(default_factory=list)


def run(settings: EvaluationSettings, console: Console | None = None) -> Path:
    """Evaluate and return the folder of results; with `compare`, one model after the other, and one table of all.

    Rollouts and scores are kept as they are made, and metrics.json is written after each part, so that the same command
    goes on after an interruption; what was made with other settings, data or weights is made anew.

    Raises:
        TerraError: anything wrong with the data, the checkpoints or the configuration.
    """
    started, console = time.perf_counter(), console or Console(stderr=True)
    plans = make_plans(settings)
    spec, plan = plans[BASE]
    scorer = _load_scorer(settings, plan)
    spec.announce()
    reference = measure_other_drives(plan.other_drives, scorer, settings.workers)
    if not settings.compare:
        evaluated = _evaluate(spec, plan, scorer, reference, started)
        print_report(console, evaluated.measures, evaluated.criteria)
        for line in evaluated.lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(f"metrics, plots and videos: {settings.output}", highlight=False, soft_wrap=True)
        return settings.output
    models: dict[str, Evaluated] = {}
    columns: list[ModelColumn] = []
    for name, (spec, plan) in plans.items():
        console.print(
            f"{name}: {plan.settings.adapter or spec.world_model}", markup=False, highlight=False, soft_wrap=True
        )
        models[name] = _evaluate(spec, plan, scorer, reference, time.perf_counter())
        columns.append(make_column(name, models[name], models.get(BASE) if name != BASE else None))
        facts = {name: each.facts for name, each in models.items()}
        write_comparison(settings.output, columns, facts, complete=len(models) == len(plans))
    plot_columns(columns, settings.output / "compare.png")
    write_grid(_side_by_side(models), settings.output, "clips", plans[BASE][1].fps)
    print_comparison(console, columns)
    console.print(f"the table, its plot and videos: {settings.output}", highlight=False, soft_wrap=True)
    return settings.output


def _side_by_side(models: Mapping[str, Evaluated]) -> list[dict[str, Pixels]]:
    """The shown clips, each as recorded and as every model generates it."""
    rows = zip(*(each.shown for each in models.values()), strict=True)
    return [
        {"recording": row[0][TRUE]} | {name: each[GENERATED] for name, each in zip(models, row, strict=True)}
        for row in rows
    ]


def _evaluate(
    spec: PipelineSpec, plan: EvaluationPlan, scorer: Scorer, reference: Reference, started: float
) -> Evaluated:
    """Evaluate one model and write its folder. `started` is when, by `time.perf_counter`."""
    settings, network = plan.settings, scorer.network.name
    with Pipeline.from_spec(spec) as pipeline:
        tokenizer, decoder = pipeline.tokenizer, pipeline.decoder
        # Tokenizers that differ in their decoders alone make the same rollouts, so the key is the tokens' hash.
        weights = {**plan.facts["checkpoints"], "tokenizer": tokens_sha256(plan.tokenizer)}
        made_with = {"engine": spec.settings.engine, "overlap": settings.overlap, **weights}
        if spec.memory is not None:
            made_with["memory"] = spec.memory.model_dump()
        rollouts = KeptRollouts(pipeline, settings.sampling, settings.output / "rollouts", made_with)
        measured_with = {**made_with, "sampling": vars(settings.sampling), **_measuring(settings, plan, spec)}
        kept = KeptFiles(settings.output / "scores", measured_with)
        limits = {"at_once": settings.at_once, "workers": settings.workers}
        bench = Bench(tokenizer, decoder, rollouts, kept, scorer, space=plan.model.space, **limits)
        found = _examine(bench, plan.clips, settings.pictures, "rollouts")
        measures = _measure("rollouts", found.scores, network, _ROLLOUT_BIN_SECONDS, plan)
        write_metrics(settings.output, measures, [], plan.facts | {"complete": False})
        drift = _examine(bench, plan.drift, min(settings.pictures, 2), "drift")
        measures += _measure("drift", drift.scores, network, _DRIFT_BIN_SECONDS, plan)
        drift_bin = round(_DRIFT_BIN_SECONDS * plan.fps)
        measures += unpaired_measures("drift", drift.scores, reference, network, drift_bin, plan.bootstrap)
        write_metrics(settings.output, measures, [], plan.facts | {"complete": False})
        revisits = RevisitBench(pipeline, rollouts, kept, scorer, space=plan.model.space, **limits)
        remembered = examine_revisits(revisits, plan.revisits, min(settings.pictures, 2))
        measures += revisit_measures(remembered, plan.bootstrap)
        write_metrics(settings.output, measures, [], plan.facts | {"complete": False})
        loops = examine_revisits(revisits, plan.loops, min(settings.pictures, 2), LOOPS)
        measures += loop_measures(loops, plan.bootstrap)
        write_metrics(settings.output, measures, [], plan.facts | {"complete": False})
        ordered, places, futures = _examine_groups(bench, plan)
        old = bench.encode(plan.old_clips)
    facts = plan.facts | {"complete": True, "rollouts_reused": rollouts.num_reused, "scores_reused": kept.num_reused}
    facts["damaged"] = bench.damaged + revisits.damaged + reference.damaged
    logger.info("predicting the recorded tokens of %d clips", len(found.tokens))
    facts["teacher_forced"] = _teacher_forced(found.tokens, found.actions, plan)
    if plan.old_clips:
        old_tokens, old_actions = [each.tokens for each in old], [each.actions for each in old]
        facts["old_teacher_forced"] = _teacher_forced(old_tokens, old_actions, plan)
    places_of_clips = [each.clip.place for each in found.scores]
    listening = measure_listening(facts["teacher_forced"], places_of_clips, plan.bootstrap)
    facts["listening"] = None if listening is None else asdict(listening)
    codebook = _codebook_use(found.tokens, tokenizer.codebook_size)
    facts["codebook_used"] = codebook.share
    for contrast, by_variant in ordered.items():
        measures += order_measures(contrast, by_variant, places[contrast], plan.bootstrap)
    lines = [] if listening is None else [listening.line]
    if found.scores and found.scores[0].recovered:
        facts["commonest_answer"] = majority([each.clip.instructed_values for each in found.scores], _table(plan))
        rollouts_alone = [each for each in measures if each.run == "rollouts"]
        lines.append(recovered_line(rollouts_alone, facts["commonest_answer"]))
    if isinstance(scorer.estimator, MotionEstimator):
        facts["confusion"] = {"classes": CLASSES, **confusions(found.scores, plan.fps)}
    criteria = evaluate_criteria(measures, network, codebook) if _has_requirements(settings, plan) else []
    facts["seconds"] = time.perf_counter() - started
    logger.info("writing plots and videos")
    shown = {"clips": found.shown, "drift_clips": drift.shown, **futures}
    shown["revisit_clips"] = [each.shown for each in remembered if each.shown]
    shown["loop_clips"] = [each.shown for each in loops if each.shown]
    _write(plan, measures, criteria, facts, shown)
    old_places = [each.clip.place for each in old]
    return Evaluated(plan, measures, facts, found.scores, remembered, old_places, found.shown, criteria, lines)


def _measuring(settings: EvaluationSettings, plan: EvaluationPlan, spec: PipelineSpec) -> dict[str, Any]:
    """What scores depend on besides the rollouts."""
    paths = (settings.network_path, settings.video_network_path)
    return {
        **({} if settings.measured_size is None else {"measured_size": settings.measured_size}),
        "decoder": spec.settings.decoder,
        "tokenizer_with_decoder": plan.facts["checkpoints"]["tokenizer"],
        "estimator": None if plan.estimator is None else checkpoint_sha256(plan.estimator),
        "networks": [settings.network, settings.video_network],
        "networks_sha256": [None if path is None else file_sha256(path, CheckpointError) for path in paths],
    }


def _has_requirements(settings: EvaluationSettings, plan: EvaluationPlan) -> bool:
    """Whether to print the requirements, which say nothing of other models and other driving than the shipped ones."""
    if settings.requirements is not None:
        return settings.requirements
    shipped = {name: checkpoint_sha256(DEMO / name) for name in ("tokenizer", "world_model")}
    return plan.facts["checkpoints"] == shipped and all(clip.episode.source == "town" for clip in plan.clips)


def _load_scorer(settings: EvaluationSettings, plan: EvaluationPlan) -> Scorer:
    device = torch_device(settings.device)
    network = load_feature_network(settings.network_path, settings.network).to(device)
    video_network = None
    if settings.video_network is not None and settings.video_network_path is not None:
        video_network = load_video_network(settings.video_network, settings.video_network_path).to(device)
    if plan.estimator is None:
        if settings.estimator is None:
            logger.info("action fidelity is left out: estimator=null")
        return Scorer(network, None, video_network, settings.measured_size)
    if isinstance(plan.model.space, Waypoints):
        estimator = MotionEstimator.from_pretrained(plan.estimator)
    else:
        estimator = ActionEstimator.from_pretrained(plan.estimator)
        if estimator.space != plan.model.space:
            raise ConfigError(f"estimator: expected one of {plan.model.space.title}, got {estimator.space.title}")
    if estimator.config.fps != plan.fps:
        raise ConfigError(f"estimator: expected one of {plan.fps:g} frames a second, got {estimator.config.fps:g}")
    return Scorer(network, estimator.to(device), video_network, settings.measured_size)


def _examine(bench: Bench, clips: Sequence[Clip], pictures: int, name: str) -> _Found:
    """Run the bench over clips and keep the results, with the videos of `pictures` evenly spread clips."""
    moving = [clip.name for clip in clips if clip.is_moving] or [clip.name for clip in clips]
    shown = {moving[index] for index in np.linspace(0, len(moving) - 1, min(pictures, len(moving))).round().astype(int)}
    results: dict[str, Examined] = {}
    videos: dict[str, dict[str, Pixels]] = {}
    with ProgressLine(f"measuring {name}", len(clips)) as line:
        for index, examined in enumerate(bench.examine(clips, shown), start=1):
            clip = examined.scores.clip.name
            if clip in shown:
                videos[clip] = _show(examined)
            results[clip] = replace(examined, variants={})  # the videos of all clips are too many to hold
            line.show(index, f"{index} of {len(clips)} clips")
    found = _Found()
    for clip in (each.name for each in clips if each.name in results):
        found.scores.append(results[clip].scores)
        found.tokens.append(results[clip].truth_tokens)
        found.actions.append(results[clip].actions)
        if clip in videos:
            found.shown.append(videos[clip])
    return found


def _show(examined: Examined) -> dict[str, Pixels]:
    order = (TRUE, RE_ENCODED, GENERATED, PERSISTENCE)
    return {name: to_uint8(examined.variants[name]) for name in order}


def _examine_groups(
    bench: Bench, plan: EvaluationPlan
) -> tuple[dict[str, dict[str, list[bool]]], dict[str, list[str]], dict[str, list[dict[str, Pixels]]]]:
    """By contrast whether each group has the right order, for each variant; its place; and some groups' videos."""
    ordered: dict[str, dict[str, list[bool]]] = {}
    places: dict[str, list[str]] = {}
    shown: dict[str, list[dict[str, Pixels]]] = {}
    for name, groups in plan.groups.items():
        with ProgressLine(f"measuring {name}", len(groups)) as line:
            for index, each in enumerate(bench.examine_groups(groups, plan.settings.pictures), start=1):
                places.setdefault(name, []).append(each.group.clips[0].place)
                for variant, steps in each.steps.items():
                    ordered.setdefault(name, {}).setdefault(variant, []).append(each.group.is_ordered(steps))
                if index <= plan.settings.pictures and each.generated:
                    maneuvers = [clip.episode.maneuver or "" for clip in each.group.clips]
                    videos = [to_uint8(frames) for frames in each.generated]
                    shown.setdefault(name, []).append(dict(zip(maneuvers, videos, strict=True)))
                line.show(index, f"{index} of {len(groups)} groups")
    return ordered, places, shown


def _teacher_forced(
    tokens: Sequence[torch.Tensor], actions: Sequence[torch.Tensor], plan: EvaluationPlan
) -> dict[str, Any]:
    """Measure how well the world model predicts each true token from the true tokens before it; a clip is a window."""
    if not tokens:
        return {}
    window = min(plan.settings.num_frames, plan.model.layout.max_frames)
    device = torch_device(plan.settings.device)
    dtype = torch_dtype(None, device)
    # An action lies between two frames, so the window's last frame has none; nothing is predicted from it.
    padded = [torch.cat([each[: window - 1], each[window - 2 : window - 1]]) for each in actions]
    driving = TokenizedDriving(
        tokens=torch.cat([each[:window] for each in tokens]),
        actions=torch.cat(padded),
        episode_start=torch.arange(len(tokens) + 1) * window,
        fps=plan.model.fps,
        codebook_size=plan.model.image_vocab_size,
        tokenizer_sha256=plan.facts["checkpoints"]["tokenizer"],
        space=plan.model.space,
    )
    model = load_world_model(plan.world_model, adapter=plan.settings.adapter, dtype=dtype, device=device)
    return evaluate_world_model(model, driving.to(device), window, len(tokens), neutral=_neutral(plan.model.space))


def _neutral(space: ActionSpace) -> torch.Tensor:
    """The row of nothing done: of driving, a path that stays where the car is."""
    if isinstance(space, Waypoints):
        return torch.zeros(space.shape)
    return torch.from_numpy(space.rows(space.neutral[None])[0])


def _table(plan: EvaluationPlan) -> TableSpace:
    return require_table(plan.model.space, "reading actions back")


def _codebook_use(tokens: Sequence[torch.Tensor], codebook_size: int) -> CodebookUse:
    every = torch.cat(list(tokens)) if tokens else torch.empty(0, dtype=torch.long)
    return CodebookUse(every.numel(), len(every.unique()), codebook_size)


def _measure(
    name: str, scores: Sequence[ClipScores], network: str, bin_seconds: float, plan: EvaluationPlan
) -> list[Measure]:
    if not scores:
        return []
    measures = frame_measures(name, scores, plan.bootstrap)
    measures += frechet_measures(name, scores, network, round(bin_seconds * plan.fps), plan.bootstrap)
    if scores[0].video_features:
        measures += video_measures(name, scores, plan.settings.video_network or "", plan.bootstrap)
    if scores[0].steps:
        measures += fidelity_measures(name, scores, plan.fps, plan.bootstrap)
    if scores[0].recovered:
        measures += action_measures(name, scores, _table(plan), plan.bootstrap)
    return measures


def _write(
    plan: EvaluationPlan,
    measures: Sequence[Measure],
    criteria: Sequence[Criterion],
    facts: dict[str, Any],
    videos: dict[str, list[dict[str, Pixels]]],
) -> None:
    output = plan.settings.output
    write_metrics(output, measures, criteria, facts)
    for name in dict.fromkeys(measure.run for measure in measures if measure.first_frame is not None):
        plot_curves(measures, name, plan.fps, output / f"{name}.png")
    if plan.revisits:
        plot_revisits(measures, output / f"{REVISITS}.png")
    for name, rows in videos.items():
        write_grid(rows, output, name, plan.fps)
