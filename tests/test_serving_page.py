import base64
import contextlib
import io
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="needs terra's extra serve")
pytest.importorskip("playwright", reason="needs Playwright for Python, of the dev group")
from chromium import CHROMIUM
from page_reading import actions_made, last_frame, lit, shown_frame, wait_for_frame, wait_for_state
from playwright.sync_api import Page, expect
from serving_fake import SPACES, Serving, fake
from tiny_serving import wait_until
from websockets.sync.client import connect

import terra
from decoder.camera import Camera, project
from terra.actions import Choice
from terra.memory import MemoryRule, memory_frames

pytest_plugins = ["page_fixtures"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (on Debian: apt-get install chromium)"),
]


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


def recorded(file: Path) -> np.ndarray:
    """The frames of a recording of the fake's pictures."""
    options = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(file), *options]
    pixels = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(pixels, np.uint8).reshape(-1, 576, 1024, 3)


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
    frames = recorded(file)
    seconds = float(re.search(r"([\d.]+) s", page.inner_text(".recording")).group(1))  # type: ignore[union-attr]
    assert file.suffix in (".webm", ".mp4")
    assert len(frames) >= 5
    assert len(frames) == round(10 * seconds)
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


def pixel(page: Page, across: float, up: float) -> list[int]:
    """A pixel of the canvas, by its distances from the lower left corner as shares of the height."""
    script = """([across, up]) => {
        const canvas = document.querySelector("#view");
        const [x, y] = [across * canvas.height, (1 - up) * canvas.height].map(Math.round);
        return [...canvas.getContext("2d").getImageData(x, y, 1, 1).data].slice(0, 3);
    }"""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate(script, [across, up])


TEAL = [45, 212, 191]
"""The legend's color of what is pressed."""


def test_keys_are_played(open_page: Callable[..., Page], worlds: dict[str, Serving]) -> None:
    server = worlds["keys"]
    page = open_page(server=server)
    expect(page.locator("h1")).to_have_text("Play a world that is being imagined", use_inner_text=True)
    page.click("[data-scene=room]")
    wait_for_state(page, "waiting")
    for hidden in ("#speed", "#map", "#draw", ".pedals"):
        expect(page.locator(hidden)).to_be_hidden()
    buttons = page.locator("#panel [data-hold]").all_inner_texts()
    assert [" ".join(each.split()) for each in buttons] == [
        "forward ↑ W",
        "back ↓ S",
        "left ← A",
        "right → D",
        "fire Space click",
    ]

    page.keyboard.down("w")
    page.keyboard.down("ArrowLeft")
    wait_for_frame(page, 6)
    assert lit(page) == ["forward", "left"]
    expect(page.locator("#did")).to_have_text("forward + left")
    page.keyboard.up("w")
    wait_until(lambda: actions_made(server)[-1] == ["left"])
    assert lit(page) == ["left"]
    page.keyboard.press("p")
    wait_for_state(page, "paused")
    page.keyboard.up("ArrowLeft")
    settle(page)
    assert ["forward", "left"] in actions_made(server)
    before = pixel(page, 0.06, 0.08)
    page.keyboard.press("o")  # with the legend
    assert pixel(page, 0.06, 0.08) != before


def test_a_short_tap_counts_for_a_frame(open_page: Callable[..., Page], tmp_path: Path) -> None:
    server = fake(tmp_path, SPACES["keys"], seconds_a_frame=0.5)
    try:
        page = open_page("#scene=room", server=server)
        wait_for_state(page, "waiting")
        page.keyboard.press("p")
        wait_for_frame(page, 3)
        page.keyboard.press("i")  # much shorter than a frame takes
        assert lit(page) == ["fire"]
        wait_until(lambda: ["fire"] in actions_made(server))
        wait_until(lambda: actions_made(server)[-1] == [])
        wait_until(lambda: lit(page) == [])
    finally:
        server.stop()


def test_keys_by_touch_and_recorded(open_page: Callable[..., Page], worlds: dict[str, Serving], tmp_path: Path) -> None:
    server = worlds["keys"]
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    page = open_page("#scene=yard", server=server, **phone)
    wait_for_state(page, "waiting")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.tap("#overlay")
    page.tap("#record")
    fingers = []
    for name in ("forward", "fire"):
        box = page.locator(f"[data-hold={name}]").bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 844
        assert min(box["height"], box["width"]) >= 44
        fingers.append({"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2, "id": len(fingers)})
    touch = page.context.new_cdp_session(page)
    touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": fingers})
    wait_for_frame(page, 12)
    assert lit(page) == ["forward", "fire"]
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    wait_until(lambda: actions_made(server)[-1] == [])
    page.tap("#record")
    with page.expect_download() as saving:
        page.click("text=Save video")
    file = tmp_path / saving.value.suggested_filename
    saving.value.save_as(file)
    frame = recorded(file)[6].astype(float)
    height = len(frame)
    cap = frame[round(height * 0.93) - 4 : round(height * 0.93) + 4, round(height * 0.06)]
    # "forward" is lit in the picture's corner, within what a video's compression changes.
    assert np.abs(cap - TEAL).mean() < 40


def test_numbers_are_played(open_page: Callable[..., Page], worlds: dict[str, Serving]) -> None:
    server = worlds["vector"]
    stick = """
        window.stick = [0, 0, 0, 0];
        navigator.getGamepads = () => [{ connected: true, axes: window.stick }];
    """
    page = open_page("#scene=room", server=server, script=stick)
    wait_for_state(page, "waiting")
    assert page.locator("#panel .number").all_inner_texts()[0].split() == ["pan", "0.00", "rad", "\u22121.50", "1.50"]
    shape = page.locator("#drive").evaluate("it => it.style.getPropertyValue('--shape')")
    assert float(shape) == pytest.approx(256 / 144)  # of the picture, which leaves room for what stands below it
    zero = "them => them.map((it) => it.style.getPropertyValue('--zero'))"
    assert page.locator("#panel input").evaluate_all(zero) == ["0.5", "0", "0"]  # where the bars begin
    page.locator("[data-name=lift]").press("End")  # which starts the world, as any control does
    wait_for_frame(page, 6)
    wait_until(lambda: actions_made(server)[-1] == {"pan": 0.0, "lift": 2.0, "grip": 0.0})
    page.focus("#stage")
    page.keyboard.down("ArrowLeft")
    wait_until(lambda: actions_made(server)[-1]["pan"] == -1.5)
    page.keyboard.up("ArrowLeft")
    wait_until(lambda: actions_made(server)[-1] == {"pan": 0.0, "lift": 2.0, "grip": 0.0})
    page.evaluate("() => { window.stick = [1, 1, 0.56, 0]; }")
    wait_until(lambda: actions_made(server)[-1]["pan"] == 1.5)
    assert actions_made(server)[-1] == pytest.approx({"pan": 1.5, "lift": 0.0, "grip": 0.5})
    expect(page.locator("#did")).to_have_text("pan 1.50 rad, lift 0.00 m, grip 0.50")
    page.evaluate("() => { window.stick = [0, 0, 0, 0]; }")
    wait_until(lambda: actions_made(server)[-1]["pan"] == 0.0)
    wait_until(lambda: actions_made(server)[-1]["lift"] == 2.0)  # back to the slider's
    page.click("text=Neutral")
    wait_until(lambda: actions_made(server)[-1]["lift"] == 0.0)
    page.keyboard.press("Space")
    wait_for_state(page, "paused")
    expect(page.locator("#panel output").nth(1)).to_have_text("0.00 m")


def test_without_scenes(open_page: Callable[..., Page], tmp_path: Path) -> None:
    server = fake(tmp_path, SPACES["keys"], scenes="null")
    try:
        page = open_page(server=server)
        expect(page.locator("#scenes")).to_contain_text("no scenes")
        picture = tmp_path / "room.png"
        Image.new("RGB", (256, 144), (90, 120, 160)).save(picture)
        page.set_input_files("#files", [picture])
        wait_for_state(page, "waiting")
        page.keyboard.down("d")
        wait_until(lambda: ["right"] in actions_made(server))
    finally:
        server.stop()


def test_a_model_is_chosen(open_page: Callable[..., Page], tmp_path: Path) -> None:
    for name, scene in (("night", None), ("snow", "road")):
        (tmp_path / name / "contexts").mkdir(parents=True)
        if scene is not None:
            shutil.copytree(Path(terra.__file__).parent / "demo/contexts/day", tmp_path / name / "contexts" / scene)
    adapters = {f"+adapters.{name}": str(tmp_path / name) for name in ("night", "snow")}
    server = fake(tmp_path / "data", **adapters)
    opened = server.service.model.pipeline.engine.opened  # type: ignore[attr-defined]
    try:
        page = open_page(server=server)
        chooser = page.get_by_label("Model")
        page.click("text=Settings of the drive")
        expect(chooser.locator("option")).to_have_text(["chosen by the scene", "terra-demo", "night", "snow"])
        expect(page.locator("[data-scene=snow-road]")).to_contain_text("snow")
        chooser.focus()
        page.keyboard.type("night")
        page.click("[data-scene=day]")
        wait_for_state(page, "waiting")
        expect(page.locator("#badge-model")).to_have_text("night")
        expect(page).to_have_title("Day · night · Terra")
        (session,) = server.service.sessions.values()
        assert session.rollout.adapter == "night"
        page.click("#record")
        steer(page, "ArrowLeft", until=8)
        assert opened == ["night"]
        page.click("#record")
        with page.expect_download() as saving:
            page.click("text=Save video")
        assert saving.value.suggested_filename.startswith("terra-drive-night-1.")
        page.click("#saved-close")
        page.click("#fork")
        wait_for_state(page, "waiting")
        expect(page.locator("#badge-model")).to_have_text("night")
        page.keyboard.press("Space")
        wait_until(lambda: opened == ["night", "night"])
        page.click("#leave")
        chooser.select_option("chosen by the scene")
        for scene, model in (("snow-road", "snow"), ("day", "terra-demo")):
            page.click(f"[data-scene={scene}]")
            wait_for_state(page, "waiting")
            expect(page.locator("#badge-model")).to_have_text(model)
            page.click("#leave")
    finally:
        server.stop()


def test_memory_is_offered_where_a_model_has_it(open_page: Callable[..., Page], tmp_path: Path) -> None:
    (tmp_path / "night").mkdir()
    server = fake(tmp_path / "data", **{"+adapters.night": str(tmp_path / "night")})
    try:
        page = open_page(server=server)
        expect(page.get_by_label("Model").locator("option")).to_have_count(2)
        expect(page.locator("#remembers")).to_have_js_property("hidden", True)
        server.service.model.pipeline.adapted_memory["night"] = MemoryRule(frames=2)
        page = open_page(server=server)
        chooser = page.get_by_label("Model")
        page.click("text=Settings of the drive")
        for model, is_hidden in (("terra-demo", True), ("night", False)):
            chooser.select_option(model)
            expect(page.locator("#remembers")).to_have_js_property("hidden", is_hidden)
        for remembers, frames in ((True, 2), (False, 0)):
            page.get_by_label("Remember").set_checked(remembers)
            page.click("[data-scene=day]")
            wait_for_state(page, "waiting")
            (session,) = server.service.sessions.values()
            assert memory_frames(session.rollout.memory) == frames
            page.click("#leave")
    finally:
        server.stop()


def test_models_on_a_phone_and_one_model_alone(open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page()
    page.wait_for_selector("[data-scene=drive]")
    expect(page.locator("#models")).to_be_hidden()
    server = fake(tmp_path / "data", **{"+adapters.a-rather-long-name-of-an-adapter-that-has-to-fit": str(tmp_path)})
    try:
        phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
        page = open_page(server=server, **phone)
        page.tap("text=Settings of the drive")
        chooser = page.get_by_label("Model")
        chooser.select_option("a-rather-long-name-of-an-adapter-that-has-to-fit")
        box = chooser.bounding_box()
        assert box is not None
        assert box["height"] >= 40
        page.tap("[data-scene=drive]")
        wait_for_state(page, "waiting")
        expect(page.locator("#badge-model")).to_contain_text("a-rather-long")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
    finally:
        server.stop()


def test_choices_are_played(open_page: Callable[..., Page], worlds: dict[str, Serving]) -> None:
    server = worlds["choice"]
    page = open_page("#scene=room", server=server)
    wait_for_state(page, "waiting")
    assert lit(page) == ["noop"]
    page.keyboard.down("ArrowUp")
    page.keyboard.down("i")  # the last one pressed counts
    wait_until(lambda: "fire" in actions_made(server))
    assert lit(page) == ["fire"]
    page.keyboard.up("i")
    wait_until(lambda: actions_made(server)[-1] == "up")
    page.keyboard.up("ArrowUp")
    wait_until(lambda: actions_made(server)[-1] == "noop")
    assert lit(page) == ["noop"]
    page.keyboard.press("p")
    wait_for_state(page, "paused")
    settle(page)
    before = len(actions_made(server))
    page.locator("[data-hold=up_left]").click()  # tapped while paused: for the next frame
    page.click("#step")
    wait_until(lambda: len(actions_made(server)) == before + 1)
    assert actions_made(server)[-1] == "up_left"


def test_scenes_are_grouped_by_world(open_page: Callable[..., Page], tmp_path: Path) -> None:
    """Three worlds are played one after the other, from one list of scenes."""
    server = fake(tmp_path, others={"keys": SPACES["keys"], "vector": SPACES["vector"]})
    try:
        page = open_page(server=server)
        expect(page.locator("#world")).to_have_text("Terra demo")
        expect(page.locator("[data-name=keys] h3")).to_have_text("Keys")
        assert page.locator("[data-name=keys] h3 a").evaluate("it => it.href").endswith("/worlds/keys/")
        for world in ("keys", "vector"):
            expect(page.locator(f"[data-name={world}] .scene")).to_have_count(2)
            expect(page.locator(f"[data-name={world}] img").first).to_have_js_property("complete", True)
        page.locator("[data-name=keys] .scene").last.click()
        wait_for_state(page, "waiting")
        assert page.url.endswith("/worlds/keys/#scene=yard")
        assert page.evaluate("document.body.dataset.world") == "keys"
        first = view(page)
        page.keyboard.down("d")
        before = shown_frame(page)
        wait_for_frame(page, before + 6)
        page.keyboard.up("d")
        assert columns_moved(first, view(page)) != 0
        page.locator(".brand").click()
        expect(page.locator("#world")).to_have_text("Keys")
        page.locator("[data-name=vector] .scene").first.click()
        wait_for_state(page, "waiting")
        assert page.url.endswith("/worlds/vector/#scene=room")
        page.locator(".brand").click()
        page.locator("[data-name=terra-demo] [data-scene=day]").click()
        wait_for_state(page, "waiting")
        assert page.evaluate("document.body.dataset.world") == "waypoints"
        assert page.url.endswith(f":{server.port}/#scene=day")
    finally:
        server.stop()


def test_a_world_that_fails_is_named_in_its_place(open_page: Callable[..., Page], tmp_path: Path) -> None:
    server = fake(tmp_path, others={"keys": SPACES["keys"]})
    try:
        page = open_page(server=server)
        expect(page.locator("[data-name=keys] .scene")).to_have_count(2)
        page.route("**/worlds/keys/v1/scenes", lambda route: route.fulfill(status=500, body="{}"))
        page.reload()
        expect(page.locator("[data-name=keys] ul")).to_contain_text("The server answered 500.")
        expect(page.locator("#scenes .scene").first).to_be_visible()
    finally:
        server.stop()


def test_long_names_are_told_apart(open_page: Callable[..., Page], tmp_path: Path) -> None:
    serving = fake(tmp_path, Choice(names=["up", "fire", "downright", "downrightfire", "downleftfire"]))
    for width in (1000, 390):
        page = open_page("#scene=room", server=serving, viewport={"width": width, "height": 700})
        wait_for_state(page, "waiting")
        cut = "them => them.filter((it) => it.scrollWidth > it.clientWidth).map((it) => it.textContent)"
        assert page.locator("#panel [data-hold]").evaluate_all(cut) == []
        assert page.locator("#panel [data-hold] span").evaluate_all(cut) == []
    serving.stop()


def test_keyboards_for_any_names(open_page: Callable[..., Page]) -> None:
    page = open_page()
    script = """async (names) => {
        const { assignKeys } = await import("/page/keyboard.js");
        return [...assignKeys(names)];
    }"""
    assigned = page.evaluate(script, ["move_forward", "turn_left", "strafe_left", "jump", "up_right", "x", "fire"])
    assert dict(assigned) == {
        **{"KeyX": "x", "ArrowUp": "move_forward", "KeyW": "move_forward", "ArrowLeft": "turn_left"},
        **{"KeyA": "turn_left", "KeyS": "strafe_left", "KeyJ": "jump", "KeyU": "up_right", "KeyI": "fire"},
        **dict.fromkeys(["Space", "ControlLeft", "ControlRight", "KeyF"], "fire"),
    }
    many = [f"move_{index}" for index in range(60)]
    assigned = page.evaluate(script, many)
    assert len({code for code, _ in assigned}) == len({name for _, name in assigned}) == 31
    reserved = {"KeyR", "KeyB", "KeyO", "KeyP", "KeyV", "Space", "Period", "Comma"}
    assert reserved.isdisjoint(code for code, _ in assigned)
