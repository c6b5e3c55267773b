"""The page as it is played on: what is visible on each screen, what a press does and when, and what the page says."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="needs terra's extra serve")
pytest.importorskip("playwright", reason="needs Playwright for Python, of the dev group")
from chromium import CHROMIUM
from page_reading import actions_made, lit, shown_frame, wait_for_frame, wait_for_state
from playwright.sync_api import Locator, Page, WebSocketRoute, expect
from serving_fake import KEYS, SPACES, Serving, fake
from tiny_serving import wait_until

from terra.serving.about import About, Subject
from tokenizer.settings import checked

pytest_plugins = ["page_fixtures"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (on Debian: apt-get install chromium)"),
]

PHONE = {"has_touch": True, "is_mobile": True, "device_scale_factor": 2}
SCREENS = {
    (667, 375): PHONE,
    (740, 360): PHONE,
    (844, 340): PHONE,
    (390, 844): PHONE,
    (360, 640): PHONE,
    (1280, 800): {},
}
CONTROLS = "#pause, #restart, .pedals [data-hold], #panel [data-hold], #panel .pad, #panel input"
SLOW = """async () => {
    const { showPace } = await import("/page/instruments.js");
    for (const rate of [0.1, 99, 0.1]) showPace(rate, 10);
}"""
SQUARE = """() => {
    const sheet = new CSSStyleSheet();
    sheet.replaceSync("#drive { --shape: 1 !important }");
    document.adoptedStyleSheets = [sheet];
}"""

Box = tuple[float, float, float, float]


def shown_box(found: Locator) -> Box | None:
    """Left, top, right and bottom in the viewport; None of what is hidden."""
    place = found.bounding_box()
    return place and (place["x"], place["y"], place["x"] + place["width"], place["y"] + place["height"])


def box(found: Locator) -> Box:
    """Left, top, right and bottom in the viewport."""
    place = shown_box(found)
    assert place is not None
    return place


def overlap(first: Box, second: Box) -> bool:
    """Whether two boxes have more than a rounding error in common."""
    across = min(first[2], second[2]) - max(first[0], second[0])
    down = min(first[3], second[3]) - max(first[1], second[1])
    return across > 0.5 and down > 0.5


@pytest.mark.parametrize("kind", ["waypoints", *SPACES])
@pytest.mark.parametrize("screen", SCREENS, ids="{0[0]}x{0[1]}".format)
def test_picture_and_controls_are_visible_at_once(
    open_page: Callable[..., Page],
    server: Serving,
    worlds: dict[str, Serving],
    screen: tuple[int, int],
    kind: str,
) -> None:
    width, height = screen
    scene, served = ("day", server) if kind == "waypoints" else ("room", worlds[kind])
    viewport = {"width": width, "height": height}
    page = open_page(f"#scene={scene}", server=served, viewport=viewport, **SCREENS[screen])
    wait_for_state(page, "waiting")
    page.locator("#pause").click()
    wait_for_state(page, "driving")
    wait_for_frame(page, 4)
    assert page.evaluate("[scrollX, scrollY, document.documentElement.scrollWidth]") == [0, 0, width]
    stage = box(page.locator("#stage"))
    assert (stage[2] - stage[0]) / (stage[3] - stage[1]) == pytest.approx(256 / 144, rel=0.01)
    assert (stage[2] - stage[0]) * (stage[3] - stage[1]) > 0.25 * width * height
    page.evaluate(SLOW)
    assert box(page.locator("#stage")) == pytest.approx(stage, abs=0.5)  # whatever is said beside it
    assert box(page.locator("#view")) == pytest.approx(stage, abs=1)
    expected = {"waypoints": 0 if screen == (1280, 800) else 4, "keys": 5, "vector": 3, "choice": 8, "plane": 1}
    check_boxes(page, screen, 2 + expected[kind])
    # The picture of another world may be a square.
    page.evaluate(SQUARE)
    left, top, right, bottom = box(page.locator("#stage"))
    assert right - left == pytest.approx(bottom - top, abs=0.5)
    check_boxes(page, screen, 2 + expected[kind])


def check_boxes(page: Page, screen: tuple[int, int], count: int) -> None:
    """Picture and `count` controls are on the screen, none over another, and nothing is said over the picture."""
    width, height = screen
    stage = box(page.locator("#stage"))
    controls = [each for each in page.locator(CONTROLS).all() if each.is_visible()]
    assert len(controls) == count
    boxes = [box(each) for each in controls]
    for place in (stage, *boxes):
        assert min(place[:2]) >= -0.5
        assert place[2] <= width + 0.5
        assert place[3] <= height + 0.5
    for first, second in itertools.combinations([stage, *boxes], 2):
        assert not overlap(first, second)
    for badge in page.locator(".status .badge").all():
        place = shown_box(badge)  # that of the pace comes and goes
        assert place is None or not overlap(place, stage)


class Gate:
    """Holds back what the server says to the page, or its pictures alone, until it is opened."""

    def __init__(self, page: Page, *, pictures_alone: bool) -> None:
        self._held: list[tuple[WebSocketRoute, Any]] = []
        self._is_open = False
        self._pictures_alone = pictures_alone
        page.route_web_socket("**/v1/live", self._route)

    def _route(self, route: WebSocketRoute) -> None:
        server = route.connect_to_server()
        server.on_message(lambda message: self._pass(route, message))

    def _pass(self, route: WebSocketRoute, message: Any) -> None:
        if self._is_open or (self._pictures_alone and isinstance(message, str)):
            route.send(message)
        else:
            self._held.append((route, message))

    def open(self) -> None:
        self._is_open = True
        for route, message in self._held:
            route.send(message)


@pytest.mark.parametrize(("pictures_alone", "before"), [(False, False), (True, False), (False, True)])
def test_a_key_that_is_held_while_the_session_opens(
    open_page: Callable[..., Page], worlds: dict[str, Serving], pictures_alone: bool, before: bool
) -> None:
    page = open_page(server=worlds["keys"])
    gate = Gate(page, pictures_alone=pictures_alone)
    if before:
        page.keyboard.down("ArrowLeft")
    page.click("[data-scene=room]")
    expect(page.locator("#hint")).to_have_text("Opening …")
    if not before:
        page.keyboard.down("ArrowLeft")  # once, without a keyboard's repetition
    page.wait_for_timeout(300)
    assert lit(page) == ["left"]
    wait_for_state(page, "opening")
    gate.open()
    wait_for_frame(page, 6)
    assert actions_made(worlds["keys"])[0] == ["left"]
    page.keyboard.up("ArrowLeft")
    wait_for_frame(page, shown_frame(page) + 8)
    assert actions_made(worlds["keys"])[-1] == []


@pytest.mark.parametrize(
    ("kind", "control"),
    [("keys", "[data-hold=forward]"), ("plane", ".pad"), ("waypoints", "[data-hold=gas]")],
)
def test_a_finger_that_is_held_while_the_session_opens(
    open_page: Callable[..., Page], server: Serving, worlds: dict[str, Serving], kind: str, control: str
) -> None:
    served = server if kind == "waypoints" else worlds[kind]
    page = open_page(server=served, viewport={"width": 390, "height": 844}, **PHONE)
    gate = Gate(page, pictures_alone=False)
    page.tap("[data-scene] >> nth=0")
    expect(page.locator("#hint")).to_have_text("Opening …")
    left, top, right, bottom = box(page.locator(control))
    touch = page.context.new_cdp_session(page)
    finger = {"x": left + 0.9 * (right - left), "y": (top + bottom) / 2}
    touch.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [finger]})
    wait_for_state(page, "opening")
    gate.open()
    wait_for_frame(page, 6)
    if kind == "keys":
        assert actions_made(served)[0] == ["forward"]
    elif kind == "plane":
        assert actions_made(served)[0]["dx"] == pytest.approx(0.8, abs=0.05)
    touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


@pytest.mark.parametrize("down", [1, -1])
def test_a_pad_steers_two_numbers(open_page: Callable[..., Page], tmp_path: Path, down: int) -> None:
    """`down` is the sign of what moves something down in this world."""
    server = fake(tmp_path, SPACES["plane"], about=About(downward=("dy",) if down > 0 else ()))
    try:
        page = open_page("#scene=room", server=server)
        wait_for_state(page, "waiting")
        expect(page.locator("#panel input")).to_have_count(0)
        left, top, right, bottom = box(page.locator(".pad"))
        page.mouse.move((left + right) / 2, (top + bottom) / 2)
        page.mouse.down()
        page.mouse.move(left + 0.25 * (right - left), top + 0.75 * (bottom - top))
        wait_until(lambda: actions_made(server)[-1:] == [pytest.approx({"dx": -0.5, "dy": 0.5 * down}, abs=0.02)])
        page.mouse.move(left - 300, top - 300)  # beyond the pad: as far as it goes
        wait_until(lambda: actions_made(server)[-1] == {"dx": -1, "dy": -down})
        page.mouse.up()
        wait_until(lambda: actions_made(server)[-1] == {"dx": 0, "dy": 0})
        page.keyboard.down("ArrowUp")
        wait_until(lambda: actions_made(server)[-1] == {"dx": 0, "dy": -down})
        page.keyboard.up("ArrowUp")
    finally:
        server.stop()


def test_fire_by_space_control_and_a_press_on_the_picture(
    open_page: Callable[..., Page], worlds: dict[str, Serving]
) -> None:
    server = worlds["keys"]
    page = open_page("#scene=room", server=server)
    wait_for_state(page, "waiting")
    for code in ("Space", "ControlLeft", "ControlRight", "KeyF", "KeyI"):
        page.keyboard.down(code)
        wait_until(lambda: actions_made(server)[-1:] == [["fire"]])
        page.keyboard.up(code)
        wait_until(lambda: actions_made(server)[-1] == [])
    left, top, right, bottom = box(page.locator("#stage"))
    page.mouse.move((left + right) / 2, (top + bottom) / 2)
    page.mouse.down()
    wait_until(lambda: actions_made(server)[-1] == ["fire"])
    page.keyboard.down("ControlLeft")
    page.keyboard.down("ArrowUp")  # which Ctrl does not keep from the world
    wait_until(lambda: actions_made(server)[-1] == ["forward", "fire"])
    page.keyboard.up("ControlLeft")
    page.keyboard.up("ArrowUp")
    wait_until(lambda: actions_made(server)[-1] == ["fire"])
    page.mouse.up()
    wait_until(lambda: actions_made(server)[-1] == [])
    wait_for_state(page, "driving")
    page.keyboard.press("p")
    wait_for_state(page, "paused")
    page.keyboard.press("b")
    expect(page.locator("#branches button")).to_have_count(2)


def test_the_rate_is_that_of_the_frames_that_came(open_page: Callable[..., Page]) -> None:
    page = open_page()
    script = """async ([times, asked]) => {
        const { Rate } = await import("/page/rate.js");
        const rate = new Rate();
        const before = rate.at(0);
        rate.begin(0);
        times.forEach((time) => rate.came(1000 * time));
        const told = asked.map((time) => rate.at(1000 * time));
        rate.end();
        return [before, ...told, rate.at(1000 * asked.at(-1))];
    }"""

    def told(times: list[float], *asked: float) -> list[float | None]:
        return page.evaluate(script, [times, asked])

    steady = [0.1 * (index + 1) for index in range(60)]
    assert told(steady, 6.0) == [None, pytest.approx(10, rel=0.02), None]
    assert told([], 3.0) == [None, None, None]
    # Two at once after 3 s, and then none for 10 s: not the 6 frames a second of the two.
    assert told([3.0, 3.17], 3.17, 13.0) == [None, pytest.approx(2 / 3.17), pytest.approx(3 / 13), None]
    pairs = [time for index in range(1, 15) for time in (2.0 * index, 2.0 * index + 0.1)]
    assert told(pairs, 28.1)[1] == pytest.approx(1, rel=0.15)


def test_slower_than_real_time_is_said(open_page: Callable[..., Page], tmp_path: Path) -> None:
    server = fake(tmp_path, KEYS, seconds_a_frame=0.4)  # of a world of 10 frames a second
    try:
        page = open_page("#scene=room", server=server)
        wait_for_state(page, "waiting")
        expect(page.locator("#pace")).to_be_hidden()
        began = time.monotonic()
        page.keyboard.press("p")
        wait_for_frame(page, 12)
        came = (shown_frame(page) - 2) / (time.monotonic() - began)
        assert float(page.inner_text("#rate")) == pytest.approx(came, rel=0.3)
        expect(page.locator("#pace")).to_be_visible()
        share = float(page.inner_text("#pace").removesuffix("\u00d7 real time"))
        assert share == pytest.approx(came / 10, abs=0.1)
        page.keyboard.press("p")
        expect(page.locator("#pace")).to_be_hidden()
        script = """async (rate) => {
            const { showPace } = await import("/page/instruments.js");
            showPace(rate, 10);
            return document.querySelector("#pace").hidden ? null : document.querySelector("#pace").textContent;
        }"""
        # One evaluation has no frame of the page in between.
        said = [page.evaluate(script, rate) for rate in (12, 9.6, 3.4, 0.62)]
        assert said == [None, None, "0.3\u00d7 real time", "0.06\u00d7 real time"]
    finally:
        server.stop()


SUBJECT = {"name": "The disc", "color": [65, 105, 225], "tolerance": 70, "pixels": 8, "frames": 4}


def test_a_subject_that_is_lost_is_said(open_page: Callable[..., Page], tmp_path: Path) -> None:
    """Scene here has a blue disc in all its pictures, scene gone in all but the last, which the world repeats."""
    scenes = tmp_path / "scenes"
    for scene, shown in {"here": (True, True, True), "gone": (True, True, False)}.items():
        (scenes / scene).mkdir(parents=True)
        for index, is_there in enumerate(shown):
            pixels = np.full((144, 256, 3), 255, np.uint8)
            if is_there:
                pixels[64:72, 100:108] = SUBJECT["color"]
            Image.fromarray(pixels).save(scenes / scene / f"{index}.png")
    about = About(subject=checked(Subject, SUBJECT))
    server = fake(tmp_path / "data", KEYS, about=about, scenes=str(scenes))
    try:
        page = open_page("#scene=here", server=server)
        wait_for_state(page, "waiting")
        page.keyboard.press("p")
        wait_for_frame(page, 12)
        expect(page.locator("#lost")).to_be_hidden()
        page.click("#leave")
        page.click("[data-scene=gone]")
        wait_for_state(page, "waiting")
        wait_until(lambda: shown_frame(page) == 2)
        expect(page.locator("#lost")).to_be_hidden()
        page.keyboard.press("p")
        expect(page.locator("#lost")).to_contain_text("The disc is lost")
        page.keyboard.press("p")
        page.locator("#slider").press("Home")  # where it was seen
        wait_until(lambda: shown_frame(page) == 0)
        expect(page.locator("#lost")).to_be_hidden()
        page.locator("#slider").press("End")
        page.locator("#lost button").click()
        wait_for_state(page, "waiting")
        wait_until(lambda: shown_frame(page) == 2)
        expect(page.locator("#lost")).to_be_hidden()
    finally:
        server.stop()


def test_lines_say_what_one_does(open_page: Callable[..., Page], tmp_path: Path) -> None:
    about = About(title="Town", line="Drive through it.", scenes={"day": "Turn left."})
    server = fake(tmp_path, about=about, others={"keys": KEYS})
    try:
        page = open_page(server=server)
        expect(page.locator("#world")).to_have_text("Town")
        expect(page.locator("#world-line")).to_have_text("Drive through it.")
        expect(page.locator("[data-scene=day] em")).to_have_text("Turn left.")
        expect(page.locator("[data-scene=fog] em")).to_have_count(0)
        expect(page.locator("[data-name=keys] .line")).to_have_text(
            "Play with keys, several at once: forward, back, left, right, fire."
        )
        expect(page.locator("h1")).to_have_text("Enter a world that is being imagined", use_inner_text=True)
    finally:
        server.stop()


def test_recordings_are_shown_and_found_again(open_page: Callable[..., Page]) -> None:
    page = open_page("#scene=day")
    wait_for_state(page, "waiting")
    expect(page.locator(".tools .saved-open")).to_be_hidden()
    page.click("#record")
    page.keyboard.press("ArrowUp")
    wait_for_frame(page, 6)
    page.click("#record")
    expect(page.locator("#saved .recording a")).to_be_visible()
    wait_for_state(page, "paused")
    page.click("#saved-close")
    page.click(".tools .saved-open")
    expect(page.locator("#saved .recording a")).to_be_visible()
    page.click("#saved-close")
    page.click("#leave")
    page.click(".top .saved-open")
    page.click("text=Discard")
    expect(page.locator("#saved")).to_be_hidden()
    expect(page.locator(".top .saved-open")).to_be_hidden()
