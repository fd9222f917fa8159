"""The driver's invariants on made block accounting, and templates of messages."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro_explore.program.vllm_repro_driver.invariants import at_rest, books, listed_twice
from vllm_repro_explore.template import template


def block(number: int, count: int = 0, *, null: bool = False) -> Any:
    return SimpleNamespace(block_id=number, ref_cnt=count, is_null=null, next_free_block=None)


def pool(blocks: list[Any], free: list[Any], counter: int | None = None) -> Any:
    head, tail = block(-1), block(-1)
    chain = [head, *free, tail]
    for one, following in itertools.pairwise(chain):
        one.next_free_block = following
    queue = SimpleNamespace(
        fake_free_list_head=head,
        fake_free_list_tail=tail,
        num_free_blocks=len(free) if counter is None else counter,
    )
    return SimpleNamespace(blocks=blocks, free_block_queue=queue)


def broken(
    blocks: list[Any], free: list[Any], counter: int | None = None, **held: list[Any]
) -> set[str]:
    managers = (SimpleNamespace(req_to_blocks=held),)
    return {name for name, _ in books({"gpu": pool(blocks, free, counter)}, managers)}


def test_books_that_agree_break_nothing() -> None:
    null, one, two, three = block(0, -7, null=True), block(1, 2), block(2), block(3, 1)
    assert broken([null, one, two, three], [two], a=[one, null, three], b=[one]) == set()


def test_each_disagreement_has_a_name() -> None:
    null, one, two = block(0, null=True), block(1), block(2)
    assert broken([null, one, two], [one, two], counter=3) == {"gpu-free-count"}
    assert broken([null, one, two], [one]) == {"gpu-lost"}
    assert broken([null, one, block(2, 1)], [one], a=[one]) == {"gpu-held-and-free"}
    held = block(1, 1)
    assert broken([null, held, two], [held, two]) == {"gpu-free-and-held"}
    assert broken([null, block(1, -1), two], [two]) == {"gpu-negative-count"}
    # A list that turns back to its beginning.
    turning = pool([null, one, two], [one, two])
    two.next_free_block = one
    assert "gpu-free-list-broken" in {name for name, _ in books({"gpu": turning}, ())}


def test_a_block_listed_twice_is_named_by_direction() -> None:
    found = list(listed_twice([("store", [4, 5, 4]), ("load", [1, 2])]))
    assert found == [("store-listed-twice", "a store lists 3 blocks, 2 distinct")]


def test_at_rest_nothing_is_held() -> None:
    null, one = block(0, 1, null=True), block(1, 1)
    found = dict(
        at_rest(
            {"gpu": pool([null, one], [])}, (SimpleNamespace(req_to_blocks={"a": [one], "b": []}),)
        )
    )
    assert set(found) == {"gpu-leak", "request-leak"}
    assert "1 of 2 blocks" in found["gpu-leak"]
    assert found["request-leak"].endswith(": a")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            (
                "allocation from 'turboquant_attn.py:720:_continuation_prefill' requires 16.00 MB,"
                " current size is 1.02 MB"
            ),
            (
                "allocation from 'turboquant_attn.py:757:_continuation_prefill' requires 2.00 MB,"
                " current size is 0.26 MB"
            ),
        ),
        (
            "'deepseek_v4_attention.py:1454:_forward_prefill' requires 24.89 MB",
            "'deepseek_v4_attention.py:1457:_forward_prefill' requires 21.80 MB",
        ),
        (
            "Tried to allocate 88 MiB, 42 MiB is free",
            "Tried to allocate 2.00 GiB, 1,024 MiB is free",
        ),
        ("peer [127.0.0.1]:63194 at 0x7f3fa0d40c08", "peer [10.0.0.2]:80 at 0x1"),
        ("cannot open /home/a/vllm/vllm/envs.py", "cannot open /opt/site-packages/vllm/envs.py"),
    ],
)
def test_two_prints_of_one_bug_have_one_template(one: str, other: str) -> None:
    assert template(one) == template(other)


def test_identifiers_survive_the_masking() -> None:
    masked = template(
        "'deepseek_v4_attention.py:1457:_forward_prefill' fp8_e5m2 v1/worker gpu_model_runner"
        " 21.80 MB"
    )
    assert (
        masked == "'deepseek_v4_attention.py:{line}:_forward_prefill' fp8_e5m2 v1/worker"
        " gpu_model_runner {n}"
    )
    assert template("modular_kernel.py:1096") != template("other_kernel.py:1096")


@given(st.text(max_size=200))
@settings(max_examples=100)
def test_masking_twice_is_masking_once(text: str) -> None:
    assert template(template(text)) == template(text)
