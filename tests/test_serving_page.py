import base64
import contextlib
import io
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="needs terra's extra serve")
pytest.importorskip("playwright", reason="needs Playwright for Python, of the dev group")
from playwright.sync_api import Browser, Page, expect, sync_playwright
from serving_fake import Serving
from tiny_serving import wait_until
from websockets.sync.client import connect

from decoder.camera import Camera, project

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (on Debian: apt-get install chromium)"),
]

ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Launched once; each test has a context, which is a profile of its own.
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = Serving(tmp_path_factory.mktemp("serving"))
    yield serving
    serving.stop()


@pytest.fixture
def open_page(browser: Browser, server: Serving) -> Iterator[Callable[..., Page]]:
    contexts, errors = [], []

    def open_at(fragment: str = "", **settings: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1000, "height": 700}, **settings})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.port}/{fragment}")
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert not errors


def wait_for_state(page: Page, state: str) -> None:
    page.wait_for_selector(f"#stage[data-state={state}]")


def wait_for_frame(page: Page, index: int) -> None:
    # Not by a function in the page: its security policy allows no eval.
    wait_until(lambda: shown_frame(page) >= index)


def shown_frame(page: Page) -> int:
    return int(page.get_attribute("#stage", "data-frame") or -1)


def last_frame(page: Page) -> int:
    return int(page.get_attribute("#slider", "max") or 0)


def view(page: Page) -> np.ndarray:
    """What the canvas shows, 256 pixels wide, gray, without the path."""
    if page.get_attribute("#overlay", "aria-pressed") == "true":
        page.keyboard.press("o")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    data = page.evaluate("document.querySelector('#view').toDataURL('image/jpeg', 0.95)")
    picture = Image.open(io.BytesIO(base64.b64decode(data.split(",")[1])))
    return np.asarray(picture.convert("L").resize((256, 144)), float)


def columns_moved(before: np.ndarray, after: np.ndarray) -> int:
    """By how many columns (right positive) the band above the horizon moved, the best match of up to 60."""
    band = slice(30, 75)
    first, second = (picture[band] - picture[band].mean() for picture in (before, after))
    moves = range(-60, 61)
    return max(moves, key=lambda move: (np.roll(first, move, axis=1) * second).sum())


def steer(page: Page, key: str, until: int) -> np.ndarray:
    page.keyboard.down(key)
    wait_for_frame(page, until)
    page.keyboard.press("Space")
    page.keyboard.up(key)
    wait_for_state(page, "paused")
    settle(page)
    return view(page)


def settle(page: Page) -> None:
    """Until no frame that was on its way comes any more, and the last is shown."""
    seen = [-1, -2, -3]
    while len(set(seen[-3:])) > 1:
        page.wait_for_timeout(100)
        seen.append(last_frame(page))
    wait_until(lambda: shown_frame(page) == seen[-1])


def test_drive_left_and_right(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.click("[data-scene=drive]")
    wait_for_state(page, "waiting")
    wait_for_frame(page, 2)
    context = view(page)
    left = steer(page, "ArrowLeft", until=12)
    assert page.inner_text("#steering").endswith("left")
    page.keyboard.press("r")
    wait_for_state(page, "waiting")
    wait_until(lambda: shown_frame(page) == 2)
    right = steer(page, "d", until=12)
    # Who turns left sees the world go to the right.
    assert columns_moved(context, left) > 4
    assert columns_moved(context, right) < -4
    assert "imagined" in page.inner_text("#badge-frame")


def test_record_and_download(open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page("#scene=day")
    wait_for_state(page, "waiting")
    page.click("#record")
    expect(page.locator("#badge-record")).to_be_visible()
    steer(page, "ArrowLeft", until=14)
    page.click("#record")
    with page.expect_download() as saving:
        page.click("text=Save video")
    file = tmp_path / saving.value.suggested_filename
    saving.value.save_as(file)
    options = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(file), *options]
    pixels = subprocess.run(command, capture_output=True, check=True).stdout
    frames = np.frombuffer(pixels, np.uint8).reshape(-1, 576, 1024, 3)
    recorded = float(re.search(r"([\d.]+) s", page.inner_text(".recording")).group(1))  # type: ignore[union-attr]
    assert file.suffix in (".webm", ".mp4")
    assert len(frames) >= 5
    assert len(frames) == round(10 * recorded)
    assert frames[0].std() > 20
    assert np.abs(frames[-1].astype(float) - frames[0]).mean() > 3


def test_reload_begins_again(open_page: Callable[..., Page], server: Serving) -> None:
    page = open_page("#scene=fog&seed=3")
    wait_for_state(page, "waiting")
    page.keyboard.press("Space")
    wait_for_frame(page, 6)
    page.reload()
    wait_for_state(page, "waiting")
    wait_for_frame(page, 2)
    assert shown_frame(page) == 2
    assert not page.is_visible("#notice")
    page.keyboard.press("Space")
    wait_for_frame(page, 4)
    page.click("#leave")
    expect(page.locator("#start")).to_be_visible()
    wait_until(lambda: not server.service.sessions)


def test_server_restart_is_noticed(open_page: Callable[..., Page], server: Serving) -> None:
    page = open_page("#scene=drive")
    wait_for_state(page, "waiting")
    page.keyboard.press("Space")
    wait_for_frame(page, 6)
    server.stop()
    wait_for_state(page, "ended")
    expect(page.locator("#notice")).to_contain_text("lost")
    page.locator("#slider").press("Home")  # what was driven can still be looked at
    wait_until(lambda: shown_frame(page) == 0)
    server.start()
    expect(page.locator("#notice")).to_contain_text("back")
    page.click("text=Start again")
    wait_for_state(page, "waiting")
    page.keyboard.press("Space")
    wait_for_frame(page, 5)


def test_rewind_and_fork(open_page: Callable[..., Page]) -> None:
    page = open_page("#scene=drive")
    wait_for_state(page, "waiting")
    steer(page, "ArrowLeft", until=10)
    page.locator("#slider").press("ArrowLeft")
    page.locator("#slider").press("ArrowLeft")
    last = last_frame(page)
    wait_until(lambda: shown_frame(page) == last - 2)
    page.click("#fork")
    expect(page.locator("#branches button")).to_have_count(2)
    wait_for_state(page, "waiting")
    assert last_frame(page) == last - 2
    page.keyboard.press("Space")
    wait_for_frame(page, last + 2)
    page.click("#branches button >> nth=0")
    wait_for_state(page, "paused")
    assert last_frame(page) == last
    page.locator("#slider").press("Home")
    for _ in range(4):
        page.locator("#slider").press("ArrowRight")
    page.click("#pause")  # drives on from frame 4: what came after it is dropped
    wait_until(lambda: last_frame(page) < last)
    wait_for_frame(page, 6)
    page.click("#pause")
    wait_for_state(page, "paused")
    page.keyboard.press(".")
    wait_for_state(page, "paused")


def test_drawn_path_is_followed(open_page: Callable[..., Page]) -> None:
    page = open_page("#scene=drive")
    wait_for_state(page, "waiting")
    wait_for_frame(page, 2)
    page.keyboard.press("p")
    box = page.locator("#view").bounding_box()
    assert box is not None
    for step, (across, down) in enumerate([(0.5, 0.98), (0.5, 0.85), (0.48, 0.75), (0.42, 0.66), (0.34, 0.62)]):
        page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])
        page.mouse.down() if step == 0 else None
    page.mouse.up()
    wait_for_state(page, "driving")
    expect(page.locator("#badge-mode")).to_have_text("follows your path")
    wait_for_frame(page, 8)
    page.keyboard.press("ArrowRight")
    expect(page.locator("#badge-mode")).to_be_hidden()


def test_overlay_projects_as_the_decoder_does(open_page: Callable[..., Page]) -> None:
    page = open_page()
    camera, size = Camera(fov_degrees=70.0, height_meters=1.5, pitch_radians=-0.05, x_forward_meters=0.4), (1024, 576)
    points = np.array([[4.0, 0.0], [9.0, 2.5], [25.0, -6.0], [50.0, 1.0]])
    script = """async ([points, camera, size]) => {
        const { project, unproject } = await import("/page/overlay.js");
        const pixels = points.map((point) => project(point, camera, size));
        return [pixels, pixels.map((pixel) => unproject(pixel, camera, size)), unproject([512, 100], camera, size)];
    }"""
    pixels, ground, sky = page.evaluate(script, [points.tolist(), camera.to_dict(), size])
    np.testing.assert_allclose(pixels, project(points, camera, size), atol=1e-6)
    np.testing.assert_allclose(ground, points, atol=1e-6)
    assert sky is None


def test_own_pictures(open_page: Callable[..., Page], tmp_path: Path) -> None:
    picture = tmp_path / "road.png"
    Image.new("RGB", (256, 144), (90, 120, 160)).save(picture)
    page = open_page()
    page.set_input_files("#files", [picture])
    wait_for_state(page, "waiting")
    assert "context=ctx_" in page.url
    page.click("#leave")
    text = tmp_path / "road.jpg"
    text.write_text("no picture")
    page.set_input_files("#files", [text])
    expect(page.locator("#notice")).to_contain_text("expected a whole")


def test_full_server_is_named(open_page: Callable[..., Page], server: Serving) -> None:
    address = f"ws://127.0.0.1:{server.port}/v1/live"
    wait_until(lambda: not server.service.sessions)
    with contextlib.ExitStack() as taken:
        for _ in range(server.service.settings.live.sessions_per_client):
            other = taken.enter_context(connect(address))
            other.send('{"type": "open", "scene": "day"}')
            other.recv()
        page = open_page("#scene=day")
        expect(page.locator("#notice")).to_contain_text("full")
    wait_until(lambda: not server.service.sessions)
    page.click("text=Start again")
    wait_for_state(page, "waiting")
    expect(page.locator("#notice")).to_be_hidden()


def test_phone(open_page: Callable[..., Page]) -> None:
    page = open_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True, device_scale_factor=2)
    page.wait_for_selector("[data-scene=drive]")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.tap("[data-scene=drive]")
    wait_for_state(page, "waiting")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    before = float(page.inner_text("#speed"))
    gas = page.locator("[data-hold=gas]")
    gas.dispatch_event("pointerdown", {"pointerId": 1, "isPrimary": True})
    wait_for_frame(page, 8)
    gas.dispatch_event("pointerup", {"pointerId": 1, "isPrimary": True})
    assert float(page.inner_text("#speed")) > before
    box = gas.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 740  # in reach of the thumb without scrolling
    assert min(box["height"], box["width"]) >= 44


def test_dark_and_light_differ(open_page: Callable[..., Page]) -> None:
    pictures = []
    for scheme in ("dark", "light"):
        page = open_page(color_scheme=scheme)
        page.wait_for_selector("[data-scene=drive] img[src]")
        pictures.append(np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("L"), float))
    assert pictures[0].mean() < 90
    assert pictures[1].mean() > 180


def test_keyboard_alone(open_page: Callable[..., Page]) -> None:
    page = open_page(reduced_motion="reduce")
    page.wait_for_selector("[data-scene=city]")
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.scene") == "drive":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    wait_for_state(page, "waiting")
    page.keyboard.press("w")
    wait_for_state(page, "driving")
    page.keyboard.press("Space")
    wait_for_state(page, "paused")
    seen = set()
    for _ in range(30):  # Tab goes through all and comes out again
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id"))
    assert {"stage", "pause", "slider", "restart", "fork", "record", "leave", "map-mode", "help-open"} <= seen
    page.focus("#help-open")
    page.keyboard.press("Enter")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
