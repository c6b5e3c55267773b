"""Fixtures of tests that open the page in Chromium: the browser, servers, and `open_page`."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chromium import launched
from playwright.sync_api import Browser, Page
from serving_fake import SPACES, Serving, fake


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Launched once; each test has a context, which is a profile of its own.
    with launched() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = fake(tmp_path_factory.mktemp("serving"))
    yield serving
    serving.stop()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Serving]]:
    """A server of a world of each kind that is not driven."""
    servers = {kind: fake(tmp_path_factory.mktemp(kind), space) for kind, space in SPACES.items()}
    yield servers
    for serving in servers.values():
        serving.stop()


@pytest.fixture
def open_page(browser: Browser, server: Serving) -> Iterator[Callable[..., Page]]:
    contexts, errors = [], []

    def open_at(fragment: str = "", server: Serving = server, script: str = "", **settings: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1000, "height": 700}, **settings})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.add_init_script(script)
        page.goto(f"http://127.0.0.1:{server.port}/{fragment}")
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert not errors
