"""Summary of a search, for the terminal and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vllm_repro.report.document import plain_text
from vllm_repro_explore.case import Case, Request, Setup, true_texts
from vllm_repro_explore.finding import Finding, known
from vllm_repro_explore.search import Found, Tally


@dataclass(frozen=True, kw_only=True)
class Record:
    """Findings of earlier searches of the same scenario or mixes, with any vLLM."""

    searches: int = 0
    # the highest seed of those of this vLLM; 0 without one
    last: int = 0
    # for each finding, the folder of the search that saw it first
    first: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def seen_in(self, finding: Finding) -> str | None:
        """Return the folder of the first search with this finding; None if it is new."""
        return self.first.get((finding.kind.value, finding.site))


_FOLDER = Path(__file__).with_name("templates")


@dataclass(frozen=True, kw_only=True)
class SearchSummary:
    """Result of one search."""

    version: str
    # `general`, or the id and the arm of the scenario whose server was searched
    start: str
    tally: Tally
    # for each finding, the command that runs it on a real server, or why there is none
    live: Sequence[str]
    # for each finding, its pytest file; None if such a test does not show it
    tests: Sequence[str | None]
    duration_s: float
    # command that repeats the search
    again: str
    interrupted: bool = False
    # of a general start; empty for a scenario's server
    mixes: tuple[str, ...] = ()
    # the earlier searches
    record: Record = field(default_factory=Record)

    @property
    def new(self) -> list[Found]:
        """Return the findings that no earlier search has."""
        return [hit for hit in self.tally.findings if self.record.seen_in(hit.finding) is None]


def as_json(summary: SearchSummary) -> dict[str, Any]:
    """Return the content of explore.json."""
    tally = summary.tally
    return {
        "schema": 1,
        "vllm_version": summary.version,
        **search_fields(summary.start, summary.mixes),
        "seeds": [tally.first, tally.last],
        "trials": tally.trials,
        "invalid": tally.invalid,
        "why_invalid": dict(tally.why_invalid),
        "steps": tally.steps,
        "reached": dict(tally.reached),
        "findings": [
            hit.as_json()
            | {
                "first_seen_in": summary.record.seen_in(hit.finding),
                "live": live,
                "test": test,
            }
            for hit, live, test in zip(tally.findings, summary.live, summary.tests, strict=True)
        ],
        "interrupted": summary.interrupted,
        "duration_s": round(summary.duration_s, 3),
        "reproduce": summary.again,
    }


def terminal(summary: SearchSummary) -> str:
    """Return the lines for the terminal: cases played, and each finding with its smallest case."""
    tally = summary.tally
    reached = [f"{name} in {count}" for name, count in sorted(tally.reached.items())]
    return _rendered(
        "explore.txt",
        summary,
        seconds=f"{summary.duration_s:.0f}",
        reached=", ".join(reached) or "nothing in particular",
        findings=list(zip(tally.findings, summary.live, summary.tests, strict=True)),
    )


def page(summary: SearchSummary) -> str:
    """Return the search as a page of Markdown: new findings whole, earlier ones in a table."""
    new, render = summary.new, partial(plain_text, "finding.txt", _FOLDER, **_WORDS)
    bodies = [render(hit=hit).partition("\n")[2] for hit in new]
    return (
        _rendered(
            "explore.md",
            summary,
            minutes=f"{summary.duration_s / 60:.0f}",
            new=[(f"{hit.finding}", body) for hit, body in zip(new, bodies, strict=True)],
            seen=[hit for hit in summary.tally.findings if hit not in new],
        )
        + "\n"
    )


def _rendered(template: str, summary: SearchSummary, **values: Any) -> str:
    """Return the text of a template, filled with the summary and further values."""
    title = heading(summary.version, summary.start, summary.mixes)
    values |= {"heading": title, "summary": summary, "tally": summary.tally}
    return plain_text(template, _FOLDER, record=summary.record, **values, **_WORDS)


def search_fields(start: str, mixes: tuple[str, ...]) -> dict[str, Any]:
    """Return the JSON fields that say what was searched: a scenario's server, or mixes."""
    return {"evidence": "engine", "mixes": list(mixes), "start": start}


def heading(version: str, start: str, mixes: tuple[str, ...]) -> str:
    """Return what was searched, in words."""
    return f"vLLM {version}'s EngineCore without a model, " + (
        f"mixes {', '.join(mixes)}" if mixes else f"on the server of {start}"
    )


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
    places = {ask.number: place for place, ask in enumerate(case.asks, 1)}
    waves = (
        " + ".join(_request(ask, places.get(ask.follows, 0)) for ask in wave) for wave in case.waves
    )
    return [", ".join(words), *(f"wave {number}: {wave}" for number, wave in enumerate(waves, 1))]


def _unusual(setup: Setup) -> tuple[str, ...]:
    """Return in words the unusual settings of a case: of its server, transfers and operations."""
    operations = " and ".join(f"{what} at step {step}" for step, what in setup.ops)
    sentences = {
        setup.connector: setup.connector,
        "which a user's own connector can be": setup.connector.endswith("StoreConnector"),
        f"{setup.cpu_blocks} blocks of room in the connector": setup.connector,
        "lazy": setup.lazy,
        f"{setup.seqs} requests at once": setup.seqs < 8,
        "prefix caching off": not setup.caching,
        "hybrid manager off": not setup.hybrid,
        f"stores take {setup.store_polls} and loads {setup.load_polls} steps": (
            setup.connector and (setup.store_polls, setup.load_polls) != (1, 0)
        ),
        "asynchronous": setup.asynchronous,
        "second model runner": setup.runner == 2,
        f"{setup.draft} draft tokens{' of EAGLE' if setup.eagle else ''}": setup.draft,
        f"a failed load: {setup.load_failures}": setup.load_failures,
        "priorities": setup.priority,
        f"{setup.loras} LoRA adapters at once": setup.loras,
        f"long prefill threshold {setup.threshold}": setup.threshold,
        f"images of up to {setup.largest_image} tokens": setup.largest_image,
        "images in whole": setup.whole_images,
        f"a cache for {setup.image_cache} of their tokens": setup.image_cache,
        f"a grammar is compiled after {setup.grammar_looks} looks": setup.grammar_looks,
        "answers may end at that length": setup.cut,
        f"offloaded chunks of {setup.chunk_blocks} blocks": setup.chunk_blocks > 1,
        "statistics": setup.stats,
        "KV events": setup.events,
        f"with VLLM_SERVER_DEV_MODE=1 {operations}": setup.ops,
    }
    return true_texts(sentences)


def _request(request: Request, follows: int) -> str:
    """Return a request in words, such as `100:8 after 3 steps` (prompt and answer tokens).

    follows: the place in the case, from 1 on, of the request that it continues; 0 for none.
    """
    fails = ", which fails" if request.fails else ""
    images = ", ".join(
        f"{number} of {tokens} tokens at {offset}" for offset, tokens, number in request.images
    )
    values = {
        name: getattr(request, name) for name in ("priority", "lora", "salt", "grammar", "least")
    }
    parts = {
        f"{request.prompt}:{request.answer}": True,
        f" (shares {request.shared})": request.shared,
        f" (of the other family from {request.switch})": request.switch,
        f" (goes on from request {follows})": follows,
        f" after {request.after} steps": request.after,
        **{f", {name} {value}": value for name, value in values.items()},
        ", stop token ids": request.stops,
        f", eos {request.eos}": request.eos > 0,
        ", ends as it repeats itself": request.eos < 0,
        ", a prefill for another server": request.remote,
        f", from a prefill server{fails}": request.fetch,
        f", images: {images}": images,
        ", refused after them": request.refused,
        f", a session with more after {', '.join(map(str, request.segments))} steps": (
            request.segments
        ),
        f", gone {'within the step ' if request.mid else ''}after {request.abort}": (
            request.abort >= 0
        ),
    }
    return "".join(true_texts(parts))


_WORDS = {"known": known, "case_lines": case_lines}
"""Functions that templates call."""
