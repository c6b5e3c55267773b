"""The settings of conf/replay.yaml."""

from tokenizer.settings import Device, Dtype, FilePath, Settings


class ReplaySettings(Settings):
    """The settings of conf/replay.yaml.

    Attributes:
        folder: the rollout's folder, with rollout.json.
        engine, device, dtype: replace the recorded values; None keeps them.
    """

    folder: FilePath
    engine: str | None
    device: Device | None
    dtype: Dtype | None
