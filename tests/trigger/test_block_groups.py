"""A pool that groups of layers share: its size in vLLM's words, and which prompts must list a block twice."""

from __future__ import annotations

import pytest

from vllm_repro.command.parse import parse
from vllm_repro.diagnosis.boot_facts import BootFacts
from vllm_repro.scenario.catalogue import find
from vllm_repro.trigger.block_groups import GroupedPool, listed_twice
from vllm_repro.trigger.offload_store import block_listed_twice
from vllm_repro.trigger.trigger import Asked, AttentionShape, Finding, TriggerFacts

SCO = find("sco-hybrid")
GROUPS = ((256, 0), *SCO.model.window_groups)
PAGES = tuple(SCO.model.group_pages)
REPORTED = GroupedPool(7283, 16_384, GROUPS)
SHAPE = AttentionShape(64, 1, 512, 256, window_groups=tuple(SCO.model.window_groups), group_pages=PAGES)


def test_the_reported_pool_in_blocks() -> None:
    assert GroupedPool.of_tokens(145_274, 128_000, 16_384, GROUPS, PAGES) == REPORTED


def test_two_groups_alike_are_as_in_the_lab() -> None:
    # 330 blocks of 32 tokens were "8,169 tokens" in a log of vLLM 0.21.0, which listed 80 blocks, 54 distinct.
    pool = GroupedPool.of_tokens(8_169, 7_600, 2_048, ((32, 0), (32, 128)))
    assert pool == GroupedPool(330, 2_048, ((32, 0), (32, 128)))
    assert listed_twice(5693, 8, pool) == 80 - 54


@pytest.mark.parametrize(
    ("prompt", "answer", "twice"),
    [
        (90_109, 8, 1541),
        (90_109, 3, 0),
        (90_112, 8, 0),
        (90_000, 8, 0),
    ],  # as vLLM 0.21.0's own scheduler did it, which fixtures/reference has
)
def test_which_prompts_list_twice(prompt: int, answer: int, twice: int) -> None:
    assert listed_twice(prompt, answer, REPORTED) == twice


def found(
    flags: str = "",
    *,
    prompt: int = 90_109,
    tokens: int | None = 145_274,
    version: str | None = None,
    chunked: bool = True,
) -> Finding:
    command = parse(f"vllm serve m --block-size 256 --max-model-len 128000 {flags}")
    asked = (Asked("prompt A", prompt, answer_tokens=8), Asked("prompt B", prompt, answer_tokens=8))
    boot = BootFacts(kv_cache_tokens=tokens, vllm_version=version)
    facts = TriggerFacts(asked, 16_384, chunked, command=command, shape=SHAPE, boot=boot)
    return block_listed_twice().find(facts)


def test_the_evidence_names_the_prompt_and_the_pool() -> None:
    finding = found()
    assert (finding.crossed, finding.brief) == (True, "1541 must be listed twice to 0.21.0")
    assert finding.evidence[0].startswith(
        "prompt A: 90109 prompt tokens and an answer of 8, in a pool of 7,283 blocks: played through"
    )


def test_what_does_not_cross_says_why() -> None:
    assert found(prompt=90_112).brief == "none listed twice"
    assert not found("--num-gpu-blocks-override 50000").crossed
    assert "in a pool of 50,000 blocks" in found("--num-gpu-blocks-override 50000").evidence[0]
    assert "not known" in found(tokens=None).evidence[0]
    assert not found(tokens=None).crossed


def test_a_release_that_does_not_count_bytes_means_another_pool_by_as_many_tokens() -> None:
    plain = GroupedPool.of_tokens(145_274, 128_000, 16_384, GROUPS)
    assert plain != REPORTED
    by_bytes, by_blocks = (f"in a pool of {pool.blocks:,} blocks" for pool in (REPORTED, plain))
    for version in (None, "0.21.0", "0.24.0", "0.27.1", "main"):
        assert by_bytes in found(version=version).evidence[0]
    for version in ("0.28.0", "0.32.0"):
        assert by_blocks in found(version=version).evidence[0]


def test_without_chunks_nothing_is_played() -> None:
    assert not found(chunked=False).crossed
    assert found(chunked=False).evidence[0].startswith("not computed: ")
