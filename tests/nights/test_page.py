from __future__ import annotations

import re
from datetime import UTC

from msgspec.structs import replace

from tests.nights.made import row
from tests.nights.simulated import Weeks
from vllm_repro_nights.page import page
from vllm_repro_nights.summary import summarize


def test_the_page_says_what_changed_first_and_links_runs_relative_to_itself() -> None:
    text = page(summarize(list(Weeks(0).rows()), UTC, nights=28), "../reports")
    places = [
        text.index(words)
        for words in ("What changed since", "good on nightly (was", "slower since", "The last 28 nights", "Throughput<")
    ]
    assert places == sorted(places)
    links = set(re.findall(r'href="([^"]*)"', text)) - {"#main"}
    assert links
    assert all(re.fullmatch(r"\.\./reports/[\w-]+/\w+-\w+/", link) for link in links)
    assert len(text) < 200_000


def test_nothing_in_it_is_fetched_and_nothing_in_it_is_markup_of_others() -> None:
    rows = [made for _, made in (row(0, 1, 1), row(1, 0, 50, version="<script>alert(1)</script>"))]
    rows = [replace(made, id=f'x/"><b>{number}', scenario="<b>&amp;") for number, made in enumerate(rows)]
    text = page(summarize(rows, UTC), "re ports")
    assert "<script>alert" not in text
    assert "<b>&amp;" not in text
    assert "&lt;b&gt;&amp;amp;" in text
    assert 'href="re%20ports/x/%22%3E%3Cb%3E' in text
    assert not re.search(r"https?://", text)


def test_a_rehearsal_says_so_at_the_top() -> None:
    rows = [row(night, 1, 1, evidence="rehearsal")[1] for night in range(2)]
    text = page(summarize(rows, UTC), "reports")
    assert text.index("REHEARSAL: a simulated engine") < text.index("What changed")
    assert "Nothing changed." in text
    mixed = page(summarize([*rows, row(1, 1, 1)[1]], UTC), "reports")
    assert "(REHEARSAL)</span>" in mixed


def test_an_empty_history_is_a_page_too() -> None:
    assert "no run is in the history yet" in page(summarize([], UTC), "reports")


def test_what_lies_beside_the_page_is_linked_in_place_of_its_run() -> None:
    rows = [row(night, 1, 1)[1] for night in range(2)]
    text = page(summarize(rows, UTC), "../..", near={rows[1].id: "sco-hybrid/report.html"})
    assert 'href="sco-hybrid/report.html"' in text
    assert rows[1].id not in text
    assert f'href="../../{rows[0].id}/"' in text
