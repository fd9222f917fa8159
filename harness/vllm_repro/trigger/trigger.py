"""Conditions on the engine that a trial must meet to count, and their evidence.

    trigger=chunked_prefill(chunks=2) & continuation_over(128)

A condition is a pure function of `TriggerFacts` and returns evidence. A quiet trial that does not
meet it is `untriggered`, never `clean`. The facts come from the server: prompt lengths from its
tokenizer or `usage`, prefix-cache hits, boot lines, the scheduler's crash dump. Where the log is
silent, flags of the command count; cached blocks of a crashed request follow from the prompts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_repro.command.command import ServeCommand
from vllm_repro.tiny_model import Kind
from vllm_repro_diagnosis.boot_facts import BootFacts, Observation, ScheduledChunk, SharedStep

UNSTATED = "unstated()"
"""Declaration of a trigger that the report does not state."""


@dataclass(frozen=True)
class SentRequest:
    """A request of the workload: what was sent, and the server's numbers about it."""

    name: str
    # From the response's usage, else from `/tokenize` or a list of ids; None if unknown, or of
    # several prompts.
    prompt_tokens: int | None
    # "usage", "tokenize" or "ids".
    counted_by: str = "usage"
    # Prompt tokens from the prefix cache; None if not reported, as in a crash.
    cached_tokens: int | None = None
    # Leading tokens that an earlier, answered request also began with.
    repeats: int = 0
    # Steps by their tokens while it was the only request, from `vllm:iteration_tokens_total`,
    # largest first, as text.
    steps: tuple[str, ...] = ()
    # Body fields that the scenario states.
    fields: Mapping[str, Any] = field(default_factory=dict)
    # Fields that its endpoint reads; None if the server does not report them.
    known: frozenset[str] | None = None
    # Text of an error response; empty without one.
    refusal: str = ""
    # HTTP status; None without a response.
    status: int | None = 200
    # HTTP statuses that the scenario declares to be no failure.
    may_fail: tuple[int, ...] = ()
    # The engine crashed while it was in flight.
    died: bool = False
    # The engine hung while it was in flight.
    hung: bool = False
    # From the usage, else `max_tokens`; None if unknown.
    answer_tokens: int | None = None
    # The client closed the connection before the answer ended, as the workload declares.
    left: bool = False
    # Requests that the server counted as waiting when the client left; None if unknown.
    waiting: int | None = None
    # Seconds since the epoch: when it was sent, and when its answer ended; None without an answer.
    span: tuple[float, float | None] = (0.0, None)

    @property
    def counted(self) -> str:
        """Source of `prompt_tokens`, as reports write it, such as `by usage`."""
        return {"usage": "by usage", "tokenize": "by /tokenize"}.get(
            self.counted_by, "stated as ids"
        )

    @property
    def accepted(self) -> bool:
        """True if it reached the engine: answered 200, or the engine crashed meanwhile.

        A request that hung without a status does not count.
        """
        return self.died or self.status == 200


@dataclass(frozen=True)
class AttentionShape:
    """Attention sizes of the served model: heads, head size, KV block size, sliding windows.

    For a hybrid model also block size, window and block bytes of each group of layers that shares
    the KV block pool (`window_groups`, `group_pages`).
    """

    heads: int
    kv_heads: int
    head_dim: int
    # Tokens of a KV-cache block if no flag sets it.
    block_size: int = 16
    # Kinds of attention of the layers; empty if unknown.
    kinds: tuple[Kind, ...] = ()
    # Window of the sliding layers in tokens; None without one.
    window: int | None = None
    # (block size, window) in tokens of each group of sliding layers, if there are several.
    window_groups: tuple[tuple[int, int], ...] = ()
    # Bytes of a block of each group, full attention first.
    group_pages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Continuation:
    """Chunk of a prompt in one step, and the tokens before it."""

    # Tokens before it, from earlier chunks or the prefix cache; 0 for a first chunk.
    context: int
    # Tokens of the chunk.
    tokens: int


@dataclass(frozen=True, kw_only=True)
class TriggerFacts:
    """Facts of a trial that its trigger conditions may use; None means unknown."""

    requests: tuple[SentRequest, ...] = ()
    # `max_num_batched_tokens`, from the boot line, else from the flag.
    batch: int | None = None
    # Chunked prefill is on.
    chunked: bool | None = None
    # Attention backend in the boot line.
    backend: str | None = None
    # Chunks of the step in which the engine crashed; empty if the log has no dump.
    dump: tuple[ScheduledChunk, ...] = ()
    # Command of the server; None for an attached server.
    command: ServeCommand | None = None
    # Arguments of the server, from its own log line.
    args: Mapping[str, object] = field(default_factory=dict)
    # None also if another model than the scenario's is served.
    shape: AttentionShape | None = None
    # Bytes of locked workspace in the log.
    locked: int | None = None
    # The log reports room reserved for a whole context at boot.
    reserved: bool = False
    # Events that the lab's plugin logged.
    observed: tuple[Observation, ...] = ()
    # Number of preemptions by the server's metrics.
    preemptions: int | None = None
    # Steps with several prompts; None if the log has no steps.
    steps: tuple[SharedStep, ...] | None = None
    # Values at the placeholders of the crash signature, by name.
    captured: Mapping[str, str] = field(default_factory=dict)
    boot: BootFacts = field(default_factory=BootFacts)

    def number(self, flag: str) -> int | None:
        """Return the value of `flag`, from the server's log, else the command; None if unset."""
        value = self.args.get(flag.removeprefix("--").replace("-", "_"))
        if isinstance(value, int):
            return value
        return None if self.command is None else self.command.number(flag)

    @property
    def chunk(self) -> int | None:
        """Most tokens of one prompt in a step; None if unknown.

        The batch, or `--long-prefill-token-threshold` if that is less.
        """
        held_back = self.number("--long-prefill-token-threshold") or 0
        return min(self.batch, held_back) if self.batch and held_back > 0 else self.batch

    @property
    def suspects(self) -> list[SentRequest]:
        """The requests, those most likely to have caused a death or hang first.

        First those in flight when the engine died or hung, then those answered 200, then the
        others. Within each group long prompts come first.
        """

        def rank(request: SentRequest) -> tuple[bool, bool, int]:
            return request.died or request.hung, request.accepted, request.prompt_tokens or 0

        return sorted(self.requests, key=rank, reverse=True)

    @property
    def block_size(self) -> int:
        """Tokens of a KV-cache block: by flag, else by the model's shape, else 16."""
        return self.number("--block-size") or (self.shape.block_size if self.shape else 16)

    def cached(self, request: SentRequest) -> int:
        """Return the prompt tokens from the prefix cache, as counted by the server.

        Without a count by the server: for a request that crashed the engine, the tokens in blocks
        that an earlier prompt with the same head filled; for any other request 0.
        """
        if request.cached_tokens is not None:
            return request.cached_tokens
        return self._repeated_blocks(request) if request.died else 0

    def _repeated_blocks(self, request: SentRequest) -> int:
        """Return the prompt tokens in blocks that an earlier request with the same head filled.

        The last token never counts. 0 if prefix caching is off or the length is unknown.
        """
        off = self.boot.prefix_caching is False or (
            self.command is not None and self.command.enabled("--enable-prefix-caching") is False
        )
        if off or request.prompt_tokens is None:
            return 0
        return min(request.repeats, request.prompt_tokens - 1) // self.block_size * self.block_size

    def uncached(self, request: SentRequest) -> int | None:
        """Return the prompt tokens that had to be computed; None if the length is unknown.

        A lower bound if the server did not report the cached tokens.
        """
        if request.prompt_tokens is None:
            return None
        known = request.cached_tokens
        return request.prompt_tokens - (self._repeated_blocks(request) if known is None else known)

    def pieces(self, request: SentRequest) -> Iterator[Continuation]:
        """Yield the chunks in which the engine computed the prompt of a request.

        One chunk if the batch is unknown or chunked prefill is off. Nothing if the length is
        unknown or the request was not accepted.
        """
        uncached, context = self.uncached(request), self.cached(request)
        if uncached is not None and request.accepted:
            for tokens in chunks_of(
                uncached, self.chunk or uncached, chunked=self.chunked is not False
            ):
                yield Continuation(context, tokens)
                context += tokens


@dataclass(frozen=True)
class Amounts:
    """Named amounts in one unit, to compare: what was needed, and what was available."""

    unit: str
    # (name, amount): first the amount needed, then the amounts available.
    bars: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class TriggerResult:
    """Result of a trigger condition: `crossed` if it was met, and the evidence."""

    crossed: bool
    # Sentences.
    evidence: tuple[str, ...]
    # Phrase for tables.
    brief: str = ""
    # Amounts that decide it.
    amounts: tuple[Amounts, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """Requirement of a trigger: some request of the workload has this name and these body fields.

    An empty name stands for any name, and no fields for any body.
    """

    # Value of each field. None is any value, also 0 or [].
    fields: Mapping[str, Any]
    # Of the request; empty for any.
    name: str = ""

    def carried_by(self, name: str, fields: Mapping[str, Any]) -> bool:
        """Return True if a request with this name and these body fields meets the requirement.

        A field that is null counts as missing.
        """
        return self.name in ("", name) and all(
            fields.get(key) is not None
            and (value is None or json.dumps(fields[key]) == json.dumps(value))
            for key, value in self.fields.items()
        )


@dataclass(frozen=True)
class Condition:
    """Condition on what happened inside the engine, which a trial must meet to count.

    Combine conditions with `&` (both) and `|` (at least one).
    """

    # Its declaration, as a scenario file has it. Two conditions with equal words are equal.
    words: str
    # Function that checks it.
    find: Callable[[TriggerFacts], TriggerResult] = field(compare=False)
    # Fields that the workload must send; `check` reports those that it does not.
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
    """Return both results as one that is crossed if both are, with the evidence of both."""
    brief = ", ".join(filter(None, (first.brief, second.brief)))
    crossed, evidence = first.crossed and second.crossed, first.evidence + second.evidence
    return TriggerResult(crossed, evidence, brief, first.amounts + second.amounts)


def chunks_of(tokens: int, batch: int, *, chunked: bool = True) -> tuple[int, ...]:
    """Return the chunk sizes in which a lone prompt of `tokens` uncached tokens is computed.

    Full chunks of `batch` come first, then the remainder. One chunk if chunked prefill is off; none
    for no tokens.
    """
    if not chunked or tokens <= batch:
        return (tokens,) if tokens > 0 else ()
    full, rest = divmod(tokens, batch)
    return (batch,) * full + ((rest,) if rest else ())


def continuations(facts: TriggerFacts) -> tuple[Continuation, ...]:
    """Return all chunks with tokens before them: of the step that crashed, then of each prompt.

    Prompts are in the order of `suspects`; they are left out if the batch is unknown.
    """
    dumped = [
        Continuation(chunk.computed, chunk.scheduled) for chunk in facts.dump if chunk.computed
    ]
    cut = [
        part
        for request in facts.suspects
        if facts.chunk is not None
        for part in facts.pieces(request)
    ]
    return (*dumped, *(part for part in cut if part.context))
