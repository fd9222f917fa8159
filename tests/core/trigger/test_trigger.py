from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.command.parse import parse
from vllm_repro.scenario.catalogue import find
from vllm_repro.trigger.boundary import shortest_prompt
from vllm_repro.trigger.conditions import (
    answered,
    attention_backend,
    chunked_prefill,
    continuation_over,
    drafting,
    graphs_captured,
    prefill_over,
    prefilled_together,
    prefix_hit,
    sent_with,
)
from vllm_repro.trigger.trigger import (
    Amounts,
    AttentionShape,
    Condition,
    SentRequest,
    TriggerFacts,
    TriggerResult,
    Wanted,
    chunks_of,
)
from vllm_repro_diagnosis.boot_facts import BootFacts, Observation, ScheduledChunk, SharedStep

LONG = chunked_prefill(chunks=2) & continuation_over(128)
FIELDS = sent_with("min_tokens", "stop_token_ids")
READ = {"min_tokens": 0, "stop_token_ids": []}
MTP = """vllm serve m --speculative-config '{"method":"mtp","num_speculative_tokens":3}'"""


def facts(tokens: int | None, *, batch: int | None = 4096, **asked: Any) -> TriggerFacts:
    request = SentRequest("long chat", tokens, **asked)
    return TriggerFacts(requests=(request,), batch=batch, chunked=True)


def served(*requests: SentRequest, flags: str = "") -> TriggerFacts:
    command = parse(f"vllm serve m {flags}")
    return TriggerFacts(requests=requests, batch=4096, chunked=True, command=command)


def read(**asked: Any) -> TriggerFacts:
    """Return a request with both fields, which the server knows."""
    return facts(2, **{"fields": READ, "known": frozenset(READ), **asked})


def few(name: str, number: int, **asked: Any) -> SentRequest:
    known = frozenset(["min_tokens"])
    return SentRequest(name, 2, fields={"min_tokens": number}, known=known, **asked)


def graphs(mode: str, **boot: Any) -> TriggerFacts:
    return TriggerFacts(boot=BootFacts(cudagraph_mode=mode, **boot))


LIVED = SentRequest("lived", 4096 + 300, cached_tokens=0)
SHORT = SentRequest("short", 50)
REFUSED = SentRequest("refused", 99_999, status=400)
DIED = SentRequest("died", 4096 + 129, "tokenize", status=None, died=True)
HELD_BACK = SentRequest("long chat", 4096 + 129, cached_tokens=0)
UNDER = "--long-prefill-token-threshold"
HARMLESS, TOO_LONG = few("first", 1), few("second", 9, status=400, refusal="too long")


@pytest.mark.parametrize(
    ("condition", "found", "crossed"),
    [
        # The threshold of a continued prefill.
        (LONG, facts(100), False),
        (LONG, facts(4096), False),
        (LONG, facts(4096 + 128), False),
        (LONG, facts(4096 + 129), True),
        (LONG, facts(7593), True),
        (LONG, facts(8192), True),
        # A flag may hold long prompts back to smaller chunks.
        (continuation_over(128), served(HELD_BACK, flags=f"{UNDER} 0"), True),
        (continuation_over(128), served(HELD_BACK, flags=f"{UNDER} 100"), False),
        (continuation_over(128), served(HELD_BACK, flags=f"{UNDER} 200"), True),
        (continuation_over(128), served(HELD_BACK, flags=f"{UNDER} 8192"), True),
        # A prompt that crossed counts, although another was in flight at the crash.
        (LONG, served(LIVED, SentRequest("died", 100, "tokenize", status=None, died=True)), True),
        (prefill_over(128), served(LIVED, SentRequest("died", 128, died=True)), True),
        (chunked_prefill(), served(LIVED, SentRequest("died", None, died=True)), True),
        # Cached tokens are not prefilled.
        (LONG, facts(7593, cached_tokens=4096), False),
        (continuation_over(128), facts(385, cached_tokens=256), True),
        # What is unknown proves nothing.
        (chunked_prefill(chunks=2), facts(None), False),
        (continuation_over(128), facts(None), False),
        (prefill_over(128), facts(None), False),
        (LONG, facts(7593, batch=None), False),
        (chunked_prefill(), replace(facts(9000), chunked=False), False),
        # The dump of the step that died tells a chunk from a prefix hit.
        (chunked_prefill(), TriggerFacts(dump=(ScheduledChunk(4096, 3497),)), True),
        (chunked_prefill(chunks=3), TriggerFacts(dump=(ScheduledChunk(4096, 3497),)), False),
        *(
            (
                chunked_prefill(chunks=3),
                TriggerFacts(dump=(ScheduledChunk(done, 99),), batch=4096),
                done > 4096,
            )
            for done in (4096, 8192)
        ),
        (prefix_hit(), TriggerFacts(dump=(ScheduledChunk(4096, 3497),)), False),
        (chunked_prefill(), TriggerFacts(dump=(ScheduledChunk(256, 129, new=True),)), False),
        (prefix_hit(), TriggerFacts(dump=(ScheduledChunk(256, 129, new=True),)), True),
        (chunked_prefill(), TriggerFacts(dump=(ScheduledChunk(0, 4096, new=True),)), False),
        (prefix_hit(), TriggerFacts(dump=(ScheduledChunk(0, 4096, new=True),)), False),
        # A token that was being decoded, alone and beside a long first chunk.
        (chunked_prefill(), TriggerFacts(dump=(ScheduledChunk(500, 1),)), False),
        (prefix_hit(), TriggerFacts(dump=(ScheduledChunk(500, 1),)), False),
        (
            LONG,
            TriggerFacts(dump=(ScheduledChunk(500, 1), ScheduledChunk(0, 4096, new=True))),
            False,
        ),
        (prefix_hit(), facts(385, cached_tokens=0, repeats=256), False),
        # A request needs a response of the engine, or its crash.
        (prefill_over(759), facts(2000, status=400), False),
        (prefill_over(759), facts(2000, cached_tokens=1500), False),
        # A prefill counts what runs in one step.
        (prefill_over(759), facts(759, batch=8192), False),
        (prefill_over(759), facts(760, batch=8192), True),
        (prefill_over(759), facts(760, batch=512), False),
        (prefill_over(759), facts(None, batch=8192), False),
        # Fields count if the server read them.
        (FIELDS, read(), True),
        (FIELDS, read(status=None, died=True), True),
        (
            FIELDS,
            read(
                status=400,
                refusal="token_id(s) [999999] in stop_token_ids contain out-of-vocab token ids",
            ),
            True,
        ),
        (FIELDS, read(status=400, refusal="no such token", may_fail=(400,)), True),
        (
            FIELDS,
            read(status=400, refusal="maximum context length is 8192", may_fail=(500,)),
            False,
        ),
        (FIELDS, read(status=None), False),
        (FIELDS, read(fields={"stop_token_ids": [999999]}), False),
        (FIELDS, read(fields={**READ, "min_tokens": None}), False),
        # The server does not show its fields, or does not know one: vLLM ignores that.
        (FIELDS, read(known=None), False),
        (FIELDS, read(known=frozenset(["min_tokens"])), False),
        (FIELDS, read(known=frozenset(), status=None, died=True), False),
        # A harmless request with the same fields proves nothing of another.
        (sent_with("min_tokens"), TriggerFacts(requests=(HARMLESS,)), True),
        (sent_with("min_tokens"), TriggerFacts(requests=(HARMLESS, TOO_LONG)), False),
        (
            sent_with("min_tokens"),
            TriggerFacts(requests=(HARMLESS, replace(TOO_LONG, died=True))),
            True,
        ),
        (sent_with(min_tokens=9), TriggerFacts(requests=(HARMLESS,)), False),
        (
            sent_with(min_tokens=9),
            TriggerFacts(requests=(HARMLESS, replace(TOO_LONG, status=200))),
            True,
        ),
        (
            sent_with("min_tokens", name="second"),
            TriggerFacts(requests=(HARMLESS, TOO_LONG)),
            False,
        ),
        (sent_with("min_tokens", name="first"), TriggerFacts(requests=(HARMLESS, TOO_LONG)), True),
        # A flag that no layer uses proves nothing.
        (attention_backend("TURBOQUANT") & LONG, replace(facts(7593), backend="TURBOQUANT"), True),
        (attention_backend("TURBOQUANT") & LONG, replace(facts(7593), backend="FLASH_ATTN"), False),
        (attention_backend("TURBOQUANT") & LONG, facts(7593), False),
        # The arguments that a server lists decide before its command.
        (drafting(), TriggerFacts(command=parse(MTP)), True),
        (drafting(), TriggerFacts(command=parse("vllm serve m")), False),
        (drafting(), TriggerFacts(args={"speculative_config": {"method": "mtp"}}), True),
        # Graphs are captured, or were about to be when the engine died.
        (graphs_captured(), TriggerFacts(boot=BootFacts()), False),
        (graphs_captured(), graphs("NONE"), False),
        (graphs_captured(), graphs("FULL_AND_PIECEWISE"), True),
        (graphs_captured(), graphs("FULL_AND_PIECEWISE", ready=True), False),
        (graphs_captured(), graphs("FULL", graphs_captured=True, ready=True), True),
    ],
)
def test_a_condition_crosses(condition: Condition, found: TriggerFacts, crossed: bool) -> None:
    assert condition.find(found).crossed is crossed


@pytest.mark.parametrize(
    ("condition", "found", "shown"),
    [
        (prefix_hit(), facts(385, cached_tokens=256), "^129 tokens after 256 cached: "),
        (prefill_over(759), facts(2000, status=None, died=True), "^2000 tokens in one step: "),
        (drafting(), TriggerFacts(args={"max_num_seqs": 1}, command=parse(MTP)), "^no drafts: "),
        (
            LONG,
            facts(7593),
            (
                ": long chat: 7593 prompt tokens by usage, cut at 4096 into 4096 . 3497;"
                " a continuation of 3497 tokens, more than 128$"
            ),
        ),
        (LONG, facts(7593, counted_by="tokenize", status=None, died=True), "by /tokenize"),
        (LONG, facts(7593, counted_by="ids"), "7593 prompt tokens stated as ids"),
        (LONG, facts(7593, status=400), "refused it with 400"),
        (
            LONG,
            TriggerFacts(dump=(ScheduledChunk(4096, 3497),)),
            "4096 tokens computed before the step that crashed",
        ),
        (attention_backend("TURBOQUANT") & LONG, facts(7593), "boot line is missing"),
        # Without a crossing the evidence is of the longest prompt that ran.
        (
            chunked_prefill(),
            served(REFUSED, SentRequest("longer", 3000), SHORT),
            ": longer: 3000 prompt tokens",
        ),
        # With one it is of the prompt that died, or of the longest.
        *(
            (LONG, served(*requests), f"^4096 . {over} tokens: .*a continuation of {over} tokens")
            for requests, over in (
                ((SentRequest("first", 4096 + 128, cached_tokens=0), DIED), 129),
                ((LIVED, DIED), 129),
                ((SentRequest("first", 4096 + 129, cached_tokens=0), SHORT, LIVED), 300),
            )
        ),
    ],
)
def test_a_condition_shows_its_evidence(
    condition: Condition, found: TriggerFacts, shown: str
) -> None:
    result = condition.find(found)
    assert re.search(shown, f"{result.brief}: {'; '.join(result.evidence)}")


def test_unknown_cached_tokens_prove_no_hit() -> None:
    """Parallel requests do not show whose the hits were, and the cache may be off."""
    silent = facts(385, cached_tokens=None, repeats=256, batch=100)
    assert not prefix_hit().find(silent).crossed
    # At least 129 tokens are new, so no more chunks are counted than there must have been.
    assert (silent.cached(silent.requests[0]), silent.uncached(silent.requests[0])) == (0, 129)


@pytest.mark.parametrize(
    ("flags", "cached"), [("", 256), ("--block-size 200", 200), ("--no-enable-prefix-caching", 0)]
)
def test_a_request_that_died_hits_the_blocks_filled_before(flags: str, cached: int) -> None:
    asked = SentRequest("again", 385, "tokenize", repeats=256, status=None, died=True)
    dead = served(asked, flags=flags)
    assert dead.cached(asked) == cached
    for condition in (prefix_hit(), continuation_over(128)):
        assert condition.find(dead).crossed is (cached > 0)


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        (sent_with("n", min_tokens=9), "sent_with('n', min_tokens=9)"),
        (sent_with("n", name="first"), "sent_with('n', name=\"first\")"),
        (answered("long chat", 400), "answered('long chat', 400)"),
        (answered("reset", 200, during="busy"), "answered('reset', 200, during='busy')"),
        (
            continuation_over(128) | sent_with("min_tokens"),
            "(continuation_over(128) | sent_with('min_tokens'))",
        ),
    ],
)
def test_a_condition_prints_as_it_is_written(condition: Condition, text: str) -> None:
    assert str(condition) == text


@pytest.mark.parametrize(
    ("statuses", "crossed", "evidence"),
    [
        ([400], True, "long chat was answered 400"),
        ([400, 500], True, "long chat was answered 400 and answered 500"),
        ([400, 200], False, "long chat was answered 400 and answered 200, not answered 400 or 500"),
        ([None], False, "long chat was not answered, not answered 400 or 500"),
        ([], False, "long chat was not sent, not answered 400 or 500"),
    ],
)
def test_a_named_request_is_answered_with_a_status(
    statuses: list[int], crossed: bool, evidence: str
) -> None:
    asked = tuple(SentRequest("long chat", 2, status=status) for status in statuses)
    condition = answered("long chat", 400, 500)
    found = condition.find(TriggerFacts(requests=(SentRequest("other", 2), *asked)))
    assert (found.crossed, found.evidence) == (crossed, (evidence,))
    assert f"{evidence},".startswith(f"long chat was {found.brief},")
    assert condition.wanted == (Wanted({}, "long chat"),)


@pytest.mark.parametrize(
    ("reset", "busy", "crossed"),
    [
        ((2.0, 3.0), (1.0, 9.0), True),
        ((2.0, 3.0), (1.0, None), True),  # never answered: in flight to the end
        ((2.0, 3.0), (2.1, None), False),
        ((2.0, 3.0), (1.0, 2.5), False),
        ((2.0, 3.0), (2.1, 9.0), False),
        ((2.0, None), (1.0, 9.0), False),
    ],
)
def test_an_answer_while_another_request_was_in_flight(
    reset: tuple[float, float | None], busy: tuple[float, float | None], crossed: bool
) -> None:
    asked = (SentRequest("reset", None, span=reset), SentRequest("busy", 200, span=busy))
    condition = answered("reset", 200, during="busy")
    found = condition.find(TriggerFacts(requests=asked))
    evidence = f"reset was answered 200, {'while' if crossed else 'not while'} busy was in flight"
    assert (found.crossed, found.evidence) == (crossed, (evidence,))
    assert not condition.find(TriggerFacts(requests=asked[:1])).crossed
    assert condition.wanted == (Wanted({}, "reset"), Wanted({}, "busy"))


def test_or_takes_the_side_that_was_crossed() -> None:
    either = continuation_over(128) | sent_with("min_tokens")
    found = either.find(facts(100, fields={"min_tokens": 1}, known=frozenset(["min_tokens"])))
    evidence = ("long chat carried min_tokens=1: answered 200",)
    assert (found.crossed, found.evidence) == (True, evidence)


STATUSES = r"^answered\(\) takes the name of a request, and HTTP statuses such as 400$"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: chunked_prefill(chunks=1), "starts at 2"),
        (sent_with, "names of body fields"),
        (lambda: answered("long chat"), STATUSES),
        (lambda: answered("long chat", 99), STATUSES),
        (lambda: answered("long chat", 600), STATUSES),
        (lambda: prefilled_together("new"), "two requests or more"),
        (lambda: prefilled_together("new", "new"), "two requests or more"),
    ],
)
def test_a_useless_condition_is_refused(make: Callable[[], Condition], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@given(st.integers(1, 200_000), st.integers(1, 20_000))
def test_chunks_add_up_and_none_is_larger_than_the_batch(tokens: int, batch: int) -> None:
    cut = chunks_of(tokens, batch)
    assert sum(cut) == tokens
    assert all(0 < chunk <= batch for chunk in cut)
    assert all(chunk == batch for chunk in cut[:-1])
    assert chunks_of(0, batch) == ()


def test_a_guarded_capture_says_what_was_looked_at() -> None:
    boot = BootFacts(cudagraph_mode="FULL_DECODE_ONLY", graphs_captured=True, ready=True)
    seen = Observation("capture", {"captures": 2, "checked": 190, "refused": 0, "recorded": True})
    found = graphs_captured().find(
        TriggerFacts(boot=boot, observed=(Observation("store", {}), seen))
    )
    assert found.evidence[1:] == ("2 captures under the guard: 190 operators checked, 0 refused",)


NEW, CONTINUED = SentRequest("new", 1000), SentRequest("continued", 543, cached_tokens=512)


@pytest.mark.parametrize(
    ("steps", "crossed", "brief"),
    [
        (None, False, "steps unknown"),
        ((), False, "not in one step"),
        ([(2, 1031)], True, "in one step"),
        ([(2, 40), (2, 1031), (3, 99)], True, "in one step"),
        ([(2, 1543)], False, "not in one step"),  # without the hit
        ([(3, 1031)], False, "not in one step"),  # another prompt was in it
    ],
)
def test_two_prompts_shared_a_step(
    steps: list[tuple[int, int]] | None, crossed: bool, brief: str
) -> None:
    seen = None if steps is None else tuple(SharedStep(*step) for step in steps)
    found = prefilled_together("new", "continued").find(
        TriggerFacts(requests=(NEW, CONTINUED), steps=seen)
    )
    assert (found.crossed, found.brief) == (crossed, brief)


@pytest.mark.parametrize("requests", [(NEW,), (NEW, SentRequest("continued", None))])
def test_a_prompt_without_a_length_shared_no_step(requests: tuple[SentRequest, ...]) -> None:
    shared = TriggerFacts(requests=requests, steps=(SharedStep(2, 1031),))
    found = prefilled_together("new", "continued").find(shared)
    assert (found.crossed, found.evidence) == (False, ("the length of continued is not known",))


def test_two_conditions_show_the_amounts_of_both() -> None:
    first, second = (Amounts(unit, (("needed", 1.0),)) for unit in ("MB", "blocks"))
    both = Condition("one", lambda _: TriggerResult(True, (), "", (first,))) & Condition(
        "two", lambda _: TriggerResult(True, (), "", (second,))
    )
    assert both.find(TriggerFacts()).amounts == (first, second)


@pytest.mark.parametrize(
    ("name", "longest", "length"),
    [
        # A chunked continuation begins 129 tokens after the batch.
        ("tq-chunked-prefill", 20_000, 4096 + 129),
        ("tq-chunked-prefill", 4096 + 129, 4096 + 129),
        # No length is predicted beyond the longest prompt.
        ("tq-chunked-prefill", 4096 + 128, None),
        # A bug of flags, fields or cached prefixes has no length.
        ("tq-mtp-cudagraphs", 20_000, None),
        ("tq-mtp-first-request", 20_000, None),
        ("min-tokens-stop-ids", 20_000, None),
        ("tq-prefix-hit-unreserved", 20_000, None),
    ],
)
def test_the_boundary_of_a_scenario(name: str, longest: int, length: int | None) -> None:
    scenario = find(name)
    command, model = scenario.command_of(scenario.arms[0]), scenario.model
    facts = TriggerFacts(
        batch=command.number("--max-num-batched-tokens"),
        chunked=command.enabled("--enable-chunked-prefill"),
        command=command,
        shape=AttentionShape(
            model.heads, model.kv_heads, model.head_dim, block_size=model.block_size
        ),
    )
    assert shortest_prompt(scenario.trigger, facts, longest) == length


@pytest.mark.parametrize(
    ("over", "longest", "length"),
    [(7, 50, 8), (0, 50, None), (1, 2, 2)],  # every prompt is longer than 0
)
def test_the_boundary_of_a_plain_length(over: int, longest: int, length: int | None) -> None:
    assert shortest_prompt(prefill_over(over), TriggerFacts(batch=100), longest) == length
