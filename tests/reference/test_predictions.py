"""What the harness computes of a prompt before it is believed, against what real releases did with it."""

from __future__ import annotations

from packaging.version import Version
from reference.pools import Pool
from reference.table import Boot
from reference.tables.sco_hybrid import AMPLE

from tests.reference.recorded import facts, locked, recording
from vllm_repro.commands.command import parse
from vllm_repro.offload import block_listed_twice
from vllm_repro.trigger import Asked, AttentionShape, Continuation, TriggerFacts, continuations
from vllm_repro.workspace import (
    DECODE_THRESHOLD,
    capture_batch,
    continuation_bytes,
    decode_bytes,
    workspace_outgrown,
)

TQ, SCO = "tq-chunked-prefill", "sco-hybrid"
MB = 2**20


def rows() -> list[tuple[Boot, int]]:
    return recording(TQ).rows


def largest(found: TriggerFacts) -> int:
    """Most bytes that a continuation of the prompt asks for."""
    assert found.shape is not None
    asked = [part.context for part in continuations(found) if part.tokens > DECODE_THRESHOLD]
    return max((continuation_bytes(found.shape, context, found.block_size) for context in asked), default=0)


def test_a_prompt_dies_where_it_asks_for_more_than_is_locked_and_nowhere_else() -> None:
    judged = 0
    for boot, number in rows():
        shown = recording(TQ).boots[boot]
        if not (held := locked(shown)):
            continue  # nothing is locked without graphs, and 0.20.2 locks nothing
        found = facts(TQ, boot, shown, number)
        assert (largest(found) > held) == (shown.answers[number].status == 500), (boot, number)
        judged += 1
    assert judged >= 20


def test_the_trigger_has_crossed_in_the_prompt_that_killed_and_in_none_before_it() -> None:
    crossed = 0
    for boot, number in rows():
        shown = recording(TQ).boots[boot]
        found = facts(TQ, boot, shown, number)
        if not locked(shown) or (found.reserved and found.chunked):
            continue  # a context of any length is reserved: that it would have been too much shows nowhere
        finding = workspace_outgrown().find(found)
        assert finding.crossed == (shown.answers[number].status == 500), (boot, number, finding)
        crossed += finding.crossed
    assert crossed >= 5


def test_what_would_have_crossed_lives_where_it_is_reserved() -> None:
    crossed = []
    for boot, number in rows():
        shown = recording(TQ).boots[boot]
        found = facts(TQ, boot, shown, number)
        if found.reserved and found.chunked:
            crossed.append(workspace_outgrown().find(found).crossed)
            assert shown.answers[number].status in (200, 400)
    assert {True, False} == set(crossed)


def test_the_step_that_died_is_the_one_that_was_computed_and_asked_for_as_much() -> None:
    for boot, shown in recording(TQ).boots.items():
        if shown.died:
            found = facts(TQ, boot, shown, len(shown.answers) - 1)
            step = Continuation(*shown.step[0])
            assert step in continuations(found)
            assert found.shape is not None
            asked = continuation_bytes(found.shape, step.context, found.block_size)
            assert f"requires {asked / MB:.2f} MB" in (shown.message or "")


def test_what_decoding_locks_is_computed_to_the_byte() -> None:
    seen = set()
    for boot, shown in recording(TQ).boots.items():
        found, held = facts(TQ, boot, shown, 0), locked(shown)
        sequences = found.number("--max-num-seqs")
        assert found.shape is not None
        assert sequences is not None
        if held and not (found.reserved and found.chunked):
            assert held == decode_bytes(found.shape, sequences if found.reserved else capture_batch(sequences))
            seen.add(sequences)
    assert len(seen) >= 3


def test_without_a_lock_the_workspace_grows_to_what_was_computed() -> None:
    grown = 0
    for boot, shown in recording(TQ).boots.items():
        if locked(shown) is not None:
            continue
        asked = {
            f"{continuation_bytes(found.shape, part.context, found.block_size) / MB:.2f}"
            for number in range(len(shown.answers))
            for found in [facts(TQ, boot, shown, number)]
            for part in continuations(found)
            if found.shape and part.tokens > DECODE_THRESHOLD
        }
        sizes = [line.rsplit(" ", 1)[-1] for line in shown.workspace if ":_continuation_prefill" in line]
        assert set(sizes) <= asked
        grown += len(sizes)
    assert grown >= 3


def judged_pools() -> list[Pool]:
    """Those that the arithmetic is about: to 0.21.0, with room for every store, full attention first."""
    return [
        pool
        for pool in recording(SCO).pools
        if Version(pool.release) < Version("0.22.0")
        and pool.cpu_blocks == AMPLE
        and pool.caching
        and not pool.groups[0][1]
    ]


def first_prompt(pool: Pool, shape: AttentionShape) -> TriggerFacts:
    size = pool.groups[0][0]
    command = parse(f"vllm serve m --block-size {size} --num-gpu-blocks-override {pool.blocks} --max-model-len 32768")
    tokens, answer = pool.prompts[0]
    asked = Asked("first", tokens, cached_tokens=0, answer_tokens=answer)
    return TriggerFacts((asked,), pool.chunk, True, command=command, shape=shape)


def test_a_block_is_listed_twice_where_it_was_computed_and_as_often() -> None:
    computed, crossed = 0, 0
    for pool in judged_pools():
        (size, _), (_, window) = pool.groups
        shape = AttentionShape(4, 2, 32, size, ("full", "sliding"), window)
        finding = block_listed_twice().find(first_prompt(pool, shape))
        if "not computed" in finding.evidence[0]:
            continue
        twice = recording(SCO).pools[pool].twice[0]
        assert finding.crossed == (twice > 0), (pool, finding)
        if twice:
            assert finding.brief == f"{twice} must be listed twice to 0.21.0"
        computed, crossed = computed + 1, crossed + finding.crossed
    assert computed >= len(judged_pools()) * 0.6
    assert crossed >= 20


def test_played_through_it_comes_to_the_same_and_always_to_something() -> None:
    for pool in judged_pools():
        shape = AttentionShape(4, 2, 32, pool.groups[0][0], window_groups=pool.groups[1:])
        finding = block_listed_twice().find(first_prompt(pool, shape))
        twice = recording(SCO).pools[pool].twice[0]
        assert finding.crossed == (twice > 0), (pool, finding)
        if twice:
            assert finding.brief == f"{twice} must be listed twice to 0.21.0"


def test_none_dies_that_did_not_list_a_block_twice() -> None:
    fates = recording(SCO).pools.values()
    assert all(any(fate.twice) for fate in fates if fate.dies)
    assert any(any(fate.twice) and not fate.dies for fate in fates)


def test_a_server_does_what_the_scheduler_alone_does() -> None:
    found = recording(SCO)
    for boot, shown in found.boots.items():
        blocks = facts(SCO, boot, shown, 0).number("--num-gpu-blocks-override")
        prompts = tuple((prompt.tokens, prompt.answer) for prompt in boot.prompts)
        (fate,) = (
            fate
            for pool, fate in found.pools.items()
            if (pool.release, pool.blocks, pool.prompts) == (boot.release, blocks, prompts)
        )
        assert fate.dies == (len(shown.answers) if shown.died else 0)
        assert (max(fate.twice), fate.lost) == (shown.twice, shown.lost)
    assert any(shown.lost for shown in found.boots.values())
