"""A pickle that would run code, harmlessly, if anybody loaded it without care."""

import os
from pathlib import Path


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.sprung),)
