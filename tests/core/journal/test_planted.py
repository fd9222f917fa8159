"""Secrets and private names planted into journals and logs appear in no output."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.report.journal_fields import TEXT_FIELDS, Field, planted, text_fields
from tests.report_examples import replace
from tests.search.test_version_map import map_of
from tests.secrets_planted import PRIVATE, SECRETS, Plant
from vllm_repro.journal.journal import Journal, read
from vllm_repro.journal.log_excerpts import PAGE_SIZES, ExcerptSizes, read_excerpts
from vllm_repro.journal.redact import Redactor
from vllm_repro.report.files import FORMATS, render
from vllm_repro.report.model import RunReport, arm_fields
from vllm_repro.report.script import no_script
from vllm_repro.report.summary import summary
from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Standing, arm_result
from vllm_repro_intake.issue_draft import draft, duplicates
from vllm_repro_search.versions.json_map import version_map_dict
from vllm_repro_search.versions.version_map import markdown as version_markdown
from vllm_repro_search.versions.version_map import row_of
from vllm_repro_search.versions.version_map import terminal as version_terminal

scenarios = cache(all_scenarios)
SCRIPTED = next(scenario for scenario in scenarios() if not no_script(scenario))

PLANTS = [*SECRETS.values(), *PRIVATE.values()]


def outputs(made: RunReport) -> Iterator[tuple[str, str]]:
    """Return every rendering of a report by name."""
    for form in FORMATS:
        yield form, render(made, form, SCRIPTED)
    script = render(made, "python", SCRIPTED)
    body = draft(made, duplicates(made, scenarios()), script=script[:3_000])
    yield "issue", body.body + body.title
    yield "terminal", summary(made)
    arm = made.arms[0]
    # The map quotes what a release that did not boot died of.
    outcomes = [Outcome.BOOT_FAILED]
    trials = tuple(replace(trial, outcome=outcomes[0]) for trial in arm.trials[:1])
    failed = replace(
        made, arms=(replace(arm, trials=trials, **arm_fields(arm_result(arm.name, arm.expected, outcomes))),)
    )
    rows = [row_of(failed, made.vllm_version or "0.23.0", Standing.BAD, made.evidence)]
    version_map = replace(map_of(rows), arms=(arm.name,))
    yield "versions.md", version_markdown(version_map)
    yield "versions", version_terminal(version_map, "versions.md")
    yield "versions.json", json.dumps(version_map_dict(version_map), ensure_ascii=False)


def sources() -> list[Field]:
    """Return one field of each kind that holds text written by others."""
    kinds = {
        (recording.entries[place].event, way[-1] if isinstance(way[-1], str) else way[-2]): (recording, place, way)
        for recording, place, way in text_fields()
        if {"command", "argv", "message", "frames", "why", "evidence", "os", "reproduce"} & set(way)
    }
    return list(kinds.values())


@pytest.mark.parametrize("group", range(12))
def test_each_kind_planted_where_texts_come_from(group: int) -> None:
    """Plant five or six at a time: rendering every output takes long, and longer texts would be cut."""
    plants = PLANTS[group::12]
    for field in sources():
        made = planted(*field, lambda was: "\n".join(f"{was} {plant.written}" for plant in plants))
        for name, text in outputs(made):
            assert [plant for plant in plants if plant.hidden in text] == [], (name, field[1:])


@settings(max_examples=50)
@given(
    TEXT_FIELDS,
    st.sampled_from(PLANTS),
    st.sampled_from(["{0} {1}", "{1}", "{0}\n{1}\n", "{0} '{1}', x", "({1})", "{0}={1}"]),
)
def test_no_field_of_a_journal_lets_one_through(field: Field, plant: Plant, form: str) -> None:
    made = planted(*field, lambda was: form.format(was, plant.written))
    for name, text in outputs(made):
        assert plant.hidden not in text, name


def test_the_plants_would_be_seen() -> None:
    """Check that the search can fail: without redaction the plants appear."""
    names = {name for name, _ in outputs(planted(*text_fields()[0], str))}
    assert names == {
        "md",
        "html",
        "json",
        "junit",
        "python",
        "issue",
        "terminal",
        "versions.md",
        "versions",
        "versions.json",
    }
    seen: set[str] = set()
    for field in (*sources(), *text_fields()):
        made = planted(*field, lambda was: f"{was} harmlesspayload")
        seen |= {name for name, text in outputs(made) if "harmlesspayload" in text}
        if seen == names:
            break
    assert seen == names


@settings(max_examples=30)
@given(
    st.sampled_from([PAGE_SIZES, replace(PAGE_SIZES, whole=0)]),
    st.lists(st.sampled_from(PLANTS), min_size=1, max_size=6),
    st.integers(0, 40_000),
    st.integers(0, 40_000),
)
def test_no_part_of_a_log_lets_one_through(
    tmp_path_factory: pytest.TempPathFactory, sizes: ExcerptSizes, plants: list[Plant], before: int, after: int
) -> None:
    """Place log windows anywhere, also inside a key."""
    folder = tmp_path_factory.mktemp("log")
    middle = "\n".join(plant.written for plant in plants)
    filling = "x" * (before // 2) + " " + "y\n" * (before // 4)
    text = f"{middle}\n{filling}\n{middle} ERROR {middle}\n{'z ' * after}\nAssertionError: {middle}\n{'w' * after}\n{middle}"
    (folder / "a.log").write_text(text, encoding="utf-8")
    log = read_excerpts(folder, "a.log", Redactor(), "AssertionError", sizes)
    assert log is not None
    for plant in plants:
        assert all(plant.hidden not in one.text for one in log.excerpts)


def test_the_journal_keeps_a_marker_in_the_place_of_a_secret(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        for plant in SECRETS.values():
            journal.write("answer", error=plant.written, deep={"argv": ["vllm", plant.written], "path": "/home/me/x"})
    lines = (tmp_path / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    for plant, line, entry in zip(SECRETS.values(), lines, read(tmp_path / "journal.jsonl").entries, strict=True):
        assert plant.hidden not in json.dumps(entry.fields)
        assert plant.hidden not in line
        assert "[redacted:" in line
        assert "/home/me/x" in line  # later commands need it


def test_a_journal_from_elsewhere_does_not_open_other_files(tmp_path: Path) -> None:
    (tmp_path / "outside.log").write_text("ERROR secret", encoding="utf-8")
    run = tmp_path / "run"
    run.mkdir()
    with contextlib.suppress(OSError):  # not every file system has links
        (run / "link.log").symlink_to("../outside.log")
    for name in ("../outside.log", str(tmp_path / "outside.log"), "link.log", "absent.log", "."):
        assert read_excerpts(run, name, Redactor(), None) is None


def test_a_host_and_a_user_are_known_by_the_names_that_the_journal_has() -> None:
    recording, place, way = next(field for field in text_fields() if field[2] == ("trigger", "evidence", 0))
    entries = list(recording.entries)
    entries[0] = replace(entries[0], fields={**entries[0].fields, "hosts": ["quietname"], "users": ["jane"]})
    made = planted(
        replace(recording, entries=tuple(entries)), place, way, lambda was: f"{was} on quietname in /mnt/jane"
    )
    assert all("quietname" not in text and "/mnt/jane" not in text for _, text in outputs(made))
