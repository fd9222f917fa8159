"""The page of the catalogue in Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import Open
from tests.core.report.test_report_in_browser import CONTRAST, WIDTHS, assert_fits

pytestmark = pytest.mark.browser

CATALOGUE = Path(__file__).parents[2] / "reports" / "results" / "catalogue.html"
SCROLLS = """() => [...document.querySelectorAll('main *')]
    .filter((one) => getComputedStyle(one).overflowX === 'auto')
    .filter((one) => one.scrollWidth > one.clientWidth)
    .map((one) => one.ariaLabel)"""


def test_it_fits_the_screen_without_scrolling_sideways(opened: Open) -> None:
    assert_fits(CATALOGUE, opened)
    made = opened(CATALOGUE)
    assert (made.shown, made.asked) == ([], [CATALOGUE.as_uri()])
    for width in WIDTHS:
        made.page.set_viewport_size({"width": width, "height": 800})
        assert made.page.evaluate(SCROLLS) == [], width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(opened: Open, scheme: str) -> None:
    assert opened(CATALOGUE, color_scheme=scheme).page.evaluate(CONTRAST) == []
