"""The page's files and the API's documentation page, held in memory: no path from a client is ever opened."""

import html
import mimetypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse, Response

from terra.serving.errors import not_found

_FOLDER = Path(__file__).parent / "page"
_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_METHODS = ("get", "post", "put", "patch", "delete")


def page_routes(app: FastAPI) -> APIRouter:
    """Routes of GET /, /page/... and /docs."""
    router = APIRouter(include_in_schema=False)
    files = _read_files(_FOLDER)

    @router.get("/")
    async def index() -> Response:
        return _file(files, "index.html")

    @router.get("/page/{name:path}")
    async def page_file(name: str) -> Response:
        return _file(files, name)

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        return HTMLResponse(_docs(app.openapi()))

    return router


def _read_files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _file(files: Mapping[str, bytes], name: str) -> Response:
    if name not in files:
        raise not_found("page")
    suffix = Path(name).suffix
    kind = _TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(files[name], media_type=kind, headers={"Cache-Control": "no-cache"})


def _docs(document: Mapping[str, Any]) -> str:
    """Render the OpenAPI document as HTML without scripts."""
    rows = []
    for path, methods in document["paths"].items():
        for method in _METHODS:
            if method in methods:
                route = methods[method]
                parameters = ", ".join(each["name"] for each in route.get("parameters", ()))
                cells = (method.upper(), path, route.get("description", ""), parameters)
                rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    title, about = html.escape(document["info"]["title"]), html.escape(document["info"]["description"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        "<meta name=viewport content='width=device-width'><style>:root{color-scheme:light dark}"
        "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td,th{text-align:left;vertical-align:top;padding:.3rem .8rem .3rem 0}td:nth-child(-n+2){font-family:monospace}"
        f"</style><h1>{title}</h1><p style='white-space:pre-line'>{about}</p>"
        "<p>For programs: <a href=openapi.json>openapi.json</a></p>"
        f"<table><tr><th>Method<th>Path<th>What it does<th>Parameters</tr>{''.join(rows)}</table></html>"
    )
