"""The page of a run: reproducible, bounded, and journal and log text stays text."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree.ElementTree import Element

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import escape

from tests.core.report.hostile_logs import HOSTILE, run_folder, write_hostile
from tests.core.report.html_tree import parsed
from tests.core.report.journal_fields import TEXT_FIELDS, Field, planted, text_fields
from tests.core.report.test_measurements import measured
from tests.report_examples import DIED, EXAMPLES, LIVED, REHEARSAL, replace, report
from vllm_repro.journal.journal import Recording, read
from vllm_repro.report.build import build, report_of
from vllm_repro.report.files import LOG_ROOM, render
from vllm_repro.report.html import html_page
from vllm_repro.report.model import ArmReport
from vllm_repro.scenario.patch import Patch

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


def assert_sound(page: str) -> Element:
    """Check for valid HTML that runs and fetches nothing, and for the targets of its links."""
    tree = parsed(page)
    tags = [one.tag for one in tree.iter()]
    assert not {
        "planted-tag",
        "script",
        "img",
        "iframe",
        "base",
        "object",
        "embed",
        "link",
        "form",
    } & set(tags)
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
def test_examples_are_sound(folder: Path) -> None:
    assert_sound(html_page(report(folder)))


@settings(max_examples=20)
@given(TEXT_FIELDS, st.sampled_from([*MARKUP, *HOSTILE]), st.booleans())
def test_no_field_of_a_journal_becomes_markup(field: Field, text: str, instead: bool) -> None:
    page = html_page(planted(*field, lambda was: text if instead else f"{was} {text}"))
    assert_sound(page)
    assert len(page) < 3 << 20


def links(page: str) -> set[str]:
    """Return the addresses in vLLM's source."""
    return set(re.findall(r'href="(https://github.com/vllm-project/vllm/blob/[^"]*)"', page))


def test_frames_link_to_the_source_of_the_release() -> None:
    made = report(DIED)
    arm = made.arms[0]
    (trial,) = arm.trials
    frames = ("vllm/v1/a.py:f", "torch/b.py:g", "vllm_repro_lab/vllm/c.py:h", "vllm/d.py:<lambda>")

    def page(arm: ArmReport, **changes: object) -> str:
        died = replace(trial, death=replace(trial.death, frames=frames, lines=(7, 8, 9, 0)))
        return html_page(replace(made, **{"arms": (replace(arm, trials=(died,)),), **changes}))

    source = "https://github.com/vllm-project/vllm/blob/v0.23.0/vllm"
    assert links(page(arm)) == {f"{source}/v1/a.py#L7", f"{source}/d.py"}
    assert "torch/b.py:8 g" in text_of(parsed(page(arm)))
    cpu = replace(arm, server=replace(arm.server, vllm_version="0.23.0+cpu"))
    assert links(page(cpu)) == links(page(arm))
    patched = replace(arm, patches=(Patch(file="vllm/v1/a.py", was="a", now="b", why=""),))
    assert links(page(patched)) == {f"{source}/d.py"}
    for version in ("0.23.1.dev3+g0123456", "0.23.0+commit.4689392ab1", "nightly", ""):
        other = replace(arm, server=replace(arm.server, vllm_version=version or None))
        assert not links(page(other, vllm_version=version or None)), version
    assert not links(page(replace(arm, server=replace(arm.server, source="~/vllm"))))
    assert not links(page(arm, rehearsal=True))


def test_the_amounts_are_drawn_to_scale() -> None:
    tree = assert_sound(html_page(report(DIED)))
    assert [rect.get("width") for rect in tree.iter("rect")] == ["100.00%", "6.38%"]
    (figure,) = tree.iter("figure")
    words = " ".join(text_of(figure).split())
    assert words == "The boundary in reported (LAB), in MB needed 16.00 MB locked 1.02 MB"
    assert "<figure" not in html_page(report(LIVED)), "it knows no amounts"


def test_the_planted_text_is_on_the_page() -> None:
    """Otherwise the test above could not fail."""
    plant = MARKUP[0]
    seen = sum(
        escape(plant) in html_page(planted(*field, lambda was: f"{was} {plant}"))
        for field in text_fields()[::40]
    )
    assert seen >= 2


def test_a_trial_that_a_cut_journal_does_not_end_is_shown() -> None:
    recording = read(REHEARSAL / "journal.jsonl")
    place = next(at for at, entry in enumerate(recording.entries) if entry.event == "answer")
    made = report_of(Recording(recording.entries[:place], cut=True), Path("x"))
    text = text_of(assert_sound(html_page(made)))
    assert "The journal is incomplete" in text
    assert "interrupted" in text
    assert "The journal ends before this trial did." in text


def test_of_many_trials_the_first_of_each_outcome_are_shown() -> None:
    made = report(REHEARSAL)
    arm = made.arms[0]
    many = replace(
        arm, trials=tuple(replace(arm.trials[0], number=number) for number in range(1, 201))
    )
    text = text_of(assert_sound(html_page(replace(made, arms=(many,)))))
    assert text.count("reported trial ") == 3
    assert "reported: 197 more: crash, the boundary crossed in 197" in text


def test_logs_have_limited_room_and_the_rest_is_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    made = build(folder)
    line = "(EngineCore pid=1) INFO word " + "w" * 70 + "\n"
    more = replace(
        made,
        arms=tuple(
            replace(
                arm,
                trials=(
                    *arm.trials,
                    replace(arm.trials[0], number=2, log=f"logs/{arm.name}-2.log"),
                ),
            )
            for arm in made.arms
        ),
    )
    names = [trial.log for arm in more.arms for trial in arm.trials]
    for name in names[1:]:
        (folder / name).write_text(line * 10_000 + "ERROR boom\n" + line * 10_000)
    page = render(more, "html")
    assert [f'href="{name}"' in page for name in names] == [False] + [True] * (len(names) - 1), (
        "where a log is missing"
    )
    assert len(page) < LOG_ROOM * 1.5
    text = text_of(assert_sound(page))
    assert text.count("bytes left out: logs/") >= 8
    assert text.count("no room on this page") == 7


def test_the_first_error_and_the_root_exception_are_marked(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    log = (
        "INFO boots\nERROR first\nERROR second\nAssertionError: Workspace is"
        " locked\nAssertionError: again\nend\n"
    )
    (folder / "logs" / "reported-1.log").write_text(log)
    tree = assert_sound(render(build(folder), "html"))
    (lines,) = (one for one in tree.iter("div") if one.get("aria-label") == "logs/reported-1.log")
    marked = {one.get("class"): (one.text or "").strip("\n") for one in lines if one.get("class")}
    assert marked == {"error": "ERROR first", "root": "AssertionError: Workspace is locked"}
    assert text_of(lines).split() == log.split()


def test_a_hostile_log_stays_text(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    write_hostile(folder)
    text = text_of(assert_sound(render(build(folder), "html")))
    for words in ('<script>window.hacked = "script"</script>', "{{ 7 * 7 }}", "<base href=", "]]>"):
        assert words in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2066]", text)
    assert "more characters in this line" in text


@pytest.mark.parametrize("evidence", ["gpu", "lab", "rehearsal"])
def test_figures_are_claims_or_marked_or_withheld(tmp_path: Path, evidence: str) -> None:
    made = measured(evidence).report(tmp_path)
    tree = assert_sound(html_page(made))
    rows = [text_of(row) for row in tree.iter("tr") if re.search(r"\d \(\d+ to \d", text_of(row))]
    marked = all("REHEARSAL" in row for row in rows)
    assert (bool(rows), marked) == (evidence != "lab", evidence != "gpu")
    assert made.measured is not None
    assert made.measured.withheld in text_of(tree)
