"""Reads the JSON of a video request: the trajectory or the actions, and what else it says.

The module imports neither torch nor the server: the process that reads large bodies (`reader`) stays small.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from terra.actions import ActionSpace, ActionTrack, Waypoints
from terra.actions.files import parse_document as parse_actions
from terra.errors import ActionError, ConfigError
from terra.inputs import action_field
from terra.serving.errors import ApiError
from terra.trajectory import Trajectory
from terra.trajectory.document import parse_document
from tokenizer.files import parse_json
from tokenizer.limits import LIMITS, Limits

_DOCUMENTS = ("trajectory", "actions")
_SOURCES = (*_DOCUMENTS, "trajectory_name", "actions_name")
_JSON_FIELDS = (*_DOCUMENTS, "sampling")
_REST_BYTES = 64 << 10  # of all fields but the documents


@dataclass(frozen=True)
class Wanted:
    """What a server reads of a request: actions of its model's space, for `seconds` of video, within limits."""

    space: ActionSpace
    seconds: float
    limits: Limits


@dataclass(frozen=True)
class Fields:
    """A request's fields as JSON, in which documents are empty, and what the document says; None without one."""

    rest: str
    track: Trajectory | ActionTrack | None


def read_fields(content: bytes | Mapping[str, str], wanted: Wanted) -> Fields:
    """Read a JSON body, or the texts of a form by name. Raises ApiError (400)."""
    fields: dict[str, Any]
    if isinstance(content, bytes):
        fields = _parse_json(content.decode(errors="replace"), "body", wanted.limits)
    else:
        fields = {
            name: _parse_json(text, name, wanted.limits) if name in _JSON_FIELDS else text
            for name, text in content.items()
        }
        if "map_pose" in fields:
            fields["map_pose"] = fields["map_pose"].strip("[] ").split(",", 3)
    # A document that stands beside another source of actions is refused later, unread.
    given = [name for name in _SOURCES if fields.get(name) is not None]
    track = None
    for name in _DOCUMENTS:
        document = fields.get(name)
        if isinstance(document, dict):
            fields[name] = {}
            if given == [name] == [action_field(wanted.space)]:
                track = _track(document, name, wanted)
    rest = json.dumps(fields)
    if len(rest) > _REST_BYTES:
        message = f"expected at most {_REST_BYTES} bytes besides trajectory and actions, got {len(rest)}"
        raise ApiError(400, "invalid_request", message)
    return Fields(rest, track)


def parse_track(
    document: dict[str, Any], space: ActionSpace, source: str, limits: Limits = LIMITS, seconds: float | None = None
) -> Trajectory | ActionTrack:
    """The actions of a document: a trajectory where the space is waypoints, of poses up to `seconds` and a frame more.

    Raises:
        ActionError: as `terra.trajectory` and `terra.actions` do.
    """
    if isinstance(space, Waypoints):
        return parse_document(document, source, seconds, limits)
    return parse_actions(document, space, source, limits=limits)


def refused(field: str, message: str) -> ApiError:
    """A 400 for a trajectory or actions."""
    return ApiError(400, f"invalid_{field}", message, param=field)


def _parse_json(text: str, name: str, limits: Limits) -> dict[str, Any]:
    try:
        return parse_json(text, name, ConfigError, limits=limits)
    except ConfigError as error:
        param = None if name == "body" else name
        raise ApiError(400, "invalid_request", str(error), param=param) from None


def _track(document: dict[str, Any], field: str, wanted: Wanted) -> Trajectory | ActionTrack:
    try:
        return parse_track(document, wanted.space, field, wanted.limits, wanted.seconds)
    except ActionError as error:
        raise refused(field, str(error)) from None
    except OverflowError:
        raise refused(field, f"{field}: expected finite numbers") from None
