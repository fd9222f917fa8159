"""The page of the history in Chromium."""

from __future__ import annotations

from datetime import UTC
from pathlib import Path

import pytest

from tests.browser import Open
from tests.nights.test_history import fortnight
from vllm_repro_nights.history import history
from vllm_repro_nights.history_formats import html_page

pytestmark = pytest.mark.browser


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "nights.html"
    shown = history([run for _, run in fortnight()], UTC, last=4)
    path.write_text(html_page(shown, "reports"), encoding="utf-8")
    return path


def test_the_first_screen_has_changes_and_the_marks_lead_to_runs(page: Path, opened: Open) -> None:
    made = opened(page)
    assert (made.shown, made.asked) == ([], [page.as_uri()])
    box = made.page.get_by_text("fixed (was reproduces)", exact=False).first.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 800
    marks = made.page.locator(".square a")
    assert (marks.count(), marks.first.inner_text()) == (2 * 14, "Q")
    assert (marks.first.get_attribute("href") or "").startswith("reports/sco-hybrid/202")


def test_a_narrow_screen_shows_the_states(page: Path, opened: Open) -> None:
    made = opened(page, viewport={"width": 390, "height": 800})
    assert made.page.evaluate("document.documentElement.scrollWidth") <= 390
    for words in ("reproduces", "fixed"):
        box = made.page.locator(".nights tbody .chip", has_text=words).first.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 390
