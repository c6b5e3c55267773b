"""Plans with the world model: `imagine` scores futures that the user gives, a `Planner` searches for actions itself.

    planner = Planner(pipeline, horizon=25, cost=COSTS["whitened"], search=CEM(candidates=64, iterations=8))
    (plan,) = planner.plan([Problem(context_frames, actions_between, goal_frame, seed=0)])

`PlannerPolicy` acts with a planner in Gymnasium's vector environments.
"""

from terra.planning.costs import COSTS, Cost, Target
from terra.planning.futures import Choice, Score, imagine
from terra.planning.planner import Plan, Planner, Problem
from terra.planning.policy import PlannerPolicy
from terra.planning.search import CEM, MPPI, Search

__all__ = [
    "CEM",
    "COSTS",
    "MPPI",
    "Choice",
    "Cost",
    "Plan",
    "Planner",
    "PlannerPolicy",
    "Problem",
    "Score",
    "Search",
    "Target",
    "imagine",
]
