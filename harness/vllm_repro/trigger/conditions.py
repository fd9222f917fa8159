"""Conditions of a trigger that need no arithmetic of their own.

Such as the size of a request, its chunks, the requests that run together, a flag or a stop string.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from vllm_repro.trigger.trigger import (
    UNSTATED,
    Condition,
    SentRequest,
    TriggerFacts,
    TriggerResult,
    Wanted,
    chunks_of,
    continuations,
)
from vllm_repro_diagnosis.boot_facts import ScheduledChunk


def unstated() -> Any:
    """Return a placeholder for what a bug report does not state.

    As a trigger it is never met, so a quiet trial is `untriggered`. As another argument in a
    scenario file it is replaced by a blank: 0, "not stated" or None.
    """
    return Condition(
        UNSTATED,
        lambda _: TriggerResult(
            False, ("the scenario does not state it: name a condition as trigger=",), "not stated"
        ),
    )


def _count(facts: TriggerFacts, request: SentRequest) -> str:
    """Return a request's prompt tokens, cached ones included, in words for the evidence."""
    cached = ""
    if request.cached_tokens:
        cached = f", {request.cached_tokens} of them cached"
    elif repeated := facts.cached(request):
        cached = f", {repeated} of them in blocks filled by an earlier request"
    return f"{request.name}: {request.prompt_tokens} prompt tokens {request.counted}{cached}"


def _sum_text(chunks: tuple[int, ...]) -> str:
    """Return chunk sizes as text, such as `2048 + 952` or `5 x 2048 + 10`."""
    if len(chunks) > 4:
        return f"{len(chunks) - 1} x {chunks[0]} + {chunks[-1]}"
    return " + ".join(map(str, chunks))


def _dump_evidence(chunk: ScheduledChunk) -> str:
    """Return a phrase on a chunk in the scheduler's dump of the step that crashed."""
    source = " out of the prefix cache" if chunk.new else ""
    return (
        f"the scheduler's dump: {chunk.computed} tokens computed before the step that"
        f" crashed{source}, {chunk.scheduled} in it"
    )


def chunked_prefill(*, chunks: int = 2) -> Condition:
    """Require a prompt that `max_num_batched_tokens` cut into at least `chunks` chunks.

    Evidence: prompt lengths, or a chunk of such a number in the scheduler's dump of the step that
    crashed. If the batch size is unknown, only the dump counts, and a chunk in it that is not the
    first of its prompt counts as the second. Raises `ValueError` for fewer than 2 chunks.
    """
    if chunks < 2:
        raise ValueError("chunked_prefill(chunks=…) starts at 2: every prompt has one chunk")

    def find(facts: TriggerFacts) -> TriggerResult:
        for chunk in facts.dump:
            # a decoded token is no chunk
            if not chunk.computed or chunk.new or chunk.scheduled < 2:
                continue
            if 1 + -(-chunk.computed // (facts.chunk or chunk.computed)) >= chunks:
                return TriggerResult(
                    True, (_dump_evidence(chunk),), f"{chunk.computed} + {chunk.scheduled} tokens"
                )
        if facts.chunk is None:
            return TriggerResult(
                False, ("the batch size is not known, so chunks cannot be counted",)
            )
        if facts.chunked is False:
            return TriggerResult(False, ("chunked prefill is off",))
        first_miss: TriggerResult | None = None
        for request in facts.suspects:
            tokens = facts.uncached(request)
            if tokens is None:
                continue
            cut = chunks_of(tokens, facts.chunk)
            if request.accepted and len(cut) >= chunks:
                counted = ", ".join(request.steps)
                seen = (
                    f"; vLLM's metrics, which count a whole prompt at its first token: {counted}"
                    if counted
                    else ""
                )
                text = f"{_count(facts, request)}, cut at {facts.chunk} into {_sum_text(cut)}{seen}"
                return TriggerResult(True, (text,), f"{_sum_text(cut)} tokens")
            steps = f"{len(cut)} step{'' if len(cut) == 1 else 's'}"
            why, brief = f"{steps} of at most {facts.chunk}", steps
            if request.status is None and not request.died:
                why, brief = (
                    ("and its client left" if request.left else "without an answer"),
                    "no answer",
                )
            elif not request.accepted:
                why, brief = f"but the server refused it with {request.status}", "refused"
            first_miss = first_miss or TriggerResult(
                False, (f"{_count(facts, request)}, {why}",), brief
            )
        return first_miss or TriggerResult(False, ("no request reached the engine",), "no request")

    return Condition(f"chunked_prefill(chunks={chunks})", find)


def prefix_hit() -> Condition:
    """Require a prompt whose first tokens were in the prefix cache.

    Evidence: the server's counters, or the scheduler's dump of the step that crashed. A request
    that crashed the engine also counts if an earlier prompt began with the same blocks.
    """

    def find(facts: TriggerFacts) -> TriggerResult:
        for chunk in facts.dump:
            if chunk.computed and chunk.new:
                return TriggerResult(
                    True,
                    (_dump_evidence(chunk),),
                    f"{chunk.scheduled} tokens after {chunk.computed} cached",
                )
        hits = [request for request in facts.requests if request.accepted and facts.cached(request)]
        if not hits:
            return TriggerResult(
                False, ("no prompt is known to have begun in the prefix cache",), "no prefix hit"
            )
        request = max(hits, key=lambda request: (request.died, facts.uncached(request) or 0))
        return TriggerResult(
            True,
            (_count(facts, request),),
            f"{facts.uncached(request)} tokens after {facts.cached(request)} cached",
        )

    return Condition("prefix_hit()", find)


def continuation_over(tokens: int) -> Condition:
    """Require a chunk of more than `tokens` tokens after an earlier chunk or cached blocks."""

    def find(facts: TriggerFacts) -> TriggerResult:
        sizes = [part.tokens for part in continuations(facts)]
        if (over := next((size for size in sizes if size > tokens), None)) is not None:
            return TriggerResult(True, (f"a continuation of {over} tokens, more than {tokens}",))
        largest = max(sizes, default=0)
        if largest:
            return TriggerResult(
                False,
                (f"the largest continuation had {largest} tokens, not more than {tokens}",),
                f"not over {tokens}",
            )
        return TriggerResult(False, ("no prompt was continued",))

    return Condition(f"continuation_over({tokens})", find)


def prefill_over(tokens: int) -> Condition:
    """Require a step with more than `tokens` uncached tokens of one prompt.

    If the batch size is unknown, a prompt counts as computed in one step.
    """

    def find(facts: TriggerFacts) -> TriggerResult:
        sizes = [
            (part.tokens, request) for request in facts.suspects for part in facts.pieces(request)
        ]
        if not sizes:
            return TriggerResult(False, ("no request reached the engine",), "no request")
        over = (size for size in sizes if size[0] > tokens)
        largest, request = next(over, max(sizes, key=lambda size: size[0]))
        more = f"{'' if largest > tokens else 'not '}more than {tokens}"
        text = f"{_count(facts, request)}: {largest} of them in one step, {more}"
        return TriggerResult(largest > tokens, (text,), f"{largest} tokens in one step")

    return Condition(f"prefill_over({tokens})", find)


def prefilled_together(*names: str) -> Condition:
    """Require a step that computed exactly the prompts of these requests.

    The step computes all their uncached tokens and no other prompt. vLLM logs the numbers of a
    step's prompts and tokens with --enable-logging-iteration-details; not met without them. Raises
    `ValueError` for fewer than two names or one name twice.
    """
    if len(set(names)) != len(names) or len(names) < 2:
        raise ValueError("prefilled_together() takes the names of two requests or more")

    def find(facts: TriggerFacts) -> TriggerResult:
        if facts.steps is None:
            return TriggerResult(
                False,
                ("the log has no steps: --enable-logging-iteration-details",),
                "steps unknown",
            )
        named = [
            next((request for request in facts.requests if request.name == name), None)
            for name in names
        ]
        counts = [None if request is None else facts.uncached(request) for request in named]
        tokens = [count for count in counts if count is not None]
        if len(tokens) < len(names):
            return TriggerResult(
                False,
                (f"the length of {names[counts.index(None)]} is not known",),
                "length unknown",
            )
        what = f"{' and '.join(names)}: {' + '.join(map(str, tokens))} uncached tokens"
        crossed = any(
            (step.prompts, step.tokens) == (len(names), sum(tokens)) for step in facts.steps
        )
        return TriggerResult(
            crossed,
            (f"{what}{'' if crossed else ', not'} in one step, by vLLM's log",),
            f"{'' if crossed else 'not '}in one step",
        )

    return Condition(
        f"prefilled_together({', '.join(map(repr, names))})",
        find,
        wanted=tuple(Wanted({}, name) for name in names),
    )


def _doubt(request: SentRequest, names: Collection[str]) -> str:
    """Return why it is not known that the server read the fields `names`; empty if it is."""
    if request.known is None:
        return "the server's /openapi.json does not show the fields that it reads"
    if unknown := [name for name in names if name not in request.known]:
        return f"this release does not know {' and '.join(unknown)}"
    named = request.status in (400, 422) and any(name in request.refusal for name in names)
    if request.died or request.hung or request.status in (200, *request.may_fail) or named:
        return ""
    return f"answered {request.status}" if request.status else "no answer"


def sent_with(*names: str, name: str = "", **values: Any) -> Condition:
    """Require a request with these body fields, which the server must have read.

    names: fields with any value. values: fields with this value. name: of the request; empty for
    any. The release must know each field, by the server's /openapi.json. The answer to every such
    request has status 200 or one of its `may_fail`, or is a refusal (400 or 422) that names a
    field. If the engine crashed or hung with such requests in flight, only these count, and they
    need no answer. Raises `ValueError` without fields, or for a value None.
    """
    fields = dict.fromkeys(names) | values
    if not fields or None in values.values():
        raise ValueError("sent_with() takes the names of body fields, and values that are not None")
    bound = {"name": name} if name else {}
    words = (
        *map(repr, names),
        *(f"{key}={json.dumps(value)}" for key, value in {**values, **bound}.items()),
    )
    wish = Wanted(fields, name)

    def find(facts: TriggerFacts) -> TriggerResult:
        carried = [
            request for request in facts.requests if wish.carried_by(request.name, request.fields)
        ]
        # Without a death the server must have read each: a harmless one is no evidence for the bug.
        carried = [request for request in carried if request.died or request.hung] or carried
        result = TriggerResult(
            False, (f"no request carried {' and '.join(fields)}",), f"no {' and '.join(fields)}"
        )
        for request in carried:
            written = ", ".join(f"{key}={json.dumps(request.fields[key])[:200]}" for key in fields)
            if doubt := _doubt(request, fields):
                return TriggerResult(
                    False,
                    (f"{request.name} carried {written}: {doubt}",),
                    f"{' and '.join(fields)} not read",
                )
            if not result.crossed:
                end = f"answered {request.status}"
                if request.died or request.hung:
                    end = f"the engine {'died' if request.died else 'hung'} with it in flight"
                result = TriggerResult(True, (f"{request.name} carried {written}: {end}",), end)
        return result

    return Condition(f"sent_with({', '.join(words)})", find, wanted=(wish,))


def answered(name: str, *statuses: int, during: str = "") -> Condition:
    """Require that the server answered every request of this name with one of these HTTP statuses.

    At least one must have been sent. during: name of another request, which must have been in
    flight from the sending of each to its answer; empty for none. Raises `ValueError` without
    statuses, or for numbers that are none.
    """
    if not statuses or not all(100 <= status < 600 for status in statuses):
        raise ValueError("answered() takes the name of a request, and HTTP statuses such as 400")

    def find(facts: TriggerFacts) -> TriggerResult:
        received = [request.status for request in facts.requests if request.name == name]
        seen = (
            " and ".join(
                f"answered {status}" if status else "not answered"
                for status in dict.fromkeys(received)
            )
            or "not sent"
        )
        crossed = bool(received) and set(received) <= set(statuses)
        wished = "" if crossed else f", not answered {' or '.join(map(str, statuses))}"
        text = f"{name} was {seen}{wished}"
        if during and crossed:
            crossed = _within(facts, name, during)
            text += f", {'while' if crossed else 'not while'} {during} was in flight"
        return TriggerResult(
            crossed, (text,), seen if crossed or not during else f"{seen}, not during {during}"
        )

    words = [*map(repr, (name, *statuses)), *([f"during={during!r}"] if during else [])]
    return Condition(
        f"answered({', '.join(words)})",
        find,
        wanted=(Wanted({}, name), *([Wanted({}, during)] if during else [])),
    )


def _within(facts: TriggerFacts, name: str, during: str) -> bool:
    """Return True if each request named `name` began and ended while one named `during` ran.

    A request named `during` whose client left does not count.
    """
    around = [
        request.span for request in facts.requests if request.name == during and not request.left
    ]
    return all(
        end is not None
        and any(begun <= sent and (ended is None or end <= ended) for begun, ended in around)
        for sent, end in (request.span for request in facts.requests if request.name == name)
    )


def left_waiting(name: str) -> Condition:
    """Require that this request's client disconnected while the server had waiting requests.

    Evidence: the server's metrics. Only the first request of this name counts.
    """

    def find(facts: TriggerFacts) -> TriggerResult:
        for request in (request for request in facts.requests if request.name == name):
            if not request.left:
                return TriggerResult(
                    False,
                    (f"{name} was answered before its client was to leave",),
                    "answered first",
                )
            waiting = request.waiting
            seen = "metrics unknown" if waiting is None else f"{waiting} waiting"
            return TriggerResult(
                bool(request.waiting),
                (f"the client of {name} left; the server's metrics then: {seen}",),
                f"left, {seen}",
            )
        return TriggerResult(False, (f"{name} was not sent",), "not sent")

    return Condition(f"left_waiting({name!r})", find, wanted=(Wanted({}, name),))


def preempted() -> Condition:
    """Require that the scheduler preempted a running request for lack of blocks.

    Evidence: an event of the lab's plugin, the server's metrics, or the dump of the step that
    crashed, if it resumed the request before the metrics counted it.
    """

    def find(facts: TriggerFacts) -> TriggerResult:
        seen = [event.values["requests"] for event in facts.observed if event.kind == "preempted"]
        if seen:
            return TriggerResult(
                True,
                (
                    (
                        f"seen: {sum(seen)} preemptions, in {len(seen)}"
                        f" step{'s' if len(seen) > 1 else ''}"
                    ),
                ),
                f"{sum(seen)} preempted",
            )
        if facts.preemptions:
            text = f"{facts.preemptions} preempted"
            return TriggerResult(True, (f"the server's metrics count {text}",), text)
        if any(chunk.resumed for chunk in facts.dump):
            return TriggerResult(
                True, ("the step that crashed resumed a preempted request",), "1 preempted"
            )
        return TriggerResult(
            False,
            (
                (
                    "no preemption was seen; the server's metrics"
                    f" {'count none' if facts.preemptions == 0 else 'do not count them'}"
                ),
            ),
            "none preempted",
        )

    return Condition("preempted()", find)


def attention_backend(name: str) -> Condition:
    """Require that the boot log names this attention backend.

    A flag alone is no evidence: vLLM may fall back to another backend.
    """

    def find(facts: TriggerFacts) -> TriggerResult:
        if facts.backend == name:
            return TriggerResult(True, (f"the boot line names the attention backend {name}",))
        seen = f"names {facts.backend}" if facts.backend else "is missing"
        return TriggerResult(
            False,
            (f"not known to use the attention backend {name}: the boot line {seen}",),
            f"not {name}",
        )

    return Condition(f"attention_backend({name!r})", find)


def drafting() -> Condition:
    """Require speculative decoding, by the arguments in the log, else by the command."""

    def find(facts: TriggerFacts) -> TriggerResult:
        logged = facts.args.get("speculative_config")
        if logged:
            return TriggerResult(True, (f"the server reports speculative decoding: {logged}",))
        if (
            not facts.args
            and facts.command is not None
            and facts.command.has("--speculative-config")
        ):
            return TriggerResult(
                True,
                (
                    (
                        "the command line asks for speculative decoding:"
                        f" {facts.command.get('--speculative-config')}"
                    ),
                ),
            )
        return TriggerResult(False, ("speculative decoding is off",), "no drafts")

    return Condition("drafting()", find)


def graphs_captured() -> Condition:
    """Require captured CUDA graphs, or a boot with graphs on that ended before their capture did.

    Evidence: the log.
    """

    def find(facts: TriggerFacts) -> TriggerResult:
        boot = facts.boot
        if boot.graphs_captured:
            # What the lab's capture guard logged.
            guarded = (
                f"{event.values['captures']} captures under the guard: {event.values['checked']}"
                f" operators checked, {event.values['refused']} refused"
                for event in facts.observed
                if event.kind == "capture"
            )
            return TriggerResult(
                True,
                (f"the log reports captured CUDA graphs, mode {boot.cudagraph_mode}", *guarded),
            )
        if boot.ready:
            return TriggerResult(
                False, ("the server is ready and its log reports no captured graph",), "no graphs"
            )
        if boot.cudagraph_mode in (None, "NONE"):
            return TriggerResult(False, ("the log does not announce CUDA graphs",), "no graphs")
        return TriggerResult(
            True,
            (f"the boot ended before all CUDA graphs were captured, mode {boot.cudagraph_mode}",),
            f"graphs {boot.cudagraph_mode}",
        )

    return Condition("graphs_captured()", find)
