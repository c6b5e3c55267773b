"""Import what the lerobot package itself wrote: `make test-lerobot`, which installs it beside Terra.

`TERRA_LEROBOT` and `TERRA_LEROBOT_21` name the Python of environments with lerobot 0.4 or later, which writes version
3.0 of the format, and with lerobot 0.3.3, which writes version 2.1. No test is named here, so that `make test` leaves
it out.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from entry import read_settings

from terra.dataset import read_frames, read_split
from terra.dataset.importing.command import run

WRITER = Path(__file__).with_name("write_lerobot.py")
ROWS, COLUMNS = 2, 8


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lerobot")
    # Nothing is fetched from a hub; SVT-AV1 says a line for each video.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "SVT_LOG": "1"}
    for python, more in (("TERRA_LEROBOT_21", [folder / "old"]), ("TERRA_LEROBOT", [folder / "new", folder / "old"])):
        command = [os.environ[python], str(WRITER), *map(str, more)]
        made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert made.returncode == 0, made.stderr[-3000:]
    return folder


def numbers_in(frames) -> list[int]:
    """The numbers that pictures show in 2 x 8 blocks."""
    count, height, width, _ = frames.shape
    blocks = frames.reshape(count, ROWS, height // ROWS, COLUMNS, width // COLUMNS, 3).mean(axis=(2, 4, 5))
    return ((blocks.reshape(count, -1) > 127) @ (1 << np.arange(ROWS * COLUMNS))).tolist()


@pytest.mark.parametrize("version", ["old", "new"])
def test_each_row_of_each_dataset_has_its_own_picture(written, tmp_path, version, caplog):
    expected = json.loads((written / version / "expected.json").read_text())
    assert expected
    wrong = {}
    for name, wanted in expected.items():
        source = written / version / name
        fps = json.loads((source / "meta" / "info.json").read_text())["fps"]
        given = ["kind=lerobot", "lerobot=actions", f"input={source}", f"output={tmp_path / name}", f"fps={fps}"]
        assert run(read_settings("import", [*given, "image_size=[96,128]", "workers=0"])) == 0, name
        episodes = read_split(tmp_path / name, "train").episodes
        shown = [numbers_in(read_frames(episode)) for episode in episodes]
        acted = [episode.actions.astype(int).tolist() for episode in episodes]
        if shown != wanted or acted != [[[number, -number] for number in each] for each in wanted]:
            wrong[name] = [(len(each), len(rows)) for each, rows in zip(shown, acted, strict=True)]
        assert episodes[0].space.names == ("up", "down")
    assert not wrong
    assert not [record.message for record in caplog.records if "left out" in record.message]
