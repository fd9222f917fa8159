"""Reports of resumed runs: an interrupted boot is shown and not counted."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.report_examples import REHEARSAL
from vllm_repro.journal.journal import Entry, Recording, read
from vllm_repro.report.build import report_of
from vllm_repro.report.files import render
from vllm_repro.report.model import RunReport
from vllm_repro.report.tables import arms_table
from vllm_repro.running.terminal import summary

WHOLE = REHEARSAL / "journal.jsonl"


def gone_on_with(*, sent: bool) -> list[Entry]:
    """Return the example's run with its first boot interrupted and repeated. sent: whether it had sent a request."""
    entries = list(read(WHOLE).entries)
    first = next(entry for entry in entries if entry.event == "trial-started")
    ended = next(entry for entry in entries if entry.event == "trial-ended" and entry["arm"] == first["arm"])
    asked = next(entry for entry in entries if entry.event == "request-sent")

    def changed(entry: Entry, **fields: object) -> Entry:
        return replace(entry, fields={**entry.fields, **fields})

    def all_of_it() -> Iterator[Entry]:
        for entry in entries:
            if entry is first:
                yield entry
                if sent:
                    yield changed(asked, name="cut short")
                yield changed(ended, outcome="cancelled", death=None, why="the run was interrupted")
                yield replace(entries[-1], t=entry.t, fields={"interrupted": "SIGINT"})
                yield replace(entries[0], t=entry.t, event="run-resumed")
            again = entry.get("arm") == first["arm"] and entry.get("trial") is not None
            yield changed(entry, trial=2) if again else entry

    return list(all_of_it())


def reported(entries: list[Entry]) -> RunReport:
    return report_of(Recording(tuple(entries), cut=False), WHOLE.parent)


@pytest.mark.parametrize("sent", [False, True])
def test_its_requests_are_those_of_the_boot_that_was_not_cut(sent: bool) -> None:
    arm, whole = reported(gone_on_with(sent=sent)).arms[0], report_of(read(WHOLE), WHOLE.parent).arms[0]
    assert [trial.outcome for trial in arm.trials] == ["cancelled", "crash"]
    assert arm.requests == whole.requests
    assert arm.requests


def test_two_rows_of_one_arm_say_which_was_made_again() -> None:
    made = reported(gone_on_with(sent=True))
    assert [row[-2] for row in arms_table(made).rows if row[0] == "reported"] == [
        "cancelled, repeated",
        "crash, match",
    ]
    first, second = [line for line in summary(made).splitlines() if line.startswith("reported ")]
    assert (first.endswith("cancelled, repeated"), second.endswith("crash, match")) == (True, True)


def test_its_junit_has_no_error() -> None:
    root = ET.fromstring(render(reported(gone_on_with(sent=True)), "junit"))
    assert next((one.get("name"), one.find("error")) for one in root.iter("testcase")) == ("reported", None)
