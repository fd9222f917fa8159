"""The page of a version map in Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import Open
from tests.core.report.test_report_in_browser import assert_fits
from tests.search.test_version_map import several_arms
from vllm_repro_search.versions.map_page import map_page

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("width", [390, 1280])
def test_no_text_lies_on_another(tmp_path: Path, opened: Open, width: int) -> None:
    path = tmp_path / "versions.html"
    path.write_text(map_page(several_arms()), encoding="utf-8")
    assert_fits(path, opened, width)
