"""The settings of `terra check` and `terra convert`; checked before torch is imported."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from terra.config.groups import PairSettings
from tokenizer.config import BitOrder
from tokenizer.settings import Count, FilePath, Settings, Text, expecting


class CheckSettings(PairSettings):
    """The whole of conf/check.yaml.

    Attributes:
        hashes: compare SHA-256 with the published ones.
        report: JSON file that the findings are written to, too.
        context: real frames, for the bit order; None leaves the bit order out.
        trajectory: the frames' path, where actions are waypoints.
        actions: the file of the frames' actions, where these are vectors, keys or choices.
        sample_id: which line of a .jsonl trajectory.
        num_frames: frames taken from the start of `context`.
        window: frames of a window, the first given, the others predicted.
        num_windows: windows, spread evenly over the frames.
    """

    hashes: bool
    report: FilePath | None
    context: Text | None
    trajectory: FilePath | None
    actions: FilePath | None
    sample_id: int | str | None
    num_frames: Annotated[int, Field(ge=2)]
    window: Annotated[int, Field(ge=2)]
    num_windows: Count

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.window > self.num_frames:
            raise ValueError(f"window: expected at most num_frames={self.num_frames}, got {self.window}")
        if (self.context is None) != (self.trajectory is None and self.actions is None):
            raise ValueError("context and trajectory (or actions): expected both or neither, got one")
        return self


class ConvertSettings(Settings):
    """The whole of conf/convert.yaml.

    Attributes:
        kind: what the file holds.
        input: the file.
        output: folder of config.json and model.safetensors; replaced only with `overwrite`.
        weights: with kind=tokenizer, the moving average or those of the last step.
        image_size: with kind=tokenizer, (height, width) of the frames to encode.
        bit_order: with kind=tokenizer, see `tokenizer.QuantizerConfig`.
    """

    kind: Literal["tokenizer", "refiner"]
    input: FilePath
    output: FilePath
    overwrite: bool
    weights: Literal["live", "ema"]
    image_size: Annotated[tuple[Count, Count] | None, Field(strict=False), expecting("[height, width]")]
    bit_order: BitOrder | None
