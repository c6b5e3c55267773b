"""The settings of `terra info`."""

from typing import Literal

from tokenizer.settings import Settings


class InfoSettings(Settings):
    """The settings of conf/info.yaml.

    Attributes:
        format: how everything is printed: as text, or as one JSON object.
    """

    format: Literal["text", "json"]
