"""The Dockerfile, as far as it can be tested without building it."""

import json
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """Instructions and their arguments, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


@pytest.fixture(scope="module")
def copied(steps) -> set[str]:
    """What comes from the checkout."""
    sources = [rest.split()[:-1] for kind, rest in steps if kind == "COPY" and not rest.startswith("--from")]
    return {name.removeprefix("./") for names in sources for name in names}


def test_what_is_copied_exists_and_is_not_ignored(copied):
    assert all((ROOT / name).exists() for name in copied)
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == copied


def test_the_package_is_made_of_what_is_copied(copied):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    named = {*wheel["packages"], *wheel["force-include"], project["project"]["readme"]}
    assert named | {*project["project"]["license-files"], "pyproject.toml"} <= copied


def test_commands_are_shell(steps):
    for kind, rest in steps:
        if kind == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)


@pytest.mark.parametrize("extra", ["cpu", "vllm"])
def test_what_is_installed(steps, extra):
    """Run with `echo` in the place of uv; the CPU's versions are pinned, those for CUDA are vLLM's choice."""
    (command,) = (rest for kind, rest in steps if kind == "RUN" and "uv pip install" in rest)
    told = command.replace("/opt/terra/bin/uv", "echo")
    done = subprocess.run(["sh", "-c", told], env={"EXTRA": extra}, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    assert words[-1] == f".[{extra},serve]"
    files = [words[index + 1] for index, word in enumerate(words) if word in ("--constraint", "--override")]
    assert len(files) == (2 if extra == "cpu" else 0)
    assert all((ROOT / name).is_file() for name in files)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_health_is_what_the_server_says(steps, status, code):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    (check,) = (rest for kind, rest in steps if kind == "HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        command[-1] = command[-1].replace(":8000/", f":{server.server_port}/")
        done = subprocess.run([sys.executable, *command[1:]], capture_output=True, check=False)
    assert (command[0], done.returncode) == ("python", code)


def test_extras_and_entry_exist(steps):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = (rest.partition("=")[2] for kind, rest in steps if kind == "ARG")
    assert {extra, "vllm", "serve"} <= project["optional-dependencies"].keys()
    (entry,) = (rest for kind, rest in steps if kind == "ENTRYPOINT")
    assert json.loads(entry)[:2] == ["terra", "serve"]
    assert "terra" in project["scripts"]


def test_it_does_not_run_as_root(steps):
    kinds = [kind for kind, _ in steps]
    user = dict(steps)["USER"]
    assert user not in ("root", "0")
    assert kinds.index("USER") < kinds.index("ENTRYPOINT")
    assert f"--uid {user}" in next(rest for kind, rest in steps if kind == "RUN" and "useradd" in rest)
