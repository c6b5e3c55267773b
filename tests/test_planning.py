"""The planner finds actions that lead to a goal, in every kind of action space, alone as in company."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from dot_world import SIDE, SPACES, DotDecoder, dot_pipeline, frame_at, moves
from tiny import COLS, ROWS, save_tiny, tiny_tokenizer_config

from terra.actions import Waypoints
from terra.errors import ConfigError
from terra.pipeline import Pipeline
from terra.planning import CEM, COSTS, MPPI, Cost, Planner, PlannerPolicy, Problem, Target
from terra.planning.search import first_distribution
from terra.sampling import SamplingParams
from terra.world_model import LlamaActionV2ForCausalLM
from tokenizer import LFQTokenizer

SEARCHES = {"cem": CEM(candidates=48, iterations=6), "mppi": MPPI(candidates=48, iterations=6, keeps_spread=False)}


def frames_at(*at: tuple[float, float]) -> torch.Tensor:
    return DotDecoder().decode(torch.stack([frame_at(*each) for each in at]))


def problem(start, goal, seed: int = 0) -> Problem:
    return Problem(frames_at(start), torch.zeros(0, 1, 2), frames_at(goal)[0], seed)


def problem_of(space, start, goal, seed: int = 0) -> Problem:
    return Problem(frames_at(start), torch.zeros(0, *space.shape), frames_at(goal)[0], seed)


def landed(tokens: torch.Tensor) -> tuple[int, int]:
    y, x = (tokens[-1] == 1).nonzero()[0].tolist()
    return x, y


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("kind", SPACES)
def test_a_plan_ends_at_the_goal(kind, search):
    with dot_pipeline(kind) as pipeline:
        planner = Planner(pipeline, cost=COSTS["blurred"], search=search, horizon=8)
        seen = []
        plans = planner.plan(
            [problem_of(SPACES[kind], (3, 3), (8, 6)), problem_of(SPACES[kind], (12, 4), (9, 9), seed=5)],
            lambda number, costs: seen.append((number, costs)),
        )
    for plan, (x, y) in zip(plans, ((8, 6), (9, 9)), strict=True):
        assert plan.values.shape == (8, len(SPACES[kind].columns))
        assert plan.tokens.shape == (9, SIDE, SIDE)
        at = landed(plan.tokens)
        assert abs(at[0] - x) + abs(at[1] - y) <= 2
        assert list(plan.costs) == sorted(plan.costs, reverse=True)
        assert plan.cost == plan.costs[-1]
    assert [number for number, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[-1][1] == [plan.cost for plan in plans]


def same(plan, other) -> bool:
    return np.array_equal(plan.values, other.values) and plan.costs == other.costs


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Random weights of a world of numbers."""
    folder, space = tmp_path_factory.mktemp("llama"), SPACES["vector"]
    torch.manual_seed(0)
    LFQTokenizer(tiny_tokenizer_config()).save_pretrained(folder / "tokenizer")
    save_tiny(
        folder / "world_model",
        LlamaActionV2ForCausalLM,
        **{"num_action_tokens": 1, "action_dim": 2, "fps": 10.0, "num_spatio_embeddings": ROWS * COLS + 1},
        max_position_embeddings=8 * (ROWS * COLS + 1),
        waypoint_times=None,
        action_space=space.model_dump(mode="json"),
    )
    with Pipeline.from_pretrained(folder, engine="hf", device="cpu", dtype="float32", overlap=2) as pipeline:
        yield pipeline


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_problems_in_company_have_the_plans_that_they_have_alone(llama, search):
    generator = torch.Generator().manual_seed(0)
    size = llama.tokenizer.config.image_size
    problems = [
        Problem(
            torch.rand(2, 3, *size, generator=generator) * 2 - 1,
            torch.rand(1, 1, 2, generator=generator),
            torch.rand(3, *size, generator=generator) * 2 - 1,
            seed,
        )
        for seed in (3, 2**62)
    ]
    planner = Planner(
        llama,
        cost=COSTS["pixels"],
        search=replace(search, candidates=4, iterations=2),
        horizon=2,
        ends=(1, 2),
        sampling=SamplingParams(temperature=0.8),
        num_samples=2,
        at_once=5,
    )
    together = planner.plan(problems)
    alone = [planner.plan([each])[0] for each in problems]
    again = planner.plan(problems[::-1])[::-1]
    for plan, other, third in zip(together, alone, again, strict=True):
        assert same(plan, other)
        assert same(plan, third)
        assert torch.equal(plan.tokens, other.tokens)
    assert not same(*together)


def test_another_seed_searches_elsewhere():
    with dot_pipeline("vector") as pipeline:
        planner = Planner(pipeline, cost=COSTS["blurred"], search=CEM(candidates=8, iterations=1), horizon=4)
        plans = planner.plan([problem((3, 3), (8, 6), seed) for seed in (0, 0, 1)])
    assert same(plans[0], plans[1])
    assert not same(plans[0], plans[2])


def test_actions_are_held_and_a_search_begins_where_it_is_told():
    with dot_pipeline("vector") as pipeline:
        planner = Planner(pipeline, cost=COSTS["tokens"], search=CEM(candidates=1, iterations=1), horizon=5, hold=2)
        start = np.array([[1.0, 0.5], [9.0, 9.0], [-1.0, 0.0]])  # what is not at the start of a hold is of no effect
        given = Problem(frames_at((5, 5)), torch.zeros(0, 1, 2), frames_at((5, 5))[0], 0, start)
        (plan,) = planner.plan([given])
        np.testing.assert_allclose(plan.values, [[1, 0.5], [1, 0.5], [-1, 0], [-1, 0], [0, 0]], atol=1e-12)


OVER_THE_GOAL = np.array([[2.0, 0.0]] * 5)  # from (3, 5) to (13, 5), after 3 steps at (9, 5)


@pytest.mark.parametrize(
    ("ends", "end", "cost"), [(None, 5, 2), ((1, 3, 5), 3, 0), ((1, 4), 1, 2), ((2, 3, 4), 3, 0), ((5,), 5, 2)]
)
@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_plan_ends_where_it_is_cheapest(ends, end, cost, num_samples):
    with dot_pipeline("vector") as pipeline:
        search = CEM(candidates=3, iterations=1, spread=0.0, least_spread=0.0)
        planner = Planner(pipeline, cost=COSTS["pixels"], search=search, horizon=5, ends=ends, num_samples=num_samples)
        (plan,) = planner.plan([replace(problem((3, 5), (9, 5)), start=OVER_THE_GOAL)])
        assert plan.end == end
        assert plan.cost == pytest.approx(cost * 4 / SIDE**2)  # so many pixels differ by 2
        assert plan.values.shape == (5, 2)
        assert pipeline.decoder.decoded[1:] == [3 * num_samples * len(ends or (5,))]  # the first one is the goal


@pytest.mark.parametrize(("execute", "steps"), [(None, [3, 3]), (2, [2, 2, 2]), (5, [3, 3])])
def test_a_policy_plans_again_where_a_plan_ends(execute, steps, monkeypatch):
    with dot_pipeline("vector") as pipeline:
        search = CEM(candidates=1, iterations=1)
        planner = Planner(pipeline, cost=COSTS["pixels"], search=search, horizon=5, ends=(1, 3, 5))
        policy, planned, acts = PlannerPolicy(planner, execute=execute), [], []
        policy.reset(pictures([(9, 5)]))
        start, plan = OVER_THE_GOAL, planner.plan

        def planned_anew(problems):
            planned.append((len(acts), problems[0].start))
            return plan([replace(each, start=start) for each in problems])

        monkeypatch.setattr(planner, "plan", planned_anew)
        while len(acts) < sum(steps):
            acts.append(policy.act(pictures([(3, 5)])))
        assert [step for step, _ in planned] == [sum(steps[:index]) for index in range(len(steps))]
        assert [left if left is None else len(left) for _, left in planned] == [None, *(5 - each for each in steps[1:])]
        assert policy.num_plans == len(steps)


@pytest.mark.parametrize(("steps", "end", "decoded"), [(2, 1, 2), (4, 3, 3), (5, 3, 3), (9, 3, 3)])
def test_a_plan_has_no_more_actions_than_steps_are_left(steps, end, decoded):
    with dot_pipeline("vector") as pipeline:
        search = CEM(candidates=1, iterations=1)
        planner = Planner(pipeline, cost=COSTS["pixels"], search=search, horizon=5, ends=(1, 3, 5), hold=2)
        given = replace(problem((3, 5), (9, 5)), start=OVER_THE_GOAL, steps=steps)
        other = problem((3, 5), (9, 5))
        plan, _ = planner.plan([given, other])
        assert plan.values.tolist() == OVER_THE_GOAL[:steps].tolist()
        assert len(plan.tokens) == 1 + len(plan.values)
        assert plan.end == end  # of equal costs the first
        assert pipeline.decoder.decoded[2:] == [decoded, 3]  # without the two goals
        with pytest.raises(ConfigError, match="steps: expected 1 or more, got 0"):
            planner.plan([replace(given, steps=0)])


def test_a_policy_plans_up_to_its_budget(monkeypatch):
    with dot_pipeline("vector") as pipeline:
        search = CEM(candidates=2, iterations=1)
        planner = Planner(pipeline, cost=COSTS["pixels"], search=search, horizon=5)
        policy, steps, plan = PlannerPolicy(planner, budget=8), [], planner.plan
        monkeypatch.setattr(planner, "plan", lambda given: steps.extend(each.steps for each in given) or plan(given))
        for _ in range(2):
            policy.reset(pictures([(9, 5)]))
            for _ in range(8):
                policy.act(pictures([(3, 5)]))
        assert steps == [8, 3, 8, 3]


def test_no_more_sessions_are_open_than_allowed_and_token_costs_decode_nothing():
    with dot_pipeline("keys") as pipeline:
        search = CEM(candidates=20, iterations=2)
        planner = Planner(pipeline, cost=COSTS["bits"], search=search, horizon=3, at_once=7)
        planner.plan([problem_of(SPACES["keys"], (3, 3), (5, 5), seed) for seed in range(3)])
        assert pipeline.engine.most_open <= 7
        assert pipeline.engine.open_now == 0
        assert pipeline.decoder.decoded == [1, 1, 1]  # the goals


def test_costs_by_hand():
    goal = Target(torch.tensor([[0, 3], [5, 6]]), torch.full((3, 32, 32), 0.5))
    tokens = torch.tensor([[[0, 3], [5, 6]], [[1, 3], [5, 6]], [[7, 3], [5, 1]]])
    frames = torch.stack([torch.full((3, 32, 32), value) for value in (0.5, 0.0, -0.5)])
    assert COSTS["tokens"].of(tokens, frames, goal).tolist() == [0, 0.25, 0.5]
    assert COSTS["bits"].of(tokens, frames, goal).tolist() == [0, 0.25, (3 + 3) / 4]
    assert COSTS["bits"].of(tokens[:1], frames[:1], goal).tolist() == [0]
    assert COSTS["pixels"].of(tokens, frames, goal).tolist() == [0, 0.25, 1]
    assert COSTS["blurred"].of(tokens, frames, goal).tolist() == pytest.approx([0, 32 * 0.25, 32])


def test_whitened_costs_do_not_depend_on_how_colors_are_mixed():
    generator = torch.Generator().manual_seed(0)
    goal, frames = torch.rand(3, 32, 32, generator=generator), torch.rand(4, 3, 32, 32, generator=generator)
    mixed = torch.tensor([[20.0, 3.0, 0.0], [-4.0, 30.0, 7.0], [2.0, 0.0, -25.0]])  # far above the least variance
    tokens = torch.zeros(4, 1, 1)
    costs, others, plain = (
        COSTS[name].of(
            tokens, torch.einsum("ij,njhw->nihw", by, frames), Target(tokens[0], torch.einsum("ij,jhw->ihw", by, goal))
        )
        for name, by in (("whitened", 20 * torch.eye(3)), ("whitened", mixed), ("blurred", mixed))
    )
    torch.testing.assert_close(costs, others, rtol=1e-3, atol=0)
    assert not torch.allclose(plain / plain[0], others / others[0], rtol=1e-2)


def test_elites_are_kept_for_later_iterations():
    weights = CEM(candidates=4, elites=0.5).weights(np.array([3.0, 1.0, 2.0, 0.5]))
    assert CEM(candidates=4, elites=0.5).kept(weights).tolist() == [1, 3]
    assert CEM(candidates=4, keeps_elites=False).kept(weights).tolist() == []
    assert MPPI().kept(weights).tolist() == []


@pytest.mark.parametrize("keeps", [True, False])
def test_a_later_iteration_is_fitted_to_earlier_elites_too(keeps):
    seen: list[np.ndarray] = []

    def noted(tokens, frames, goal):
        costs = COSTS["blurred"].of(tokens, frames, goal)
        seen.append(costs.numpy())
        return costs

    with dot_pipeline("vector") as pipeline:
        search = CEM(candidates=4, iterations=2, elites=0.5, keeps_elites=keeps, least_spread=0.5)
        planner = Planner(pipeline, cost=Cost("noted", noted), search=search, horizon=3)
        searching, drawn = planner._begin(problem((3, 3), (9, 6), 1)), []
        for _ in range(search.iterations):
            searching.draw()
            pipeline.wait(searching.imagine(asyncio.Semaphore(4)))
            searching.weigh()
            drawn.append(searching._drawn)
    elites = np.concatenate(drawn)[np.concatenate(seen).argsort(kind="stable")[:2]]
    middle = searching._distribution.draw(np.random.default_rng(0), 1)[0]
    assert np.allclose(middle, elites.mean(axis=0)) == keeps


def test_only_a_blur_tells_how_far_an_object_is():
    goal = frames_at((4, 4))[0]
    target = Target(frame_at(4, 4), goal)
    frames = frames_at((6, 4), (12, 4))
    pixels = COSTS["pixels"].of(torch.zeros(2, 1, 1), frames, target)
    blurred = COSTS["blurred"].of(torch.zeros(2, 1, 1), frames, target)
    assert pixels[0] == pixels[1]
    assert blurred[0] < blurred[1]


def test_weights():
    costs = np.array([3.0, 1.0, 2.0, 1.0])
    assert CEM(candidates=4, elites=0.5).weights(costs).tolist() == [0, 0.5, 0, 0.5]
    assert CEM(elites=0.01).weights(costs).tolist() == [0, 1, 0, 0]
    weights = MPPI(temperature=1.0).weights(costs)
    assert weights.sum() == pytest.approx(1)
    assert weights[1] == weights[3] > weights[2] > weights[0]
    assert MPPI().weights(np.ones(4)).tolist() == [0.25] * 4


@pytest.mark.parametrize("kind", SPACES)
def test_a_distribution_comes_to_what_it_is_fitted_to(kind):
    space, search, random = SPACES[kind], CEM(spread=0.5, least_spread=0.0), np.random.default_rng(0)
    distribution = first_distribution(space, 3, search)
    drawn = distribution.draw(random, 200)
    assert all(space.problem(values) is None for values in drawn.reshape(-1, drawn.shape[-1]))
    assert len(np.unique(drawn[:, 0], axis=0)) > 3
    only = drawn[7]
    weights = np.zeros(200)
    weights[7] = 1
    fitted = distribution.fitted(drawn, weights, search)
    np.testing.assert_allclose(fitted.draw(random, 5), np.tile(only, (5, 1, 1)), atol=1e-12)


def test_a_policy_reaches_its_goals():
    with dot_pipeline("vector") as pipeline:
        space = SPACES["vector"]
        planner = Planner(pipeline, cost=COSTS["blurred"], search=CEM(candidates=32, iterations=5), horizon=4)
        policy = PlannerPolicy(planner, execute=2, seed=3)
        at, goals = np.array([[3.0, 3.0], [12.0, 10.0]]), [(9, 5), (6, 6)]
        policy.reset(pictures(goals))
        for _ in range(8):
            acts = policy.act(pictures(at))
            assert acts.shape == (2, 2)
            at += [moves(space, torch.from_numpy(space.rows(act[None]))[0]) for act in acts]
        assert np.abs(at - goals).max() <= 1.6
        assert policy.act(pictures(at), done=[True, False])[0].tolist() == [0, 0]
        with pytest.raises(ConfigError, match="pictures: expected 2, one for each goal, got 1"):
            policy.act(pictures(at[:1]))


def pictures(at) -> np.ndarray:
    return np.stack([((frames_at(each)[0].permute(1, 2, 0) + 1) * 127.5).byte().numpy() for each in at])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CEM(candidates=0), "candidates: expected 1 or more, got 0"),
        (lambda: CEM(elites=1.5), "elites: expected a share above 0, at most 1, got 1.5"),
        (lambda: MPPI(temperature=0.0), "temperature: expected more than 0, got 0.0"),
        (lambda: MPPI(least_spread=0.5), "least_spread: expected 0 or more, at most spread, got 0.5 and 0.3"),
        (lambda: planner_of("vector", horizon=0), "horizon: expected 1 or more, got 0"),
        (lambda: planner_of("vector", horizon=5, ends=()), r"ends: expected ascending numbers from 1 to 5, .*got \[\]"),
        (lambda: planner_of("vector", horizon=5, ends=(5, 3)), r"ends: expected ascending .*, got \[5, 3\]"),
        (lambda: planner_of("vector", horizon=5, ends=(0, 5)), r"ends: expected ascending .*, got \[0, 5\]"),
        (lambda: planner_of("vector", horizon=5, ends=(3, 6)), r"ends: expected ascending .*, got \[3, 6\]"),
        (lambda: planner_of("vector", horizon=5).plan([]), "problems: expected one or more, got none"),
        (lambda: PlannerPolicy(planner_of("vector", horizon=5), budget=0), "budget: expected 1 or more, got 0"),
        (lambda: PlannerPolicy(planner_of("vector", horizon=5), execute=6), "execute: expected 1 to 5, the horizon"),
    ],
)
def test_what_cannot_be_planned_is_one_line(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def planner_of(kind: str, horizon: int, ends=None) -> Planner:
    return Planner(dot_pipeline(kind), cost=COSTS["tokens"], search=CEM(), horizon=horizon, ends=ends)


def test_a_world_of_waypoints_is_refused():
    pipeline = dot_pipeline("vector")
    object.__setattr__(pipeline.engine.spec, "space", Waypoints())
    with pytest.raises(Exception, match="planning: expected a world of vectors, keys or choices"):
        Planner(pipeline, cost=COSTS["tokens"], search=CEM(), horizon=3)
