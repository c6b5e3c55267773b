"""Evaluates planners on PushT by stable-worldmodel's own protocol; needs the extra pusht.

    python scripts/pusht_evaluate.py --data RECORDING --policy terra --model WORLD --output terra.json
    python scripts/pusht_evaluate.py --data RECORDING --policy lewm --model outputs/lewm --output lewm.json
    python scripts/pusht_evaluate.py --compare terra.json lewm.json

The protocol is that of `stable_worldmodel.World.evaluate` and of its PushT settings: a pair is a state of a held-out
recording and the one 25 steps later, whose picture is the goal. The environment is put into the first state, and a
policy has 50 steps. It succeeds if disc and block together come within 20 pixels of the second state, and the block
within 20 degrees. LeWM plans with that package's CEM as published: 5 blocks of 5 steps, 300 candidates, 30 iterations,
30 elites; all of a plan is executed. Terra's CEM has 64 candidates and 8 iterations, actions are held for 5 steps, a
future is compared with the goal after 15, 20 and 25 steps, and a new plan follows after 15.

Published figures are of people's recordings and of longer training; these are of a scripted expert's. Give `still`,
which does nothing, and `random` beside every figure. The same --data, --pairs and --seed draw the same pairs for all
policies; `--compare` takes the difference pair by pair, with an interval that resamples episodes. A call that was
stopped goes on from --output.

Several processes share the pairs, as many on one GPU as its memory holds, and `--join` makes one result of theirs:

    python scripts/pusht_evaluate.py ... --part 1/2 --output first.json &
    python scripts/pusht_evaluate.py ... --part 2/2 --output second.json &
    wait; python scripts/pusht_evaluate.py --join first.json second.json --output terra.json
"""

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import stable_worldmodel as swm  # pyright: ignore[reportMissingImports]
import torch
from einops import rearrange
from pusht_lewm import BLOCK, IMAGENET_MEAN, IMAGENET_STD, load_lewm
from stable_worldmodel.envs.pusht.env import PushT  # pyright: ignore[reportMissingImports]
from stable_worldmodel.solver import CEMSolver  # pyright: ignore[reportMissingImports]

from terra.dataset import Episode, episode_state, read_split
from terra.errors import ConfigError, DatasetError
from terra.metrics.bootstrap import mean_estimate
from terra.pipeline import Pipeline
from terra.planning import CEM, COSTS, MPPI, Planner, PlannerPolicy
from terra.recording.pusht.environment import PICTURE, STATE
from terra.sampling import SamplingParams
from tokenizer.files import read_json, write_json

logger = logging.getLogger(__name__)

GOAL_OFFSET, BUDGET = 25, 50  # steps
SEED = 42
# Settings in which the parts of one evaluation may differ: they change no plan.
OF_A_PART = ("part", "output", "at_once", "pairs_at_once", "step_tokens")
CALLABLES = [
    {"method": "_set_state", "args": {"state": {"value": "state"}}},
    {"method": "_set_goal_state", "args": {"goal_state": {"value": "goal_state"}}},
]

OnPart = Callable[[dict[str, Any]], None]
"""Called with a policy's result so far, as it is written to --output."""


class Policy(Protocol):
    """What `stable_worldmodel.World` asks of a policy."""

    def set_env(self, env: Any) -> None:
        """Note the environments."""
        ...

    def get_action(self, info_dict: dict[str, Any], **kwargs: Any) -> np.ndarray:
        """The next action of each environment, (envs, 2)."""
        ...

    @property
    def num_plans(self) -> int:
        """Plans made so far, in all environments."""
        ...


@dataclass(frozen=True)
class Pair:
    """A start and the goal 25 steps later: an episode of the recording, and the start's frame."""

    episode: Episode
    start: int


def draw_pairs(data: Path, count: int, seed: int = SEED) -> list[Pair]:
    """Pairs of the held-out split, drawn as stable-worldmodel's evaluation draws them.

    Raises:
        DatasetError: fewer starts than pairs.
    """
    episodes = read_split(data, "held_out").episodes
    starts = [Pair(each, start) for each in episodes for start in range(each.num_frames - GOAL_OFFSET)]
    if len(starts) <= count:
        raise DatasetError(f"{data}: expected more than {count} starts in split held_out, got {len(starts)}")
    chosen = np.random.default_rng(seed).choice(len(starts) - 1, size=count, replace=False)
    return [starts[index] for index in sorted(chosen)]


def part_of(text: str) -> tuple[int, int]:
    """K and N of "K/N", 1 <= K <= N.

    Raises:
        ConfigError: anything else.
    """
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ConfigError(f"part: expected K/N with K from 1 to N, got {text!r}")
    return int(part), int(parts)


class PairsDataset:
    """The recording as `World.evaluate` reads a dataset: states from the recording, pictures drawn from them anew.

    Pictures that are drawn anew have no traces of the video's compression.
    """

    column_names = ("state", "pixels")

    def __init__(self, pairs: list[Pair]) -> None:
        self._pairs = pairs
        self._world = PushT(resolution=PICTURE)
        self._world.reset(seed=0)

    def load_chunk(self, episodes: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> list[dict[str, Any]]:
        """States and pictures (frames, 3, height, width) of the frames from `starts` to before `ends`."""
        return [
            self._chunk(self._pairs[index], start, end)
            for index, start, end in zip(episodes, starts, ends, strict=True)
        ]

    def _chunk(self, pair: Pair, start: int, end: int) -> dict[str, Any]:
        state = episode_state(pair.episode)
        states = np.stack([state[name][start:end] for name in STATE], axis=1)
        pictures = []
        for each in states:
            self._world._set_state(each)
            pictures.append(self._world.render())
        pixels = rearrange(torch.from_numpy(np.stack(pictures)), "t h w c -> t c h w")
        return {"state": torch.from_numpy(states), "pixels": pixels}


class Timed:
    """A policy, and the seconds of those steps in which it planned."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.seconds = policy, 0.0

    @property
    def num_plans(self) -> int:
        """Plans made so far."""
        return self._policy.num_plans

    def set_env(self, env: Any) -> None:
        """Begin anew."""
        self._policy.set_env(env)

    def get_action(self, info_dict: dict[str, Any], **kwargs: Any) -> np.ndarray:
        """Act, and note the time if a plan was made."""
        started, before = perf_counter(), self.num_plans
        action = self._policy.get_action(info_dict, **kwargs)
        if self.num_plans > before:
            self.seconds += perf_counter() - started
        return action


class TerraPolicy:
    """A `PlannerPolicy` as `World` asks a policy."""

    def __init__(self, policy: PlannerPolicy) -> None:
        self._policy, self._begun = policy, False

    @property
    def num_plans(self) -> int:
        """Plans made so far."""
        return self._policy.num_plans

    def set_env(self, env: Any) -> None:
        """Begin anew."""
        self._begun = False

    def get_action(self, info_dict: dict[str, Any], **kwargs: Any) -> np.ndarray:
        """The planner's next action of each environment."""
        if not self._begun:
            self._policy.reset(np.asarray(info_dict["goal"])[:, -1])
            self._begun = True
        pictures = np.asarray(info_dict["pixels"])[:, -1]
        return self._policy.act(pictures, list(_ended(info_dict, len(pictures)))).astype(np.float32)


class SimplePolicy:
    """A policy that sees nothing: random actions, or none at all."""

    num_plans = 0

    def __init__(self, moves: bool, seed: int = 0) -> None:
        self._moves, self._random = moves, np.random.default_rng(seed)

    def set_env(self, env: Any) -> None:
        """Note how many environments there are."""
        self._count = env.num_envs

    def get_action(self, info_dict: dict[str, Any], **kwargs: Any) -> np.ndarray:
        """Numbers from -1 to 1, or 0."""
        return self._random.uniform(-1, 1, (self._count, 2)).astype(np.float32) * self._moves


class LewmPolicy:
    """stable-worldmodel's policy of LeWM, which plans every `execute` steps."""

    def __init__(self, policy: Any, execute: int = GOAL_OFFSET) -> None:
        self._policy, self._execute = policy, execute
        self.num_plans, self._steps = 0, 0

    def set_env(self, env: Any) -> None:
        """Begin anew, with the first step of these environments."""
        self._steps = 0
        self._policy.set_env(env)

    def get_action(self, info_dict: dict[str, Any], **kwargs: Any) -> np.ndarray:
        """LeWM's next action of each environment."""
        action = self._policy.get_action(info_dict, **kwargs)
        if self._steps % self._execute == 0:
            self.num_plans += int((~_ended(info_dict, len(action))).sum())
        self._steps += 1
        return action


class _Scaler:
    """Actions in LeWM's units, mean 0 and standard deviation 1, and back."""

    def __init__(self, mean: list[float], std: list[float]) -> None:
        self._mean, self._std = np.array(mean), np.array(std)

    def transform(self, actions: np.ndarray) -> np.ndarray:
        return (actions - self._mean) / self._std

    def inverse_transform(self, actions: np.ndarray) -> np.ndarray:
        return actions * self._std + self._mean


class _Batched(torch.nn.Module):
    """LeWM whose cost takes several problems: its own gives the goals' embeddings a shape that fits one alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def _lewm(self) -> Any:
        return self.model

    def get_cost(self, info_dict: dict[str, Any], action_candidates: torch.Tensor) -> torch.Tensor:
        """The cost of each candidate of each problem, (problems, candidates)."""
        if "goal_emb" not in info_dict:
            seen = self._lewm.encode({"pixels": info_dict["goal"][:, 0]})
            info_dict["goal_emb"] = rearrange(seen["emb"][:, -1], "problems width -> problems 1 1 width")
        return self._lewm.get_cost(info_dict, action_candidates)


def lewm_policy(
    folder: Path, device: str, candidates: int, iterations: int, problems_at_once: int, execute: int
) -> Policy:
    """LeWM with stable-worldmodel's CEM and model predictive control; `execute` steps of a plan, whole blocks.

    Raises:
        ConfigError: `execute` is no multiple of `BLOCK` up to `GOAL_OFFSET`.
    """
    if execute % BLOCK or not BLOCK <= execute <= GOAL_OFFSET:
        raise ConfigError(f"execute: expected a multiple of {BLOCK} up to {GOAL_OFFSET}, got {execute}")
    from torchvision.transforms import v2

    model, facts = load_lewm(folder)
    model = model.to(device).requires_grad_(False)
    side = facts["sizes"]["image"]
    look = v2.Compose(
        [
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=list(IMAGENET_MEAN), std=list(IMAGENET_STD)),
            v2.Resize(size=(side, side)),
        ]
    )
    solver = CEMSolver(
        _Batched(model),
        batch_size=problems_at_once,
        num_samples=candidates,
        n_steps=iterations,
        topk=max(1, candidates // 10),
        device=device,
        seed=SEED,
    )
    config = swm.PlanConfig(horizon=GOAL_OFFSET // BLOCK, receding_horizon=execute // BLOCK, action_block=BLOCK)
    scaler = _Scaler(facts["action_mean"], facts["action_std"])
    policy = swm.policy.WorldModelPolicy(
        solver=solver, config=config, process={"action": scaler}, transform={"pixels": look, "goal": look}
    )
    return LewmPolicy(policy, execute)


def evaluate(pairs: list[Pair], policy: Policy, at_once: int, on_part: OnPart, earlier: dict[str, Any]) -> None:
    """Let a policy play all pairs; its successes, pair by pair, and its seconds a plan go to `on_part`.

    Args:
        pairs: see `draw_pairs`.
        policy: acts.
        at_once: number of pairs that are played side by side.
        on_part: called with the result so far whenever `at_once` more pairs are done.
        earlier: the last result of a call that was stopped, to go on from; empty for none.

    Raises:
        DatasetError: other pairs than the earlier call's.
    """
    count, started = len(pairs), perf_counter()
    named = [[pair.episode.id, pair.start] for pair in pairs]
    successes: list[bool] = list(earlier.get("successes", []))
    if earlier and earlier["pairs"] != named[: len(successes)]:
        raise DatasetError(
            f"expected the recording of the earlier call, which began with {earlier['pairs'][0]}, got {named[0]}"
        )
    timed = Timed(policy)
    plans, planning, spent_before = (earlier.get(name, 0) for name in ("plans", "planning_seconds", "seconds"))
    begun = len(successes)
    for first in range(begun, count, at_once):
        part = pairs[first : first + at_once]
        world = swm.World(
            "swm/PushT-v1", num_envs=len(part), image_shape=(PICTURE, PICTURE), max_episode_steps=2 * BUDGET
        )
        world.set_policy(timed)
        found = world.evaluate(
            dataset=PairsDataset(part),
            episodes_idx=list(range(len(part))),
            start_steps=[pair.start for pair in part],
            goal_offset=GOAL_OFFSET,
            eval_budget=BUDGET,
            callables=CALLABLES,
        )
        world.close()
        successes += [bool(each) for each in found["episode_successes"]]
        done, spent = len(successes), perf_counter() - started
        percent = 100 * sum(successes) / done
        left = spent / (done - begun) * (count - done)
        logger.info("%d of %d pairs: %.1f %%, %.0f s left", done, count, percent, left)
        on_part(
            {
                "success_percent": percent,
                "pairs": named[:done],
                "successes": successes,
                "plans": plans + timed.num_plans,
                "planning_seconds": planning + timed.seconds,
                "seconds_a_plan": (planning + timed.seconds) / max(plans + timed.num_plans, 1),
                "seconds": spent_before + spent,
            }
        )


def join(parts: list[Path]) -> dict[str, Any]:
    """One result of several parts' results, their pairs in the order of episodes and starts.

    Raises:
        ConfigError: two parts have the same pair, or other settings than their parts and outputs.
    """
    found = [read_json(path, ConfigError) for path in parts]
    shared = [{name: value for name, value in each["settings"].items() if name not in OF_A_PART} for each in found]
    for path, settings in zip(parts, shared, strict=True):
        if settings != shared[0]:
            raise ConfigError(f"{path}: expected the settings of {parts[0]}, got others")
    played = sorted(
        (pair, success) for each in found for pair, success in zip(each["pairs"], each["successes"], strict=True)
    )
    pairs, successes = [pair for pair, _ in played], [success for _, success in played]
    for one, next_one in pairwise(pairs):
        if one == next_one:
            raise ConfigError(f"{parts}: expected each pair once, got {one} twice")
    plans, planning = (sum(each[name] for each in found) for name in ("plans", "planning_seconds"))
    return {
        "settings": shared[0] | {"parts": len(parts)},
        "success_percent": 100 * sum(successes) / len(successes),
        "pairs": pairs,
        "successes": successes,
        "plans": plans,
        "planning_seconds": planning,
        "seconds_a_plan": planning / max(plans, 1),
    }


def compare(ours: Path, theirs: Path, resamples: int = 10_000) -> dict[str, float]:
    """The difference of two policies' success (percentage points), and its 95 % interval over resampled episodes.

    Raises:
        ConfigError: the files are of different pairs.
    """
    first, second = (read_json(path, ConfigError) for path in (ours, theirs))
    if first["pairs"] != second["pairs"]:
        raise ConfigError(f"{theirs}: expected the pairs of {ours}, got others")
    differences = 100 * (np.array(first["successes"], float) - np.array(second["successes"], float))
    episodes = [episode for episode, _ in first["pairs"]]
    estimate = mean_estimate(differences, units=episodes, num_resamples=resamples, seed=SEED)
    return {"difference": estimate.value, "low": estimate.low, "high": estimate.high}


def _ended(info_dict: dict[str, Any], count: int) -> np.ndarray:
    ended = info_dict.get("terminated")
    return np.zeros(count, bool) if ended is None else np.asarray(ended, bool).reshape(count, -1)[:, -1]


def main() -> None:
    """Evaluate or compare as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", type=Path, nargs=2, help="two outputs")
    parser.add_argument("--join", type=Path, nargs="+", help="outputs of all parts, to one --output")
    parser.add_argument("--part", default="1/1", help="K/N: play the K-th of N parts of the pairs")
    parser.add_argument("--data", type=Path, help="recording of PushT with a held-out split")
    parser.add_argument("--policy", choices=["terra", "lewm", "random", "still"])
    parser.add_argument("--model", type=Path, help="folder of tokenizer/ and world_model/, or of scripts/pusht_lewm.py")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--search", choices=["cem", "mppi"], default="cem")
    parser.add_argument("--cost", choices=list(COSTS), default="whitened")
    parser.add_argument("--candidates", type=int, help="64 of terra, 300 of lewm, where nothing is said")
    parser.add_argument("--iterations", type=int, help="8 of terra, 30 of lewm")
    parser.add_argument(
        "--spread",
        type=float,
        default=0.25,
        help="initial standard deviation of terra's search; recorded actions: 0.23",
    )
    parser.add_argument("--horizon", type=int, default=GOAL_OFFSET, help="of terra, in steps")
    parser.add_argument(
        "--ends",
        type=int,
        nargs="+",
        default=[15, 20, 25],
        help="steps at which terra compares a future with the goal; the nearest counts",
    )
    parser.add_argument("--hold", type=int, default=BLOCK, help="steps for which terra's planner holds an action")
    parser.add_argument(
        "--execute",
        type=int,
        help="steps of a plan before a new one: 15 of terra, or fewer where it ends; 25 of lewm",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="of terra's imagined futures")
    parser.add_argument("--at-once", type=int, default=128, help="terra: sessions; lewm: problems, 8 at most")
    parser.add_argument(
        "--pairs-at-once", type=int, default=50, help="pairs side by side; --output is written after each such group"
    )
    parser.add_argument(
        "--step-tokens", type=int, help="of --engine graph: its setting step_tokens, with --at-once as its max_sessions"
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if given.compare:
        print(compare(*given.compare))
        return
    if given.join:
        write_json(given.output, join(given.join))
        return
    part, parts = part_of(given.part)
    pairs = draw_pairs(given.data, given.pairs, given.seed)[part - 1 :: parts]
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    earlier = read_json(given.output, ConfigError) if given.output.exists() else {}
    if earlier and earlier["settings"] != settings:
        raise ConfigError(f"{given.output}: expected the result of a call with these settings, got another's")
    closing: list[Callable[[], None]] = []
    if given.policy == "terra":
        more = {} if given.step_tokens is None else {"step_tokens": given.step_tokens, "max_sessions": given.at_once}
        pipeline = Pipeline.from_pretrained(
            given.model, engine=given.engine, device=given.device, sessions=given.at_once, **more
        )
        closing.append(pipeline.close)
        kind = CEM if given.search == "cem" else MPPI
        planner = Planner(
            pipeline,
            cost=COSTS[given.cost],
            search=kind(candidates=given.candidates or 64, iterations=given.iterations or 8, spread=given.spread),
            horizon=given.horizon,
            ends=given.ends,
            hold=given.hold,
            sampling=SamplingParams(temperature=given.temperature),
            at_once=given.at_once,
        )
        policy: Policy = TerraPolicy(
            PlannerPolicy(planner, execute=given.execute or 15, budget=BUDGET, seed=given.seed)
        )
    elif given.policy == "lewm":
        policy = lewm_policy(
            given.model,
            given.device,
            given.candidates or 300,
            given.iterations or 30,
            min(given.at_once, 8),
            given.execute or GOAL_OFFSET,
        )
    else:
        policy = SimplePolicy(moves=given.policy == "random", seed=given.seed)

    def write(result: dict[str, Any]) -> None:
        write_json(given.output, {"settings": settings, **result})

    evaluate(pairs, policy, given.pairs_at_once, write, earlier)
    for close in closing:
        close()


if __name__ == "__main__":
    main()
