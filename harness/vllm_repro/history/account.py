"""What the history says: the news of the last nights, where each bug stands, how fast each arm was. Pure: rows in, an `Account` out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, tzinfo
from enum import StrEnum

from vllm_repro.history.life import Life, Lived, lives
from vllm_repro.history.marks import Cell, cells
from vllm_repro.history.nights import night_of
from vllm_repro.history.rows import RunRow
from vllm_repro.history.trend import Call, Change, Suspect, Trends, trends
from vllm_repro.verdict.verdict import Verdict

__all__ = ["Account", "Kind", "News", "account"]

QUIET_FOR = 3
"""A scenario that dies of something else is news after so many nights without that."""


class Kind(StrEnum):
    REGRESSED = "regressed"
    FIX = "fix"
    SLOWER = "slower"
    FASTER = "faster"
    DIED_OTHERWISE = "died of something else"
    CANDIDATE = "candidate fix"
    LIFE = "life"
    MISSING = "not run"

    @property
    def call(self) -> bool:
        """Whether it claims something of vLLM; the others are to be looked at."""
        return self in (Kind.REGRESSED, Kind.FIX, Kind.SLOWER, Kind.FASTER)


@dataclass(frozen=True)
class News:
    """One thing that is other than the night before. run: the folder that shows it; empty where there is none."""

    kind: Kind
    night: date
    scenario: str
    evidence: str
    text: str
    run: str = ""


@dataclass(frozen=True)
class Account:
    """nights: those with runs, oldest first. since: the night that `news` and `suspects` are compared with; None where there is no earlier
    one. rows: by scenario and evidence, a cell for each of `shown`."""

    nights: tuple[date, ...]
    shown: tuple[date, ...]
    since: date | None
    news: tuple[News, ...]
    lives: tuple[Lived, ...]
    rows: dict[tuple[str, str], tuple[Cell, ...]]
    trends: Trends
    suspects: tuple[Suspect, ...]
    lone: tuple[Change, ...]
    runs: int
    tonight: tuple[RunRow, ...]

    @property
    def hosts(self) -> dict[str, str]:
        return dict(sorted(self.trends.hardware.items()))

    @property
    def simulated(self) -> bool:
        """Whether all of it is a rehearsal."""
        return bool(self.lives) and all(life.evidence == "rehearsal" for life in self.lives)


def account(
    runs: Sequence[RunRow], zone: tzinfo | None, *, nights: int = 1, shown: int = 14, scenarios: Sequence[str] = ()
) -> Account:
    """The account of `runs`.

    zone: whose clocks say what a night is (`night_of`). nights: how many of the last ones are compared with those before. shown: how many
    the table has. scenarios: only these are told of; hosts are judged by all, since one slow scenario is no slow host.
    """
    rows = [(night_of(row.started_at, zone), row) for row in runs]
    all_nights = tuple(sorted({night for night, _ in rows}))
    found = trends(rows)
    told = [(night, row) for night, row in rows if not scenarios or row.scenario in scenarios]
    last = all_nights[-nights:]
    since = all_nights[-nights - 1] if len(all_nights) > nights else None
    lived = lives(told)
    window = all_nights[-max(shown, nights) :]
    news: list[News] = []
    if since is not None:
        calls = [call for call in found.calls if not scenarios or call.scenario in scenarios]
        news = [
            *_lives_news(lived, since),
            *_calls_news(calls, last),
            *_otherwise(told, last, all_nights),
            *_missing(told, since, last),
        ]
    order = list(Kind)
    return Account(
        all_nights,
        window,
        since,
        tuple(sorted(news, key=lambda one: (order.index(one.kind), one.scenario, one.night))),
        tuple(lived),
        cells(told, window),
        found,
        tuple(one for one in found.suspects if last and one.last >= last[0] and one.called <= last[-1]),
        tuple(one for one in found.lone if one.called in last and (not scenarios or one.series.scenario in scenarios)),
        len(told),
        tuple(row for night, row in told if last and night == last[-1]),
    )


def _lives_news(lived: Iterable[Lived], since: date) -> list[News]:
    """Where each bug stands now, if that is elsewhere than it stood at the end of `since`."""
    found: list[News] = []
    for life in lived:
        was = life.as_of(since)
        if life.steps and life.life is not was:
            step = life.steps[-1]
            text = f"{life.life} (was {was}): {step.why}"
            found.append(News(_kind(was, life.life), step.night, life.scenario, life.evidence, text, step.run))
    return found


def _kind(was: Life, now: Life) -> Kind:
    if now is Life.REGRESSED:
        return Kind.REGRESSED
    if now.good and not was.good and was is not Life.OPEN:
        return Kind.FIX
    return Kind.CANDIDATE if now is Life.CANDIDATE else Kind.LIFE


def _calls_news(calls: Iterable[Call], last: Sequence[date]) -> list[News]:
    return [
        News(Kind(call.direction), call.called, call.scenario, "gpu", call_text(call))
        for call in calls
        if call.called in last
    ]


def call_text(call: Call) -> str:
    """`eager: 8.1% slower since 2026-10-16, on 3 hosts: …`, in words that say what it was held against."""
    shown = next((one for one in call.changes if not one.relative), call.changes[0])
    return (
        f"{call.arm}: {abs(call.ratio - 1):.1%} {call.direction} since {call.since:%Y-%m-%d}, on {_hosts(call)}; on {shown.series.host} "
        f"outside {shown.low:,.0f} to {shown.high:,.0f} tok/s, three times the spread of {shown.nights} earlier nights about "
        f"{shown.reference:,.0f}"
        + (" (as if the host were as fast as before)" if shown.relative else "")
        + ("; the release is the same as before, so it is not vLLM that changed" if shown.same_vllm else "")
    )


def _hosts(call: Call) -> str:
    return f"host {call.hosts[0]}" if len(call.hosts) == 1 else f"{len(call.hosts)} hosts"


def _otherwise(rows: Sequence[tuple[date, RunRow]], last: Sequence[date], nights: Sequence[date]) -> list[News]:
    """Scenarios that died of something else, and had not in the nights before."""
    found: list[News] = []
    for night, row in rows:
        if night in last and row.verdict is Verdict.CHANGED:
            place = nights.index(night)
            before = nights[max(0, place - QUIET_FOR) : place]
            key = (row.scenario, row.evidence, row.host)
            if not any(
                other.verdict is Verdict.CHANGED and (other.scenario, other.evidence, other.host) == key
                for then, other in rows
                if then in before
            ):
                found.append(News(Kind.DIED_OTHERWISE, night, row.scenario, row.evidence, row.because, row.id))
    return found


def _missing(rows: Sequence[tuple[date, RunRow]], since: date, last: Sequence[date]) -> list[News]:
    """What ran in the night before and not in the last one: nothing is known of it, which is not the same as nothing new."""
    if not last:
        return []
    before = {(row.scenario, row.evidence) for night, row in rows if night == since}
    tonight = {(row.scenario, row.evidence) for night, row in rows if night == last[-1]}
    return [
        News(
            Kind.MISSING,
            last[-1],
            scenario,
            evidence,
            f"it ran in the night of {since:%Y-%m-%d}, and not in the last one",
        )
        for scenario, evidence in sorted(before - tonight)
    ]
