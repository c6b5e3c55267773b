"""The notebooks run top to bottom, their main numbers are sane, and what is committed is what such a run gives."""

import ast
import json
import sys
from pathlib import Path

import nbformat
import pytest
from entry import load_script
from PIL import Image

from terra.errors import ConfigError, OutputError
from terra.recording.samples import opengl_problem

pytestmark = pytest.mark.slow

script = load_script("notebooks_run")

ROOT = Path(__file__).parent.parent
NAMES = (
    "01_generate",
    "02_tokens",
    "03_actions",
    "04_train_your_own",
    "05_measure",
    "06_doom",
    "07_pusht",
    "08_memory",
)
NEED_OPENGL = ("05_measure",)
# {notebook: {name: [low, high]}}
NUMBERS = json.loads((ROOT / "tests/notebook_numbers.json").read_text())


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def numbers_of(notebook) -> dict[str, float]:
    """The dictionary that the last code cell shows."""
    return ast.literal_eval(code_cells(notebook)[-1].outputs[-1]["data"]["text/plain"])


def check_numbers(notebook, name):
    numbers = numbers_of(notebook)
    assert numbers.keys() == NUMBERS[name].keys()
    outside = {
        key: value for key, value in numbers.items() if not NUMBERS[name][key][0] <= value <= NUMBERS[name][key][1]
    }
    assert not outside


@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name):
    if name in NEED_OPENGL and (problem := opengl_problem()) is not None:
        pytest.skip(problem)
    notebook = script.read(ROOT / "notebooks" / f"{name}.ipynb")
    executed = script.execute(notebook, name)
    check_numbers(executed, name)
    said = [output.text for cell in code_cells(executed) for output in cell.outputs if output.get("name") == "stderr"]
    assert not said
    for ours, committed in zip(code_cells(executed), code_cells(notebook), strict=True):
        assert bool(ours.outputs) == bool(committed.outputs), ours.source


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebook_was_run_whole_and_is_small(name):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert path.stat().st_size <= script.MAX_BYTES
    notebook = script.read(path)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert not [o for cell in code_cells(notebook) for o in cell.outputs if o.output_type == "error"]
    check_numbers(notebook, name)
    picture = ROOT / "notebooks/pictures" / f"{name}.png"
    assert picture.stat().st_size <= script.PICTURE_BYTES
    with Image.open(picture) as image:
        assert image.width <= script.PICTURE_WIDTH


def test_every_notebook_is_tested_and_every_range_used():
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == set(NAMES) == NUMBERS.keys()


def write_notebook(path: Path, *sources: str, tags: tuple[str, ...] = ("picture",)) -> Path:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.cells[-1].metadata["tags"] = list(tags)
    nbformat.write(notebook, path)
    return path


DRAW = """
import os, sys, tempfile
import PIL.Image
print(sys.executable, os.getcwd().startswith(tempfile.gettempdir()))
PIL.Image.effect_noise((900, 300), 80)
"""


def test_outputs_and_picture_are_stored_and_nothing_that_differs_between_runs(tmp_path):
    path = write_notebook(tmp_path / "a.ipynb", DRAW)
    script.run(path)
    (cell,) = script.read(path).cells
    assert cell.outputs[0].text == f"{sys.executable} True\n"
    assert len({"image/png", "image/jpeg"} & cell.outputs[1].data.keys()) == 1
    assert cell.metadata.keys() == {"tags"}
    with Image.open(tmp_path / "pictures/a.png") as picture:
        assert picture.width <= 720
    assert (tmp_path / "pictures/a.png").stat().st_size <= 60_000


@pytest.mark.parametrize(
    ("sources", "tags", "error", "words"),
    [
        (["1 / 0"], ["picture"], ConfigError, ["a.ipynb", "ZeroDivisionError"]),
        (["1"], ["picture"], OutputError, ["tagged 'picture'"]),
        ([DRAW], [], OutputError, ["tagged 'picture'"]),
        (["print('x' * 700_000)"], ["picture"], OutputError, ["at most 600000 bytes"]),
    ],
)
def test_a_notebook_that_fails_stays_as_it_was(tmp_path, sources, tags, error, words):
    path = write_notebook(tmp_path / "a.ipynb", *sources, tags=tags)
    before = path.read_bytes()
    with pytest.raises(error) as caught:
        script.run(path)
    assert all(word in str(caught.value) for word in words)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["a.ipynb"]


@pytest.mark.parametrize("content", [None, b"{", b"[]", b'{"cells": []}', b'{"nbformat": 4, "cells": 3}', b"\xff"])
def test_what_is_no_notebook_is_one_line(tmp_path, monkeypatch, capsys, content):
    path = tmp_path / "a.ipynb"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr("sys.argv", ["notebooks_run.py", str(path)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}")
    assert "expected" in line
