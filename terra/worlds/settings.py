"""The settings of `terra pack` and `terra unpack`; checked before torch is imported."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from terra.errors import ConfigError
from terra.worlds.places import archives_at_hand, find_archive
from tokenizer.settings import FilePath, Settings, expecting


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str | int | Path) else value


class PackSettings(Settings):
    """The whole of conf/pack.yaml.

    Attributes:
        world: a folder with tokenizer/ and world_model/, which may have estimator/, contexts/, README.md and page.json.
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
        archive: what `terra pack` wrote, or the name of a world whose archive is at hand; one or several.
        output: the world's folder, new or empty; None: that of `model=NAME` for an archive NAME.zip.
    """

    archive: Annotated[
        tuple[FilePath, ...],
        Field(strict=False, min_length=1),
        BeforeValidator(_as_list),
        expecting("names of worlds or paths of archives"),
    ]
    output: FilePath | None

    @model_validator(mode="after")
    def _one_output(self) -> Self:
        if self.output is not None and len(self.archive) > 1:
            raise ValueError(f"output: expected null with {len(self.archive)} archives, got {self.output}")
        return self


def find_archives(settings: UnpackSettings) -> list[Path]:
    """The archives that the settings name. Raises ConfigError for one that is neither a file nor a world at hand."""
    found = []
    for each in settings.archive:
        archive = find_archive(each)
        if archive is None:
            names = ", ".join(archives_at_hand())
            others = f"or a world at hand ({names})" if names else "such as those in terra/worlds of Terra's repository"
            raise ConfigError(f"archive: expected an archive of terra pack, {others}, found nothing at {each}")
        found.append(archive)
    return found
