"""What was measured after the workloads, as terminal and Markdown show it. Pure.

A figure of a rehearsal stands beside the word REHEARSAL wherever it stands; other figures that are no claim are not shown.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_repro.report.escape import cell, code
from vllm_repro.report.grid import Grid, table
from vllm_repro.report.measured import Measured, Row, Soaked
from vllm_repro.report.wording import columns, few
from vllm_repro.verdict.throughput import Spread

__all__ = [
    "ratio_words",
    "shown_rows",
    "soak_lines",
    "soak_section",
    "speed_grid",
    "speed_lines",
    "speed_notes",
    "speed_section",
    "spread_words",
]

_LINES = 20


def shown_rows(found: Measured | None, *, rehearsal: bool) -> tuple[Row, ...]:
    """The rows that a report may show: a rehearsal's, whose every figure is marked as one, and those that are a claim."""
    return found.rows if found is not None and (rehearsal or not found.withheld) else ()


def speed_section(found: Measured | None, *, rehearsal: bool) -> str:
    """Markdown; empty where no throughput was asked for."""
    if found is None or not found.baseline:
        return ""
    mark = " (REHEARSAL)" if rehearsal else ""
    parts = [f"## Throughput{mark}"]
    if found.withheld:
        parts.append(f"**{found.withheld}.**")
    if shown_rows(found, rehearsal=rehearsal):
        before, *after = speed_notes(found, rehearsal=rehearsal, quote=code)
        parts += [before, table(speed_grid(found, rehearsal=rehearsal)), *after]
    elif found.withheld:
        parts.append("What was measured is in `journal.jsonl`.")
    else:
        parts.append("No arm was measured: an engine that died, or never lived, has no throughput.")
    parts += ["\n".join(f"- {cell(text)}" for text in few(found.stopped, _LINES))] if found.stopped else []
    return "\n\n".join(parts)


def speed_notes(found: Measured, *, rehearsal: bool, quote: Callable[[str], str]) -> list[str]:
    """What the figures of the grid are, then what weakens them. quote: how the name of an arm is written."""
    notes = [
        (
            "Median over rounds, quartiles in brackets. A round is so many requests sent at once; its prompts are made to the exact "
            "length and salted, its answers have a fixed length, tokens are counted by `usage` and again by the server's counters. "
            "Times are of rounds in which the client was late by less than half of the time to the first token, and by a fifth of the "
            "round in all; the rates do not depend on that. "
            f"The ratio is that of output tokens a second to those of {quote(found.baseline)}, with its 95 % bootstrap interval."
        )
    ]
    if any(row.figures.boots < 2 for row in found.rows):
        notes.append("One boot of an arm: an interval does not hold what differs from boot to boot (`--trials`).")
    if found.drift:
        looks = [f"{quote(arm)} {number}: {value:.2f}" for (arm, number), value in sorted(found.drift.items())]
        again = ", ".join(few(looks, _LINES))
        mark = " (REHEARSAL)" if rehearsal else ""
        notes.append(f"The first load measured again at the end, over its first time{mark}: {again}.")
    return notes


def speed_grid(found: Measured, *, rehearsal: bool) -> Grid:
    """A row an arm at a load. Only where `shown_rows` has rows."""
    heads = (
        *("load", "arm", "output tok/s", "req/s", "TTFT ms", "TPOT ms", "ITL ms", "ITL p99 ms", "client late ms"),
        *("rounds, boots", f"to {found.baseline}"),
    )
    rows = []
    for row in found.rows:
        one = row.figures
        cells = (
            str(one.point),
            row.arm + (" (REHEARSAL)" if rehearsal else ""),
            spread_words(one.output_tok_s),
            spread_words(one.req_s),
            *(spread_words(spread, 1000) for spread in (one.ttft_s, one.tpot_s, one.itl_s, one.itl_p99_s, one.late_s)),
            f"{one.output_tok_s.n}, {one.boots}",
            ratio_words(row),
        )
        rows.append(cells)
    return Grid(heads, tuple(rows))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread_words(spread: Spread | None, times: float = 1) -> str:
    if spread is None:
        return "-"
    low, middle, high = (_number(value * times) for value in (spread.low, spread.median, spread.high))
    return f"{middle} ({low} to {high})"


def ratio_words(row: Row) -> str:
    if row.ratio is None:
        return "-"
    return f"{row.ratio.ratio:.2f} ({row.ratio.low:.2f} to {row.ratio.high:.2f}), {row.ratio.change}"


def speed_lines(found: Measured | None, *, rehearsal: bool) -> list[str]:
    """For the terminal."""
    if found is None:
        return []
    lines: list[str] = []
    if found.baseline:
        if found.withheld:
            lines.append(found.withheld + ".")
        if shown_rows(found, rehearsal=rehearsal):
            word = "REHEARSAL, " if rehearsal else ""
            rows = [("load", "arm", "output tok/s", "TTFT ms", "TPOT ms", f"to {found.baseline}")]
            for row in found.rows:
                one = row.figures
                speeds = (
                    spread_words(one.output_tok_s),
                    spread_words(one.ttft_s, 1000),
                    spread_words(one.tpot_s, 1000),
                )
                rows.append((str(one.point), word + row.arm, *speeds, ratio_words(row)))
            lines += columns(rows, (40, 30, 28, 24, 24, 44))
        elif not found.withheld:
            lines.append("No throughput: no arm's engine lived through its workload and the measurement.")
    lines += soak_lines(found)
    return ["", *lines, *few(found.stopped, _LINES)] if lines or found.stopped else []


def soak_section(found: Measured | None) -> str:
    """Markdown; empty where there was none."""
    lines = soak_lines(found)
    return "## Soak\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


def soak_lines(found: Measured | None) -> list[str]:
    return few([_soaked(one, figures=not found.withheld) for one in found.soaks], _LINES) if found is not None else []


def _soaked(one: Soaked, *, figures: bool) -> str:
    soak = one.soak
    spent = f"{soak.seconds:.0f} s" if soak.whole else f"ended after {soak.seconds:.0f} of {soak.asked:.0f} s"
    text = (
        f"{one.arm}, trial {one.trial}: soak of {spent}, {soak.requests:,} requests, {soak.errors} of them failed, "
        f"the engine restarted {soak.restarts} times"
    )
    if figures and soak.drift is not None:
        text += f"; output tokens a second in its last tenth {soak.drift:.2f} of those in its first"
    return text
