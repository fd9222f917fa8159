"""The nightly page: a `Summary` as one HTML file that loads nothing from the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from vllm_repro.report.document import document, fragment
from vllm_repro.report.runs import Run
from vllm_repro_nights.nights import Cell, Mark
from vllm_repro_nights.summary import Summary
from vllm_repro_nights.text import SIMULATED, evidence_word, headline, speed_table, state_text

__all__ = ["page"]

_TEMPLATES = Path(__file__).parent / "templates"
_TONES = {
    **dict.fromkeys(("regressed", "slower", "other failure"), "bad"),
    **dict.fromkeys(("fix", "faster", "good on nightly", "good on a release", "closed"), "good"),
    **dict.fromkeys(("candidate fix", "not run", "reproduces"), "warn"),
}
"""Of a `NewsKind` or a `BugState`; any other is dull."""


_LISTED = 500
"""Most runs in the list of all."""


def page(
    of: Summary,
    way: str,
    notice: str = "",
    near: Mapping[str, str] | None = None,
    *,
    runs: Sequence[Run] = (),
    maps: Sequence[str] = (),
) -> str:
    """Return the page.

    way: link from it to the folder of all runs. notice: banner. near: links that replace those to some runs, by run.
    runs: to list, in the order of their start. maps: pages of version maps, relative to the folder of all runs.
    """
    replaced = near or {}

    def link(run: str) -> str:
        return quote(replaced.get(run, f"{way}/{run}/")) if run else ""

    body = fragment(
        "history.html",
        _TEMPLATES,
        of=of,
        summary=headline(of),
        banner=notice or (SIMULATED if of.simulated else ""),
        link=link,
        cell_words=_cell_words,
        evidence_word=evidence_word,
        state_text=state_text,
        tones=_TONES,
        marks=list(Mark),
        speeds=speed_table(of),
        runs=runs[: -_LISTED - 1 : -1],
        more_runs=max(0, len(runs) - _LISTED),
        maps=[(name, quote(f"{way}/{name}")) for name in maps],
    )
    title = f"Nights to {of.nights[-1]:%Y-%m-%d}" if of.nights else "Nights"
    return document(title=title, body=body, style=(_TEMPLATES / "history.css").read_text(encoding="utf-8"))


def _cell_words(cell: Cell) -> str:
    words = f"{cell.night:%Y-%m-%d}: {cell.mark.meaning}"
    if cell.mixed:
        words += ", and another run of that night something else"
    return words + ("; not as declared" if cell.surprise else "")
