"""The JSON of HTTP requests and responses, as in the OpenAPI document."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from terra.serving.about import Subject
from terra.serving.messages import MAX_SEED, Identifier, MapPose, Remember, Sampling


def _number(value: Any) -> Any:
    """Read a number that came as text, which is how OpenAI's clients send `seconds`. Raises ValueError."""
    return float(value) if isinstance(value, str) else value


Seconds = Annotated[
    Annotated[float, Field(gt=0, le=1_000_000)], BeforeValidator(_number, json_schema_input_type=float | str)
]


class VideoRequestBody(BaseModel):
    """A request for a video: its context, and its trajectory or, where the model is not driven, its actions."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: Identifier | None = Field(
        default=None, description="one of /v1/models; the scene's if left out, else the base model"
    )
    scene: Identifier | None = Field(default=None, description="one of /v1/scenes")
    context: Identifier | None = Field(default=None, description="one of POST /v1/contexts")
    trajectory: dict[str, Any] | None = Field(default=None, description="a terra-trajectory document")
    trajectory_name: Identifier | None = Field(default=None, description="one of the scene's")
    actions: dict[str, Any] | None = Field(default=None, description="a terra-actions document")
    actions_name: Identifier | None = Field(default=None, description="one of the scene's")
    num_frames: Annotated[int, Field(ge=2, le=1_000_000)] | None = Field(default=None, description="context included")
    seconds: Seconds | None = Field(default=None, description="the video's length, in place of num_frames")
    size: Annotated[str, Field(max_length=20)] | None = Field(
        default=None, description="WIDTHxHEIGHT; no other than the model's, see /v1/models"
    )
    prompt: str | None = Field(default=None, description="is not used: these models take actions, not words")
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    sampling: Sampling | None = None
    memory: Remember = None
    map_pose: MapPose | None = Field(
        default=None,
        description="[x, y, heading] in m and rad of the first context frame in the axes of the server's map, which "
        "the video then remembers; the map is not used if left out",
    )

    @model_validator(mode="after")
    def _sources(self) -> "VideoRequestBody":
        given = (self.trajectory, self.trajectory_name, self.actions, self.actions_name)
        if sum(each is not None for each in given) != 1:
            raise ValueError("expected one of trajectory, trajectory_name, actions and actions_name")
        for name in ("trajectory_name", "actions_name"):
            if getattr(self, name) is not None and self.scene is None:
                raise ValueError(f"expected a scene with {name}")
        if self.num_frames is not None and self.seconds is not None:
            raise ValueError("expected one of num_frames and seconds, got both")
        return self


class VideoError(BaseModel):
    """Why a job failed."""

    code: str
    message: str


class Video(BaseModel):
    """A video job, as OpenAI's clients read it.

    Times are in seconds since 1970, `progress` is in per cent, `seconds` is the video's length as text.
    """

    id: str
    object: Literal["video"] = "video"
    status: Literal["queued", "in_progress", "completed", "failed", "cancelled"]
    progress: int
    model: str
    created_at: int
    completed_at: int | None
    expires_at: int | None
    size: str
    num_frames: int
    num_context: int
    seconds: str
    seed: int
    error: VideoError | None


class VideoList(BaseModel):
    """A page of jobs; the next one follows `after=last_id`."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    """A deleted job."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


class Context(BaseModel):
    """An uploaded context, how well the model shows it, and the time of its deletion (seconds since 1970)."""

    id: str
    object: Literal["context"] = "context"
    num_frames: int
    expires_at: int
    psnr: float = Field(description="mean PSNR in dB of the context's frames after encoding and decoding")
    psnr_by_view: dict[str, float] | None = Field(None, description="that of each view; null for one camera")
    warning: str | None = Field(description="one line if that is far below the tokenizer's held-out frames, else null")


class CameraViews(BaseModel):
    """The cameras that share each picture of a world, and the part that shows each."""

    image_size: list[int] = Field(description="height and width of a picture in pixels")
    names: list[str]
    boxes: list[list[int]] = Field(description="left, top, right and bottom of each, in pixels")


class ModelCard(BaseModel):
    """A model that is served: the base model, or one of its adapters."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["terra"] = "terra"
    root: str = Field(description="of an adapter the name of its folder, of the base model its id")
    parent: str | None = Field(description="of an adapter the base model's id, else null")
    fps: float
    size: str
    frame_tokens: int
    action_space: dict[str, Any] = Field(
        description="what an action is: its kind (waypoints, vector, keys or choice), and names, units, low and high, "
        "or the waypoints' times in seconds"
    )
    neutral: Any = Field(None, description="the action before a client gives one; null where the model is driven")
    memory: int = Field(0, description="earlier frames that each window of a rollout remembers")
    views: CameraViews | None = Field(None, description="the cameras that share a picture; null for one camera")


class ModelList(BaseModel):
    """The served models, the base model first."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class World(BaseModel):
    """A world of this server, each with routes of its own."""

    id: str = Field(description="the name of the world: that of its base model")
    url: str = Field(description="URL of the world's page, relative to that of the queried world; its routes are below")
    title: str | None = Field(description="the world's name for people, if it says one")
    line: str = Field(description="what one does there")
    kind: str = Field(description="of its action space: waypoints, vector, keys or choice")
    downward: list[str] = Field(description="numbers of a vector that are positive where something moves down")
    subject: Subject | None = Field(description="what a player moves and the model may lose, if the world says so")


class WorldList(BaseModel):
    """The worlds, that of the address `/` first."""

    object: Literal["list"] = "list"
    data: list[World]


class Scene(BaseModel):
    """A scene that a rollout can start from."""

    id: str
    num_frames: int
    line: str | None = Field(default=None, description="what one does there, if the world says so")
    model: str | None = Field(default=None, description="the model that the scene is for, where it is an adapter")
    trajectories: list[str] | None = Field(default=None, description="where the model is driven")
    actions: list[str] | None = Field(default=None, description="where the model is not driven")
    map_pose: MapPose | None = Field(default=None, description="of the first frame in the server's map, where known")


class SceneList(BaseModel):
    """All scenes."""

    object: Literal["list"] = "list"
    data: list[Scene]


class Health(BaseModel):
    """The server's status."""

    status: Literal["ok", "degraded", "shutting_down"]
    reason: str | None = None


class ErrorDetail(BaseModel):
    """An error: a message for people, and codes for programs."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The body of every response with status 400 or above."""

    error: ErrorDetail
