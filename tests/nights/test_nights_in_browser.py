"""The nightly page in Chromium."""

from __future__ import annotations

from datetime import UTC
from pathlib import Path

import pytest

from tests.browser import Open
from tests.nights.simulated import NOTICE, Weeks
from vllm_repro_nights.page import page
from vllm_repro_nights.summary import summarize

pytestmark = pytest.mark.browser


@pytest.fixture
def nights(tmp_path: Path) -> Path:
    path = tmp_path / "nights.html"
    path.write_text(page(summarize(list(Weeks(0).rows()), UTC, nights=28), "reports", NOTICE), encoding="utf-8")
    return path


def test_it_renders_without_a_word_and_without_the_network(nights: Path, opened: Open) -> None:
    made = opened(nights)
    assert made.shown == []
    assert made.asked == [nights.as_uri()]


def test_the_first_screen_has_what_changed(nights: Path, opened: Open) -> None:
    made = opened(nights)
    for words in ("REHEARSAL", "good on nightly (was reproduces)", "slower since"):
        box = made.page.get_by_text(words, exact=False).first.bounding_box()
        assert box is not None, words
        assert box["y"] + box["height"] <= 800, words


def test_each_night_has_a_letter_and_a_way_to_its_run(nights: Path, opened: Open) -> None:
    made = opened(nights)
    squares = made.page.locator(".square a")
    assert squares.count() == 4 * 28
    assert squares.first.inner_text() == "Q"
    assert (squares.first.get_attribute("href") or "").startswith("reports/min-tokens-stop-ids/202")
    assert made.page.get_by_role("cell", name="slower since").count() == 2


def test_it_fits_a_narrow_screen(nights: Path, opened: Open) -> None:
    made = opened(nights, viewport={"width": 390, "height": 800})
    assert made.page.evaluate("document.documentElement.scrollWidth") <= 390
