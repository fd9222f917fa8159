"""A KV block listed twice: computed and seen in the lab.

`test_recorded.py` compares the numbers with vLLM's scheduler.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

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


@pytest.mark.parametrize(
    ("found", "crossed", "shown"),
    [
        (judge(WHOLE, observed=(PLAIN,)), False, "no block is listed twice"),
        (judge(WHOLE, LONG), True, ""),  # the first request that crosses is the evidence
        (judge(WHOLE, observed=(STORE, PLAIN, STORE)), True, "and 1 more of 3 do so"),
        # the answer does not fill the block that waits
        (
            judge(SentRequest("a", 5693, answer_tokens=3), observed=(PLAIN,)),
            False,
            "no block is listed twice",
        ),
        # the pool is not short
        (judge(LONG, blocks=1000, observed=(PLAIN,)), False, "no block is listed twice"),
        (
            judge(SentRequest("a", 5693, cached_tokens=2048, answer_tokens=8), observed=(PLAIN,)),
            False,
            "2048 came from the prefix cache",
        ),
        (
            judge(SentRequest("a", 5693, answer_tokens=8, status=400), observed=(PLAIN,)),
            False,
            "no request reached the engine",
        ),
        # Another model is not computed.
        *(
            (judge(LONG, shape=shape), False, "^not computed: ")
            for shape in (
                None,
                AttentionShape(64, 1, 512, 256),
                AttentionShape(4, 2, 32, 32, ("sliding", "full"), 128),
            )
        ),
        # Chunks and the server's own flags decide.
        (judge(LONG, given=330), True, ""),
        (judge(LONG, chunked=None, given=330), True, ""),
        (judge(LONG, chunked=False, given=330), False, ""),
        (judge(LONG, given=1000), False, ""),
    ],
)
def test_a_block_listed_twice(found: TriggerResult, crossed: bool, shown: str) -> None:
    assert found.crossed is crossed
    assert re.search(shown, "; ".join(found.evidence))


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


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (reported, "^1541 would be listed twice up to 0.21.0: "),
        (partial(reported, prompt=90_112), "^none listed twice: "),
        (partial(reported, "--num-gpu-blocks-override 50000"), ": .*in a pool of 50,000 blocks"),
        (partial(reported, tokens=None), ": not computed: "),
        # To 0.24.0 a request's need is counted in bytes of the first group, from 0.28.0 in blocks.
        (partial(reported, version=None), ": .*in a pool of 7,283 blocks"),
        (partial(reported, version="0.27.1"), ": .*in a pool of 7,283 blocks"),
        (partial(reported, version="main"), ": .*in a pool of 7,283 blocks"),
        (partial(reported, version="0.28.0"), ": .*in a pool of 8,152 blocks"),
    ],
)
def test_the_reported_pool_is_known_by_the_tokens_of_its_log(
    found: Callable[[], TriggerResult], shown: str
) -> None:
    result = found()
    assert re.search(shown, f"{result.brief}: {result.evidence[0]}")


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


ROOM_FOR_16 = BootFacts(offload_blocks=16)


@pytest.mark.parametrize(
    ("found", "crossed", "shown"),
    [
        # 24 blocks: what stands first in line has never been used
        (outgrown([400, 400], ROOM_FOR_16), False, ""),
        (outgrown([320, 320, 320], ROOM_FOR_16), True, ""),  # exactly 30 blocks
        # a block that is not full is not copied
        (outgrown([320, 320, 319], ROOM_FOR_16), False, ""),
        (outgrown([400, 400, 400], BootFacts(offload_blocks=30)), True, ""),
        # room for all that the GPU keeps
        (outgrown([400, 400, 400], BootFacts(offload_blocks=31)), False, ""),
        (outgrown([4000], ROOM_FOR_16, cached=3968), False, ""),  # it filled nothing new
        # The pool may be known from the log alone, in blocks of 16 tokens without a flag.
        (
            outgrown([400, 400], replace(ROOM_FOR_16, kv_cache_tokens=31 * 16), flags=False),
            True,
            "",
        ),
        (
            outgrown([400, 400, 400], ROOM_FOR_16, flags=False),
            False,
            "how many blocks the GPU's cache has",
        ),
        (outgrown([400, 400, 400], BootFacts()), False, "^no connector: "),
    ],
)
def test_the_threshold_of_the_connectors_room(
    found: TriggerResult, crossed: bool, shown: str
) -> None:
    assert found.crossed is crossed
    assert re.search(shown, f"{found.brief}: {found.evidence[0]}")


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
