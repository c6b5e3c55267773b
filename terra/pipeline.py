"""Chains tokenizer, engine and decoder: context frames and actions in, the frames of the rollout out.

context frames --tokenizer.encode--> tokens --+
                                              +--> prompt --> engine: a session --> tokens --decoder--> frames
trajectory --> actions -----------------------+

`Pipeline.stream` is the rollout: every caller with known actions reads it. `Pipeline.open` gives the session below
it to callers that choose each action after they see the frame before. Both are asynchronous; `generate` (a whole
rollout) and `drive` (a session) are the synchronous faces.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from decoder import Decoder
from decoder.thread import DecodedFrames, Decoding, RolloutDecoding
from decoder.video import to_frames, to_uint8, write_video
from terra.config.spec import PipelineSpec
from terra.context import Source
from terra.engine.base import Engine
from terra.memory import MemoryRule, Poses, memory_frames
from terra.pairing import check_pairing
from terra.progress import rollouts_shown
from terra.prompt import Action, Actions, FrameTokens, build_prompt
from terra.recall import PlaceMap, Recall
from terra.reconstruction import Reconstruction, expected_psnr
from terra.rollout import load_inputs
from terra.sampling import SamplingParams
from terra.window_plan import Window, plan_windows
from terra.windows import SlidingSession, remembered
from terra.world_model.adapter import decoder_of
from tokenizer import Frames, LFQTokenizer, TokenGrid
from tokenizer.cores import on_cores

_T = TypeVar("_T")

_MAP_CHUNK = 16  # frames of a map that are encoded at a time

OnFrame = Callable[[int, int], None]
"""Called with (index of the request, index of the frame in its rollout) when a frame's tokens are there."""

RecallOf = Callable[[TokenGrid, Actions], Recall | None]
"""Makes what a rollout remembers, from its context's tokens and the actions between them; None for no memory."""

OnPixels = Callable[[int, Frames], None]
"""Called in the decoder's thread with (index of the request, its next decoded frames on the CPU), in order."""


@dataclass(frozen=True)
class RolloutRequest:
    """The inputs of a rollout.

    Attributes:
        context_frames: real frames, in [-1, 1].
        actions: one between each two frames of the rollout, so one fewer than it has frames; the first
            `context - 1` lie between context frames.
        seed: 0 or more.
        adapter: name of one of the engine's adapters; None for the model that the engine was started with.
        place: pixels (8-bit RGB) and poses of a map's frames, the poses in the axes of the rollout's first frame; None
            for no map.
    """

    context_frames: Frames
    actions: Actions
    seed: int
    adapter: str | None = None
    place: tuple[UInt8[np.ndarray, "frames height width 3"], Poses] | None = None

    @property
    def num_frames(self) -> int:
        """Frames of the rollout, context included."""
        return self.actions.shape[0] + 1


@dataclass(frozen=True)
class Rollout:
    """A finished rollout: context and generated frames, as tokens and as the decoder draws them.

    `fps` is the model's frame rate, `reconstruction` says how well the decoder shows the context frames, `place` is the
    map. `seconds` holds the time to "encode" and to "generate", and the decoder's working time ("decode"), most of it
    within the time to generate.
    """

    tokens: TokenGrid
    frames: Frames
    num_context: int
    fps: float
    seconds: dict[str, float]
    reconstruction: Reconstruction
    place: PlaceMap | None = None

    def save(self, path: str | Path) -> None:
        """Write the frames, context included, as a video: .mp4 (H.264) or .gif.

        Raises:
            VideoError: another suffix, or frames that the format can't hold.
            OutputError: the file can't be written.
        """
        write_video(to_uint8(self.frames), path, self.fps)


class Pipeline:
    """A tokenizer, an engine and a decoder as one object.

    Encoding and decoding run in threads, so that other rollouts in the event loop continue meanwhile; on a CPU they
    take turns with the engine (`tokenizer.cores`). See `decoder.thread.RolloutDecoding` for when a rollout is decoded.

    Args:
        tokenizer: encodes frames as tokens.
        engine: generates tokens; closed with the pipeline.
        decoder: decodes tokens to frames.
        overlap: frames read again when the window slides.
        memory: how memory frames are chosen; None for rollouts without memory.
        provenance: what the parts were built from, for `rollout.json`: see `terra.rollout`.
        expected_psnr: PSNR (dB) of the tokenizer's held-out frames; None if not known. See `terra.reconstruction`.
        adapted_decoders: decoders of rollouts with an adapter, by the adapter's name, where they differ from `decoder`.
        adapted_memory: `memory` of rollouts with an adapter, by the adapter's name, where it differs from `memory`.

    Raises:
        CheckpointError: the tokenizer is not the one that the world model was trained with.
    """

    def __init__(
        self,
        tokenizer: LFQTokenizer,
        engine: Engine,
        decoder: Decoder,
        *,
        overlap: int = 3,
        memory: MemoryRule | None = None,
        provenance: Mapping[str, Any] | None = None,
        expected_psnr: float | None = None,
        adapted_decoders: Mapping[str, Decoder] | None = None,
        adapted_memory: Mapping[str, MemoryRule | None] | None = None,
    ) -> None:
        check_pairing(tokenizer, engine.spec)
        self.tokenizer, self.engine, self.decoder = tokenizer, engine, decoder
        self.overlap, self.memory = overlap, memory
        self.adapted_decoders, self.adapted_memory = dict(adapted_decoders or {}), dict(adapted_memory or {})
        self.provenance = dict(provenance or {})
        self.expected_psnr = expected_psnr
        self.decoding = RolloutDecoding(decoder, self.adapted_decoders)
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_pretrained(
        cls,
        pretrained: str | Path,
        *,
        engine: str = "auto",
        device: str | None = None,
        dtype: str | None = None,
        overlap: int = 3,
        memory: Literal["auto"] | int = "auto",
        adapter: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        sessions: int = 1,
        **engine_settings: Any,
    ) -> Self:
        """Load a tokenizer and the world model that was trained with it, and start an engine.

            with terra.Pipeline.from_pretrained("demo") as pipeline:
                request = pipeline.load_request("frames/", "drive.csv", num_frames=80)
                (rollout,) = pipeline.generate([request], progress=True)
            rollout.save("drive.mp4")

        Args:
            pretrained: "demo" (the model that ships with Terra), "doom", "pusht" or "town_memory" (worlds whose
                archives come with a clone, unpacked once), "terra_v1" or "terra_v2" (the published models); or a
                folder that holds tokenizer/ and world_model/; or the Hub id (owner/name) of a repository that holds
                them. Hub files are downloaded once; weights are read from safetensors, and no code of a repository
                runs. "./demo" is a folder of that name.
            engine: "auto" takes the fastest engine that is installed and that the device can run (`graph` on an NVIDIA
                GPU of compute capability 8.0 or higher, else `jacobi`); or the name of an engine: graph, jacobi, hf,
                vllm, persistence.
            device: "cpu", "cuda" or "cuda:1"; None takes a GPU if there is one.
            dtype: "float32" or "bfloat16"; None takes bfloat16 on a GPU and float32 on a CPU.
            overlap: frames read again when the window slides.
            memory: memory frames of a window, 0 for none; "auto" takes as many as the model was trained with.
            adapter: folder of a LoRA adapter of the world model, which `terra train adapter.rank=16` writes.
            adapters: folders of further adapters by name, of which each rollout may name one
                (`RolloutRequest.adapter`). With engine=vllm they share the base model's weights; other engines load a
                whole model for each.
            sessions: number of simultaneous rollouts, for an engine with slots for sessions.
            engine_settings: further settings of the engine, such as `drafts`; see conf/engine/.

        Raises:
            ConfigError: an impossible argument, or an engine whose package is not installed.
            CheckpointError: no such checkpoint, damaged weights, or a tokenizer and a world model that are no pair.
        """
        spec = PipelineSpec.from_pretrained(
            pretrained,
            engine=engine,
            device=device,
            dtype=dtype,
            overlap=overlap,
            memory=memory,
            adapter=adapter,
            adapters=adapters,
            sessions=sessions,
            **engine_settings,
        )
        return cls.from_spec(spec)

    @classmethod
    def from_spec(cls, spec: PipelineSpec) -> Self:
        """Load the weights of a checked `PipelineSpec`, and start its engine. Raises TerraError."""
        own_decoder = None if spec.adapter is None else decoder_of(spec.adapter)
        expected = expected_psnr(own_decoder or spec.tokenizer)
        tokenizer, engine, decoder, adapted_decoders = spec.build()
        return cls(
            tokenizer,
            engine,
            decoder,
            overlap=spec.settings.overlap,
            memory=spec.memory,
            provenance=spec.provenance(),
            expected_psnr=expected,
            adapted_decoders=adapted_decoders,
            adapted_memory=spec.adapted_memory,
        )

    @property
    def slid_context(self) -> int:
        """Frames of the context of each window but a rollout's first: memory frames, and those that are read again."""
        return memory_frames(self.memory) + self.overlap

    def decoder_for(self, adapter: str | None) -> Decoder:
        """The decoder of rollouts with an adapter, by its name, or of those without one."""
        return self.decoder if adapter is None else self.adapted_decoders.get(adapter, self.decoder)

    def memory_for(self, adapter: str | None) -> MemoryRule | None:
        """How memory frames of rollouts with an adapter, by its name, or of those without one, are chosen."""
        return self.memory if adapter is None else self.adapted_memory.get(adapter, self.memory)

    def load_request(
        self,
        context: Source,
        actions: str | Path,
        *,
        num_frames: int = 25,
        num_context: int = 3,
        seed: int = 0,
        adapter: str | None = None,
    ) -> RolloutRequest:
        """Load the files of a rollout: those of `terra generate`, with the same checks.

        Args:
            context: a folder or glob of pictures, or a video; its first `num_context` frames are used. See
                `terra.context.load_context`, also for worlds of several cameras.
            actions: the file of the actions: a trajectory where the model's actions are waypoints.
            num_frames: frames of the rollout, context included.
            num_context: context frames.
            seed: 0 or more.
            adapter: see `RolloutRequest`.

        Raises:
            ActionError, ContextError, VideoError: a file that can't be read, does not fit the model, or is too short.
            ConfigError: numbers of frames that no window fits.
        """
        self.plan(num_frames, num_context, adapter)
        inputs = load_inputs(
            context,
            actions,
            num_frames=num_frames,
            num_context=num_context,
            image_size=self.tokenizer.config.image_size,
            spec=self.engine.spec,
        )
        return RolloutRequest(inputs.context_frames, inputs.actions, seed, adapter)

    async def stream(
        self,
        context: TokenGrid,
        actions: Actions,
        sampling: SamplingParams,
        seed: int,
        adapter: str | None = None,
        place: PlaceMap | None = None,
        recall_of: RecallOf | None = None,
    ) -> AsyncGenerator[FrameTokens, None]:
        """THE rollout: the tokens of one generated frame after the other, from tokenized context frames.

        Iterate within `contextlib.aclosing`: the session is closed when the iteration ends, however it ends.

        Args:
            context: (frames, rows, cols), see `encode`.
            actions: one between each two frames of the rollout; the first `frames - 1` lie between context frames.
            sampling: how tokens are chosen.
            seed: 0 or more; the same seed gives the same tokens.
            adapter: name of one of the engine's adapters; None for the model that the engine was started with.
            place: a map that is remembered from the beginning; None for none.
            recall_of: makes what the rollout remembers, in place of the pipeline's own memory (`recall`).

        Raises:
            ConfigError: context or length that no window fits, see `terra.window_plan.plan_windows`; no such
                adapter; or a map for a rollout without memory.
            EngineError: the engine failed.
        """
        given = len(context) - 1
        self.plan(len(actions) + 1, len(context), adapter, has_map=place is not None)
        session = await self.open(context, actions[:given], sampling, seed, adapter, place, recall_of)
        try:
            async for frame in session.run(actions[given:]):
                yield frame
        finally:
            await session.close()

    async def open(
        self,
        context: TokenGrid,
        actions: Actions,
        sampling: SamplingParams,
        seed: int,
        adapter: str | None = None,
        place: PlaceMap | None = None,
        recall_of: RecallOf | None = None,
    ) -> SlidingSession:
        """Start a live rollout from tokenized context frames and the actions between them.

        `adapter`, `place` and `recall_of` are as in `stream`.
        """
        prompt = build_prompt(context, actions)
        recall = self.recall(context, actions, place, adapter) if recall_of is None else recall_of(context, actions)
        return await SlidingSession.open(
            self.engine, prompt, sampling, seed, self.overlap, adapter=adapter, recall=recall
        )

    def plan(
        self, num_frames: int, num_context: int, adapter: str | None = None, *, has_map: bool = False
    ) -> list[Window]:
        """The windows of a rollout. Raises ConfigError, see `terra.window_plan.plan_windows`."""
        max_frames, memory = self.engine.spec.layout.max_frames, memory_frames(self.memory_for(adapter))
        return list(plan_windows(num_frames, num_context, max_frames, self.overlap, memory, has_map=has_map))

    def recall(
        self, tokens: TokenGrid, actions: Actions, place: PlaceMap | None = None, adapter: str | None = None
    ) -> Recall | None:
        """What a rollout of these frames can remember; None for rollouts without memory."""
        rule = self.memory_for(adapter)
        return None if rule is None else Recall.begin(rule, self.engine.spec, tokens, actions, place)

    def describe_memory(
        self,
        tokens: TokenGrid,
        actions: Actions,
        num_context: int,
        place: PlaceMap | None = None,
        place_described: dict[str, Any] | None = None,
        adapter: str | None = None,
    ) -> dict[str, Any] | None:
        """The key `memory` of a rollout's record, see `terra.rollout`; None for rollouts without memory.

        `place_described` is what it says of the map, see `terra.place_map.MapPictures.describe`.
        """
        recall = self.recall(tokens, actions, place, adapter)
        if recall is None:
            return None
        windows = self.plan(len(tokens), num_context, adapter, has_map=place is not None)
        described = {} if place_described is None else {"map": place_described}
        return {**recall.rule.model_dump(), "windows": remembered(recall, actions, windows), **described}

    async def rollout_tokens(
        self,
        context: TokenGrid,
        actions: Actions,
        sampling: SamplingParams,
        seed: int,
        on_frame: Callable[[int], None] | None = None,
        decoding: Decoding[Any] | None = None,
        adapter: str | None = None,
        place: PlaceMap | None = None,
        recall_of: RecallOf | None = None,
    ) -> TokenGrid:
        """The tokens of a whole rollout, context included, from `stream`.

        Args:
            context, actions, sampling, seed, adapter, place, recall_of: see `stream`.
            on_frame: called with the index in the rollout of each frame that is generated.
            decoding: receives all frames as they are generated; cancelled if the rollout fails.
        """
        frames = list(context)
        try:
            if decoding is not None:
                decoding.add(context)
            stream = self.stream(context, actions, sampling, seed, adapter, place, recall_of)
            async with aclosing(stream) as generated:
                async for frame in generated:
                    frames.append(frame)
                    if decoding is not None:
                        decoding.add(frame[None])
                    if on_frame is not None:
                        on_frame(len(frames) - 1)
        except BaseException:
            if decoding is not None:
                decoding.cancel()
            raise
        return torch.stack(frames)

    async def rollout(
        self,
        request: RolloutRequest,
        sampling: SamplingParams,
        on_frame: Callable[[int], None] | None = None,
        on_pixels: Callable[[Frames], None] | None = None,
    ) -> Rollout:
        """Make one rollout, from context frames to decoded frames. Raises as `stream`."""
        started = time.perf_counter()
        context = await self.encode(request.context_frames)
        place = None if request.place is None else await self.encode_map(*request.place)
        encoded = time.perf_counter()
        decoding = self.decoding.start(partial(_shown, on_pixels), request.adapter)
        tokens = await self.rollout_tokens(
            context, request.actions, sampling, request.seed, on_frame, decoding, request.adapter, place
        )
        generated = time.perf_counter()
        pieces = await decoding.finish()
        seconds = {"encode": encoded - started, "generate": generated - encoded, "decode": decoding.seconds}
        frames = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        reconstruction = self.reconstruction(frames[: len(context)], request.context_frames)
        return Rollout(tokens, frames, len(context), self.engine.spec.fps, seconds, reconstruction, place)

    def reconstruction(self, decoded: Frames, truth: Frames) -> Reconstruction:
        """How well decoded context frames show the frames that were encoded, both in [-1, 1]."""
        return Reconstruction.of(decoded, truth, self.expected_psnr, self.engine.spec.views)

    async def encode(self, frames: Frames) -> TokenGrid:
        """The tokens of frames in [-1, 1], on the CPU."""
        return await asyncio.wrap_future(on_cores(lambda: self.tokenizer.encode(frames).cpu()))

    async def encode_map(self, pixels: UInt8[np.ndarray, "frames height width 3"], poses: Poses) -> PlaceMap:
        """A map of frames of 8-bit RGB, and of poses in the axes of the rollout's first frame."""
        pieces = [
            await self.encode(to_frames(pixels[start : start + _MAP_CHUNK]))
            for start in range(0, len(pixels), _MAP_CHUNK)
        ]
        return PlaceMap(torch.cat(pieces), poses)

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008
        on_frame: OnFrame | None = None,
        on_pixels: OnPixels | None = None,
        *,
        progress: bool = False,
    ) -> list[Rollout]:
        """Make several rollouts at once; the synchronous face of `rollout`. Works within a running event loop too.

        Args:
            requests: what to generate.
            sampling: how tokens are chosen.
            on_frame: see `OnFrame`; called in the pipeline's thread.
            on_pixels: see `OnPixels`.
            progress: show a bar on a terminal; print a line every ten seconds elsewhere.
        """

        async def together(shown: Callable[[int, int], None] | None = None) -> list[Rollout]:
            def note_frame(index: int, frame: int) -> None:
                if on_frame is not None:
                    on_frame(index, frame)
                if shown is not None:
                    shown(1, 0)

            def note_pixels(index: int, frames: Frames) -> None:
                if on_pixels is not None:
                    on_pixels(index, frames)
                if shown is not None:
                    shown(0, len(frames))

            return await asyncio.gather(
                *(
                    self.rollout(request, sampling, partial(note_frame, index), partial(note_pixels, index))
                    for index, request in enumerate(requests)
                )
            )

        if not progress:
            return self.wait(together())
        total = sum(request.num_frames for request in requests)
        with rollouts_shown(total - sum(len(request.context_frames) for request in requests), total) as shown:
            return self.wait(together(shown))

    def drive(
        self,
        context_frames: Frames,
        actions: Actions,
        sampling: SamplingParams,
        seed: int,
        adapter: str | None = None,
    ) -> "Drive":
        """Start a live rollout to be driven step by step; the synchronous face of `open`.

        Args:
            context_frames: real frames, in [-1, 1].
            actions: those between the context frames, one fewer.
            sampling: how tokens are chosen.
            seed: 0 or more.
            adapter: see `stream`.
        """
        context = self.wait(self.encode(context_frames))
        session = self.wait(self.open(context, actions, sampling, seed, adapter=adapter))
        return Drive(self, session, self.decoder_for(adapter))

    def close(self) -> None:
        """Close the engine. Closing twice does nothing."""
        self.wait(self.engine.close())
        self.decoding.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = None

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        torch.set_num_threads(1)  # see `on_cores`
        loop.run_forever()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the pipeline's own event loop, and return its result."""
        # A loop in a thread of its own: notebooks run in a loop already, and live sessions outlast one call.
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="terra-pipeline", daemon=True)
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise


class Drive:
    """A live rollout for synchronous callers: one action in, one frame out."""

    def __init__(self, pipeline: Pipeline, session: SlidingSession, decoder: Decoder) -> None:
        self._pipeline, self._session, self._decoder = pipeline, session, decoder

    def step(self, action: Action) -> Float[Tensor, "3 height width"]:
        """Apply the action to the last frame and return the next, in [-1, 1]."""
        tokens = self._pipeline.wait(self._session.step(action))
        return self._decoder.decode(tokens[None])[0].cpu()

    def close(self) -> None:
        """End the rollout. Closing twice does nothing."""
        self._pipeline.wait(self._session.close())


def _shown(on_pixels: Callable[[Frames], None] | None, decoded: DecodedFrames) -> Frames:
    frames = decoded.frames.cpu()
    if on_pixels is not None:
        on_pixels(frames)
    return frames
