"""Record of a search, and its Markdown and terminal text.

Each search adds its fields and templates: `heading.txt` names what it looks for, `answer.txt` is
its answer, `certainty.txt` how certain that is, `notes.txt` and `changes.txt` stand below it, and
`tables.txt` has its tables. A search leaves out the templates that it has no use for.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import msgspec
from markupsafe import Markup

from vllm_repro.report.document import plain_text
from vllm_repro.report.format import columns, terminal_width
from vllm_repro.report.text import one_line
from vllm_repro.scenario.scenario import Status
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_diagnosis.evidence import banner, facts_of, simulation_mark

_WIDEST = 40
"""Letters of a table's cell on a terminal."""

_TEMPLATES = Path(__file__).parent / "templates"
_CELL = "\x1f"
"""Stands between the cells of a row in `tables.txt`; `printable` removes it from values."""


class BootTable(NamedTuple):
    """A table whose last column names runs."""

    # a line that the table folds under in Markdown; empty if it does not fold
    summary: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


class SearchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A search that boots servers, perhaps unfinished: the JSON file without derived keys."""

    # its folder is OUT/SCENARIO/VERB/ID/, and its files there are FILE.json and FILE.md
    verb: ClassVar[str]
    file: ClassVar[str]
    # fields of the JSON file that a resume must not change
    fixed: ClassVar[tuple[str, ...]] = ()
    # fields that a resume keeps
    resumed: ClassVar[tuple[str, ...]] = ("evidence", "started_at", "duration_s")

    scenario: str
    issue: str
    title: str
    # what the scenario declares
    status: Status
    server: str
    # None if no server ever started
    evidence: str | None
    harness_version: str
    started_at: str
    duration_s: float
    reproduce: str
    # the limit or signal that ended it early
    stopped: str | None = None
    boots: tuple[Any, ...] = ()

    @property
    def plan(self) -> Any:
        """Return the plan after all boots; None if the search needs none: it boots all items."""
        return None

    @property
    def readings(self) -> tuple[str, ...]:
        """Return the answer in sentences, one text for each arm."""
        return self.sentences("answer.txt")

    @property
    def exit_status(self) -> int:
        """Return 0 for an answer, 1 for a surprise, 2 if undecided."""
        return 2 if self.plan is None else self.plan.state.exit_status

    def derived(self) -> dict[str, Any]:
        """Return the keys of the JSON file that are computed, such as the answer."""
        return {}

    def tables(self) -> list[BootTable]:
        """Return the tables of `tables.txt`: a summary line, heads and rows for each."""
        blocks = (block.strip("\n").split("\n") for block in self._blocks("tables.txt"))
        return [
            BootTable(
                "" if summary == "-" else summary,
                tuple(heads.split(_CELL)),
                [tuple(row.split(_CELL)) for row in rows],
            )
            for summary, heads, *rows in blocks
        ]

    @property
    def release(self) -> str | None:
        """Return the release that the servers reported; None for several."""
        return None

    @property
    def command(self) -> str:
        """Return the command that is part of the answer; empty without one."""
        return ""

    def changes(self) -> list[tuple[str, str]]:
        """Return the commits that the answer names, each with a link or an empty text."""
        lines = "\n".join(self._blocks("changes.txt")).split("\n")
        return [(text, link) for text, _, link in (line.partition(_CELL) for line in lines if line)]

    def sentences(self, template: str) -> tuple[str, ...]:
        """Return the paragraphs of a template in the folder of this search; empty without it."""
        return tuple(" ".join(block.split()) for block in self._blocks(template))

    def _blocks(self, template: str) -> list[str]:
        """Return the paragraphs that a template makes of this record; none without that file."""
        folder = Path(inspect.getfile(type(self))).parent
        if not (folder / template).exists():
            return []
        text = plain_text(template, folder, kind="line", record=self, plan=self.plan, row=_row)
        return [block for block in text.split("\n\n") if block.strip()]

    def abridged(self) -> SearchRecord:
        """Return the record as text shows it."""
        return self

    def answered(self) -> list[bool]:
        """Return for each boot if it gave an answer: two in a row without one end the search.

        Empty if the search continues elsewhere after a boot without one.
        """
        return []

    def kept(self) -> tuple[Any, ...]:
        """Return the boots that a resumed search does not repeat."""
        return tuple(boot for boot in self.boots if boot.tested)

    def after(self, boot: Any) -> Self:
        """Return the record with one more boot."""
        return msgspec.structs.replace(self, boots=(*self.boots, boot))

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        fields = msgspec.to_builtins(self)
        whole = {"schema": 1, **fields, "reading": ". ".join(self.readings), **self.derived()}
        return dict(json.loads(msgspec.json.encode(whole)))


class ArmBoot(msgspec.Struct, frozen=True, kw_only=True):
    """One boot of a changed copy of an arm, and its outcome."""

    outcome: Outcome
    why: str
    # name of the run's folder
    run: str
    duration_s: float


class ReleaseSearchRecord(SearchRecord, frozen=True, kw_only=True):
    """Record of a search that boots one arm of one release.

    Its runs lie beside it: `history` must not take them for the scenario's.
    """

    resumed: ClassVar[tuple[str, ...]] = (*SearchRecord.resumed, "version", "compiled")

    arm: str
    # the release that the servers reported
    version: str | None = None
    # release of its compiled parts, if they are not its own
    compiled: str | None = None

    @property
    def release(self) -> str:
        """Return the release that the servers reported, or `unknown`."""
        return self.version or "unknown"


def markdown(record: SearchRecord) -> str:
    """Return a search's record as Markdown, with links to its runs."""
    return _render(
        "search.md",
        record,
        mark=simulation_mark(record.evidence or "").strip(),
        notice=banner(
            record.evidence or "",
            record.release,
            getattr(record, "compiled", None),
        ),
    )


def terminal(record: SearchRecord, page: str, resume: str) -> str:
    """Return the last lines that a search prints: its answer, and how to continue it.

    page: path of FILE.md. resume: the command that continues the search.
    """
    return _render(
        "search.txt",
        record,
        page=page,
        resume=resume,
        subject=facts_of(record.evidence).subject,
        columns=lambda table: columns(
            [table.heads, *table.rows], [_WIDEST] * len(table.heads), terminal_width()
        ),
    )


def _render(template: str, record: SearchRecord, **values: Any) -> str:
    """Return the text of a template, filled with the record and further values."""
    return f"{plain_text(template, _TEMPLATES, record=record.abridged(), **values)}\n"


def _row(values: Iterable[object]) -> Markup:
    """Return the cells of a row as one line of `tables.txt`."""
    return Markup(_CELL.join(one_line(str(value)) for value in values))
