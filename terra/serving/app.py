"""The application: every route of every world."""

import posixpath
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.types import Lifespan

from terra.actions import Waypoints
from terra.memory import memory_frames
from terra.serving import schemas
from terra.serving.errors import ApiError, error_body, not_found
from terra.serving.guard import WORLDS, Guard, client_of
from terra.serving.live import live
from terra.serving.model import encode_picture
from terra.serving.pages import page_routes
from terra.serving.service import Service
from terra.serving.store import StorageError
from terra.serving.videos import video_routes

_ABOUT = """Drive or play a world model, or let it make videos.

Live sessions are a WebSocket at /v1/live: send {"type": "open", "scene": "day"} (with "model" for one of /v1/models), \
then {"type": "control", "steering": \
rad, "speed": m/s} or {"type": "path", "points": [[x, y], ...], "times": [...]}, or, where the model's actions are no \
waypoints, {"type": "act", "action": ["forward"]}, and {"type": "ack", "index": k} for each frame; also pause, resume, \
step, rewind, fork and close. A frame is one binary message: 4 bytes with the length of a JSON header, the header, the \
picture."""
_FILES = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "description": "`files`; or, where several cameras share a picture, a field for each view",
                    "properties": {"files": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                }
            }
        },
    }
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": schemas.ErrorBody, "description": "Refused: the code says why"},
    "503": {"model": schemas.ErrorBody, "description": "Full, shutting down, or without an engine"},
}


class _Application(FastAPI):
    """A FastAPI application whose OpenAPI document includes the request bodies that routes parse themselves."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            schemas_by_name = document["components"]["schemas"]
            made = schemas.VideoRequestBody.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas_by_name.update(made.pop("$defs", {}))
            schemas_by_name["VideoRequestBody"] = made
            for methods in document["paths"].values():
                for route in methods.values():
                    route["responses"].pop("422", None)  # invalid requests get 400, described with the rest of 4XX
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas_by_name.pop(unused, None)
        assert self.openapi_schema is not None
        return self.openapi_schema


def create_app(service: Service) -> FastAPI:
    """Build the application with all routes, those of a further world below /worlds/NAME.

    The service starts and ends with the application.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.close()

    paths = {service.settings.model_name: "/"} | {name: f"{WORLDS}/{name}" for name in service.worlds}
    services = {service.settings.model_name: service} | service.worlds
    app = _world_app(service, services, _urls(paths, "/"), lifespan)
    for name, each in service.worlds.items():
        app.mount(paths[name], _world_app(each, services, _urls(paths, paths[name])))
    app.add_middleware(Guard, settings=service.settings, metrics=service.metrics)
    return app


def _urls(paths: Mapping[str, str], here: str) -> dict[str, str]:
    """Each world's page URL, relative to the page at `here`: the links also work behind a proxy's path prefix."""
    return {name: f"{posixpath.relpath(path, here)}/" for name, path in paths.items()}


def _world_app(
    service: Service,
    services: Mapping[str, Service],
    urls: Mapping[str, str],
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    """All routes of one world; `services` and `urls`, relative to its page, are those of all worlds by name."""
    app = _Application(
        title="Terra",
        description=_ABOUT,
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
        redirect_slashes=False,
    )
    app.include_router(video_routes(service))
    app.include_router(_model_routes(service))
    app.include_router(_world_routes(services, urls))
    app.include_router(_server_routes(service))
    app.include_router(page_routes(app))

    @app.websocket("/v1/live")
    async def live_route(websocket: WebSocket) -> None:
        await live(websocket, service, has_key=websocket.scope["terra.has_key"])

    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(StorageError, _on_storage_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_failure)
    return app


def _world_routes(services: Mapping[str, Service], urls: Mapping[str, str]) -> APIRouter:
    router = APIRouter(tags=["model"])

    @router.get("/v1/worlds")
    async def list_worlds() -> schemas.WorldList:
        """The worlds of this server. Each world's routes are below its `url`."""
        return schemas.WorldList(data=[_world(name, url, services[name]) for name, url in urls.items()])

    return router


def _world(name: str, url: str, service: Service) -> schemas.World:
    about, space = service.about, service.model.spec.space
    return schemas.World(
        id=name,
        url=url,
        title=about.title,
        line=about.line_for(space),
        kind=space.kind,
        downward=list(about.downward),
        subject=about.subject,
    )


def _model_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["model"])

    @router.get("/v1/models")
    async def list_models() -> schemas.ModelList:
        """The models that are served: the base model, and each of its adapters."""
        space, views = service.model.spec.space, service.model.spec.views
        base, *adapters = service.model.names
        roots = {name: service.settings.adapters[name].name for name in adapters}
        cards = [
            schemas.ModelCard(
                id=name,
                created=service.created,
                root=roots.get(name, name),
                parent=base if name in roots else None,
                fps=service.model.spec.fps,
                size=service.model.size,
                frame_tokens=service.model.spec.layout.image_tokens,
                action_space=space.model_dump(mode="json"),
                neutral=None if isinstance(space, Waypoints) else space.to_json(space.neutral),
                memory=memory_frames(service.model.pipeline.memory_for(name if name in roots else None)),
                views=None if views is None else schemas.CameraViews(**views.describe()),
            )
            for name in service.model.names
        ]
        return schemas.ModelList(data=cards)

    @router.get("/v1/scenes", response_model_exclude_none=True)
    async def list_scenes() -> schemas.SceneList:
        """Scenes to start from."""
        tracks = "trajectories" if isinstance(service.model.spec.space, Waypoints) else "actions"
        every = service.scenes.all.values()
        return schemas.SceneList(
            data=[
                schemas.Scene(
                    id=each.id,
                    num_frames=len(each.pictures),
                    line=service.about.scenes.get(each.id),
                    model=each.adapter,
                    map_pose=None if each.map_pose is None else list(each.map_pose),
                    **{tracks: list(each.tracks)},
                )
                for each in every
            ]
        )

    picture: dict[int | str, dict[str, Any]] = {
        200: {"content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}}
    }

    @router.get("/v1/scenes/{scene_id}/image", response_class=Response, responses=picture)
    async def scene_image(scene_id: str) -> Response:
        """A scene's last context frame."""
        scene = service.scenes.find(scene_id)
        data = await service.model.run("files", lambda: encode_picture(scene.pictures[-1], "png"))
        return Response(data, media_type="image/png", headers={"Cache-Control": "max-age=600"})

    @router.get("/v1/scenes/{scene_id}/actions/{name}")
    @router.get("/v1/scenes/{scene_id}/trajectories/{name}")
    async def scene_trajectory(scene_id: str, name: str) -> dict[str, Any]:
        """One of a scene's trajectories or other files of actions, as the document that POST /v1/videos takes."""
        documents = service.scenes.find(scene_id).documents
        if name not in documents:
            raise not_found("trajectory", documents)
        return documents[name]

    @router.post("/v1/contexts", openapi_extra=_FILES)
    async def create_context(request: Request) -> schemas.Context:
        """Pictures in order, or one video, to start from; other aspects than the model's are cropped to the middle.

        Where several cameras share a picture (`views` of /v1/models), `files` are whole pictures; in their place there
        may be a field for each view, such as `front` and `wrist`.
        """
        service.check_open()
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise ApiError(415, "unsupported_media_type", "expected multipart/form-data")
        views = service.model.spec.views
        names = () if views is None else views.names
        max_files = service.contexts.max_pictures * max(1, len(names)) + 1
        async with request.form(max_files=max_files, max_fields=16) as form:
            given = {
                name: [await each.read() for each in form.getlist(name) if isinstance(each, UploadFile)]
                for name in ("files", *names)
            }
        files, is_by_view = given.pop("files"), any(given.values())
        if files and is_by_view:
            message = f"files: expected none beside those of {', '.join(names)}, got some"
            raise ApiError(400, "invalid_request", message, param="files")
        context = await service.contexts.add(given if is_by_view else files, client_of(request))
        return schemas.Context(
            id=context.id,
            num_frames=len(context.pictures),
            expires_at=int(context.expires_at),
            psnr=context.reconstruction.psnr,
            psnr_by_view=context.reconstruction.by_view,
            warning=context.reconstruction.warning,
        )

    return router


def _server_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["server"])

    @router.get("/health", response_model_exclude_none=True)
    async def health() -> schemas.Health:
        """Whether the server answers and its engines work; 503 when one has failed.

        While jobs can't be made, as on a full disk, or stand still, the status is "degraded", with the reason; live
        sessions go on.
        """
        services = (service, *service.worlds.values())
        for each in services:
            each.check_engine()
        if service.draining:
            return schemas.Health(status="shutting_down")
        problems = (each.jobs.problem for each in services)
        problem = next((problem for problem in problems if problem is not None), None)
        return schemas.Health(status="ok") if problem is None else schemas.Health(status="degraded", reason=problem)

    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @router.get("/metrics", response_class=Response, responses=text)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        counts = await service.store.counts()
        content = service.metrics.text(service.model.pipeline.engine, counts)
        return Response(content, media_type=service.metrics.content_type)

    return router


async def _on_api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _on_storage_error(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse(error_body(503, "storage_failed", str(error)), 503, {"Retry-After": "30"})


async def _on_invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    name = str(problem["loc"][-1])
    return JSONResponse(error_body(400, "invalid_request", f"{name}: {problem['msg']}", name), 400)


async def _on_http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    body = error_body(error.status_code, codes.get(error.status_code, "invalid_request"), str(error.detail))
    return JSONResponse(body, error.status_code, dict(error.headers or {}))


async def _on_failure(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse(error_body(500, "server_error", "the server failed; its log says why"), 500)
