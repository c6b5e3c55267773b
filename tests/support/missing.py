"""Runs code in a process that cannot import a package; slow third-party packages are imported there beforehand."""

import os
import sys
from pathlib import Path

from forkserver import forkserver_with

IMPORTED = ("torchvision", "transformers.models.llama.modeling_llama", "transformers.generation.utils", "hydra")


def run_without(package: str, code: str, folder: Path) -> tuple[int | None, list[str]]:
    """Run code where no such package can be imported; its exit code and the lines that it says on stderr."""
    said = folder / "stderr"
    process = forkserver_with(*IMPORTED).Process(target=_run, args=(package, code, said))
    process.start()
    process.join(120)
    process.kill()
    return process.exitcode, said.read_text().splitlines()


def _run(package: str, code: str, said: Path) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    assert not any(name.partition(".")[0] in ("terra", "decoder", "tokenizer") for name in sys.modules)
    # What others have imported of the package already is not to be had, either.
    for name in [package, *sys.modules]:
        if name.partition(".")[0] == package:
            sys.modules[name] = None  # pyright: ignore[reportArgumentType]
    exec(code)
