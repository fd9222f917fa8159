"""The driver's invariants on made block accounting."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from vllm_repro_explore.program.vllm_repro_driver.invariants import at_rest, books, listed_twice


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


def test_a_block_that_a_transfer_lists_twice_is_named_by_direction() -> None:
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
