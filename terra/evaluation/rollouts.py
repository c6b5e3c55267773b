"""Rollouts of many clips at once, each kept in a file: an interrupted evaluation goes on where it stopped."""

import hashlib
import itertools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terra.metrics.networks import read_weights
from terra.pipeline import Pipeline, Rollout, RolloutRequest
from terra.progress import frames_shown
from terra.sampling import SamplingParams
from tokenizer import Frames, TokenGrid
from tokenizer.checkpoint import write_tensors

logger = logging.getLogger(__name__)


class TokensOnly:
    """A decoder that gives frames without pixels, for a pipeline of whose rollouts only the tokens are kept."""

    def decode(self, tokens: TokenGrid) -> Frames:
        """As many empty frames."""
        return torch.empty((len(tokens), 3, 0, 0))


class KeptRollouts:
    """Makes rollouts and keeps their tokens as `folder`/NAME.safetensors.

    Args:
        pipeline: makes them; its decoder should be `TokensOnly`.
        sampling: how tokens are chosen.
        folder: is made when the first rollout is kept.
        made_with: what else the tokens depend on (checkpoints, engine); a file made with something else is replaced.
    """

    def __init__(self, pipeline: Pipeline, sampling: SamplingParams, folder: Path, made_with: dict[str, Any]) -> None:
        self._pipeline, self._sampling, self._folder = pipeline, sampling, folder
        self._made_with = json.dumps({**made_with, "sampling": vars(sampling)}, sort_keys=True)
        self.num_reused = 0

    def tokens(self, names: Sequence[str], requests: Sequence[RolloutRequest]) -> list[TokenGrid]:
        """Each request's tokens, context included, int64 on the CPU; those not kept yet are made together.

        Raises:
            CheckpointError: a kept file is damaged.
            OutputError: a file can't be written.
        """
        keys = [self._key(request) for request in requests]
        kept = [self._read(name, key) for name, key in zip(names, keys, strict=True)]
        missing = [index for index, tokens in enumerate(kept) if tokens is None]
        self.num_reused += len(names) - len(missing)
        if missing:
            logger.info("generating %d rollouts, %d are kept from before", len(missing), len(names) - len(missing))
            wanted = [requests[index] for index in missing]
            frames = sum(request.num_frames - len(request.context_frames) for request in wanted)
            with frames_shown("generating", frames) as show:
                count = itertools.count(1)

                def keep(index: int, rollout: Rollout) -> None:
                    name, key = names[missing[index]], keys[missing[index]]
                    write_tensors(self._path(name), {"tokens": rollout.tokens, "made_from": key})

                made = self._pipeline.generate(wanted, self._sampling, lambda *_: show(next(count)), keep)
            for index, rollout in zip(missing, made, strict=True):
                kept[index] = rollout.tokens
        return [tokens for tokens in kept if tokens is not None]

    def _read(self, name: str, key: Tensor) -> TokenGrid | None:
        if not self._path(name).exists():
            return None
        stored = read_weights(self._path(name))
        return stored["tokens"] if torch.equal(stored["made_from"], key) else None

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def _key(self, request: RolloutRequest) -> Tensor:
        """SHA-256 of all that the rollout depends on, as 32 bytes."""
        total = hashlib.sha256(f"{self._made_with} {request.seed} {request.num_frames}".encode())
        for part in (request.context_frames, request.actions):
            total.update(part.contiguous().numpy().tobytes())
        return torch.tensor(list(total.digest()), dtype=torch.uint8)
