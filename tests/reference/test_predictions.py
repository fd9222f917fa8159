"""What the harness computes of a prompt before it is believed, against what real releases did with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from packaging.version import Version
from reference.pools import Pool, Sized
from reference.servers import arm_of
from reference.table import Boot
from reference.tables.sco_hybrid import AMPLE, FLASH, GROUPS, REPORTED, STAND_IN, WINDOW_EDGE

from tests.reference.recorded import facts, locked, recording
from vllm_repro.command.command import ServeCommand
from vllm_repro.command.parse import parse
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.lab_launch import graph_mode
from vllm_repro.trigger.block_groups import GroupedPool, listed_twice
from vllm_repro.trigger.offload_store import Pool as Whole
from vllm_repro.trigger.offload_store import block_listed_twice, own_blocks_back
from vllm_repro.trigger.sparse_prefill import Shapes, Sizes, indexer_bytes, longest_that_fits, prefill_bytes
from vllm_repro.trigger.trigger import Asked, AttentionShape, Continuation, TriggerFacts, continuations
from vllm_repro.trigger.turboquant_workspace import (
    DECODE_THRESHOLD,
    capture_batch,
    continuation_bytes,
    decode_bytes,
    workspace_outgrown,
)

TQ, MTP, DSV4, SCO = "tq-chunked-prefill", "tq-mtp-cudagraphs", "dsv4-tp2", "sco-hybrid"
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


def test_what_would_be_reckoned_of_a_prompt_that_died_is_what_the_server_counts() -> None:
    """Of a death no counter tells; of these prompts, which were answered, one does. Heads end inside a block too."""
    reckoned = inside = 0
    for boot, number in rows():
        shown = recording(TQ).boots[boot]
        found = facts(TQ, boot, shown, number)
        (asked,) = found.asked
        if asked.cached_tokens is not None:
            assert found.cached(replace(asked, cached_tokens=None, died=True)) == asked.cached_tokens, (boot, number)
            reckoned += asked.cached_tokens > 0
            inside += asked.cached_tokens > 0 and asked.repeats % found.block_size > 0
    assert reckoned >= 10
    assert inside >= 2


def test_continued_contexts_that_are_no_whole_blocks_are_among_those_that_were_seen() -> None:
    """Else the sizes above would agree with arithmetic that forgets the rest of a block."""
    ragged = [
        part
        for boot, number in rows()
        for found in [facts(TQ, boot, recording(TQ).boots[boot], number)]
        if recording(TQ).boots[boot].answers[number].status == 500
        for part in continuations(found)
        if part.context % found.block_size and part.tokens > DECODE_THRESHOLD
    ]
    assert ragged


def drafts(boot: Boot) -> ServeCommand:
    scenario = find(MTP)
    return scenario.command_in_lab(arm_of(scenario, boot))


def test_drafts_under_graphs_kill_with_turboquant_and_without_one_of_these_nothing_dies() -> None:
    for boot, shown in recording(MTP).boots.items():
        command = drafts(boot)
        graphs = not command.has("--enforce-eager") and graph_mode(command) != "NONE"
        turboquant = (command.get("--kv-cache-dtype") or "").startswith("turboquant_")
        deadly = graphs and turboquant and command.has("--speculative-config")
        assert shown.died == (deadly and Version(boot.release) < Version("0.24.0")), boot
        assert shown.phase == (("warmup" if boot.release == "0.20.2" else "request") if shown.died else None)


def test_what_the_first_request_asks_for_is_what_decoding_one_sequence_takes() -> None:
    asked = []
    for boot, shown in recording(MTP).boots.items():
        if shown.died and shown.answers:
            found = facts(MTP, boot, shown, 0)
            assert found.shape is not None
            assert locked(shown) == 0
            asked.append(f"requires {decode_bytes(found.shape, 1) / MB:.2f} MB, current size is 0.00 MB")
            assert asked[-1] in (shown.message or "")
    assert len(asked) >= 2


def sparse(boot: Boot) -> tuple[Shapes, Sizes]:
    """Whose shapes a boot's prefills have, and what they depend on."""
    scenario = find(DSV4)
    command = scenario.command_in_lab(arm_of(scenario, boot))
    numbers = [command.number(flag) for flag in ("--max-model-len", "--max-num-batched-tokens")]
    longest, batch = [number or 0 for number in numbers]
    heads = scenario.model.heads // (command.number("--tensor-parallel-size") or 1)
    return Shapes.BRANCH if boot.arm == "branch" else Shapes.RELEASE, Sizes(longest, batch, heads)


def test_every_prefill_asks_to_the_byte_for_what_is_computed() -> None:
    ratios: Counter[int] = Counter()
    continued = 0
    for boot, shown in recording(DSV4).boots.items():
        shapes, sizes = sparse(boot)
        for seen in shown.prefills:
            kind = {1: "sliding", 4: "sparse", 128: "compressed"}[seen.ratio]
            before = (sum(seen.prompts) - seen.tokens,) if len(seen.prompts) == 1 else ()
            tokens = (seen.tokens,) if before else seen.prompts
            assert sum(tokens) == seen.tokens
            assert prefill_bytes(shapes, replace(sizes, kinds=(kind,)), tokens, before) == seen.bytes, (boot, seen)
            ratios[seen.ratio] += 1
            continued += any(before)
    assert min(ratios[ratio] for ratio in (1, 4)) >= 5
    assert continued >= 3


def test_a_prompt_dies_where_it_asks_for_more_than_the_indexer_and_nothing_is_reserved() -> None:
    died = 0
    for boot, shown in recording(DSV4).boots.items():
        shapes, sizes = sparse(boot)
        if boot.together or not boot.arm or "--enforce-eager" in boot.flags:
            assert boot.together or not shown.died
            continue
        fits = longest_that_fits(shapes, sizes)
        for prompt, answer in zip(boot.prompts, shown.answers, strict=False):
            if answer.status != 400:
                assert (prompt.tokens > fits) == (answer.status == 500), (boot, prompt)
        assert locked(shown) == indexer_bytes(sizes.max_model_len)
        died += shown.died
    assert died >= 2


def judged_pools() -> list[Pool]:
    """Those that the arithmetic is about: to 0.21.0, with room for every store, full attention first."""
    return [
        pool
        for pool in recording(SCO).pools
        if len(pool.groups) == 2
        and Version(pool.release) < Version("0.22.0")
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


def test_what_the_window_has_given_back_is_known_to_the_token() -> None:
    """A window of one token more has left one block fewer, and then the prompt gets none of its own."""
    counted = {}
    for pool in recording(SCO).pools:
        (size, _), (_, window), *more = pool.groups
        if pool.blocks == WINDOW_EDGE[0] and not more and window in WINDOW_EDGE[2]:
            prompt, _ = pool.prompts[0]
            counted[window] = own_blocks_back(prompt, Whole(pool.blocks, size, pool.chunk, window))
            fate = recording(SCO).pools[pool]
            assert (counted[window] is None) == (not any(fate.twice))
            assert counted[window] in (None, fate.twice[0] + 1)
    assert counted == {128: 60, 129: 60, 130: None}


def test_a_pool_that_a_release_words_in_tokens_has_the_blocks_that_it_was_given() -> None:
    for sized, worded in recording(SCO).sizes.items():
        pool = GroupedPool.of_tokens(worded.tokens, sized.longest, sized.batch, worded.groups, worded.pages)
        assert pool.blocks == sized.blocks, sized
    assert len(recording(SCO).sizes) >= 20


def test_the_scenarios_own_pool_is_the_reported_one_and_its_stand_in_is_cut_alike() -> None:
    """By the report's own three numbers: tokens, GiB, and the blocks that its stand-in is told to have."""
    model, command = find(SCO).model, find(SCO).command_with_dummy(find(SCO).arms[0])
    told = {sized.ratios: worded for sized, worded in recording(SCO).sizes.items() if sized == _reported(sized)}
    whole, made = told[FLASH], told[STAND_IN]
    assert whole.groups == made.groups == ((256, 0), *map(tuple, model.window_groups))
    assert whole.pages == tuple(model.group_pages)
    assert whole.tokens == model.kv_cache_tokens
    assert command.number("--num-gpu-blocks-override") == REPORTED[0]
    assert round(REPORTED[0] * whole.block_bytes / 2**30, 2) == model.kv_cache_gib
    assert whole.block_bytes == 11 * made.block_bytes


def _reported(sized: Sized) -> Sized:
    return Sized("0.21.0", sized.ratios, *REPORTED)


def test_the_reported_prompts_in_the_reported_pool() -> None:
    """The second one dies of the 1,541 blocks that the first one's answer has listed twice; a prompt of whole blocks lists none."""
    fates = {pool.prompts[0]: fate for pool, fate in recording(SCO).pools.items() if len(pool.groups) > 2}
    for (prompt, answer), fate in fates.items():
        pool = GroupedPool(REPORTED[0], REPORTED[2], GROUPS)
        assert listed_twice(prompt, answer, pool) == fate.twice[0]
        assert bool(fate.dies) == (fate.twice[0] > 0)
    assert fates[90_109, 8].twice[0] == 1541


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
