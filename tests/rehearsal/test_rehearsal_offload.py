"""The hybrid pool and the stores of the offload connector, against what vLLM's own scheduler does with the same prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearsal.blockstore import Block, BlockStore, FreeList, FreeListError
from rehearsal.defects.offload import SimpleOffload
from rehearsal.forecast import listed_twice
from rehearsal.hybrid import Group, HybridPool
from rehearsal.release import Release
from rehearsal.request import Request, SamplingParams
from rehearsal.scheduler import Scheduler
from tests.rehearsal.rehearsal_process import DEAD_BODY, Start, in_order

DSV4 = (Group(256), Group(64, 128), Group(64, 128), Group(4, 8), Group(8, 128))
"""The groups that vLLM 0.21.0 makes of DeepSeek-V4-Flash's layers."""


@dataclass
class Played:
    """Distinct prompts of one length, one after another, without a server."""

    version: str = "0.21.0"
    blocks: int = 330
    groups: tuple[Group, ...] = (Group(32), Group(32, 128))
    chunk: int = 2048
    cpu_blocks: int = 32_768
    caching: bool = True
    twice: int = 0
    free: tuple[int, int] = (0, 0)
    """What the counter says and what the list has, before the step that died."""

    def dies_at(self, length: int, *, answer: int = 8, requests: int = 4) -> int | None:
        """Number of the request that dies, from 1; None where all live."""
        release = Release.parse(self.version)
        pool = HybridPool(self.blocks, self.groups, self.caching, self.chunk, once=release.frees_blocks_once)
        offload = SimpleOffload(release, pool, self.cpu_blocks)
        scheduler = Scheduler(self.chunk, 8, True, pool, offload)
        for number in range(1, requests + 1):
            prompt = [random.Random(number).randrange(10, 4000), *range(length - 1)]
            request = Request(f"r{number}", prompt, SamplingParams(answer))
            scheduler.add(request)
            try:
                while scheduler.has_work:
                    self.free = (pool.store.free.count, pool.store.free.walk())
                    step = scheduler.schedule()
                    produced = [chunk for chunk in step.chunks if chunk.produces]
                    scheduler.advance(step)
                    request.generated += [0] * len(produced)
                    if len(request.generated) >= answer:
                        scheduler.finish(request)
                    scheduler.settle()
            except FreeListError:
                return number
            finally:
                self.twice = offload.most_twice
        return None


# Outcomes of vLLM's own `Scheduler` and connector with tokens of whole blocks + `over`, blocks of 32, a window of 128 and chunks of
# 2048: the request that died. Some of more than 800 lengths that were held against it, all of which agree.
@pytest.mark.parametrize(
    ("pool", "over", "answer", "outcomes"),
    [
        (Played(), 29, 8, {160: None, 165: None, 166: 3, 171: 3, 172: 2, 177: 2, 191: 2, 192: None, 223: None, 224: None, 226: 2, 227: 2,
                           228: None, 235: None}),
        (Played(blocks=300), 29, 8, {149: None, 151: 4, 154: 4, 155: 3, 161: 3, 162: 2, 178: 2, 179: None}),
        (Played(blocks=400), 29, 8, {232: None, 233: 3, 236: 3}),
        (Played(blocks=450), 29, 8, {177: None, 235: None}),
        (Played(), 0, 8, {166: None, 177: None, 226: None}),
        (Played(), 24, 8, {177: None}),
        (Played(), 25, 8, {177: 2}),
        (Played(), 29, 3, {177: None}),
        (Played(), 29, 4, {177: 2}),
        (Played(), 5, 40, {165: None, 166: 3, 172: 2, 192: None}),
        (Played(caching=False), 29, 8, {177: None}),
        (Played(groups=(Group(32, 128), Group(32))), 29, 8, {177: None}),
        (Played("0.20.2"), 29, 8, {177: 2}),
        (Played("0.22.1"), 29, 8, {177: None}),
        (Played("0.24.0"), 29, 8, {177: None}),
        (Played("0.22.1", cpu_blocks=160), 5, 8, {199: None, 200: 2, 235: 2}),
        (Played("0.23.0", cpu_blocks=100), 5, 8, {176: None, 184: 4, 187: 3, 198: 2, 235: 3}),
        (Played("0.24.0", cpu_blocks=160), 5, 8, {200: None, 235: None}),
    ],
)  # fmt: skip
def test_dies_where_vllms_scheduler_dies(pool: Played, over: int, answer: int, outcomes: dict[int, int | None]) -> None:
    assert {whole: pool.dies_at(whole * 32 + over, answer=answer) for whole in outcomes} == outcomes


def test_the_death_on_record_to_the_block() -> None:
    # One store event of 0.21.0 listed 80 blocks, 54 distinct; then the counter said 96 and the list had 24.
    pool = Played()
    assert pool.dies_at(5693) == 2
    assert (pool.twice, pool.free) == (80 - 54, (96, 24))


def test_the_reported_prompts_in_the_reported_pool() -> None:
    # vLLM 0.21.0's own scheduler with these groups: one event listed 2218 blocks, 1543 distinct; then 8824 counted, 6611 in the list.
    whole = sum(group.blocks_per_request(128_000, 16_384) for group in DSV4)
    pool = Played(blocks=round(145_274 * whole / 128_000), groups=DSV4, chunk=16_384, cpu_blocks=100_000)
    assert pool.blocks == 8151
    assert pool.dies_at(90_109, requests=2) == 2
    assert (pool.twice, pool.free) == (2218 - 1543, (8824, 6611))
    assert pool.dies_at(90_112, requests=2) is None


def test_a_store_may_list_twice_and_hurt_nobody_where_each_block_is_freed_once() -> None:
    pool = Played("0.24.0", cpu_blocks=160)
    assert pool.dies_at(235 * 32 + 5) is None
    assert pool.twice == 28


@pytest.mark.parametrize(("length", "answer", "twice"), [(5693, 8, 26), (5693, 3, 0), (5664, 8, 0), (4000, 8, 0)])
def test_the_forecast_is_what_the_server_does(length: int, answer: int, twice: int) -> None:
    assert listed_twice(length, answer, blocks=330, groups=((32, 0), (32, 128)), batched_tokens=2048) == twice


def test_a_block_appended_twice_is_counted_twice_and_what_stood_between_is_lost() -> None:
    blocks = [Block(number) for number in range(5)]
    free = FreeList(blocks[:1])
    free.append([blocks[1], blocks[2], blocks[3], blocks[1], blocks[4]])
    assert (free.count, free.walk()) == (6, 3)
    with pytest.raises(FreeListError, match=r"^$"):
        free.take(5)


def test_the_end_of_the_list_can_be_taken_and_nothing_can_be_appended_after() -> None:
    # The other text of the same defect (#42571): the counter is one too high for the list.
    blocks = [Block(number) for number in range(3)]
    free = FreeList(blocks[:1])
    free.append([blocks[1], blocks[1]])
    assert len(free.take(3)) == 3
    with pytest.raises(FreeListError, match="prev_free_block of fake_free_list_tail should always exist"):
        free.append([blocks[2]])


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=30), st.booleans())
@settings(max_examples=100, deadline=None)
def test_blocks_that_are_given_back_once_are_never_lost(turns: list[tuple[bool, int]], once: bool) -> None:
    store = BlockStore([Block(number) for number in range(12)], once=once)
    held: list[list[Block]] = []
    for take, count in turns:
        if take and count <= store.free.count:
            held.append(store.take(count))
        elif held:
            store.give_back(held.pop(0))
        assert store.free.count == store.free.walk() == 12 - sum(map(len, held))


def test_a_cached_prefix_needs_every_group() -> None:
    pool = HybridPool(100, (Group(16), Group(16, 32)), True, 256, once=True)
    scheduler = Scheduler(256, 4, True, pool)
    tokens = list(range(200))
    for name, cached in (("first", 0), ("second", 192)):
        request = Request(name, tokens, SamplingParams(1))
        scheduler.add(request)
        step = scheduler.schedule()
        assert request.cached == cached
        scheduler.advance(step)
        scheduler.finish(request)
    for block in pool.blocks:
        if block.key and isinstance(block.key, tuple) and block.key[0] == 1:
            pool.store._forget(block)
    assert pool.cached_prefix(tokens) == 0


SHAPE = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2, "vocab_size": 4096,
    "full_attention_interval": 1, "block_size": 32, "max_position_embeddings": 8192, "window_groups": [[32, 128]],
}  # fmt: skip
FLAGS = (
    "--max-model-len", "7600", "--max-num-batched-tokens", "2048", "--num-gpu-blocks-override", "330",
    "--enable-prefix-caching",
)  # fmt: skip
EAGER = '{"kv_connector":"SimpleCPUOffloadConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":8589934592}}'
LAZY = EAGER.replace('{"cpu', '{"lazy_offload":true,"cpu')
HYBRID = "--no-disable-hybrid-kv-cache-manager"


def long_prompt(first: int) -> list[int]:
    return [first, *(300 + number % 3000 for number in range(5692))]


def test_the_second_long_prompt_kills(start: Start) -> None:
    server = start("0.21.0", *FLAGS, HYBRID, "--kv-transfer-config", EAGER, shape=SHAPE).ready()
    assert "GPU KV cache size: 8,169 tokens" in server.log  # as vLLM words a pool of 330 such blocks
    assert server.complete(long_prompt(1), max_tokens=8).status_code == 200
    answer = server.complete(long_prompt(2), max_tokens=8)
    assert (answer.status_code, answer.text) == (500, DEAD_BODY)
    assert server.exit_code() == 0
    in_order(
        server.log,
        "[core.py:1142] EngineCore encountered a fatal error.",
        'scheduler.py", line 425, in schedule', 'kv_cache_manager.py", line 393, in allocate_slots',
        'kv_cache_coordinator.py", line 187, in allocate_new_blocks', 'line 188, in <genexpr>',
        'single_type_kv_cache_manager.py", line 265, in allocate_new_blocks', 'block_pool.py", line 336, in get_new_blocks',
        'kv_cache_utils.py", line 269, in popleft_n', "    assert curr_block is not None", "[core.py:1142] AssertionError\n",
        "AsyncLLM output_handler failed.",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("0.21.0", (HYBRID,)),
        ("0.21.0", (HYBRID, "--kv-transfer-config", LAZY)),
        ("0.21.0", ("--disable-hybrid-kv-cache-manager", "--kv-transfer-config", EAGER)),
        ("0.21.0", ("--kv-transfer-config", EAGER)),  # a connector turns the hybrid manager off
        ("0.21.0", (HYBRID, "--kv-transfer-config", EAGER, "--no-enable-prefix-caching")),
        ("0.24.0", (HYBRID, "--kv-transfer-config", EAGER)),
    ],
)
def test_who_lives(start: Start, version: str, flags: tuple[str, ...]) -> None:
    server = start(version, *FLAGS, *flags, shape=SHAPE).ready()
    for first in (1, 2, 3):
        assert server.complete(long_prompt(first), max_tokens=8).status_code == 200
    assert server.health() == 200


def test_a_preempted_request_goes_on_and_answers(start: Start) -> None:
    # 192 blocks and more do not fit with a store in flight: the request is preempted, and answered all the same.
    server = start("0.21.0", *FLAGS, HYBRID, "--kv-transfer-config", EAGER, shape=SHAPE).ready()
    prompt = [7, *(300 + number % 3000 for number in range(200 * 32 + 28))]
    answer = server.complete(prompt, max_tokens=8).json()
    assert answer["usage"]["completion_tokens"] == 8
    assert server.metric("vllm:prompt_tokens_total") == len(prompt)


def test_pools_are_worded_as_vllm_words_them() -> None:
    sizes = [sum(group.blocks_per_request(length, 16_384) for group in DSV4) for length in (16_384, 32_000, 128_000)]
    assert all(smaller < larger for smaller, larger in pairwise(sizes))
    assert sizes[-1] == 7182
