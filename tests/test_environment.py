"""The Gymnasium environments: they follow its rules, and drive as the pipeline does."""

import warnings

import numpy as np
import pytest
import torch
from tiny import COLS, ROWS

pytest.importorskip("gymnasium")

from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from PIL import Image

from decoder import FramewiseDecoder
from terra.environment import (
    DriveContext,
    SteeringAction,
    SteeringVectorAction,
    WorldEnv,
    WorldVectorEnv,
    steering_action,
)
from terra.errors import ConfigError, EngineError, TerraError
from terra.pipeline import Pipeline, RolloutRequest
from terra.sampling import SamplingParams
from terra.trajectory import save_poses
from tokenizer import LFQTokenizer

SAMPLING = SamplingParams(temperature=0.9)


@pytest.fixture(scope="module")
def pipeline(tiny_tokenizer, tiny_model):
    from terra.engine.hf import HFEngine

    tokenizer = LFQTokenizer.from_pretrained(tiny_tokenizer)
    with Pipeline(tokenizer, HFEngine(tiny_model), FramewiseDecoder(tokenizer), overlap=2) as pipeline:
        yield pipeline


def make_context(seed: int, num_frames: int = 2) -> DriveContext:
    generator = torch.Generator().manual_seed(seed)
    frames = torch.rand(num_frames, 3, 4 * ROWS, 4 * COLS, generator=generator) * 2 - 1
    return DriveContext(frames, torch.randn(num_frames - 1, 6, 3, generator=generator))


def some_actions(env, num: int) -> np.ndarray:
    env.action_space.seed(1)
    return np.stack([env.action_space.sample() for _ in range(num)])


def alike(frame: np.ndarray, other: np.ndarray) -> bool:
    """Whether they are the same but for rounding: several are decoded in one batch."""
    return int(np.abs(frame.astype(int) - other).max()) <= 1


def checked(env) -> None:
    with warnings.catch_warnings():
        # Ours are meters and seconds, and a waypoint's time is given.
        warnings.filterwarnings("ignore", message=".*symmetric and normalized space")
        warnings.filterwarnings("ignore", message=".*maximum and minimum values are equal")
        warnings.filterwarnings("ignore", message=".*is different from the unwrapped version")
        check_env(env, skip_render_check=True)


def test_gymnasium_accepts_the_environment(pipeline):
    checked(WorldEnv(pipeline, make_context(0), sampling=SAMPLING))


def test_gymnasium_accepts_it_with_steering(pipeline):
    checked(SteeringAction(WorldEnv(pipeline, make_context(0), sampling=SAMPLING)))


def test_a_drive_has_the_tokens_of_the_rollout_with_its_seed(pipeline):
    context = make_context(3)
    env = WorldEnv(pipeline, context, sampling=SAMPLING)
    actions = some_actions(env, 9)  # past the end of the window
    request = RolloutRequest(context.frames, torch.cat([context.actions, torch.from_numpy(actions)]), seed=7)
    (rollout,) = pipeline.generate([request], SAMPLING)
    frame, info = env.reset(seed=7)
    made, shown = [info["tokens"]], [frame]
    for step, action in enumerate(actions, start=1):
        frame, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert (info["seed"], info["num_steps"]) == (7, step)
        assert np.array_equal(frame, env.render())
        made.append(info["tokens"])
        shown.append(frame)
    assert np.array_equal(np.stack(made), rollout.tokens[1:].numpy())
    decoded = rollout.frames[1:].permute(0, 2, 3, 1).numpy()
    assert np.abs(np.stack(shown) / 127.5 - 1 - decoded.clip(-1, 1)).max() < 1 / 127
    env.close()
    with pytest.raises(ResetNeeded):
        env.step(actions[0])


def test_a_reset_without_a_seed_makes_another_drive_and_the_same_ones_after_a_seed(pipeline):
    env = WorldEnv(pipeline, make_context(0), sampling=SAMPLING)
    seeds = [env.reset(seed=5)[1]["seed"], env.reset()[1]["seed"], env.reset()[1]["seed"]]
    assert len(set(seeds)) == 3
    assert [env.reset(seed=5)[1]["seed"], env.reset()[1]["seed"], env.reset()[1]["seed"]] == seeds


def test_contexts_are_changed_by_reset(pipeline):
    env = WorldEnv(pipeline, make_context(0))
    first = env.reset(seed=0)[0]
    other = env.reset(seed=0, options={"context": make_context(1)})[0]
    assert not np.array_equal(first, other)
    assert np.array_equal(env.reset(seed=0)[0], other)
    with pytest.raises(ConfigError, match="options: expected context, got 'town'"):
        env.reset(options={"town": 3})
    with pytest.raises(ConfigError, match="context: expected a DriveContext, got a int"):
        env.reset(options={"context": [3]})


def test_bad_actions_are_refused(pipeline):
    env = WorldEnv(pipeline, make_context(0))
    env.reset(seed=0)
    for action in (np.full((6, 3), np.nan, np.float32), np.zeros((5, 3), np.float32)):
        with pytest.raises(EngineError, match="action: expected"):
            env.step(action)
    env.step(env.action_space.sample())


def test_rewards_are_the_users_and_long_drives_are_truncated(pipeline):
    env = WorldEnv(pipeline, make_context(0), max_steps=2, reward=lambda frame, action: action[0, 1])
    env.reset(seed=0)
    actions = some_actions(env, 2)
    results = [env.step(action) for action in actions]
    assert [result[1] for result in results] == [float(action[0, 1]) for action in actions]
    assert [result[3] for result in results] == [False, True]


def test_drives_together_are_those_alone(pipeline):
    contexts = [make_context(0), make_context(1), make_context(2, num_frames=3)]
    together = WorldVectorEnv(pipeline, contexts, sampling=SAMPLING, max_steps=3)
    assert together.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    together.action_space.seed(0)
    frames, infos = together.reset(seed=[4, 5, 6])
    assert frames in together.observation_space
    assert infos["seed"].tolist() == [4, 5, 6]
    actions = [together.action_space.sample() for _ in range(4)]
    made = [together.step(each) for each in actions]
    for place, context in enumerate(contexts):
        alone = WorldEnv(pipeline, context, sampling=SAMPLING, max_steps=3)
        assert alike(alone.reset(seed=4 + place)[0], frames[place])
        for each, (shown, rewards, ended, truncated, info) in zip(actions[:3], made, strict=False):
            frame, reward, terminated, over, alone_info = alone.step(each[place])
            assert alike(frame, shown[place])
            assert (reward, terminated, over) == (rewards[place], ended[place], truncated[place])
            assert np.array_equal(alone_info["tokens"], info["tokens"][place])
    assert made[2][3].all()
    # Truncated ones have begun anew: other seeds, no step yet.
    shown, rewards, _, truncated, infos = made[3]
    assert infos["num_steps"].tolist() == [0, 0, 0]
    assert not truncated.any()
    assert not rewards.any()
    assert np.array_equal(shown, frames)
    assert len({4, 5, 6} | set(infos["seed"].tolist())) == 6
    assert len(together.render()) == 3
    together.reset(seed=1, options={"context": contexts[0]})
    with pytest.raises(ConfigError, match="context: expected 3, one for each drive, got 2"):
        together.reset(options={"context": contexts[:2]})
    together.close()


def test_steering_is_an_arc_for_one_and_for_many(pipeline):
    spec = pipeline.engine.spec
    straight, left, still = (steering_action(np.array(each), spec) for each in ((0, 10), (0.1, 10), (0.3, 0)))
    times = np.array(spec.waypoint_times, np.float32)
    assert np.allclose(straight, np.stack([0 * times, 10 * times, times], -1))
    assert (np.diff(left[:, 0]) > 0).all()
    assert np.allclose(np.hypot(*np.diff(left[:, :2], axis=0).T), 5, rtol=0.01)  # 0.5 s at 10 m/s
    assert not still[:, :2].any()
    one = SteeringAction(WorldEnv(pipeline, make_context(0), sampling=SAMPLING))
    many = SteeringVectorAction(WorldVectorEnv(pipeline, [make_context(0)] * 2, sampling=SAMPLING))
    one.reset(seed=3)
    many.reset(seed=[3, 3])
    wheel = np.array([0.2, 8], np.float32)
    assert wheel in one.action_space
    frame = one.step(wheel)[0]
    assert all(alike(frame, each) for each in many.step(np.stack([wheel, wheel]))[0])


def test_contexts_are_loaded_as_the_command_does(pipeline, tmp_path):
    for index in range(3):
        pixels = np.random.default_rng(index).integers(0, 256, (4 * ROWS, 4 * COLS, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
    times = np.arange(0, 6, 0.1)
    save_poses(tmp_path / "drive.json", times, np.stack([5 * times, 0 * times], 1), 0 * times, 10.0)
    context = DriveContext.load(pipeline, tmp_path / "*.png", tmp_path / "drive.json")
    assert (context.frames.shape[0], context.actions.shape) == (3, (2, 6, 3))
    assert DriveContext.load(pipeline, tmp_path / "0.png", num_frames=1).actions.shape == (0, 6, 3)
    WorldEnv(pipeline, DriveContext.load(pipeline, tmp_path / "0.png", num_frames=1)).reset(seed=0)
    with pytest.raises(ConfigError, match="trajectory: expected one for 3 context frames"):
        DriveContext.load(pipeline, tmp_path / "*.png")
    with pytest.raises(TerraError, match=r"nowhere\.json"):
        DriveContext.load(pipeline, tmp_path / "*.png", tmp_path / "nowhere.json")
