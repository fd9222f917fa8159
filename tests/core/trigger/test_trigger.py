from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.command.parse import parse
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
from vllm_repro.trigger.trigger import Condition, SentRequest, TriggerFacts, Wanted, chunks_of
from vllm_repro_diagnosis.boot_facts import BootFacts, Observation, ScheduledChunk, SharedStep

LONG = chunked_prefill(chunks=2) & continuation_over(128)


def facts(tokens: int | None, *, batch: int | None = 4096, **asked: Any) -> TriggerFacts:
    request = SentRequest("long chat", tokens, **asked)
    return TriggerFacts(requests=(request,), batch=batch, chunked=True)


@pytest.mark.parametrize(
    ("tokens", "crossed"),
    [
        (100, False),
        (4096, False),
        (4096 + 128, False),
        (4096 + 129, True),
        (7593, True),
        (8192, True),
    ],
)
def test_the_threshold_of_a_continued_prefill(tokens: int, crossed: bool) -> None:
    assert LONG.find(facts(tokens)).crossed is crossed


@pytest.mark.parametrize(
    ("held_back", "crossed"), [(0, True), (100, False), (200, True), (8192, True)]
)
def test_long_prompts_may_be_held_back_to_smaller_chunks(held_back: int, crossed: bool) -> None:
    command = parse(f"vllm serve m --long-prefill-token-threshold {held_back}")
    asked = (SentRequest("long chat", 4096 + 129, cached_tokens=0),)
    assert (
        continuation_over(128)
        .find(TriggerFacts(requests=asked, batch=4096, chunked=True, command=command))
        .crossed
        is crossed
    )


def test_evidence_names_the_source_of_the_count_and_the_chunks() -> None:
    assert LONG.find(facts(7593)).evidence == (
        "long chat: 7593 prompt tokens by usage, cut at 4096 into 4096 + 3497",
        "a continuation of 3497 tokens, more than 128",
    )
    assert (
        "by /tokenize"
        in LONG.find(facts(7593, counted_by="tokenize", status=None, died=True)).evidence[0]
    )


LIVED = SentRequest("lived", 4096 + 300, cached_tokens=0)
SHORT = SentRequest("short", 50)
REFUSED = SentRequest("refused", 99_999, status=400)
DIED = SentRequest("died", 4096 + 129, "tokenize", status=None, died=True)


@pytest.mark.parametrize(
    ("requests", "brief", "continued"),
    [
        ((SentRequest("first", 4096 + 128, cached_tokens=0), DIED), "4096 + 129 tokens", 129),
        ((LIVED, DIED), "4096 + 129 tokens", 129),
        (
            (SentRequest("first", 4096 + 129, cached_tokens=0), SHORT, LIVED),
            "4096 + 300 tokens",
            300,
        ),
    ],
)
def test_the_evidence_is_of_the_prompt_in_flight_at_the_death_else_of_the_longest(
    requests: tuple[SentRequest, ...], brief: str, continued: int
) -> None:
    found = LONG.find(TriggerFacts(requests=requests, batch=4096, chunked=True))
    assert found.brief == brief
    assert found.evidence[1] == f"a continuation of {continued} tokens, more than 128"


def test_a_prompt_that_crossed_counts_though_another_was_in_flight_at_the_death() -> None:
    died = SentRequest("died", 100, "tokenize", status=None, died=True)
    assert LONG.find(TriggerFacts(requests=(LIVED, died), batch=4096, chunked=True)).crossed


def test_a_prompt_of_just_the_length_hides_no_longer_one() -> None:
    died = SentRequest("died", 128, died=True)
    assert (
        prefill_over(128)
        .find(TriggerFacts(requests=(LIVED, died), batch=4096, chunked=True))
        .crossed
    )


def test_a_prompt_of_unknown_length_hides_no_other_one() -> None:
    died = SentRequest("died", None, died=True)
    assert (
        chunked_prefill()
        .find(TriggerFacts(requests=(LIVED, died), batch=4096, chunked=True))
        .crossed
    )


def test_without_a_crossing_the_evidence_is_of_the_longest_prompt_that_ran() -> None:
    long = SentRequest("longer", 3000)
    (text,) = (
        chunked_prefill()
        .find(TriggerFacts(requests=(REFUSED, long, SHORT), batch=4096, chunked=True))
        .evidence
    )
    assert text.startswith("longer: 3000 prompt tokens"), text


def test_cached_tokens_are_not_prefilled() -> None:
    assert not LONG.find(facts(7593, cached_tokens=4096)).crossed
    found = continuation_over(128).find(facts(385, cached_tokens=256))
    assert found.crossed, found


def test_a_refused_prompt_crosses_nothing() -> None:
    found = LONG.find(facts(7593, status=400))
    assert not found.crossed
    assert "refused it with 400" in found.evidence[0]


def test_what_is_unknown_proves_nothing() -> None:
    for condition in (chunked_prefill(chunks=2), continuation_over(128), prefill_over(128)):
        assert not condition.find(facts(None)).crossed
    assert not LONG.find(facts(7593, batch=None)).crossed
    assert not chunked_prefill().find(replace(facts(9000), chunked=False)).crossed


def test_the_dump_of_the_step_that_died_is_proof_enough() -> None:
    found = LONG.find(TriggerFacts(dump=(ScheduledChunk(4096, 3497),)))
    assert found.crossed
    assert "4096 tokens computed before the step that crashed" in found.evidence[0]


@pytest.mark.parametrize(
    ("chunk", "chunked", "hit"),
    [
        (ScheduledChunk(4096, 3497), True, False),
        (ScheduledChunk(256, 129, new=True), False, True),
        (ScheduledChunk(0, 4096, new=True), False, False),
        (ScheduledChunk(500, 1), False, False),  # a token that was being decoded
    ],
)
def test_the_step_that_died_tells_a_chunk_from_a_prefix_hit(
    chunk: ScheduledChunk, chunked: bool, hit: bool
) -> None:
    dead = TriggerFacts(dump=(chunk,))
    assert (chunked_prefill().find(dead).crossed, prefix_hit().find(dead).crossed) == (chunked, hit)


def test_a_long_first_chunk_beside_a_decoding_request_continues_nothing() -> None:
    dead = TriggerFacts(dump=(ScheduledChunk(500, 1), ScheduledChunk(0, 4096, new=True)))
    assert not LONG.find(dead).crossed


def test_a_prefix_hit_is_what_the_server_counted() -> None:
    found = prefix_hit().find(facts(385, cached_tokens=256))
    assert (found.crossed, found.brief) == (True, "129 tokens after 256 cached")
    assert not prefix_hit().find(facts(385, cached_tokens=0, repeats=256)).crossed


def test_an_engine_that_lives_and_does_not_say_what_was_cached_proves_no_hit() -> None:
    """Of requests at the same time nobody can tell whose the hits were, and the cache may be off."""
    silent = facts(385, cached_tokens=None, repeats=256, batch=100)
    assert not prefix_hit().find(silent).crossed
    assert silent.cached(silent.requests[0]) == 0
    assert silent.uncached(silent.requests[0]) == 129, (
        "no more chunks are counted than there must have been"
    )


@pytest.mark.parametrize(
    ("flags", "cached"), [("", 256), ("--block-size 200", 200), ("--no-enable-prefix-caching", 0)]
)
def test_of_a_request_that_died_the_blocks_filled_before_it_count(flags: str, cached: int) -> None:
    asked = SentRequest("again", 385, "tokenize", repeats=256, status=None, died=True)
    dead = TriggerFacts(
        requests=(asked,), batch=4096, chunked=True, command=parse(f"vllm serve m {flags}")
    )
    found = prefix_hit().find(dead)
    assert found.crossed is (cached > 0)
    assert dead.cached(asked) == cached
    assert continuation_over(128).find(dead).crossed is (cached > 0)


def test_fields_count_when_the_server_read_them() -> None:
    condition = sent_with("min_tokens", "stop_token_ids")
    sent = {"min_tokens": 0, "stop_token_ids": []}

    def crossed(**asked: Any) -> bool:
        return condition.find(
            facts(2, **{"fields": sent, "known": frozenset(sent), **asked})
        ).crossed

    assert crossed()
    assert crossed(status=None, died=True)
    assert crossed(
        status=400, refusal="token_id(s) [999999] in stop_token_ids contain out-of-vocab token ids"
    )
    assert crossed(status=400, refusal="no such token", may_fail=(400,))
    assert not crossed(status=400, refusal="maximum context length is 8192", may_fail=(500,))
    assert not crossed(status=None)
    assert not crossed(fields={"stop_token_ids": [999999]})
    assert not crossed(fields={**sent, "min_tokens": None})
    assert not crossed(known=None), "the server does not show its fields"
    assert not crossed(known=frozenset(["min_tokens"])), (
        "vLLM ignores a field that it does not know"
    )
    assert not crossed(known=frozenset(), status=None, died=True)


def test_a_harmless_request_with_the_same_fields_proves_nothing_of_another() -> None:
    known = frozenset(["min_tokens"])
    requests = [SentRequest("first", 2, fields={"min_tokens": 1}, known=known)]
    requests += [
        SentRequest(
            "second", 2, fields={"min_tokens": 9}, known=known, status=400, refusal="too long"
        )
    ]

    def crossed(condition: Condition, *asked: SentRequest) -> bool:
        return condition.find(TriggerFacts(requests=asked)).crossed

    assert crossed(sent_with("min_tokens"), requests[0])
    assert not crossed(sent_with("min_tokens"), *requests)
    assert crossed(sent_with("min_tokens"), requests[0], replace(requests[1], died=True))
    assert not crossed(sent_with(min_tokens=9), requests[0])
    assert crossed(sent_with(min_tokens=9), requests[0], replace(requests[1], status=200))
    assert not crossed(sent_with("min_tokens", name="second"), *requests)
    assert crossed(sent_with("min_tokens", name="first"), *requests)
    assert str(sent_with("n", min_tokens=9)) == "sent_with('n', min_tokens=9)"
    assert str(sent_with("n", name="first")) == "sent_with('n', name=\"first\")"


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
    found = answered("long chat", 400, 500).find(
        TriggerFacts(requests=(SentRequest("other", 2), *asked))
    )
    assert (found.crossed, found.evidence) == (crossed, (evidence,))
    assert f"{evidence},".startswith(f"long chat was {found.brief},")
    assert str(answered("long chat", 400)) == "answered('long chat', 400)"
    assert answered("long chat", 100, 599).wanted == (Wanted({}, "long chat"),)


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
    words = "while" if crossed else "not while"
    assert (found.crossed, found.evidence) == (
        crossed,
        (f"reset was answered 200, {words} busy was in flight",),
    )
    assert not condition.find(TriggerFacts(requests=asked[:1])).crossed
    assert str(condition) == "answered('reset', 200, during='busy')"
    assert condition.wanted == (Wanted({}, "reset"), Wanted({}, "busy"))


def test_or_takes_the_side_that_was_crossed() -> None:
    either = continuation_over(128) | sent_with("min_tokens")
    found = either.find(facts(100, fields={"min_tokens": 1}, known=frozenset(["min_tokens"])))
    assert found.crossed
    assert found.evidence == ("long chat carried min_tokens=1: answered 200",)
    assert str(either) == "(continuation_over(128) | sent_with('min_tokens'))"


def test_a_chunk_count_below_two_is_no_condition() -> None:
    with pytest.raises(ValueError, match="starts at 2"):
        chunked_prefill(chunks=1)
    with pytest.raises(ValueError, match="names of body fields"):
        sent_with()
    for statuses in ((), (99,), (600,)):
        with pytest.raises(
            ValueError,
            match=r"^answered\(\) takes the name of a request, and HTTP statuses such as 400$",
        ):
            answered("long chat", *statuses)


def test_a_stated_list_of_ids_is_its_own_count() -> None:
    assert (
        "7593 prompt tokens stated as ids" in LONG.find(facts(7593, counted_by="ids")).evidence[0]
    )


@given(st.integers(1, 200_000), st.integers(1, 20_000))
def test_chunks_add_up_and_none_is_larger_than_the_batch(tokens: int, batch: int) -> None:
    cut = chunks_of(tokens, batch)
    assert sum(cut) == tokens
    assert all(0 < chunk <= batch for chunk in cut)
    assert all(chunk == batch for chunk in cut[:-1])
    assert chunks_of(0, batch) == ()


def test_a_flag_that_no_layer_uses_proves_nothing() -> None:
    condition = attention_backend("TURBOQUANT") & LONG
    crossed = facts(7593)
    for backend, expected in (("TURBOQUANT", True), ("FLASH_ATTN", False), (None, False)):
        found = condition.find(replace(crossed, backend=backend))
        assert found.crossed is expected
    assert "boot line is missing" in found.evidence[0]


MTP = """vllm serve m --speculative-config '{"method":"mtp","num_speculative_tokens":3}'"""


def test_drafts_are_what_the_server_says_before_what_it_was_told() -> None:
    listed = TriggerFacts(command=parse(MTP))
    assert drafting().find(listed).crossed
    assert not drafting().find(TriggerFacts(command=parse("vllm serve m"))).crossed
    assert drafting().find(TriggerFacts(args={"speculative_config": {"method": "mtp"}})).crossed
    without = TriggerFacts(args={"max_num_seqs": 1}, command=parse(MTP))
    assert drafting().find(without).brief == "no drafts", (
        "a server that lists its arguments has the last word"
    )


@pytest.mark.parametrize(
    ("boot", "crossed"),
    [
        (BootFacts(), False),
        (BootFacts(cudagraph_mode="NONE"), False),
        (BootFacts(cudagraph_mode="FULL_AND_PIECEWISE"), True),  # it died before it was up
        (BootFacts(cudagraph_mode="FULL_AND_PIECEWISE", ready=True), False),
        (BootFacts(cudagraph_mode="FULL", graphs_captured=True, ready=True), True),
    ],
)
def test_graphs_are_captured_or_were_about_to_be(boot: BootFacts, crossed: bool) -> None:
    assert graphs_captured().find(TriggerFacts(boot=boot)).crossed is crossed


def test_a_guarded_capture_says_what_was_looked_at() -> None:
    boot = BootFacts(cudagraph_mode="FULL_DECODE_ONLY", graphs_captured=True, ready=True)
    seen = Observation("capture", {"captures": 2, "checked": 190, "refused": 0, "recorded": True})
    found = graphs_captured().find(
        TriggerFacts(boot=boot, observed=(Observation("store", {}), seen))
    )
    assert found.evidence[1:] == ("2 captures under the guard: 190 operators checked, 0 refused",)


@pytest.mark.parametrize(
    ("tokens", "batch", "crossed"),
    [(759, 8192, False), (760, 8192, True), (760, 512, False), (None, 8192, False)],
)
def test_a_prefill_counts_what_runs_in_one_step(
    tokens: int | None, batch: int, crossed: bool
) -> None:
    assert prefill_over(759).find(facts(tokens, batch=batch)).crossed is crossed


def test_a_prefill_over_needs_a_request_that_the_engine_got() -> None:
    assert not prefill_over(759).find(facts(2000, status=400)).crossed
    assert not prefill_over(759).find(facts(2000, cached_tokens=1500)).crossed
    assert (
        prefill_over(759).find(facts(2000, status=None, died=True)).brief
        == "2000 tokens in one step"
    )


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


def test_a_prompt_that_was_not_sent_or_not_counted_shared_no_step() -> None:
    steps = (SharedStep(2, 1031),)
    for requests in ((NEW,), (NEW, SentRequest("continued", None))):
        found = prefilled_together("new", "continued").find(
            TriggerFacts(requests=requests, steps=steps)
        )
        assert (found.crossed, found.evidence) == (False, ("the length of continued is not known",))
    for names in (("new",), ("new", "new")):
        with pytest.raises(ValueError, match="two requests or more"):
            prefilled_together(*names)
