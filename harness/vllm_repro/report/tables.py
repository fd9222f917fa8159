"""Tables and lines of a run's arms and of its measurements, as plain text for any format.

In a rehearsal each figure stands beside the word REHEARSAL. Other figures that are no claim are not shown.
"""

from __future__ import annotations

from collections.abc import Callable

from markupsafe import Markup

from vllm_repro.report.document import plain_text
from vllm_repro.report.format import columns, limited, seconds
from vllm_repro.report.measurements import ArmSpeed, MeasureReport, PhaseCounters
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, counted_trials
from vllm_repro.report.text import Table, code
from vllm_repro.report.wording import boundary, engine_word, grouped, not_run_word, outcome_word
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.soak import Soak
from vllm_repro.verdict.statistics import excluded_rate, lower_bound
from vllm_repro.verdict.throughput import MOST_LATE, MOST_LATE_P99, MOST_OFF, Spread
from vllm_repro.verdict.verdict import Expected, Result

__all__ = [
    "arms_table",
    "counters_table",
    "soak_lines",
    "soak_section",
    "throughput_lines",
    "throughput_notes",
    "throughput_section",
    "throughput_table",
]

_MOST_ANSWERS, _MOST_LINES = 12, 20


# ── arms ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────

_Column = tuple[str, Callable[[ArmReport, TrialReport], str]]


def arms_table(report: RunReport) -> Table:
    """Return a row per trial, or per outcome for an arm of four trials or more. The last two columns are outcome and result."""
    columns = _arm_columns(report)
    did = next((arm.expected.did for arm in report.arms if arm.expected.has_bug), Expected.DIES.did)
    rows: list[tuple[str, ...]] = []
    for arm in report.arms:
        for trial, times in grouped(arm.trials):
            words = (word(arm, trial) for _, word in columns)
            rows.append((arm.name, *words, f"{outcome_word(trial)}{times}", _result(arm, did)))
        if not arm.trials:
            rows.append((arm.name, *("" for _ in columns), not_run_word(arm), ""))
    return Table(("arm", *(head for head, _ in columns), "outcome", "result"), tuple(rows))


def _arm_columns(report: RunReport) -> list[_Column]:
    columns: list[_Column] = [
        ("boot", lambda _, trial: seconds(trial.boot_s)),
        ("boundary", lambda _, trial: boundary(trial)),
        ("answers", lambda _, trial: ", ".join(limited(trial.answers, _MOST_ANSWERS)) or "-"),
        ("engine", lambda _, trial: engine_word(trial)),
    ]
    if any(trial.output for arm in report.arms for trial in arm.trials):
        columns.append(("output", lambda _, trial: trial.output or "-"))
    found = report.measured
    if found is not None and found.shown:
        point = found.shown[0].figures.point
        first = {speed.arm: speed for speed in found.shown if speed.figures.point == point}
        words = {arm: _spread(speed.figures.output_tok_s) + found.mark for arm, speed in first.items()}
        ratios = {arm: _ratio(speed) + found.mark for arm, speed in first.items() if speed.ratio is not None}
        columns.append((f"output tok/s at {point}", lambda arm, _: words.get(arm.name, "-")))
        columns.append((f"to {found.baseline}", lambda arm, _: ratios.get(arm.name, "-")))
    columns.append(("rate, 95 % confidence", lambda arm, _: _rate(arm)))
    return columns


def _rate(arm: ArmReport) -> str:
    """Return what the boots show about the rate of the bug."""
    if arm.k:
        return f"at least {lower_bound(arm.k, arm.n):.0%}"
    return f"at most {excluded_rate(arm.n):.0%}" if arm.result is Result.QUIET else "-"


def _result(arm: ArmReport, did: str) -> str:
    outcomes = {trial.outcome for trial in counted_trials(arm.trials)}
    if arm.expected is Expected.UNTRIGGERED and outcomes == {Outcome.UNTRIGGERED}:
        return f"{arm.result}, as declared: it proves nothing"
    return f"{arm.result} ({did} in {arm.k} of {arm.n})" if arm.n else f"{arm.result}"


# ── throughput ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def throughput_table(found: MeasureReport | None) -> Table | None:
    """Return a row per arm and load; None if there is no figure to show."""
    if found is None or not found.shown:
        return None
    with_goal = any(speed.figures.goodput_req_s for speed in found.shown)
    heads = (
        *(
            "load",
            "arm",
            "output tok/s",
            "req/s",
            *(["goodput req/s"] if with_goal else []),
            "TTFT ms",
            "TPOT ms",
            "ITL ms",
        ),
        *("ITL p99 ms", "end to end ms", "client", "rounds, boots", f"to {found.baseline}"),
    )
    rows = [
        (
            str(one.point),
            speed.arm + found.mark,
            _spread(one.output_tok_s),
            _spread(one.req_s),
            *([_spread(one.goodput_req_s)] if with_goal else []),
            *(_spread(spread, 1000) for spread in (one.ttft_s, one.tpot_s, one.itl_s, one.itl_p99_s, one.e2e_s)),
            f"{100 * one.cpu.median:.0f} % CPU, late {1000 * one.late_s.median:.1f} ms",
            f"{one.output_tok_s.n}, {one.boots}",
            _ratio(speed),
        )
        for speed in found.shown
        for one in [speed.figures]
    ]
    return Table(heads, tuple(rows))


def throughput_notes(found: MeasureReport, quote: Callable[[str], str] = str) -> list[str]:
    """Return how the table is to be read, then what weakens its figures. quote: writes the name of an arm."""
    if not found.shown:
        if found.withheld:
            return ["What was measured is in journal.jsonl."]
        return ["No arm was measured: its engine did not live through workload and measurement."]
    notes = [
        (
            "Median over rounds, with quartiles in brackets. A round sends the load's requests at once, or each when it is due at a stated "
            "rate, with salted prompts of exact length and answers of a fixed length. Tokens are counted by `usage` and by the server's "
            f"counters. Client: its share of a core, and how late its event loop was at most. Times come from rounds in which it was late "
            f"for at most {100 * MOST_LATE:g} % of the round, and the 99th percentile for at most {100 * MOST_LATE_P99:g} %. "
            f"A round counts if the client can have falsified its speed by at most {100 * MOST_OFF:g} %. "
            f"The ratio is output tokens per second over those of {quote(found.baseline)}, with its 95 % bootstrap interval; at a rate, "
            "which fixes these, it is the baseline's time to the end over that of the arm."
        )
    ]
    notes += [
        f"{quote(one.arm)} has no times at {one.figures.point}: the client was late in too many rounds."
        for one in found.shown
        if one.figures.ttft_s is None
    ]
    if any(speed.figures.boots < 2 for speed in found.speeds):
        notes.append("An arm was booted once: the interval does not cover differences between boots (`--trials`).")
    if found.drift:
        ratios = [f"{quote(arm)} {number}: {value:.2f}" for (arm, number), value in sorted(found.drift.items())]
        again = ", ".join(limited(ratios, _MOST_LINES))
        notes.append(f"The first load measured again at the end, over its first time{found.mark}: {again}.")
    return notes


def throughput_section(found: MeasureReport | None) -> str:
    """Return a section of Markdown; empty if no throughput was asked for."""
    if found is None or not found.baseline:
        return ""
    notes = throughput_notes(found, code)
    table = throughput_table(found)
    return Markup(plain_text("throughput.md", measured=found, notes=notes, table=table))


_SEEN: tuple[tuple[str, Callable[[PhaseCounters], str | None]], ...] = (
    ("output tokens", lambda one: f"{one.counted.generation_tokens:,}"),
    ("KV cache in use, at most", lambda one: _whole(one.counted.kv_most and 100 * one.counted.kv_most, " %", digits=1)),
    ("preemptions", lambda one: _whole(one.counted.preemptions)),
    ("prompt tokens from the prefix cache", lambda one: _of(one.counted.cache_hits, one.counted.cache_queries)),
    ("draft tokens accepted", lambda one: _of(one.counted.accepted_tokens, one.counted.draft_tokens)),
    ("hottest GPU", lambda one: _whole(one.gpus.temperature_c, " °C") if one.gpus else None),
    ("lowest GPU clock", lambda one: _whole(one.gpus.clock_mhz, " MHz") if one.gpus else None),
    ("slowed by its hardware", lambda one: ("yes" if one.gpus.slowed else "no") if one.gpus else None),
)


def _whole(value: float | None, unit: str = "", *, digits: int = 0) -> str | None:
    return None if value is None else f"{value:,.{digits}f}{unit}"


def _of(part: int | None, whole: int | None) -> str | None:
    return f"{part:,} of {whole:,}" if part is not None and whole else None


def counters_table(found: MeasureReport | None) -> Table | None:
    """Return a row per load and arm, with counts of the server and its cards; None without counts."""
    sums = found.counted if found else {}
    known = [(head, word) for head, word in _SEEN if any(word(one) for one in sums.values())]
    rows = [(str(point), arm, *(word(one) or "-" for _, word in known)) for (point, arm), one in sums.items()]
    return Table(("load", "arm", *(head for head, _ in known)), tuple(rows)) if rows else None


def throughput_lines(found: MeasureReport | None) -> list[str]:
    """Return throughput and soaks for the terminal."""
    if found is None:
        return []
    lines = [f"{found.withheld}."] if found.baseline and found.withheld else []
    if table := throughput_table(found):
        shown = [*map(table.heads.index, ("load", "arm", "output tok/s", "TTFT ms", "TPOT ms")), -1]
        rows = [tuple(row[column] for column in shown) for row in (table.heads, *table.rows)]
        lines += columns(rows, (40, 44, 28, 24, 24, 44))
    elif found.baseline and not found.withheld:
        lines += throughput_notes(found)
    lines += [*soak_lines(found), *limited(found.stopped, _MOST_LINES)]
    return ["", *lines] if lines else []


def _spread(spread: Spread | None, times: float = 1) -> str:
    if spread is None:
        return "-"
    low, middle, high = (_number(value * times) for value in (spread.low, spread.median, spread.high))
    return f"{middle} ({low} to {high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(speed: ArmSpeed) -> str:
    if speed.ratio is None:
        return "-"
    return f"{speed.ratio.ratio:.2f} ({speed.ratio.low:.2f} to {speed.ratio.high:.2f}), {speed.ratio.change}"


# ── soaks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def soak_section(found: MeasureReport | None) -> str:
    """Return a section of Markdown; empty if there was no soak."""
    lines = soak_lines(found)
    return Markup("## Soak\n\n" + "\n".join(f"- {line}" for line in lines)) if lines else ""


def soak_lines(found: MeasureReport | None) -> list[str]:
    """Return a sentence per soak."""
    if found is None:
        return []
    lines = [_soaked(arm, trial, soak, found.withheld) for (arm, trial), soak in found.soaks.items()]
    return limited(lines, _MOST_LINES)


def _soaked(arm: str, trial: int, soak: Soak, withheld: str) -> str:
    spent = f"{soak.seconds:.0f} s" if soak.whole else f"ended after {soak.seconds:.0f} of {soak.asked:.0f} s"
    text = (
        f"{arm}, trial {trial}: soak of {spent}, {soak.requests:,} requests, {soak.errors} of them failed, "
        f"the engine restarted {soak.restarts} times"
    )
    if soak.drift is not None and not withheld:
        text += f"; output tokens in its last tenth {soak.drift:.2f} of those in its first"
    return text
