"""Summary of a search, for the terminal and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_repro.report.text import code, fence, plain
from vllm_repro_explore.case import Case, Request, Setup
from vllm_repro_explore.finding import known
from vllm_repro_explore.record import Record
from vllm_repro_explore.search import Found, Tally

__all__ = ["SearchSummary", "as_json", "case_lines", "heading", "page", "searched", "terminal"]


@dataclass(frozen=True, kw_only=True)
class SearchSummary:
    """Result of one search.

    start: `general`, or the id and the arm of the scenario whose server was searched. mixes: of a
    general start. live: for each finding, the command that runs it on a real server, or why there
    is none. tests: for each finding, its pytest file; None if such a test does not show it. again:
    command that repeats the search. record: the earlier searches.
    """

    version: str
    start: str
    tally: Tally
    live: Sequence[str]
    tests: Sequence[str | None]
    duration_s: float
    again: str
    interrupted: bool = False
    mixes: tuple[str, ...] = ()
    record: Record = field(default_factory=Record)

    @property
    def new(self) -> list[Found]:
        """Findings that no earlier search has."""
        return [
            found for found in self.tally.findings if self.record.seen_in(found.finding) is None
        ]


def as_json(summary: SearchSummary) -> dict[str, Any]:
    tally = summary.tally
    return {
        "schema": 1,
        "vllm_version": summary.version,
        **searched(summary.start, summary.mixes),
        "seeds": [tally.first, tally.last],
        "trials": tally.trials,
        "invalid": tally.invalid,
        "why_invalid": dict(tally.why_invalid),
        "steps": tally.steps,
        "reached": dict(tally.reached),
        "findings": [
            found.as_json()
            | {
                "first_seen_in": summary.record.seen_in(found.finding),
                "live": live,
                "test": test,
            }
            for found, live, test in zip(tally.findings, summary.live, summary.tests, strict=True)
        ],
        "interrupted": summary.interrupted,
        "duration_s": round(summary.duration_s, 3),
        "reproduce": summary.again,
    }


def terminal(summary: SearchSummary) -> str:
    """Return the lines for the terminal: cases played, and for each finding its smallest case and the command for a server."""
    tally = summary.tally
    reached = (
        ", ".join(f"{name} in {count}" for name, count in sorted(tally.reached.items()))
        or "nothing in particular"
    )
    lines = [
        heading(summary.version, summary.start, summary.mixes),
        (
            f"played:  {tally.trials} cases, seeds {tally.first} to {tally.last}, {tally.steps}"
            f" steps in {summary.duration_s:.0f} s; {reached}"
        ),
    ]
    if tally.invalid:
        lines.append(f"         {tally.invalid} of them were refused by vLLM at start")
    for found, live, test in zip(tally.findings, summary.live, summary.tests, strict=True):
        lines += ["", *_lines(found), *_before(summary.record, found), f"  live:  {live}"]
        lines += [f"  test:  pytest {test}"] if test else []
    if not tally.findings:
        lines += ["", f"found:   nothing in {tally.trials - tally.invalid} cases"]
    if summary.interrupted:
        lines += ["", "interrupted; the findings so far are above"]
    return "\n".join([*lines, "", f"again:   {summary.again}"])


def searched(start: str, mixes: tuple[str, ...]) -> dict[str, Any]:
    """Return what was searched, as JSON."""
    return {"evidence": "engine", "mixes": list(mixes), "start": start}


def heading(version: str, start: str, mixes: tuple[str, ...]) -> str:
    """Return what was searched, in words."""
    return f"vLLM {version}'s EngineCore without a model, " + (
        f"mixes {', '.join(mixes)}" if mixes else f"on the server of {start}"
    )


def _before(record: Record, found: Found) -> list[str]:
    if not record.searches:
        return []
    earlier = record.seen_in(found.finding)
    return [
        (
            f"  new:   in none of {record.searches} earlier searches"
            if earlier is None
            else f"  before: first in {earlier}"
        )
    ]


def page(summary: SearchSummary) -> str:
    """Return the search as one page of Markdown: new findings whole, those seen before in a table."""
    tally, record, new = summary.tally, summary.record, summary.new
    old = [found for found in tally.findings if found not in new]
    lines = [
        f"# {heading(summary.version, summary.start, summary.mixes)}",
        "",
        f"{tally.trials:,} cases, seeds {tally.first} to {tally.last}, {tally.steps:,} steps in"
        f" {summary.duration_s / 60:.0f} minutes"
        + ("; interrupted." if summary.interrupted else "."),
        "",
        (
            f"New findings: **{len(new)}**. Seen before, in {record.searches} earlier searches:"
            f" {len(old)}."
        ),
    ]
    for found in new:
        lines += [
            "",
            f"## {plain(str(found.finding))}",
            "",
            fence("\n".join(_lines(found)[1:]), "text"),
        ]
    if old:
        lines += [
            "",
            "## Seen before",
            "",
            "| finding | cases | known as | first in |",
            "|---|---|---|---|",
        ]
        for found in old:
            what, issue = (
                code(str(found.finding), in_table=True),
                plain(known(found.finding) or "-"),
            )
            lines.append(
                f"| {what} | {found.times:,} | {issue} | {record.seen_in(found.finding)} |"
            )
    return "\n".join([*lines, "", fence(summary.again, "console"), ""])


def _lines(found: Found) -> list[str]:
    finding = found.finding
    lines = [f"{finding.kind}: {finding.site}", f"  seen:  {finding.detail}"]
    if issue := known(finding):
        lines.append(f"  known: {issue}")
    if found.on_runner:
        lines.append(f"  over the release's own CPU model runner: {found.on_runner}")
    if found.others:
        lines.append(f"  with:  {', '.join(other.site for other in found.others)}")
    lines.append(
        f"  seeds: first {found.seed}, in {found.times} of the cases; shrunk in {found.tried} more"
    )
    first, *waves = case_lines(found.shrunk)
    return [*lines, f"  case:  {first}", *(f"         {line}" for line in waves)]


def case_lines(case: Case) -> list[str]:
    """Return a case as text: the server in the first line, then a line for each wave."""
    setup = case.setup
    words = [
        f"{' then '.join(setup.layers)}"
        + (f" (window {setup.window})" if "sliding" in setup.layers else ""),
        f"{setup.blocks} blocks of {setup.block}",
        f"chunk {setup.chunk}",
        f"up to {setup.max_len} tokens",
        *_unusual(setup),
    ]
    return [
        ", ".join(words),
        *(
            f"wave {number}: " + " + ".join(map(str, map(_ask, wave)))
            for number, wave in enumerate(case.waves, 1)
        ),
    ]


def _unusual(setup: Setup) -> list[str]:
    sentences = {
        setup.connector: bool(setup.connector),
        "which a user's own connector can be": setup.connector == "StoreConnector",
        f"{setup.cpu_blocks} blocks of room in the connector": bool(setup.connector),
        "lazy": setup.lazy,
        f"{setup.seqs} requests at once": setup.seqs < 8,
        "prefix caching off": not setup.caching,
        "hybrid manager off": not setup.hybrid,
        f"stores take {setup.store_polls} and loads {setup.load_polls} steps": (
            bool(setup.connector) and (setup.store_polls, setup.load_polls) != (1, 0)
        ),
        "asynchronous": setup.asynchronous,
        "second model runner": setup.runner == 2,
        f"{setup.draft} draft tokens": bool(setup.draft),
        f"a failed load: {setup.load_failures}": bool(setup.load_failures),
        "priorities": setup.priority,
        f"{setup.loras} LoRA adapters at once": bool(setup.loras),
        f"long prefill threshold {setup.threshold}": bool(setup.threshold),
        f"images of up to {setup.largest_image} tokens": bool(setup.largest_image),
        "images in whole": setup.whole_images,
        f"a cache for {setup.image_cache} of their tokens": bool(setup.image_cache),
        f"a grammar is compiled after {setup.grammar_looks} looks": bool(setup.grammar_looks),
        f"with VLLM_SERVER_DEV_MODE=1 {' and '.join(f'{what} at step {step}' for step, what in setup.ops)}": bool(
            setup.ops
        ),
    }
    return [words for words, holds in sentences.items() if holds]


def _ask(ask: Request) -> str:
    text = f"{ask.prompt}:{ask.answer}"
    text += f" (shares {ask.shared})" if ask.shared else ""
    text += f" after {ask.after} steps" if ask.after else ""
    text += "".join(
        f", {name} {getattr(ask, name)}"
        for name in ("priority", "lora", "salt", "grammar", "eos")
        if getattr(ask, name)
    )
    text += ", stop token ids" if ask.stops else ""
    text += ", a prefill for another server" if ask.remote else ""
    text += f", from a prefill server{', which fails' if ask.fails else ''}" if ask.fetch else ""
    images = (f"{number} of {tokens} tokens at {offset}" for offset, tokens, number in ask.images)
    text += f", images: {', '.join(images)}" if ask.images else ""
    text += ", refused after them" if ask.refused else ""
    text += (
        f", a session with more after {', '.join(map(str, ask.segments))} steps"
        if ask.segments
        else ""
    )
    gone = f", gone {'within the step ' if ask.mid else ''}after {ask.abort}"
    return text + (gone if ask.abort >= 0 else "")
