"""Secrets and private names planted into journals and logs appear in no output."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.report.journal_fields import TEXT_FIELDS, Field, planted, text_fields
from tests.planted_outputs import leaks, shown
from tests.secrets_planted import PLANTS, SECRETS, Plant
from vllm_repro.journal.journal import Journal, read
from vllm_repro.journal.log_excerpts import PAGE_SIZES, ExcerptSizes, read_excerpts
from vllm_repro.journal.redact import Redactor
from vllm_repro.report.files import FORMATS, render
from vllm_repro.report.model import RunReport
from vllm_repro.report.script import no_script
from vllm_repro.report.summary import summary
from vllm_repro.scenario.catalogue import all_scenarios

SCRIPTED = next(scenario for scenario in all_scenarios() if not no_script(scenario))


def outputs(made: RunReport) -> Iterator[tuple[str, str]]:
    """Return every rendering of a report by name."""
    for form in FORMATS:
        yield form, render(made, form, SCRIPTED)
    yield "terminal", summary(made)


@pytest.mark.parametrize("group", range(12))
def test_each_kind_planted_where_texts_come_from(group: int) -> None:
    """Plant five or six at a time: rendering takes long, and longer texts would be cut."""
    assert list(leaks(outputs, PLANTS[group::12])) == []


@settings(max_examples=50)
@given(
    TEXT_FIELDS,
    st.sampled_from(PLANTS),
    st.sampled_from(["{0} {1}", "{1}", "{0}\n{1}\n", "{0} '{1}', x", "({1})", "{0}={1}"]),
)
def test_no_field_of_a_journal_lets_one_through(field: Field, plant: Plant, form: str) -> None:
    for name, text in outputs(planted(*field, lambda was: form.format(was, plant.written))):
        assert plant.hidden not in text, name


def test_the_plants_would_be_seen() -> None:
    """Check that the search can fail: without redaction the plants appear."""
    names = {name for name, _ in outputs(planted(*text_fields()[0], str))}
    assert names == {"md", "html", "json", "junit", "python", "terminal"}
    assert shown(outputs, "harmlesspayload", names) == names


@settings(max_examples=30)
@given(
    st.sampled_from([PAGE_SIZES, replace(PAGE_SIZES, whole=0)]),
    st.lists(st.sampled_from(PLANTS), min_size=1, max_size=6),
    st.integers(0, 40_000),
    st.integers(0, 40_000),
)
def test_no_part_of_a_log_lets_one_through(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: ExcerptSizes,
    plants: list[Plant],
    before: int,
    after: int,
) -> None:
    """Place log windows anywhere, also inside a key."""
    folder = tmp_path_factory.mktemp("log")
    middle = "\n".join(plant.written for plant in plants)
    filling = "x" * (before // 2) + " " + "y\n" * (before // 4)
    text = (
        f"{middle}\n{filling}\n{middle} ERROR {middle}\n{'z ' * after}\nAssertionError:"
        f" {middle}\n{'w' * after}\n{middle}"
    )
    (folder / "a.log").write_text(text, encoding="utf-8")
    log = read_excerpts(folder, "a.log", Redactor(), "AssertionError", sizes)
    assert log is not None
    for plant in plants:
        assert all(plant.hidden not in one.text for one in log.excerpts)


def test_the_journal_keeps_a_marker_in_the_place_of_a_secret(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        for plant in SECRETS.values():
            journal.write(
                "answer",
                error=plant.written,
                deep={"argv": ["vllm", plant.written], "path": "/home/me/x"},
            )
    lines = (tmp_path / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    for plant, line, entry in zip(
        SECRETS.values(), lines, read(tmp_path / "journal.jsonl").entries, strict=True
    ):
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


def test_a_host_and_a_user_have_the_names_in_the_journal() -> None:
    recording, place, way = next(
        field for field in text_fields() if field[2] == ("trigger", "evidence", 0)
    )
    entries = list(recording.entries)
    entries[0] = replace(
        entries[0], fields={**entries[0].fields, "hosts": ["quietname"], "users": ["jane"]}
    )
    made = planted(
        replace(recording, entries=tuple(entries)),
        place,
        way,
        lambda was: f"{was} on quietname in /mnt/jane",
    )
    assert all("quietname" not in text and "/mnt/jane" not in text for _, text in outputs(made))
