"""The worlds that ship as archives in terra/worlds: they obey their keys, and are played on a page beside the demo."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi", reason="needs terra's extra serve")
pytest.importorskip("playwright", reason="needs Playwright for Python, of the dev group")
from chromium import CHROMIUM, launched
from entry import load_script, read_settings
from playwright.sync_api import expect
from tiny_serving import wait_until

import terra
from terra.actions import require_table
from terra.context import load_context
from terra.evaluation.action_estimator import ActionEstimator
from terra.pipeline import Pipeline, RolloutRequest
from terra.sampling import SamplingParams
from terra.worlds.archive import unpack

pytestmark = pytest.mark.slow

own_server = load_script("serving_load").own_server

DOOM = Path(terra.__file__).parent / "worlds" / "doom.zip"
NUM_GENERATED = 6


@pytest.fixture(scope="module")
def doom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds") / "doom"
    unpack(read_settings("unpack", [f"archive={DOOM}", f"output={folder}"]))
    return folder


def test_an_archive_is_small_and_has_a_card() -> None:
    assert DOOM.stat().st_size < 30e6
    assert DOOM.with_suffix(".md").read_text().startswith("# doom\n")


def test_doom_obeys_its_keys(doom: Path) -> None:
    estimator = ActionEstimator.from_pretrained(doom / "estimator")
    keys = ("left", "forward", "right")
    with Pipeline.from_pretrained(doom, engine="jacobi", device="cpu") as pipeline:
        space = require_table(pipeline.engine.spec.space, "doom")
        context = load_context(
            doom / "contexts" / "corridor", num_frames=3, image_size=(96, 160), fps=pipeline.engine.spec.fps
        )
        held = [np.tile(space.from_json([key], "keys"), (2 + NUM_GENERATED, 1)) for key in keys]
        requests = [RolloutRequest(context, torch.from_numpy(space.rows(values)), seed=0) for values in held]
        futures = pipeline.generate(requests, SamplingParams(temperature=0.9))
    for key, future in zip(keys, futures, strict=True):
        read = estimator.estimate(future.frames[2:])[:, space.names.index(key)]
        assert read.mean() > 0.8, key


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (on Debian: apt-get install chromium)")
def test_each_world_is_played_on_the_page(doom: Path, tmp_path: Path) -> None:
    settings = {"data": tmp_path / "data", "worlds": f"{{doom: {doom}}}", "adapters": "{}", "device": "cpu"}
    with own_server(settings, ["engine=jacobi"]) as url, launched() as browser:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(url)
        for scene, said in {"day": "#steering", "corridor": "#did"}.items():
            page.locator(f"[data-scene={scene}]").click()
            page.wait_for_selector("#stage[data-state=waiting]")
            page.keyboard.down("ArrowLeft")
            wait_until(lambda: int(page.get_attribute("#stage", "data-frame") or 0) >= 5, seconds=60)
            expect(page.locator(said)).to_contain_text("left")
            page.keyboard.up("ArrowLeft")
            page.locator(".brand").click()
