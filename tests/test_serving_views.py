"""A served world of several cameras: what the server says of them and takes of each, and the page's switch."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs terra's extra serve")
pytest.importorskip("playwright", reason="needs Playwright for Python, of the dev group")
from chromium import CHROMIUM
from page_reading import wait_for_frame, wait_for_state
from PIL import Image
from playwright.sync_api import Page
from serving_fake import KEYS, Serving, fake
from tiny_serving import wait_until

from decoder.video import VideoWriter, probe_video
from terra.serving.client import Client, ServerError
from terra.views import Views

pytest_plugins = ["page_fixtures"]
pytestmark = pytest.mark.slow

VIEWS = Views.tiled(("front", "wrist"), (144, 256))
COLORS = {"front": (200, 40, 40), "wrist": (40, 40, 200)}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = fake(tmp_path_factory.mktemp("views"), KEYS, views=VIEWS)
    yield serving
    serving.stop()


@pytest.fixture
def pictures(tmp_path: Path) -> dict[str, list[Path]]:
    """Three pictures of each camera, of another shape than its part: gray at the sides, which are cropped."""
    paths: dict[str, list[Path]] = {}
    for name, color in COLORS.items():
        for index in range(3):
            pixels = np.full((144, 256, 3), 128, np.uint8)
            pixels[:, 64:192] = np.array(color) + 10 * index
            paths.setdefault(name, []).append(tmp_path / f"{name}_{index}.png")
            Image.fromarray(pixels).save(paths[name][-1])
    return paths


def test_an_upload_has_the_files_of_each_view(served: Serving, pictures: dict[str, list[Path]], tmp_path: Path) -> None:
    with Client(served.url) as client:
        assert client.models()[0]["views"] == VIEWS.describe()
        contexts = served.service.contexts
        by_view = contexts.find(client.create_context(**pictures)["id"]).pictures
        parts = VIEWS.split(by_view)
        for name, color in COLORS.items():
            for index in range(3):
                assert np.unique(parts[name][index].reshape(-1, 3), axis=0).tolist() == [
                    [each + 10 * index for each in color]
                ]
        for index, whole in enumerate(by_view):
            Image.fromarray(whole).save(tmp_path / f"{index}.png")
        whole = client.create_context(*(tmp_path / f"{index}.png" for index in range(3)))
        np.testing.assert_array_equal(contexts.find(whole["id"]).pictures, by_view)
        with VideoWriter(tmp_path / "wrist.mp4", 10.0, size=(256, 144)) as writer:
            writer.extend(np.stack([np.asarray(Image.open(path)) for path in pictures["wrist"]]))
        mixed = contexts.find(client.create_context(front=pictures["front"], wrist=tmp_path / "wrist.mp4")["id"])
        assert np.abs(mixed.pictures.astype(int) - by_view).mean() < 8


def test_a_wrong_upload_is_one_line(served: Serving, pictures: dict[str, list[Path]]) -> None:
    with Client(served.url) as client:
        with pytest.raises(ServerError, match="wrist: expected pictures or a video of each view, got none"):
            client.create_context(front=pictures["front"])
        with pytest.raises(ServerError, match="expected as many pictures of each view, got front 3, wrist 2"):
            client.create_context(front=pictures["front"], wrist=pictures["wrist"][:2])
        with pytest.raises(ServerError, match="files: expected none beside those of front, wrist, got some"):
            client.create_context(pictures["front"][0], **pictures)


def test_a_video_has_one_of_each_view(served: Serving, pictures: dict[str, list[Path]], tmp_path: Path) -> None:
    with Client(served.url) as client:
        job = client.create_video(scene="room", actions_name="look", num_frames=5)
        client.wait(job["id"], every=0.05)
        for view, width in ((None, 256), ("front", 128), ("wrist", 128)):
            info = probe_video(client.download(job["id"], tmp_path / "a.mp4", view=view))
            assert (info.width, info.height, info.num_frames) == (width, 144, 5)
        content = f"{served.url}/v1/videos/{job['id']}/content"
        for query in ("view=left", "view=front&variant=gif"):
            answer = httpx.get(f"{content}?{query}")
            expected = "view: expected one of front, wrist, of the variant video, got "
            assert (answer.status_code, answer.json()["error"]["message"][: len(expected)]) == (400, expected)


def shade(page: Page, across: float, down: float = 0.5) -> list[int]:
    """Red, green and blue at a place of what is shown."""
    return page.evaluate(
        """([across, down]) => {
            const canvas = document.getElementById("view");
            const place = [across * canvas.width, down * canvas.height].map(Math.floor);
            return [...canvas.getContext("2d").getImageData(...place, 1, 1).data].slice(0, 3);
        }""",
        [across, down],
    )


def shape(page: Page) -> float:
    place = page.locator("#view").bounding_box()
    assert place is not None
    return place["width"] / place["height"]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (on Debian: apt-get install chromium)")
def test_the_page_shows_all_cameras_or_one(
    open_page: Callable[..., Page], served: Serving, pictures: dict[str, list[Path]]
) -> None:
    page = open_page(server=served)
    wait_until(lambda: "front, wrist show one camera each" in page.locator("#drop-detail").inner_text())
    page.locator("#files").set_input_files([path for each in pictures.values() for path in each])
    wait_for_state(page, "waiting")
    red, blue = ([each + 20 for each in COLORS[name]] for name in VIEWS.names)

    def shows(left: list[int], right: list[int], wanted_shape: float) -> None:
        wait_until(lambda: abs(shape(page) - wanted_shape) < 0.02)
        wait_until(lambda: np.abs(np.subtract([*shade(page, 0.25), *shade(page, 0.75)], [*left, *right])).max() < 24)

    shows(red, blue, 256 / 144)
    assert page.locator("#views button").all_inner_texts() == ["All views", "front", "wrist"]
    # The names stand on the parts until one plays.
    corners = [(0.004, 0.01), (0.504, 0.01)]
    assert all(max(shade(page, *corner)) < 120 for corner in corners)
    page.locator("#views button", has_text="wrist").click()
    shows(blue, blue, 128 / 144)
    assert page.locator("#views [aria-pressed=true]").inner_text() == "wrist"
    page.locator("#views button", has_text="All views").click()
    shows(red, blue, 256 / 144)
    page.locator("#pause").click()
    wait_for_state(page, "driving")
    wait_for_frame(page, 4)
    wait_until(lambda: all(max(shade(page, *corner)) > 120 for corner in corners))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (on Debian: apt-get install chromium)")
def test_a_world_of_one_camera_has_no_switch(open_page: Callable[..., Page]) -> None:
    page = open_page("#scene=day")
    wait_for_state(page, "waiting")
    assert page.locator("#views").is_hidden()
