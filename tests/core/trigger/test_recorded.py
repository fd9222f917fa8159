"""The arithmetic of triggers against what real releases did (`fixtures/reference`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from packaging.version import Version

from tests.core.trigger import recorded
from tests.core.trigger.recorded import Pool, Server, command_of, facts
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.lab_launch import graph_mode
from vllm_repro.trigger.block_pool import BlockPool, Group, blocks_of_tokens
from vllm_repro.trigger.sparse_prefill import (
    Shapes,
    Sizes,
    indexer_bytes,
    longest_that_fits,
    prefill_bytes,
)
from vllm_repro.trigger.trigger import AttentionShape, Continuation, TriggerFacts, continuations
from vllm_repro.trigger.turboquant_workspace import (
    DECODE_THRESHOLD,
    capture_batch,
    continuation_bytes,
    decode_bytes,
    workspace_outgrown,
)

TQ, MTP, DSV4, SCO = "tq-chunked-prefill", "tq-mtp-cudagraphs", "dsv4-tp2", "sco-hybrid"
MB = 2**20
AMPLE = 32_768
"""CPU blocks with which the connector never waits for room."""


def rows() -> list[tuple[Server, int]]:
    """Return (server, number of the prompt) for every prompt that a TurboQuant server received."""
    return [
        (server, number) for server in recorded.servers(TQ) for number in range(len(server.answers))
    ]


def died(server: Server, number: int) -> bool:
    return server.answers[number][0] == 500


def shape_of(found: TriggerFacts) -> AttentionShape:
    assert found.shape is not None
    return found.shape


def largest(found: TriggerFacts) -> int:
    """Return the most bytes that a continuation of the prompt asks for."""
    asked = [part.context for part in continuations(found) if part.tokens > DECODE_THRESHOLD]
    shape, size = shape_of(found), found.block_size
    return max((continuation_bytes(shape, context, size) for context in asked), default=0)


def test_a_continuation_dies_if_it_needs_more_than_is_locked() -> None:
    judged = crossed = 0
    for server, number in rows():
        if not server.locked:
            continue  # nothing is locked without graphs, and 0.20.2 locks nothing
        found = facts(TQ, server, number)
        assert (largest(found) > server.locked) == died(server, number), (server, number)
        judged += 1
        # room for any context hides what would have been too much
        if not (found.reserved and found.chunked):
            finding = workspace_outgrown().find(found)
            assert finding.crossed == died(server, number), (server, number, finding)
            crossed += finding.crossed
    assert judged >= 20
    assert crossed >= 5


def test_a_release_that_reserves_room_always_lives() -> None:
    crossed = set()
    for server, number in rows():
        found = facts(TQ, server, number)
        if found.reserved and found.chunked:
            crossed.add(workspace_outgrown().find(found).crossed)
            assert not died(server, number)
    assert crossed == {True, False}


def test_the_size_of_the_step_that_died_is_computed() -> None:
    ragged = 0
    for server in filter(lambda one: one.died, recorded.servers(TQ)):
        found = facts(TQ, server, len(server.answers) - 1)
        step = Continuation(*server.step[0])
        assert step in continuations(found)
        asked = continuation_bytes(shape_of(found), step.context, found.block_size)
        assert f"requires {asked / MB:.2f} MB" in (server.message or "")
        ragged += step.context % found.block_size > 0
    assert ragged, "contexts that end inside a block are among them"


def test_decoding_locks_what_is_computed() -> None:
    seen = set()
    for server in recorded.servers(TQ):
        found = facts(TQ, server, 0)
        sequences = found.number("--max-num-seqs")
        assert sequences is not None
        if server.locked and not (found.reserved and found.chunked):
            batch = sequences if found.reserved else capture_batch(sequences)
            assert server.locked == decode_bytes(shape_of(found), batch)
            seen.add(sequences)
    assert len(seen) >= 3


def test_a_workspace_without_a_lock_grows_to_what_is_computed() -> None:
    grown = 0
    for server in filter(lambda one: one.locked is None, recorded.servers(TQ)):
        asked = {
            f"{continuation_bytes(found.shape, part.context, found.block_size) / MB:.2f}"
            for number in range(len(server.answers))
            for found in [facts(TQ, server, number)]
            for part in continuations(found)
            if found.shape and part.tokens > DECODE_THRESHOLD
        }
        # A line is "CALLER BEFORE -> AFTER".
        sizes = [
            line.rsplit(" ", 1)[-1] for line in server.workspace if ":_continuation_prefill" in line
        ]
        assert set(sizes) <= asked
        grown += len(sizes)
    assert grown >= 3


def test_computed_cached_tokens_equal_the_counted_ones() -> None:
    computed = inside = 0
    for server, number in rows():
        found = facts(TQ, server, number)
        (asked,) = found.requests
        if asked.cached_tokens is not None:
            assert (
                found.cached(replace(asked, cached_tokens=None, died=True)) == asked.cached_tokens
            ), (server, number)
            computed += asked.cached_tokens > 0
            inside += asked.cached_tokens > 0 and asked.repeats % found.block_size > 0
    assert computed >= 10
    assert inside >= 2, "heads that end inside a block are among them"


def test_drafts_under_graphs_kill_with_turboquant_only() -> None:
    asked = 0
    for server in recorded.servers(MTP):
        command = command_of(MTP, server)
        graphs = not command.has("--enforce-eager") and graph_mode(command) != "NONE"
        turboquant = (command.get("--kv-cache-dtype") or "").startswith("turboquant_")
        deadly = graphs and turboquant and command.has("--speculative-config")
        assert server.died == (deadly and Version(server.release) < Version("0.24.0")), server
        assert server.phase == (
            ("warmup" if server.release == "0.20.2" else "request") if server.died else None
        )
        if server.died and server.answers:
            found = facts(MTP, server, 0)
            needed = decode_bytes(shape_of(found), 1) / MB
            assert f"requires {needed:.2f} MB, current size is 0.00 MB" in (server.message or "")
            assert server.locked == 0
            asked += 1
    assert asked >= 2


def sparse(server: Server) -> tuple[Shapes, Sizes]:
    """Return whose shapes a server's prefills have, and the sizes that they depend on."""
    command = command_of(DSV4, server)
    longest, batch = (
        command.number(flag) or 0 for flag in ("--max-model-len", "--max-num-batched-tokens")
    )
    heads = find(DSV4).model.heads // (command.number("--tensor-parallel-size") or 1)
    return Shapes.BRANCH if server.arm == "branch" else Shapes.RELEASE, Sizes(longest, batch, heads)


def test_the_bytes_of_each_sparse_prefill_are_computed() -> None:
    ratios: Counter[int] = Counter()
    continued = 0
    for server in recorded.servers(DSV4):
        shapes, sizes = sparse(server)
        for seen in server.prefills:
            kind = {1: "sliding", 4: "sparse", 128: "compressed"}[seen.ratio]
            before = (sum(seen.prompts) - seen.tokens,) if len(seen.prompts) == 1 else ()
            tokens = (seen.tokens,) if before else seen.prompts
            assert sum(tokens) == seen.tokens
            assert (
                prefill_bytes(shapes, replace(sizes, kinds=(kind,)), tokens, before) == seen.bytes
            ), (server, seen)
            ratios[seen.ratio] += 1
            continued += any(before)
    assert min(ratios[ratio] for ratio in (1, 4)) >= 5
    assert continued >= 3


def test_a_sparse_prefill_dies_if_it_outgrows_the_indexer() -> None:
    deaths = 0
    for server in recorded.servers(DSV4):
        shapes, sizes = sparse(server)
        together = any(prompt.beside for prompt in server.prompts)
        if together or not server.arm or "--enforce-eager" in server.flags:
            assert together or not server.died
            continue
        fits = longest_that_fits(shapes, sizes)
        for prompt, (status, _) in zip(server.prompts, server.answers, strict=False):
            if status != 400:
                assert (prompt.tokens > fits) == (status == 500), (server, prompt)
        assert server.locked == indexer_bytes(sizes.max_model_len)
        deaths += server.died
    assert deaths >= 2


def listed_twice(pool: Pool) -> int:
    """Return the computed blocks listed twice for the first prompt of a pool."""
    return BlockPool(
        pool.blocks, [Group(*group) for group in pool.groups], pool.chunk
    ).listed_twice(*pool.prompts[0])


def test_the_blocks_listed_twice_are_computed() -> None:
    """Compare releases to 0.21.0, whose scan waits at a partial block, with room for each store."""
    judged = [
        pool
        for pool in recorded.pools()
        if Version(pool.release) < Version("0.22.0") and pool.cpu_blocks == AMPLE and pool.caching
    ]
    for pool in judged:
        assert listed_twice(pool) == pool.twice[0], pool
    assert len(judged) >= 100
    assert sum(pool.twice[0] > 0 for pool in judged) >= 20
    assert max(len(pool.groups) for pool in judged) == 5, "DeepSeek-V4's groups are among them"


def test_no_engine_dies_that_did_not_list_a_block_twice() -> None:
    assert all(any(pool.twice) for pool in recorded.pools() if pool.dies)
    assert any(any(pool.twice) and not pool.dies for pool in recorded.pools())


def test_a_pool_logged_in_tokens_has_its_blocks() -> None:
    for size in recorded.sizes():
        groups = [Group(*group) for group in size.groups]
        assert (
            blocks_of_tokens(size.tokens, size.longest, size.batch, groups, size.pages)
            == size.blocks
        ), size


@pytest.mark.parametrize("layers", [43, 4])
def test_the_pool_of_the_scenario_is_the_reported_one(
    layers: int,
) -> None:
    """Compare tokens, GiB, and the blocks of the tiny model's server with the report."""
    model, command = find(SCO).model, find(SCO).command_with_dummy(find(SCO).arms[0])
    blocks = command.number("--num-gpu-blocks-override")
    given = [
        size for size in recorded.sizes() if (size.release, size.longest) == ("0.21.0", 128_000)
    ]
    size = next(one for one in given if len(one.ratios) == layers)
    assert size.groups == ((256, 0), *map(tuple, model.window_groups))
    assert size.blocks == blocks
    whole = size.block_bytes * (1 if layers == 43 else 11)
    assert round(size.blocks * whole / 2**30, 2) == model.kv_cache_gib
    if layers == 43:
        assert (size.tokens, size.pages) == (model.kv_cache_tokens, tuple(model.group_pages))


def test_a_server_does_what_the_scheduler_alone_does() -> None:
    for server in recorded.servers(SCO):
        blocks = facts(SCO, server, 0).number("--num-gpu-blocks-override")
        prompts = tuple((prompt.tokens, prompt.answer) for prompt in server.prompts)
        (pool,) = (
            one
            for one in recorded.pools()
            if (one.release, one.blocks, one.prompts) == (server.release, blocks, prompts)
        )
        assert pool.dies == (len(server.answers) if server.died else 0)
        assert (max(pool.twice), pool.lost) == (server.twice, server.lost)
    assert any(server.lost for server in recorded.servers(SCO))
