"""Actions: what an action means (its space), and the files that hold actions.

    actions file --load_actions--> ActionTrack --at_rate--> values --ActionSpace.rows--> (steps, slots, action_dim)

The files of waypoints are trajectories, see `terra.trajectory`.
"""

from terra.actions.files import ActionTrack, load_actions, save_actions
from terra.actions.space import (
    ActionSpace,
    Choice,
    Keys,
    TableSpace,
    Vector,
    Waypoints,
    describe_space,
    parse_space,
    read_space,
    require_table,
    require_waypoints,
)

__all__ = [
    "ActionSpace",
    "ActionTrack",
    "Choice",
    "Keys",
    "TableSpace",
    "Vector",
    "Waypoints",
    "describe_space",
    "load_actions",
    "parse_space",
    "read_space",
    "require_table",
    "require_waypoints",
    "save_actions",
]
