"""The Dockerfile, as far as it can be tested without building it."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """Instructions and their arguments, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def test_what_is_copied_exists(steps):
    copied = [
        name for kind, rest in steps if kind == "COPY" and not rest.startswith("--from") for name in rest.split()[:-1]
    ]
    assert {"terra", "conf", "pyproject.toml"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists(), name


def test_commands_are_shell(steps):
    for kind, rest in steps:
        if kind == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)


def test_extras_and_entry_exist(steps):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = (rest.partition("=")[2] for kind, rest in steps if kind == "ARG")
    assert {extra, "vllm", "serve"} <= project["optional-dependencies"].keys()
    (entry,) = (rest for kind, rest in steps if kind == "ENTRYPOINT")
    assert entry.startswith('["terra-serve"')
    assert "terra-serve" in project["scripts"]


def test_it_does_not_run_as_root(steps):
    kinds = [kind for kind, _ in steps]
    user = dict(steps)["USER"]
    assert user not in ("root", "0")
    assert kinds.index("USER") < kinds.index("ENTRYPOINT")
    assert f"--uid {user}" in next(rest for kind, rest in steps if kind == "RUN" and "useradd" in rest)
