"""The log of a training run: log.jsonl for programs, TensorBoard for people. Only the first process writes."""

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from accelerate import Accelerator
from einops import rearrange
from jaxtyping import UInt8
from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from terra.errors import OutputError

PREVIEW_FPS = 10.0


class TrainingLog:
    """Appends to `log.jsonl` and `tensorboard/` in a run's folder; use it as a context manager.

    Raises:
        OutputError: the folder can't be written, or the disk is full.
    """

    def __init__(self, output: Path, first_step: int, accelerator: Accelerator):
        self._path = output / "log.jsonl"
        self._first_step, self._writes = first_step, accelerator.is_main_process
        self._board: SummaryWriter | None = None

    def __enter__(self) -> Self:
        if self._writes:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                _drop_cut_line(self._path)
                # An interrupted run may have logged steps after its last saved state; TensorBoard forgets them.
                self._board = SummaryWriter(str(self._path.with_name("tensorboard")), purge_step=self._first_step + 1)
            except OSError as error:
                raise _output_error(self._path.parent, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._board is not None:
            try:
                self._board.close()
            except OSError as failure:
                if error is None:  # else the first one says more
                    raise _output_error(self._path.parent, failure) from failure

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Append one line of named numbers at `step` to log.jsonl, and to TensorBoard."""
        if self._board is None:
            return
        try:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": step, **numbers}) + "\n")
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        except OSError as error:
            raise _output_error(self._path, error) from error

    def write_previews(self, step: int, previews: Mapping[str, Tensor]) -> None:
        """Log numbers (no axes), pictures (3 x height x width) and videos (frames x 3 x height x width), uint8."""
        if self._board is None:
            return
        numbers = {name: float(tensor) for name, tensor in previews.items() if tensor.ndim == 0}
        if numbers:
            self.write(step, {name: value for name, value in numbers.items() if math.isfinite(value)})
        try:
            for name, tensor in previews.items():
                if tensor.ndim == 3:
                    self._board.add_image(name, tensor.cpu(), step)
                elif tensor.ndim == 4:
                    picture = _animation(tensor)
                    self._board.file_writer.add_summary(  # pyright: ignore[reportOptionalMemberAccess]
                        Summary(value=[Summary.Value(tag=name, image=picture)]), step
                    )
        except OSError as error:
            raise _output_error(self._path.parent, error) from error


def _drop_cut_line(path: Path) -> None:
    """Cut a log behind its last whole line: a killed run, or a full disk, may have left a part of one."""
    if path.exists():
        with path.open("r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)


def _output_error(path: Path, error: OSError) -> OutputError:
    return OutputError(f"{path}: expected to write it, got: {error.strerror or error}")


def _animation(frames: UInt8[Tensor, "frames 3 height width"]) -> Summary.Image:
    """A GIF in TensorBoard's picture record; torch's own `add_video` would need another package for the same."""
    if frames.dtype != torch.uint8:
        raise ValueError(f"previews: expected uint8 frames, got {frames.dtype}")
    pictures = [
        Image.fromarray(np.ascontiguousarray(frame)) for frame in rearrange(frames, "f c h w -> f h w c").cpu().numpy()
    ]
    file = io.BytesIO()
    milliseconds = round(1000 / PREVIEW_FPS)
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0)
    height, width = frames.shape[2:]
    return Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=file.getvalue())
