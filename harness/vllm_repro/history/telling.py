"""The account in words: for the terminal, and as JSON. Pure."""

from __future__ import annotations

from datetime import date
from typing import Any

from vllm_repro.evidence import facts_of
from vllm_repro.history.account import Account, News
from vllm_repro.history.life import Life, Lived
from vllm_repro.history.trend import JUDGED, Change, Series, Suspect, latest_of
from vllm_repro.report.wording import columns, many

__all__ = ["as_json", "life_text", "lone_text", "summary", "suspect_text", "terminal"]

SIMULATED = "REHEARSAL: an engine of our own. It shows the history at work and says nothing about vLLM."
_NOTHING = "nothing changed"


def _host_word(host: str, hardware: str) -> str:
    return f"{host} ({hardware})" if hardware else host


def evidence_word(evidence: str) -> str:
    """What stands beside every claim that is not about a GPU."""
    return facts_of(evidence).mark


def life_text(life: Lived) -> str:
    """What the state rests on: `23 of 60 died (flaky); quiet for 2 boots, 19 in a row would be a fix`."""
    if not life.boots:
        return "declared good, never seen to die here" if life.life is Life.CLOSED else "no death seen here"
    text = f"{life.crashed} of {life.boots} {life.did}" + (" (flaky)" if life.flaky else "")
    if life.life.good:
        return f"{text} until then; {life.streak} quiet in a row made it a fix"
    quiet = f"{life.streak} quiet since; " if life.streak else ""
    return f"{text}; {quiet}{life.needed} quiet boots in a row would be a fix"


def suspect_text(suspect: Suspect, of: Account) -> str:
    hardware = of.hosts.get(suspect.host, "")
    goes_on = suspect.last == of.nights[-1]
    nights = f"{'since' if goes_on else 'from'} {suspect.since:%Y-%m-%d}" + (
        "" if goes_on else f" to {suspect.last:%Y-%m-%d}"
    )
    with_whom = "there is no other host to compare with" if suspect.alone else "the other hosts did not"
    return (
        f"host {_host_word(suspect.host, hardware)}: all of its {suspect.moved} series moved together, "
        f"{_away(suspect.ratio)} {suspect.direction} {nights}, and {with_whom}; look at the host before any arm"
    )


def lone_text(change: Change, of: Account) -> str:
    series = change.series
    hardware = of.hosts.get(series.host, "")
    return (
        f"{series.scenario}, {series.arm}: {_away(change.ratio)} {change.direction} since {change.since:%Y-%m-%d} on host "
        f"{_host_word(series.host, hardware)} alone; another host of the same hardware did not follow, so it is not called"
    )


def _away(ratio: float) -> str:
    return f"{abs(ratio - 1):.1%}"


def terminal(of: Account) -> str:
    """The whole of what `vllm-repro history` prints."""
    if not of.nights:
        return "no run is in the history yet"
    lines = [summary(of)]
    if of.simulated:
        lines.insert(0, SIMULATED)
    if of.since is None:
        lines += ["", "There is no earlier night to compare with."]
    else:
        lines += ["", f"since the night of {of.since:%Y-%m-%d}:"]
        lines += [f"  {_news_line(news)}" for news in of.news] or [f"  {_NOTHING}"]
    lines += [f"  SUSPECT {suspect_text(one, of)}" for one in of.suspects]
    lines += [f"  not called: {lone_text(one, of)}" for one in of.lone]
    nights = ["".join(cell.mark for cell in of.rows.get((life.scenario, life.evidence), ())) for life in of.lives]
    rows = [("scenario", "evidence", "life", "since", f"last {many(len(of.shown), 'night')}", "rests on")]
    for life, letters in zip(of.lives, nights, strict=True):
        rows.append(
            (
                life.scenario,
                life.evidence.upper() if life.evidence != "gpu" else "gpu",
                life.life,
                f"{life.since:%Y-%m-%d}",
                letters,
                life_text(life),
            )
        )
    lines += ["", *columns(rows, (32, 9, 17, 10, 60, 80))]
    lines += _speeds(of)
    return "\n".join(lines)


def summary(of: Account) -> str:
    """`840 runs, 70 nights …; last night 12 runs: 11 as expected, 0 surprises, 1 undecided`."""
    surprises = sum(row.expected is False for row in of.tonight)
    undecided = sum(row.expected is None for row in of.tonight)
    return (
        f"{many(of.runs, 'run')}, {many(len(of.nights), 'night')} from {of.nights[0]:%Y-%m-%d} to {of.nights[-1]:%Y-%m-%d}, "
        f"{many(len(of.hosts), 'host')}; last night {many(len(of.tonight), 'run')}: "
        f"{len(of.tonight) - surprises - undecided} as expected, {many(surprises, 'surprise')}, {undecided} undecided"
    )


def _news_line(news: News) -> str:
    word = evidence_word(news.evidence)
    return f"{news.kind.upper() if news.kind.call else news.kind}: {news.scenario}{f' ({word})' if word else ''}: {news.text}"


def _speeds(of: Account) -> list[str]:
    """A row an arm and load, a column a host: the newest night's median, and the least and the most of the nights shown."""
    series = latest_of(of.trends, tuple({life.scenario for life in of.lives}))
    loads = dict.fromkeys((one.scenario, one.arm, one.point) for one in series)
    if not loads:
        return []
    rows: list[tuple[str, ...]] = [("output tok/s, and the range of those nights", "load", *of.hosts)]
    for scenario, arm, point in loads:
        cells = {
            one.host: _speed(one, of) for one in series if (one.scenario, one.arm, one.point) == (scenario, arm, point)
        }
        rows.append((f"{scenario}, {arm}", str(point), *(cells.get(host, "-") for host in of.hosts)))
    return ["", *columns(rows, (48, 36, *[24] * len(of.hosts)))]


def _speed(one: Series, of: Account) -> str:
    medians = [seen.median for seen in of.trends.series[one] if seen.night in of.shown]
    return f"{medians[-1]:,.0f} ({min(medians):,.0f} to {max(medians):,.0f})" if medians else "-"


def as_json(of: Account) -> dict[str, Any]:
    """Dates as `2026-11-22`, ratios as new over old, speeds in output tokens a second; `runs` are folders below the reports."""
    scenarios = tuple({life.scenario for life in of.lives})
    return {
        "schema": 1,
        "rehearsal": of.simulated,
        "nights": [_day(night) for night in of.nights],
        "since": of.since and _day(of.since),
        "runs": of.runs,
        "hosts": of.hosts,
        "news": [
            {
                "kind": news.kind.value,
                "call": news.kind.call,
                "night": _day(news.night),
                "scenario": news.scenario,
                "evidence": news.evidence,
                "text": news.text,
                "run": news.run or None,
            }
            for news in of.news
        ],
        "suspects": [_suspect(one) for one in of.suspects],
        "not_called": [_change(one) for one in of.lone],
        "scenarios": [
            {
                "scenario": life.scenario,
                "evidence": life.evidence,
                "life": life.life.value,
                "since": _day(life.since),
                "k": life.crashed,
                "n": life.boots,
                "quiet": life.streak,
                "needed": life.needed,
                "flaky": life.flaky,
                "steps": [
                    {"night": _day(step.night), "was": step.was, "life": step.life, "why": step.why, "run": step.run}
                    for step in life.steps
                ],
                "nights": [
                    {"night": _day(cell.night), "mark": cell.mark, "surprise": cell.surprise, "runs": list(cell.runs)}
                    for cell in of.rows.get((life.scenario, life.evidence), ())
                ],
            }
            for life in of.lives
        ],
        "throughput": [_series(one, of) for one in latest_of(of.trends, scenarios)],
    }


def _day(night: date) -> str:
    return f"{night:%Y-%m-%d}"


def _suspect(one: Suspect) -> dict[str, Any]:
    return {
        "host": one.host,
        "direction": one.direction.value,
        "since": _day(one.since),
        "last": _day(one.last),
        "ratio": one.ratio,
        "series": one.moved,
        "alone": one.alone,
    }


def _named(one: Series) -> dict[str, Any]:
    return {
        "scenario": one.scenario,
        "arm": one.arm,
        "prompt": one.point.prompt,
        "output": one.point.output,
        "concurrency": one.point.concurrency,
        "host": one.host,
    }


def _change(one: Change) -> dict[str, Any]:
    return {
        **_named(one.series),
        "direction": one.direction.value,
        "since": _day(one.since),
        "ratio": one.ratio,
        "reference": {"median": one.reference, "low": one.low, "high": one.high, "nights": one.nights},
        "relative_to_host": one.relative,
        "same_vllm": one.same_vllm,
    }


def _series(one: Series, of: Account) -> dict[str, Any]:
    return {
        **_named(one),
        "quantity": JUDGED,
        "nights": [
            {"night": _day(seen.night), "median": seen.median, "low": seen.low, "high": seen.high, "n": seen.n}
            for seen in of.trends.series[one]
        ],
        "changes": [_change(change) for change in of.trends.changes if change.series == one],
    }
