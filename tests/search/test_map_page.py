"""The page of a version map."""

from __future__ import annotations

from dataclasses import replace

from tests.core.report.test_html import assert_sound, text_of
from tests.search.test_version_map import WHOLE, row, several_arms
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_search.versions.map_page import map_page
from vllm_repro_search.versions.version_map import map_rows, readings


def test_it_has_what_the_markdown_has() -> None:
    for version_map in (replace(WHOLE, interrupted="SIGINT"), several_arms()):
        tree = assert_sound(map_page(version_map))
        text = text_of(tree)
        for sentence in (*readings(version_map), version_map.shortfall, version_map.reproduce):
            assert sentence in text
        shown = [tuple(map(text_of, line)) for line in tree.iter("tr")]
        assert shown[1:] == list(map_rows(version_map))


def test_a_row_links_to_the_page_of_its_run() -> None:
    (one,) = WHOLE.with_row(row("0.23.0", Outcome.CRASH)).rows[-1:]
    page = map_page(replace(WHOLE, rows=(replace(one, run="a b/../c"),), versions=("0.23.0",)))
    assert 'href="../../a%20b%2F..%2Fc/report.html"' in page


def test_each_release_has_its_result_in_the_strip() -> None:
    rows = [row("0.21.0", Outcome.CRASH), row("0.24.0", Outcome.CLEAN)]
    tree = assert_sound(map_page(replace(WHOLE, rows=tuple(rows), versions=("0.21.0", "0.24.0"))))
    (strip,) = (one for one in tree.iter("ol") if one.get("class") == "strip")
    shown = " | ".join(" ".join(text_of(item).split()) for item in strip)
    assert shown == "0.21.0 declared bad reported: dies | 0.24.0 declared good reported: lives"
