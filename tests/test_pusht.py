"""PushT as an environment to record, and its players; needs the extra pusht."""

import importlib.util
import warnings

import numpy as np
import pytest
from entry import read_settings

if importlib.util.find_spec("stable_worldmodel") is None:
    pytest.skip("needs the package stable_worldmodel", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def pusht():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import gymnasium

        env = gymnasium.make("terra.recording.pusht:PushT-v0", render_mode="rgb_array", disable_env_checker=True)
        yield env
        env.close()


def play(env, policy: str, seed: int, steps: int) -> np.ndarray:
    from terra.recording.pusht import players

    rng, observation = np.random.default_rng(seed), env.reset(seed=seed)[0]
    observations = [observation]
    for _ in range(steps):
        observation, *_ = env.step(getattr(players, policy)(observation, env.action_space, rng))
        observations.append(observation)
    return np.stack(observations)


def test_a_seed_is_an_episode(pusht):
    first, again, other = (play(pusht, "expert", seed, 30) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert pusht.render().shape == (224, 224, 3)
    assert pusht.render().dtype == np.uint8


def test_the_expert_reaches_its_goals_and_the_weak_policy_moves_the_block(pusht):
    expert = [play(pusht, "expert", seed, 400) for seed in range(5)]
    assert np.mean([each[-1, -1] >= 1 for each in expert]) >= 0.8
    weak = [play(pusht, "weak", seed, 200) for seed in range(3)]
    assert all(each[-1, -1] <= 1 for each in weak)
    assert np.mean([(np.abs(np.diff(each[:, 2:4], axis=0)).max(axis=1) > 0.5).mean() for each in weak]) > 0.1


def test_pictures_are_those_that_planners_are_compared_on(pusht):
    play(pusht, "disturbed", 3, 45)
    world = pusht.unwrapped._world
    np.testing.assert_array_equal(pusht.render(), super(type(world), world)._render_frame("rgb_array"))


def test_the_disturbed_expert_holds_drawn_actions_every_other_two_seconds(pusht):
    from terra.recording.pusht.environment import OBSERVATION

    seen = play(pusht, "disturbed", 6, 60)
    last = seen[:, [OBSERVATION.index(name) for name in ("last_dx", "last_dy")]]
    np.testing.assert_array_equal(seen[:, OBSERVATION.index("steps")], np.arange(61))
    held = (last[1:] == last[:-1]).all(axis=1)  # of step k + 1 and the one before it
    np.testing.assert_array_equal(held[20:40], np.arange(20) % 5 != 0)
    assert not held[1:20].any()
    assert not held[41:].any()


def test_an_action_moves_the_disc_the_way_it_says(pusht):
    for action in ((1, 0), (0, -1)):
        before = pusht.reset(seed=2)[0]
        for _ in range(3):
            after = pusht.step(np.array(action, np.float32))[0]
        way = (after - before)[:2]
        assert way @ action > 20
        assert abs(way @ (action[1], action[0])) < 5


def test_pusht_is_recorded_with_its_state(tmp_path):
    from terra.dataset import episode_state, read_split
    from terra.recording.run import run

    given = [f"output={tmp_path}", "source=gym", "env=terra.recording.pusht:PushT-v0", "seeds=1"]
    more = ["episodes_per_place=1", "image_size=[96,96]", "frames_per_episode=5", "workers=0"]
    assert run(read_settings("record", [*given, *more, "policy=terra.recording.pusht.players:expert"])) == 0
    (episode,) = read_split(tmp_path, "train").episodes
    assert (episode.fps, episode.space.names, episode.image_size) == (10.0, ("dx", "dy"), (96, 96))
    assert {"agent_x", "block_angle", "goal_x", "goals_reached"} <= episode_state(episode).keys()
