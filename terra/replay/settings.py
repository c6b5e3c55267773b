"""The settings of conf/replay.yaml."""

from typing import Any

from tokenizer.settings import Device, Dtype, FilePath, Settings, Text


class ModelPath(Settings):
    """The folder, or the repository of the Hub (owner/name), of a tokenizer and its world model; None as recorded."""

    path: Text | None
    revision: Text | None = None


class DecoderPath(Settings):
    """The folder, or the repository of the Hub, of a decoder with weights of its own; None as recorded."""

    pretrained: Text | None


class ReplaySettings(Settings):
    """The settings of conf/replay.yaml.

    Attributes:
        folder: the rollout's folder, with rollout.json.
        model: where tokenizer and world model are.
        tokenizer, world_model: what `model=NAME` says of each; None as recorded.
        adapter: the adapter's folder.
        decoder: where a decoder's own weights are.
        context: folder or glob of pictures, or a video.
        trajectory, actions: the file of the actions, one of the two as in `terra generate`.
        map: pictures of the place with their poses, as in `terra generate`.
        engine: the engine's settings.
        device, dtype: replace those of all parts, and of the engine.

    None stands for the recorded value, and for files for the recorded location. What a setting names must have the
    recorded content.
    """

    folder: FilePath
    model: ModelPath
    tokenizer: dict[str, Any] | None = None
    world_model: dict[str, Any] | None = None
    adapter: FilePath | None
    decoder: DecoderPath
    engine: dict[str, Any] | None = None
    context: Text | None
    trajectory: FilePath | None
    actions: FilePath | None
    map: FilePath | None
    device: Device | None
    dtype: Dtype | None
