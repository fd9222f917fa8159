"""The page of the catalogue in Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import Open
from tests.core.report.test_report_in_browser import CONTRAST, assert_fits

pytestmark = pytest.mark.browser

CATALOGUE = Path(__file__).parents[2] / "reports" / "results" / "catalogue.html"
SCROLLS = """() => [...document.querySelectorAll('main *')]
    .filter((one) => getComputedStyle(one).overflowX === 'auto')
    .filter((one) => one.scrollWidth > one.clientWidth)
    .map((one) => one.ariaLabel)"""


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen_without_scrolling_sideways(opened: Open, width: int) -> None:
    assert_fits(CATALOGUE, opened, width)
    made = opened(CATALOGUE, viewport={"width": width, "height": 800})
    assert (made.shown, made.asked) == ([], [CATALOGUE.as_uri()])
    assert made.page.evaluate(SCROLLS) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(opened: Open, scheme: str) -> None:
    assert opened(CATALOGUE, color_scheme=scheme).page.evaluate(CONTRAST) == []
