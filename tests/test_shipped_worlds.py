"""The worlds that ship as archives in terra/worlds: they are played on a page beside the demo.

That Doom obeys its keys is what test_notebooks.py asks of 06_doom, and of 07_pusht that the disc goes where it is told.
"""

import re
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

ARCHIVES = {name: Path(terra.__file__).parent / "worlds" / f"{name}.zip" for name in ("doom", "pusht", "town_memory")}

# {scene: (where the page says what is done, and what it says while the left arrow is down)}. A number goes to its end.
PLAYED = {
    "day": ("#steering", "left"),
    "corridor": ("#did", "left"),
    "beside_goal": ("#did", re.compile(r"dx \W?1\.00")),
    "junction": ("#steering", "left"),
}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the unpacked worlds."""
    folder = tmp_path_factory.mktemp("worlds")
    for name, archive in ARCHIVES.items():
        unpack(read_settings("unpack", [f"archive={archive}", f"output={folder / name}"]))
    return {name: folder / name for name in ARCHIVES}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_is_small_and_has_its_card(name: str, worlds: dict[str, Path]) -> None:
    assert ARCHIVES[name].stat().st_size < 30e6
    for card in (ARCHIVES[name].with_suffix(".md"), worlds[name] / "README.md"):
        assert card.read_text().startswith(f"# {name}\n")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (on Debian: apt-get install chromium)")
def test_each_world_is_played_on_the_page(worlds: dict[str, Path], tmp_path: Path) -> None:
    given = ",".join(f"{name}: {folder}" for name, folder in worlds.items())
    settings = {"data": tmp_path / "data", "worlds": f"{{{given}}}", "adapters": "{}", "device": "cpu"}
    with own_server(settings, ["engine=jacobi"]) as url, launched() as browser:
        page = browser.new_page()
        page.set_default_timeout(60_000)
        page.goto(url)
        for scene, (where, said) in PLAYED.items():
            page.locator(f"[data-scene={scene}]").click()
            page.wait_for_selector("#stage[data-state=waiting]")
            page.keyboard.down("ArrowLeft")
            wait_until(lambda: int(page.get_attribute("#stage", "data-frame") or 0) >= 5, seconds=60)
            expect(page.locator(where)).to_contain_text(said)
            page.keyboard.up("ArrowLeft")
            page.locator(".brand").click()
