"""`terra info`: what it says of a whole installation, of missing and broken packages, and of worlds."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from entry import read_settings
from missing import run_without
from safetensors.torch import load_file, save_file
from tiny_worlds import KEYS, SIZE, make_models

import terra
from terra.config.files import choices, model_names
from terra.config.spec import choose_engine
from terra.device import torch_device
from terra.info.command import SECTIONS, run

pytestmark = pytest.mark.slow

CODE = "import sys; sys.argv = ['terra', 'info']; sys.stdout = sys.stderr\nfrom terra.cli import main\nmain()"


def entry(lines: list[str], section: str, name: str) -> str:
    """What one line of a section says."""
    inside = lines[lines.index(f"{section}:") + 1 :]
    return next(line for line in inside if line.startswith(f"  {name} ")).split(maxsplit=1)[1]


@pytest.fixture
def found(capsys, tmp_path, monkeypatch):
    """The sections where one world, with weights that no engine would load, is unpacked."""
    monkeypatch.setenv("TERRA_WORLDS", str(tmp_path))
    make_models(tmp_path / "shapes", KEYS)
    weights = tmp_path / "shapes/world_model/model.safetensors"
    tensors = load_file(weights)
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}, weights)
    capsys.readouterr()
    run(read_settings("info", ["format=json"]))
    return json.loads(capsys.readouterr().out)


def test_it_tells_of_versions_engines_and_extras(found):
    assert list(found) == list(SECTIONS)
    assert found["terra"]["version"] == terra.__version__
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert found["gpus"].keys() - {"cuda", "driver"} == set(map(str, range(torch.cuda.device_count())))
    engines = found["engines"]
    assert engines.keys() == set(choices("engine"))
    assert engines["auto"].startswith(f"{choose_engine(torch_device(None))[0]} (")
    for name in ("hf", "jacobi", "persistence", engines["auto"].partition(" ")[0]):
        assert engines[name].startswith("works on ")
    assert found["extras"]["ray"] == "installed"


def test_it_tells_of_worlds(found, tmp_path):
    worlds = found["worlds"]
    assert set(worlds) == {*model_names(), "shapes"}
    shapes = worlds["shapes"]
    tensors = [load_file(tmp_path / f"shapes/{part}/model.safetensors") for part in ("tokenizer", "world_model")]
    parameters = sum(tensor.numel() for each in tensors for tensor in each.values())
    assert shapes["state"] == "unpacked"
    assert shapes["pixels"] == f"{SIZE[0]} x {SIZE[1]}"
    assert shapes["actions"] == KEYS.title
    assert shapes["parameters"] == f"{parameters / 1e6:.1f} M"
    assert shapes["in"] == str(tmp_path / "shapes")
    assert worlds["demo"]["state"] == "shipped"
    assert worlds["doom"]["state"] == "archive at hand"
    assert worlds["doom"]["pixels"] == "96 x 160"
    assert worlds["town_memory"]["memory frames"] == 8
    assert worlds["terra_v1"] == {"state": "not here", "from": "the Hub, turing-motors/Terra"}
    assert str(tmp_path) in found["folders"]["worlds"]


def test_a_damaged_world_is_told_in_its_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TERRA_WORLDS", str(tmp_path))
    (tmp_path / "doom/world_model").mkdir(parents=True)
    (tmp_path / "doom/world_model/config.json").write_text("{")
    run(read_settings("info"))
    assert entry(capsys.readouterr().out.splitlines(), "worlds", "doom").startswith("broken: ")


def test_a_missing_package_is_told_with_what_installs_it(tmp_path):
    code, lines = run_without("vllm", CODE, tmp_path)
    assert code == 0
    assert entry(lines, "engines", "vllm").startswith("does not work: engine=vllm needs the package vllm: pip install")
    assert entry(lines, "extras", "vllm").startswith("missing vllm: pip install ")
    assert entry(lines, "engines", "jacobi").startswith("works on ")


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_broken_package_is_told_in_its_line(tmp_path, package):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise OSError('libbroken.so:\\n cannot open')\n")
    path = os.pathsep.join([str(tmp_path), str(Path(terra.__file__).parent.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "terra", "info"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    broken = "OSError: libbroken.so: cannot open"
    assert entry(lines, "packages", package) == f"{importlib.metadata.version(package)}, broken: {broken}"
    assert broken in entry(lines, "engines", "error")
    assert entry(lines, "worlds", "demo").startswith("shipped, pixels 144 x 256, fps 10")
