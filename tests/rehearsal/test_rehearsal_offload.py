"""The hybrid pool and the stores of the offload connector: in single parts, in the reported pool, and in a server."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.pools import Fate, Pool, rehearsed
from rehearsal.blockstore import Block, BlockStore, FreeList, FreeListError
from rehearsal.config import resolve
from rehearsal.flags import parse
from rehearsal.forecast import listed_twice
from rehearsal.hybrid import Group, HybridPool
from rehearsal.release import Release
from rehearsal.request import Request, SamplingParams
from rehearsal.scheduler import Scheduler
from rehearsal.shape import resolve as resolve_shape
from tests.rehearsal.rehearsal_process import DEAD_BODY, Start, in_order

from vllm_repro.scenario.catalogue import find

# What vLLM's own scheduler does with prompts in pools of two groups is in fixtures/reference, and tests/reference plays it.


def test_the_death_on_record_to_the_block() -> None:
    # One store event of 0.21.0 listed 80 blocks, 54 distinct; then 50 blocks were asked for, the counter said 106 and the list had 34.
    pool = Pool("0.21.0", 330, ((32, 0), (32, 128)), 2048, 32_768, True, ((5693, 8),) * 4)
    assert rehearsed(pool) == Fate(dies=2, twice=(80 - 54, 0), lost=(106, 34, 50))


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
@settings(max_examples=100)
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


@pytest.mark.parametrize(("version", "blocks"), [("0.20.0", 7283), ("0.24.0", 7283), ("0.28.0", 8152)])
def test_the_reported_pool_is_worded_by_the_release(version: str, blocks: int) -> None:
    model = find("sco-hybrid").model
    told = {"VLLM_REHEARSAL_SHAPE": json.dumps(model.shape())}
    words = "serve m --max-model-len 128000 --max-num-batched-tokens 16384 --no-disable-hybrid-kv-cache-manager"
    release = Release.parse(version)
    shape = resolve_shape(None, told)
    config = resolve(parse(words.split(), release), shape, release, "uni")
    assert config.num_blocks(shape, 0) == blocks
    assert config.tokens_of(7283) == (145_274 if blocks == 7283 else 129_800)
