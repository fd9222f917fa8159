"""The timeline of a trial, and its chart."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests import report_examples as examples
from tests.report_examples import report
from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.report.chart import Chart, timeline_chart
from vllm_repro.report.timeline import Timeline, timelines

DIED = report(examples.DIED)


def of(*entries: tuple[float, str, dict[str, Any]]) -> Timeline:
    started = Entry(100.0, "trial-started", {"arm": "a", "trial": 1})
    made = [Entry(100 + at, event, {"arm": "a", "trial": 1, **fields}) for at, event, fields in entries]
    return timelines(Recording((started, *made), cut=True))["a", 1]


def answer(name: str, took: float | None = None) -> dict[str, Any]:
    return {"name": name, "status": 200, "error": None, "finish_reason": "stop", "took_s": took}


def test_the_channels_of_a_death_in_the_order_of_time() -> None:
    found = DIED.timelines["reported", 1]
    lanes = [moment.lane for moment in found.moments if moment.sign]
    assert lanes == ["log", "stream", "engine-process", "health", "process"]
    assert found.death_s is not None
    assert found.ready_s is not None
    assert found.ready_s < found.death_s < found.end_s
    assert [(span.name, span.ok) for span in found.spans] == [("short chat", True), ("long chat", False)]


def test_signs_belong_to_the_trial_that_was_open() -> None:
    assert [moment.lane for moment in DIED.timelines["eager", 1].moments] == ["ready", "canary", "end"]


def test_requests_of_one_name_that_overtake_each_other_keep_their_times() -> None:
    sent = {"name": "same", "prompt_tokens": 5}
    found = of(
        (1, "request-sent", sent),
        (2, "request-sent", sent),
        (4, "answer", answer("same", 2.0)),
        (9, "answer", answer("same", 8.0)),
    )
    assert [(span.start_s, span.end_s) for span in found.spans] == [(2.0, 4.0), (1.0, 9.0)]


def test_a_request_without_an_answer_lasts_to_the_end() -> None:
    found = of((1, "request-sent", {"name": "one"}), (7, "sign", {"channel": "log", "detail": "x", "decisive": True}))
    (span,) = found.spans
    assert (span.start_s, span.end_s, span.ok) == (1.0, 7.0, None)
    assert not found.ended
    assert found.death_s == 7.0


def test_it_ends_with_the_outcome_of_the_report() -> None:
    wrong = report(examples.WRONG)
    for arm in wrong.arms:
        for trial in arm.trials:
            (end,) = (moment for moment in wrong.timelines[arm.name, trial.number].moments if moment.lane == "end")
            assert end.text == trial.outcome
    assert wrong.arms[0].trials[0].outcome == "wrong-output"


LETTER = 7  # units, for the font of the page


def assert_readable(chart: Chart) -> None:
    """Every mark lies in its column, and no two labels overlap."""
    for row in chart.rows:
        assert chart.name_x - LETTER * len(row.name) >= 0
        assert chart.name_x < row.x
        assert row.x + (row.width or 0) < chart.detail_x + 3
        assert chart.detail_x + LETTER * len(row.detail) <= chart.width
    assert [row.y for row in chart.rows] == sorted({row.y for row in chart.rows})


TIME = st.floats(0, 1e6)


@given(st.lists(st.tuples(TIME, TIME)), st.lists(st.tuples(TIME, st.booleans())), st.none() | TIME)
def test_any_chart_is_readable(
    spans: list[tuple[float, float]], signs: list[tuple[float, bool]], ready: float | None
) -> None:
    entries: list[tuple[float, str, dict[str, Any]]] = []
    for number, (start, took) in enumerate(spans):
        entries.append((start, "request-sent", {"name": f"a request with a long name {number}"}))
        entries.append((start + took, "answer", answer(f"a request with a long name {number}", took)))
    entries += [(at, "sign", {"channel": "log", "detail": "x", "decisive": decisive}) for at, decisive in signs]
    if ready is not None:
        entries.append((ready, "ready", {"version": "1"}))
    assert_readable(timeline_chart(of(*sorted(entries, key=lambda entry: entry[0]))))
