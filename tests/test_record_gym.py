import re
import subprocess
import sys

import numpy as np
import pytest
from entry import read_settings

from terra.actions import Choice, Keys, Vector
from terra.dataset import episode_state, read_frames, read_split
from terra.dataset.tables import write_state
from terra.dataset.verify import verify_dataset
from terra.errors import ConfigError, DatasetError
from terra.recording.run import run

pytestmark = pytest.mark.slow


def record(output, env: str, *more: str) -> int:
    given = [f"output={output}", "source=gym", f"env=tiny_gym:{env}", "seeds=2", "episodes_per_place=2"]
    return run(read_settings("record", [*given, "image_size=[32,48]", "frames_per_episode=4", "workers=0", *more]))


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("env", "space"),
    [
        ("Pad-v0", Choice(names=["NOOP", "FIRE", "LEFT"])),
        ("Keys-v0", Keys(names=[f"action_{index}" for index in range(4)])),
        (
            "Arm-v0",
            Vector(names=["action_0", "action_1"], units=["", ""], low=[-0.1, 0.0], high=[0.3, 2.0]),
        ),
    ],
)
def test_each_kind_of_actions_is_recorded_with_its_state(tmp_path, env, space):
    assert record(tmp_path, env) == 0
    assert verify_dataset(tmp_path) == ()
    episodes = read_split(tmp_path, "train").episodes
    assert [each.id for each in episodes] == [f"{env}_00000{place}_0{number}" for place in (0, 1) for number in (0, 1)]
    for episode in episodes:
        assert (type(episode.space), episode.space.names) == (type(space), space.names)
        assert (episode.num_frames, episode.fps) == (4, 20.0)
        assert episode.actions is not None
        state = episode_state(episode)
        assert list(state) == ["reward", "terminated", "observation_0", "observation_1"]
        np.testing.assert_array_equal(state["reward"], [0, 0.5, 1, 1.5])
        np.testing.assert_array_equal(state["observation_0"], range(4))
        # Frame k + 1 shows what the action of frame k did.
        np.testing.assert_allclose(read_frames(episode).mean(axis=(1, 2))[:, 0], [0, 50, 100, 150], atol=5)
        done = episode.actions[:-1].sum(axis=1) + (1 if isinstance(space, Choice) else 0)
        np.testing.assert_allclose(state["observation_1"][1:], done, rtol=1e-6)
        np.testing.assert_array_equal(episode.actions[-1], space.neutral)
    if isinstance(space, Vector):
        assert isinstance(episodes[0].space, Vector)
        np.testing.assert_allclose(episodes[0].space.high, space.high, rtol=1e-6)


def test_a_recording_goes_on_and_changes_no_byte(tmp_path):
    assert record(tmp_path / "whole", "Pad-v0", "policy=sticky", "workers=2") == 0
    for more in (("seed=1", "seeds=1"), (), ()):
        assert record(tmp_path / "parts", "Pad-v0", "policy=sticky", *more) == 0
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")
    with pytest.raises(DatasetError, match="expected a shard made by"):
        record(tmp_path / "whole", "Pad-v0", "policy=random")


def test_splits_have_different_seeds_and_an_episode_ends_where_the_environment_says(tmp_path):
    assert record(tmp_path, "Keys-v0", "frames_per_episode=30") == 0
    assert record(tmp_path, "Keys-v0", "split=held_out", "frames_per_episode=30", "env_options={steps:9}") == 0
    green = []
    for split, length in (("train", 6), ("held_out", 10)):
        for episode in read_split(tmp_path, split).episodes:
            assert episode.num_frames == length
            np.testing.assert_array_equal(episode_state(episode)["terminated"], [0.0] * (length - 1) + [1.0])
            green.append(int(episode.place) * 100 + int(episode.id[-2:]))
    assert green == [0, 1, 100, 101, 90_000_000, 90_000_001, 90_000_100, 90_000_101]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("after", ["whole", "black", "error", "none", "gray"])
def test_no_picture_is_kept_that_the_environment_does_not_have_after_its_end(tmp_path, caplog, after, cut):
    caplog.set_level("INFO")
    assert (
        record(tmp_path, "Keys-v0", "frames_per_episode=30", f"env_options={{after:{after},cut:{str(cut).lower()}}}")
        == 0
    )
    assert verify_dataset(tmp_path) == ()
    length = 6 if after == "whole" else 5
    for episode in read_split(tmp_path, "train").episodes:
        frames, state = read_frames(episode), episode_state(episode)
        assert len(frames) == episode.num_frames == length
        assert episode.actions is not None
        assert len(episode.actions) == length
        assert (frames[:, -4:, -4:] > 200).all()  # the white corner
        np.testing.assert_allclose(frames[:, :4, :4].mean(axis=(1, 2))[:, 0], np.arange(length) * 50, atol=8)
        np.testing.assert_array_equal(state["observation_0"], range(length))
        np.testing.assert_array_equal(episode.actions[-1], 0)
        assert state["terminated"].sum() == (after == "whole" and not cut)
    assert caplog.text.count("the last step of 2 of 2 episodes is left out") == (0 if after == "whole" else 2)


def test_an_episode_without_a_picture_after_its_first_step_is_one_frame(tmp_path):
    assert record(tmp_path, "Keys-v0", "env_options={steps:1,after:black}") == 0
    assert verify_dataset(tmp_path) == ()
    assert [each.num_frames for each in read_split(tmp_path, "train").episodes] == [1] * 4


def test_a_picture_of_one_color_is_kept_where_all_are_so(tmp_path):
    assert record(tmp_path, "Keys-v0", "frames_per_episode=30") == 0
    assert [each.num_frames for each in read_split(tmp_path, "train").episodes] == [6] * 4


def test_a_rate_that_nothing_tells_is_said_and_overruled(tmp_path, caplog):
    caplog.set_level("INFO")
    assert record(tmp_path / "a", "Pad-v0") == 0
    assert "tiny_gym:Pad-v0: 20 frames/s, as render_fps=20 says. That is the rate of showing" in caplog.text
    assert "fps= sets another" in caplog.text
    caplog.clear()
    assert record(tmp_path / "b", "Pad-v0", "fps=7") == 0
    assert "frames/s, as" not in caplog.text
    assert {each.fps for each in read_split(tmp_path / "b", "train").episodes} == {7.0}


def test_a_policy_of_ones_own_and_a_declared_range(tmp_path):
    names = "action_names=[wait,shoot,go]"
    assert record(tmp_path / "a", "Pad-v0", "policy=tiny_gym:always_last", names, "fps=5") == 0
    episode = read_split(tmp_path / "a", "train").episodes[0]
    assert episode.space.names == ("wait", "shoot", "go")
    assert episode.fps == 5.0
    np.testing.assert_array_equal(episode.actions[:-1], 2.0)
    declared = "action_space={kind:vector,names:[x,y],units:[m,''],low:[-3,0],high:[-2,1]}"
    assert record(tmp_path / "b", "Endless-v0", declared) == 0
    actions = np.concatenate([each.actions[:-1] for each in read_split(tmp_path / "b", "train").episodes])
    assert (actions[:, 0] <= -2).all()
    assert len(np.unique(actions[:, 0])) > 5


def test_sticky_actions_last(tmp_path):
    changes = {}
    for policy in ("random", "sticky"):
        more = (f"policy={policy}", "frames_per_episode=41", "env_options={steps:100}")
        assert record(tmp_path / policy, "Arm-v0", *more) == 0
        episodes = read_split(tmp_path / policy, "train").episodes
        changes[policy] = np.mean([np.diff(each.actions[:-1, 0]) != 0 for each in episodes])
    assert changes["random"] == 1.0
    assert 0.02 < changes["sticky"] < 0.3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["env=Nowhere-v0"], "env=Nowhere-v0: expected an environment that can be made, got NameNotFound: "),
        (["env=no_such_module:A-v0"], "got ModuleNotFoundError: No module named .no_such_module"),
        (["env=null"], "env: expected the id of a Gymnasium environment, such as CartPole-v1, got null"),
        (
            ["env=tiny_gym:Endless-v0"],
            "expected finite bounds of actions, got Box.*; declare a range with",
        ),
        (["env=tiny_gym:Grid-v0"], r"expected actions of Discrete, MultiBinary or .*, got MultiDiscrete\(\[2 3\]\)"),
        (["env_options={speed:3}"], "expected an environment that can be made, got TypeError: .*'speed'"),
        (["env_options={gray:true}"], r"expected pictures of uint8 \(height, width, 3\).*, got uint8 \(48, 64\)"),
        (["policy=walk"], "policy: expected random, sticky or package.module:function, got 'walk'"),
        (
            ["policy=tiny_gym:walk"],
            "policy=tiny_gym:walk: expected a function that can be imported, got Attr",
        ),
        (["policy=tiny_gym:SPACES"], "policy=tiny_gym:SPACES: expected a function, got dict"),
        (["action_names=[a,b]"], r"action_names: expected 3, one for each action of Discrete\(3, start=1\), got 2"),
        (["action_names=[a,b,'c d']"], r"names\[2\]: expected a name: a letter, then up to 63"),
        (["action_space={kind:keys,names:[a]}"], "action_space: expected a choice of 3, as Discrete.*, got keys of a"),
        (["towns=3"], "towns: expected none with source=gym, got 3"),
        (["source=town"], "seeds: expected none with source=town, got 2"),
        (["kind=counterfactuals"], "kind: expected drives with source=gym, got counterfactuals"),
        (["env_options={rate:null}"], "fps: env=tiny_gym:Pad-v0 has steps by render_fps=None; fps=: expected a number"),
        (["env_options={rate:125}"], "has steps by render_fps=125; fps=: expected a number from 1 to 100, got 125"),
        (["fps=1000"], "fps: expected a number from 1 to 100 or null, got 1000"),
        (["seeds=0"], "seeds: expected"),
    ],
)
def test_what_cannot_be_recorded_is_one_line(tmp_path, more, message):
    with pytest.raises(ConfigError, match=message) as error:
        record(tmp_path / "out", "Pad-v0", *more)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["env_options={fails:true}"], "Pad-v0: expected a step, got RuntimeError: the cart fell off"),
        (
            ["policy=tiny_gym:too_great"],
            "expected of the policy an action of Disc.*: action: expected 0 to 2, got 16",
        ),
        (["policy=tiny_gym:broken"], "expected an action of the policy, got ValueError: no idea"),
    ],
)
def test_an_environment_that_fails_leaves_nothing_half_written(tmp_path, caplog, more, message):
    assert record(tmp_path, "Pad-v0", *more) == 2
    assert caplog.text.count("failed: ") == 2
    assert re.search(message, caplog.text)
    assert not list((tmp_path / "train").iterdir())


def test_a_state_may_be_infinite_and_a_damaged_one_is_named(tmp_path):
    assert record(tmp_path, "Pad-v0") == 0
    episode = read_split(tmp_path, "train").episodes[0]
    path = episode.video.parent / "state.parquet"
    write_state(path, {episode.id: {"reward": np.array([np.inf])}})
    with pytest.raises(DatasetError, match="expected the file with SHA-256"):
        episode_state(episode)
    path.unlink()
    with pytest.raises(DatasetError, match="got no file: its source tells none"):
        episode_state(episode)


def test_a_missing_gymnasium_is_one_line(tmp_path):

    code = "import sys; sys.modules['gymnasium'] = None\nfrom terra.cli import main\nmain()"
    command = [sys.executable, "-c", code, "record", "source=gym", "env=CartPole-v1", f"output={tmp_path}/out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert 'needs the package gymnasium: pip install "terra-world-model[gym]"' in done.stderr.replace("\n", " ")
