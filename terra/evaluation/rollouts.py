"""Rollouts of many clips at once, each kept in a file: an interrupted evaluation goes on where it stopped."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from terra.errors import first_error
from terra.evaluation.kept import KeptFiles
from terra.pipeline import Pipeline, RecallOf, RolloutRequest
from terra.progress import frames_shown
from terra.sampling import SamplingParams
from tokenizer import TokenGrid

logger = logging.getLogger(__name__)


class KeptRollouts:
    """Makes rollouts and keeps their tokens as `folder`/NAME.safetensors.

    Args:
        pipeline: makes them.
        sampling: how tokens are chosen.
        folder: is made when the first rollout is kept.
        made_with: what else the tokens depend on (checkpoints, engine); a file made with something else is replaced.
    """

    def __init__(self, pipeline: Pipeline, sampling: SamplingParams, folder: Path, made_with: dict[str, Any]) -> None:
        self._pipeline, self._sampling = pipeline, sampling
        self._files = KeptFiles(folder, {**made_with, "sampling": vars(sampling)})
        self.num_reused = 0

    def tokens(
        self,
        names: Sequence[str],
        requests: Sequence[RolloutRequest],
        recalls: Sequence[RecallOf] | None = None,
        recalled: Sequence[bytes] | None = None,
    ) -> list[TokenGrid]:
        """Each request's tokens, context included, int64 on the CPU; those not kept yet are made together.

        Args:
            names: of the files.
            requests: what is generated.
            recalls: makes what each rollout remembers from its context's tokens and the actions between them; None
                remembers as the pipeline does.
            recalled: what each of `recalls` depends on besides the request.

        Raises:
            OutputError: a file can't be written.
        """
        keys = [self._key(each, also) for each, also in zip(requests, recalled or [b""] * len(requests), strict=True)]
        kept = [self._read(name, key) for name, key in zip(names, keys, strict=True)]
        missing = [index for index, tokens in enumerate(kept) if tokens is None]
        self.num_reused += len(names) - len(missing)
        if missing:
            logger.info("generating %d rollouts, %d are kept from before", len(missing), len(names) - len(missing))
            frames = sum(requests[index].num_frames - len(requests[index].context_frames) for index in missing)
            with frames_shown("generating", frames) as show:
                count = itertools.count(1)

                async def make(index: int) -> TokenGrid:
                    recall = None if recalls is None else recalls[index]
                    tokens = await self._make(requests[index], recall, lambda _: show(next(count)))
                    write = asyncio.to_thread(self._files.write, names[index], keys[index], {"tokens": tokens})
                    await _to_the_end(write)
                    return tokens

                async def make_all() -> list[TokenGrid]:
                    try:
                        async with asyncio.TaskGroup() as group:
                            tasks = [group.create_task(make(index)) for index in missing]
                    except BaseExceptionGroup as errors:
                        raise first_error(errors) from None
                    return [task.result() for task in tasks]

                made = self._pipeline.wait(make_all())
            for index, tokens in zip(missing, made, strict=True):
                kept[index] = tokens
        return [tokens for tokens in kept if tokens is not None]

    async def _make(
        self, request: RolloutRequest, recall_of: RecallOf | None, on_frame: Callable[[int], None]
    ) -> TokenGrid:
        context = await self._pipeline.encode(request.context_frames)
        return await self._pipeline.rollout_tokens(
            context, request.actions, self._sampling, request.seed, on_frame, recall_of=recall_of
        )

    def _read(self, name: str, key: Tensor) -> TokenGrid | None:
        stored = self._files.read(name, key)
        return None if stored is None else stored.get("tokens")

    def _key(self, request: RolloutRequest, recalled: bytes) -> Tensor:
        parts = (part.contiguous().numpy().tobytes() for part in (request.context_frames, request.actions))
        return self._files.key(f"{request.seed} {request.num_frames}", *parts, recalled)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work that is not stopped where another rollout fails."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    finally:
        await task
