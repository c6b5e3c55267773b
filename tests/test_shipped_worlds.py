"""The worlds that ship as archives in terra/worlds: they are played on a page beside the demo.

That Doom obeys its keys is what test_notebooks.py asks of 06_doom.
"""

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs terra's extra serve")
pytest.importorskip("playwright", reason="needs Playwright for Python, of the dev group")
from chromium import CHROMIUM, launched
from entry import load_script, read_settings
from playwright.sync_api import expect
from tiny_serving import wait_until

import terra
from terra.worlds.archive import unpack

pytestmark = pytest.mark.slow

own_server = load_script("serving_load").own_server

DOOM = Path(terra.__file__).parent / "worlds" / "doom.zip"


@pytest.fixture(scope="module")
def doom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds") / "doom"
    unpack(read_settings("unpack", [f"archive={DOOM}", f"output={folder}"]))
    return folder


def test_an_archive_is_small_and_has_a_card() -> None:
    assert DOOM.stat().st_size < 30e6
    assert DOOM.with_suffix(".md").read_text().startswith("# doom\n")


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
