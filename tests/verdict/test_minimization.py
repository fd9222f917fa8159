"""Delta debugging over made-up sets of flags."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.verdict.minimization import Minimization

FLAGS = tuple("abcdefghijklmn")
SETS = st.frozensets(st.sampled_from(FLAGS), max_size=5)


def settle(search: Minimization, bug: Callable[[frozenset[str]], bool]) -> Minimization:
    while (parts := search.choose()) is not None:
        assert parts not in search.tried, "no set is tried twice"
        search = search.after(parts, bug=bug(parts))
    return search


def _any_set(parts: frozenset[str]) -> bool:
    raise NotImplementedError(parts)


@given(SETS)
def test_exactly_what_is_needed_is_kept_in_few_boots(needed: frozenset[str]) -> None:
    done = settle(Minimization(parts=FLAGS), needed.issubset)
    assert done.smallest() == needed
    assert all(done.tried[needed - {one}] is False for one in needed), "each part left was tried without"
    assert len(done.tried) <= 45


@given(SETS, SETS)
def test_what_is_left_cannot_lose_a_part_though_two_sets_show_the_bug(
    one: frozenset[str], other: frozenset[str]
) -> None:
    def bug(parts: frozenset[str]) -> bool:
        return one <= parts or other <= parts

    done = settle(Minimization(parts=FLAGS), bug)
    found = done.smallest()
    assert found in (one, other)
    assert found is not None
    assert not any(bug(found - {part}) for part in found)


@given(st.functions(like=_any_set, returns=st.booleans(), pure=True))
def test_a_bug_without_any_order_ends_with_a_set_that_cannot_lose_a_part(bug: Callable[[frozenset[str]], bool]) -> None:
    done = settle(Minimization(parts=FLAGS[:6]), bug)
    found = done.smallest()
    if found is None:
        assert done.tried == {frozenset(FLAGS[:6]): False}
    else:
        assert all(done.tried.get(found - {part}) is False for part in found)


def test_a_flag_goes_with_those_that_need_it() -> None:
    search = Minimization(parts=("a", "b", "c"), needs={"a": frozenset("c")})
    done = settle(search, lambda parts: "b" in parts)
    assert done.smallest() == frozenset("b")
    assert all("c" in parts or "a" not in parts for parts in done.tried)
