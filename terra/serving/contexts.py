"""Keeps the contexts that clients upload: pictures or one video, cropped to the model's aspect ratio, in memory.

A client's file names are not used, and the size of a picture is known before the picture is decompressed. Each picture
is reduced to the model's size before the next one is decompressed, and a bounded number of uploads is read at a time.
Where several cameras share a picture, a client gives whole pictures or those of each camera.
"""

import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from decoder.pictures import picture_size, read_picture
from terra.context import sample_video
from terra.errors import ContextError, VideoError
from terra.reconstruction import Reconstruction
from terra.serving.errors import ApiError, not_found
from terra.serving.model import Model, Pictures
from terra.serving.settings import UploadSettings
from tokenizer import TokenGrid
from tokenizer.limits import LIMITS, Limits

_MIN_SIDE = 8


@dataclass(eq=False)
class Context:
    """An uploaded context, its tokens, and how well the model shows it. Times are in seconds since 1970."""

    id: str
    pictures: Pictures
    expires_at: float
    tokens: TokenGrid
    reconstruction: Reconstruction
    client: str


class Contexts:
    """All uploaded contexts of a server that have not expired.

    Attributes:
        max_pictures: the most pictures of a context.
    """

    def __init__(self, model: Model, settings: UploadSettings, num_context: int, limits: Limits = LIMITS) -> None:
        self._model, self._settings, self._num_context = model, settings, num_context
        self._limits = limits.replace(video_pixels=min(settings.max_pixels, limits.video_pixels))
        self.max_pictures = settings.pictures(model.spec.layout.max_frames)
        self._contexts: dict[str, Context] = {}
        self._reading: Counter[str] = Counter()

    async def add(self, files: Sequence[bytes] | Mapping[str, Sequence[bytes]], client: str) -> Context:
        """Keep the given pictures (in their order) or the given video as a context of a client's, named by address.

        `files` may have those of each view by its name.

        Raises:
            ApiError: 400 if the files are no pictures or video, or too large; 429 if the server keeps its maximum, or
                that of one client, or too many uploads of the client wait; 503 if too many wait in all.
        """
        self.expire()
        own, most = sum(each.client == client for each in self._contexts.values()), self._settings.contexts_per_client
        if own >= most:
            raise ApiError(
                429, "too_many_contexts", f"expected at most {most} contexts of one client", retry_seconds=60
            )
        if len(self._contexts) + self._reading.total() >= self._settings.contexts:
            raise ApiError(
                429, "too_many_contexts", f"expected at most {self._settings.contexts} contexts", retry_seconds=60
            )
        if self._reading[client] >= (most := self._settings.queue_per_client):
            raise ApiError(429, "too_many_uploads", f"expected at most {most} uploads of one client", retry_seconds=10)
        if self._reading.total() >= self._settings.queue:
            raise ApiError(503, "server_full", f"all {self._settings.queue} uploads are taken", retry_seconds=10)
        self._reading[client] += 1
        try:
            pictures = await self._model.run("uploads", lambda: self._read(files))
            tokens = await self._model.encode(pictures)
            reconstruction = await self._model.reconstruction(tokens, pictures)
        finally:
            self._reading[client] -= 1
            if not self._reading[client]:
                del self._reading[client]
        expires_at = time.time() + self._settings.lifetime_seconds
        context = Context(f"ctx_{secrets.token_hex(16)}", pictures, expires_at, tokens, reconstruction, client)
        self._contexts[context.id] = context
        return context

    async def tokens(self, context_id: str) -> TokenGrid:
        """The tokens of a kept context. Raises ApiError (404)."""
        return self.find(context_id).tokens

    def find(self, context_id: str) -> Context:
        """The kept context of an id. Raises ApiError (404)."""
        self.expire()
        if context_id not in self._contexts:
            raise not_found("context")
        return self._contexts[context_id]

    def expire(self) -> None:
        """Forget the contexts whose lifetime is over."""
        now = time.time()
        self._contexts = {name: each for name, each in self._contexts.items() if each.expires_at > now}

    def _read(self, files: Sequence[bytes] | Mapping[str, Sequence[bytes]]) -> Pictures:
        if not isinstance(files, Mapping):
            self._check_pixels(files)
            return self._read_files(files, self._model.image_size)
        views = self._model.spec.views
        assert views is not None
        for name in views.names:
            if not files.get(name):
                raise ApiError(
                    400, "no_files", f"{name}: expected pictures or a video of each view, got none", param=name
                )
        self._check_pixels([data for name in views.names for data in files[name]])
        parts = {name: self._read_files(files[name], views.tile_size(name)) for name in views.names}
        if len({len(part) for part in parts.values()}) > 1:
            got = ", ".join(f"{name} {len(part)}" for name, part in parts.items())
            raise _refused(f"expected as many pictures of each view, got {got}")
        return views.tile(parts)

    def _read_files(self, files: Sequence[bytes], size: tuple[int, int]) -> Pictures:
        """The pictures, or the frames of the video, each of a size (height, width)."""
        kinds = [_kind(data) for data in files]
        if not files:
            raise ApiError(400, "no_files", "files: expected pictures or a video, got none", param="files")
        if kinds[0] in (".mp4", ".gif"):
            if len(files) > 1:
                raise _refused("expected pictures, or one video alone, got several files")
            return self._read_video(files[0], kinds[0], size)
        if len(files) > self.max_pictures:
            raise _refused(f"expected at most {self.max_pictures} pictures, got {len(files)}")
        return np.stack([self._read_picture(data, f"file {number}", size) for number, data in enumerate(files, 1)])

    def _check_pixels(self, files: Sequence[bytes]) -> None:
        """Refuse pictures that are large together, by their headers; a header that can't be read counts as nothing."""
        pixels, most = 0, self._settings.max_pixels_in_all
        for number, data in enumerate(files, 1):
            if (size := picture_size(data)) is not None:
                self._check_size(size, f"file {number}")
                pixels += size[0] * size[1]
        if pixels > most:
            raise _refused(f"expected pictures of at most {most} pixels together, got {pixels}")

    def _read_picture(self, data: bytes, where: str, size: tuple[int, int]) -> UInt8[np.ndarray, "height width 3"]:
        try:
            return _fit(Image.fromarray(read_picture(data, where, limits=self._limits)), size)
        except VideoError as error:
            raise _refused(str(error)) from None

    def _read_video(self, data: bytes, suffix: str, image_size: tuple[int, int]) -> Pictures:
        with tempfile.TemporaryDirectory(prefix="terra-upload-") as folder:
            path = Path(folder, f"video{suffix}")
            path.write_bytes(data)
            fps, wanted = self._model.spec.fps, self._num_context
            try:
                frames = sample_video(path, wanted, fps, lambda size: self._check_size(size, "video"), self._limits)
                return np.stack([_fit(Image.fromarray(frame), image_size) for frame in frames])
            except ContextError as error:
                raise _refused(str(error).replace(str(path), "video")) from None
            except VideoError:
                raise _refused("video: expected a whole MP4 or GIF") from None

    def _check_size(self, size: tuple[int, int], where: str) -> None:
        width, height = size
        limit, pixels = self._settings.max_side, self._settings.max_pixels
        if not (_MIN_SIDE <= width <= limit and _MIN_SIDE <= height <= limit) or width * height > pixels:
            raise _refused(
                f"{where}: expected {_MIN_SIDE} to {limit} pixels a side and at most {pixels} in all, "
                f"got {width}x{height}"
            )


def _fit(picture: Image.Image, size: tuple[int, int]) -> UInt8[np.ndarray, "height width 3"]:
    """Crop a picture's middle to the aspect ratio of a size (height, width), and resize it to that size."""
    return np.asarray(ImageOps.fit(picture, (size[1], size[0]), Image.Resampling.BICUBIC))


def _kind(data: bytes) -> str:
    if data[4:8] == b"ftyp":
        return ".mp4"
    return ".gif" if data[:4] == b"GIF8" else ""


def _refused(message: str) -> ApiError:
    return ApiError(400, "invalid_file", message, param="files")
