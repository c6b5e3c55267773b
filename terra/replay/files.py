"""Finds the files that a record names: where a setting says, else at the recorded location or beside the record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from terra.errors import ConfigError
from terra.locations import places_of


class MissingError(ConfigError):
    """A file or folder that a record names is at none of the places where it may be."""


@dataclass(frozen=True)
class Recorded:
    """One input of a rollout, as its record has it.

    Attributes:
        setting: the setting of `terra replay` that names another place.
        locations: the input's files, see `terra.locations`.
        sha256: hash of the content.
        hash_of: the hash of files' content; None for files that are missing or can't be read.
    """

    setting: str
    locations: Sequence[str]
    sha256: str | None
    hash_of: Callable[[list[Path]], str | None]

    def find(self, folder: Path, given: str | Path | None) -> list[Path]:
        """The files, checked by their hash.

        Args:
            folder: the record's folder.
            given: the setting's value; None looks at the recorded location and beside the record.

        Raises:
            MissingError: nothing there; one line that names the setting.
            ConfigError: other content.
        """
        tried = [[Path(given)]] if given is not None else self._places(folder)
        other: tuple[Path, str] | None = None
        for paths in tried:
            got = self.hash_of(paths)
            if got is not None and got == self.sha256:
                return paths
            if got is not None and other is None:
                other = paths[0], got
        if other is not None:
            expected = f"expected the content that the rollout was made from ({str(self.sha256)[:12]})"
            raise ConfigError(f"{self.setting} {other[0]}: {expected}, got another ({other[1][:12]})")
        raise missing(self.setting, [paths[0] for paths in tried], f"{self.setting}=PATH")

    def _places(self, folder: Path) -> list[list[Path]]:
        each = [places_of(location, folder) for location in self.locations]
        return [[places[0] for places in each], [places[-1] for places in each]]


def missing(setting: str, places: Sequence[Path], remedy: str) -> MissingError:
    """The error that an input is at none of several places; `remedy` is the setting that says where it is."""
    looked = " or ".join(dict.fromkeys(map(str, places)))
    return MissingError(f"{setting}: expected it at {looked}, found none: give {remedy}")
