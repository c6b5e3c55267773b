"""A pickle that would run (harmless) code if a loader unpickled it."""

import os
from pathlib import Path


class Trap:
    """An object whose unpickling creates a folder."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.sprung),)
