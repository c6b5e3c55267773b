"""Hostile inputs of `terra generate` and `terra rollout` end with 0, or with one line and 2, in time; see attack.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from corpus import corpus

ROOT = Path(__file__).parent.parent


def attack(folder: Path, *options: str) -> list[dict]:
    """The outcomes that were not right, from a process that has begun no threads and so can fork."""
    table = folder / "table.json"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    command = [sys.executable, str(ROOT / "tests/support/attack.py"), "--json", str(table), *options]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert table.exists(), done.stderr[-2000:]
    print(done.stdout)
    return [outcome for outcome in json.loads(table.read_text()) if outcome["problems"]]


@pytest.mark.slow
def test_a_sample_of_hostile_inputs(tmp_path):
    assert attack(tmp_path, "--sample", "40", "--seed", "3") == []


@pytest.mark.hostile
def test_the_corpus_is_large_and_the_same_for_a_seed():
    titles = [case.title for case in corpus(0)]
    assert len(titles) >= 600
    assert titles == [case.title for case in corpus(0)]


@pytest.mark.hostile
def test_every_hostile_input(tmp_path):
    assert attack(tmp_path) == []
