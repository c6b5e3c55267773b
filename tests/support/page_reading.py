"""What tests read from the page, and from the session behind it."""

from typing import Any

from playwright.sync_api import Page
from serving_fake import Serving
from tiny_serving import wait_until


def wait_for_state(page: Page, state: str) -> None:
    page.wait_for_selector(f"#stage[data-state={state}]")


def wait_for_frame(page: Page, index: int) -> None:
    # Not by a function in the page: its security policy allows no eval.
    wait_until(lambda: shown_frame(page) >= index)


def shown_frame(page: Page) -> int:
    return int(page.get_attribute("#stage", "data-frame") or -1)


def last_frame(page: Page) -> int:
    return int(page.get_attribute("#slider", "max") or 0)


def actions_made(server: Serving) -> list[Any]:
    """The action of each frame that the one session has made, as its space has it in JSON."""
    (session,) = server.service.sessions.values()
    space = server.service.model.spec.space
    made = [moment.action for moment in session.rollout.moments if moment.generated]
    return [space.to_json(space.values(action[None])[0]) for action in made]  # type: ignore[union-attr]


def lit(page: Page) -> list[str]:
    return page.locator("#panel .lit span").all_inner_texts()
