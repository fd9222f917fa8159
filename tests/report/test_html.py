"""The page of a run: bounded, the same each time, and whatever a journal or a log holds stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import html5lib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.report.hostile_logs import run_folder, write_hostile
from tests.report.test_issue import FIELDS, HOSTILE, Field, planted
from tests.report.test_measured import Journal, measured
from tests.report.test_version_map import map_of
from tests.report_examples import EXAMPLES, REHEARSAL, report
from vllm_repro.errors import UsageError
from vllm_repro.journal.journal import Entry, Recording, read
from vllm_repro.journal.log_excerpts import PAGE
from vllm_repro.report.build import build, report_of
from vllm_repro.report.document import there
from vllm_repro.report.files import render
from vllm_repro.report.html import LOG_ROOM, html_page, shown_trials
from vllm_repro.report.version_map import row_of
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Standing

XHTML = "{http://www.w3.org/1999/xhtml}"
MARKUP = [
    '<planted-tag planted="1">x</planted-tag>',
    '"><planted-tag>',
    "'><planted-tag planted='",
    '" planted="1" x="',
    "</script><planted-tag>",
    "</style></title><planted-tag>",
    "--><planted-tag><!--",
    "<![CDATA[<planted-tag>]]>",
    "{{ 6 * 7 }}{% raw %}<planted-tag>{% endraw %}",
    "<svg><script>planted()</script></svg>",
]


def parsed(page: str) -> Element:
    """As a browser builds it; a mistake in the markup is an error."""
    tree: Element = html5lib.HTMLParser(strict=True).parse(page)
    return tree


def assert_sound(page: str) -> Element:
    """Valid, with nothing in it that could run or be fetched but its own script, and links to files beside it and to the issue only."""
    tree = parsed(page)
    tags = [one.tag.removeprefix(XHTML) for one in tree.iter() if isinstance(one.tag, str)]
    assert not {"planted-tag", "img", "iframe", "base", "object", "embed", "link", "form"} & set(tags)
    assert tags.count("script") == 1
    assert tags.count("style") == 1
    ids = [one.attrib["id"] for one in tree.iter() if "id" in one.attrib]
    assert len(ids) == len(set(ids))
    for one in tree.iter():
        assert "planted" not in one.attrib
        assert not [name for name in one.attrib if str(name).startswith("on") or name == "style"]
        href = one.attrib.get("href", "#")
        assert re.match(r"#|https://github\.com/|[^:/\\][^:\\]*$", href), href
        if href.startswith("#") and len(href) > 1:
            assert href[1:] in ids
    return tree


def text_of(tree: Element) -> str:
    return "".join(tree.itertext())


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_examples_are_sound_and_the_same_each_time(folder: Path) -> None:
    page = html_page(report(folder))
    assert_sound(page)
    assert html_page(report(folder)) == page


@settings(max_examples=50)
@given(st.sampled_from(FIELDS), st.sampled_from([*MARKUP, *HOSTILE]), st.booleans())
def test_no_field_of_a_journal_becomes_markup(field: Field, text: str, instead: bool) -> None:
    page = html_page(planted(*field, lambda was: text if instead else f"{was} {text}"))
    assert_sound(page)
    assert len(page) < 3 << 20


def test_what_is_planted_comes_out_as_text() -> None:
    """That the search above can fail: what it plants is on the page."""
    plant = MARKUP[0]
    seen = sum(
        plant in text_of(parsed(html_page(planted(*field, lambda was: f"{was} {plant}")))) for field in FIELDS[::12]
    )
    assert seen >= 5


@settings(max_examples=40)
@given(st.sampled_from(EXAMPLES), st.floats(0, 1))
def test_a_journal_cut_anywhere_is_a_page_that_says_so(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, share: float
) -> None:
    raw = (folder / "journal.jsonl").read_bytes()
    path = tmp_path_factory.mktemp("cut") / "journal.jsonl"
    path.write_bytes(raw[: int(share * (len(raw) - 2))])
    try:
        made = build(path.parent)
    except UsageError:
        assert b"\n" not in path.read_bytes()  # not even its first line is there
        return
    text = text_of(assert_sound(html_page(made)))
    assert "The journal is cut" in text


def test_a_trial_that_a_cut_journal_does_not_end_is_shown() -> None:
    recording = read(REHEARSAL / "journal.jsonl")
    place = next(at for at, entry in enumerate(recording.entries) if entry.event == "answer")
    made = report_of(Recording(recording.entries[:place], cut=True), Path("x"))
    text = text_of(assert_sound(html_page(made)))
    assert "not concluded" in text
    assert "no answer on record" in text


def many(trials: int) -> Recording:
    """The example's first trial, so many times; every hundredth was clean."""
    recording = read(REHEARSAL / "journal.jsonl")
    first = recording.entries[
        1 : next(at for at, one in enumerate(recording.entries) if one.event == "trial-ended") + 1
    ]

    def made() -> Iterator[Entry]:
        yield recording.entries[0]
        for number in range(1, trials + 1):
            for entry in first:
                fields = {**entry.fields, "trial": number} if "trial" in entry.fields else entry.fields
                if entry.event == "trial-ended" and number % 100 == 0:
                    fields = {**fields, "outcome": "clean", "death": None}
                yield Entry(entry.t + number * 60, entry.event, fields)
        yield recording.entries[-1]

    return Recording(tuple(made()), cut=False)


def test_of_very_many_trials_those_that_differ_are_shown() -> None:
    made = report_of(many(2_000), Path("x"))
    page = html_page(made)
    assert len(page) < 1 << 20
    shown = shown_trials(made)
    assert len(shown) == 60
    assert {trial.outcome for _, trial in shown} == {Outcome.CRASH, Outcome.CLEAN}
    left = "60 of 2,000 trials are shown; not shown: reported: 1,940 crash."
    assert left in text_of(assert_sound(page))


def test_logs_have_their_room_and_the_rest_is_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    made = build(folder)
    line = "(EngineCore pid=1) INFO word " + "w" * 70 + "\n"
    for arm in made.arms:
        (folder / "logs" / f"{arm.name}-1.log").write_text(line * 40_000 + "ERROR boom\n" + line * 40_000)
    page = render(made, "html")
    tree = assert_sound(page)
    assert len(page) < LOG_ROOM * 1.5
    text = text_of(tree)
    assert text.count("bytes left out: logs/") >= 8
    assert "not shown for want of room" not in text  # eight logs of 256 KB are just what there is room for
    more = replace(
        made,
        arms=tuple(
            replace(arm, trials=(*arm.trials, replace(arm.trials[0], number=2, log=f"logs/{arm.name}-2.log")))
            for arm in made.arms
        ),
    )
    for arm in made.arms:
        (folder / "logs" / f"{arm.name}-2.log").write_text(line * 10_000)
    text = text_of(assert_sound(render(more, "html")))
    assert text.count("not shown for want of room") == 8
    assert PAGE.whole * 8 == LOG_ROOM


def test_a_hostile_log_stays_text(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    write_hostile(folder)
    text = text_of(assert_sound(render(build(folder), "html")))
    for words in ('<script>window.hacked = "script"</script>', "{{ 7 * 7 }}", "<base href=", "]]>"):
        assert words in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2066]", text)
    assert "more characters in this line" in text


def test_a_log_that_is_gone_is_named() -> None:
    assert "not beside this page when it was made" in render(report(REHEARSAL), "html")


def test_a_simulated_figure_never_stands_without_the_word(tmp_path: Path) -> None:
    tree = assert_sound(html_page(measured("rehearsal").report(tmp_path)))
    figures = [
        one for one in tree.iter() if "aria-label" in one.attrib and "tokens a second" in one.attrib["aria-label"]
    ]
    assert figures
    for one in figures:
        assert "REHEARSAL" in one.attrib["aria-label"]
        labels = [text.text or "" for text in one.iter() if text.get("text-anchor") == "end"]
        assert labels
        assert all("REHEARSAL" in text for text in labels)
    for cell in tree.iter(f"{XHTML}td"):
        if re.search(r"\d \(\d+ to \d", text_of(cell)):
            row = next(one for one in tree.iter(f"{XHTML}tr") if cell in list(one))
            assert "REHEARSAL" in text_of(row)


def test_a_claim_has_its_intervals_and_what_is_withheld_its_reason(tmp_path: Path) -> None:
    claimed = text_of(assert_sound(html_page(measured("gpu").report(tmp_path))))
    assert "ratio to eager, with its 95 % interval" in claimed
    held: Journal = measured("lab")
    made = held.report(tmp_path)
    text = text_of(assert_sound(html_page(made)))
    assert made.measured is not None
    assert made.measured.withheld in text
    assert "tok/s" not in text
    assert "quartiles" not in text


@pytest.mark.parametrize(
    ("path", "link"),
    [
        ("logs/a b-1.log", "logs/a%20b-1.log"),
        ("javascript:alert(1)", "javascript%3Aalert%281%29"),
        ("../../etc/passwd", "#"),
        ("//evil.example/x", "#"),
        ("/etc/passwd", "#"),
        ("\\\\evil\\x", "#"),
        ("", "#"),
    ],
)
def test_links_stay_beside_the_page(path: str, link: str) -> None:
    assert there(path) == link


def map_beside(folder: Path, **changes: Any) -> None:
    of = report(REHEARSAL)
    made = map_of([row_of(of, "0.23.0", Standing.BAD, of.evidence)]).as_json()
    (folder / "versions.json").write_text(json.dumps({**made, "scenario": of.scenario, **changes}), encoding="utf-8")


def test_a_version_map_beside_the_run_is_shown_with_its_mark(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    assert "Version map" not in render(build(folder), "html")
    map_beside(folder, reading="<planted-tag> reads")
    text = text_of(assert_sound(render(build(folder), "html")))
    assert "Version map (REHEARSAL)" in text
    assert "<planted-tag> reads." in text
    assert "not of this run" in text


@pytest.mark.parametrize(
    "changes", [{"scenario": "another"}, {"schema": 2}, {"rows": None}, {"rows": [{"version": 1}]}]
)
def test_a_version_map_that_is_none_of_this_scenario_is_not_shown(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = run_folder(tmp_path / "run")
    map_beside(folder, **changes)
    assert "Version map" not in render(build(folder), "html")
    (folder / "versions.json").write_bytes(b"[" * 100_000)
    assert "Version map" not in render(build(folder), "html")
