"""Reports of runs that repeat an interrupted boot: the first one is shown and not counted."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.report_examples import REHEARSAL
from vllm_repro.journal.journal import Entry, Recording, read
from vllm_repro.report.build import report_of
from vllm_repro.report.files import render
from vllm_repro.report.summary import summary
from vllm_repro.report.tables import arms_table

WHOLE = read(REHEARSAL / "journal.jsonl")


def resumed(*, outcome: str, sent: bool) -> Iterator[Entry]:
    """Yield the example's run with its first boot repeated.

    outcome: of the first one. sent: whether it had sent a request.
    """
    first = next(WHOLE.of("trial-started"))
    ended = next(entry for entry in WHOLE.of("trial-ended") if entry["arm"] == first["arm"])

    def changed(entry: Entry, **fields: object) -> Entry:
        return replace(entry, fields={**entry.fields, **fields})

    for entry in WHOLE.entries:
        if entry is first:
            yield entry
            if sent:
                yield changed(next(WHOLE.of("request-sent")), name="interrupted")
            yield changed(ended, outcome=outcome, death=None, why="a signal, or a full disk")
            if outcome == "cancelled":
                yield replace(WHOLE.entries[-1], t=entry.t, fields={"interrupted": "SIGINT"})
                yield replace(WHOLE.entries[0], t=entry.t, event="run-resumed")
        repeated = entry.get("arm") == first["arm"] and entry.get("trial") is not None
        yield changed(entry, trial=2) if repeated else entry


@pytest.mark.parametrize(
    ("outcome", "sent"), [("cancelled", False), ("cancelled", True), ("infra", True)]
)
def test_a_repeated_boot_is_shown_and_not_counted(outcome: str, sent: bool) -> None:
    made = report_of(Recording(tuple(resumed(outcome=outcome, sent=sent)), cut=False), REHEARSAL)
    arm = made.arms[0]
    assert [trial.outcome for trial in arm.trials] == [outcome, "crash"]
    assert arm.counted.outcomes == ("crash",)
    assert arm.requests == report_of(WHOLE, REHEARSAL).arms[0].requests != ()
    assert [row[-2] for row in arms_table(made).rows if row[0] == "reported"] == [
        f"{outcome}, repeated",
        "crash, match",
    ]
    first, second = [line for line in summary(made).splitlines() if line.startswith("reported ")]
    assert (first.endswith(f"{outcome}, repeated"), second.endswith("crash, match")) == (True, True)
    root = ET.fromstring(render(made, "junit"))
    assert next((one.get("name"), one.find("error")) for one in root.iter("testcase")) == (
        "reported",
        None,
    )
