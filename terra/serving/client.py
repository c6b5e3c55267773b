"""A client of `terra serve`: video jobs and live driving from Python, with nothing of the model installed.

    with Client("http://127.0.0.1:8000") as client:
        video = client.wait(client.create_video(scene="day", trajectory_name="left", num_frames=20)["id"])
        client.download(video["id"], "left.mp4")
        with client.open(scene="day") as drive:
            for _ in range(20):
                frame = drive.step(steering=0.1, speed=6.0)
            Path("last.jpg").write_bytes(frame.picture)

The same jobs with curl:

    curl -s localhost:8000/v1/videos -H 'Content-Type: application/json' \
        -d '{"scene": "day", "trajectory_name": "left", "num_frames": 20, "seed": 0}'
    curl -s localhost:8000/v1/videos/VIDEO_ID
    curl -s localhost:8000/v1/videos/VIDEO_ID/content -o left.mp4
    curl -s 'localhost:8000/v1/videos/VIDEO_ID/content?variant=gif' -o left.gif
    curl -s -X DELETE localhost:8000/v1/videos/VIDEO_ID

Pictures of one's own, and a trajectory document; with an API key each also takes -H "Authorization: Bearer KEY":

    curl -s localhost:8000/v1/contexts -F files=@frame_0.png -F files=@frame_1.png -F files=@frame_2.png
    curl -s localhost:8000/v1/videos -F input_reference=@drive.mp4 -F trajectory=@drive.json -F num_frames=20
"""

import mimetypes
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from terra.errors import ContextError, OutputError
from terra.serving.live_client import LiveDrive, LiveFrame, ServerError
from tokenizer.files import replacing

__all__ = ["Client", "LiveDrive", "LiveFrame", "ServerError"]

_ENDED = ("completed", "failed", "cancelled")


class Client:
    """A connection to one server; all methods raise ServerError.

    Args:
        url: the server's address, such as "http://127.0.0.1:8000".
        api_key: the API key, if the server requires one.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, url: str = "http://127.0.0.1:8000", api_key: str | None = None, timeout: float = 60.0) -> None:
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._url, self._timeout = url.rstrip("/"), timeout
        self._http = httpx.Client(base_url=self._url, headers=self._headers, timeout=timeout)

    def models(self) -> list[dict[str, Any]]:
        """List the served models, the base model first: id, parent (of an adapter), fps, size, action_space."""
        return self._json("GET", "/v1/models")["data"]

    def scenes(self) -> list[dict[str, Any]]:
        """List the scenes that rollouts can start from: id, num_frames, model (if any), trajectories or actions."""
        return self._json("GET", "/v1/scenes")["data"]

    def create_context(self, *files: Path | str, **views: Path | str | Sequence[Path | str]) -> dict[str, Any]:
        """Upload pictures in order, or one video; the answer's "id" is for `create_video` and `open`.

        Where several cameras share a picture these files may be given for each: `create_context(front="a.mp4",
        wrist="b.mp4")`; see `views` of `models`.
        """
        parts = []
        for name, given in {"files": files, **views}.items():
            for path in map(Path, [given] if isinstance(given, Path | str) else given):
                kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
                parts.append((name, ("file", _read(path), kind)))
        return self._json("POST", "/v1/contexts", files=parts)

    def create_video(self, **request: Any) -> dict[str, Any]:
        """Queue a video: scene= or context=, num_frames=, seed=, ..., and trajectory= (a document) or trajectory_name=.

        model= is one of `models`; without it the scene's, else the base model. map_pose=[x, y, heading] has the video
        remember the server's map from there; memory=False has it remember nothing.
        A model whose actions are no waypoints takes actions= (a terra-actions document) or actions_name= instead.
        """
        return self._json("POST", "/v1/videos", json=request)

    def video(self, video_id: str) -> dict[str, Any]:
        """Return a job's status and progress."""
        return self._json("GET", f"/v1/videos/{video_id}")

    def videos(self, **query: Any) -> list[dict[str, Any]]:
        """List a page of jobs; the query has limit=, after=, order="desc" or "asc"."""
        return self._json("GET", "/v1/videos", params=query)["data"]

    def wait(self, video_id: str, timeout: float = 3600.0, every: float = 0.5) -> dict[str, Any]:
        """Wait until a job is completed.

        Raises:
            ServerError: the job failed or was cancelled.
            TimeoutError: the job takes longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (video := self.video(video_id))["status"] not in _ENDED:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{video_id}: {video['status']} after {timeout:g} s")
            time.sleep(every)
        if video["status"] != "completed":
            error = video["error"] or {"code": "cancelled", "message": "it was cancelled"}
            raise ServerError(f"{video_id}: {error['message']}", error["code"])
        return video

    def download(self, video_id: str, path: Path | str, variant: str = "video", view: str | None = None) -> Path:
        """Write a completed job's "video" (MP4), "gif" or "tokens" (safetensors) to a file. Raises OutputError too.

        `view` is the name of a camera whose part the video shows alone.
        """
        path = Path(path)
        if not path.absolute().parent.is_dir():
            raise OutputError(f"{path}: expected an existing folder, got {path.parent}")
        answer = self._send(
            "GET",
            f"/v1/videos/{video_id}/content",
            params={"variant": variant, **({} if view is None else {"view": view})},
        )
        with replacing(path) as temporary:
            temporary.write_bytes(answer.content)
        return path

    def cancel_video(self, video_id: str) -> dict[str, Any]:
        """Cancel a job; it stays in the list."""
        return self._json("POST", f"/v1/videos/{video_id}/cancel")

    def delete_video(self, video_id: str) -> None:
        """Stop a job and remove its files."""
        self._json("DELETE", f"/v1/videos/{video_id}")

    def open(self, **settings: Any) -> LiveDrive:
        """Open a live session: scene=, context= or fork=, model=, seed=, sampling=, format=, quality=, speed=,
        memory=, map_pose=.

        model= is one of `models`; without it the scene's, else the base model. A fork keeps its own.
        """
        return LiveDrive(self._url.replace("http", "ws", 1) + "/v1/live", self._headers, self._timeout, settings)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _json(self, method: str, path: str, **arguments: Any) -> Any:
        return self._send(method, path, **arguments).json()

    def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise ServerError(f"{self._url}: expected an answer, got: {error or type(error).__name__}") from None
        if answer.is_error:
            try:
                detail = answer.json()["error"]
            except (ValueError, KeyError, TypeError):
                raise ServerError(
                    f"{self._url}{path}: got status {answer.status_code}", "", answer.status_code
                ) from None
            raise ServerError(detail["message"], detail["code"], answer.status_code)
        return answer


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ContextError(f"{path}: expected a readable file, got: {error.strerror or error}") from None
