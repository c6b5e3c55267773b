"""Runs the notebooks top to bottom, each in a fresh kernel of this Python, and stores the outputs in them.

    python scripts/notebooks_run.py                                     all of notebooks/
    python scripts/notebooks_run.py notebooks/04_train_your_own.ipynb

The picture that a notebook's cell tagged "picture" shows is written to pictures/NAME.png beside the notebook. A
notebook whose run fails stays unchanged. Exit
code: 0 all ran, 2 one is missing, no notebook, failed or too large.
"""

import argparse
import base64
import copy
import logging
import os
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from PIL import Image

from terra.errors import ConfigError, OutputError, TerraError
from terra.progress import ProgressLine
from tokenizer.files import make_folder, read_json, replacing

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
MAX_BYTES = 600_000
CELL_SECONDS = 600

PICTURE_TAG = "picture"
PICTURE_WIDTH = 720  # pixels, at most
PICTURE_BYTES = 60_000
_PICTURES = ("image/png", "image/jpeg")
_WIDGET = "application/vnd.jupyter.widget-view+json"


def main() -> None:
    """Parse the command line; a user's error is one line and exit status 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", type=Path, nargs="*", help="by default all of the folder notebooks/")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("terra").setLevel(logging.INFO)
    try:
        for path in arguments.notebooks or sorted(NOTEBOOKS.glob("0*.ipynb")):
            started = perf_counter()
            run(path)
            print(f"{path.name}: {perf_counter() - started:.0f} s, {path.stat().st_size / 1000:.0f} kB")
    except TerraError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def run(path: Path) -> None:
    """Execute a notebook, store it with its outputs in place, and its picture beside it.

    Raises:
        ConfigError: see `read` and `execute`.
        OutputError: the result is too large, has no picture, or can't be written.
    """
    notebook = execute(read(path), path.name)
    content = nbformat.writes(notebook) + "\n"
    if len(content.encode()) > MAX_BYTES:
        raise OutputError(f"{path}: expected at most {MAX_BYTES} bytes, got {len(content.encode())}: show less")
    picture = small_picture(tagged_picture(notebook, path), path)
    make_folder(path.parent / "pictures")
    with replacing(path.parent / "pictures" / f"{path.stem}.png") as temporary:
        temporary.write_bytes(picture)
    with replacing(path) as temporary:
        temporary.write_text(content, encoding="utf-8")


def read(path: Path) -> NotebookNode:
    """Read a notebook of format 4. Raises ConfigError for any other file."""
    content = read_json(path, ConfigError, "a notebook")
    if content.get("nbformat") != 4:
        raise ConfigError(f"{path}: expected a notebook of format 4, got {content.get('nbformat', 'none')}")
    try:
        nbformat.validate(content)
    except nbformat.ValidationError as error:
        raise ConfigError(f"{path}: expected a notebook: {error.message}") from None
    return nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)


def execute(notebook: NotebookNode, name: str) -> NotebookNode:
    """Run a copy of the notebook in a fresh kernel and a temporary folder; returns the copy with its outputs.

    Values that differ between any two runs (times, identifiers of widgets) are removed.

    Raises:
        ConfigError: a cell fails or takes more than `CELL_SECONDS`, or the kernel dies.
    """
    notebook = copy.deepcopy(notebook)
    cells = len(notebook.cells)
    with tempfile.TemporaryDirectory(prefix="terra_notebook_") as folder, ProgressLine(name, cells) as line:
        client = NotebookClient(
            notebook,
            # No kernel that is installed on this machine, but this Python; sockets that nobody else reaches.
            km=AsyncKernelManager(
                kernel_name="python3",
                kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
                transport="ipc",
                ip=str(Path(folder) / ".kernel"),
            ),
            timeout=CELL_SECONDS,
            resources={"metadata": {"path": folder}},
            record_timing=False,
            store_widget_state=False,
            on_cell_start=lambda cell, cell_index: line.show(cell_index, f"cell {cell_index + 1} of {cells}"),
        )
        # A profile of its own: nobody's start-up files.
        environment = os.environ | {"IPYTHONDIR": str(Path(folder) / ".ipython")}
        try:
            client.execute(env=environment, cleanup_kc=True)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise ConfigError(f"{name}: {_reason(error)}") from None
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _WIDGET not in output.get("data", {})]
            for output in cell.outputs:
                _keep_smallest(output.get("data", {}))
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return notebook


def _keep_smallest(data: dict[str, str]) -> None:
    """Keep the smaller one of a picture's PNG and JPEG; IPython stores both for a Pillow image."""
    kinds = sorted((kind for kind in _PICTURES if kind in data), key=lambda kind: len(data[kind]))
    for kind in kinds[1:]:
        del data[kind]


def _reason(error: Exception) -> str:
    if isinstance(error, CellExecutionError):
        return f"{error.ename}: {error.evalue}"
    return str(error)


def tagged_picture(notebook: NotebookNode, path: Path) -> Image.Image:
    """The last picture that the cell tagged "picture" shows. Raises OutputError if there is none."""
    found: list[Any] = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and PICTURE_TAG in cell.metadata.get("tags", []):
            for output in cell.outputs:
                data = output.get("data", {})
                found += [data[kind] for kind in _PICTURES if kind in data]
    if not found:
        raise OutputError(f"{path}: expected a cell tagged {PICTURE_TAG!r} that shows a PNG or JPEG, got none")
    return Image.open(BytesIO(base64.b64decode(found[-1]))).convert("RGB")


def small_picture(picture: Image.Image, path: Path) -> bytes:
    """A PNG of at most `PICTURE_WIDTH` pixels and `PICTURE_BYTES` bytes: fewer colors first, then fewer pixels.

    Raises:
        OutputError: a quarter of the width is still too large.
    """
    widest = min(PICTURE_WIDTH, picture.width)
    for width in (widest, widest * 3 // 4, widest // 2, widest // 4):
        height = max(1, round(picture.height * width / picture.width))
        smaller = picture.resize((width, height), Image.Resampling.LANCZOS)
        for colors in (None, 256, 128, 64):
            file = BytesIO()
            (smaller if colors is None else smaller.quantize(colors)).save(file, "PNG", optimize=True)
            if file.tell() <= PICTURE_BYTES:
                return file.getvalue()
    raise OutputError(f"{path}: expected a picture that fits {PICTURE_BYTES} bytes, got {picture.size}")


if __name__ == "__main__":
    main()
