from __future__ import annotations

import dataclasses
import json
import re
from datetime import UTC, date, timedelta, timezone

import pytest
from msgspec.structs import replace

from tests.golden_files import assert_golden, missing
from tests.nights.made import FIRST, POINT, measured, row
from tests.report_examples import REHEARSAL
from vllm_repro.journal.journal import Recording, read
from vllm_repro.report.build import report_of
from vllm_repro.report.runs import Run, run_of
from vllm_repro.verdict.verdict import Expected, Standing, Verdict
from vllm_repro_nights.history import NIGHTS, History, history, night_of
from vllm_repro_nights.history_formats import as_json, change_lines, html_page, terminal

Rows = list[tuple[date, Run]]


def history_of(rows: Rows, last: int = 1) -> History:
    return history([run for _, run in rows], UTC, last=last)


def kinds(rows: Rows, last: int = 1) -> list[str]:
    return [change.kind for change in history_of(rows, last).changes]


@pytest.mark.parametrize(
    ("started", "zone", "night"),
    [
        ("2026-11-21T17:59:59Z", 0, date(2026, 11, 21)),
        ("2026-11-21T18:00:00Z", 0, date(2026, 11, 22)),
        ("2026-12-31T23:00:00Z", 0, date(2027, 1, 1)),
        ("2026-11-22T01:59:59Z", -8, date(2026, 11, 21)),
        ("2026-11-22T02:00:00Z", -8, date(2026, 11, 22)),
    ],
)
def test_a_night_is_named_for_its_morning(started: str, zone: int, night: date) -> None:
    assert night_of(started, timezone(timedelta(hours=zone))) == night


def test_each_change_comes_once() -> None:
    rows = [row(night, 1, 1) for night in range(10)] + [row(10, 0, 9)]
    (fix,) = history_of(rows).changes
    assert (fix.kind, fix.call, fix.run) == ("fixed", True, rows[-1][1].id)
    assert (kinds([*rows, row(11, 0, 1)]), kinds([*rows, row(11, 1, 1)])) == ([], ["regressed"])
    assert kinds([*rows, row(11, 0, 1)], last=3) == ["fixed"], "over more nights the end counts"


def test_a_declared_fix_is_no_claim() -> None:
    rows = [
        row(0, 1, 1, version="0.23.0", standing=Standing.BAD),
        row(1, 0, 1, version="0.24.0", standing=Standing.GOOD),
    ]
    (change,) = history_of(rows).changes
    assert (change.call, change.text) == (
        False,
        "fixed (was reproduces): 0.24.0 is declared good, and lived",
    )


def test_what_did_not_run_is_a_change() -> None:
    rows = [row(0, 1, 1), row(0, 1, 1, scenario="other"), row(1, 1, 1)]
    assert change_lines(history_of(rows)) == [
        "not run: other: it ran in the night of 2026-09-01, and not in the last one"
    ]


def test_the_first_night_has_nothing_to_be_compared_with() -> None:
    assert "no earlier night" in terminal(history_of([row(0, 1, 1)]))
    for text in (terminal(history_of([])), html_page(history_of([]), "reports")):
        assert "no run of these scenarios in the last night" in text


def test_the_table_has_the_last_14_nights() -> None:
    rows = [row(night, 1, 1) for night in range(20)]
    assert [cell.night for cell in history_of(rows).bugs[0].nights] == [
        when for when, _ in rows[-NIGHTS:]
    ]


def test_a_night_of_several_runs_shows_the_worst() -> None:
    rows = [row(0, 0, 1), row(0, 1, 1, hour=3), row(0, 0, 0, hour=4)]
    (cell,) = history_of(rows).bugs[0].nights
    assert (cell.result, cell.runs[0]) == ("reproduces", rows[1][1].id)
    (cell,) = history_of([row(0, 1, 1, standing=Standing.GOOD)]).bugs[0].nights
    assert cell.result == "regressed"


@pytest.mark.parametrize("verdict", [one for one in Verdict if one is not Verdict.INCONCLUSIVE])
def test_controls_and_patched_arms_alone_decide_nothing(verdict: Verdict) -> None:
    _, run = row(0, int(verdict in (Verdict.REPRODUCES, Verdict.REGRESSED)), 1)
    run = replace(run, verdict=verdict)
    assert history([run], UTC).bugs[0].nights[0].result == verdict
    for changed in ({"patched": True}, {"expected": Expected.LIVES}):
        arms = tuple(replace(arm, **changed) for arm in run.arms)
        assert history([replace(run, arms=arms)], UTC).bugs[0].nights[0].result == "inconclusive"


def test_bugs_that_no_run_decided_are_folded() -> None:
    nothing = replace(row(0, 0, 0, scenario="no-gpu-here")[1], infra=("no GPU",))
    shown = history([row(0, 1, 1)[1], nothing], UTC)
    assert terminal(shown).endswith("without a conclusive run: no-gpu-here (gpu)")
    assert re.search(
        r"<details><summary>1 without .*no-gpu-here \(gpu\)", html_page(shown, "reports")
    )
    failed = replace(nothing, verdict=Verdict.CHANGED)
    assert [bug.decided for bug in history([failed], UTC).bugs] == [True]


def test_kinds_of_evidence_are_never_mixed() -> None:
    rows = [row(night, 1, 1, evidence="lab") for night in range(3)] + [
        row(3, 0, 50, evidence="rehearsal")
    ]
    assert [bug.state.verdict for bug in history_of(rows).bugs] == ["reproduces", "quiet"]
    assert not terminal(history_of(rows)).startswith("REHEARSAL")
    assert terminal(history_of(rows[3:])).startswith("REHEARSAL: a simulated engine")
    page = html_page(history_of(rows[3:]), "reports")
    assert page.index("REHEARSAL: a simulated engine") < page.index("What changed")


def fortnight() -> Rows:
    """Return nights with a fix, a flaky bug and a loss of throughput."""
    rows = [row(night, 2 * (night < 12), 2, scenario="tq-chunked-prefill") for night in range(16)]
    rows += [row(night, night % 2, 1, scenario="sco-hybrid") for night in range(16)]
    rows += [
        measured(night, {"eager": 900.0 + night}, scenario="tq-prefix-hit") for night in (13, 15)
    ]
    rows += [row(15, 0, 0, scenario="dsv4-tp2", evidence="lab")]
    return sorted(rows, key=lambda pair: pair[1].started_at)


def test_the_terminal_shows_the_last_nights() -> None:
    assert_golden("history.txt", terminal(history_of(fortnight(), last=4)) + "\n", "nights")


def test_throughput_is_the_last_figure_and_the_one_before() -> None:
    (figure,) = history_of(fortnight()).throughput
    assert (figure.arm, figure.last, figure.before) == ("eager", 915.0, 913.0)
    assert (figure.night, figure.load) == (FIRST + timedelta(days=15), str(POINT))
    assert figure.label == "1 x NVIDIA H200, unknown weights"
    when, run = measured(1, {"eager": 1.0})
    edited = replace(run, arms=tuple(replace(arm, command="vllm serve --x") for arm in run.arms))
    other = history_of([measured(0, {"eager": 2.0}), (when, edited)]).throughput
    assert [figure.before for figure in other] == [
        None,
        None,
    ], "figures of other flags are not compared"
    assert history_of([(when, replace(run, evidence="lab"))]).throughput == ()


def test_json_has_what_the_terminal_has() -> None:
    data = as_json(history_of(fortnight(), last=4))
    assert (data["schema"], data["rehearsal"]) == (3, False)
    assert [(change["kind"], change["call"]) for change in data["changes"]] == [("fixed", True)]
    assert data["bugs"][1]["state"]["verdict"] == "reproduces"
    assert data["bugs"][1]["nights"][-1]["result"] == "reproduces"
    assert data["throughput"][0]["last"] == 915.0
    assert data["last_night"] == [run.id for run in history_of(fortnight()).last_night]


def test_the_page_links_runs_relative_to_itself() -> None:
    rows = fortnight()
    near = next(run.id for night, run in rows if night == rows[-1][0] and run.died)
    text = html_page(history_of(rows), "../reports", near={near: "copy/report.html"})
    assert (
        text.index("What changed since")
        < text.index("The last 14 nights")
        < text.index("Throughput<")
    )
    links = set(re.findall(r'href="([^"]*)"', text)) - {"#main"}
    assert "copy/report.html" in links
    others = links - {"copy/report.html"}
    assert others
    assert all(re.fullmatch(r"\.\./reports/[\w-]+/\w+-\w+/", link) for link in others)
    assert near not in text


def test_nothing_in_the_page_is_markup_of_others() -> None:
    runs = [run for _, run in (row(0, 1, 1), row(1, 0, 50, version="<script>alert(1)</script>"))]
    runs = [
        replace(run, id=f'x/"><b>{number}', scenario="<b>&amp;") for number, run in enumerate(runs)
    ]
    text = html_page(history(runs, UTC), "re ports")
    assert "<script>alert" not in text
    assert missing(text, "&lt;b&gt;&amp;amp;", 'href="re%20ports/x/%22%3E%3Cb%3E') == []
    assert not re.search(r"https?://", text)


def test_no_host_name_is_kept() -> None:
    """A journal holds the host name and kernel; no history does."""
    first, *others = read(REHEARSAL / "journal.jsonl").entries
    machine = {**first["machine"], "os": "Linux 6.1 of secretbox"}
    head = dataclasses.replace(
        first, fields={**first.fields, "hosts": ["secretbox"], "machine": machine}
    )
    fields = {**others[-1].fields, "interrupted": "SIGTERM on secretbox"}
    ended = dataclasses.replace(others[-1], fields=fields)
    run = run_of(report_of(Recording((head, *others[:-1], ended), cut=False), REHEARSAL))
    shown = history([run], UTC)
    for text in (json.dumps(as_json(shown)), terminal(shown), html_page(shown, "."), repr(run)):
        assert "secretbox" not in text
