"""Where the marks of a chart stand: from figures to coordinates of an SVG. Pure; templates draw them.

Coordinates are units of the SVG's view box, in which a letter of a label is about seven wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_repro.report.timeline import Asked, Timeline
from vllm_repro.report.wording import cut, seconds

__all__ = ["Bar", "Chart", "Row", "Tick", "chunk_chart", "interval_chart", "timeline_chart"]

_WIDTH, _LEFT, _RIGHT = 1000, 190, 16
_ROW, _TOP = 22, 24
_LABEL = 25  # letters
_MOST_REQUESTS, _MOST_CHUNKS = 16, 48


@dataclass(frozen=True)
class Tick:
    x: float
    text: str


@dataclass(frozen=True)
class Bar:
    """From x on, as wide as `width`; a dot where that is None. tone: a class of the style."""

    x: float
    width: float | None
    tone: str


@dataclass(frozen=True)
class Row:
    """`text` stands at `text_x`, to its left where `before`."""

    label: str
    y: float
    bars: tuple[Bar, ...]
    text: str
    text_x: float
    before: bool = False


@dataclass(frozen=True)
class Chart:
    """rule: where a vertical line stands, with its meaning; None for none."""

    width: int
    height: int
    left: int
    ticks: tuple[Tick, ...]
    rows: tuple[Row, ...]
    rule: Tick | None = None


class _Scale:
    def __init__(self, low: float, high: float, right: float = _RIGHT) -> None:
        self.low, self.high = low, high if high > low else low + 1
        self._room = _WIDTH - _LEFT - right

    def at(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        return round(_LEFT + (inside - self.low) / (self.high - self.low) * self._room, 1)

    def ticks(self) -> list[float]:
        """Eight or so round figures."""
        rough = (self.high - self.low) / 8
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(magnitude * one for one in (1, 2, 5, 10) if magnitude * one >= rough)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def timeline_chart(of: Timeline) -> Chart:
    """From the moment that it was ready, or from its launch, to the last sign; each request and each channel a row."""
    last = max(
        [span.end_s for span in of.spans] + [moment.at_s for moment in of.moments if moment.lane != "end"],
        default=of.end_s,
    )
    first = 0.0 if of.ready_s is None or last - of.ready_s < 1e-3 else of.ready_s
    margin = (last - first) * 0.03
    scale = _Scale(first, last + margin)
    death = of.death_s
    rows: list[Row] = []

    def row(label: str, bars: Sequence[Bar], text: str, start: float, end: float) -> None:
        before = end > _LEFT + (_WIDTH - _LEFT) * 0.6
        rows.append(
            Row(
                cut(label, _LABEL),
                _TOP + _ROW * len(rows),
                tuple(bars),
                text,
                round(start - 8 if before else end + 8, 1),
                before,
            )
        )

    if of.ready_s is None:
        end = scale.at(last if death is None else death)
        row("boot", [Bar(scale.at(0), max(end - scale.at(0), 2), "warn")], "never ready", scale.at(0), end)
    else:
        row(
            "boot",
            [Bar(scale.at(of.ready_s), None, "dull")],
            f"ready, {_took(of.ready_s)} after launch",
            *[scale.at(of.ready_s)] * 2,
        )
    for span in of.spans[:_MOST_REQUESTS]:
        tone = {True: "good", False: "bad", None: "warn"}[span.ok]
        x, end = scale.at(span.start_s), scale.at(span.end_s)
        text = f"{span.result}, {_took(span.end_s - span.start_s)}"
        row(span.name, [Bar(x, max(end - x, 2), tone)], text, x, max(end, x + 2))
    if (more := len(of.spans) - _MOST_REQUESTS) > 0:
        x, end = scale.at(min(span.start_s for span in of.spans)), scale.at(max(span.end_s for span in of.spans))
        row(f"{more:,} more requests", [Bar(x, max(end - x, 2), "dull")], "listed in requests.jsonl", x, end)
    told = {moment.text for moment in of.moments if moment.sign}
    for moment in of.moments:
        if moment.lane in ("end", "ready") or (moment.lane == "exit" and moment.text in told):
            continue  # what a channel told already
        x = scale.at(moment.at_s)
        tone = "bad" if moment.decisive else "warn" if moment.sign else "dull"
        row(moment.lane, [Bar(x, None, tone)], _when(moment.at_s, death if moment.sign else None), x, x)
    ticks = tuple(Tick(scale.at(at), f"{at:g} s") for at in (round(tick, 9) for tick in scale.ticks()))
    rule = Tick(scale.at(death), "first sign") if death is not None else None
    return _chart(rows, ticks, rule)


def _chart(rows: Sequence[Row], ticks: tuple[Tick, ...], rule: Tick | None) -> Chart:
    """As high as its rows."""
    return Chart(_WIDTH, _TOP + _ROW * len(rows) + 4, _LEFT, ticks, tuple(rows), rule)


def _took(span_s: float) -> str:
    return f"{span_s * 1000:.0f} ms" if span_s < 1 else seconds(span_s)


def _when(at_s: float, death_s: float | None) -> str:
    if death_s is None:
        return f"at {at_s:.2f} s"
    late = at_s - death_s
    return f"first, at {at_s:.2f} s" if late == 0 else f"{'+' if late > 0 else '−'}{_took(abs(late))}"


def chunk_chart(asked: Sequence[Asked], batch: int) -> Chart:
    """Each prompt as long as it is, cut where the batch size cuts it; what the prefix cache had is told apart."""
    scale = _Scale(0, max([batch, *(one.tokens for one in asked)]) * 1.02, right=230)
    rows = []
    for number, one in enumerate(asked):
        at = one.cached
        bars = [Bar(scale.at(0), scale.at(one.cached) - scale.at(0), "cached")] if one.cached else []
        if len(one.chunks) <= _MOST_CHUNKS:
            for chunk in one.chunks:
                bars.append(
                    Bar(scale.at(at), max(scale.at(at + chunk) - scale.at(at) - 2, 1), "more" if at else "first")
                )
                at += chunk
            text = " + ".join(map(str, one.chunks)) if len(one.chunks) <= 3 else f"{len(one.chunks)} chunks of {batch}"
        else:
            bars.append(Bar(scale.at(at), scale.at(one.tokens) - scale.at(at), "more"))
            text = f"{len(one.chunks)} chunks of {batch}"
        if one.cached:
            text = f"{one.cached} cached, {text}"
        rows.append(Row(cut(one.name, _LABEL), _TOP + _ROW * number, tuple(bars), text, scale.at(one.tokens) + 8))
    ticks = tuple(Tick(scale.at(at), f"{at:,.0f}") for at in scale.ticks())
    return _chart(rows, ticks, Tick(scale.at(batch), f"a step takes {batch}"))


def interval_chart(rows: Sequence[tuple[str, float, float, float, str]], rule: float | None = None) -> Chart:
    """rows: label, low, middle, high, and the figures in words. rule: a value to hold them against, such as 1 for ratios."""
    values = [value for _, low, _, high, _ in rows for value in (low, high)] + ([rule] if rule is not None else [])
    least, most = min(values), max(values)
    margin = (most - least) * 0.08 or abs(most) * 0.05 or 1
    scale = _Scale(least - margin, most + margin, right=290)
    made = []
    for number, (label, low, middle, high, text) in enumerate(rows):
        x, end = scale.at(low), scale.at(high)
        bars = (Bar(x, max(end - x, 1), "dull"), Bar(scale.at(middle), None, "ink"))
        made.append(Row(cut(label, _LABEL), _TOP + _ROW * number, bars, text, _WIDTH - 280))
    ticks = tuple(Tick(scale.at(at), f"{round(at, 9):g}") for at in scale.ticks())
    return _chart(made, ticks, Tick(scale.at(rule), "") if rule is not None else None)
