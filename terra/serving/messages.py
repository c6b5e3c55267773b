"""The messages of a live session: the clients' messages as checked models, and the server's frame message.

A frame is one binary message: 4 bytes with the header's length (big-endian), the header as JSON, and the picture.
"""

import json
import struct
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, model_validator

from terra.driving.control import MAX_PATH_POINTS, MAX_SPEED, MAX_STEERING
from terra.sampling import SamplingParams
from tokenizer.limits import MAP_METERS

MAX_SEED = 2**63 - 1
_MAX_METERS = 1000.0  # largest coordinate of a waypoint
_HEADER = struct.Struct(">I")

Meters = Annotated[float, Field(ge=-_MAX_METERS, le=_MAX_METERS)]
Waypoint = Annotated[list[Meters], Field(min_length=3, max_length=3)]
ActionRows = Annotated[list[Waypoint], Field(min_length=1, max_length=64)]
MapPose = Annotated[list[Annotated[float, Field(ge=-MAP_METERS, le=MAP_METERS)]], Field(min_length=3, max_length=3)]
Remember = Annotated[
    bool | None,
    Field(description="whether earlier frames are remembered, for a model that can; true if left out"),
]
Identifier = Annotated[str, Field(min_length=1, max_length=80)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Sampling(_Model):
    """Sampling parameters; the server's settings replace missing ones."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _is_possible(self) -> "Sampling":
        SamplingParams(**self.model_dump(exclude_none=True))  # a ValueError is the client's
        return self


class Open(_Model):
    """The first message, which starts the session from a scene, an uploaded context or a fork."""

    type: Literal["open"]
    scene: Identifier | None = None
    context: Identifier | None = None
    fork: Identifier | None = None
    model: Identifier | None = Field(
        default=None, description="one of /v1/models; the scene's if left out, else the base model"
    )
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    sampling: Sampling | None = None
    format: Literal["jpeg", "webp", "png"] = "jpeg"
    quality: Annotated[int, Field(ge=1, le=100)] = 85
    actions: Annotated[list[JsonValue], Field(max_length=64)] | None = Field(
        default=None,
        description="between the context frames, rows (`read_rows`) where the model is driven, else as its action "
        "space has them in JSON; of a scene's own file if left out",
    )
    memory: Remember = None
    map_pose: MapPose | None = Field(
        default=None,
        description="[x, y, heading] in m and rad of the first context frame in the axes of the server's map; the "
        "scene's if left out. Without either the map is not used",
    )
    speed: Annotated[float, Field(ge=0, le=MAX_SPEED)] | None = Field(
        default=None, description="m/s at the start, for a context that says nothing about it"
    )
    api_key: Annotated[str, Field(max_length=400)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "Open":
        if sum(each is not None for each in (self.scene, self.context, self.fork)) != 1:
            raise ValueError("expected one of scene, context and fork")
        own = (self.model, self.sampling, self.actions, self.speed, self.memory, self.map_pose)
        if self.fork is not None and any(each is not None for each in own):
            raise ValueError(
                "expected no model, sampling, actions, speed, memory or map_pose with a fork, which has its own"
            )
        return self


class Control(_Model):
    """Steering angle (rad, left positive) and speed (m/s), which hold until the next order."""

    type: Literal["control"]
    steering: Annotated[float, Field(ge=-MAX_STEERING, le=MAX_STEERING)]
    speed: Annotated[float, Field(ge=0, le=MAX_SPEED)]


class Act(_Model):
    """The action of a model that is not driven, as its action space has it in JSON; it holds until the next one."""

    type: Literal["act"]
    action: JsonValue


class PathOrder(_Model):
    """A path in the car's axes (x forward, y left, meters) at times in seconds from now."""

    type: Literal["path"]
    points: Annotated[
        list[Annotated[list[Meters], Field(min_length=2, max_length=2)]],
        Field(min_length=1, max_length=MAX_PATH_POINTS),
    ]
    times: Annotated[list[Annotated[float, Field(ge=0, le=3600)]], Field(min_length=1, max_length=MAX_PATH_POINTS)]


class Ack(_Model):
    """Acknowledges all frames up to `index`."""

    type: Literal["ack"]
    index: Annotated[int, Field(ge=0, le=2**53)]


class Step(_Model):
    """Makes one frame while the session is paused, with `action` or the car's current order."""

    type: Literal["step"]
    action: ActionRows | None = None


class Rewind(_Model):
    """Goes back to a frame, which becomes the last one."""

    type: Literal["rewind"]
    frame: Annotated[int, Field(ge=0, le=2**53)]


class ForkOrder(_Model):
    """Keeps the rollout as it was at a frame, so that other sessions can start from it."""

    type: Literal["fork"]
    frame: Annotated[int, Field(ge=0, le=2**53)]


class Plain(_Model):
    """A message without fields."""

    type: Literal["pause", "resume", "close"]


Message = Annotated[
    Open | Control | Act | PathOrder | Ack | Step | Rewind | ForkOrder | Plain, Field(discriminator="type")
]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(Message)
_ROWS = TypeAdapter(list[ActionRows], config=ConfigDict(strict=True, allow_inf_nan=False))


class MessageError(ValueError):
    """An invalid message; the error's one line says what was expected."""


def read_message(text: str) -> Message:
    """Parse a client's message.

    Raises:
        MessageError: no JSON, an unknown type, or a field that is missing, unknown, of another type or out of range.
    """
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise MessageError(first_problem(error)) from None


def read_rows(actions: list[JsonValue]) -> list[list[list[float]]]:
    """The `actions` of an `Open` for a model that is driven: rows of [lateral y, forward x, time t] each.

    Raises:
        MessageError: other JSON, or a number out of range.
    """
    try:
        return _ROWS.validate_python(actions)
    except ValidationError as error:
        raise MessageError(f"open.actions.{first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """Describe the first problem in one line, without the received value."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")  # pydantic's words before those of our own checks
    return f"{place}: {message}" if place else message


def frame_message(header: dict[str, Any], picture: bytes) -> bytes:
    """Build the binary message of a frame."""
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    return _HEADER.pack(len(text)) + text + picture


def read_frame(message: bytes) -> tuple[dict[str, Any], bytes]:
    """Split a frame message into header and picture. Raises ValueError for another message."""
    if len(message) < _HEADER.size:
        raise ValueError(f"frame: expected 4 bytes or more, got {len(message)}")
    (length,) = _HEADER.unpack_from(message)
    if len(message) < _HEADER.size + length:
        raise ValueError(f"frame: expected a header of {length} bytes, got {len(message) - _HEADER.size}")
    start = _HEADER.size + length
    return json.loads(message[_HEADER.size : start]), message[start:]
