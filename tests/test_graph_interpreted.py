"""Runs the tests of `tests/interpreted` in a process whose Triton kernels are interpreted; see the conftest there."""

import ast
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent / "interpreted"
TESTS = [
    f"{path.stem}::{node.name}"
    for path in sorted(FOLDER.glob("test_*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory) -> dict[str, dict[str, str]]:
    """For each test that is selected here, the failures (or "") of its cases by their names."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    selected = {item.callspec.params["name"] for item in request.session.items if item.path == Path(__file__)}
    paths = [f"{FOLDER / name.replace('::', '.py::')}" for name in TESTS if name in selected]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *paths]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TERRA_TEST_DEVICE": "cpu"}
    done = subprocess.run(command, env=environment, cwd=FOLDER.parent.parent, capture_output=True, text=True)
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '').partition('[')[0]}"
        found[name][case.get("name", "")] = "\n".join(part.text or part.get("message", "") for part in case)
    return found


@pytest.mark.parametrize("name", TESTS)
def test_kernels_equal_torch(outcomes, name):
    failures = {case: text for case, text in outcomes[name].items() if text}
    assert outcomes[name], "no case was run"
    assert not failures, "\n".join(f"{case}:\n{text}" for case, text in failures.items())
