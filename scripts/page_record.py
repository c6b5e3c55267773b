"""Records a drive on the page of `terra serve` in a headless Chromium as a GIF: docs/page.gif.

    python scripts/page_record.py --output docs/page.gif
    python scripts/page_record.py --output night.gif --scene night --trip Nothing:5 ArrowRight:20 ArrowUp:10 engine=hf

The script starts a server of its own; further arguments are those of `terra serve`. Each frame of the drive becomes a
picture of the whole page, however long the model took; the GIF shows the pictures at the model's rate. The
script needs Playwright and Chromium.
"""

import argparse
import io
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from serving_load import own_server

from decoder.video import write_video

VIEWPORT = (1180, 660)
WIDTHS = (800, 720, 640, 560)  # pixels of the GIF, the first that MAX_BYTES allows
MAX_BYTES = 2_500_000
FPS = 10.0
LAST_FRAMES = 15  # for which the last picture stays
FRAME_SECONDS = 300  # that a frame may take


def main() -> None:
    """Parse the command line, drive, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a GIF")
    parser.add_argument("--scene", default="day")
    parser.add_argument("--scheme", default="dark", choices=["dark", "light"])
    trip = ["Nothing:5", "ArrowLeft:25", "Nothing:10"]
    parser.add_argument("--trip", nargs="+", default=trip, metavar="KEY:FRAMES", help="keys held for so many frames")
    arguments, overrides = parser.parse_known_args()
    legs = [(key, int(frames)) for key, _, frames in (leg.partition(":") for leg in arguments.trip)]
    with own_server({}, overrides) as url, sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        browser = playwright.chromium.launch(executable_path=path, args=["--headless=new", "--no-sandbox"])
        size = {"width": VIEWPORT[0], "height": VIEWPORT[1]}
        page = browser.new_page(viewport=size, color_scheme=arguments.scheme)  # pyright: ignore[reportArgumentType]
        page.goto(f"{url}/#scene={arguments.scene}")
        scenes = httpx.get(f"{url}/v1/scenes").json()["data"]
        (num_context,) = (scene["num_frames"] for scene in scenes if scene["id"] == arguments.scene)
        pictures = record(page, num_context, legs)
        browser.close()
    write(pictures, arguments.output)


def record(page: Page, num_context: int, legs: Sequence[tuple[str, int]]) -> list[Image.Image]:
    """Pictures of the page: one while the page waits, then one for each frame of the drive."""
    page.set_default_timeout(1000 * FRAME_SECONDS)
    last = num_context - 1
    page.wait_for_selector(f'#stage[data-state=waiting][data-frame="{last}"]')
    pictures = [shot(page)]
    page.keyboard.press("Space")
    for key, frames in legs:
        if key != "Nothing":
            page.keyboard.down(key)
        for _ in range(frames):
            last = next_frame(page, last)
            pictures.append(shot(page))
            print(f"frame {last}", file=sys.stderr)
        if key != "Nothing":
            page.keyboard.up(key)
    return pictures


def next_frame(page: Page, last: int) -> int:
    """Wait until the page shows a frame after `last`; returns its index. Exits after a time limit."""
    ends = time.monotonic() + FRAME_SECONDS
    while (index := shown_frame(page)) <= last:
        if time.monotonic() > ends:
            sys.exit(f"error: expected a frame after {last} within {FRAME_SECONDS} s, got none")
        page.wait_for_timeout(20)
    return index


def shown_frame(page: Page) -> int:
    """The index of the frame that the page shows, -1 before the first."""
    return int(page.get_attribute("#stage", "data-frame") or -1)


def shot(page: Page) -> Image.Image:
    """A picture of the page."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def write(pictures: Sequence[Image.Image], path: Path) -> None:
    """Write a GIF of the first width whose file is small enough; the last picture stays longer. Exits if none is."""
    pictures = [*pictures, *[pictures[-1]] * LAST_FRAMES]
    for width in WIDTHS:
        size = (width, round(width * pictures[0].height / pictures[0].width))
        write_video(np.stack([np.asarray(picture.resize(size)) for picture in pictures]), path, FPS)
        if path.stat().st_size <= MAX_BYTES:
            print(f"{path}: {width} pixels wide, {path.stat().st_size / 1e6:.2f} MB")
            return
    sys.exit(f"error: {path}: expected at most {MAX_BYTES} bytes, got {path.stat().st_size}")


if __name__ == "__main__":
    main()
