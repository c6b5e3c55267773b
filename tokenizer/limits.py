"""Bounds on what is read from files and requests of others, so that a few bytes can't take gigabytes or minutes."""

from tokenizer.settings import Count, Settings


class Limits(Settings):
    """Bounds on what is read from files and requests of others; the settings `limits.NAME=` of the commands.

    What is larger is refused before memory is taken for it.

    Attributes:
        json_bytes: size of a JSON file.
        json_depth: depth of lists and objects in JSON.
    """

    json_bytes: Count = 64 << 20
    json_depth: Count = 64


LIMITS = Limits()
"""The bounds where none are given."""
