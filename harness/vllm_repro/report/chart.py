"""Layout of the timeline chart: seconds in, SVG coordinates out. `templates/chart.html` draws it.

The chart has three columns that never overlap: names, marks, details. A letter is at most `_LETTER` units wide.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_repro.report.format import seconds, truncate
from vllm_repro.report.timeline import Moment, Timeline

__all__ = ["Chart", "ChartRow", "timeline_chart"]

_WIDTH, _LEFT, _RIGHT = 1000, 190, 710
_TOP, _ROW = 24, 22
_LETTER = 7
_MOST_SPANS, _MOST_MOMENTS = 16, 24
_SPAN_TONES = {True: "good", False: "bad", None: "warn"}


@dataclass(frozen=True, kw_only=True)
class ChartRow:
    """One line of the chart: name, mark and detail. width: of a bar from `x`, None for a dot. tone: a CSS class."""

    name: str
    y: float
    x: float
    width: float | None
    tone: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart in units of the SVG's view box. death_x: of the first decisive sign, None if there is none."""

    width: int = _WIDTH
    height: int
    name_x: int = _LEFT - 12
    detail_x: int = _RIGHT + 12
    rows: tuple[ChartRow, ...]
    death_x: float | None


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

    rows: list[ChartRow] = []

    def add(name: str, start_s: float, end_s: float | None, tone: str, detail: str) -> None:
        row = ChartRow(
            name=truncate(name, (_LEFT - 12) // _LETTER),
            y=_TOP + _ROW * len(rows),
            x=x(start_s),
            width=None if end_s is None else max(round(x(end_s) - x(start_s), 1), 2.0),
            tone=tone,
            detail=truncate(detail, (_WIDTH - _RIGHT - 12) // _LETTER),
        )
        rows.append(row)

    death = timeline.death_s
    if ready is None:
        add("boot", 0, last if death is None else death, "warn", "never ready")
    else:
        add("boot", ready, None, "dull", f"ready after {_duration(ready)}")
    for span in timeline.spans[:_MOST_SPANS]:
        detail = f"{span.result}, {_duration(span.end_s - span.start_s)}"
        add(span.name, span.start_s, span.end_s, _SPAN_TONES[span.ok], detail)
    if more := timeline.spans[_MOST_SPANS:]:
        begin, end = min(span.start_s for span in more), max(span.end_s for span in more)
        add(f"{len(more):,} more requests", begin, end, "dull", "listed in requests.jsonl")
    for moment in shown[:_MOST_MOMENTS]:
        tone = "bad" if moment.decisive else "warn" if moment.sign else "dull"
        add(moment.lane, moment.at_s, None, tone, _moment_detail(moment, death))
    return Chart(height=_TOP + _ROW * len(rows) + 4, rows=tuple(rows), death_x=None if death is None else x(death))


def _moment_detail(moment: Moment, death_s: float | None) -> str:
    if death_s is None or not moment.sign:
        return f"at {moment.at_s:.2f} s"
    late = moment.at_s - death_s
    return f"first, at {moment.at_s:.2f} s" if late == 0 else f"{'+' if late > 0 else '−'}{_duration(abs(late))}"


def _duration(value_s: float) -> str:
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else seconds(value_s)
