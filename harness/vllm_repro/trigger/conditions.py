"""Conditions of a trigger, without those that have a module of their own."""

from __future__ import annotations

import json
from functools import partial

from vllm_repro.diagnosis.boot_facts import ScheduledChunk
from vllm_repro.trigger.trigger import (
    Condition,
    Rule,
    SentRequest,
    TriggerFacts,
    TriggerResult,
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


def _count(facts: TriggerFacts, asked: SentRequest) -> str:
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


def _chunked_prefill(chunks: int, facts: TriggerFacts) -> TriggerResult:
    for chunk in facts.dump:
        if chunk.computed and not chunk.new and chunk.scheduled > 1:  # a decoded token is no chunk
            return TriggerResult(True, (_dumped(chunk),), f"{chunk.computed} + {chunk.scheduled} tokens")
    if facts.chunk is None:
        return TriggerResult(False, ("the batch size is not known, so chunks cannot be counted",))
    if facts.chunked is False:
        return TriggerResult(False, ("chunked prefill is off",))
    found = TriggerResult(False, ("no request reached the engine",), "no request")
    for asked in facts.requests:
        tokens = facts.uncached(asked)
        if tokens is None:
            continue
        cut = chunks_of(tokens, facts.chunk)
        if asked.accepted and len(cut) >= chunks:
            seen = f"; iterations recorded: {', '.join(asked.steps)}" if asked.steps else ""
            text = f"{_count(facts, asked)}, cut at {facts.chunk} into {_plus(cut)}{seen}"
            return TriggerResult(True, (text,), f"{_plus(cut)} tokens")
        why = f"{len(cut)} step of at most {facts.chunk}"
        if not asked.accepted:
            why = f"but the server refused it with {asked.status}"
        found = TriggerResult(False, (f"{_count(facts, asked)}, {why}",), "1 step")
    return found


def _prefix_hit(facts: TriggerFacts) -> TriggerResult:
    for chunk in facts.dump:
        if chunk.computed and chunk.new:
            return TriggerResult(True, (_dumped(chunk),), f"{chunk.scheduled} tokens after {chunk.computed} cached")
    hits = [asked for asked in facts.requests if asked.accepted and facts.cached(asked)]
    if not hits:
        return TriggerResult(False, ("no prompt is known to have begun in the prefix cache",), "no prefix hit")
    asked = max(hits, key=lambda asked: facts.uncached(asked) or 0)
    brief = f"{facts.uncached(asked)} tokens after {facts.cached(asked)} cached"
    return TriggerResult(True, (_count(facts, asked),), brief)


def _continuation_over(tokens: int, facts: TriggerFacts) -> TriggerResult:
    largest = max((part.tokens for part in continuations(facts)), default=0)
    if largest > tokens:
        return TriggerResult(True, (f"a continuation of {largest} tokens, more than {tokens}",))
    if largest:
        text = f"the largest continuation had {largest} tokens, not more than {tokens}"
        return TriggerResult(False, (text,), f"not over {tokens}")
    return TriggerResult(False, ("no prompt was continued",))


def _prefill_over(tokens: int, facts: TriggerFacts) -> TriggerResult:
    found = TriggerResult(False, ("no request reached the engine",), "no request")
    largest = 0
    for asked in facts.requests:
        uncached = facts.uncached(asked)
        if uncached is None or not asked.accepted:
            continue
        batch = facts.chunk or uncached
        piece = max(chunks_of(uncached, batch, chunked=facts.chunked is not False), default=0)
        if piece > largest:
            largest, crossed = piece, piece > tokens
            more = f"{'' if crossed else 'not '}more than {tokens}"
            text = f"{_count(facts, asked)}: {piece} of them in one step, {more}"
            found = TriggerResult(crossed, (text,), f"{piece} tokens in one step")
    return found


def _was_read(asked: SentRequest, names: tuple[str, ...]) -> bool:
    """Return True if the server read these fields: it answered 200, or its refusal names one of them."""
    return asked.status == 200 or (asked.status in (400, 422) and any(name in asked.refusal for name in names))


def _sent_with(names: tuple[str, ...], facts: TriggerFacts) -> TriggerResult:
    for asked in facts.requests:
        taken = asked.died or asked.hung or _was_read(asked, names)
        if taken and all(asked.fields.get(name) for name in names):
            values = ", ".join(f"{name}={json.dumps(asked.fields[name])}" for name in names)
            end = f"answered {asked.status}"
            if asked.died or asked.hung:
                end = f"the engine {'died' if asked.died else 'hung'} with it in flight"
            return TriggerResult(True, (f"{asked.name} carried {values}: {end}",), end)
    wanted = " and ".join(names)
    return TriggerResult(False, (f"no answered request carried {wanted}",), f"no {wanted}")


def _attention_backend(name: str, facts: TriggerFacts) -> TriggerResult:
    if facts.backend == name:
        return TriggerResult(True, (f"the boot line names the attention backend {name}",))
    seen = f"names {facts.backend}" if facts.backend else "is missing"
    text = f"not known to use the attention backend {name}: the boot line {seen}"
    return TriggerResult(False, (text,), f"not {name}")


def _drafting(facts: TriggerFacts) -> TriggerResult:
    logged = facts.args.get("speculative_config")
    if logged:
        return TriggerResult(True, (f"the server reports speculative decoding: {logged}",))
    if not facts.args and facts.command is not None and facts.command.has("--speculative-config"):
        given = facts.command.get("--speculative-config")
        return TriggerResult(True, (f"the command line asks for speculative decoding: {given}",))
    return TriggerResult(False, ("speculative decoding is off",), "no drafts")


def _graphs_captured(facts: TriggerFacts) -> TriggerResult:
    boot = facts.boot
    if boot.graphs_captured:
        # What the lab's capture guard logged.
        guarded = (
            f"{one.values['captures']} captures under the guard: {one.values['checked']} operators checked, "
            f"{one.values['refused']} refused"
            for one in facts.observed
            if one.kind == "capture"
        )
        return TriggerResult(True, (f"the log reports captured CUDA graphs, mode {boot.cudagraph_mode}", *guarded))
    if boot.ready:
        return TriggerResult(False, ("the server is ready and its log reports no captured graph",), "no graphs")
    if boot.cudagraph_mode in (None, "NONE"):
        return TriggerResult(False, ("the log does not announce CUDA graphs",), "no graphs")
    text = f"the boot ended before all CUDA graphs were captured, mode {boot.cudagraph_mode}"
    return TriggerResult(True, (text,), f"graphs {boot.cudagraph_mode}")


def attention_backend(name: str) -> Condition:
    """Require that the boot log names this attention backend. A flag alone is no evidence: vLLM may fall back to another backend."""
    return Rule(f"attention_backend({name!r})", partial(_attention_backend, name))


def chunked_prefill(*, chunks: int = 2) -> Condition:
    """Require a prompt that `max_num_batched_tokens` cut into at least `chunks` pieces."""
    if chunks < 2:
        raise ValueError("chunked_prefill(chunks=…) starts at 2: every prompt has one chunk")
    return Rule(f"chunked_prefill(chunks={chunks})", partial(_chunked_prefill, chunks))


def prefix_hit() -> Condition:
    """Require a prompt that began in the prefix cache, by the server's counters or the dump of the step that crashed."""
    return Rule("prefix_hit()", _prefix_hit)


def continuation_over(tokens: int) -> Condition:
    """Require a chunk of more than `tokens` tokens with context before it: an earlier chunk or cached blocks."""
    return Rule(f"continuation_over({tokens})", partial(_continuation_over, tokens))


def prefill_over(tokens: int) -> Condition:
    """Require a step with more than `tokens` uncached tokens of one prompt."""
    return Rule(f"prefill_over({tokens})", partial(_prefill_over, tokens))


def drafting() -> Condition:
    """Require speculative decoding, by the arguments that the server logs, else by its command line."""
    return Rule("drafting()", _drafting)


def graphs_captured() -> Condition:
    """Require captured CUDA graphs, or a boot that ended while it was to capture them."""
    return Rule("graphs_captured()", _graphs_captured)


def sent_with(*names: str) -> Condition:
    """Require a request with all these body fields that was answered, crashed the engine or hung.

    A refusal (400 or 422) counts if it names one of the fields.
    """
    if not names:
        raise ValueError("sent_with() takes the names of body fields")
    return Rule(f"sent_with({', '.join(map(repr, names))})", partial(_sent_with, names), fields=names)
