"""The comparison on PushT at a small size: LeWM's trainer, its batched cost, and stable-worldmodel's evaluation."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from entry import read_settings

from terra.errors import ConfigError

if importlib.util.find_spec("stable_worldmodel") is None:
    pytest.skip("needs the package stable_worldmodel", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SIZES = "image=32,patch=16,width=16,layers=1,depth=1,mlp=16"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "scripts")


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    from terra.recording.run import run

    folder = tmp_path_factory.mktemp("pusht")
    for split in ("train", "held_out"):
        given = [f"output={folder}", "source=gym", "env=terra.recording.pusht:PushT-v0", f"split={split}", "seeds=2"]
        more = ["episodes_per_place=1", "frames_per_episode=40", "image_size=[32,32]", "workers=0"]
        assert run(read_settings("record", [*given, *more, "policy=terra.recording.pusht.players:expert"])) == 0
    return folder


def call(monkeypatch, module: str, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [module, *map(str, arguments)])
    importlib.import_module(module).main()


def test_lewm_is_trained_and_evaluated_beside_doing_nothing(recording, tmp_path, monkeypatch, capsys):
    where = ("--data", recording, "--device", "cpu")
    call(
        monkeypatch,
        "pusht_lewm",
        *(*where, "--output", tmp_path / "lewm", "--sizes", SIZES),
        *("--max-seconds", 1, "--batch-size", 4, "--workers", 0),
    )
    small = ("--pairs", 3, "--pairs-at-once", 2, "--candidates", 4, "--iterations", 2)
    for policy in ("lewm", "still"):
        output = ("--output", tmp_path / f"{policy}.json", "--model", tmp_path / "lewm")
        call(monkeypatch, "pusht_evaluate", *where, "--policy", policy, *output, *small)
    results = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("lewm", "still")]
    assert results[0]["pairs"] == results[1]["pairs"]
    assert [len(result[name]) for result in results for name in ("pairs", "successes")] == [3] * 4
    assert 3 <= results[0]["plans"] <= 6
    assert results[0]["seconds_a_plan"] > 0
    stopped = {**results[1], "successes": [True] * 2, "pairs": results[1]["pairs"][:2], "plans": 7}
    (tmp_path / "still.json").write_text(json.dumps(stopped))
    call(monkeypatch, "pusht_evaluate", *where, "--policy", "still", *output, *small)
    goes_on = json.loads((tmp_path / "still.json").read_text())
    assert goes_on["successes"] == [True, True, results[1]["successes"][2]]
    assert goes_on["plans"] == 7
    assert goes_on["pairs"] == results[1]["pairs"]
    with pytest.raises(ConfigError, match=r"still\.json: expected the result of a call with these settings"):
        call(monkeypatch, "pusht_evaluate", *where, "--policy", "random", *output, *small)
    for part in (1, 2):
        output = ("--output", tmp_path / f"part{part}.json", "--part", f"{part}/2")
        call(monkeypatch, "pusht_evaluate", *where, "--policy", "still", *output, *small)
    parts, joined = [tmp_path / f"part{part}.json" for part in (2, 1)], tmp_path / "joined.json"
    call(monkeypatch, "pusht_evaluate", "--join", *parts, "--output", joined)
    for name in ("pairs", "successes"):
        assert json.loads(joined.read_text())[name] == results[1][name]
    with pytest.raises(ConfigError, match="expected each pair once"):
        call(monkeypatch, "pusht_evaluate", "--join", parts[0], parts[0], "--output", joined)
    with pytest.raises(ConfigError, match=r"lewm\.json: expected the settings of .*part2\.json"):
        call(monkeypatch, "pusht_evaluate", "--join", parts[0], tmp_path / "lewm.json", "--output", joined)
    with pytest.raises(ConfigError, match="expected K/N with K from 1 to N, got '3/2'"):
        call(monkeypatch, "pusht_evaluate", *where, "--policy", "still", *output[:2], "--part", "3/2", *small)
    call(monkeypatch, "pusht_evaluate", "--compare", tmp_path / "lewm.json", joined)
    assert "'difference':" in capsys.readouterr().out


def test_the_time_of_steps_with_a_plan_is_noted(monkeypatch):
    import pusht_evaluate

    class Fake:
        num_plans = 0

        def set_env(self, env):
            self.envs = env

        def get_action(self, info_dict, **kwargs):
            self.num_plans += info_dict["plans"]

    clock = iter(range(0, 1000, 3))  # seconds
    monkeypatch.setattr(pusht_evaluate, "perf_counter", lambda: next(clock))
    timed = pusht_evaluate.Timed(Fake())
    timed.set_env("envs")
    for plans in (2, 0, 0, 1):
        timed.get_action({"plans": plans})
    assert timed.num_plans == 3
    assert timed.seconds == 6


@pytest.mark.parametrize("execute", [25, 15])
def test_lewm_plans_every_so_many_steps_where_an_episode_goes_on(execute):
    from pusht_evaluate import LewmPolicy

    class Fake:
        def set_env(self, env):
            pass

        def get_action(self, info_dict, **kwargs):
            return np.zeros((3, 2))

    policy = LewmPolicy(Fake(), execute)
    for ended in ([False, False, False], [True, False, True]):
        for _ in range(execute):
            policy.get_action({"terminated": np.array(ended)})
    assert policy.num_plans == 3 + 1
    policy.set_env(None)
    policy.get_action({})
    assert policy.num_plans == 3 + 1 + 3


def test_a_problem_costs_the_same_in_company():
    from pusht_evaluate import _Batched
    from pusht_lewm import build_lewm

    torch.manual_seed(0)
    model = build_lewm({"image": 32, "patch": 16, "width": 16, "layers": 1, "heads": 2, "depth": 1, "mlp": 16}).eval()
    pictures, goals = torch.randn(2, 1, 3, 32, 32), torch.randn(2, 1, 3, 32, 32)
    candidates = torch.randn(2, 4, 5, 10)

    def facts(these: slice):
        given = {"pixels": pictures[these], "goal": goals[these], "action": torch.zeros(2, 1, 2)[these]}
        return {name: each[:, None].expand(-1, 4, *each.shape[1:]) for name, each in given.items()}

    with torch.no_grad():
        together = _Batched(model).get_cost(facts(slice(0, 2)), candidates)
        alone = [model.get_cost(facts(slice(k, k + 1)), candidates[k : k + 1]) for k in range(2)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_pairs_are_starts_of_held_out_episodes_and_their_pictures_are_drawn(recording):
    from pusht_evaluate import GOAL_OFFSET, PairsDataset, draw_pairs

    from terra.dataset import episode_state

    def named(pairs):
        return [(pair.episode.id, pair.start) for pair in pairs]

    pairs = draw_pairs(recording, 5)
    assert named(pairs) == named(draw_pairs(recording, 5)) != named(draw_pairs(recording, 5, seed=1))
    for pair in pairs:
        assert pair.episode.split == "held_out"
        assert 0 <= pair.start < pair.episode.num_frames - GOAL_OFFSET
    start = np.array([pairs[0].start])
    (chunk,) = PairsDataset(pairs).load_chunk(np.array([0]), start, start + GOAL_OFFSET + 1)
    assert chunk["pixels"].shape == (GOAL_OFFSET + 1, 3, 224, 224)
    state = episode_state(pairs[0].episode)
    assert chunk["state"][-1, 0] == state["agent_x"][pairs[0].start + GOAL_OFFSET]
