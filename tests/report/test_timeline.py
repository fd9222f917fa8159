from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests import report_examples as examples
from tests.report_examples import report
from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.journal.log_excerpts import Keep, LogPieces, Piece
from vllm_repro.report.chart import Chart, chunk_chart, interval_chart, timeline_chart
from vllm_repro.report.logview import LogView, view
from vllm_repro.report.timeline import Asked, Timeline, timelines

DIED = report(examples.DIED)


def of(*entries: tuple[float, str, dict[str, Any]], arm: str = "a") -> Timeline:
    started = Entry(100.0, "trial-started", {"arm": arm, "trial": 1})
    made = [Entry(100 + at, event, {"arm": arm, "trial": 1, **fields}) for at, event, fields in entries]
    return timelines(Recording((started, *made), cut=True))[arm, 1]


def answer(name: str, took: float | None = None, status: int = 200) -> dict[str, Any]:
    return {"name": name, "status": status, "error": None, "finish_reason": "stop", "took_s": took}


def test_a_death_in_the_order_of_its_channels() -> None:
    found = DIED.timelines["reported", 1]
    assert [moment.lane for moment in found.moments if moment.sign] == [
        "log",
        "stream",
        "health",
        "engine-process",
        "process",
    ]
    assert found.death_s is not None
    assert found.ready_s is not None
    assert found.ready_s < found.death_s < found.end_s
    assert [(span.name, span.ok) for span in found.spans] == [("short chat", True), ("long chat", False)]
    assert found.batch == 4096


def test_signs_belong_to_the_trial_that_was_open() -> None:
    assert [moment.lane for moment in DIED.timelines["eager", 1].moments] == ["ready", "canary", "end"]


def test_requests_of_one_name_that_overtake_each_other_keep_their_own_times() -> None:
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


def inside(chart: Chart) -> None:
    for row in chart.rows:
        assert 0 <= row.y <= chart.height
        assert 0 <= row.text_x <= chart.width
        for bar in row.bars:
            assert 0 <= bar.x <= chart.width
            assert bar.x + (bar.width or 0) <= chart.width + 2
    assert 1 <= len(chart.ticks) <= 12
    assert [tick.x for tick in chart.ticks] == sorted(tick.x for tick in chart.ticks)


TIME = st.floats(0, 1e6)


@given(st.lists(st.tuples(TIME, TIME)), st.lists(st.tuples(TIME, st.booleans())), st.none() | TIME)
def test_a_timeline_stays_in_its_frame(
    spans: list[tuple[float, float]], signs: list[tuple[float, bool]], ready: float | None
) -> None:
    entries: list[tuple[float, str, dict[str, Any]]] = []
    for number, (start, took) in enumerate(spans):
        entries.append((start, "request-sent", {"name": f"r{number}"}))
        entries.append((start + took, "answer", answer(f"r{number}", took)))
    entries += [(at, "sign", {"channel": "log", "detail": "x", "decisive": decisive}) for at, decisive in signs]
    if ready is not None:
        entries.append((ready, "ready", {"version": "1"}))
    inside(timeline_chart(of(*sorted(entries, key=lambda entry: entry[0]))))


@given(
    st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(0, 1 << 20)), min_size=1, max_size=8),
    st.integers(1, 1 << 16),
)
def test_chunks_stay_in_their_frame(prompts: list[tuple[int, int]], batch: int) -> None:
    asked = []
    for number, (new, cached) in enumerate(prompts):
        full, rest = divmod(new, batch)
        asked.append(Asked(f"p{number}", new + cached, cached, (batch,) * full + ((rest,) if rest else ())))
    chart = chunk_chart(asked, batch)
    inside(chart)
    assert all(len(row.bars) < 60 for row in chart.rows)


@given(st.lists(st.tuples(*[st.floats(1e-3, 1e6)] * 3).map(sorted), min_size=1, max_size=8), st.none() | st.just(1.0))
def test_intervals_stay_in_their_frame(values: list[list[float]], rule: float | None) -> None:
    inside(
        interval_chart(
            [(f"arm {at}", low, middle, high, "words") for at, (low, middle, high) in enumerate(values)], rule
        )
    )


def seen(*texts: str, root: str | None = None, before: int = 0) -> LogView:
    pieces = tuple(Piece(text, before if at else 0, Keep.START, 1) for at, text in enumerate(texts))
    return view(LogPieces("logs/a.log", sum(map(len, texts)), pieces), root)


def kinds(found: LogView) -> dict[str, str]:
    return {mark.kind: mark.text for stretch in found.stretches for mark in stretch.marks if mark.kind}


def test_a_log_keeps_each_of_its_lines_in_order() -> None:
    lines = [f"line {number}" for number in range(300)]
    found = seen("\n".join(lines))
    shown = "\n".join(mark.text for stretch in found.stretches for mark in stretch.marks)
    assert shown.split("\n") == lines
    assert [stretch.folded for stretch in found.stretches] == ["284 lines", ""]


def test_the_first_error_and_the_root_traceback_are_marked_and_not_folded() -> None:
    boot = "INFO boots\n" * 100
    trace = "Traceback (most recent call last):\n  File x\nValueError: why"
    found = seen(
        f"{boot}ERROR first\n{'INFO goes on' + chr(10)}{'INFO x' + chr(10)}" + boot + trace + "\n" + boot,
        root="ValueError",
    )
    assert kinds(found) == {"error": "ERROR first", "root": trace}
    assert all(not stretch.folded for stretch in found.stretches for mark in stretch.marks if mark.kind)
    assert found.stretches[0].folded.endswith("before the first error")
    assert found.error
    assert found.root


def test_what_is_left_out_is_a_line_of_its_own_and_no_error() -> None:
    found = seen("begin\n", "end\n", before=12_345)
    assert kinds(found) == {"gap": "[… 12,345 bytes left out: logs/a.log has them …]"}
    assert found.left_out == 12_345
    assert not found.error


def test_it_ends_with_the_outcome_that_the_report_has() -> None:
    wrong = report(examples.WRONG)
    for arm in wrong.arms:
        for trial in arm.trials:
            (end,) = (moment for moment in wrong.timelines[arm.name, trial.number].moments if moment.lane == "end")
            assert end.text == trial.outcome
    assert wrong.arms[0].trials[0].outcome == "wrong-output"
