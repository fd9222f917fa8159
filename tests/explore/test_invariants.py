"""The driver's invariants on made block accounting."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from vllm_repro_explore.program.vllm_repro_driver.invariants import at_rest, books, listed_twice
from vllm_repro_explore.program.vllm_repro_driver.shadow import Shadow, Store


def block(number: int, count: int = 0, *, null: bool = False) -> Any:
    return SimpleNamespace(block_id=number, ref_cnt=count, is_null=null, next_free_block=None)


def pool(blocks: list[Any], free: list[Any], counter: int | None = None) -> Any:
    head, tail = block(-1), block(-1)
    chain = [head, *free, tail]
    for one, following in itertools.pairwise(chain):
        one.next_free_block = following
    queue = SimpleNamespace(
        fake_free_list_head=head, fake_free_list_tail=tail, num_free_blocks=len(free) if counter is None else counter
    )
    return SimpleNamespace(blocks=blocks, free_block_queue=queue)


def broken(blocks: list[Any], free: list[Any], counter: int | None = None, **held: list[Any]) -> set[str]:
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
    found = dict(at_rest({"gpu": pool([null, one], [])}, (SimpleNamespace(req_to_blocks={"a": [one], "b": []}),)))
    assert set(found) == {"gpu-leak", "request-leak"}
    assert "1 of 2 blocks" in found["gpu-leak"]
    assert found["request-leak"].endswith(": a")


def manager(blocks: list[Any], window: int | None = None) -> Any:
    spec = type("SlidingWindowSpec" if window else "FullAttentionSpec", (), {"sliding_window": window})()
    return SimpleNamespace(req_to_blocks={"a": blocks}, block_size=4, kv_cache_spec=spec)


def read(shadow: Shadow, tokens: list[int], start: int, count: int) -> list[str]:
    return [name for name, _ in shadow.compute("a", tokens, start, count)]


def test_a_request_reads_what_its_own_tokens_wrote() -> None:
    tokens = list(range(12))
    shadow = Shadow([manager([block(1), block(2), block(3)])])
    assert read(shadow, tokens, 0, 6) == []
    assert read(shadow, tokens, 6, 6) == []
    # The same tokens after another beginning are another prompt.
    assert read(shadow, [99, *tokens[1:]], 6, 6) == ["reads-wrong-content"]


def test_a_block_that_nobody_wrote_is_read_and_seen() -> None:
    shadow = Shadow([manager([block(1), block(2)])])
    assert read(shadow, list(range(8)), 4, 4) == ["reads-wrong-content"]


def test_only_the_window_is_read() -> None:
    null, two = block(0, null=True), block(2)
    shadow = Shadow([manager([null, two, block(3)], window=4)])
    shadow.compute("a", list(range(12)), 4, 4)
    assert read(shadow, list(range(12)), 7, 1) == ["reads-wrong-content"]  # nobody wrote slots 4 to 6 of block 2 yet
    list(shadow.compute("a", list(range(12)), 4, 4))
    assert read(shadow, list(range(12)), 8, 4) == []  # 5 to 7; the null block is out of the window
    assert read(Shadow([manager([null, two, block(3)])]), list(range(12)), 8, 4) == ["reads-nothing"]


def test_a_copy_takes_content_along_and_back() -> None:
    tokens = list(range(8))
    first, second = block(1), block(2)
    shadow = Shadow([manager([first, second])])
    list(shadow.compute("a", tokens, 0, 8))
    store = Store(shadow)
    store.save([(1, 70), (2, 71)])
    shadow.put(1, None)
    assert read(shadow, [*tokens, 8], 8, 1) == ["reads-wrong-content"]
    store.load([(70, 1)])
    assert read(shadow, [*tokens, 8], 8, 1) == []
    shadow.copy([SimpleNamespace(src_block_id=2, dst_block_id=1)])
    assert read(shadow, [*tokens, 8], 8, 1) == ["reads-wrong-content"]


def test_a_block_that_comes_from_a_group_of_another_size_holds_nothing_for_this_one() -> None:
    wide, narrow = manager([block(1)]), manager([block(2), block(1)])
    narrow.block_size = 2
    shadow = Shadow([wide])
    list(shadow.compute("a", list(range(4)), 0, 4))
    other = Shadow([narrow])
    other.put(1, shadow.get(1))
    other.put(2, None)
    assert read(other, list(range(4)), 3, 1) == ["reads-wrong-content"]
    assert read(other, list(range(4)), 0, 4) == []
    assert read(other, list(range(4)), 3, 1) == []
