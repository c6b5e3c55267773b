"""Defines the HTTP routes of video jobs, with the names and fields of OpenAI's /v1/videos."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from terra.actions import ActionSpace, ActionTrack
from terra.errors import ActionError, ConfigError
from terra.inputs import action_field
from terra.rollout import track_actions
from terra.rollout_record import view_video
from terra.serving import schemas
from terra.serving.documents import refused
from terra.serving.errors import ApiError, not_found
from terra.serving.guard import client_of
from terra.serving.jobs import VARIANTS, VideoRequest
from terra.serving.messages import first_problem
from terra.serving.scenes import Scene
from terra.serving.service import Service
from terra.serving.store import Job
from terra.trajectory import Trajectory

_MAX_FIELDS = 16
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/VideoRequestBody"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "description": "The same fields; pictures or a video as `input_reference` in place of a context. "
                    "OpenAI's clients send this.",
                    "properties": {
                        "input_reference": {"type": "array", "items": {"type": "string", "format": "binary"}},
                        "trajectory": {"type": "string", "description": "the document's JSON"},
                        "actions": {"type": "string", "description": "the document's JSON"},
                        "map_pose": {"type": "string", "description": "x,y,heading"},
                    },
                }
            },
        },
    }
}


def video_routes(service: Service) -> APIRouter:
    """The router of POST, GET and DELETE under /v1/videos."""
    router = APIRouter(tags=["videos"])

    @router.post("/v1/videos", openapi_extra=_BODY)
    async def create_video(request: Request) -> schemas.Video:
        """Queue a video: context frames of a scene or an upload, and a trajectory or actions."""
        service.check_open()
        body, track, files = await _read_body(service, request)
        if body.model is not None:
            service.model.adapter(body.model)  # refused before files are read
        if sum((body.scene is not None, body.context is not None, bool(files))) != 1:
            raise ApiError(400, "invalid_request", "expected one of scene, context and input_reference")
        client = client_of(request)
        job = await service.jobs.add(await _video_request(service, body, track, files, client), client)
        return video(service, job)

    @router.get("/v1/videos")
    async def list_videos(
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: Annotated[str | None, Query(max_length=80)] = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> schemas.VideoList:
        """Jobs, the newest first, a page at a time."""
        start = None if after is None else await _find(service, after)
        jobs = await service.store.list(limit + 1, start, newest_first=order == "desc")
        page = [video(service, job) for job in jobs[:limit]]
        ids = [each.id for each in page] or [None]
        return schemas.VideoList(data=page, first_id=ids[0], last_id=ids[-1], has_more=len(jobs) > limit)

    @router.get("/v1/videos/{video_id}")
    async def retrieve_video(video_id: str) -> schemas.Video:
        """A job's status and progress."""
        return video(service, await _find(service, video_id))

    content: dict[int | str, dict[str, Any]] = {
        200: {"content": {kind: {"schema": _BINARY} for _, kind in VARIANTS.values()}}
    }

    @router.get("/v1/videos/{video_id}/content", response_class=FileResponse, responses=content)
    async def video_content(
        video_id: str,
        variant: Literal["video", "gif", "tokens"] = "video",
        view: Annotated[str | None, Query(max_length=80)] = None,
    ) -> FileResponse:
        """A completed job's video as MP4 or GIF, or its tokens and actions as safetensors.

        Where several cameras share a picture, `view` is the name of one whose part the MP4 shows alone.
        """
        views = service.model.spec.views
        known = () if views is None else views.names
        if view is not None and (view not in known or variant != "video"):
            expected = f"one of {', '.join(known)}, of the variant video" if known else "none, of a world of one camera"
            raise ApiError(400, "invalid_request", f"view: expected {expected}, got {view}", param="view")
        job = await _find(service, video_id)
        if job.status != "completed":
            raise ApiError(409, "not_completed", f"expected a completed job, got one that is {job.status}")
        name, kind = VARIANTS[variant] if view is None else (view_video(view), "video/mp4")
        path = service.store.folder(job) / name
        if not path.is_file():
            raise not_found("video")
        return FileResponse(path, media_type=kind, filename=f"{job.id}{path.suffix}")

    @router.post("/v1/videos/{video_id}/cancel")
    async def cancel_video(video_id: str) -> schemas.Video:
        """Stop a job that has not ended; it stays in the list as cancelled."""
        job = await _find(service, video_id)
        await service.jobs.cancel(job)
        return video(service, await _find(service, video_id))

    @router.delete("/v1/videos/{video_id}")
    async def delete_video(video_id: str) -> schemas.Deleted:
        """Stop a job, and remove it and its files."""
        job = await _find(service, video_id)
        if not await service.jobs.delete(job):
            raise not_found("video")
        return schemas.Deleted(id=job.id)

    @router.post("/v1/videos/{_}/remix", include_in_schema=False)
    @router.post("/v1/videos/edits", include_in_schema=False)
    @router.post("/v1/videos/extensions", include_in_schema=False)
    @router.post("/v1/videos/characters", include_in_schema=False)
    @router.get("/v1/videos/characters/{_}", include_in_schema=False)
    async def unserved_video(request: Request) -> None:
        """Refuse what OpenAI's clients can ask for besides."""
        asked = "remix" if request.url.path.endswith("/remix") else request.url.path.split("/videos/")[1].split("/")[0]
        message = f"expected a new video (POST /v1/videos), got {asked}: these models edit no videos"
        raise ApiError(400, "unsupported", message)

    return router


_BINARY = {"type": "string", "format": "binary"}


def video(service: Service, job: Job) -> schemas.Video:
    """A job as the API's video object."""
    num_frames = job.request["num_frames"]
    return schemas.Video(
        id=job.id,
        status=job.status,
        progress=service.jobs.progress(job),
        model=service.model.name_of(job.request.get("adapter")),
        created_at=int(job.created_at),
        completed_at=None if job.completed_at is None else int(job.completed_at),
        expires_at=None if job.expires_at is None else int(job.expires_at),
        size=service.model.size,
        num_frames=num_frames,
        num_context=job.request["num_context"],
        seconds=f"{num_frames / service.model.spec.fps:g}",
        seed=job.request["seed"],
        error=None if job.error is None else schemas.VideoError(**job.error),
    )


async def _find(service: Service, video_id: str) -> Job:
    job = await service.store.find(video_id)
    if job is None:
        raise not_found("video")
    return job


async def _read_body(
    service: Service, request: Request
) -> tuple[schemas.VideoRequestBody, Trajectory | ActionTrack | None, list[bytes]]:
    """The fields, the actions and the files of a JSON or multipart body. Raises ApiError (400, 413, 415)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    uploads = service.settings.uploads
    content: bytes | dict[str, str]
    files: list[bytes] = []
    if kind == "application/json":
        content = await request.body()
    elif kind == "multipart/form-data":
        max_files = service.contexts.max_pictures + 1
        async with _form(
            request, max_files=max_files, max_fields=_MAX_FIELDS, max_part_size=uploads.max_json_bytes
        ) as form:
            files = [await each.read() for each in form.getlist("input_reference") if isinstance(each, UploadFile)]
            content = await _form_texts(form, uploads.max_json_bytes)
    else:
        raise ApiError(415, "unsupported_media_type", "expected application/json or multipart/form-data")
    fields = await service.read_fields(content)
    try:
        body = schemas.VideoRequestBody.model_validate_json(fields.rest, strict=kind == "application/json")
    except ValidationError as error:
        place = error.errors(include_url=False, include_context=False, include_input=False)[0]["loc"]
        param = str(place[0]) if place else None
        raise ApiError(400, "invalid_request", first_problem(error), param=param) from None
    return body, fields.track, files


@asynccontextmanager
async def _form(request: Request, **limits: int) -> AsyncIterator[FormData]:
    """The parts of a form. Raises ApiError (400), also for a document that is no text but a part for each number."""
    try:
        form = await request.form(**limits)
    except HTTPException as error:
        message = f"{error.detail}; expected trajectory, actions and sampling as JSON text, each in one part"
        raise ApiError(400, "invalid_request", message) from None
    try:
        for part in form:
            name, bracket, _ = part.partition("[")
            if bracket:
                wanted = "a file" if name == "input_reference" else "JSON text in one part, such as json.dumps makes"
                raise ApiError(400, "invalid_request", f"{name}: expected {wanted}, got a part {part}", param=name)
        yield form
    finally:
        await form.close()


async def _form_texts(form: FormData, max_bytes: int) -> dict[str, str]:
    """The fields of a form, of which files are texts, too, of at most `max_bytes` each. Raises ApiError (413)."""
    texts: dict[str, str] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile) and name != "input_reference" and (value.size or 0) > max_bytes:
            raise ApiError(413, "too_large", f"expected a file of at most {max_bytes} bytes as a field")
        if name != "input_reference":
            texts[name] = (await value.read()).decode(errors="replace") if isinstance(value, UploadFile) else value
    return texts


async def _video_request(
    service: Service,
    body: schemas.VideoRequestBody,
    given: Trajectory | ActionTrack | None,
    files: list[bytes],
    client: str,
) -> VideoRequest:
    num_frames = _num_frames(service, body)
    scene = None if body.scene is None else service.scenes.find(body.scene)
    adapter = service.adapter(body.model, scene)
    service.check_map_pose(body.map_pose, service.memory(body.memory, adapter))
    spec = service.model.spec
    field = _action_field(body, spec.space)
    track = _scene_track(scene, field, getattr(body, f"{field}_name")) if given is None else given
    if scene is not None:
        context = await service.scenes.tokens(scene)
    else:
        name = body.context or (await service.contexts.add(files, client)).id
        context = await service.contexts.tokens(name)
    try:
        service.model.pipeline.plan(num_frames, len(context), adapter, has_map=body.map_pose is not None)
        actions, _ = await service.model.run("files", lambda: track_actions(track, num_frames, spec))
    except ActionError as error:
        raise refused(field, str(error)) from None
    except ConfigError as error:
        raise ApiError(400, "invalid_request", str(error), param="num_frames") from None
    return VideoRequest(
        context,
        actions,
        service.sampling(body.sampling),
        body.seed,
        adapter,
        body.memory is not False,
        body.map_pose,
    )


def _num_frames(service: Service, body: schemas.VideoRequestBody) -> int:
    """How many frames a video has, its context included. Raises ApiError (400), also for another size."""
    size, fps, jobs = service.model.size, service.model.spec.fps, service.settings.jobs
    if body.size not in (None, size):
        raise ApiError(400, "invalid_size", f"size: expected {size}, the model's, got {body.size}", param="size")
    if body.seconds is None:
        num_frames, field, unit = body.num_frames or jobs.default_frames, "num_frames", ""
    else:
        num_frames, field, unit = round(body.seconds * fps), "seconds", f" frames at {fps:g} frames/s"
    if num_frames > jobs.max_frames:
        message = f"{field}: expected at most {jobs.max_frames}{unit}, got {num_frames}"
        raise ApiError(400, "too_many_frames", message, param=field)
    return num_frames


def _action_field(body: schemas.VideoRequestBody, space: ActionSpace) -> str:
    """Which field tells the actions: `trajectory`, in driving, or `actions`, a scene's file by its name included.

    Raises:
        ApiError: 400 where the field does not suit the space.
    """
    field = "actions" if body.trajectory is None and body.trajectory_name is None else "trajectory"
    wanted = action_field(space)
    if field != wanted:
        raise refused(field, f"{field}: expected {wanted} in its place, for the model's {space.title}, got {field}")
    return field


def _scene_track(scene: Scene | None, field: str, name: str | None) -> Trajectory | ActionTrack:
    assert scene is not None
    assert name is not None
    if name not in scene.tracks:
        raise not_found(field, scene.tracks)
    return scene.tracks[name]
