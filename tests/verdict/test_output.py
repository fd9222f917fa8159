from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.verdict.output import (
    Checks,
    OutputComparison,
    OutputSample,
    Probe,
    ServedWeights,
    check_output,
    compare_output,
    probes,
    sample_output,
)

CHECKS = Checks(longest_run=8, distinct=0.1, same=4, needle=400, baseline="eager", tokens=32)
GOOD = sample_output(Probe.GREEDY, list(range(32)), "some text")
LOOP = sample_output(
    Probe.GREEDY, [917, 3812, *[52, 2502] * 15], "loops"
)  # what a tiny random model said on vLLM 0.29.0
STUCK = sample_output(Probe.GREEDY, [5] * 32, "x" * 32)


@pytest.mark.parametrize(
    ("wanted", "answers", "weights", "message"),
    [
        (CHECKS, [GOOD], ServedWeights.REAL, None),
        (CHECKS, [STUCK], ServedWeights.REAL, "one token 32 times in a row, in an answer of 32 tokens"),
        (CHECKS, [STUCK], ServedWeights.IMITATED, "one token 32 times in a row, in an answer of 32 tokens"),
        (CHECKS, [STUCK], ServedWeights.DUMMY, None),
        (CHECKS, [STUCK], None, None),
        (Checks(distinct=0.2, tokens=32), [LOOP], ServedWeights.REAL, "only 4 different tokens in an answer of 32"),
        (
            Checks(longest_run=31, tokens=32),
            [STUCK],
            ServedWeights.REAL,
            "one token 32 times in a row, in an answer of 32 tokens",
        ),
        (Checks(longest_run=32, distinct=1 / 32, tokens=33), [STUCK], ServedWeights.REAL, None),
        (None, [STUCK], ServedWeights.REAL, None),
    ],
)
def test_answers_that_are_wrong_by_themselves(
    wanted: Checks | None, answers: list[OutputSample], weights: ServedWeights | None, message: str | None
) -> None:
    assert check_output(wanted, answers, weights) == message


@pytest.mark.parametrize(
    ("weights", "asked"),
    [
        (ServedWeights.REAL, [Probe.GREEDY, Probe.NEEDLE]),
        (ServedWeights.IMITATED, [Probe.GREEDY, Probe.NEEDLE]),
        (None, [Probe.GREEDY, Probe.NEEDLE]),  # a server that was attached to: its log will tell
        (ServedWeights.DUMMY, [Probe.GREEDY]),
        (ServedWeights.MADE, [Probe.GREEDY, Probe.BEGINNING]),
    ],
)
def test_questions_for_each_kind_of_weights(weights: ServedWeights | None, asked: list[Probe]) -> None:
    assert list(probes(CHECKS, weights)) == asked
    assert Probe.NEEDLE not in probes(replace(CHECKS, needle=None), weights)


def test_only_real_weights_must_find_the_needle() -> None:
    lost = sample_output(Probe.NEEDLE, ["4711"], " 4711", needle="73914")
    for answers in ([GOOD, lost], [lost, GOOD]):
        assert (
            check_output(CHECKS, answers, ServedWeights.REAL) == "the number in the middle of 400 tokens was not found"
        )
    assert check_output(CHECKS, [lost, STUCK], ServedWeights.IMITATED) is not None
    assert check_output(CHECKS, [GOOD, lost], ServedWeights.IMITATED) is None
    found = sample_output(Probe.NEEDLE, ["7391", "4."], " 73914.", needle="73914")
    assert check_output(CHECKS, [found], ServedWeights.REAL) is None


def test_answers_that_differ_from_the_baseline() -> None:
    other = sample_output(Probe.GREEDY, [0, 1, 9, 3, *range(4, 32)], "other")
    late = sample_output(Probe.GREEDY, [*range(30), 99, 98], "parts later than is compared")
    short = sample_output(Probe.GREEDY, [0, 1], "ends early")
    for same in (GOOD, late):
        assert compare_output(CHECKS, [same], [[GOOD]], ServedWeights.REAL) == OutputComparison()
    for different in (other, short):
        compared = compare_output(CHECKS, [different], [[GOOD], [late]], ServedWeights.IMITATED)
        assert (
            compared.wrong == "its greedy answer differs from that of eager after 2 tokens; the first 4 should be equal"
        )
    early = sample_output(Probe.GREEDY, [0, 9], "one token")
    assert "after 1 token;" in compare_output(CHECKS, [early], [[GOOD]], ServedWeights.REAL).wrong


@pytest.mark.parametrize(
    ("wanted", "answers", "baseline", "weights", "message"),
    [
        (CHECKS, [STUCK], [[GOOD], [STUCK]], ServedWeights.REAL, "eager does not repeat its own answer"),
        (CHECKS, [STUCK], [], ServedWeights.REAL, "there is no answer of eager to compare with (--arm eager)"),
        (CHECKS, [], [[GOOD]], ServedWeights.REAL, "the question was not asked"),
        (Checks(longest_run=8), [STUCK], [[GOOD]], ServedWeights.REAL, "no baseline is declared"),
        (CHECKS, [STUCK], [[GOOD]], None, "answers of dummy weights are neither right nor wrong"),
        (CHECKS, [STUCK], [[GOOD]], ServedWeights.DUMMY, "answers of dummy weights are neither right nor wrong"),
    ],
)
def test_differences_that_prove_nothing(
    wanted: Checks,
    answers: list[OutputSample],
    baseline: list[list[OutputSample]],
    weights: ServedWeights | None,
    message: str,
) -> None:
    assert compare_output(wanted, answers, baseline, weights) == OutputComparison(unknown=message)


def sampled(tokens: list[int], margins: list[float], probe: Probe = Probe.GREEDY) -> OutputSample:
    return sample_output(probe, tokens, "x", margins=margins)


def test_made_weights_need_a_sure_baseline_that_attends_back() -> None:
    right, other = sampled([1, 2, 3, 4], [2.0, 0.1, 3.0, 3.0]), sampled([9, 2, 3, 4], [2.0] * 4, Probe.BEGINNING)
    late, early = sampled([1, 2, 7, 4], [2.0] * 4), sampled([1, 7, 3, 4], [2.0] * 4)
    assert compare_output(CHECKS, [right, other], [[right, other]], ServedWeights.MADE) == OutputComparison()
    assert "after 2 tokens" in compare_output(CHECKS, [late], [[right, other]], ServedWeights.MADE).wrong
    unclear = OutputComparison(unknown="the answers differ after 1 token, where eager had no clear best token")
    assert compare_output(CHECKS, [early], [[right, other]], ServedWeights.MADE) == unclear
    enough = sampled([1, 2, 3, 4], [2.0, 0.5, 3.0, 3.0])
    assert compare_output(CHECKS, [early], [[enough, other]], ServedWeights.MADE).wrong
    unsure = sampled([1, 2, 3, 4], [])  # a server that tells no margins
    assert "no clear best token" in compare_output(CHECKS, [late], [[unsure, other]], ServedWeights.MADE).unknown
    same = sampled([1, 2, 3, 4, 9], [2.0] * 5, Probe.BEGINNING)
    for baseline in ([[right, same]], [[right]], [[right, other], [right, same]]):
        assert compare_output(CHECKS, [late], baseline, ServedWeights.MADE) == OutputComparison(
            unknown="eager answers the same after another beginning, so its answer proves nothing"
        )


@given(st.lists(st.integers(0, 3), min_size=4, max_size=6), st.lists(st.integers(0, 3), min_size=4, max_size=6))
def test_only_the_first_tokens_are_compared(ours: list[int], theirs: list[int]) -> None:
    held = compare_output(
        CHECKS, [sample_output(Probe.GREEDY, ours, "")], [[sample_output(Probe.GREEDY, theirs, "")]], ServedWeights.REAL
    )
    assert (not held.wrong, held.unknown) == (ours[:4] == theirs[:4], "")


def test_sample_of_an_answer() -> None:
    kept = sample_output(Probe.GREEDY, ["a"] * 70 + ["b"] * 30, "a\ud800", margins=[1.23456] * 100)
    assert (kept.length, kept.longest_run, kept.distinct, len(kept.first), kept.found) == (100, 70, 0.02, 64, None)
    assert (kept.probe, kept.sha256) == (Probe.GREEDY, hashlib.sha256(b"a?").hexdigest())
    assert kept.margins == (1.235,) * 64
    empty = sample_output(Probe.GREEDY, [], "")
    assert (empty.distinct, empty.longest_run, empty.margins) == (0.0, 0, ())


def said(name: str, text: str) -> OutputSample:
    return sample_output(Probe.WORKLOAD, [text], text, name=name)


FIRST, AGAIN, LATER = said("first", "yes"), said("again", "yes"), said("later", "no")


@pytest.mark.parametrize("weights", [*ServedWeights, None])
@pytest.mark.parametrize(
    ("alike", "answers", "expected"),
    [
        ([("first", "again")], [FIRST, AGAIN, LATER], OutputComparison()),
        (
            [("first", "again", "later")],
            [FIRST, AGAIN, LATER],
            OutputComparison(wrong="the equal requests 'first' and 'later' were answered differently"),
        ),
        ([("first", "again")], [FIRST], OutputComparison(unknown="'again' has no answer to compare")),
    ],
)
def test_equal_requests_of_one_boot_need_equal_answers(
    alike: list[tuple[str, ...]],
    answers: list[OutputSample],
    expected: OutputComparison,
    weights: ServedWeights | None,
) -> None:
    wanted = Checks(alike=alike)
    assert compare_output(wanted, answers, [], weights) == expected
    assert check_output(wanted, answers, weights) == (expected.wrong or None)


def test_equal_requests_are_compared_beside_a_baseline() -> None:
    wanted = replace(CHECKS, alike=[("first", "later")])
    assert "differently" in compare_output(wanted, [GOOD, FIRST, LATER], [[GOOD]], ServedWeights.REAL).wrong
    assert (
        compare_output(wanted, [GOOD, FIRST, said("later", "yes")], [[GOOD]], ServedWeights.REAL) == OutputComparison()
    )
    assert check_output(wanted, [GOOD, FIRST, said("later", "yes")], ServedWeights.REAL) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "checks() needs at least one of longest_run=, distinct=, same=, needle= or alike="),
        ({"alike": [("a", "a")]}, 'each group of alike= is two names of requests or more: alike=[("first", "again")]'),
        ({"longest_run": 0}, "longest_run=0 must be from 1 to 63, below the answer's 64 tokens"),
        ({"longest_run": 64}, "longest_run=64 must be from 1 to 63, below the answer's 64 tokens"),
        ({"distinct": 0.0}, "distinct must be more than 0 and at most 1"),
        ({"distinct": 1.5}, "distinct must be more than 0 and at most 1"),
        ({"same": 16}, 'same= needs baseline="…", the arm to compare with, and baseline= needs same='),
        (
            {"baseline": "eager", "distinct": 0.1},
            'same= needs baseline="…", the arm to compare with, and baseline= needs same=',
        ),
        ({"same": 0, "baseline": "eager"}, "same=0 must be from 1 to 64 tokens"),
        ({"same": 65, "baseline": "eager", "tokens": 80}, "same=65 must be from 1 to 64 tokens"),
        ({"needle": 99}, "needle=99 must be 100 tokens or more"),
    ],
)
def test_useless_checks_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the whole message is compared below
        Checks(**fields)  # type: ignore[arg-type]  # wrong on purpose
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "fields",
    [
        *({"longest_run": 1}, {"longest_run": 63}, {"distinct": 1.0}, {"needle": 100}),
        *({"same": 1, "baseline": "eager"}, {"same": 64, "baseline": "eager"}, {"alike": [("a", "b")]}),
    ],
)
def test_checks_at_their_limits_are_accepted(fields: dict[str, object]) -> None:
    Checks(**fields)  # type: ignore[arg-type]  # fields by name
