from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.verdict.output import Checks, Held, Probe, Said, Weights, checks, hold, judge, longest_run, probes, said

CHECKS = checks(longest_run=8, distinct=0.1, same=4, needle=400, baseline="eager", tokens=32)
GOOD = said(Probe.GREEDY, list(range(32)), "some text")
LOOP = said(Probe.GREEDY, [917, 3812, *[52, 2502] * 15], "loops")  # what a tiny random model said on vLLM 0.29.0
STUCK = said(Probe.GREEDY, [5] * 32, "x" * 32)


@given(st.lists(st.integers(0, 3)))
def test_the_longest_run(tokens: list[int]) -> None:
    run = longest_run(tokens)
    assert run == max([len(list(group)) for _, group in groupby(tokens)], default=0)
    assert longest_run(tokens + tokens[-1:]) >= run
    assert run <= len(tokens)


@pytest.mark.parametrize(
    ("wanted", "answers", "weights", "says"),
    [
        (CHECKS, [GOOD], Weights.REAL, None),
        (CHECKS, [STUCK], Weights.REAL, "one token 32 times in a row"),
        (CHECKS, [STUCK], Weights.IMITATED, "one token 32 times in a row"),
        (CHECKS, [STUCK], Weights.DUMMY, None),
        (CHECKS, [STUCK], Weights.MADE, None),
        (CHECKS, [STUCK], None, None),
        (checks(distinct=0.2, tokens=32), [LOOP], Weights.REAL, "only 4 different tokens in an answer of 32"),
        (checks(distinct=0.2, tokens=32), [LOOP], Weights.DUMMY, None),
        (checks(longest_run=31, tokens=32), [STUCK], Weights.REAL, "32 times"),
        (None, [STUCK], Weights.REAL, None),
    ],
)
def test_an_answer_that_is_wrong_by_itself(
    wanted: Checks | None, answers: list[Said], weights: Weights | None, says: str | None
) -> None:
    found = judge(wanted, answers, weights)
    assert (found is None) if says is None else (found is not None and says in found)


@pytest.mark.parametrize(
    ("weights", "asked"),
    [
        (Weights.REAL, [Probe.GREEDY, Probe.NEEDLE]),
        (Weights.IMITATED, [Probe.GREEDY, Probe.NEEDLE]),
        (None, [Probe.GREEDY, Probe.NEEDLE]),  # a server that was attached to: its log will tell
        (Weights.DUMMY, [Probe.GREEDY]),
        (Weights.MADE, [Probe.GREEDY, Probe.BEGINNING]),
    ],
)
def test_what_is_asked_is_what_such_weights_can_answer(weights: Weights | None, asked: list[Probe]) -> None:
    assert list(probes(CHECKS, weights)) == asked
    assert Probe.NEEDLE not in probes(replace(CHECKS, needle=None), weights)


def test_a_needle_is_looked_for_in_the_answers_of_real_weights_only() -> None:
    lost = said(Probe.NEEDLE, ["4711"], " 4711", needle="73914")
    assert "not found" in (judge(CHECKS, [GOOD, lost], Weights.REAL) or "")
    assert judge(CHECKS, [GOOD, lost], Weights.IMITATED) is None
    assert judge(CHECKS, [said(Probe.NEEDLE, ["7391", "4."], " 73914.", needle="73914")], Weights.REAL) is None


def test_an_answer_that_is_not_the_baselines() -> None:
    other = said(Probe.GREEDY, [0, 1, 9, 3, *range(4, 32)], "other")
    late = said(Probe.GREEDY, [*range(30), 99, 98], "parts later than is compared")
    assert hold(CHECKS, [GOOD], [[GOOD]], Weights.REAL) == Held()
    assert hold(CHECKS, [late], [[GOOD]], Weights.REAL) == Held()
    assert "they part after 2 tokens" in hold(CHECKS, [other], [[GOOD]], Weights.REAL).wrong
    assert "not that of eager" in hold(CHECKS, [other], [[GOOD], [late]], Weights.IMITATED).wrong
    short = said(Probe.GREEDY, [0, 1], "ends early")
    assert "after 2 tokens" in hold(CHECKS, [short], [[GOOD]], Weights.REAL).wrong


@pytest.mark.parametrize(
    ("wanted", "answers", "baseline", "weights", "says"),
    [
        (CHECKS, [STUCK], [[GOOD], [STUCK]], Weights.REAL, "eager does not repeat its own answer"),
        (CHECKS, [STUCK], [], Weights.REAL, "there is no answer of eager"),
        (CHECKS, [], [[GOOD]], Weights.REAL, "not asked"),
        (checks(longest_run=8), [STUCK], [[GOOD]], Weights.REAL, "nothing is declared"),
        (CHECKS, [STUCK], [[GOOD]], Weights.DUMMY, "dummy weights"),
        (CHECKS, [STUCK], [[GOOD]], None, "dummy weights"),
    ],
)
def test_where_a_difference_says_nothing(
    wanted: Checks, answers: list[Said], baseline: list[list[Said]], weights: Weights | None, says: str
) -> None:
    held = hold(wanted, answers, baseline, weights)
    assert (held.wrong, says in held.unknown) == ("", True)


def made(tokens: list[int], margins: list[float], probe: Probe = Probe.GREEDY) -> Said:
    return said(probe, tokens, "x", margins=margins)


def test_made_weights_are_judged_where_the_baseline_is_sure_and_looks_back() -> None:
    right, other = made([1, 2, 3, 4], [2.0, 0.1, 3.0, 3.0]), made([9, 2, 3, 4], [2.0] * 4, Probe.BEGINNING)
    late, early = made([1, 2, 7, 4], [2.0] * 4), made([1, 7, 3, 4], [2.0] * 4)
    assert hold(CHECKS, [right, other], [[right, other]], Weights.MADE) == Held()
    assert "part after 2 tokens" in hold(CHECKS, [late], [[right, other]], Weights.MADE).wrong
    assert "no clear best one" in hold(CHECKS, [early], [[right, other]], Weights.MADE).unknown
    unsure = made([1, 2, 3, 4], [])  # a server that tells no margins
    assert "no clear best one" in hold(CHECKS, [late], [[unsure, other]], Weights.MADE).unknown
    same = made([1, 2, 3, 4, 9], [2.0] * 5, Probe.BEGINNING)
    for baseline in ([right, same], [right]):
        assert "after another beginning" in hold(CHECKS, [late], [baseline], Weights.MADE).unknown


@given(st.lists(st.integers(0, 3), min_size=4, max_size=6), st.lists(st.integers(0, 3), min_size=4, max_size=6))
def test_an_answer_is_right_or_wrong_by_its_first_tokens_alone(ours: list[int], theirs: list[int]) -> None:
    held = hold(CHECKS, [said(Probe.GREEDY, ours, "")], [[said(Probe.GREEDY, theirs, "")]], Weights.REAL)
    assert (not held.wrong, held.unknown) == (ours[:4] == theirs[:4], "")


def test_what_is_kept_of_an_answer() -> None:
    kept = said(Probe.GREEDY, ["a"] * 70 + ["b"] * 30, "a" * 70 + "b" * 30)
    assert (kept.length, kept.longest_run, kept.distinct, len(kept.first), kept.found) == (100, 70, 0.02, 64, None)
    assert said(Probe.GREEDY, [], "").distinct == 0.0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "checks something"),
        ({"longest_run": 64}, "says nothing about an answer of 64"),
        ({"distinct": 1.5}, "a share"),
        ({"same": 16}, "goes with baseline"),
        ({"baseline": "eager", "distinct": 0.1}, "goes with baseline"),
        ({"same": 65, "baseline": "eager"}, "from 1 to 64"),
        ({"needle": 50}, "100 tokens or more"),
    ],
)
def test_checks_that_would_check_nothing_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        checks(**fields)  # type: ignore[arg-type]  # wrong on purpose
