"""`terra evaluate compare=`: several models on the same clips, each as it is evaluated alone, in one table."""

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from entry import read_settings
from rich.console import Console
from tiny_adapter import save_adapter
from tiny_worlds import CHOICE, EVALUATION, FPS, KEYS, SIZE, episode, make_dataset, make_models

from decoder.video import probe_video
from terra.config.files import register_resolvers
from terra.dataset import ShardWriter, create_dataset
from terra.errors import ConfigError, DatasetError, TerraError
from terra.evaluation.action_estimator import ActionEstimator, ActionEstimatorConfig
from terra.evaluation.candidates import make_plans, name_of
from terra.evaluation.comparison import Evaluated, higher_is_better, is_clear, make_column, unit_of
from terra.evaluation.evaluate import run
from terra.evaluation.measures import Bootstrap
from terra.evaluation.rollouts import KeptRollouts
from terra.evaluation.scores import GENERATED, ClipScores
from terra.metrics.bootstrap import Estimate
from terra.metrics.frechet import frechet_difference, frechet_estimate
from terra.world_model import LlamaActionV2ForCausalLM, load_world_model, write_weights
from tokenizer import LFQTokenizer

MADE_ANEW = ("seconds", "settings", "rollouts_reused", "scores_reused")


def write_inverted(folder: Path) -> Path:
    """Held-out recordings of the shapes' world in inverted colors."""
    create_dataset(folder, source="inverted", fps=FPS, image_size=SIZE, space=KEYS)
    facts: dict[str, Any] = {"split": "held_out", "source": "inverted", "fps": FPS, "image_size": SIZE}
    for place in range(2):
        with ShardWriter(folder, **facts, place=f"old_{place}", camera=None, space=KEYS) as writer:
            frames, values = episode(KEYS, place)
            writer.add(f"old_{place}", 255 - frames, values)
    return folder


class World:
    """Recordings of two domains, a model, and an adapter and a fine-tuned model of it, as trainings write them."""

    def __init__(self, folder: Path) -> None:
        register_resolvers()
        self.folder, self.data, self.old = (
            folder,
            make_dataset(folder / "new", KEYS),
            write_inverted(folder / "old"),
        )
        self.models = make_models(folder / "models", KEYS)
        base = folder / "models" / "world_model"
        self.adapter = save_adapter(folder / "snow" / "adapter", base, seed=1).parent
        self.full = folder / "snow_full"
        write_weights(
            load_world_model(base, adapter=save_adapter(folder / "other", base, seed=2)),
            self.full / "world_model",
            "1GB",
        )
        size = {"fps": FPS, "image_size": SIZE, "width": 8, "reach": 1, "features": 8}
        torch.manual_seed(0)
        config = ActionEstimatorConfig(**size, action_space=KEYS.model_dump(mode="json"))
        ActionEstimator(config).save_pretrained(folder / "estimator")

    def settings(self, output: str, *more: str) -> Any:
        given = [f"data={self.data}", f"output={self.folder / output}", f"estimator={self.folder / 'estimator'}"]
        given += ["engine=jacobi", "num_clips=4", "num_frames=6", "drift_clips=0", *more]
        return read_settings("evaluate", [*self.models, *EVALUATION, *given])

    def evaluate(self, output: str, *more: str) -> tuple[Path, str]:
        said = io.StringIO()
        return run(self.settings(output, *more), Console(file=said, width=250)), said.getvalue()

    @property
    def both(self) -> str:
        return f"compare=[{self.adapter},{self.full}]"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("compare"))


@pytest.fixture(scope="module")
def compared(world: World) -> tuple[Path, str]:
    return world.evaluate("compared", world.both, f"old_data={world.old}")


def read(folder: Path, name: str = "metrics.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def without(metrics: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name not in (*MADE_ANEW, *names)}


@pytest.mark.slow
def test_every_column_is_what_a_separate_evaluation_gives(world: World, compared: tuple[Path, str]) -> None:
    folder, _ = compared
    table = read(folder, "compare.json")
    assert table["complete"] is True
    assert list(table["models"]) == ["base", "snow", "snow_full"]
    alone = {
        "base": world.evaluate("alone", f"old_data={world.old}")[0],
        "snow": world.evaluate("alone_snow", f"old_data={world.old}", f"adapter={world.adapter / 'adapter'}")[0],
        "snow_full": world.evaluate("alone_full", f"old_data={world.old}", f"world_model.pretrained={world.full}")[0],
    }
    found = {name: read(each) for name, each in alone.items()}
    for name, metrics in found.items():
        assert without(read(folder / name)) == without(metrics)
        column = table["models"][name]
        assert column["checkpoints"] == metrics["checkpoints"]
        measured = metrics["measures"]["rollouts"]
        for row in ("psnr", "ssim", "FD-ENL0", "FD-ENL0-T", "exact-keys", "accuracy-right"):
            assert column["values"][row] == {key: measured[row][GENERATED][key] for key in column["values"][row]}
        for row, key, prefix in (
            ("cross-entropy", "cross_entropy", ""),
            ("accuracy", "accuracy", ""),
            ("cross-entropy, another clip's actions", "other_actions_cross_entropy", ""),
            ("old domain: cross-entropy", "cross_entropy", "old_"),
        ):
            assert column["values"][row]["value"] == pytest.approx(metrics[f"{prefix}teacher_forced"][key], rel=1e-6)
        assert column["values"]["old domain: cross-entropy"]["units"] == 2
        assert metrics["old_teacher_forced"]["cross_entropy"] != metrics["teacher_forced"]["cross_entropy"]
        cost = {key: metrics["listening"]["cost"][key] for key in ("value", "low", "high", "count", "units")}
        assert column["values"]["cost of another clip's actions"] == cost
        if name == "base":
            assert column["differences"] == {}
            continue
        assert set(column["differences"]) == set(column["values"]) == set(table["rows"])
        for row, difference in column["differences"].items():
            expected = column["values"][row]["value"] - table["models"]["base"]["values"][row]["value"]
            assert difference["value"] == pytest.approx(expected, abs=1e-5)
            if not row.startswith("FD-"):  # which few resamples of three places leave unknown
                assert difference["low"] <= difference["value"] <= difference["high"]
    assert found["snow"]["measures"] != found["base"]["measures"] != found["snow_full"]["measures"]


@pytest.mark.slow
def test_the_table_is_printed_and_written_with_pictures(world: World, compared: tuple[Path, str]) -> None:
    folder, said = compared
    written = sorted(path.name for path in folder.iterdir())
    tables = ["compare.json", "compare.md", "compare.png"]
    assert written == ["base", "clips.mp4", "clips.png", *tables, "snow", "snow_full"]
    lines = (folder / "compare.md").read_text().splitlines()
    assert lines[2] == "|  | better | base | snow | snow_full | snow - base | snow_full - base |"
    assert any(line.startswith("| cross-entropy (nats) | lower | ") for line in lines)
    assert any(line.startswith("| old domain: cross-entropy (nats) | lower | ") for line in lines)
    assert {line.count("|") for line in lines[2:-2]} == {8}
    assert "snow_full - base" in said
    assert "cost of another clip's actions" in said
    video = probe_video(folder / "clips.mp4")
    alone = probe_video(folder / "base" / "clips.mp4")
    assert (video.num_frames, video.width, video.height) == (
        alone.num_frames,
        alone.width,
        alone.height,
    )  # four videos side by side, too


@pytest.mark.slow
def test_one_model_alone_writes_what_it_did_before(world: World, compared: tuple[Path, str]) -> None:
    folder, said = world.evaluate("single")
    names = {"clips.mp4", "clips.png", "metrics.csv", "metrics.json", "rollouts", "rollouts.png", "scores"}
    assert {path.name for path in folder.iterdir()} == names
    metrics = read(folder)
    assert not {"compare", "old_data"} & metrics["settings"].keys()
    assert "old_teacher_forced" not in metrics
    assert without(metrics) == without(read(compared[0] / "base"), "old_teacher_forced")
    assert said.splitlines()[-1] == f"metrics, plots and videos: {folder}"


@pytest.mark.slow
def test_a_comparison_that_was_stopped_goes_on(
    world: World, compared: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = KeptRollouts.tokens
    made: list[str] = []

    def stop_at_the_last_model(self: KeptRollouts, names: Any, requests: Any) -> Any:
        if "snow_full" in str(self._files._folder):
            raise KeyboardInterrupt
        return tokens(self, names, requests)

    monkeypatch.setattr(KeptRollouts, "tokens", stop_at_the_last_model)
    with pytest.raises(KeyboardInterrupt):
        world.evaluate("stopped", world.both, f"old_data={world.old}")
    stopped = read(world.folder / "stopped", "compare.json")
    assert stopped["complete"] is False
    assert list(stopped["models"]) == ["base", "snow"]

    make = KeptRollouts._make

    async def count(self: KeptRollouts, *rest: Any) -> Any:
        made.append(str(self._files._folder))
        return await make(self, *rest)

    monkeypatch.setattr(KeptRollouts, "tokens", tokens)
    monkeypatch.setattr(KeptRollouts, "_make", count)
    folder, _ = world.evaluate("stopped", world.both, f"old_data={world.old}")
    assert len(made) == 4
    assert all("snow_full" in each for each in made)
    assert read(folder, "compare.json") == read(compared[0], "compare.json")
    assert "made anew" not in caplog.text
    made.clear()
    world.evaluate("stopped", world.both, f"old_data={world.old}", "seed=1")
    assert len(made) == 12
    assert "made anew" in caplog.text


class TestRefusals:
    @pytest.fixture(autouse=True)
    def _nothing_is_loaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def load(*_: Any, **__: Any) -> None:
            raise AssertionError("weights were loaded")

        monkeypatch.setattr(LFQTokenizer, "from_pretrained", load)
        monkeypatch.setattr("terra.evaluation.evaluate.load_feature_network", load)

    def refused(self, world: World, message: str, *more: str) -> None:
        with pytest.raises(TerraError, match=message) as caught:
            world.evaluate("refused", *more)
        assert "\n" not in str(caught.value)
        assert not (world.folder / "refused").exists()

    def test_another_tokenizer(self, world: World, tmp_path: Path) -> None:
        other = shutil.copytree(world.full, tmp_path / "other")
        path = other / "world_model" / "config.json"
        path.write_text(json.dumps(read(path.parent, "config.json") | {"tokenizer_sha256": "f" * 64}))
        message = (
            rf"compare: {other}: tokenizer .*: the world model was trained with tokenizer ffffffffffff, got \w{{12}}"
        )
        self.refused(world, message, f"compare=[{world.adapter},{other}]")

    def test_other_actions(self, world: World, tmp_path: Path) -> None:
        other = shutil.copytree(world.full, tmp_path / "other")
        path = other / "world_model" / "config.json"
        config = read(path.parent, "config.json")
        config["action_space"]["names"] = ["left", "up"]
        path.write_text(json.dumps(config))
        message = "expected actions of keys of right, down, as the base takes them, got those of keys of left, up"
        self.refused(world, rf"compare: {other}: {message}", f"compare=[{other}]")

    def test_an_adapter_of_another_model(self, world: World, tmp_path: Path) -> None:
        make_models(tmp_path / "models", KEYS)
        torch.manual_seed(5)
        other = LlamaActionV2ForCausalLM(load_world_model(tmp_path / "models" / "world_model").config)
        write_weights(other, tmp_path / "world_model", "1GB")
        save_adapter(tmp_path / "theirs" / "adapter", tmp_path / "world_model", seed=1)
        message = rf"compare: {tmp_path}/theirs: .*expected the base model \w{{12}}, got \w{{12}} of"
        self.refused(world, message, f"compare=[{tmp_path}/theirs]")

    def test_no_model(self, world: World, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        for part in ("adapter", "world_model"):
            (tmp_path / "both" / part).mkdir(parents=True)
        self.refused(world, "empty: expected an adapter, a world model, .* got neither", f"compare=[{tmp_path}/empty]")
        self.refused(world, "both: expected .* got adapter and world_model", f"compare=[{tmp_path}/both]")
        message = "missing: expected a checkpoint folder or a Hub id owner/name, found no folder"
        self.refused(world, message, f"compare=[{tmp_path}/missing]")

    def test_names_that_are_not_different(self, world: World, tmp_path: Path) -> None:
        again = shutil.copytree(world.full, tmp_path / "snow")
        message = "compare: expected folders of different names and none called base, got snow twice"
        self.refused(world, message, f"compare=[{world.adapter},{again}]")
        base = shutil.copytree(world.full, tmp_path / "base")
        self.refused(world, "none called base, got base twice", f"compare=[{base}]")

    def test_old_data_of_another_kind(self, world: World, tmp_path: Path) -> None:
        old = make_dataset(tmp_path / "old", CHOICE)
        self.refused(world, "expected actions of keys of right, down", f"old_data={old}")


def test_a_model_is_called_as_its_training_is() -> None:
    names = {"outputs/snow": "snow", "outputs/snow/": "snow", "a/b/adapter": "b", "a/b/world_model": "b", "me/it": "it"}
    assert {folder: name_of(folder) for folder in names} == names


def evaluated(cross_entropy: list[float], psnr: list[float], places: list[str]) -> Evaluated:
    """Results of clips with these numbers, without networks."""
    clips = [SimpleNamespace(name=f"clip {index}", place=place) for index, place in enumerate(places)]
    scores = [
        ClipScores(cast(Any, clip), metrics={GENERATED: {"psnr": np.array([value, value])}})
        for clip, value in zip(clips, psnr, strict=True)
    ]
    plan = SimpleNamespace(bootstrap=Bootstrap(500, 5, 0), model=SimpleNamespace(space=KEYS), fps=10.0)
    facts = {"teacher_forced": {"cross_entropy": 0.0, "cross_entropy_by_window": cross_entropy}}
    return Evaluated(cast(Any, plan), [], facts, scores, [], [], [], [], [])


def test_a_paired_interval_by_hand() -> None:
    # Places differ by far more than the models do, in which each clip of a place differs by the same number.
    places = ["a", "a", "b", "c"]
    base = evaluated([1.0, 3.0, 50.0, 9.0], [20.0, 21.0, 30.0, 10.0], places)
    ours = evaluated([0.0, 2.0, 49.0, 8.0], [20.5, 21.5, 32.0, 10.5], places)
    column = make_column("snow", ours, base)
    assert column.values["cross-entropy"].value == 14.75
    assert column.values["cross-entropy"].high - column.values["cross-entropy"].low > 10
    assert column.differences["cross-entropy"] == Estimate(-1.0, -1.0, -1.0, 4, 3)
    # Of the draws of three places the least mean is that without b, the greatest that of b alone.
    psnr = column.differences["psnr"]
    assert (psnr.value, psnr.low, psnr.high, psnr.units) == (0.875, 0.5, 2.0, 3)
    assert is_clear(psnr)
    assert make_column("base", base).differences == {}
    with pytest.raises(DatasetError, match="expected the clips of the base for snow, got others"):
        make_column("snow", evaluated([0.0], [20.0], ["a"]), base)


def test_a_difference_of_unknown_interval_is_not_clear() -> None:
    nan = float("nan")
    assert not is_clear(Estimate(3.0, nan, nan, 2, 1))
    assert not is_clear(Estimate(3.0, -1.0, 4.0, 2, 2))
    assert is_clear(Estimate(-3.0, -4.0, -1.0, 2, 2))
    better = [*("psnr", "ADE", "old domain: accuracy", "old domain: cross-entropy", "exact-keys", "MAE-x")]
    assert [higher_is_better(row) for row in better] == [True, False, True, False, True, False]
    assert (unit_of("old domain: cross-entropy"), unit_of("ADE"), unit_of("ssim")) == ("nats", "m", "")


def test_a_difference_of_frechet_distances_is_paired() -> None:
    random = torch.Generator().manual_seed(0)
    theirs = torch.randn(12, 4, 3, generator=random) * torch.arange(1, 13)[:, None, None]
    base, ours = theirs + 1.0, theirs + 2.0
    options: dict[str, Any] = {"units": [str(index // 2) for index in range(12)], "num_resamples": 30}
    difference = frechet_difference(ours, base, theirs, **options)
    apart = [frechet_estimate(each, theirs, **options) for each in (ours, base)]
    assert difference.value == pytest.approx(apart[0].value - apart[1].value)
    assert difference.value == pytest.approx(9.0, rel=1e-3)  # 3 features: 3 * 2^2 - 3 * 1^2
    assert difference.high - difference.low < 0.01  # every resample has the same difference
    same = frechet_difference(base, base, theirs, **options)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)


def test_plans_keep_one_choice_of_clips(world: World) -> None:
    plans = make_plans(world.settings("planned", world.both))
    first = plans["base"][1]
    for name, (spec, plan) in plans.items():
        assert plan.clips is first.clips
        assert plan.settings.output == world.folder / "planned" / name
        assert plan.world_model == spec.world_model
    assert plans["snow"][1].settings.adapter == world.adapter / "adapter"
    assert plans["snow_full"][1].settings.adapter is None
    with pytest.raises(ConfigError, match="compare: expected"):
        world.settings("planned", "compare=3")
