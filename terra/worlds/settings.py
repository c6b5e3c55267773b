"""The settings of `terra pack` and `terra unpack`; checked before torch is imported."""

from typing import Literal

from tokenizer.settings import FilePath, Settings


class PackSettings(Settings):
    """The whole of conf/pack.yaml.

    Attributes:
        world: a folder that holds tokenizer/ and world_model/, and may hold estimator/, contexts/ and README.md.
        output: the archive, NAME.zip.
        bits: of the stored weights; 16 stores them unchanged, whatever their type.
        overwrite: replace an archive that is there.
    """

    world: FilePath
    output: FilePath
    bits: Literal[8, 16]
    overwrite: bool


class UnpackSettings(Settings):
    """The whole of conf/unpack.yaml.

    Attributes:
        archive: what `terra pack` wrote.
        output: the world's folder, new or empty; None: that of `model=NAME` for an archive NAME.zip.
    """

    archive: FilePath
    output: FilePath | None
