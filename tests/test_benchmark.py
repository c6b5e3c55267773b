"""Tests of the benchmark without its clocks: plan, requests to each engine, results that survive a failure."""

import asyncio
import importlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import imageio.v3 as iio
import pytest
import torch
from entry import load_script
from safetensors.torch import save_file

from terra.benchmark import case, measure, report, run
from terra.benchmark.model import Traffic, make_random_model
from terra.benchmark.passes import Kernel, added, idle
from terra.benchmark.plan import CASES, NUM_WARMUP_FRAMES, Amount, Workload, plan_cases
from terra.benchmark.prompts import prompt_maker
from terra.engine.base import EngineSpec
from terra.engine.graph.step import DecodeSteps
from terra.engine.hf import HFEngine
from terra.engine.jacobi import JacobiEngine
from terra.errors import ConfigError
from terra.sampling import SamplingParams
from terra.world_model import load_config, load_world_model

AMOUNT = Amount(rollouts=[1, 4, 64], num_context=3, num_frames=3, repeats=3, repeats_many=1)
ALL = ["vllm", "vllm_eager_per_frame", "hf_generate", "hf", "jacobi", "graph_fp8", "vllm_fp8", "vllm_fp8_weights"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_random_model("tiny", tmp_path_factory.mktemp("random"), torch.float32, "cpu")


def settings(model, output, **changes):
    values = {
        "world_model": str(model),
        "shape": None,
        "drive": None,
        "output": str(output),
        "device": "cpu",
        "dtype": None,
        "cases": ["hf_generate", "hf", "jacobi"],
        "rollouts": [1],
        "num_context": 1,
        "num_frames": 2,
        "repeats": 2,
        "repeats_many": 1,
        "baseline_tokens": 4,
        "max_seconds": 100.0,
        "case_seconds": 50.0,
        "bandwidth_mib": {"cpu": 4},
        "vllm": {},
    }
    values.update(changes, output=output)
    return values


def in_process(folder, name, limit):
    case.run_case(folder, name)
    return ""


def test_each_workload_fits_the_window_at_both_its_ends():
    cases = plan_cases(ALL, AMOUNT, 25, fp8=True)
    assert [entry.name for entry in cases] == ALL
    workloads = [workload for entry in cases for workload in entry.workloads]
    assert {w.num_context for w in workloads if w.window_part == "start"} == {3}
    assert {w.num_context + NUM_WARMUP_FRAMES + w.num_frames for w in workloads if w.window_part == "end"} == {25}
    assert {w.repeats for w in workloads if w.rollouts > 4} == {1}
    for entry in cases:
        assert len({w.name for w in entry.workloads}) == len(entry.workloads)


def test_fp8_only_where_it_is():
    assert [entry.name for entry in plan_cases(ALL, AMOUNT, 25, fp8=False)] == ALL[:5]


def test_what_is_measured_by_default():
    assert [entry.name for entry in plan_cases(CASES["cuda"], AMOUNT, 25, fp8=True)] == list(CASES["cuda"])
    assert [entry.name for entry in plan_cases(CASES["cuda"], AMOUNT, 25, fp8=False)] == [
        name for name in CASES["cuda"] if "fp8" not in name
    ]
    assert [entry.name for entry in plan_cases(CASES["cpu"], AMOUNT, 25, fp8=False)] == list(CASES["cpu"])


def test_impossible_plans_are_refused():
    with pytest.raises(ConfigError, match="cases: expected some of"):
        plan_cases(["theirs"], AMOUNT, 25, fp8=True)
    with pytest.raises(ConfigError, match="num_context: expected 1 to 2"):
        plan_cases(ALL, AMOUNT, 6, fp8=True)


def test_traffic_of_terra_v1(monkeypatch):
    config = SimpleNamespace()

    def load(folder):
        from terra.world_model import LlamaActionConfig

        return LlamaActionConfig(architectures=["LlamaActionForCausalLM"])

    monkeypatch.setattr("terra.benchmark.model.load_config", load)
    traffic = Traffic.of(config)
    # Known: 2,043,973,632 parameters, less the input embedding, the positions' tables, the action projection and the
    # head's row of the special token.
    outside = 262145 * 2048 + (582 + 25) * 2048 + 4 * 2048 + 2048
    assert traffic.layers + traffic.head == 2_043_973_632 - outside
    assert traffic.kv * 2 == 22_528
    size = traffic.frame_bytes(64, 5.0, element=2, weight_bytes=None, head_bytes=None, kv_bytes=None)
    assert size / 576 == pytest.approx(7.6e9, rel=0.02)
    smaller = traffic.frame_bytes(64, 5.0, element=2, weight_bytes=1, head_bytes=None, kv_bytes=1)
    assert smaller == size - 576 * (traffic.layers + 64 * (5 * 582 + 288) * traffic.kv)
    smallest = traffic.frame_bytes(64, 5.0, element=2, weight_bytes=1, head_bytes=1, kv_bytes=1)
    assert smallest == size / 2


def test_generate_makes_what_a_session_makes(model):
    loaded = load_world_model(model)
    loaded.generation_config.eos_token_id = None
    engine = HFEngine(model)
    prompt, actions = prompt_maker(engine.spec, None)(1 + NUM_WARMUP_FRAMES, 1, 0)

    async def frame():
        session = await engine.open(prompt, SamplingParams(temperature=0.0), 0)
        return await session.step(actions[0])

    expected = asyncio.run(frame()).flatten()
    calls = []
    generate = loaded.generate

    def greedy(ids, actions, **rest):
        made = generate(ids, actions=actions, max_new_tokens=rest["max_new_tokens"], do_sample=False, pad_token_id=0)
        calls.append((ids, made))
        return made

    loaded.generate = greedy
    timed = measure.time_generate(
        loaded, Workload("generate", 1, "start", 1, 1, 1), 0, prompt_maker(engine.spec, None), None
    )
    ids, made = calls[0]
    assert len(timed["seconds"]) == 1
    assert torch.equal(made[0, ids.shape[1] :], expected)


@pytest.mark.parametrize("way", ["run", "step"])
def test_rollouts_are_timed_together(persistence_engine, way):
    make_prompt = prompt_maker(persistence_engine.spec, None)
    workload = Workload(way, 3, "start", 2, 3, 1)
    timed = asyncio.run(measure.time_rollouts(persistence_engine, workload, 0, make_prompt))
    assert len(timed["seconds"]) == 3
    assert timed["first"] > 0


def test_passes_are_reported_by_the_tokens_that_they_gave(tiny_model):
    engine = JacobiEngine(tiny_model, drafts=9)
    workload = Workload("run", 1, "start", 2, 3, 1)
    timed = asyncio.run(measure.time_rollouts(engine, workload, 0, prompt_maker(engine.spec, None)))
    assert sum(tokens * count for tokens, count in enumerate(timed["passes"])) == 3 * engine.spec.layout.image_tokens

    row = {"label": "it", "way": "run", "window_part": "end", "rollouts": 1, "drafts": 9}
    table = report._passes_table([row | {"passes": [0, 6, 0, 1, 1, 0, 0, 0, 2]}], 29)
    cells = {column.header: next(iter(column.cells)) for column in table.columns}
    filled = {name: cell for name, cell in cells.items() if name in report._BINS and cell}
    assert filled == {"1": "60%", "3-4": "20%", "5-8": "20%"}
    assert (cells["tokens a pass"], cells["passes a frame"]) == ("2.9", "10.0")


def make_drive(path, layout, **changes):
    tokens = torch.arange(20 * layout.image_tokens).reshape(20, 3, -1) % 50
    drive = {"tokens": tokens, "actions": torch.randn(19, layout.action_slots, 3)} | changes
    save_file(drive, path)
    return drive


def test_prompts_are_pieces_of_a_drive(model, tmp_path):
    spec = EngineSpec.of(load_config(model))
    drive = make_drive(tmp_path / "tokens.safetensors", spec.layout)
    make_prompt = prompt_maker(spec, tmp_path / "tokens.safetensors")
    firsts = set()
    for seed in range(20):
        prompt, actions = make_prompt(3, 4, seed)
        (first,) = (i for i in range(14) if torch.equal(drive["tokens"][i : i + 3], prompt.tokens))
        assert torch.equal(torch.cat([prompt.actions, actions]), drive["actions"][first : first + 6])
        firsts.add(first)
    assert len(firsts) > 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.zeros(20, 3, 5, dtype=torch.int64)}, "expected frames of 12 ids below 64"),
        ({"tokens": torch.full((20, 3, 4), 64)}, "expected frames of 12 ids below 64"),
        ({"tokens": torch.zeros(7, 3, 4, dtype=torch.int64)}, "expected 8 frames or more, got 7"),
        ({"actions": torch.zeros(3, 6, 3)}, "expected tokens and an action"),
    ],
)
def test_drives_that_do_not_fit(model, tmp_path, changes, message):
    path = tmp_path / "tokens.safetensors"
    spec = EngineSpec.of(load_config(model))
    make_drive(path, spec.layout, **changes)
    with pytest.raises(ConfigError, match=message):
        prompt_maker(spec, path)


def test_files_that_are_no_drive(model, tmp_path):
    (tmp_path / "text").write_text("text")
    for path in (tmp_path / "none", tmp_path / "text"):
        with pytest.raises(ConfigError, match=r"drive: expected a rollout's tokens\.safetensors, got"):
            run.benchmark(settings(model, tmp_path / "out", drive=str(path)))
    assert not (tmp_path / "out" / "results").exists()


def test_speedups_compare_equal_numbers_of_rollouts_and_warm_passes():
    def row(case: str, rollouts: int, frames_per_second: float) -> dict[str, Any]:
        about = {"case": case, "window_part": "end", "rollouts": rollouts}
        return about | {"frames_per_second": frames_per_second, "speedup": {}}

    rows = [row("hf_generate", 1, 0.5), row("hf_generate", 1, 2.0), row("graph", 1, 8.0), row("graph", 64, 100.0)]
    report.add_speedups(rows)
    assert rows[2]["speedup"]["hf_generate"] == 4.0
    assert rows[3]["speedup"]["hf_generate"] is None


@pytest.mark.slow
def test_a_run_reports_and_goes_on(model, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_run_process", in_process)
    text = run.benchmark(settings(model, tmp_path))
    assert "Hugging Face generate" in text
    assert "timed for 4 of 12 tokens" in text
    assert (tmp_path / "benchmark.png").stat().st_size > 0
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert len(report["rows"]) == 8
    baselines = [row for row in report["rows"] if row["case"] == "hf_generate"]
    assert [row["way"] for row in baselines] == 2 * ["generate"] + 2 * ["generate_again"]
    assert [row["seconds_per_frame"]["count"] for row in baselines] == [2, 2, 4, 4]
    session = next(row for row in report["rows"] if row["case"] == "hf")
    baseline = next(
        row for row in baselines if (row["way"], row["window_part"]) == ("generate_again", session["window_part"])
    )
    assert session["seconds_per_frame"]["count"] == 4
    assert session["speedup"]["hf_generate"] == pytest.approx(
        baseline["seconds_per_frame"]["median"] / session["seconds_per_frame"]["median"]
    )
    assert session["roofline_share"] == pytest.approx(
        session["frame_bytes"]
        / max(report["bandwidth"][kind]["median"] for kind in ("read", "copy"))
        / session["seconds_per_frame"]["median"]
    )

    def never(*_):
        raise AssertionError("everything is measured already")

    monkeypatch.setattr(run, "_run_process", never)
    assert run.benchmark(settings(model, tmp_path)) == text
    with pytest.raises(ConfigError, match=r"another plan \(differing: baseline_tokens\)"):
        run.benchmark(settings(model, tmp_path, baseline_tokens=5))
    with pytest.raises(ConfigError, match=r"another plan \(differing: hf\)"):
        run.benchmark(settings(model, tmp_path, cases=["hf"], repeats=5))


def test_a_case_that_fails_loses_only_itself(model, tmp_path, monkeypatch):
    seen = []

    def broken(folder, name, limit):
        seen.append(name)
        if name == "hf_generate":
            return "exit code 1: out of memory"
        return in_process(folder, name, limit)

    monkeypatch.setattr(run, "_run_process", broken)
    text = run.benchmark(settings(model, tmp_path))
    assert seen == ["bandwidth", "hf_generate", "hf", "jacobi"]
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert {row["case"] for row in report["rows"]} == {"hf", "jacobi"}
    assert report["failures"] == dict.fromkeys(
        [f"hf_generate__{way}_1_{part}" for way in ("generate", "generate_again") for part in ("start", "end")],
        "exit code 1: out of memory",
    )
    assert "not measured: hf_generate__generate_1_end: exit code 1: out of memory" in text


def test_a_workload_that_fails_is_left_out_and_the_next_is_tried(model, tmp_path, monkeypatch):
    def first_only(folder, name, limit):
        plan = json.loads((folder / "plan.json").read_text())
        if name == "bandwidth":
            return in_process(folder, name, limit)
        names = [f"{w['way']}_{w['rollouts']}_{w['window_part']}" for w in plan["cases"][0]["workloads"]]
        done = [w for w in names if case.result_path(folder, name, w).exists()]
        case.write_json(
            case.result_path(folder, name, names[2] if done else names[0]),
            {"repeats": [{"seconds": [1.0], "first": 1.0}]},
        )
        return "took more than 1 s"

    monkeypatch.setattr(run, "_run_process", first_only)
    run.benchmark(settings(model, tmp_path, cases=["hf", "vllm"], rollouts=[1]) | {"cases": ["vllm"]})
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert [(row["way"], row["window_part"]) for row in report["rows"]] == [("run", "start"), ("step", "start")]
    assert set(report["failures"]) == {"vllm__run_1_end", "vllm__step_1_end"}


def test_no_time_left_is_said(model, tmp_path):
    text = run.benchmark(settings(model, tmp_path, max_seconds=0.0))
    assert "not measured: hf__run_1_end: no time was left" in text


def test_a_process_that_ends_early_or_late_says_why(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    assert "took more than 0 s" in run._run_process(tmp_path, "vllm", 0.01)
    assert run._run_process(tmp_path / "elsewhere", "vllm", 60.0).startswith("exit code 1: FileNotFoundError")


def test_equal_measurements_are_drawn(model, tmp_path, monkeypatch):
    def equal(folder, name, limit):
        if name == "bandwidth":
            return in_process(folder, name, limit)
        for part in ("start", "end"):
            result = {"repeats": [{"seconds": [0.1, 0.1, 0.1], "first": 0.1}] * 3}
            case.write_json(case.result_path(folder, name, f"run_1_{part}"), result)
        return ""

    monkeypatch.setattr(run, "_run_process", equal)
    run.benchmark(settings(model, tmp_path, cases=["hf"]))
    assert (tmp_path / "benchmark.png").exists()


def test_passes_are_timed_with_other_constants(tmp_path, monkeypatch, capsys):
    script, seen = load_script("pass_benchmark"), []
    gemm = importlib.import_module("terra.engine.graph.kernels.gemm")
    launched = DecodeSteps.run

    def noted(self, slots, samplings, num_steps):
        seen.append((gemm._WARPS, gemm._LM_HEAD.stages))
        launched(self, slots, samplings, num_steps)

    monkeypatch.setattr(DecodeSteps, "run", noted)
    command = ["x", "--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--rollouts", "2", "--drafts", "1"]
    command += ["--contexts", "1", "3", "--rounds", "2", "--passes", "3", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--try", "gemm._WARPS=8 gemm._LM_HEAD.stages=3"])
    script.main()
    assert seen == 2 * [*3 * [(4, 4)], *3 * [(8, 3)], *3 * [(4, 4)]]
    assert "gemm._WARPS=8" in capsys.readouterr().out
    for change, words in (
        (["--try", "gemm._NOTHING=3"], "expected MODULE.CONSTANT=NUMBER"),
        (["--contexts", "99"], "contexts: expected 1 to 7 frames"),
        (["--device", "nonsense"], "device: expected"),
    ):
        monkeypatch.setattr(sys, "argv", [*command, *change])
        with pytest.raises(SystemExit) as exit_info:
            script.main()
        assert exit_info.value.code == 2
        assert words in capsys.readouterr().err


def test_gaps_of_a_trace_are_between_all_that_came_before_and_what_comes_next():
    found = idle(
        Kernel("", *span)
        for span in [(5000.0, 6000.0), (0.0, 3000.0), (1000.0, 1500.0), (2000.0, 4000.0), (6250.0, 7000.0)]
    )
    assert found == {"total_ms": 7.0, "idle_ms": 1.25, "longest_ms": 1.0}
    assert idle([Kernel("", 3.0, 4.0)])["longest_ms"] == 0.0


def test_what_each_step_adds_to_a_layer_and_to_a_pass(tmp_path):
    layer = {"_attend": 5, "_combine": 2, "_gemm": 4, "_add_rms_norm": 3}
    behind = [("_gemm", 9), ("_gemm", 6), ("_add_rms_norm", 3)]
    qkv = [("_gemm", 7), ("_rope_and_store", 2)]
    once = [("_embed", 1), ("_add_rms_norm", 1)]
    for _ in range(3):
        once += [*qkv, *layer.items(), *behind]
    once += [("gemv", 50), ("_gumbel_argmax", 20), ("_accept", 1)]
    trace, until = [], 100.0
    for name, adds in 4 * once:
        # Begun before the one ahead was done, or behind a gap.
        trace.append(Kernel(name, until + (0.5 if name == "_combine" else -0.25), until + adds))
        until += adds
    of_layer, of_pass = added(reversed(trace))
    assert of_layer == {
        "attention": 5, "combine partials": 2, "output": 4, "sum and norm": 6, "gate and up": 9,
        "down": 6, "qkv": 7, "rope": 2,
    }  # fmt: skip
    inside = 3 * sum(of_layer.values()) - 9
    assert of_pass == {
        "layers": inside, "lm head": 50, "sampling": 20, "the rest": pytest.approx(12, abs=0.1)
    }  # fmt: skip
    assert sum(of_pass.values()) == pytest.approx((until - 100.0) / 4, abs=0.1)
    draw = load_script("pass_profile").draw
    draw({name: {"layer": of_layer, "pass": of_pass} for name in ("one", "many")}, tmp_path / "profile.png")
    assert iio.imread(tmp_path / "profile.png").shape[1] == 1100


@pytest.mark.parametrize("script", ["idle_trace", "pass_profile"])
def test_a_trace_needs_a_gpu(monkeypatch, capsys, script):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    with pytest.raises(SystemExit) as exit_info:
        load_script(script).main()
    assert exit_info.value.code == 2
    assert "expected a CUDA GPU, found none" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["nonsense", "7", None])
def test_a_profile_finds_out_first_where_it_can_not_be_written(tmp_path, monkeypatch, capsys, content):
    report = tmp_path / "profile.json"
    report.mkdir() if content is None else report.write_text(content)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["x", "--report", str(report)])
    with pytest.raises(SystemExit) as exit_info:
        load_script("pass_profile").main()
    assert exit_info.value.code == 2
    assert f"--report: expected a JSON file that can be written, got {report}" in capsys.readouterr().err
    assert content is None or report.read_text().strip() == content


@pytest.mark.slow
def test_the_tokenizers_frames_a_second(monkeypatch, capsys, tmp_path):
    script, output = load_script("tokenizer_benchmark"), tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["x", "--frames", "1", "2", "--rounds", "1", "--output", str(output)])
    script.main()
    rows = json.loads(output.read_text())
    assert [(row["dtype"], row["frames"]) for row in rows] == [(a, n) for a in ("float32", "bfloat16") for n in (1, 2)]
    assert all(row["encoded"]["median"] > 0 and row["decoded"]["median"] > 0 for row in rows)
    assert [row["db"] for row in rows[:2]] == [None, None]  # float32 is what it is compared with
    assert all(row["same"] == 1.0 for row in rows[:2])
    assert all(0.8 < row["same"] < 1.0 and row["db"] > 40.0 for row in rows[2:])
    assert "bfloat16" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["x", "--tokenizer", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_info:
        script.main()
    assert exit_info.value.code == 2
    assert "config.json" in capsys.readouterr().err
