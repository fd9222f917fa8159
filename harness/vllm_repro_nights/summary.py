"""Summary of the history: news since an earlier night, state of each bug, throughput of each arm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta, tzinfo
from enum import StrEnum

from vllm_repro.report.runs import Run
from vllm_repro.verdict.verdict import Verdict
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_nights.bug_state import BugHistory, BugState, bug_histories
from vllm_repro_nights.nights import Cell, cells, night_of
from vllm_repro_nights.throughput import Change, Direction, Series, newest, throughput

__all__ = ["News", "NewsKind", "Summary", "summarize"]

QUIET_FOR = 3
"""Another failure is news after so many nights without one."""
_SAME_CHANGE = timedelta(days=14)


class NewsKind(StrEnum):
    """Kinds of news, most important first."""

    REGRESSED = "regressed"
    FIX = "fix"
    SLOWER = "slower"
    FASTER = "faster"
    OTHER_FAILURE = "other failure"
    CANDIDATE = "candidate fix"
    STATE = "state"
    MISSING = "not run"

    @property
    def call(self) -> bool:
        """Return True for a claim about vLLM. The other kinds need a look by a person."""
        return self in (NewsKind.REGRESSED, NewsKind.FIX, NewsKind.SLOWER, NewsKind.FASTER)


@dataclass(frozen=True, kw_only=True)
class News:
    """One difference to the earlier night. run: the folder that shows it, or empty."""

    kind: NewsKind
    night: date
    scenario: str
    evidence: str
    text: str
    run: str = ""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """State of the history after its last night.

    nights: those with runs, oldest first. shown: nights of the table. since: the night that `news` compare with, None for the first.
    rows: a cell for each of `shown`, by scenario and evidence. throughput: the series to show. hosts: hardware by host.
    tonight: runs of the last night.
    """

    nights: tuple[date, ...]
    shown: tuple[date, ...]
    since: date | None
    news: tuple[News, ...]
    bugs: tuple[BugHistory, ...]
    rows: dict[tuple[str, str], tuple[Cell, ...]]
    throughput: tuple[Series, ...]
    hosts: dict[str, str]
    runs: int
    tonight: tuple[Run, ...]

    @property
    def simulated(self) -> bool:
        """Return True if every run is a rehearsal."""
        return bool(self.bugs) and all(bug.evidence == Evidence.REHEARSAL for bug in self.bugs)


def summarize(
    runs: Sequence[Run], zone: tzinfo | None, *, nights: int = 1, shown: int = 14, scenarios: Sequence[str] = ()
) -> Summary:
    """Return the summary of `runs`.

    zone: time zone of the nights (`night_of`). nights: number of last nights to compare with those before. shown: nights in the table.
    scenarios: keep only these, if any are named.
    """
    dated = [(night_of(row.started_at, zone), row) for row in runs]
    all_nights = tuple(sorted({night for night, _ in dated}))
    rows = [(night, row) for night, row in dated if not scenarios or row.scenario in scenarios]
    last = all_nights[-nights:]
    since = all_nights[-nights - 1] if len(all_nights) > nights else None
    window = all_nights[-max(shown, nights) :]
    bugs = bug_histories(rows)
    speeds = throughput(rows)
    news: list[News] = []
    if since is not None:
        news = [
            *_state_news(bugs, since),
            *_throughput_news(speeds, last),
            *_other_failures(rows, last, all_nights),
            *_missing(rows, since, last),
        ]
    order = list(NewsKind)
    return Summary(
        nights=all_nights,
        shown=window,
        since=since,
        news=tuple(sorted(news, key=lambda one: (order.index(one.kind), one.scenario, one.night))),
        bugs=tuple(bugs),
        rows=cells(rows, window),
        throughput=tuple(newest(speeds)),
        hosts=dict(sorted({row.host: row.hardware for _, row in dated}.items())),
        runs=len(rows),
        tonight=tuple(row for night, row in rows if last and night == last[-1]),
    )


def _state_news(bugs: Iterable[BugHistory], since: date) -> list[News]:
    found: list[News] = []
    for bug in bugs:
        was = bug.as_of(since)
        if bug.steps and bug.state is not was:
            step = bug.steps[-1]
            text = f"{bug.state} (was {was}): {step.why}"
            about = {"scenario": bug.scenario, "evidence": bug.evidence, "text": text, "run": step.run}
            found.append(News(kind=_kind(was, bug), night=step.night, **about))
    return found


def _kind(was: BugState, bug: BugHistory) -> NewsKind:
    now = bug.state
    if now is BugState.REGRESSED:
        return NewsKind.REGRESSED
    # A fix without boots behind it is declared, so it is known already.
    if now.good and not was.good and was is not BugState.OPEN and bug.boots:
        return NewsKind.FIX
    return NewsKind.CANDIDATE if now is BugState.CANDIDATE else NewsKind.STATE


def _throughput_news(series: Iterable[Series], last: Sequence[date]) -> list[News]:
    """Return one item per arm and direction, however many hosts and loads follow within two weeks."""
    found: dict[tuple[str, str, Direction, date], News] = {}
    followed: dict[tuple[str, str, Direction], list[tuple[Series, Change]]] = {}
    changes = [(one, change) for one in series for change in one.changes]
    for one, change in sorted(changes, key=lambda pair: pair[1].called):
        arm = (one.scenario, one.arm, change.direction)
        same = followed.setdefault(arm, [])
        if same and change.since - same[0][1].since > _SAME_CHANGE:
            same.clear()
        same.append((one, change))
        first = same[0][1].called
        if first in last:
            found[*arm, first] = News(
                kind=NewsKind(change.direction),
                night=first,
                scenario=one.scenario,
                evidence=Evidence.GPU,
                text=_change_text(same),
            )
    return list(found.values())


def _change_text(changes: Sequence[tuple[Series, Change]]) -> str:
    series, first = changes[0]
    hosts = sorted({one.host for one, _ in changes})
    return (
        f"{series.arm}: {first.words} on host {', '.join(hosts)}; "
        f"on {series.host} outside {first.low:,.0f} to {first.high:,.0f} tok/s, the limits from {first.nights} earlier nights "
        f"with median {first.reference:,.0f}"
    )


def _other_failures(rows: Sequence[tuple[date, Run]], last: Sequence[date], nights: Sequence[date]) -> list[News]:
    """Return failures that are not the bug, on a host that had none in the nights before."""
    failed = {(night, row.scenario, row.evidence, row.host) for night, row in rows if row.verdict is Verdict.CHANGED}
    found: list[News] = []
    for night, row in rows:
        if night in last and row.verdict is Verdict.CHANGED:
            place = nights.index(night)
            before = nights[max(0, place - QUIET_FOR) : place]
            if not any((then, row.scenario, row.evidence, row.host) in failed for then in before):
                about = {"scenario": row.scenario, "evidence": row.evidence, "text": row.because, "run": row.id}
                found.append(News(kind=NewsKind.OTHER_FAILURE, night=night, **about))
    return found


def _missing(rows: Sequence[tuple[date, Run]], since: date, last: Sequence[date]) -> list[News]:
    """Return what ran in the night `since` and not in the last one."""
    before = {(row.scenario, row.evidence) for night, row in rows if night == since}
    tonight = {(row.scenario, row.evidence) for night, row in rows if night == last[-1]}
    text = f"it ran in the night of {since}, and not in the last one"
    return [
        News(kind=NewsKind.MISSING, night=last[-1], scenario=scenario, evidence=evidence, text=text)
        for scenario, evidence in sorted(before - tonight)
    ]
