"""The Gymnasium environment: keys in, pictures out, and a vector of what the player may know as observation."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from terra.extras import extras_named
from terra.recording.doom.level import free_spot, plan_level
from terra.recording.doom.wad import MAP, level_wad

with extras_named("terra.recording.doom"):
    import gymnasium
    import vizdoom  # pyright: ignore[reportMissingImports]
    from gymnasium import spaces

TICS = 35  # a second, Doom's clock
SEEDS_A_LEVEL = 100  # seeds that share a level, as many as `terra record` gives to a place
KEYS = ("forward", "backward", "left", "right", "fire")
DEPTHS = 16  # distances that the observation has, from the picture's left edge to its right
DEPTH_UNITS = 7.16  # map units of a step of the depth buffer: (120,000,000 - 358,000) / 255 / 65,536 in VizDoom
# Of walls, some 545 map units: VizDoom cuts their depth off at 255 of a picture that is 480 pixels high, and in
# proportion at less in a lower one.
MAX_DEPTH = 255 * 144 // 480
NO_TARGET = 2.0  # the observation's `target` where no monster is in sight

_BUTTONS = (
    vizdoom.Button.MOVE_FORWARD,
    vizdoom.Button.MOVE_BACKWARD,
    vizdoom.Button.TURN_LEFT,
    vizdoom.Button.TURN_RIGHT,
    vizdoom.Button.ATTACK,
)
_VARIABLES = {
    "x": vizdoom.GameVariable.POSITION_X,
    "y": vizdoom.GameVariable.POSITION_Y,
    "angle": vizdoom.GameVariable.ANGLE,
    "velocity_x": vizdoom.GameVariable.VELOCITY_X,
    "velocity_y": vizdoom.GameVariable.VELOCITY_Y,
    "health": vizdoom.GameVariable.HEALTH,
    "kills": vizdoom.GameVariable.KILLCOUNT,
}
_FOR_SEVERAL = frozenset(("cig", "cig_with_unknown", "multi_duel"))
"""VizDoom's maps without a start for a single player, on which VizDoom ends the whole process."""
_MONSTERS = frozenset(("Zombieman", "Demon", "DoomImp", "ShotgunGuy", "ChaingunGuy", "MarineChainsawVzd"))

OBSERVATION = (*_VARIABLES, *(f"held_{key}" for key in KEYS), "target", *(f"depth_{k}" for k in range(DEPTHS)))
"""Names of the observation's numbers.

Position and velocity are in map units (a second's walk is about 290) and map units a tic, the angle is in degrees (0
is east, 90 north). `held_KEY` is 1 for the keys of the last action. `target` is where the nearest monster stands in
the picture, -1 at its left edge to 1 at its right, and `NO_TARGET` where none is. `depth_K` is what VizDoom's depth
buffer has in the picture's eight middle rows, the least of each of `DEPTHS` stripes: the distance along the view, in
steps of about `DEPTH_UNITS` map units, at most `MAX_DEPTH`.
"""


class Doom(gymnasium.Env[Float32[np.ndarray, " numbers"], np.ndarray]):
    """A walk through a level, in which the player can't be hurt; it never ends by itself, as a map of VizDoom's may.

    Seed s has the level of s // 100 and a start of its own, so that the episodes of one place of `terra record` share
    a level.

    Args:
        render_mode: "rgb_array".
        frame_skip: Doom's tics (1 / 35 s) that an action lasts.
        monsters: how many a level has.
        scenario: name of one of VizDoom's own maps, such as "my_way_home", which all seeds then share; None for levels
            of `terra.recording.doom.level`.

    Raises:
        ValueError: a map for several players.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012, as Gymnasium declares it

    def __init__(
        self,
        render_mode: str | None = None,
        frame_skip: int = 3,
        monsters: int = 4,
        scenario: str | None = None,
    ) -> None:
        if scenario in _FOR_SEVERAL:
            raise ValueError(f"scenario: expected a map with a start for one player, got {scenario}")
        self.metadata = {**self.metadata, "render_fps": TICS / frame_skip}
        self.render_mode = render_mode
        self.action_space = spaces.MultiBinary(len(KEYS))
        self.observation_space = spaces.Box(-np.inf, np.inf, (len(OBSERVATION),), np.float32)
        self._frame_skip, self._monsters, self._scenario = frame_skip, monsters, scenario
        self._folder = tempfile.TemporaryDirectory(prefix="terra_doom_")
        self._game = vizdoom.DoomGame()
        self._held = np.zeros(len(KEYS))
        self._last = np.zeros(len(OBSERVATION), np.float32)

    def get_action_meanings(self) -> list[str]:
        """The names of the keys."""
        return list(KEYS)

    def get_observation_meanings(self) -> list[str]:
        """The names of the observation's numbers."""
        return list(OBSERVATION)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32[np.ndarray, " numbers"], dict[str, Any]]:
        """Start a walk; without a seed, that of one drawn from `np_random`."""
        super().reset(seed=seed)
        seed = int(self.np_random.integers(2**31)) if seed is None else seed
        self._game.close()
        self._game = self._new_game(seed)
        self._game.init()
        self._game.send_game_command("god")
        self._held = np.zeros(len(KEYS))
        # The weapon rises, and Doom's first tics fall to the floor.
        self._game.make_action([0] * len(KEYS), TICS // 2)
        self._last = self._observed()
        return self._last, {}

    def step(self, action: np.ndarray) -> tuple[Float32[np.ndarray, " numbers"], float, bool, bool, dict[str, Any]]:
        """Hold the keys for `frame_skip` tics. The reward is 0.

        Where a map's episode ends, VizDoom tells nothing more: the observation is then the one before.
        """
        self._held = np.asarray(action, np.float64)
        self._game.make_action([int(key) for key in action], self._frame_skip)
        ends = self._game.is_episode_finished()
        if not ends:
            self._last = self._observed()
        return self._last, 0.0, ends, False, {}

    def render(self) -> UInt8[np.ndarray, "height width 3"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The picture before the player, RGB of 144 x 256 pixels, without the status bar.

        Raises:
            RuntimeError: the episode has ended, after which there is none.
        """
        state = self._game.get_state()
        if state is None:
            raise RuntimeError("expected an episode that goes on: VizDoom has no picture after its end")
        return state.screen_buffer.copy()

    def close(self) -> None:
        """End the game."""
        self._game.close()
        self._folder.cleanup()

    def _new_game(self, seed: int) -> "vizdoom.DoomGame":
        game = vizdoom.DoomGame()
        if self._scenario is None:
            random = np.random.default_rng((seed, 1))
            level = plan_level(seed // SEEDS_A_LEVEL, self._monsters)
            path = Path(self._folder.name) / "level.wad"
            path.write_bytes(level_wad(level, free_spot(level, random)))
            game.set_doom_scenario_path(str(path))
        else:
            game.set_doom_scenario_path(str(Path(vizdoom.scenarios_path) / f"{self._scenario}.wad"))
        # VizDoom writes its settings to the working folder where nothing else is said.
        game.set_doom_config_path(str(Path(self._folder.name) / "vizdoom.ini"))
        game.set_doom_map(MAP)
        game.set_seed(seed % 2**32)
        game.set_available_buttons(list(_BUTTONS))
        game.set_available_game_variables(list(_VARIABLES.values()))
        game.set_screen_resolution(vizdoom.ScreenResolution.RES_256X144)
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        game.set_window_visible(False)
        game.set_depth_buffer_enabled(True)
        game.set_labels_buffer_enabled(True)
        game.set_render_hud(False)
        game.set_render_crosshair(False)
        game.set_render_messages(False)
        game.set_render_corpses(True)
        game.set_episode_timeout(0)
        game.set_doom_skill(2)
        return game

    def _observed(self) -> Float32[np.ndarray, " numbers"]:
        state = self._game.get_state()
        numbers, depth, labels = state.game_variables, state.depth_buffer, state.labels
        if numbers is None or depth is None or labels is None:
            raise RuntimeError("expected numbers, depths and labels, which _new_game asks for")
        height, width = depth.shape
        middle = depth[height // 2 - 4 : height // 2 + 4]
        depths = middle.reshape(-1, DEPTHS, width // DEPTHS).min(axis=(0, 2))
        seen = [label for label in labels if label.object_name in _MONSTERS]
        nearest = max(seen, key=lambda label: label.height, default=None)
        target = NO_TARGET if nearest is None else (nearest.x + nearest.width / 2) / width * 2 - 1
        return np.concatenate([numbers, self._held, [target], depths]).astype(np.float32)
