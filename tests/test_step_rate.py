"""The steps a second of environments: by what each family tells of its clock, else by render_fps."""

import importlib.util
import sys
import types

import gymnasium
import pytest
from gymnasium import spaces
from gymnasium.wrappers import MaxAndSkipObservation, TimeLimit

from terra.recording.step_rate import step_rate

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """VizDoom writes its settings to the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("package", "name", "options", "rate"),
    [
        ("pygame", "CartPole-v1", {}, 50),
        ("pygame", "Pendulum-v1", {}, 20),  # render_fps is 30
        ("pygame", "Acrobot-v1", {}, 5),  # render_fps is 15
        ("Box2D", "LunarLander-v3", {}, 50),
        ("mujoco", "Hopper-v5", {}, 125),
        ("mujoco", "Humanoid-v5", {}, 1 / 0.015),  # render_fps is 67
        ("mujoco", "Hopper-v5", {"frame_skip": 5}, 100),
        ("ale_py", "ale_py:ALE/Pong-v5", {}, 15),  # render_fps is 30
        ("ale_py", "ale_py:ALE/Pong-v5", {"frameskip": 1}, 60),
        ("ale_py", "ale_py:ALE/Pong-v5", {"frameskip": (2, 5)}, 20),
        ("highway_env", "highway_env:highway-v0", {}, 1),  # render_fps is 2
        ("highway_env", "highway_env:highway-v0", {"config": {"policy_frequency": 2}}, 15 / 7),
        ("highway_env", "highway_env:parking-v0", {}, 5),  # render_fps is 10
        ("vizdoom", "vizdoom.gymnasium_wrapper:VizdoomBasic-v1", {}, 35),
        ("vizdoom", "vizdoom.gymnasium_wrapper:VizdoomBasic-v1", {"frame_skip": 4}, 8.75),  # render_fps is 35
        ("vizdoom", "terra.recording.doom:Doom-v0", {"frame_skip": 5}, 7),
    ],
)
def test_the_rate_of_real_environments(package, name, options, rate):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    env = gymnasium.make(name, render_mode="rgb_array", disable_env_checker=True, **options)
    told = step_rate(env)
    env.close()
    assert told.is_known
    assert told.per_second == pytest.approx(rate)


@pytest.mark.skipif(importlib.util.find_spec("vizdoom") is None, reason="needs the package vizdoom")
def test_vizdoom_takes_as_many_tics_as_its_rate_says():
    env = gymnasium.make("vizdoom.gymnasium_wrapper:VizdoomBasic-v1", render_mode="rgb_array", frame_skip=4)
    env.reset(seed=0)
    game = env.unwrapped.game
    before = game.get_episode_time()
    for _ in range(5):
        env.step(0)
    tics = (game.get_episode_time() - before) / 5
    assert step_rate(env).per_second == pytest.approx(35 / tics)
    env.close()


class Still(gymnasium.Env):
    """Does nothing; `attributes` are its own, and `metadata` as a package declares it."""

    action_space = observation_space = spaces.Discrete(2)

    def __init__(self, shown=30, **attributes):
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": shown}
        vars(self).update(attributes)


def of_package(module: str, **attributes) -> gymnasium.Env:
    """An environment whose class derives from one of a package that may not be installed."""
    base = type("Theirs", (Still,), {"__module__": module})
    return type("Mine", (base,), {"__module__": "my_package"})(**attributes)


@pytest.mark.parametrize(
    ("env", "rate"),
    [
        (of_package("highway_env.envs.common", shown=2, config={"simulation_frequency": 15, "policy_frequency": 1}), 1),
        (of_package("highway_env.envs.common", config={"simulation_frequency": 15, "policy_frequency": 4}), 5),
        (of_package("ale_py.env", _frameskip=4), 15),
        (of_package("ale_py.env", _frameskip=(2, 5)), 20),
        (of_package("gymnasium.envs.mujoco.mujoco_env", shown=67, dt=0.015), 1 / 0.015),
        (of_package("gymnasium_robotics.envs.robot_env", dt=0.04), 25),
        (of_package("anything.at_all", shown=60, dt=0.01, control_hz=10), 10),
    ],
)
def test_the_rate_of_families(env, rate):
    told = step_rate(TimeLimit(env, 10))
    assert told.is_known
    assert told.per_second == pytest.approx(rate)


def test_the_rate_of_box2d_is_its_modules(monkeypatch):
    module = types.ModuleType("gymnasium.envs.box2d.mine")
    module.FPS = 40
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert step_rate(type("Mine", (Still,), {"__module__": module.__name__})()).per_second == 40


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (of_package("anything.at_all", dt=0.01, frame_skip=4), "render_fps=30 (it has frame_skip=4, dt=0.01)"),
        (of_package("highway_env.envs", config={}), "render_fps=30"),
        (of_package("highway_env.envs", config={"simulation_frequency": 15, "policy_frequency": 20}), "render_fps=30"),
        (of_package("ale_py.env", _frameskip="4"), "render_fps=30"),
        (of_package("gymnasium.envs.mujoco.mujoco_env", dt=0.0), "render_fps=30 (it has dt=0.0)"),
        (of_package("gymnasium.envs.classic_control.mountain_car"), "render_fps=30"),
        (of_package("highway_environment"), "render_fps=30"),
    ],
)
def test_a_rate_that_nothing_tells_is_render_fps(env, words):
    told = step_rate(env)
    assert not told.is_known
    assert (told.per_second, told.told_by) == (30, words)


def test_no_rate_at_all():
    told = step_rate(Still(shown=None))
    assert (told.per_second, told.told_by, told.is_known) == (None, "render_fps=None", False)


def test_wrappers_that_repeat_an_action_make_one_step_of_several():
    known = step_rate(MaxAndSkipObservation(TimeLimit(of_package("ale_py.env", _frameskip=1), 10), skip=4))
    assert known.per_second == 15
    assert known.told_by.endswith("4 of which a wrapper makes one")
    assert step_rate(MaxAndSkipObservation(Still(), skip=3)).per_second == 10
    twice = MaxAndSkipObservation(MaxAndSkipObservation(Still(shown=None), skip=3), skip=2)
    assert step_rate(twice).per_second is None
