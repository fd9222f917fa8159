from __future__ import annotations

import csv
import dataclasses
import io
import json
from datetime import UTC, date, timedelta, timezone

import pytest
from msgspec.structs import replace

from tests.golden_files import assert_golden
from tests.nights.made import FIRST, row
from tests.nights.simulated import FIXED, LOSSY, NOTICE, Weeks
from tests.report_examples import REHEARSAL
from vllm_repro.host.host_id import hardware
from vllm_repro.journal.journal import Recording, read
from vllm_repro.report.build import report_of
from vllm_repro.report.runs import Run, run_of
from vllm_repro.verdict.verdict import Expected, Standing, Verdict
from vllm_repro_nights.bug_state import BugState
from vllm_repro_nights.nights import Mark, night_of
from vllm_repro_nights.page import page
from vllm_repro_nights.summary import NewsKind, Summary, summarize
from vllm_repro_nights.text import as_csv, as_json, terminal


def summary(pairs: list[tuple[date, Run]], nights: int = 1) -> Summary:
    return summarize([made for _, made in pairs], UTC, nights=nights)


@pytest.mark.parametrize(
    ("started", "night"),
    [
        ("2026-11-21T17:59:59Z", date(2026, 11, 21)),
        ("2026-11-21T18:00:00Z", date(2026, 11, 22)),
        ("2026-11-22T03:45:16Z", date(2026, 11, 22)),
        ("2026-12-31T23:00:00Z", date(2027, 1, 1)),
    ],
)
def test_a_night_is_named_for_its_morning(started: str, night: date) -> None:
    assert night_of(started, UTC) == night


def test_a_night_is_one_by_the_clocks_of_its_place() -> None:
    california = timezone(timedelta(hours=-8))
    assert night_of("2026-11-22T01:00:00Z", UTC) == night_of("2026-11-22T03:00:00Z", UTC)
    assert night_of("2026-11-22T01:59:59Z", california) == date(2026, 11, 21)
    assert night_of("2026-11-22T02:00:00Z", california) == date(2026, 11, 22)


def test_each_kind_of_news_comes_once() -> None:
    nights = [row(night, 1, 1) for night in range(10)] + [row(10, 0, 9)]
    (fix,) = summary(nights).news
    assert (fix.kind, fix.kind.call, fix.run) == (NewsKind.FIX, True, nights[-1][1].id)
    assert summary([*nights, row(11, 0, 1)]).news == ()
    (regressed,) = summary([*nights, row(11, 1, 1)]).news
    assert regressed.kind is NewsKind.REGRESSED
    # Over more nights it is the end that counts.
    assert [news.kind for news in summary([*nights, row(11, 0, 1)], nights=3).news] == [NewsKind.FIX]


def test_a_declared_fix_is_no_call() -> None:
    """A bisection boots a release with the bug, and then one that is declared good."""
    rows = [
        row(0, 1, 1, version="0.23.0", standing=Standing.BAD),
        row(1, 0, 1, version="0.24.0", standing=Standing.GOOD),
    ]
    (news,) = summary(rows).news
    assert (news.kind, news.text) == (NewsKind.STATE, "closed (was reproduces): 0.24.0 is declared good, and lived")


def test_the_first_night_has_nothing_to_be_compared_with() -> None:
    found = summary([row(0, 1, 1)])
    assert (found.since, found.news) == (None, ())
    assert "no earlier night" in terminal(found)
    assert terminal(summary([])) == "no run is in the history yet"


def test_one_of_a_thing_is_not_many() -> None:
    words = terminal(summarize([row(0, 1, 1)[1]], UTC))
    assert "1 run, 1 night from" in words
    assert "last night 1 run: 1 as expected, 0 surprises, 0 undecided" in words
    assert "last 1 night " in words


def test_what_did_not_run_is_said() -> None:
    rows = [row(0, 1, 1), row(0, 1, 1, scenario="other"), row(1, 1, 1)]
    (news,) = summary(rows).news
    assert (news.kind, news.scenario) == (NewsKind.MISSING, "other")


def test_another_death_is_news_after_nights_without_one() -> None:
    def changed(night: int) -> tuple[date, Run]:
        when, made = row(night, 0, 0)
        return when, replace(made, verdict=Verdict.CHANGED, because="hang, and not of this bug")

    rows = [row(night, 1, 1) for night in range(5)] + [changed(5)]
    assert [news.kind for news in summary(rows).news] == [NewsKind.OTHER_FAILURE]
    assert summary([*rows, changed(6)]).news == ()


def test_a_night_of_several_runs_shows_the_worst() -> None:
    rows = [row(0, 0, 1), row(0, 1, 1, hour=3), row(0, 0, 0, hour=4)]
    ((cell,),) = summary(rows).rows.values()
    assert (cell.mark, cell.mixed, cell.runs[0]) == (Mark.REPRODUCES, True, rows[1][1].id)
    ((cell,),) = summary([row(0, 1, 1, standing=Standing.GOOD)]).rows.values()
    assert cell.mark is Mark.REGRESSED


@pytest.mark.parametrize(
    "verdict", [Verdict.QUIET, Verdict.REPRODUCES, Verdict.REGRESSED, Verdict.FIXED, Verdict.CHANGED]
)
def test_controls_and_patched_arms_say_nothing_of_the_bug(verdict: Verdict) -> None:
    died = int(verdict in (Verdict.REPRODUCES, Verdict.REGRESSED))
    night, made = row(0, died, 1)
    made = replace(made, verdict=verdict)
    ((cell,),) = summary([(night, made)]).rows.values()
    assert cell.mark is not Mark.UNDECIDED
    for changed in ({"patched": True}, {"expected": Expected.LIVES}):
        arms = tuple(replace(one, **changed) for one in made.arms)
        ((cell,),) = summary([(night, replace(made, arms=arms))]).rows.values()
        assert cell.mark is Mark.UNDECIDED


def test_kinds_of_evidence_are_never_mixed() -> None:
    rows = [row(night, 1, 1, evidence="lab") for night in range(3)] + [row(3, 0, 50, evidence="rehearsal")]
    found = summary(rows)
    assert {bug.evidence: bug.state for bug in found.bugs} == {"lab": BugState.REPRODUCES, "rehearsal": BugState.OPEN}
    assert "LAB" in terminal(found)
    assert "REHEARSAL" in terminal(found)
    assert not terminal(found).startswith("REHEARSAL")
    assert terminal(summary(rows[3:])).startswith("REHEARSAL")


def test_one_scenario_alone() -> None:
    found = summarize(list(Weeks(0).rows()), UTC, nights=30, scenarios=(LOSSY,))
    assert {bug.scenario for bug in found.bugs} == {LOSSY}
    assert [news.kind for news in found.news] == [NewsKind.SLOWER]


def test_a_table_of_all_runs() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(list(Weeks(0, nights=1).rows()), UTC))))
    assert len(rows) == 2 * 4 * 3
    first = rows[0]
    assert (first["night"], first["scenario"], first["name"]) == ("2026-09-01", FIXED, "reported")
    assert (first["crashed"], first["boots"], first["output_tok_s"]) == ("1", "1", "")
    assert float(rows[1]["output_tok_s"]) > 1000
    assert as_csv([], UTC).startswith("night,id,scenario,")


def test_ten_weeks_as_people_read_them() -> None:
    found = summarize(list(Weeks(0).rows()), UTC, nights=28)
    text = terminal(found)
    assert_golden("history.txt", f"{NOTICE}\n{text}\n", "nights")
    data = as_json(found)
    data["throughput"] = [{**one, "nights": dict(list(one["nights"].items())[-2:])} for one in data["throughput"][-1:]]
    data["scenarios"] = [{**one, "nights": one["nights"][-2:]} for one in data["scenarios"]]
    data["nights"] = data["nights"][-2:]
    data["simulated"] = NOTICE
    assert_golden("history.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n", "nights")
    # One night at a time: each call is news in exactly one of them.
    calls = []
    rows = [(night_of(made.started_at, UTC), made) for made in Weeks(0).rows()]
    for number in range(42, 60):  # from before the loss to after the fix
        seen = [made for night, made in rows if night <= FIRST + timedelta(days=number)]
        calls += [(news.kind, news.scenario) for news in summarize(seen, UTC).news if news.kind.call]
    assert sorted(calls) == [(NewsKind.FIX, FIXED), (NewsKind.SLOWER, LOSSY)]


def test_only_the_id_and_hardware_of_a_host_are_kept() -> None:
    """A journal holds the host name and kernel; no row does."""
    first, *others = read(REHEARSAL / "journal.jsonl").entries
    machine = {**first["machine"], "os": "Linux 6.1 of secretbox"}
    head = dataclasses.replace(
        first, fields={**first.fields, "hosts": ["secretbox"], "host": "a1b2c3d4", "machine": machine}
    )
    ended = dataclasses.replace(others[-1], fields={**others[-1].fields, "interrupted": "SIGTERM on secretbox"})
    row = run_of(report_of(Recording((head, *others[:-1], ended), cut=False), REHEARSAL))
    found = summarize([row], UTC)
    assert found.hosts == {"a1b2c3d4": hardware(machine)}
    for text in (json.dumps(as_json(found)), terminal(found), page(found, "."), repr(row)):
        assert "secretbox" not in text
