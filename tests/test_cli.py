"""The table of commands, and what each command says of a mistake before anything heavy is imported."""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from entry import compose
from missing import run_without
from omegaconf import OmegaConf
from PIL import Image

import terra
from terra.cli import COMMANDS, GROUPS, main
from terra.config.files import config_dir
from terra.errors import ConfigError
from terra.extras import EXTRAS, extras_named

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = {"torch", "transformers", "vllm", "numpy", "accelerate"}


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def say(monkeypatch, capsys):
    """Runs a command that is refused, and gives the one line that it says."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["terra", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_settings_and_a_help_page(name):
    command = COMMANDS[name]
    config = compose(command.config_name)
    settings = set(config.keys())  # a DictConfig does not contain a key whose value is missing
    assert set(command.inputs) <= settings
    page = (config_dir() / f"hydra/help/{command.config_name}.yaml").read_text()
    assert f"app_name: terra {name}\n" in page
    for part in (f"  terra {name}: ", "  USAGE\n", "  EXIT CODE\n"):
        assert part in page
    assert len(command.job) < 60


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_page_has_every_setting(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["terra", name, "--help", "all"])
    with pytest.raises(SystemExit):
        main()
    listed = yaml.safe_load(capsys.readouterr().out.partition("ALL SETTINGS (setting=value)\n")[2])
    assert listed == OmegaConf.to_container(compose(COMMANDS[name].config_name), resolve=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_page_ends_with_how_to_list_every_setting(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"terra-{name}", "--help"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    *lines, last = capsys.readouterr().out.strip().splitlines()
    assert last.split() == f"terra {name} --help all lists all settings, with their values".split()
    assert "ALL SETTINGS (setting=value)" not in lines
    assert "EXIT CODE" in lines
    assert len(lines) < 60


def test_all_after_anything_else_is_no_setting(say):
    assert say("generate", "all", "--help") == "error: all: expected setting=value"
    assert say("generate", "--help", "alls") == "error: alls: expected setting=value"


@pytest.mark.parametrize("name", ["generate", "rollout", "serve", "check"])
def test_help_pages_tell_of_any_world_and_not_only_of_driving(name):
    page = (config_dir() / f"hydra/help/{name}.yaml").read_text()
    assert "trajectory" in page
    assert "actions" in page.partition("  OUTPUT\n")[0]


def test_recordings_are_not_called_driving():
    for path in [*config_dir().rglob("*.yaml"), *Path(terra.__file__).parent.rglob("*.py")]:
        assert "recorded driving" not in path.read_text().lower(), path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_a_function_of_its_settings(name):
    function, settings = (
        getattr(importlib.import_module(path.partition(":")[0]), path.partition(":")[2])
        for path in (COMMANDS[name].function, COMMANDS[name].settings)
    )
    assert get_type_hints(function)["settings"] is settings


def test_every_help_page_is_of_a_command():
    pages = {path.stem for path in (config_dir() / "hydra/help").glob("*.yaml")}
    assert pages == {command.config_name for command in COMMANDS.values()} | {"page"}


def test_console_scripts_are_commands():
    assert PROJECT["scripts"]["terra"] == "terra.cli:main"
    assert set(PROJECT["scripts"].values()) == {"terra.cli:main"}
    assert {name.removeprefix("terra-") for name in PROJECT["scripts"]} - {"terra"} <= COMMANDS.keys()


def test_an_alias_is_its_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/terra-act-bench", "--version"])
    main()
    assert capsys.readouterr().out == f"terra {terra.__version__}\n"
    monkeypatch.setattr(sys, "argv", ["terra-check", "hashs=false"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "error: hashs: no such setting; did you mean hashes?\n"


BAD = {
    "act-bench": "manifest=. output=out limit=abc",
    "benchmark": "output=out repeats=abc",
    "check": "num_frames=abc",
    "convert": "kind=tokenizer input=. output=out bit_order=abc",
    "evaluate": "data=. output=out num_clips=abc",
    "generate": "experiment=demo num_frames=abc",
    "import": "kind=gpx input=. output=out name=a fps=abc",
    "info": "format=abc",
    "inspect": "data=. verify=abc",
    "pack": "world=. output=out.zip bits=abc",
    "record": "output=out towns=abc",
    "replay": "folder=. dtype=abc",
    "rollout": "manifest=. output=out num_context=abc",
    "serve": "port=abc",
    "tokenize": "data=. output=out checkpoint=demo batch_size=abc",
    "train": "data=. output=out max_steps=abc",
    "train-estimator": "data=. output=out window=abc",
    "train-refiner": "data=. output=out frames=abc",
    "train-tokenizer": "data=. output=out max_steps=abc",
    "unpack": "archive=doom output=[abc]",
}
"""A wrong value of a setting for each command."""


INPUTS = {
    "num_frames=500": r".json: covers .* num_frames=500 needs 499",
    "num_frames=3": r"num_frames: expected more than num_context=3, got 3",
    "num_context=30": r"num_context: expected 1 to 24 \(the window holds 25\), got 30",
    "overlap=25": r"overlap: expected 1 to 24",
    "memory=3": r"memory: expected 0 or auto",
    "device=warp": r"device: expected cpu or cuda, got 'warp'",
    "actions=few": r"trajectory: expected the file of the actions, .* got actions= as well",
    "trajectory=few/0.png": r"0.png: expected a file that ends in .json",
    "context=few": r"few: expected 3 or more PNG or JPEG pictures, got 1",
    "context=few num_context=1": r"0.png: expected an aspect ratio of 1.778",
    "output=few": r"output=few: exists already",
}
"""Settings of `terra generate experiment=demo` that do not fit the model or the inputs, and what is said of them."""

REFUSALS = """
import contextlib, io, json, os, sys
from terra.cli import main

os.chdir(sys.argv[1])
done = {}
for line in json.load(sys.stdin):
    sys.argv = ["terra", *line.split()]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = main()
        except SystemExit as stop:
            code = stop.code
    heavy = sorted({"torch", "transformers"} & set(sys.modules))
    done[line] = [code, said.getvalue(), heavy]
    for name in heavy:
        del sys.modules[name]
print(json.dumps(done))
"""
"""Runs the command lines that stdin has as JSON in a folder, the first argument: exit code, stderr, what is heavy."""


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> dict[str, list]:
    """What each of the wrong command lines came to, all in one process."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "few").mkdir()
    Image.new("RGB", (400, 400)).save(folder / "few/0.png")
    (folder / "few/same.jsonl").write_text('{"id": "a"}\n' * 2)
    lines = [f"{name} {settings}" for name, settings in BAD.items()]
    lines += ["rollout manifest=few/same.jsonl output=out"]
    lines += [f"generate experiment=demo {settings}" for settings in INPUTS]
    done = subprocess.run(
        [sys.executable, "-c", REFUSALS, folder],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["few"]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_value_is_refused_before_torch_is_imported(name, refused):
    code, said, heavy = refused[f"{name} {BAD[name]}"]
    key = BAD[name].split()[-1].partition("=")[0]
    assert (code, heavy) == (2, [])
    assert re.fullmatch(rf"error: {key}: expected .*\n", said)


def test_a_manifest_is_refused_before_torch_is_imported(refused):
    code, said, heavy = refused["rollout manifest=few/same.jsonl output=out"]
    assert (code, heavy) == (2, [])
    assert "line 2: expected an id of its own, got that of line 1" in said


@pytest.mark.parametrize("settings", INPUTS)
def test_inputs_are_refused_before_torch_is_imported(settings, refused):
    code, said, heavy = refused[f"generate experiment=demo {settings}"]
    assert (code, heavy) == (2, [])
    assert re.fullmatch(f"error: .*{INPUTS[settings]}.*\n", said)


def test_the_overview_lists_every_command_and_imports_nothing_heavy():
    done = python(
        "import sys; sys.argv = ['terra']\nfrom terra.cli import main\nmain()\n"
        f"assert not {HEAVY | {'hydra', 'omegaconf'}!r} & set(sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    for group in GROUPS.values():
        for command in group:
            assert f"  {command.name} " in done.stdout
            assert command.job in done.stdout


@pytest.mark.parametrize("arguments", [["--version"], ["generate", "--version"]])
def test_version(arguments):
    done = subprocess.run([sys.executable, "-m", "terra", *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == f"terra {terra.__version__}\n"


def test_a_help_page_lists_the_choices_of_its_command_alone(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["terra", "import", "--help", "all"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    page = capsys.readouterr().out
    assert "CHOICES (choice=option)\nlerobot: actions, l2d, state\n\n" in page
    assert "frames_per_episode: 300" in page
    assert "terra import --version" in page


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("genrate", "genrate: no such command; did you mean generate?"),
        ("xyz", "xyz: no such command; terra --help lists them"),
        ("generate contxt=a", "contxt: no such setting; did you mean context?"),
        ("generate engine=graph engine.drats=3", "engine.drats: no such setting; did you mean engine.drafts?"),
        ("generate temperatur=1", "temperatur: no such setting; did you mean sampling.temperature?"),
        ("generate +nm_frames=6", "nm_frames: no such setting; did you mean num_frames?"),
        ("generate ++nm_frames=6", "nm_frames: no such setting; did you mean num_frames?"),
        ("generate experimnt=demo", "experimnt: no such setting; did you mean experiment?"),
        ("check +camera=demo", "camera: no such setting"),
        ("generate +engine.foo=1 engine=hf", "engine.foo: no such setting; engine has device, dtype"),
        ("generate sampling.foo=1", "sampling.foo: no such setting; sampling has temperature, top_k, top_p"),
        ("serve +uploads.max_frame=1", "uploads.max_frame: no such setting; did you mean uploads.max_frames?"),
        (
            "generate experiment=demo ~seed",
            "seed: expected a value, which another setting refers to, got nothing",
        ),
        ("record qqq=1", "qqq: no such setting"),
        (
            "generate hydra.run.dir=x",
            "hydra.run.dir: is fixed: nothing is written but what output= and other settings name",
        ),
        ("generate --num_frames=6", "--num_frames=6: no such option; settings are given as name=value, without dashes"),
        ("generate frames", "frames: expected setting=value"),
        ("record", "output: expected a value, got nothing: output=... is needed"),
        ("evaluate data=/no/such output=x", "data: expected a file or folder, found nothing at /no/such"),
        (
            "serve tokenizer.pretrained=/no/such",
            "tokenizer.pretrained: expected a checkpoint folder or a Hub id owner/name, found no folder /no/such",
        ),
    ],
)
def test_a_mistake_is_one_line(say, arguments, line):
    assert say(*arguments.split()) == f"error: {line}"


def test_a_wrong_choice_lists_the_choices(say):
    line = say("generate", "engine=grph")
    assert line.startswith("error: ")
    assert "did you mean graph? There are auto, graph, hf, jacobi, persistence, vllm" in line
    alone = "error: experiment={}: no such choice; {}here is demo"
    assert say("generate", "experiment=dmo") == alone.format("dmo", "did you mean demo? T")
    assert say("generate", "experiment=zz") == alone.format("zz", "t")


def test_keys_of_an_open_setting_may_be_added(say):
    arguments = ["experiment=demo", "engine=vllm", "+engine.engine_args.max_model_len=99", "context=/no/such"]
    assert say("generate", *arguments) == "error: context: expected a file or folder, found nothing at /no/such"


def test_paths_and_settings_are_checked_before_anything_heavy_is_imported():
    done = python(
        "import sys; sys.argv = ['terra', 'generate', 'experiment=demo', 'context=/no/such']\n"
        "from terra.cli import main\n"
        f"try: main()\nfinally: assert not {HEAVY!r} & set(sys.modules)"
    )
    assert done.returncode == 2
    assert done.stderr == "error: context: expected a file or folder, found nothing at /no/such\n"


def test_a_folder_without_a_record_is_told_before_anything_heavy_is_imported(tmp_path):
    done = python(
        f"import sys; sys.argv = ['terra', 'replay', 'folder={tmp_path}']\n"
        "from terra.cli import main\n"
        f"try: main()\nfinally: assert not {HEAVY!r} & set(sys.modules)"
    )
    expected = "expected the rollout.json of a rollout, got: No such file or directory"
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path / 'rollout.json'}: {expected}\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("accelerate", "train data=. output=x"),
        ("accelerate", "tokenize data=. checkpoint=. output=x"),
        ("accelerate", "train-tokenizer data=. output=x"),
        ("accelerate", "train-estimator data=. output=x"),
        ("diffusers", "train-refiner data=. output=x"),
        ("diffusers", "convert kind=refiner input=. output=x"),
        ("fastapi", "serve"),
        ("matplotlib", "act-bench manifest=pyproject.toml output=x"),
        ("moderngl", "record output=x towns=1 workers=0"),
        ("ray", "rollout manifest=pyproject.toml output=x engine=persistence cluster=ray"),
        ("torchmetrics", "evaluate data=. output=x"),
    ],
)
def test_a_missing_extra_is_one_line(package, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    output = tmp_path / "out"
    given = ["terra", *(argument.replace("output=x", f"output={output}") for argument in arguments.split())]
    code, said = run_without(package, f"sys.argv = {given!r}; from terra.cli import main; main()", tmp_path)
    assert code == 2, said
    (line,) = said
    assert f'needs the package {package}: pip install "terra-world-model[{EXTRAS[package]}]"' in line
    assert not output.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "module"), [("gymnasium", "terra.environment"), ("ipywidgets", "terra.insight.widgets")]
)
def test_a_module_names_its_extra(package, module, tmp_path):
    code, said = run_without(package, f"import {module}", tmp_path)
    assert code == 1
    line = said[-1]
    assert line.endswith(f'{module} needs the package {package}: pip install "terra-world-model[{EXTRAS[package]}]"')


def test_extras_are_those_of_the_project():
    assert set(EXTRAS.values()) <= PROJECT["optional-dependencies"].keys()


def test_a_torchvision_of_another_torch_is_one_line():
    expected = r'^torch \S+ and torchvision \S+ do not fit together: pip install .* "torch==\S+" "torchvision==\S+"$'
    with pytest.raises(ConfigError, match=expected), extras_named():
        raise RuntimeError("operator torchvision::nms does not exist")
    with pytest.raises(RuntimeError, match="another"), extras_named():
        raise RuntimeError("another")


@pytest.mark.slow
def test_names_are_exported_lazily_and_generating_needs_no_extra():
    done = python(
        f"import sys, terra; assert not {HEAVY!r} & set(sys.modules)\n"
        f"sys.modules.update(dict.fromkeys({list(EXTRAS)!r}))\n"
        "from terra import *; import terra.check.run, terra.generate, terra.replay, terra.rollouts.batch\n"
        "print(*dir(terra))"
    )
    assert done.returncode == 0, done.stderr
    assert set(terra.__all__) <= set(done.stdout.split())
    for name in terra.__all__:
        value = getattr(terra, name)
        assert name == "__version__" or value.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'Pipelin'"):
        terra.Pipelin  # noqa: B018
    with pytest.raises(ImportError):
        exec("from terra import Pipelin")


def test_an_error_is_one_short_line_of_printable_characters(say):
    assert say("generate", "\x1b[31mseed=\x077").isprintable()
    line = say("generate", "x" * 100_000 + "=1")
    assert len(line) < 1100
    assert line.endswith(" characters)")
