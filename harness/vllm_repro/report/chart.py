"""Layout of the timeline chart: seconds in, SVG coordinates out. `templates/chart.html` draws it.

The chart has three columns that never overlap: names, marks, details. A letter is at most `_LETTER` units wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_repro.report.format import seconds, truncate
from vllm_repro.report.timeline import Moment, Span, Timeline

__all__ = ["Chart", "ChartMark", "ChartRow", "Tick", "timeline_chart"]

_WIDTH, _LEFT, _RIGHT = 1000, 190, 710
_TOP, _ROW = 24, 22
_LETTER = 7
_MOST_SPANS, _MOST_MOMENTS = 16, 24


@dataclass(frozen=True)
class Tick:
    """A vertical line at `x` with its label."""

    x: float
    label: str


@dataclass(frozen=True, kw_only=True)
class ChartMark:
    """A bar from `x`, `width` units wide, or a dot if `width` is None. tone: a CSS class."""

    x: float
    width: float | None
    tone: str


@dataclass(frozen=True, kw_only=True)
class ChartRow:
    """One line of the chart: name, mark and detail."""

    name: str
    y: float
    mark: ChartMark
    detail: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart in units of the SVG's view box. death: the line at the first decisive sign, if there is one."""

    width: int
    height: int
    name_x: int
    detail_x: int
    ticks: tuple[Tick, ...]
    rows: tuple[ChartRow, ...]
    death: Tick | None


def timeline_chart(timeline: Timeline) -> Chart:
    """Return the chart from readiness (or launch) to the last sign, with one row per request and per sign."""
    shown = [moment for moment in timeline.moments if moment.lane not in ("end", "ready")]
    last = max([*(span.end_s for span in timeline.spans), *(one.at_s for one in shown)], default=timeline.end_s)
    ready = timeline.ready_s
    first = 0.0 if ready is None or last - ready < 1e-3 else ready
    length = (last - first) * 1.03 or 1.0

    def x(at_s: float) -> float:
        share = min(max((at_s - first) / length, 0.0), 1.0)
        return round(_LEFT + share * (_RIGHT - _LEFT), 1)

    def bar(start_s: float, end_s: float, tone: str) -> ChartMark:
        return ChartMark(x=x(start_s), width=max(round(x(end_s) - x(start_s), 1), 2.0), tone=tone)

    def dot(at_s: float, tone: str) -> ChartMark:
        return ChartMark(x=x(at_s), width=None, tone=tone)

    death = timeline.death_s
    lines: list[tuple[str, ChartMark, str]] = []
    if ready is None:
        lines.append(("boot", bar(0, last if death is None else death, "warn"), "never ready"))
    else:
        lines.append(("boot", dot(ready, "dull"), f"ready after {_duration(ready)}"))
    for span in timeline.spans[:_MOST_SPANS]:
        lines.append((span.name, bar(span.start_s, span.end_s, _span_tone(span)), _span_detail(span)))
    if more := timeline.spans[_MOST_SPANS:]:
        mark = bar(min(span.start_s for span in more), max(span.end_s for span in more), "dull")
        lines.append((f"{len(more):,} more requests", mark, "listed in requests.jsonl"))
    for moment in shown[:_MOST_MOMENTS]:
        lines.append((moment.lane, dot(moment.at_s, _moment_tone(moment)), _moment_detail(moment, death)))
    return Chart(
        width=_WIDTH,
        height=_TOP + _ROW * len(lines) + 4,
        name_x=_LEFT - 12,
        detail_x=_RIGHT + 12,
        ticks=tuple(Tick(x(at), f"{at:g} s") for at in _ticks(first, first + length)),
        rows=tuple(
            ChartRow(
                name=truncate(name, (_LEFT - 12) // _LETTER),
                y=_TOP + _ROW * number,
                mark=mark,
                detail=truncate(detail, (_WIDTH - _RIGHT - 12) // _LETTER),
            )
            for number, (name, mark, detail) in enumerate(lines)
        ),
        death=None if death is None else Tick(x(death), "first sign"),
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return up to six round values from `low` to `high`."""
    rough = (high - low) / 5
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 9) for number in range(first, last + 1)]


def _span_tone(span: Span) -> str:
    return {True: "good", False: "bad", None: "warn"}[span.ok]


def _span_detail(span: Span) -> str:
    return f"{span.result}, {_duration(span.end_s - span.start_s)}"


def _moment_tone(moment: Moment) -> str:
    if moment.decisive:
        return "bad"
    return "warn" if moment.sign else "dull"


def _moment_detail(moment: Moment, death_s: float | None) -> str:
    if death_s is None or not moment.sign:
        return f"at {moment.at_s:.2f} s"
    late = moment.at_s - death_s
    return f"first, at {moment.at_s:.2f} s" if late == 0 else f"{'+' if late > 0 else '−'}{_duration(abs(late))}"


def _duration(value_s: float) -> str:
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else seconds(value_s)
