"""An asynchronous face of the pipeline for the server: encoding, decoding and files run in threads."""

import asyncio
import io
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, TypeVar

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torchvision.io import encode_jpeg

from decoder.thread import DecodedFrames, RolloutDecoding
from decoder.video import to_frames
from terra.engine.base import EngineSpec, WarmsUp
from terra.pipeline import Pipeline
from terra.reconstruction import Reconstruction
from terra.serving.errors import model_not_found
from tokenizer import TokenGrid

_T = TypeVar("_T")

PictureFormat = Literal["jpeg", "webp", "png"]
Pictures = UInt8[np.ndarray, "frames height width 3"]


class Model:
    """The one pipeline of all jobs and live sessions, whose adapters are further models for clients.

    Args:
        pipeline: the loaded pipeline, which the model does not close.
        name: the base model's name in the API; each adapter is a model of the adapter's name.
        picture_threads: number of pictures that are encoded at once.
        upload_threads: number of uploads whose pictures are decoded at once.
    """

    def __init__(self, pipeline: Pipeline, name: str, picture_threads: int, upload_threads: int) -> None:
        self.pipeline, self.name = pipeline, name
        # Apart from the pipeline's own, where a live frame would wait for whole rollouts of jobs.
        self._decoding = RolloutDecoding(pipeline.decoder, pipeline.adapted_decoders)
        sizes = {"pictures": picture_threads, "files": 2, "uploads": upload_threads}
        self._threads = {
            kind: ThreadPoolExecutor(num, f"terra-{kind}", torch.set_num_threads, (1,)) for kind, num in sizes.items()
        }

    @property
    def spec(self) -> EngineSpec:
        """Geometry and rates of the engine's model."""
        return self.pipeline.engine.spec

    @property
    def size(self) -> str:
        """WIDTHxHEIGHT of a frame in pixels, as the API has it."""
        height, width = self.image_size
        return f"{width}x{height}"

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of frames in pixels."""
        height, width = self.pipeline.tokenizer.image_size
        return height, width

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models: the base model's, and the adapters'."""
        return self.name, *self.pipeline.engine.adapters

    def adapter(self, name: str) -> str | None:
        """The adapter that a model's name means; None for the base model. Raises ApiError (404)."""
        if name not in self.names:
            raise model_not_found(self.names)
        return None if name == self.name else name

    def name_of(self, adapter: str | None) -> str:
        """The name of the model with an adapter; None means the base model."""
        return self.name if adapter is None else adapter

    @property
    def failure(self) -> str | None:
        """Why the engine stopped by itself, in one line; None while the engine works."""
        return self.pipeline.engine.failure

    async def warm_up(self) -> None:
        """Let an engine that compiles at first use do so now, and decode batches of each size once on a GPU.

        No driver waits for either, then.

        Raises:
            EngineError: the engine has failed.
        """
        if isinstance(self.pipeline.engine, WarmsUp):
            await self.pipeline.engine.warm_up(self.pipeline.slid_context)
        await self._decoding.warm_up(self.pipeline.tokenizer.rows, self.pipeline.tokenizer.cols)

    async def run(self, kind: Literal["files", "uploads"], work: Callable[[], _T]) -> _T:
        """Run work in threads: "uploads" for pictures sent, "files" for all other files."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[kind], work)

    async def encode(self, pictures: Pictures) -> TokenGrid:
        """The tokens of pictures of the model's size, on the CPU."""
        return await self.pipeline.encode(await self.run("files", lambda: to_frames(pictures)))

    async def reconstruction(self, tokens: TokenGrid, pictures: Pictures) -> Reconstruction:
        """How well the decoder shows the pictures that the tokens were made of."""

        def compare() -> Reconstruction:
            return self.pipeline.reconstruction(self.pipeline.decoder.decode(tokens), to_frames(pictures))

        return await self.run("files", compare)

    async def picture(self, tokens: np.ndarray, kind: PictureFormat, quality: int, adapter: str | None = None) -> bytes:
        """One frame (rows, cols) of a rollout with an adapter, as the bytes of a picture file.

        `quality` (1 to 100) is of no effect on PNG.
        """

        def encode(decoded: DecodedFrames) -> Future[bytes]:  # not in this thread, where other sessions' frames wait
            (pixels,) = decoded.pixels()
            return self._threads["pictures"].submit(encode_picture, pixels, kind, quality)

        decoding = self._decoding.start(encode, adapter)
        decoding.add(torch.from_numpy(tokens.astype(np.int64))[None])
        (encoding,) = await decoding.finish()
        return await asyncio.wrap_future(encoding)

    def close(self) -> None:
        """Wait for the threads' current work, and close the pipeline."""
        self._decoding.close()
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)
        self.pipeline.close()


def encode_picture(pixels: UInt8[np.ndarray, "height width 3"], kind: PictureFormat, quality: int = 90) -> bytes:
    """Encode a picture as the bytes of a picture file."""
    if kind == "jpeg":  # Pillow's bytes, but other threads run meanwhile: its JPEG encoder does not release the GIL
        (encoded,) = encode_jpeg([torch.from_numpy(pixels).permute(2, 0, 1).contiguous()], quality)
        return encoded.numpy().tobytes()
    file = io.BytesIO()
    options = {"png": {"compress_level": 1}, "webp": {"quality": quality, "method": 0}}
    Image.fromarray(pixels).save(file, format=kind, **options[kind])
    return file.getvalue()
