"""A KV block listed twice: computed and seen in the lab.

`test_recorded.py` compares the numbers with vLLM's scheduler.
"""

from __future__ import annotations

import pytest

from vllm_repro.command.parse import parse
from vllm_repro.scenario.catalogue import find
from vllm_repro.trigger.offload_store import block_listed_twice, offload_outgrown
from vllm_repro.trigger.trigger import (
    Amounts,
    AttentionShape,
    SentRequest,
    TriggerFacts,
    TriggerResult,
)
from vllm_repro_diagnosis.boot_facts import BootFacts, Observation, boot_facts
from vllm_repro_diagnosis.log_text import read_lines

LAB = AttentionShape(4, 2, 32, 256, ("full", "sliding"), 128)
FLAGS = "--block-size 32 --max-num-batched-tokens 2048 --num-gpu-blocks-override"
LONG = SentRequest("prompt A", 5693, cached_tokens=0, answer_tokens=8)
WHOLE = SentRequest("prompt A", 5664, cached_tokens=0, answer_tokens=8)
STORE = Observation("store", {"event": 3, "blocks": 80, "distinct": 54, "twice": [227, 228]})
PLAIN = Observation("store", {"event": 0, "blocks": 128, "distinct": 128, "twice": []})


def judge(
    *asked: SentRequest,
    blocks: int = 330,
    observed: tuple[Observation, ...] = (),
    shape: AttentionShape | None = LAB,
    chunked: bool | None = True,
    given: int | None = None,
) -> TriggerResult:
    facts = TriggerFacts(
        requests=asked,
        batch=2048,
        chunked=chunked,
        command=parse(f"vllm serve m {FLAGS} {blocks}"),
        args={} if given is None else {"num_gpu_blocks_override": given},
        shape=shape,
        observed=observed,
    )
    return block_listed_twice().find(facts)


def test_a_workload_that_must_list_twice_crosses_in_any_release() -> None:
    found = judge(LONG, observed=(PLAIN, PLAIN))
    # One store event of 0.20.2 and of 0.21.0 listed 80 blocks, 54 of them distinct.
    brief = "26 would be listed twice up to 0.21.0; here none was"
    assert (found.crossed, found.brief) == (True, brief)
    workload = "5693 prompt tokens by usage and an answer of 8, in a pool of 330 blocks"
    assert workload in found.evidence[0]
    assert found.evidence[1] == "seen: 2 store events, none lists a block twice"


def test_what_was_seen_stands_beside_what_was_computed() -> None:
    short = Observation("free_list", {"counter": 106, "walked": 34, "asked": 50})
    found = judge(LONG, observed=(PLAIN, STORE, short))
    assert (found.crossed, found.brief) == (True, "26 listed twice")
    assert found.evidence[1:] == (
        "seen: store event 3 lists 80 blocks, 54 distinct",
        "seen: 50 blocks are asked for, the counter says 106 and the free list has 34",
    )
    bars = (("asked for", 50), ("in the free list", 34), ("by its counter", 106))
    assert found.amounts == (Amounts("blocks", bars),)


def test_what_was_seen_is_enough() -> None:
    assert not judge(WHOLE, observed=(PLAIN,)).crossed
    assert judge(WHOLE, LONG).crossed, "the first request that crosses is the evidence"
    found = judge(WHOLE, observed=(STORE, PLAIN, STORE))
    assert found.crossed
    assert "and 1 more of 3 do so" in found.evidence[1]


@pytest.mark.parametrize(
    ("asked", "blocks", "expected"),
    [
        (WHOLE, 330, "no block is listed twice"),  # no block waits to be filled
        # the answer does not fill it
        (SentRequest("a", 5693, answer_tokens=3), 330, "no block is listed twice"),
        (LONG, 1000, "no block is listed twice"),  # the pool is not short
        (
            SentRequest("a", 5693, cached_tokens=2048, answer_tokens=8),
            330,
            "2048 came from the prefix cache",
        ),
        (SentRequest("a", 5693, answer_tokens=8, status=400), 330, "no request reached the engine"),
    ],
)
def test_near_misses_do_not_cross(asked: SentRequest, blocks: int, expected: str) -> None:
    found = judge(asked, blocks=blocks, observed=(PLAIN,))
    assert not found.crossed
    assert expected in found.evidence[0]


@pytest.mark.parametrize(
    "shape",
    [None, AttentionShape(64, 1, 512, 256), AttentionShape(4, 2, 32, 32, ("sliding", "full"), 128)],
)
def test_another_model_is_not_computed(shape: AttentionShape | None) -> None:
    found = judge(LONG, shape=shape)
    assert (found.crossed, found.evidence[0][:14]) == (False, "not computed: ")


@pytest.mark.parametrize(
    ("chunked", "given", "crossed"),
    [(True, 330, True), (None, 330, True), (False, 330, False), (True, 1000, False)],
)
def test_chunks_and_the_servers_own_flags_decide(
    chunked: bool | None, given: int, crossed: bool
) -> None:
    assert judge(LONG, chunked=chunked, given=given).crossed is crossed


SCO = find("sco-hybrid").model
REPORTED = AttentionShape(
    64, 1, 512, 256, window_groups=tuple(SCO.window_groups), group_pages=tuple(SCO.group_pages)
)


def reported(
    flags: str = "",
    *,
    prompt: int = 90_109,
    tokens: int | None = 145_274,
    version: str | None = None,
) -> TriggerResult:
    command = parse(f"vllm serve m --block-size 256 --max-model-len 128000 {flags}")
    boot = BootFacts(kv_cache_tokens=tokens, vllm_version=version)
    asked = SentRequest("prompt A", prompt, answer_tokens=8)
    facts = TriggerFacts(
        requests=(asked,), batch=16_384, chunked=True, command=command, shape=REPORTED, boot=boot
    )
    return block_listed_twice().find(facts)


def test_the_reported_pool_is_known_by_the_tokens_of_its_log() -> None:
    assert reported().brief == "1541 would be listed twice up to 0.21.0"
    assert reported(prompt=90_112).brief == "none listed twice"
    assert "in a pool of 50,000 blocks" in reported("--num-gpu-blocks-override 50000").evidence[0]
    assert reported(tokens=None).evidence[0].startswith("not computed: ")


@pytest.mark.parametrize(
    ("version", "blocks"),
    [(None, "7,283"), ("0.27.1", "7,283"), ("main", "7,283"), ("0.28.0", "8,152")],
)
def test_releases_log_the_same_pool_in_other_units(version: str | None, blocks: str) -> None:
    """To 0.24.0 a request's need is counted in bytes of the first group, from 0.28.0 in blocks."""
    assert f"in a pool of {blocks} blocks" in reported(version=version).evidence[0]


ROOM = parse("vllm serve m --block-size 32 --num-gpu-blocks-override 31")


def outgrown(
    tokens: list[int],
    boot: BootFacts,
    *,
    flags: bool = True,
    cached: int = 0,
    observed: tuple[Observation, ...] = (),
) -> TriggerResult:
    asked = tuple(
        SentRequest(f"request {number}", length, cached_tokens=cached)
        for number, length in enumerate(tokens)
    )
    facts = TriggerFacts(
        requests=asked,
        batch=256,
        chunked=True,
        command=ROOM if flags else None,
        boot=boot,
        observed=observed,
    )
    return offload_outgrown().find(facts)


@pytest.mark.parametrize(
    ("tokens", "room", "crossed"),
    [
        ([400, 400], 16, False),  # 24 blocks: what stands first in line has never been used
        ([320, 320, 320], 16, True),  # exactly 30 blocks
        ([320, 320, 319], 16, False),  # a block that is not full is not copied
        ([400, 400, 400], 30, True),
        ([400, 400, 400], 31, False),  # room for all that the GPU keeps
    ],
)
def test_the_threshold_of_the_connectors_room(tokens: list[int], room: int, crossed: bool) -> None:
    assert outgrown(tokens, BootFacts(offload_blocks=room)).crossed is crossed


def test_what_was_cached_filled_nothing_new() -> None:
    assert not outgrown([4000], BootFacts(offload_blocks=16), cached=3968).crossed


def test_the_pool_may_be_known_from_the_log_alone() -> None:
    shown = BootFacts(offload_blocks=16, kv_cache_tokens=31 * 16)
    # blocks of 16 tokens, unless a flag says otherwise
    assert outgrown([400, 400], shown, flags=False).crossed
    unknown = outgrown([400, 400, 400], BootFacts(offload_blocks=16), flags=False)
    assert not unknown.crossed
    assert "how many blocks the GPU's cache has" in unknown.evidence[0]
    assert outgrown([400, 400, 400], BootFacts()).brief == "no connector"


def test_what_the_lab_saw_is_evidence() -> None:
    stores = tuple(
        Observation("store", {"event": n, "blocks": 5, "distinct": 5, "twice": []})
        for n in range(40)
    )
    found = outgrown([400, 400, 400], BootFacts(offload_blocks=16), observed=stores)
    assert found.evidence[-1] == "seen: 40 store events, 200 blocks in all"
    (amounts,) = found.amounts
    assert [amount for _, amount in amounts.bars] == [36, 30, 15]


@pytest.mark.parametrize(
    ("words", "room"), [("CPU blocks (1.00 GB, mode=lazy)", 12), ("offload blocks (1.00 GB", 12)]
)
def test_the_room_is_read_from_the_boot_line_of_each_release(words: str, room: int) -> None:
    line = (
        f"INFO 11-22 07:00:00 [manager.py:194] SimpleCPUOffloadScheduler: Allocating 12 {words}\n"
    )
    assert boot_facts(read_lines(line)).offload_blocks == room
