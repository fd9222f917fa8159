"""A real headless Chromium, and pages that record errors and requests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = (
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass
class Opened:
    """A page with the messages and requests that it made."""

    page: Page
    shown: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


Open = Callable[..., Opened]


# Not for the session: asyncio tests fail in a thread in which Playwright's event loop runs.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium. Fail instead of skip if there is none."""
    # here: importing it takes half a second in every test worker
    from playwright.sync_api import sync_playwright

    path = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if path is None:
        pytest.fail("no Chromium on PATH; on Debian: apt-get install chromium", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Open a file as its recipient does. Keywords are those of a browser context."""
    with ExitStack() as stack:

        def call(path: Path, **options: Any) -> Opened:
            context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
            stack.callback(context.close)
            made = Opened(context.new_page())
            made.page.on("console", lambda message: made.shown.append(message.text))
            made.page.on("pageerror", lambda error: made.shown.append(str(error)))
            made.page.on("request", lambda request: made.asked.append(request.url))
            made.page.goto(path.as_uri())
            made.page.wait_for_load_state()
            return made

        yield call
