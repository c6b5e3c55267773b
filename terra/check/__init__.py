"""Whether a tokenizer and a world model are whole, are what is published, and belong together: `terra-check`."""

from terra.check.run import check

__all__ = ["check"]
