"""A log as a page shows it: what leads to the first error folded away, the error and the root traceback marked, the end in sight. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby

from vllm_repro.journal.log_excerpts import ALARM, LogPieces
from vllm_repro.report.escape import printable

__all__ = ["LogView", "Mark", "Stretch", "view"]

_BEFORE, _AFTER, _END = 8, 24, 16  # lines that stay in sight: before an error, after it, at the end
_LEAST_FOLDED = 12
_TRACEBACK = 400  # lines that a traceback is looked back for


@dataclass(frozen=True)
class Mark:
    """A run of lines that are alike. kind: `error` for the first error, `root` for the root traceback, `gap` for a note on what is left
    out, else empty."""

    kind: str
    text: str


@dataclass(frozen=True)
class Stretch:
    """folded: what stands in place of the lines while they are folded; empty where they are in sight."""

    folded: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class LogView:
    """name: relative to the run's folder. size: of the whole log, left_out: of what is not shown; in bytes. Lines that were cut for their
    length count as shown. error, root: whether one is marked."""

    name: str
    size: int
    left_out: int
    stretches: tuple[Stretch, ...]
    error: bool
    root: bool


def view(log: LogPieces, root: str | None) -> LogView:
    """root: the exception that the engine died of, as for `read_pieces`."""
    kinds, lines, left_out = _lines(log)
    error = next((at for at, line in enumerate(lines) if kinds[at] == "" and ALARM.search(line)), None)
    traceback = _traceback(lines, root)
    if traceback is not None:
        kinds[traceback[0] : traceback[1]] = [kind or "root" for kind in kinds[traceback[0] : traceback[1]]]
    if error is not None and not kinds[error]:
        kinds[error] = "error"
    open_ = _in_sight(len(lines), error, traceback)
    stretches = []
    at = 0
    for shown, run in groupby(open_):
        count = len(list(run))
        fold = not shown and count >= _LEAST_FOLDED
        marks = tuple(_marks(kinds[at : at + count], lines[at : at + count]))
        stretches.append(Stretch(_summary(at, count, error) if fold else "", marks))
        at += count
    return LogView(log.name, log.size, left_out, tuple(stretches), "error" in kinds, "root" in kinds)


def _lines(log: LogPieces) -> tuple[list[str], list[str], int]:
    """Kinds and lines of all pieces, with a note for each gap; and the bytes of the gaps."""
    kinds: list[str] = []
    lines: list[str] = []
    at = 0
    for piece in log.pieces:
        if piece.before:
            kinds.append("gap")
            lines.append(f"[… {piece.before:,} bytes left out: {log.name} has them …]")
        new = printable(piece.text).removesuffix("\n").split("\n")
        kinds += [""] * len(new)
        lines += new
        at += piece.before
    return kinds, lines, at


def _traceback(lines: list[str], root: str | None) -> tuple[int, int] | None:
    """Lines of the root traceback, the one with the exception the last of them."""
    if not root:
        return None
    named = re.compile(r"(?<![\w'])" + re.escape(root) + r"(?=:|\s*$)")
    last = next((at for at, line in enumerate(lines) if named.search(line)), None)
    if last is None:
        return None
    for first in range(last, max(-1, last - _TRACEBACK), -1):
        if "Traceback (most recent call last)" in lines[first]:
            return first, last + 1
    return last, last + 1


def _in_sight(count: int, error: int | None, traceback: tuple[int, int] | None) -> list[bool]:
    shown = [False] * count
    spans = [(count - _END, count)]
    if error is not None:
        spans.append((error - _BEFORE, error + _AFTER))
    if traceback is not None:
        spans.append((traceback[0] - 1, traceback[1] + 2))
    for first, last in spans:
        for at in range(max(0, first), min(count, last)):
            shown[at] = True
    return shown


def _summary(at: int, count: int, error: int | None) -> str:
    where = " before the first error" if error is not None and at < error else ""
    return f"{count:,} lines{where}"


def _marks(kinds: list[str], lines: list[str]) -> list[Mark]:
    found = []
    at = 0
    for kind, run in groupby(kinds):
        count = len(list(run))
        found.append(Mark(kind, "\n".join(lines[at : at + count])))
        at += count
    return found
