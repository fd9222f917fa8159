"""Tables and lines of a run's arms and of its measurements, as plain text for any format.

In a rehearsal each figure stands beside the word REHEARSAL. Other figures that are no claim are not
shown.
"""

from __future__ import annotations

from collections.abc import Callable

from markupsafe import Markup

from vllm_repro.client.metrics import total
from vllm_repro.report.document import plain_text
from vllm_repro.report.format import columns, limited, plural, seconds
from vllm_repro.report.json_report import LoadJson
from vllm_repro.report.measurements import ArmSpeed, MeasureReport, PhaseCounters
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, counted_trials
from vllm_repro.report.text import Table, code
from vllm_repro.report.wording import boundary, engine_word, grouped, not_run_word, outcome_word
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.statistics import excluded_rate, lower_bound
from vllm_repro.verdict.throughput import MOST_LATE, MOST_LATE_P99, MOST_OFF, Figures, Ratio, Spread
from vllm_repro.verdict.verdict import Expected, Result
from vllm_repro_diagnosis.signature import How

_MOST_ANSWERS, _MOST_LINES = 12, 20


# ── arms
# ──────────────────────────────────────────────────────────────────────────────────────────────────

_Column = tuple[str, Callable[[ArmReport, TrialReport], str]]


def arms_table(report: RunReport) -> Table:
    """Return a row per trial, or per outcome for an arm of four trials or more.

    The second column is the outcome, the last one the result.
    """
    columns = _arm_columns(report)
    did = next((arm.expected.did for arm in report.arms if arm.expected.has_bug), Expected.DIES.did)
    rows: list[tuple[str, ...]] = []
    for arm in report.arms:
        for trial, times in grouped(arm.trials):
            words = (word(arm, trial) for _, word in columns)
            rows.append((arm.name, f"{outcome_word(trial)}{times}", *words, _result(arm, did)))
        if not arm.trials:
            rows.append((arm.name, not_run_word(arm), *("" for _ in columns), ""))
    return Table(("arm", "outcome", *(head for head, _ in columns), "result"), tuple(rows))


def _arm_columns(report: RunReport) -> list[_Column]:
    """Return (heading, function that makes a cell) of each column between outcome and result."""
    columns: list[_Column] = [
        ("boot", lambda _, trial: seconds(trial.boot_s)),
        ("boundary", lambda _, trial: boundary(trial)),
        ("answers", lambda _, trial: ", ".join(limited(trial.answers, _MOST_ANSWERS)) or "-"),
        ("engine", lambda _, trial: engine_word(trial)),
    ]
    if any(trial.output for arm in report.arms for trial in arm.trials):
        columns.append(("output", lambda _, trial: trial.output or "-"))
    measured = report.measured
    if measured is not None and measured.shown:
        point = measured.shown[0].figures.point
        first = {speed.arm: speed for speed in measured.shown if speed.figures.point == point}
        words = {
            arm: _spread(speed.figures.output_tok_s) + measured.mark for arm, speed in first.items()
        }
        ratios = {
            arm: _ratio(speed) + measured.mark
            for arm, speed in first.items()
            if speed.ratio is not None
        }
        columns += [
            (f"output tok/s at {point}", lambda arm, _: words.get(arm.name, "-")),
            (f"to {measured.baseline}", lambda arm, _: ratios.get(arm.name, "-")),
        ]
    return [*columns, ("rate, 95 % confidence", lambda arm, _: _rate(arm))]


def _rate(arm: ArmReport) -> str:
    """Return the bound on the bug's rate that the boots show: `at least 61%`, `-` for none."""
    if arm.k:
        return f"at least {lower_bound(arm.k, arm.n):.0%}"
    return f"at most {excluded_rate(arm.n):.0%}" if arm.result is Result.QUIET else "-"


def _result(arm: ArmReport, did: str) -> str:
    """Return an arm's result for the table: `reproduces (died in 3 of 3)`.

    did: the verb for the bug, such as `died`.
    """
    outcomes = {trial.outcome for trial in counted_trials(arm.trials)}
    if arm.expected is Expected.UNTRIGGERED and outcomes == {Outcome.UNTRIGGERED}:
        return f"{arm.result}, as declared: it proves nothing"
    return f"{arm.result} ({did} in {arm.k} of {arm.n})" if arm.n else f"{arm.result}"


# ── throughput
# ──────────────────────────────────────────────────────────────────────────────────────────────────


_TIMES: dict[str, Callable[[Figures], Spread | None]] = {
    "TTFT ms": lambda figures: figures.ttft_s,
    "TPOT ms": lambda figures: figures.tpot_s,
    "ITL ms": lambda figures: figures.itl_s,
    "ITL p99 ms": lambda figures: figures.itl_p99_s,
    "end to end ms": lambda figures: figures.e2e_s,
}


def price_sentences(report: RunReport) -> list[str]:
    """Return a sentence for each arm that avoids the bug: its speed beside the arm with the bug.

    Empty if there is no figure to show, or none of both arms.
    """
    measured = report.measured
    if measured is None or not measured.shown:
        return []
    arms = {arm.name: arm for arm in report.arms}
    ratios: dict[str, list[str]] = {}
    for speed in measured.shown:
        if speed.price is not None and arms[speed.arm].expected is Expected.LIVES:
            whose = (
                "" if speed.arm in ratios else f" of the tokens per second of {measured.bug_arm}"
            )
            ratios.setdefault(speed.arm, []).append(
                f"{_interval(speed.price)}{whose}"
                f" at {plural(speed.figures.point.concurrency, 'stream')}"
            )
    return [
        f"{arms[name].name_and_edits} {_avoids(arms[name], arms[measured.bug_arm])}gives"
        f" {' and '.join(words)} ({report.release}; {_boots(measured, name)};"
        f" {measured.label or 'REHEARSAL'})"
        for name, words in ratios.items()
    ]


def _avoids(arm: ArmReport, bug_arm: ArmReport) -> str:
    """Return `avoids it in 5 of 5 boots and `; empty if the run does not show this."""
    if not bug_arm.k or arm.k or not arm.n:
        return ""
    return f"avoids it in {arm.n} of {plural(arm.n, 'boot')} and "


def _boots(measured: MeasureReport, arm: str) -> str:
    """Return the number of boots behind an arm's price: `3 boots each`; with one, a caveat."""
    boots = min(speed.price.boots for speed in measured.shown if speed.arm == arm and speed.price)
    return f"{plural(boots, 'boot')} each{', too few to call it a difference' * (boots < 2)}"


def _interval(ratio: Ratio) -> str:
    """Return a ratio with its 95 % interval: `0.93 (0.90 to 0.96)`."""
    return f"{ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def load_sentences(report: RunReport) -> list[str]:
    """Return sentences on the arms that were booted once more for the throughput load alone."""
    return [
        f"{arm.name} has no figure from its trials, so it was booted once more for the load alone:"
        f" {load_word(arm.load)}"
        for arm in report.arms
        if arm.load is not None
    ]


def load_word(load: LoadJson) -> str:
    """Return how a boot for the throughput load alone ended: lived, or how the engine died."""
    if load.outcome.facts.alive:
        return "the engine lived"
    if load.death is None:
        return f"{load.outcome}: {load.why}"
    cause = f"{load.death.exception}: {load.death.message or ''}".rstrip(": ")
    is_bug = "" if load.death.signature is How.MATCH else "not "
    return f"the engine died of the load, {is_bug}as in the bug: {cause}"


def throughput_table(measured: MeasureReport | None) -> Table | None:
    """Return a row per arm and load; None if there is no figure to show."""
    if measured is None or not measured.shown:
        return None
    rows = [
        (
            str(speed.figures.point),
            speed.arm + measured.mark,
            _spread(speed.figures.output_tok_s),
            _spread(speed.figures.req_s),
            *(_spread(times(speed.figures), 1000) for times in _TIMES.values()),
            (
                f"{100 * speed.figures.cpu.median:.0f} % CPU, late"
                f" {1000 * speed.figures.late_s.median:.1f} ms"
            ),
            f"{speed.figures.output_tok_s.n}, {speed.figures.boots}",
            _ratio(speed),
        )
        for speed in measured.shown
    ]
    heads = ("load", "arm", "output tok/s", "req/s", *_TIMES, "client", "rounds, boots")
    return Table((*heads, f"to {measured.baseline}"), tuple(rows))


def throughput_lead(report: RunReport) -> list[str]:
    """Return sentences without stops, to print above the throughput table, or instead of one.

    Empty if throughput was not measured.
    """
    measured = report.measured
    if measured is None:
        return []
    loads = load_sentences(report)
    if not measured.shown:
        none = (
            "What was measured is in journal.jsonl"
            if measured.withheld
            else "No arm has a figure: no load was sent and answered to its end"
        )
        return [none, *loads]
    label = [f"Figures of {measured.label}"] if measured.label else []
    return [*price_sentences(report), *loads, *label, *_doubts(measured)]


def _doubts(measured: MeasureReport) -> list[str]:
    """Return the limits of figures from random weights and fewer layers; empty without these."""
    doubts = []
    if " layers; " in measured.label:
        doubts.append("A ratio of fewer layers is no ratio of the whole model")
    if measured.experts and measured.label.startswith("random"):
        doubts.append(
            "Random weights spread the tokens almost evenly over the experts; real ones may not,"
            " and then the speed is another"
        )
    counted = total([phase.counted for phase in measured.counted.values()])
    if counted.draft_tokens and measured.label.startswith("random"):
        accepted = (counted.accepted_tokens or 0) / counted.draft_tokens
        doubts.append(
            f"With these random weights {100 * accepted:.0f} % of the draft tokens were accepted;"
            " with real ones it is another share, and so another speed"
        )
    return doubts


def throughput_notes(measured: MeasureReport, quote: Callable[[str], str] = str) -> list[str]:
    """Return notes below the throughput table: how to read it, then the limits of its figures.

    quote: formats the name of an arm, for example as Markdown code.
    """
    if not measured.shown:
        return []
    how = (
        "Median over rounds, with quartiles in brackets. A round sends the load's requests at"
        " once, with salted prompts of exact length and answers of a fixed length. Tokens are"
        " counted by `usage` and by the server's counters. Client: its share of a core, and how"
        " late its event loop was at most. Times come from rounds in which it was late for at most"
        f" {100 * MOST_LATE:g} % of the round, and the 99th percentile for at most"
        f" {100 * MOST_LATE_P99:g} %. A round counts if the client can have falsified its speed by"
        f" at most {100 * MOST_OFF:g} %. The ratio is output tokens per second over those of"
        f" {quote(measured.baseline)}, with its 95 % bootstrap interval."
    )
    once = any(speed.figures.boots < 2 for speed in measured.speeds)
    return [
        how,
        *(
            f"{quote(speed.arm)} has no times at {speed.figures.point}: the client was late in too"
            " many rounds."
            for speed in measured.shown
            if speed.figures.ttft_s is None
        ),
        *(
            "An arm was booted once: the interval does not cover differences between boots"
            " (`--trials`)."
            for _ in range(once)
        ),
    ]


def throughput_section(report: RunReport) -> str:
    """Return the throughput section of `report.md`; empty if it was not measured."""
    measured = report.measured
    if measured is None:
        return ""
    return Markup(
        plain_text(
            "throughput.md",
            measured=measured,
            lead=throughput_lead(report),
            notes=throughput_notes(measured, code),
            table=throughput_table(measured),
        )
    )


_SEEN: tuple[tuple[str, Callable[[PhaseCounters], str | None]], ...] = (
    ("output tokens", lambda phase: f"{phase.counted.generation_tokens:,}"),
    (
        "KV cache in use, at most",
        lambda phase: _round(phase.counted.kv_most and 100 * phase.counted.kv_most, " %", digits=1),
    ),
    ("preemptions", lambda phase: _round(phase.counted.preemptions)),
    (
        "prompt tokens from the prefix cache",
        lambda phase: _part_of(phase.counted.cache_hits, phase.counted.cache_queries),
    ),
    (
        "draft tokens accepted",
        lambda phase: _part_of(phase.counted.accepted_tokens, phase.counted.draft_tokens),
    ),
    ("hottest GPU", lambda phase: _round(phase.gpus.temperature_c, " °C") if phase.gpus else None),
    (
        "lowest GPU clock",
        lambda phase: _round(phase.gpus.clock_mhz, " MHz") if phase.gpus else None,
    ),
    (
        "slowed by its hardware",
        lambda phase: ("yes" if phase.gpus.slowed else "no") if phase.gpus else None,
    ),
)


def _round(value: float | None, unit: str = "", *, digits: int = 0) -> str | None:
    """Return a number with its unit, rounded to `digits` decimals; None stays None."""
    return None if value is None else f"{value:,.{digits}f}{unit}"


def _part_of(part: int | None, whole: int | None) -> str | None:
    """Return `3 of 5`; None if a number is not known or the whole is 0."""
    return f"{part:,} of {whole:,}" if part is not None and whole else None


def counters_table(measured: MeasureReport | None) -> Table | None:
    """Return a row per load and arm with counters of server and GPUs; None without counters."""
    sums = measured.counted if measured else {}
    known = [(head, word) for head, word in _SEEN if any(word(phase) for phase in sums.values())]
    rows = [
        (str(point), arm, *(word(phase) or "-" for _, word in known))
        for (point, arm), phase in sums.items()
    ]
    return Table(("load", "arm", *(head for head, _ in known)), tuple(rows)) if rows else None


def throughput_lines(report: RunReport) -> list[str]:
    """Return the throughput of a run as lines for the terminal; none if not measured."""
    measured = report.measured
    if measured is None:
        return []
    lines = [f"{measured.withheld}."] if measured.withheld else []
    lines += [f"{sentence}." for sentence in throughput_lead(report)]
    if table := throughput_table(measured):
        shown = [*map(table.heads.index, ("load", "arm", "output tok/s", "TTFT ms", "TPOT ms")), -1]
        rows = [tuple(row[column] for column in shown) for row in (table.heads, *table.rows)]
        lines += columns(rows, (40, 44, 28, 24, 24, 44))
    return ["", *lines, *limited(measured.stopped, _MOST_LINES)]


def _spread(spread: Spread | None, times: float = 1) -> str:
    """Return a median with its quartiles, multiplied by `times`: `12.3 (11.9 to 12.8)`."""
    if spread is None:
        return "-"
    low, middle, high = (
        _number(value * times) for value in (spread.low, spread.median, spread.high)
    )
    return f"{middle} ({low} to {high})"


def _number(value: float) -> str:
    """Return a number with three significant digits; from 100 on without decimals."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(speed: ArmSpeed) -> str:
    """Return the ratio to the baseline, its interval and its change; `-` without a ratio."""
    if speed.ratio is None:
        return "-"
    return f"{_interval(speed.ratio)}, {speed.ratio.change}"
