"""Levels from a seed, the environment that Doom plays in them, and the players; without VizDoom the levels alone."""

import importlib.util

import numpy as np
import pytest
from entry import read_settings

from terra.recording.doom.level import CELL, PLAYER_START, free_spot, plan_level
from terra.recording.doom.wad import level_wad

pytestmark = pytest.mark.slow

needs_vizdoom = pytest.mark.skipif(importlib.util.find_spec("vizdoom") is None, reason="needs the package vizdoom")


@pytest.mark.parametrize("seed", range(20))
def test_a_level_is_in_one_piece_and_has_its_things_in_rooms(seed):
    level = plan_level(seed, monsters=3)
    open_cells = {tuple(cell) for cell in np.argwhere(level.cells >= 0).tolist()}
    reached = {next(iter(open_cells))}
    border = list(reached)
    while border:
        x, y = border.pop()
        near = {(x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)} & open_cells - reached
        reached |= near
        border += near
    assert reached == open_cells
    assert len(open_cells) > 60
    edges = np.concatenate([level.cells[[0, -1]].ravel(), level.cells[:, [0, -1]].ravel()])
    assert (edges == -1).all()
    assert level.cells.max() < len(level.rooms)
    assert sum(thing.kind in (3004, 3002) for thing in level.things) == 3
    for thing in (*level.things, free_spot(level, np.random.default_rng(seed))):
        assert level.cells[int(thing.x // CELL), int(thing.y // CELL)] >= 0


def test_no_step_between_rooms_is_too_high_and_no_passage_too_low():
    for seed in range(20):
        rooms = plan_level(seed).rooms
        floors, ceilings = [room.floor for room in rooms], [room.ceiling for room in rooms]
        assert max(floors) - min(floors) <= 24
        assert min(ceilings) - max(floors) > 56


def test_a_level_is_the_seeds():
    start = free_spot(plan_level(3), np.random.default_rng(0))
    assert start.kind == PLAYER_START
    assert level_wad(plan_level(3), start) == level_wad(plan_level(3), start)
    assert level_wad(plan_level(3), start) != level_wad(plan_level(4), start)


def test_a_wad_lists_its_lumps():
    level = plan_level(0)
    data = level_wad(level, free_spot(level, np.random.default_rng(0)))
    assert data[:8] == b"PWAD\x03\x00\x00\x00"
    at = int.from_bytes(data[8:12], "little")
    assert [data[at + 16 * k + 8 : at + 16 * k + 16].rstrip(b"\0") for k in range(3)] == [
        b"MAP01",
        b"TEXTMAP",
        b"ENDMAP",
    ]
    assert len(data) == at + 48


@pytest.fixture
def make_doom():
    import gymnasium

    made = []

    def make(**options):
        made.append(
            gymnasium.make("terra.recording.doom:Doom-v0", render_mode="rgb_array", disable_env_checker=True, **options)
        )
        return made[-1]

    yield make
    for env in made:
        env.close()


@pytest.fixture
def doom(make_doom):
    return make_doom()


@needs_vizdoom
def test_a_seed_and_its_keys_make_the_same_pictures(doom):
    from terra.recording.doom.players import wander

    def walk(seed):
        rng = np.random.default_rng(0)
        observation, pictures = doom.reset(seed=seed)[0], [doom.render()]
        for _ in range(12):
            observation = doom.step(wander(observation, doom.action_space, rng))[0]
            pictures.append(doom.render())
        return np.stack(pictures), observation

    pictures, observation = walk(7)
    assert pictures.shape == (13, 144, 256, 3)
    again, observed_again = walk(7)
    np.testing.assert_array_equal(again, pictures)
    np.testing.assert_array_equal(observed_again, observation)
    assert not np.array_equal(walk(8)[0][0], pictures[0])  # another start
    assert not np.array_equal(walk(107)[0][0], pictures[0])  # another level


@needs_vizdoom
def test_keys_move_the_player_as_they_say(doom):
    from terra.recording.doom.environment import KEYS, OBSERVATION

    def hold(*names):
        observation = doom.reset(seed=5)[0]
        before = dict(zip(OBSERVATION, observation, strict=True))
        for _ in range(4):
            observation = doom.step(np.array([name in names for name in KEYS], np.int8))[0]
        after = dict(zip(OBSERVATION, observation, strict=True))
        turned = (after["angle"] - before["angle"] + 180) % 360 - 180
        radians = np.radians(before["angle"])
        ahead = (after["x"] - before["x"]) * np.cos(radians) + (after["y"] - before["y"]) * np.sin(radians)
        assert [after[f"held_{name}"] for name in KEYS] == [float(name in names) for name in KEYS]
        return ahead, turned

    assert hold("forward")[0] > 20
    assert hold("backward")[0] < -20
    assert 20 < hold("left")[1] < 60
    assert -60 < hold("right")[1] < -20
    assert hold() == (0, 0)
    ahead, turned = hold("forward", "left")
    assert ahead > 10
    assert turned > 20


@needs_vizdoom
@pytest.mark.parametrize(("player", "least"), [("explore", 8), ("wander", 3)])
def test_players_get_around_unhurt(doom, player, least):
    from terra.recording.doom import players
    from terra.recording.doom.environment import OBSERVATION

    cells, keys = [], []
    for seed in (0, 100):
        rng, observation = np.random.default_rng(seed), doom.reset(seed=seed)[0]
        seen = set()
        for _ in range(200):
            action = getattr(players, player)(observation, doom.action_space, rng)
            observation, _, terminated, truncated, _ = doom.step(action)
            assert not terminated
            assert not truncated
            named = dict(zip(OBSERVATION, observation, strict=True))
            seen.add((named["x"] // CELL, named["y"] // CELL))
            keys.append(action)
        assert named["health"] == 100
        cells.append(len(seen))
    assert np.mean(cells) >= least
    assert (np.mean(keys, axis=0)[[0, 2, 3]] > 0.03).all()  # forward, left, right


@needs_vizdoom
def test_doom_is_recorded_with_its_state(tmp_path):
    from terra.dataset import episode_state, read_split
    from terra.recording.run import run

    given = [f"output={tmp_path}", "source=gym", "env=terra.recording.doom:Doom-v0", "seeds=1", "episodes_per_place=2"]
    more = ["image_size=[112,192]", "frames_per_episode=6", "workers=0"]
    assert run(read_settings("record", [*given, *more, "policy=terra.recording.doom.players:explore"])) == 0
    episodes = read_split(tmp_path, "train").episodes
    assert [each.id for each in episodes] == ["Doom-v0_000000_00", "Doom-v0_000000_01"]
    for episode in episodes:
        assert episode.space.names == ("forward", "backward", "left", "right", "fire")
        assert episode.fps == pytest.approx(35 / 3)
        state = episode_state(episode)
        assert {"x", "y", "angle", "health", "depth_15", "reward", "terminated"} <= state.keys()
        np.testing.assert_array_equal(state["held_forward"][1:], episode.actions[:-1, 0])


@needs_vizdoom
def test_a_map_of_vizdoom(make_doom):
    env = make_doom(scenario="my_way_home")
    env.reset(seed=0)
    first = env.render()
    env.reset(seed=1)
    assert first.std() > 5
    assert not np.array_equal(first, env.render())


@needs_vizdoom
def test_the_end_of_a_map_ends_the_episode(tmp_path, caplog):
    """The monster of "basic" is shot, or its time is over: the map ends, and its last picture is the one before."""
    from terra.dataset import episode_state, read_frames, read_split
    from terra.recording.run import run

    given = [f"output={tmp_path}", "source=gym", "env=terra.recording.doom:Doom-v0", "env_options={scenario:basic}"]
    more = ["seeds=1", "episodes_per_place=2", "image_size=[112,192]", "frames_per_episode=300", "workers=0"]
    caplog.set_level("INFO")
    assert run(read_settings("record", [*given, *more])) == 0
    for episode in read_split(tmp_path, "train").episodes:
        assert 2 <= episode.num_frames < 300
        assert read_frames(episode)[-1].std() > 5
        assert len(episode_state(episode)["depth_0"]) == episode.num_frames
    assert "the last step of 2 of 2 episodes is left out" in caplog.text


@needs_vizdoom
def test_after_the_end_of_a_map_there_is_the_last_observation_and_no_picture(make_doom):
    env = make_doom(scenario="basic")
    last, ends = env.reset(seed=0)[0], False
    for number in range(900):  # the player turns and fires
        observation, _, ends, _, _ = env.step(np.array([0, 0, 1, 0, number % 2], np.int8))
        if ends:
            break
        last = observation
    assert ends
    np.testing.assert_array_equal(observation, last)
    with pytest.raises(RuntimeError, match="no picture after its end"):
        env.render()
    assert env.reset(seed=0)[0].shape == last.shape
    assert env.render().std() > 5


@needs_vizdoom
@pytest.mark.parametrize("scenario", ["cig", "multi_duel"])
def test_a_map_for_several_players_is_refused(tmp_path, scenario):
    from terra.errors import ConfigError
    from terra.recording.run import run

    given = [
        f"output={tmp_path}",
        "source=gym",
        "env=terra.recording.doom:Doom-v0",
        f"env_options={{scenario:{scenario}}}",
    ]
    with pytest.raises(ConfigError, match=f"scenario: expected a map with a start for one player, got {scenario}"):
        run(read_settings("record", given))


@needs_vizdoom
def test_depths_are_distances_along_the_view(doom):
    from terra.recording.doom.environment import DEPTH_UNITS, DEPTHS, MAX_DEPTH, OBSERVATION

    steps = np.arange(0.0, 1200.0, 0.5)  # along the view
    errors, seen = [], []
    for seed in range(0, 1500, 100):
        told = dict(zip(OBSERVATION, doom.reset(seed=seed)[0].astype(float), strict=True))
        cells, angle = plan_level(seed // 100).cells, np.radians(told["angle"])
        ahead, right = np.array([np.cos(angle), np.sin(angle)]), np.array([np.sin(angle), -np.cos(angle)])
        across = (np.arange(256) + 0.5) / 128 - 1  # of the picture, whose half is 4/3 of its distance wide
        for k, stripe in enumerate(across.reshape(DEPTHS, -1) * 4 / 3):
            points = np.array([told["x"], told["y"]]) + steps[:, None, None] * (ahead + stripe[:, None] * right)
            x, y = (points // CELL).astype(int).clip(0, len(cells) - 1).transpose(2, 0, 1)
            distance = steps[(cells[x, y] < 0).any(axis=1).argmax()]  # of the nearest rock
            errors.append(told[f"depth_{k}"] - min(distance // DEPTH_UNITS, MAX_DEPTH))
            seen.append(told[f"depth_{k}"])
    assert np.mean(np.abs(errors) <= 1) > 0.85  # elsewhere something stands in the room
    assert max(seen) == MAX_DEPTH == 76
