"""Settings: what each model refuses, in which words, and what the groups of conf/ make of each other."""

import functools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Annotated, Literal

import pytest
import torch
from entry import read_settings
from hypothesis import given, strategies as st
from omegaconf import OmegaConf
from pydantic import Field, model_validator

from decoder.camera import Camera
from decoder.refiner import RefinerConfig
from terra.act_bench.settings import ActBenchSettings
from terra.cli import COMMANDS
from terra.config.files import choices, compose, compose_groups, config_dir, plain
from terra.config.groups import PipelineSettings, check_part
from terra.config.spec import AUTO, PipelineSpec, choose_engine
from terra.engine.jacobi import JacobiEngine
from terra.errors import CheckpointError, ConfigError, TerraError
from terra.evaluation.settings import EvaluationSettings
from terra.generate_settings import GenerateSettings
from terra.pipeline import Pipeline, RolloutRequest
from terra.replay.models import recorded_spec
from terra.rollouts.manifest import FIELDS, Line, parse_line, rollout_names
from terra.rollouts.settings import BatchSettings, RolloutSettings
from terra.sampling import SamplingParams
from terra.serving.settings import ServeSettings
from terra.training.settings import LoopConfig
from terra.training.tokenizer_settings import TrainTokenizerSettings
from terra.training.world_model_settings import TrainWorldModelSettings
from tokenizer.settings import (
    Count,
    FilePath,
    Fraction,
    Positive,
    Seed,
    Settings,
    checked,
    did_you_mean,
    expected_names,
)


class Inner(Settings):
    count: Count
    rate: float = 1.0

    @model_validator(mode="after")
    def _fit(self) -> "Inner":
        if self.rate > self.count:
            raise ValueError(f"rate: expected at most count={self.count}, got {self.rate}")
        return self


class Outer(Settings):
    inner: Inner
    path: FilePath | None = None
    pair: Annotated[tuple[int, int], Field(strict=False)] = (1, 2)
    sizes: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    kind: Literal["a", "b", "c"] = "a"
    word: int | str = 3
    seed: Seed = 0
    share: Fraction = 0.5
    on: bool = False


INNER = {"count": 2}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (3, "expected settings, got 3"),
        ({}, "inner: expected settings, got none"),
        ({"inner": 3}, "inner: expected settings, got 3"),
        ({"inner": {"count": 0}}, "inner.count: expected a whole number of at least 1, got 0"),
        ({"inner": {"count": True}}, "inner.count: expected a whole number of at least 1, got True"),
        ({"inner": {"count": "2"}}, "inner.count: expected a whole number of at least 1, got '2'"),
        ({"inner": {"count": 2.0}}, "inner.count: expected a whole number of at least 1, got 2.0"),
        ({"inner": {"count": None}}, "inner.count: expected a whole number of at least 1, got null"),
        ({"inner": INNER | {"rate": math.nan}}, "inner.rate: expected a finite number, got nan"),
        ({"inner": INNER | {"rate": -math.inf}}, "inner.rate: expected a finite number, got -inf"),
        ({"inner": INNER | {"rate": 3}}, "inner.rate: expected at most count=2, got 3.0"),
        ({"inner": INNER | {"rat": 3}}, "inner.rat: no such setting; did you mean inner.rate?"),
        ({"inner": INNER | {"zebra": 3}}, "inner: expected count, rate, got 'zebra'"),
        ({"iner": INNER}, "iner: no such setting; did you mean inner?"),
        ({"inner": INNER, "path": 2.5}, "path: expected a path or null, got 2.5"),
        ({"inner": INNER, "pair": [1]}, "pair[1]: expected a whole number, got none"),
        ({"inner": INNER, "pair": [1, "a"]}, "pair[1]: expected a whole number, got 'a'"),
        ({"inner": INNER, "pair": 3}, "pair: expected a list of 2, each a whole number, got 3"),
        ({"inner": INNER, "sizes": [1, 0]}, "sizes[1]: expected a whole number of at least 1, got 0"),
        ({"inner": INNER, "kind": "d"}, "kind: expected one of a, b, c, got 'd'"),
        ({"inner": INNER, "word": 2.5}, "word: expected a whole number or text, got 2.5"),
        ({"inner": INNER, "seed": 2**63}, "seed: expected a whole number from 0 to 2**63 - 1, got 9223372036854775808"),
        ({"inner": INNER, "share": 1}, "share: expected a number of at least 0 and below 1, got 1"),
        ({"inner": INNER, "on": 1}, "on: expected true or false, got 1"),
    ],
)
def test_the_first_wrong_value_is_one_line(values, line):
    with pytest.raises(ConfigError) as caught:
        checked(Outer, values, "here")
    assert str(caught.value) == f"here: {line}"


def test_plain_values_become_what_the_annotations_say():
    values = {"inner": {"count": 2, "rate": 2}, "path": 2026, "pair": [3, 4], "sizes": [1]}
    found = checked(Outer, values)
    assert found == Outer(inner=Inner(count=2, rate=2.0), path=Path("2026"), pair=(3, 4), sizes=(1,))
    assert found.replace(seed=7).seed == 7
    assert hash(found) == hash(found.replace())
    with pytest.raises(ConfigError, match="seed: expected a whole number"):
        found.replace(seed=-1)
    with pytest.raises(ConfigError, match=r"^inner\.count: expected a whole number of at least 1, got 0$"):
        Outer(inner={"count": 0})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="frozen"):
        found.seed = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_single_values_and_other_errors():
    assert checked(Positive, 2, "x") == 2.0
    with pytest.raises(CheckpointError, match=r"^x: expected a number above 0, got 0$"):
        checked(Positive, 0, "x", CheckpointError)
    with pytest.raises(ConfigError, match=r"^drives\[1\]: expected a whole number of at least 1, got 0$"):
        checked(Annotated[tuple[Count, ...], Field(strict=False)], [1, 0], "drives")


@given(st.text(min_size=1, max_size=12))
def test_an_unknown_key_is_always_one_line(name):
    with pytest.raises(ConfigError) as caught:
        checked(Inner, INNER | {f"x{name}": 1})
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("got") or "did you mean" in str(caught.value)


def test_names_that_are_expected():
    assert expected_names(["day", "night"], "nigth") == "expected one of day, night, got 'nigth'; did you mean night?"
    many = expected_names([f"a{index}" for index in range(22)], "zebra", "drives of")
    assert many.startswith("expected drives of a0, a1, ")
    assert many.endswith(" a19 and 2 more, got 'zebra'")


def test_did_you_mean():
    assert did_you_mean("nm_frames", ["seed", "num_frames"]) == "num_frames"
    assert did_you_mean("zebra", ["seed", "num_frames"]) is None


# --- the settings of the commands

NEEDED = {
    "generate": ["experiment=demo"],
    "rollout": ["manifest=m", "output=o"],
    "serve": [],
    "replay": ["folder=f"],
    "record": ["output=o"],
    "import": ["kind=kitti", "input=i", "output=o"],
    "info": [],
    "inspect": ["data=d"],
    "tokenize": ["data=d", "checkpoint=c", "output=o"],
    "train": ["data=d", "output=o"],
    "train_tokenizer": ["data=d", "output=o"],
    "train_estimator": ["data=d", "output=o"],
    "train_refiner": ["data=d", "output=o"],
    "evaluate": ["data=d", "output=o"],
    "act_bench": ["manifest=m", "output=o"],
    "benchmark": [],
    "check": [],
    "convert": ["kind=refiner", "input=i", "output=o"],
    "pack": ["world=w", "output=w.zip"],
    "unpack": ["archive=w.zip", "output=w"],
}


@pytest.mark.parametrize("name", sorted(command.config_name for command in COMMANDS.values()))
def test_every_command_composes_and_checks(name):
    assert read_settings(name, NEEDED[name])


def _choices(*groups: str) -> list[str]:
    return [f"{group}={name}" for group in groups for name in choices(group)]


@pytest.mark.parametrize("choice", _choices("model", "engine", "sampling", "decoder", "camera", "experiment"))
def test_every_choice_of_generate_checks(choice):
    given = {"model=folder": ["model.path=here"], "decoder=refiner": ["decoder.pretrained=here"]}
    assert read_settings("generate", ["context=c", "trajectory=t", choice, *given.get(choice, [])])


@pytest.mark.parametrize("choice", _choices("recipe"))
def test_every_recipe_checks(choice):
    name = choice.removeprefix("recipe=")
    command = {"tokenizer": "train_tokenizer", "world": "train", "refiner": "train_refiner"}[name.split("_")[0]]
    assert read_settings(command, [*NEEDED[command], choice])


@pytest.mark.parametrize("choice", _choices("cluster", "lerobot"))
def test_every_other_choice_checks(choice):
    name = "rollout" if choice.startswith("cluster") else "import"
    assert read_settings(name, [*NEEDED[name], choice])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("generate", GenerateSettings),
        ("rollout", BatchSettings),
        ("serve", ServeSettings),
        ("evaluate", EvaluationSettings),
        ("act_bench", ActBenchSettings),
        ("train", TrainWorldModelSettings),
        ("train_tokenizer", TrainTokenizerSettings),
    ],
)
def test_wrong_types_and_keys_are_refused_in_every_field(name, kind):
    values = plain(compose(name, NEEDED[name]))
    assert checked(kind, values)
    for key in kind.model_fields:
        with pytest.raises(ConfigError) as caught:
            checked(kind, values | {key: object()})
        assert str(caught.value).startswith((key, "sampling"))
        assert "\n" not in str(caught.value)
    first = next(iter(kind.model_fields))
    with pytest.raises(ConfigError, match=f"did you mean {first}"):
        checked(kind, values | {first + "x": 1})


@pytest.mark.parametrize(
    ("kind", "field", "wrong"),
    [
        (LoopConfig, "batch_size", [True, "2", 2.0, 0, None]),
        (LoopConfig, "learning_rate", [True, "2", math.nan, math.inf, 0.0]),
        (LoopConfig, "compile_model", [1, "true", None]),
        (Camera, "fov_degrees", [True, "90", math.nan, 0, 180]),
        (Camera, "pitch_radians", [math.inf, 1.6, "0"]),
        (RefinerConfig, "num_frames", [True, "2", 2.0, 0]),
        (RefinerConfig, "guidance", [[1.0], [1.0, -1.0], [1.0, math.inf], "11"]),
        (RefinerConfig, "residual", [0, "false"]),
    ],
)
def test_no_type_stands_for_another(kind, field, wrong):
    whole = {
        LoopConfig: {"output": "o", "batch_size": 1, "max_steps": 1},
        Camera: {"fov_degrees": 90, "height_meters": 1, "pitch_radians": 0},
        RefinerConfig: {"image_size": [4, 4], "unet": {}, "vae": {"block_out_channels": [1]}},
    }[kind]
    assert checked(kind, whole)
    for value in wrong:
        with pytest.raises(ConfigError, match=rf"^{field}"):
            checked(kind, whole | {field: value})


# --- one model=, device=, dtype=, engine=


def test_one_device_and_one_dtype_for_all_parts():
    for engine in ("auto", "jacobi", "hf", "graph"):
        settings = read_settings("generate", ["experiment=demo", f"engine={engine}", "device=cpu", "dtype=bfloat16"])
        assert settings.tokenizer.device == settings.engine["device"] == "cpu"
        assert settings.engine["dtype"] == settings.decoder["dtype"] == "bfloat16"
    one = read_settings("generate", ["experiment=demo", "engine=hf", "dtype=bfloat16", "decoder.dtype=float32"])
    assert (one.engine["dtype"], one.decoder["dtype"]) == ("bfloat16", "float32")
    act_bench = read_settings("act_bench", [*NEEDED["act_bench"], "device=cpu", "dtype=float32"])
    assert (act_bench.estimator.device, act_bench.estimator.dtype) == ("cpu", "float32")


def test_what_is_not_named_fits_the_machine():
    spec = PipelineSpec.from_settings(read_settings("generate", ["experiment=demo", "engine=hf"]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "bfloat16" if device == "cuda" else "float32"
    assert (spec.settings.engine["device"], spec.settings.engine["dtype"]) == (device, dtype)
    assert (spec.settings.tokenizer.device, spec.settings.decoder["dtype"]) == (device, dtype)
    assert spec.engine_choice is None


def test_the_engine_that_auto_takes_is_named_with_its_reason(monkeypatch, capsys):
    spec = PipelineSpec.from_settings(read_settings("generate", ["experiment=demo", "device=cpu", "engine=auto"]))
    assert spec.settings.engine["_target_"] == "terra.engine.jacobi.JacobiEngine"
    assert spec.settings.engine["drafts"] == 31
    spec.announce()
    reason = "device=cpu" if torch.cuda.is_available() else "no NVIDIA GPU here"
    assert capsys.readouterr().err == f"engine: jacobi ({reason})\n"


def test_the_readme_lists_every_choice_of_a_group():
    text = (config_dir() / "README.md").read_text()
    for group, listed in re.findall(r"^\| `(\w+)=` \| (`.+?`) \|", text, re.MULTILINE):
        assert sorted(re.findall(r"`(\w+)`", listed)) == choices(group), group


def test_graph_on_a_cpu_says_what_is_faster_there(capsys):
    for engine in ("graph", "jacobi"):
        PipelineSpec.from_settings(
            read_settings("generate", ["experiment=demo", f"engine={engine}", "device=cpu"])
        ).announce()
    said = capsys.readouterr().err
    assert said == "engine: graph runs its PyTorch reference on a CPU; engine=jacobi is faster there\n"


@pytest.mark.parametrize(
    ("installed", "rollouts", "name"), [(True, 8, "vllm"), (True, 7, "jacobi"), (False, 64, "jacobi")]
)
def test_auto_takes_vllm_for_many_rollouts_on_a_cpu_where_it_is_installed(monkeypatch, installed, rollouts, name):
    monkeypatch.setattr("terra.config.spec._has_distribution", lambda distribution: installed)
    assert choose_engine(torch.device("cpu"), rollouts)[0] == name


def test_a_batch_says_how_many_rollouts_it_makes(monkeypatch):
    monkeypatch.setattr("terra.config.spec._has_distribution", lambda distribution: True)
    settings = read_settings("generate", ["experiment=demo", "device=cpu", "engine=auto"])
    spec = PipelineSpec.from_settings(settings, rollouts=16)
    assert spec.settings.engine["_target_"] == "terra.engine.vllm.engine.VllmEngine"
    assert spec.engine_choice == "engine: vllm (16 rollouts on a CPU)"


@pytest.mark.parametrize(("capability", "name"), [((7, 5), "jacobi"), ((8, 0), "graph"), ((12, 0), "graph")])
def test_auto_takes_graph_on_a_gpu_that_has_what_it_needs(monkeypatch, capability, name):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    chosen, reason = choose_engine(torch.device("cuda"))
    assert chosen == name
    assert reason.startswith("A GPU")
    assert ("compute capability 7.5, graph needs 8.0" in reason) == (name == "jacobi")


def test_settings_of_one_engine_are_no_settings_of_auto():
    settings = read_settings("generate", ["experiment=demo"])
    with pytest.raises(ConfigError, match=r"^engine\.drafts: expected engine=NAME"):
        PipelineSpec.from_settings(settings.replace(engine={"_target_": AUTO, "drafts": 3}))


RECORDED = {
    "engine": {"_target_": "terra.engine.hf.HFEngine", "dtype": "bfloat16", "device": "cpu"},
    "decoder": {"_target_": "decoder.FramewiseDecoder", "dtype": "bfloat16", "compiled": False},
    "tokenizer_device": "cpu",
}


def test_what_is_recorded_comes_before_what_fits_and_after_what_is_given():
    settings = read_settings("generate", ["experiment=demo"])
    again = PipelineSpec.from_settings(settings, recorded=RECORDED)
    assert again.settings.engine == RECORDED["engine"]
    assert again.settings.decoder == RECORDED["decoder"]
    assert again.engine_choice == "engine: hf (as recorded)"
    given = read_settings("generate", ["experiment=demo", "dtype=float32"])
    changed = PipelineSpec.from_settings(given, recorded=RECORDED).settings
    assert (changed.engine["_target_"], changed.engine["dtype"]) == (RECORDED["engine"]["_target_"], "float32")
    assert changed.decoder["dtype"] == "float32"
    other = read_settings("generate", ["experiment=demo", "engine=jacobi", "device=cpu"])
    spec = PipelineSpec.from_settings(other, recorded=RECORDED)
    assert spec.settings.engine["_target_"] == "terra.engine.jacobi.JacobiEngine"
    assert spec.settings.engine["dtype"] == "float32"  # the recorded one is another engine's


def test_a_spec_says_what_made_a_rollout_and_is_had_back_from_it():
    settings = read_settings("generate", ["experiment=demo", "engine=hf", "device=cpu", "dtype=bfloat16"])
    spec = PipelineSpec.from_settings(settings)
    record = json.loads(json.dumps({**spec.provenance(), "overlap": settings.overlap}))
    assert recorded_spec(record, read_settings("replay", ["folder=none"])).made_with() == spec.made_with()
    given = read_settings("replay", ["folder=none", "engine=jacobi", "device=cpu", "dtype=float32"])
    changed = recorded_spec(record, given).settings.engine
    assert (changed["_target_"], changed["dtype"]) == ("terra.engine.jacobi.JacobiEngine", "float32")


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ({"drafts": "3"}, "engine.drafts: expected a whole number, got '3'"),
        ({"drafts": True}, "engine.drafts: expected a whole number, got True"),
        ({"draft": 3}, "engine.draft: no such setting; did you mean engine.drafts?"),
        ({"drafts": 3, "device": 0}, "engine.device: expected text, got 0"),
        ({"_target_": "terra.engine.none.None"}, "engine._target_: expected the name of a class or function"),
        ({"_target_": 7}, "engine._target_: expected the name of a class or function, got 7"),
        (
            {"_target_": "os.system"},
            "engine._target_: expected a class or function that takes checkpoint, got 'os.system'",
        ),
        ({"_target_": "builtins.dict"}, "engine._target_: expected a class or function that takes checkpoint"),
    ],
)
def test_a_parts_arguments_are_checked_against_its_signature(part, line):
    with pytest.raises(ConfigError) as caught:
        check_part("engine", {"_target_": "terra.engine.jacobi.JacobiEngine", **part}, ("checkpoint",))
    assert str(caught.value).startswith(line)


def test_a_part_of_ones_own_takes_what_it_says():
    part = {"_target_": "test_settings.make", "sizes": [1, 2], "anything": {"a": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        assert check_part("decoder", part, ("tokenizer",)) == {"sizes": [1, 2], "anything": {"a": 1}}


def make(tokenizer: object, sizes: tuple[int, int], **anything: object) -> None:
    """A stranger's decoder."""


def test_groups_compose_without_a_command():
    values = compose_groups(
        {"model": "folder", "engine": "jacobi"}, {"device": None, "dtype": None, "model": {"path": "x/y"}}
    )
    assert values["tokenizer"] == {"pretrained": "x/y", "subfolder": "tokenizer", "revision": None, "device": None}
    with pytest.raises(
        ConfigError, match=r"^engine: expected one of auto, graph, hf, jacobi, persistence, vllm, got 'warp'$"
    ):
        compose_groups({"engine": "warp"}, {})
    settings = checked(
        PipelineSettings,
        compose_groups(
            {"model": "terra_v2", "engine": "auto", "decoder": "framewise"},
            {"device": None, "dtype": None, "overlap": 3},
        ),
    )
    assert settings.tokenizer.subfolder == "lfq_tokenizer_B_256_ema"
    assert OmegaConf.is_dict(compose("generate", ["experiment=demo"]).engine)


# --- Pipeline.from_pretrained


@pytest.fixture
def pair_folder(tiny_model, tiny_tokenizer, tmp_path):
    shutil.copytree(tiny_tokenizer, tmp_path / "pair" / "tokenizer")
    shutil.copytree(tiny_model, tmp_path / "pair" / "world_model")
    return tmp_path / "pair"


def test_a_folder_of_both_is_a_pipeline(pair_folder):
    named = {"device": "cpu", "dtype": "float32", "overlap": 2}
    with Pipeline.from_pretrained(pair_folder, engine="jacobi", drafts=3, **named) as pipeline:
        assert isinstance(pipeline.engine, JacobiEngine)
        assert pipeline.overlap == 2
        engine = {"name": "jacobi", "dtype": "float32", "device": "cpu", "drafts": 3, "int8_weights": False}
        assert pipeline.provenance["engine"] == engine
        size = pipeline.tokenizer.config.image_size
        context = torch.rand(3, 3, *size, generator=torch.Generator().manual_seed(0)) * 2 - 1
        request = RolloutRequest(context, torch.zeros(4, 6, 3), seed=0)
        (rollout,) = pipeline.generate([request], SamplingParams())
    with Pipeline.from_pretrained(str(pair_folder), engine="hf", **named) as pipeline:
        (again,) = pipeline.generate([request], SamplingParams())
    assert torch.equal(rollout.tokens, again.tokens)
    composed = ["context=c", "trajectory=t", "model=folder", f"model.path={pair_folder}", "engine=hf", "overlap=2"]
    spec = PipelineSpec.from_settings(read_settings("generate", [*composed, "device=cpu", "dtype=float32"]))
    assert spec.made_with() == PipelineSpec.from_pretrained(pair_folder, engine="hf", **named).made_with()


def test_the_shipped_model_by_its_name():
    spec = PipelineSpec.from_pretrained("demo", device="cpu")
    composed = PipelineSpec.from_settings(read_settings("generate", ["experiment=demo", "device=cpu"]))
    assert spec.made_with() == composed.made_with()
    assert spec.engine_choice is not None


@pytest.mark.parametrize(
    ("arguments", "error", "line"),
    [
        ({"engine": "warp"}, ConfigError, "engine: expected one of auto, graph, hf, jacobi, persistence, vllm"),
        ({"device": "tpu"}, ConfigError, "device: expected cpu or cuda, got 'tpu'"),
        ({"dtype": "int3"}, ConfigError, "dtype: expected one of float32, bfloat16, float16 or null, got 'int3'"),
        ({"overlap": 0}, ConfigError, "overlap: expected a whole number of at least 1, got 0"),
        ({"engine": "jacobi", "draft": 3}, ConfigError, "engine.draft: no such setting; did you mean engine.drafts?"),
        ({"pretrained": "/no/such/folder"}, CheckpointError, "/no/such/folder"),
    ],
)
def test_arguments_of_from_pretrained_are_refused_before_weights_load(monkeypatch, arguments, error, line):
    monkeypatch.setattr(PipelineSpec, "build", lambda _: pytest.fail("weights were loaded"))
    given = {"pretrained": "demo", "device": "cpu"} | arguments
    with pytest.raises(error, match=re.escape(line)) as caught:
        Pipeline.from_pretrained(given.pop("pretrained"), **given)
    assert "\n" not in str(caught.value)


# --- lines of a manifest

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
GOOD = {
    "id": "a",
    "context": "c",
    "trajectory": "t.json",
    "num_frames": 9,
    "num_context": 3,
    "seed": 1,
    "num_samples": 2,
}


@given(st.dictionaries(st.sampled_from([*FIELDS, "instruction_trajs", "sede"]), VALUES, max_size=3))
def test_a_line_is_jobs_or_one_line_of_error(changes):
    settings = RolloutSettings.from_values(vars(read_rollout_settings()))
    line = Line(7, 0, json.dumps(GOOD | changes).encode())
    refusal, jobs = None, []
    try:
        jobs = parse_line(line, settings)
    except TerraError as error:
        refusal = str(error)
    if refusal is not None:
        assert "line 7" in refusal
        assert "\n" not in refusal
        return
    assert len(jobs) == len(rollout_names(line, settings))
    for job in jobs:
        assert type(job.num_frames) is type(job.num_context) is type(job.seed) is int
        assert job.num_frames >= 1
        assert 0 <= job.seed < 2**63
        assert math.isfinite(job.sampling.temperature)


@functools.cache
def read_rollout_settings() -> BatchSettings:
    return read_settings("rollout", NEEDED["rollout"])


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "terra-demo"),
        (["model=folder", "model.path=outputs/rc"], "rc"),
        (["model=terra_v2"], "Terra"),
        (["model_name=mine"], "mine"),
    ],
)
def test_a_served_model_is_called_by_its_folder(overrides, name):
    assert compose("serve", overrides).model_name == name
