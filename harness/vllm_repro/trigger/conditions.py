"""Conditions of a trigger, without those that have a module of their own."""

from __future__ import annotations

import json
from dataclasses import dataclass

from vllm_repro.diagnosis.boot_facts import ScheduledChunk
from vllm_repro.trigger.trigger import (
    Asked,
    Condition,
    Finding,
    TriggerFacts,
    chunks_of,
    continuations,
)

__all__ = [
    "attention_backend",
    "chunked_prefill",
    "continuation_over",
    "drafting",
    "graphs_captured",
    "prefill_over",
    "prefix_hit",
    "sent_with",
]


def _count(facts: TriggerFacts, asked: Asked) -> str:
    source = "usage" if asked.counted_by == "usage" else "/tokenize"
    cached = ""
    if asked.cached_tokens:
        cached = f", {asked.cached_tokens} of them cached"
    elif found := facts.cached(asked):
        cached = f", {found} of them in blocks filled by an earlier request"
    return f"{asked.name}: {asked.prompt_tokens} prompt tokens by {source}{cached}"


def _plus(chunks: tuple[int, ...]) -> str:
    if len(chunks) > 4:
        return f"{len(chunks) - 1} x {chunks[0]} + {chunks[-1]}"
    return " + ".join(map(str, chunks))


def _dumped(chunk: ScheduledChunk) -> str:
    source = " out of the prefix cache" if chunk.new else ""
    return (
        f"the scheduler's dump: {chunk.computed} tokens computed before the step that crashed{source}, "
        f"{chunk.scheduled} in it"
    )


@dataclass(frozen=True)
class _ChunkedPrefill(Condition):
    chunks: int

    def find(self, facts: TriggerFacts) -> Finding:
        for chunk in facts.dump:
            if chunk.computed and not chunk.new and chunk.scheduled > 1:  # a decoded token is no chunk
                return Finding(True, (_dumped(chunk),), f"{chunk.computed} + {chunk.scheduled} tokens")
        if facts.chunk is None:
            return Finding(False, ("the batch size is not known, so chunks cannot be counted",))
        if facts.chunked is False:
            return Finding(False, ("chunked prefill is off",))
        notes: list[str] = []
        for asked in facts.asked:
            tokens = facts.uncached(asked)
            if tokens is None:
                continue
            cut = chunks_of(tokens, facts.chunk)
            if not asked.accepted:
                notes.append(f"{_count(facts, asked)}, but the server refused it with {asked.status}")
            elif len(cut) >= self.chunks:
                seen = f"; iterations recorded: {', '.join(asked.steps)}" if asked.steps else ""
                return Finding(
                    True,
                    (f"{_count(facts, asked)}, cut at {facts.chunk} into {_plus(cut)}{seen}",),
                    f"{_plus(cut)} tokens",
                )
            else:
                notes.append(f"{_count(facts, asked)}, {len(cut)} step of at most {facts.chunk}")
        return Finding(
            False, tuple(notes[-1:]) or ("no request reached the engine",), "1 step" if notes else "no request"
        )

    def __str__(self) -> str:
        return f"chunked_prefill(chunks={self.chunks})"


@dataclass(frozen=True)
class _PrefixHit(Condition):
    def find(self, facts: TriggerFacts) -> Finding:
        for chunk in facts.dump:
            if chunk.computed and chunk.new:
                return Finding(True, (_dumped(chunk),), f"{chunk.scheduled} tokens after {chunk.computed} cached")
        hits = [asked for asked in facts.asked if asked.accepted and facts.cached(asked)]
        if hits:
            asked = max(hits, key=lambda asked: facts.uncached(asked) or 0)
            brief = f"{facts.uncached(asked)} tokens after {facts.cached(asked)} cached"
            return Finding(True, (_count(facts, asked),), brief)
        return Finding(False, ("no prompt is known to have begun in the prefix cache",), "no prefix hit")

    def __str__(self) -> str:
        return "prefix_hit()"


@dataclass(frozen=True)
class _ContinuationOver(Condition):
    tokens: int

    def find(self, facts: TriggerFacts) -> Finding:
        largest = max((part.tokens for part in continuations(facts)), default=0)
        if largest > self.tokens:
            return Finding(True, (f"a continuation of {largest} tokens, more than {self.tokens}",))
        if largest:
            return Finding(
                False,
                (f"the largest continuation had {largest} tokens, not more than {self.tokens}",),
                f"not over {self.tokens}",
            )
        return Finding(False, ("no prompt was continued",))

    def __str__(self) -> str:
        return f"continuation_over({self.tokens})"


@dataclass(frozen=True)
class _PrefillOver(Condition):
    tokens: int

    def find(self, facts: TriggerFacts) -> Finding:
        found = Finding(False, ("no request reached the engine",), "no request")
        largest = 0
        for asked in facts.asked:
            uncached = facts.uncached(asked)
            if uncached is None or not asked.accepted:
                continue
            batch = facts.chunk or uncached
            piece = max(chunks_of(uncached, batch, chunked=facts.chunked is not False), default=0)
            if piece > largest:
                largest, crossed = piece, piece > self.tokens
                text = f"{_count(facts, asked)}: {piece} of them in one step, {'' if crossed else 'not '}more than {self.tokens}"
                found = Finding(crossed, (text,), f"{piece} tokens in one step")
        return found

    def __str__(self) -> str:
        return f"prefill_over({self.tokens})"


def _judged(asked: Asked, names: tuple[str, ...]) -> bool:
    """Return True if the server read these fields: it answered 200, or its refusal names one of them."""
    return asked.status == 200 or (asked.status in (400, 422) and any(name in asked.refusal for name in names))


@dataclass(frozen=True)
class _SentWith(Condition):
    names: tuple[str, ...]

    def find(self, facts: TriggerFacts) -> Finding:
        wanted = " and ".join(self.names)
        for asked in facts.asked:
            taken = asked.died or asked.hung or _judged(asked, self.names)
            if taken and all(asked.fields.get(name) for name in self.names):
                values = ", ".join(f"{name}={json.dumps(asked.fields[name])}" for name in self.names)
                end = f"answered {asked.status}"
                if asked.died or asked.hung:
                    end = f"the engine {'died' if asked.died else 'hung'} with it in flight"
                return Finding(True, (f"{asked.name} carried {values}: {end}",), end)
        return Finding(False, (f"no answered request carried {wanted}",), f"no {wanted}")

    def wanted(self) -> tuple[tuple[str, ...], ...]:
        return (self.names,)

    def __str__(self) -> str:
        return f"sent_with({', '.join(map(repr, self.names))})"


@dataclass(frozen=True)
class _AttentionBackend(Condition):
    name: str

    def find(self, facts: TriggerFacts) -> Finding:
        if facts.backend == self.name:
            return Finding(True, (f"the boot line names the attention backend {self.name}",))
        seen = f"names {facts.backend}" if facts.backend else "is missing"
        return Finding(
            False, (f"not known to use the attention backend {self.name}: the boot line {seen}",), f"not {self.name}"
        )

    def __str__(self) -> str:
        return f"attention_backend({self.name!r})"


@dataclass(frozen=True)
class _Drafting(Condition):
    def find(self, facts: TriggerFacts) -> Finding:
        said = facts.args.get("speculative_config")
        if said:
            return Finding(True, (f"the server reports speculative decoding: {said}",))
        if not facts.args and facts.command is not None and facts.command.has("--speculative-config"):
            told = facts.command.get("--speculative-config")
            return Finding(True, (f"the command line asks for speculative decoding: {told}",))
        return Finding(False, ("speculative decoding is off",), "no drafts")

    def __str__(self) -> str:
        return "drafting()"


@dataclass(frozen=True)
class _GraphsCaptured(Condition):
    def find(self, facts: TriggerFacts) -> Finding:
        boot = facts.boot
        if boot.graphs_captured:
            text = f"the log reports captured CUDA graphs, mode {boot.cudagraph_mode}"
            return Finding(True, (text, *_guarded(facts)))
        if boot.ready:
            return Finding(False, ("the server is ready and its log reports no captured graph",), "no graphs")
        if boot.cudagraph_mode in (None, "NONE"):
            return Finding(False, ("the log does not announce CUDA graphs",), "no graphs")
        text = f"the boot ended before all CUDA graphs were captured, mode {boot.cudagraph_mode}"
        return Finding(True, (text,), f"graphs {boot.cudagraph_mode}")

    def __str__(self) -> str:
        return "graphs_captured()"


def _guarded(facts: TriggerFacts) -> tuple[str, ...]:
    """Return what the lab's capture guard logged."""
    said = [one.values for one in facts.observed if one.kind == "capture"]
    return tuple(
        f"{one['captures']} captures under the guard: {one['checked']} operators checked, {one['refused']} refused"
        for one in said
    )


def attention_backend(name: str) -> Condition:
    """Require that the boot log names this attention backend. A flag alone is no evidence: vLLM may fall back to another backend."""
    return _AttentionBackend(name)


def chunked_prefill(*, chunks: int = 2) -> Condition:
    """Require a prompt that `max_num_batched_tokens` cut into at least `chunks` pieces."""
    if chunks < 2:
        raise ValueError("chunked_prefill(chunks=…) starts at 2: every prompt has one chunk")
    return _ChunkedPrefill(chunks)


def prefix_hit() -> Condition:
    """Require a prompt that began in the prefix cache, by the server's counters or the dump of the step that crashed."""
    return _PrefixHit()


def continuation_over(tokens: int) -> Condition:
    """Require a chunk of more than `tokens` tokens with context before it: an earlier chunk or cached blocks."""
    return _ContinuationOver(tokens)


def prefill_over(tokens: int) -> Condition:
    """Require a step with more than `tokens` uncached tokens of one prompt."""
    return _PrefillOver(tokens)


def drafting() -> Condition:
    """Require speculative decoding, by the arguments that the server logs, else by its command line."""
    return _Drafting()


def graphs_captured() -> Condition:
    """Require captured CUDA graphs, or a boot that ended while it was to capture them."""
    return _GraphsCaptured()


def sent_with(*names: str) -> Condition:
    """Require a request with all these body fields that was answered, crashed the engine or hung.

    A refusal (400 or 422) counts if it names one of the fields.
    """
    if not names:
        raise ValueError("sent_with() takes the names of body fields")
    return _SentWith(names)
