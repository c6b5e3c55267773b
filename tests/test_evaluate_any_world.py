"""`terra train-estimator` and `terra evaluate` for worlds that are not driven: a view that moves as the actions say."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from entry import read_settings
from rich.console import Console
from tiny_training import world_model_objective
from tiny_worlds import CHOICE, EVALUATION, FPS, KEYS, SIZE, SPACES, VECTOR, make_dataset, make_models, some_values

from terra.actions import TableSpace
from terra.config.files import register_resolvers
from terra.dataset import read_split
from terra.dataset.tokens import TokenizedDriving
from terra.errors import CheckpointError, ConfigError
from terra.evaluation.action_estimator import ActionEstimator, ActionEstimatorConfig
from terra.evaluation.clips import Clip
from terra.evaluation.estimator import MotionEstimator
from terra.evaluation.estimator_training import run as train_estimator
from terra.evaluation.evaluate import DEMO, run as evaluate
from terra.evaluation.listening import Listening, measure_listening
from terra.evaluation.measures import Bootstrap
from terra.evaluation.recovered import compare, majority
from terra.training.loop import train
from terra.training.prediction import evaluate_world_model
from terra.training.processes import start_processes
from terra.training.settings import LoopConfig
from terra.world_model import LlamaActionV2ForCausalLM

BOOTSTRAP = Bootstrap(200, 5, 0)

ESTIMATOR = [
    *("estimator.image_size=[32,48]", "estimator.width=16", "estimator.features=64", "window=6", "batch_size=8"),
    *("schedule=steps", "max_seconds=null", "max_steps=100", "warmup_steps=10", "learning_rate=3e-3", "ema_decay=0.9"),
    *("workers=0", "device=cpu", "evaluation_windows=24"),
]


def evaluated(data: Path, output: Path, models: list[str], *more: str) -> tuple[dict, str]:
    said = io.StringIO()
    evaluate(
        read_settings("evaluate", [*models, *EVALUATION, f"data={data}", f"output={output}", *more]),
        Console(file=said, width=200),
    )
    return json.loads((output / "metrics.json").read_text()), said.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", SPACES)
def test_actions_are_read_back_from_video(tmp_path: Path, name: str):
    register_resolvers()
    space = SPACES[name]
    data, models = make_dataset(tmp_path / "data", space), make_models(tmp_path / "models", space)
    train_estimator(read_settings("train_estimator", [*ESTIMATOR, f"data={data}", f"output={tmp_path}/trained"]))
    first, bar = {"keys": ("exact-keys", 0.9), "choice": ("choice-accuracy", 0.9), "vector": ("R2-dx", 0.9)}[name]
    own = json.loads((tmp_path / "trained" / "metrics.json").read_text())
    assert own["recorded"][first] > bar
    assert own["commonest"].get(first, 0.0) < 0.6

    estimator = f"estimator={tmp_path}/trained/estimator"
    metrics, said = evaluated(data, tmp_path / "out", models, estimator)
    measures = metrics["measures"]["rollouts"]
    assert measures[first]["true"]["value"] > bar
    assert measures[first]["persistence"]["value"] < 0.7  # a picture that stands still shows no action
    assert measures[first]["generated"]["value"] == pytest.approx(measures[first]["persistence"]["value"], abs=1e-6)
    assert measures["psnr"]["generated"]["units"] == 3
    assert "ADE" not in measures
    assert metrics["counterfactual_groups"] == {}
    assert metrics["criteria"] == []
    assert "actions read back, " in said
    assert "actions: cross-entropy " in said
    again, _ = evaluated(data, tmp_path / "out", models, estimator, "pictures=0")
    assert again["scores_reused"] > 0
    assert again["measures"] == metrics["measures"]
    if space is KEYS:  # once is enough: the shipped estimator is of driving, whatever else the world is
        without, _ = evaluated(data, tmp_path / "without", models)
        assert first not in without["measures"]["rollouts"]
        assert without["measures"]["rollouts"]["psnr"] == metrics["measures"]["rollouts"]["psnr"]


def test_what_does_not_fit_is_one_line(tmp_path: Path):
    register_resolvers()
    data, models = make_dataset(tmp_path / "data", KEYS), make_models(tmp_path / "models", KEYS)
    size = {"fps": FPS, "image_size": SIZE, "width": 8, "reach": 1, "features": 8}
    for name, space, fps in (("other", CHOICE, FPS), ("slow", KEYS, 5.0)):
        config = ActionEstimatorConfig(**size | {"fps": fps}, action_space=space.model_dump(mode="json"))
        ActionEstimator(config).save_pretrained(tmp_path / name)
    for estimator, message in (
        (tmp_path / "other", r"estimator: expected one of keys of right, down, got choice of stay, left, right"),
        (tmp_path / "slow", r"estimator: expected one of 10 frames a second, got 5"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluated(data, tmp_path / "out", models, f"estimator={estimator}")
    with pytest.raises(CheckpointError, match="expected the configuration of a terra_motion_estimator, got another"):
        MotionEstimator.from_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="expected the configuration of a terra_action_estimator, got another"):
        ActionEstimator.from_pretrained(DEMO / "estimator")
    other = make_dataset(tmp_path / "choice", CHOICE)
    with pytest.raises(ConfigError, match=r"expected actions of keys of right, down, as the world model takes"):
        evaluated(other, tmp_path / "out", models)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SPACES)
def test_a_clip_moves_where_half_its_frames_have_an_action(tmp_path: Path, name: str):
    space = SPACES[name]
    (episode, *_) = read_split(make_dataset(tmp_path, space), "held_out").episodes
    other = next(row for row in some_values(space, np.random.default_rng(0), 100) if (row != space.neutral).any())
    for count, moves in ((4, False), (5, True), (10, True)):
        actions = np.tile(space.neutral, (20, 1))
        actions[2 : 2 + count] = other  # between the frames 2 and 12, of which the first is given
        clip = Clip("clip", replace(episode, actions=actions, num_frames=20), 0, 13, 3, 0)
        assert len(clip.instructed_values) == 10
        assert clip.is_moving == moves


def obeying(space: TableSpace, seed: int) -> TokenizedDriving:
    """Tokens that are the action before them, everywhere in the frame."""
    random = np.random.default_rng(seed)
    values = some_values(space, random, 64)
    tokens = np.concatenate([[0], values[:-1, 0]]).astype(np.uint8)
    grid = torch.from_numpy(np.broadcast_to(tokens[:, None, None], (64, 2, 4)).copy())
    bounds = torch.arange(0, 65, 4)
    return TokenizedDriving(grid, torch.from_numpy(space.rows(values)), bounds, FPS, 16, "f" * 64, space)


def listening(model: LlamaActionV2ForCausalLM, held_out: TokenizedDriving) -> Listening:
    neutral = torch.from_numpy(CHOICE.rows(CHOICE.neutral[None])[0])
    metrics = evaluate_world_model(model, held_out, 4, 16, neutral=neutral)
    assert np.mean(metrics["cross_entropy_by_window"]) == pytest.approx(metrics["cross_entropy"])
    found = measure_listening(metrics, [f"place {index // 2}" for index in range(16)], BOOTSTRAP)
    assert found is not None
    return found


@pytest.fixture
def accelerator() -> Accelerator:
    return start_processes("cpu")


def test_a_model_that_listens_and_one_that_does_not(tmp_path: Path, accelerator: Accelerator):
    objective = world_model_objective(obeying(CHOICE, 0), max_corruption=0.0)
    model = objective.model
    assert isinstance(model, LlamaActionV2ForCausalLM)
    run = LoopConfig(output=tmp_path, batch_size=8, max_steps=150, learning_rate=5e-3, warmup_steps=10, ema_decay=0.5)
    train(objective, run, accelerator)
    model.eval()
    held_out = obeying(CHOICE, 1)
    heard = listening(model, held_out)
    assert heard.listens
    assert heard.right < 0.1
    assert heard.cost.low > 0.5
    assert heard.none > heard.right + 0.5
    assert "the model listens to its actions" in heard.line
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("action_projection"):
                parameter.zero_()
    deaf = listening(model, held_out)
    assert not deaf.listens
    assert deaf.right == pytest.approx(deaf.other) == pytest.approx(deaf.none)
    assert "no sign that the model uses its actions" in deaf.line
    one_place = replace(heard, cost=replace(heard.cost, low=math.nan, high=math.nan))
    assert "too few places for a verdict" in one_place.line
    assert "nan" not in one_place.line


def test_agreement_by_hand():
    instructed = [np.array([[0.0, 1.0], [1.0, 1.0]]), np.array([[0.0, 0.0], [1.0, 0.0]])]
    recovered = [np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([[0.0, 0.0], [1.0, 1.0]])]
    places = ["a", "b"]
    found = compare(recovered, instructed, KEYS, places, BOOTSTRAP)
    assert {name: each.value for name, each in found.items()} == {
        "exact-keys": 0.5,
        "accuracy-right": 0.75,
        "accuracy-down": 0.75,
    }
    assert majority(instructed, KEYS) == {"exact-keys": 0.25, "accuracy-right": 0.5, "accuracy-down": 0.5}
    vector = compare(recovered, instructed, VECTOR, places, BOOTSTRAP)
    assert vector["MAE-dx"].value == 0.25
    assert vector["R2-dx"].value == pytest.approx(1 - 1.0 / 1.0)  # one error of 1; the spread about 0.5 is 4 * 0.25
    still = [np.zeros((2, 2)), np.zeros((2, 2))]
    assert "R2-dx" not in compare(recovered, still, VECTOR, places, BOOTSTRAP)
    choices = [np.array([[0.0], [2.0]]), np.array([[2.0], [2.0]])]
    assert compare(choices, choices[::-1], CHOICE, places, BOOTSTRAP)["choice-accuracy"].value == 0.5
    assert majority(choices, CHOICE) == {"choice-accuracy": 0.75}
