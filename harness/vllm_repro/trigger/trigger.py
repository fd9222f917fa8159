"""Conditions on the engine that a trial must meet to count, and their evidence.

    trigger=chunked_prefill(chunks=2) & continuation_over(128)

A condition is a pure function of `TriggerFacts` and returns evidence. A quiet trial that does not
meet it is `untriggered`, never `clean`. All facts come from the server: prompt lengths from its
tokenizer or `usage`, prefix-cache hits, boot lines, the scheduler's crash dump.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_repro.command.command import ServeCommand
from vllm_repro.tiny_model import Kind
from vllm_repro_diagnosis.boot_facts import BootFacts, Observation, ScheduledChunk, SharedStep

__all__ = [
    "Amounts",
    "AttentionShape",
    "Condition",
    "Continuation",
    "SentRequest",
    "TriggerFacts",
    "TriggerResult",
    "Wanted",
    "chunks_of",
    "continuations",
]


@dataclass(frozen=True)
class SentRequest:
    """One request that was sent, and the server's numbers about it.

    prompt_tokens: from the response's usage, else from `/tokenize` or the length of a list of ids;
    None if unknown, or of several prompts. counted_by: "usage", "tokenize" or "ids". cached_tokens:
    prompt tokens from the prefix cache; None if not reported, as in a crash. answer_tokens: from
    usage, else max_tokens; None if unknown. repeats: leading tokens that an earlier, answered
    request also began with. steps: `vllm:iteration_tokens_total` while it was the only request,
    largest first; see `metrics`. fields: body fields that the scenario states. known: those that
    its endpoint reads; None if the server does not show them. status: HTTP status, None without a
    response. refusal: text of an error response. may_fail: statuses that are no failure. died,
    hung: what the engine did meanwhile. left: its client closed the connection. waiting: requests
    that the server then counted as waiting; None if unknown. span: seconds since the epoch of its
    sending and of the end of its answer; None instead of the second without an answer.
    """

    name: str
    prompt_tokens: int | None
    counted_by: str = "usage"
    cached_tokens: int | None = None
    repeats: int = 0
    steps: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    known: frozenset[str] | None = None
    refusal: str = ""
    status: int | None = 200
    may_fail: tuple[int, ...] = ()
    died: bool = False
    hung: bool = False
    answer_tokens: int | None = None
    left: bool = False
    waiting: int | None = None
    span: tuple[float, float | None] = (0.0, None)

    @property
    def counted(self) -> str:
        """Source of `prompt_tokens`, as reports write it."""
        return {"usage": "by usage", "tokenize": "by /tokenize"}.get(
            self.counted_by, "stated as ids"
        )

    @property
    def accepted(self) -> bool:
        """True if it reached the engine: answered 200, or the engine crashed meanwhile."""
        return self.died or self.status == 200


@dataclass(frozen=True)
class AttentionShape:
    """Attention of the served model. block_size: KV-cache block in tokens if no flag sets it.

    kinds: attention of each layer, if known. window: of sliding layers, in tokens. window_groups:
    block size and window in tokens of each group of sliding layers, if there are several.
    group_pages: bytes of a block of each group, full attention first.
    """

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    kinds: tuple[Kind, ...] = ()
    window: int | None = None
    window_groups: tuple[tuple[int, int], ...] = ()
    group_pages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Continuation:
    """A chunk of a prompt, with `context` tokens before it: earlier chunks, or blocks of the prefix cache."""

    context: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class TriggerFacts:
    """Facts that conditions may use. None means unknown.

    batch: `max_num_batched_tokens`, from the boot line, else from the flag. chunked: True if
    chunked prefill is on. backend: attention backend in the boot line. dump: the step in which the
    engine crashed. command: flags of the server, None for an attached one. args: the server's own
    log line about its arguments. locked: bytes of locked workspace in the log. reserved: True if
    the log reports room reserved for a whole context at boot. observed: events that the lab's
    plugin logged. preemptions: by the server's metrics. captured: values at the placeholders of the
    crash signature. steps: those with several prompts; None if the log has no steps.
    """

    requests: tuple[SentRequest, ...] = ()
    batch: int | None = None
    chunked: bool | None = None
    backend: str | None = None
    dump: tuple[ScheduledChunk, ...] = ()
    command: ServeCommand | None = None
    args: Mapping[str, object] = field(default_factory=dict)
    shape: AttentionShape | None = None
    locked: int | None = None
    reserved: bool = False
    observed: tuple[Observation, ...] = ()
    preemptions: int | None = None
    steps: tuple[SharedStep, ...] | None = None
    captured: Mapping[str, str] = field(default_factory=dict)
    boot: BootFacts = field(default_factory=BootFacts)

    def number(self, flag: str) -> int | None:
        """Return the number given for `flag`, from the server's log, else from the command line; None if neither has it."""
        value = self.args.get(flag.removeprefix("--").replace("-", "_"))
        if isinstance(value, int):
            return value
        return None if self.command is None else self.command.number(flag)

    @property
    def chunk(self) -> int | None:
        """Most tokens of one prompt in a step: the batch, or `--long-prefill-token-threshold` if that is less; None if unknown."""
        held_back = self.number("--long-prefill-token-threshold") or 0
        return min(self.batch, held_back) if self.batch and held_back > 0 else self.batch

    @property
    def suspects(self) -> list[SentRequest]:
        """The requests: in flight when the engine died or hung first, then answered ones, then refused ones; long prompts first."""

        def rank(asked: SentRequest) -> tuple[bool, bool, int]:
            return asked.died or asked.hung, asked.accepted, asked.prompt_tokens or 0

        return sorted(self.requests, key=rank, reverse=True)

    @property
    def block_size(self) -> int:
        """Tokens of a KV-cache block."""
        return self.number("--block-size") or (self.shape.block_size if self.shape else 16)

    def cached(self, asked: SentRequest) -> int:
        """Return the prompt tokens from the prefix cache, as counted by the server.

        A crashed request has no counter: its blocks are computed. 0 if a living engine does not
        report them.
        """
        if asked.cached_tokens is not None:
            return asked.cached_tokens
        return self._repeated_blocks(asked) if asked.died else 0

    def _repeated_blocks(self, asked: SentRequest) -> int:
        """Return the tokens of blocks that an earlier request filled with the same head."""
        off = self.boot.prefix_caching is False or (
            self.command is not None and self.command.enabled("--enable-prefix-caching") is False
        )
        if off or asked.prompt_tokens is None:
            return 0
        return min(asked.repeats, asked.prompt_tokens - 1) // self.block_size * self.block_size

    def uncached(self, asked: SentRequest) -> int | None:
        """Return the prompt tokens that had to be computed, a lower bound if not reported; None if the length is unknown."""
        if asked.prompt_tokens is None:
            return None
        known = asked.cached_tokens
        return asked.prompt_tokens - (self._repeated_blocks(asked) if known is None else known)

    def pieces(self, asked: SentRequest) -> Iterator[Continuation]:
        """Yield the chunks in which the engine computed a prompt, one if the batch is not known; none if its length is not."""
        uncached, context = self.uncached(asked), self.cached(asked)
        if uncached is not None and asked.accepted:
            for tokens in chunks_of(
                uncached, self.chunk or uncached, chunked=self.chunked is not False
            ):
                yield Continuation(context, tokens)
                context += tokens


@dataclass(frozen=True)
class Amounts:
    """Amounts of one unit to compare: what was needed first, then what there was, each with its name."""

    unit: str
    bars: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class TriggerResult:
    """Result of a condition: crossed or not, evidence as sentences, a brief phrase for tables, and the amounts that decide it."""

    crossed: bool
    evidence: tuple[str, ...]
    brief: str = ""
    amounts: tuple[Amounts, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """Body fields, each with its value, that a request must carry.

    None is any value, also 0 or []. name: of the request; empty for any.
    """

    fields: Mapping[str, Any]
    name: str = ""

    def carried_by(self, name: str, fields: Mapping[str, Any]) -> bool:
        return self.name in ("", name) and all(
            fields.get(key) is not None
            and (value is None or json.dumps(fields[key]) == json.dumps(value))
            for key, value in self.fields.items()
        )


@dataclass(frozen=True)
class Condition:
    """A condition on what happened inside the engine, by its declaration and the function that checks it.

    wanted: what the workload must send. Combine conditions with `&` and `|`.
    """

    words: str
    find: Callable[[TriggerFacts], TriggerResult] = field(compare=False)
    wanted: tuple[Wanted, ...] = field(default=(), compare=False)

    def __and__(self, other: Condition) -> Condition:
        def find(facts: TriggerFacts) -> TriggerResult:
            return _joined(self.find(facts), other.find(facts))

        return Condition(f"{self} & {other}", find, self.wanted + other.wanted)

    def __or__(self, other: Condition) -> Condition:
        def find(facts: TriggerFacts) -> TriggerResult:
            first, second = self.find(facts), other.find(facts)
            if first.crossed == second.crossed:
                return _joined(first, second)
            return first if first.crossed else second

        return Condition(f"({self} | {other})", find, self.wanted + other.wanted)

    def __str__(self) -> str:
        return self.words


def _joined(first: TriggerResult, second: TriggerResult) -> TriggerResult:
    brief = ", ".join(filter(None, (first.brief, second.brief)))
    crossed, evidence = first.crossed and second.crossed, first.evidence + second.evidence
    return TriggerResult(crossed, evidence, brief, first.amounts + second.amounts)


def chunks_of(tokens: int, batch: int, *, chunked: bool = True) -> tuple[int, ...]:
    """Return the chunks of a lone prompt of `tokens` uncached tokens: full ones of `batch`, then the remainder."""
    if not chunked or tokens <= batch:
        return (tokens,) if tokens > 0 else ()
    full, rest = divmod(tokens, batch)
    return (batch,) * full + ((rest,) if rest else ())


def continuations(facts: TriggerFacts) -> tuple[Continuation, ...]:
    """Return every continued chunk: of the step that crashed, and of the prompts as they are cut, in the order of `suspects`."""
    dumped = [
        Continuation(chunk.computed, chunk.scheduled) for chunk in facts.dump if chunk.computed
    ]
    cut = [
        part for asked in facts.suspects if facts.chunk is not None for part in facts.pieces(asked)
    ]
    return (*dumped, *(part for part in cut if part.context))
