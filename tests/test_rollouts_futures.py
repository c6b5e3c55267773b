"""Several futures of one line: which is the best, their grid, and planning without a manifest."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import COLS, ROWS
from tiny_rollouts import Batch

from decoder import FramewiseDecoder
from decoder.video import read_video
from terra.engine.hf import HFEngine, HFSession
from terra.errors import ConfigError
from terra.pipeline import Pipeline, RolloutRequest
from terra.planning import imagine
from terra.rollouts.best import Score, write_best
from terra.rollouts.folder import RolloutFolder
from terra.rollouts.grid import write_grid
from terra.rollouts.manifest import sample_seed
from terra.sampling import SamplingParams
from tokenizer import LFQTokenizer

pytestmark = pytest.mark.slow

SCORES = """
import json
from pathlib import Path

def mean_token(frames, tokens, actions):
    assert frames.ndim == 4 and abs(frames).max() < 10 and len(actions) == len(frames) - 1 == len(tokens) - 1
    return tokens.float().mean()

def minus_mean_token(frames, tokens, actions):
    return -tokens.float().mean().item()

def refuses_some(frames, tokens, actions):
    if tokens[-1, 0, 0] % 2:
        raise ZeroDivisionError("no such road\\nat all")
    return float("nan")

nothing = 3
"""


@pytest.fixture
def batch(tmp_path: Path, tiny_model: Path, tiny_tokenizer: Path) -> Batch:
    batch = Batch(tmp_path, tiny_model, tiny_tokenizer)
    batch.write(batch.line(0), batch.line(1, num_samples=1), batch.line(2, context="nowhere"))
    return batch


@pytest.fixture(autouse=True)
def scores(tmp_path, monkeypatch):
    (tmp_path / "my_scores.py").write_text(SCORES)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    import sys

    sys.modules.pop("my_scores", None)


def best(batch: Batch) -> dict:
    return json.loads((batch.output / "best.json").read_text())


def check_best(batch: Batch, sign: int) -> None:
    content = best(batch)
    assert list(content) == ["r0", "r1"]
    assert list(content["r0"]["scores"]) == ["r0", "r0+1", "r0+2"]
    for entry in content.values():
        means = {name: sign * float(batch.tokens(name).float().mean()) for name in entry["scores"]}
        assert entry["scores"] == means
        assert entry["best"] == max(means, key=lambda name: means[name])
        assert entry["score"] == means[entry["best"]]
        assert entry["seed"] == batch.record(entry["best"])["seed"]
    rows = {row["id"]: row.get("score") for row in batch.index() if row["status"] == "done"}
    assert rows == content["r0"]["scores"] | content["r1"]["scores"]


def test_the_best_future_is_named_and_another_score_needs_no_new_rollouts(batch, monkeypatch):
    assert batch.run(num_samples=3, score="my_scores:mean_token") == 3
    check_best(batch, 1)

    async def never(self, action):
        raise AssertionError

    monkeypatch.setattr(HFSession, "step", never)
    assert batch.run(num_samples=3, score="my_scores:minus_mean_token") == 3
    check_best(batch, -1)
    assert batch.run(num_samples=3, score="my_scores:minus_mean_token") == 3
    check_best(batch, -1)
    assert len(batch.log()) == 4 + 3 * 3  # the line that fails is tried each time


def test_scores_of_another_function_are_not_compared(tmp_path):
    folder = RolloutFolder(tmp_path / "out", {}, "refuse")
    scored = {"r0": ("mean_token", 1.0), "r0+1": ("minus_mean_token", 5.0), "r0+2": ("mean_token", 2.0), "r0+3": None}
    for seed, (name, score) in enumerate(scored.items()):
        folder.rollout(name).mkdir(parents=True)
        record = {"seed": seed, "score": score and {"function": f"my_scores:{score[0]}", "value": score[1]}}
        (folder.rollout(name) / "rollout.json").write_text(json.dumps(record))
    write_best(folder, [(list(scored), 1)], Score("my_scores:mean_token"))  # as another process may score them, too
    assert json.loads((tmp_path / "out" / "best.json").read_text()) == {
        "r0": {"best": "r0+2", "seed": 2, "score": 2.0, "scores": {"r0": 1.0, "r0+2": 2.0}}
    }


def test_a_score_that_fails_fails_its_rollout_alone(batch):
    batch.write(*(batch.line(index) for index in range(6)))
    assert batch.run(score="my_scores:refuses_some", num_frames=4) == 3
    reasons = {row["reason"] for row in batch.index()}
    assert reasons <= {
        "score=my_scores:refuses_some: expected a number, got ZeroDivisionError: no such road",
        "score=my_scores:refuses_some: expected a finite number, got nan",
    }
    assert len(reasons) == 2
    assert batch.names() == []
    assert best(batch) == {}
    assert batch.run(num_frames=4) == 0
    assert batch.run(score="my_scores:refuses_some", num_frames=4) == 3
    assert {row["status"] for row in batch.index()} == {"failed"}
    assert batch.run(score="my_scores:mean_token", num_frames=4) == 0
    assert len(best(batch)) == 6


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("mean", "score: expected package.module:function, got 'mean'"),
        ("nowhere.at_all:mean", "score=nowhere.at_all:mean: expected a module that can be imported"),
        ("my_scores:median", "expected a function median in my_scores, got NoneType"),
        ("my_scores:nothing", "expected a function nothing in my_scores, got int"),
    ],
)
def test_scores_that_are_none_are_refused_before_any_work(batch, score, message):
    with pytest.raises(ConfigError, match=message):
        batch.run(score=score)
    assert not batch.output.exists()


@pytest.mark.slow
def test_a_line_s_futures_are_shown_beside_each_other(batch):
    assert batch.run(num_samples=3, grid=True) == 3
    (path,) = (batch.output / "grids").iterdir()
    assert path.name == "r0.mp4"
    shown = read_video(path)
    height, width = 4 * ROWS, 4 * COLS
    assert shown.shape == (10, 2 * height + 4, 2 * width + 4, 3)
    made = path.stat().st_mtime_ns
    assert batch.run(num_samples=3, grid=True) == 3
    assert path.stat().st_mtime_ns == made
    assert batch.run(num_samples=3, grid=True, seed=5, on_change="redo", **{"sampling.temperature": 0.5}) == 3
    assert path.stat().st_mtime_ns > made


def test_tiles_stand_row_by_row(tmp_path):
    from decoder.video import write_video

    videos = [tmp_path / f"{index}.mp4" for index in range(5)]
    for index, path in enumerate(videos):
        write_video(np.full((4, 64, 96, 3), 40 * index + 40, np.uint8), path, 10.0)
    write_grid(videos, [f"seed {index}" for index in range(5)], tmp_path / "grid.mp4")
    shown = read_video(tmp_path / "grid.mp4").astype(int)
    assert shown.shape == (4, 2 * 64 + 4, 3 * 96 + 8, 3)
    for index in range(5):
        row, col = divmod(index, 3)
        tile = shown[:, row * 68 + 4 : row * 68 + 60, col * 100 + 4 : col * 100 + 92]
        assert abs(tile[:, 30:, 60:] - (40 * index + 40)).max() < 6
        assert tile[:, :14, :40].std() > 10  # the label
    assert shown[:, 80:, 210:].max() < 40  # nobody's place


def test_planning_takes_the_candidate_with_the_best_mean(tiny_tokenizer, tiny_model):
    tokenizer = LFQTokenizer.from_pretrained(tiny_tokenizer)
    sampling = SamplingParams(temperature=0.9)
    generator = torch.Generator().manual_seed(0)
    context = torch.rand(2, 3, 4 * ROWS, 4 * COLS, generator=generator) * 2 - 1
    candidates = [torch.randn(5, 6, 3, generator=generator) for _ in range(3)]

    def score(frames, tokens, actions) -> float:
        return float(tokens[-1].float().mean())

    with Pipeline(tokenizer, HFEngine(tiny_model), FramewiseDecoder(tokenizer), overlap=2) as pipeline:
        choice = imagine(pipeline, context, candidates, score, sampling=sampling, seed=3, num_samples=2)
        request = RolloutRequest(context, candidates[1], sample_seed(3, 1))
        (alone,) = pipeline.generate([request], sampling)
        assert torch.equal(alone.tokens, choice.rollouts[1][1].tokens)
        with pytest.raises(ConfigError, match="expected a candidate and a sample or more, got 0 and 1"):
            imagine(pipeline, context, [], score, sampling=sampling)
        with pytest.raises(ConfigError, match="score: expected finite numbers"):
            imagine(pipeline, context, candidates, lambda *_: math.inf, sampling=sampling)
    assert choice.scores.shape == (3, 2)
    assert choice.best == int(choice.scores.mean(1).argmax())
    assert choice.scores[choice.best, choice.best_sample] == choice.scores[choice.best].max()
    for scores, rollouts in zip(choice.scores, choice.rollouts, strict=True):
        assert scores.tolist() == [score(None, rollout.tokens, None) for rollout in rollouts]
