from __future__ import annotations

import hashlib
import re
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
    compare_alone,
    compare_output,
    probes,
    sample_output,
)


def said(name: str, text: str) -> OutputSample:
    return sample_output(Probe.WORKLOAD, [text], text, name=name)


CHECKS = Checks(longest_run=8, distinct=0.1, same=4, needle=400, baseline="eager", tokens=32)
GOOD = sample_output(Probe.GREEDY, list(range(32)), "some text")
LOOP = sample_output(
    Probe.GREEDY, [917, 3812, *[52, 2502] * 15], "loops"
)  # what a tiny random model said on vLLM 0.29.0
STUCK = sample_output(Probe.GREEDY, [5] * 32, "x" * 32)
LOST = sample_output(Probe.NEEDLE, ["4711"], " 4711", needle="73914")
FOUND = sample_output(Probe.NEEDLE, ["7391", "4."], " 73914.", needle="73914")
NOT_FOUND = "the number in the middle of 400 tokens was not found"
IN_A_ROW = "one token 32 times in a row, in an answer of 32 tokens"


@pytest.mark.parametrize(
    ("wanted", "answers", "weights", "message"),
    [
        (CHECKS, [GOOD], ServedWeights.REAL, None),
        (
            CHECKS,
            [STUCK],
            ServedWeights.REAL,
            IN_A_ROW,
        ),
        (
            CHECKS,
            [STUCK],
            ServedWeights.IMITATED,
            IN_A_ROW,
        ),
        (CHECKS, [STUCK], ServedWeights.DUMMY, None),
        (CHECKS, [STUCK], None, None),
        (
            Checks(distinct=0.2, tokens=32),
            [LOOP],
            ServedWeights.REAL,
            "only 4 different tokens in an answer of 32",
        ),
        (
            Checks(longest_run=31, tokens=32),
            [STUCK],
            ServedWeights.REAL,
            IN_A_ROW,
        ),
        (Checks(longest_run=32, distinct=1 / 32, tokens=33), [STUCK], ServedWeights.REAL, None),
        (None, [STUCK], ServedWeights.REAL, None),
        # Only real weights must find the needle.
        (CHECKS, [GOOD, LOST], ServedWeights.REAL, NOT_FOUND),
        (CHECKS, [LOST, GOOD], ServedWeights.REAL, NOT_FOUND),
        (CHECKS, [LOST, STUCK], ServedWeights.IMITATED, IN_A_ROW),
        (CHECKS, [GOOD, LOST], ServedWeights.IMITATED, None),
        (CHECKS, [FOUND], ServedWeights.REAL, None),
        # Answers of the workload are not questions, and come before them.
        (CHECKS, [said("chat", "yes"), STUCK], ServedWeights.REAL, IN_A_ROW),
    ],
)
def test_answers_that_are_wrong_by_themselves(
    wanted: Checks | None,
    answers: list[OutputSample],
    weights: ServedWeights | None,
    message: str | None,
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
def test_questions_for_each_kind_of_weights(
    weights: ServedWeights | None, asked: list[Probe]
) -> None:
    assert list(probes(CHECKS, weights)) == asked
    assert Probe.NEEDLE not in probes(replace(CHECKS, needle=None), weights)


LATE = sample_output(Probe.GREEDY, [*range(30), 99, 98], "parts later than is compared")
TWO = "its greedy answer differs from that of eager after 2 tokens; the first 4 should be equal"


ONE = TWO.replace("2 tokens", "1 token")


def answered(tokens: list[int]) -> OutputSample:
    return sample_output(Probe.GREEDY, tokens, "an answer")


def sampled(tokens: list[int], margins: list[float], probe: Probe = Probe.GREEDY) -> OutputSample:
    return sample_output(probe, tokens, "x", margins=margins)


RIGHT = sampled([1, 2, 3, 4], [2.0, 0.1, 3.0, 3.0])
ENOUGH = sampled([1, 2, 3, 4], [2.0, 0.5, 3.0, 3.0])
UNSURE = sampled([1, 2, 3, 4], [])  # of a server that reports no margins
BEGUN = sampled([9, 2, 3, 4], [2.0] * 4, Probe.BEGINNING)
SAME = sampled([1, 2, 3, 4, 9], [2.0] * 5, Probe.BEGINNING)
THIRD, SECOND = sampled([1, 2, 7, 4], [2.0] * 4), sampled([1, 7, 3, 4], [2.0] * 4)
PROVES_NOTHING = "^eager answers the same after another beginning, so its answer proves nothing$"


@pytest.mark.parametrize(
    ("wanted", "answers", "baseline", "weights", "wrong", "unknown"),
    [
        # Answers that differ from the baseline
        (CHECKS, [answered([*range(32)])], [[GOOD]], ServedWeights.REAL, "^$", "^$"),
        (CHECKS, [answered([*range(30), 99, 98])], [[GOOD]], ServedWeights.REAL, "^$", "^$"),
        (
            CHECKS,
            [answered([0, 1, 9, 3, *range(4, 32)])],
            [[GOOD], [LATE]],
            ServedWeights.IMITATED,
            f"^{TWO}$",
            "^$",
        ),
        (
            CHECKS,
            [answered([0, 1])],
            [[GOOD], [LATE]],
            ServedWeights.IMITATED,
            f"^{TWO}$",
            "^$",
        ),
        (CHECKS, [answered([0, 9])], [[GOOD]], ServedWeights.REAL, f"^{ONE}$", "^$"),
        # Differences that prove nothing
        (
            CHECKS,
            [STUCK],
            [[GOOD], [STUCK]],
            ServedWeights.REAL,
            "^$",
            "^eager does not repeat its own answer$",
        ),
        (
            CHECKS,
            [STUCK],
            [],
            ServedWeights.REAL,
            "^$",
            r"^there is no answer of eager to compare with \(--arm eager\)$",
        ),
        (CHECKS, [], [[GOOD]], ServedWeights.REAL, "^$", "^the question was not asked$"),
        (
            Checks(longest_run=8),
            [STUCK],
            [[GOOD]],
            ServedWeights.REAL,
            "^$",
            "^no baseline is declared$",
        ),
        (
            CHECKS,
            [STUCK],
            [[GOOD]],
            None,
            "^$",
            "^answers of dummy weights are neither right nor wrong$",
        ),
        (
            CHECKS,
            [STUCK],
            [[GOOD]],
            ServedWeights.DUMMY,
            "^$",
            "^answers of dummy weights are neither right nor wrong$",
        ),
        # Made weights need a sure baseline that attends back.
        (CHECKS, [RIGHT, BEGUN], [[RIGHT, BEGUN]], ServedWeights.MADE, "^$", "^$"),
        (CHECKS, [THIRD], [[RIGHT, BEGUN]], ServedWeights.MADE, "after 2 tokens", "^$"),
        (
            CHECKS,
            [SECOND],
            [[RIGHT, BEGUN]],
            ServedWeights.MADE,
            "^$",
            "^the answers differ after 1 token, where eager had no clear best token$",
        ),
        (CHECKS, [SECOND], [[ENOUGH, BEGUN]], ServedWeights.MADE, "after 1 token", "^$"),
        (CHECKS, [THIRD], [[UNSURE, BEGUN]], ServedWeights.MADE, "^$", "no clear best token"),
        (CHECKS, [THIRD], [[RIGHT, SAME]], ServedWeights.MADE, "^$", PROVES_NOTHING),
        (CHECKS, [THIRD], [[RIGHT]], ServedWeights.MADE, "^$", PROVES_NOTHING),
        (
            CHECKS,
            [THIRD],
            [[RIGHT, BEGUN], [RIGHT, SAME]],
            ServedWeights.MADE,
            "^$",
            PROVES_NOTHING,
        ),
    ],
)
def test_answers_are_compared_with_the_baseline(
    wanted: Checks,
    answers: list[OutputSample],
    baseline: list[list[OutputSample]],
    weights: ServedWeights | None,
    wrong: str,
    unknown: str,
) -> None:
    found = compare_output(wanted, answers, baseline, weights)
    assert re.search(wrong, found.wrong)
    assert re.search(unknown, found.unknown)


@given(
    st.lists(st.integers(0, 3), min_size=4, max_size=6),
    st.lists(st.integers(0, 3), min_size=4, max_size=6),
)
def test_only_the_first_tokens_are_compared(ours: list[int], theirs: list[int]) -> None:
    held = compare_output(
        CHECKS,
        [sample_output(Probe.GREEDY, ours, "")],
        [[sample_output(Probe.GREEDY, theirs, "")]],
        ServedWeights.REAL,
    )
    assert (not held.wrong, held.unknown) == (ours[:4] == theirs[:4], "")


def test_sample_of_an_answer() -> None:
    kept = sample_output(Probe.GREEDY, ["a"] * 70 + ["b"] * 30, "a\ud800", margins=[1.23456] * 100)
    assert (kept.length, kept.longest_run, kept.distinct, len(kept.first), kept.found) == (
        100,
        70,
        0.02,
        64,
        None,
    )
    assert (kept.probe, kept.sha256) == (Probe.GREEDY, hashlib.sha256(b"a?").hexdigest())
    assert kept.margins == (1.235,) * 64
    empty = sample_output(Probe.GREEDY, [], "")
    assert (empty.distinct, empty.longest_run, empty.margins) == (0.0, 0, ())
    assert (empty.name, empty.prompt) == ("", "")


@pytest.mark.parametrize(("needle", "found"), [("391", True), ("931", False), ("", None)])
def test_a_needle_is_found_in_the_text(needle: str, found: bool | None) -> None:
    assert sample_output(Probe.NEEDLE, [1], " 73914.", needle=needle).found is found


FIRST, AGAIN, LATER = said("first", "yes"), said("again", "yes"), said("later", "no")


@pytest.mark.parametrize("weights", [*ServedWeights, None])
@pytest.mark.parametrize(
    ("alike", "answers", "expected"),
    [
        ([("first", "again")], [FIRST, AGAIN, LATER], OutputComparison()),
        (
            [("first", "again", "later")],
            [FIRST, AGAIN, LATER],
            OutputComparison(
                wrong="the equal requests 'first' and 'later' were answered differently"
            ),
        ),
        (
            [("first", "again")],
            [FIRST],
            OutputComparison(unknown="'again' has no answer to compare"),
        ),
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


@pytest.mark.parametrize(("later", "wrong"), [("no", "answered differently"), ("yes", "")])
def test_equal_requests_are_compared_beside_a_baseline(later: str, wrong: str) -> None:
    wanted, answers = (
        replace(CHECKS, alike=[("first", "later")]),
        [GOOD, FIRST, said("later", later)],
    )
    found = compare_output(wanted, answers, [[GOOD]], ServedWeights.REAL)
    assert re.search(wrong or "^$", found.wrong)
    assert (found.unknown, check_output(wanted, answers, ServedWeights.REAL)) == (
        "",
        found.wrong or None,
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "checks() needs at least one of longest_run=, distinct=, same=, needle= or alike="),
        (
            {"alike": [("a", "a")]},
            'each group of alike= is two names of requests or more: alike=[("first", "again")]',
        ),
        ({"longest_run": 0}, "longest_run=0 must be from 1 to 63, below the answer's 64 tokens"),
        ({"longest_run": 64}, "longest_run=64 must be from 1 to 63, below the answer's 64 tokens"),
        ({"distinct": 0.0}, "distinct must be more than 0 and at most 1"),
        ({"distinct": 1.5}, "distinct must be more than 0 and at most 1"),
        (
            {"same": 16},
            'same= needs baseline="…", the arm to compare with, and baseline= needs same=',
        ),
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
        *(
            {"same": 1, "baseline": "eager"},
            {"same": 64, "baseline": "eager"},
            {"alike": [("a", "b")]},
        ),
    ],
)
def test_checks_at_their_limits_are_accepted(fields: dict[str, object]) -> None:
    Checks(**fields)  # type: ignore[arg-type]  # fields by name


def kept(
    probe: Probe, *tokens: int, margins: tuple[float, ...] = (), prompt: str = "p"
) -> OutputSample:
    return sample_output(probe, tokens, "", margins=margins, name="chat", prompt=prompt)


CLEARLY = (2.0, 2.0, 2.0)


def alone(*tokens: int, margins: tuple[float, ...] = CLEARLY) -> OutputSample:
    return kept(Probe.ALONE, *tokens, margins=margins)


def cached(*tokens: int, margins: tuple[float, ...] = CLEARLY) -> OutputSample:
    return kept(Probe.CACHED, *tokens, margins=margins)


ALONE = [alone(1, 2, 3), cached(1, 2, 3), cached(1, 2, 3)]


@pytest.mark.parametrize(
    ("references", "other", "wrong", "unknown"),
    [
        (ALONE, kept(Probe.BURST, 1, 2, 3), "", ""),
        (
            ALONE,
            kept(Probe.BURST, 1, 9, 3),
            (
                "beside others and alone after 1 token: token 9, alone token 2; their log"
                " probabilities moved by 2.00 nats or more"
            ),
            "",
        ),
        (
            ALONE,
            kept(Probe.WORKLOAD, 9),
            "in the workload and alone after 0 tokens: token 9, alone token 1",
            "",
        ),
        (ALONE, kept(Probe.WORKLOAD, 1, 2), "after 2 tokens: the end, alone token 3", ""),
        (ALONE, kept(Probe.BURST_CACHED, 9), "beside others and alone after 0 tokens", ""),
        # another prompt, which was not sent alone
        (ALONE, kept(Probe.BURST, 9, prompt="q"), "", ""),
        (ALONE[:1], kept(Probe.BURST, 9), "", ""),
        (ALONE[1:], kept(Probe.BURST, 9), "", ""),
        # A near tie, with or without the cache.
        (
            [alone(1, margins=(0.4,)), cached(1, margins=(0.6,))],
            kept(Probe.BURST, 9),
            "",
            "no token was clearly the best",
        ),
        (
            [alone(1, margins=(0.6,)), cached(1, margins=(0.6,))],
            kept(Probe.BURST, 9),
            "alone token 1",
            "",
        ),
        (
            [alone(1, margins=()), cached(1, margins=())],
            kept(Probe.BURST, 9),
            "",
            "no token was clearly the best",
        ),
        # Alone it was a near tie, and beside others it was none: so the logits moved.
        (
            [alone(1, margins=(0.1,)), cached(1, margins=(0.1,))],
            kept(Probe.BURST, 9, margins=(2.0,)),
            "moved by 2.10",
            "",
        ),
        (
            [alone(1, margins=(0.1,)), cached(1, margins=(0.1,))],
            kept(Probe.BURST, 9, margins=(0.3,)),
            "",
            "clearly the best",
        ),
        # The cache rounds by 1.2 nats, so it may turn 2.0 over. With the same blocks in the cache
        # it rounds alike.
        (
            [alone(1), cached(1, margins=(0.8,))],
            kept(Probe.BURST, 9),
            "",
            "no token was clearly the best",
        ),
        (
            [alone(1), cached(1, margins=(0.8,))],
            kept(Probe.WORKLOAD, 9),
            "",
            "no token was clearly the best",
        ),
        ([alone(1), cached(1, margins=(0.8,))], kept(Probe.BURST_CACHED, 9), "alone token 1", ""),
        ([alone(1), cached(1, margins=(1.5,))], kept(Probe.BURST, 9), "alone token 1", ""),
        # As much as twice the effect of the cache.
        (
            [alone(1, margins=(3.0,)), cached(1, margins=(2.0,))],
            kept(Probe.BURST, 9),
            "moved by 2.00",
            "",
        ),
        # A prompt that was sent alone once tells nothing of the cache.
        (
            [
                kept(Probe.ALONE, 5, prompt="q"),
                *(kept(probe, 1, margins=(0.9,)) for probe in (Probe.ALONE, Probe.CACHED)),
            ],
            kept(Probe.BURST, 9),
            "moved by 0.90",
            "",
        ),
        # The cache moves a token by 4 nats: nothing less follows without the same blocks.
        (
            [alone(1, 2, 3), cached(1, 2, 4)],
            kept(Probe.BURST, 9),
            "",
            "no token was clearly the best",
        ),
        (
            [alone(1), cached(4), cached(4)],
            kept(Probe.BURST, 9),
            "",
            "its answers alone differ too",
        ),
        ([alone(1), cached(4), cached(4)], kept(Probe.BURST, 4), "", ""),
        ([alone(1), cached(4), cached(4)], kept(Probe.BURST_CACHED, 1), "alone token 4", ""),
        (
            [alone(1), cached(1), cached(4)],
            kept(Probe.BURST_CACHED, 9),
            "",
            "its answers alone differ too",
        ),
    ],
)
def test_an_answer_beside_others_is_compared_with_those_alone(
    references: list[OutputSample], other: OutputSample, wrong: str, unknown: str
) -> None:
    found = compare_alone([*references, other], ServedWeights.MADE)
    assert wrong in found.wrong
    assert unknown in found.unknown
    assert (bool(found.wrong), bool(found.unknown)) == (bool(wrong), bool(unknown))
    assert check_output(None, [*references, other], ServedWeights.MADE) == (found.wrong or None)


def test_the_rounding_of_the_cache_is_that_of_all_prompts() -> None:
    coarse = [
        kept(probe, 1, margins=(margin,), prompt="q")
        for probe, margin in ((Probe.ALONE, 3.0), (Probe.CACHED, 1.0))
    ]
    assert compare_alone([*ALONE, DIFFERENT], ServedWeights.REAL).wrong
    assert not compare_alone([*ALONE, *coarse, DIFFERENT], ServedWeights.REAL).wrong


DIFFERENT = kept(Probe.BURST, 9)
PIECES = sample_output(Probe.BURST, ["a", "b"], "ab", name="chat", prompt="p")


@pytest.mark.parametrize(
    ("answers", "weights", "unknown"),
    [
        ([*ALONE, DIFFERENT], ServedWeights.DUMMY, "^answers of dummy weights are neither"),
        ([*ALONE, DIFFERENT], None, "^it is not known which weights"),
        ([*ALONE, DIFFERENT], ServedWeights.IMITATED, "weights"),
        ([*ALONE, PIECES], ServedWeights.MADE, "^this server returns no token ids$"),
        (
            [replace(PIECES, probe=probe) for probe in (Probe.ALONE, Probe.CACHED)] + [DIFFERENT],
            ServedWeights.MADE,
            "^this server returns no token ids$",
        ),
        ([DIFFERENT], None, "^$"),
    ],
)
def test_neither_dummy_weights_nor_pieces_of_text_are_compared(
    answers: list[OutputSample], weights: ServedWeights | None, unknown: str
) -> None:
    found = compare_alone(answers, weights)
    assert (found.wrong, bool(re.search(unknown, found.unknown))) == ("", True), found


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=5)
MARGINS = st.lists(st.floats(0, 4), min_size=5, max_size=5)


@given(
    TOKENS,
    MARGINS,
    TOKENS,
    MARGINS,
    TOKENS,
    MARGINS,
    st.sampled_from([Probe.WORKLOAD, Probe.BURST, Probe.BURST_CACHED]),
)
def test_a_wrong_answer_differs_by_more_than_rounding(
    first: list[int],
    clear: list[float],
    again: list[int],
    also: list[float],
    other: list[int],
    moved: list[float],
    probe: Probe,
) -> None:
    references = [alone(*first, margins=tuple(clear)), cached(*again, margins=tuple(also))]
    found = compare_alone(
        [*references, kept(probe, *other, margins=tuple(moved))], ServedWeights.MADE
    )
    same = [again] if probe is Probe.BURST_CACHED else [first, again]
    if other in same:
        assert found == OutputComparison()
    if found.wrong:
        at = next(
            place for place in range(5) if again[place : place + 1] != other[place : place + 1]
        )
        assert all(one[: at + 1] == again[: at + 1] for one in same)
        assert also[at] + moved[at] >= 0.499  # kept with three digits
        assert probe is Probe.BURST_CACHED or clear[at] + moved[at] >= 0.499


@pytest.mark.parametrize(
    ("first", "again", "wrong"),
    [
        ((2.0, 0.1), (), ""),
        ((2.0, 0.1), (2.0, 0.3), ""),
        ((2.0, 0.1), (2.0, 0.4), "after 1 token"),
        ((2.0, 0.5), (), "after 1 token"),
        ((), (), "after 1 token"),
    ],
)
def test_a_near_tie_does_not_make_equal_requests_differ(
    first: tuple[float, ...], again: tuple[float, ...], wrong: str
) -> None:
    answers = [
        sample_output(Probe.WORKLOAD, [1, last], f"{last}", name=name, margins=margins)
        for name, last, margins in (("first", 2, first), ("again", 3, again))
    ]
    wanted = Checks(alike=[("first", "again")])
    found = compare_output(wanted, answers, [], ServedWeights.MADE)
    assert (wrong in found.wrong, bool(found.unknown)) == (True, not wrong)
    assert bool(check_output(wanted, answers, ServedWeights.MADE)) is bool(wrong)


def equal_request(name: str, *tokens: int | str) -> OutputSample:
    """Return an answer whose second token was no clear choice."""
    margins = (2.0, 0.1, *[2.0] * 70)
    return sample_output(Probe.WORKLOAD, tokens, name, name=name, margins=margins)


LONG = range(64)
NEAR_TIE = "'first' and 'again' were answered differently after 1 token, where neither had a clear"
AFTER_KEPT = "'first' and 'again' were answered differently after the tokens whose margins are kept"


@pytest.mark.parametrize(
    ("answers", "wrong", "unknown"),
    [
        # One stream returned token ids, the other pieces of text.
        ([(1, 2), ("a",)], "'first' and 'again' were answered differently$", "^$"),
        ([("a",), (1, 2)], "'first' and 'again' were answered differently$", "^$"),
        ([(*LONG, 1), (*LONG, 2)], "^$", f"^the equal requests {AFTER_KEPT}$"),
        ([(1, 2), (1, 3)], "^$", f"^the equal requests {NEAR_TIE} best token$"),
        # The reason of the first pair is kept, and a later pair may still be wrong.
        ([(1, 2), (1, 3), (1, 2)], "^$", NEAR_TIE),
        ([(1, 2), (1, 3), (4,)], "'first' and 'third' were answered differently after 0", "^$"),
        ([(*LONG, 1), (*LONG, 2), (0, 9)], "^$", AFTER_KEPT),
        ([(*LONG, 1), (*LONG, 2), (9,)], "'first' and 'third' .* after 0 tokens", "^$"),
        ([(0, 9), (0, 1), (0, 9, 3)], "'first' and 'third' .* after 2 tokens", "^$"),
    ],
)
def test_equal_requests_with_kept_tokens(
    answers: list[tuple[int | str, ...]], wrong: str, unknown: str
) -> None:
    names = ("first", "again", "third")[: len(answers)]
    checks = Checks(alike=[names])
    assert checks.compared == set(names)
    samples = [equal_request(name, *tokens) for name, tokens in zip(names, answers, strict=True)]
    comparison = compare_output(checks, samples, [], ServedWeights.MADE)
    assert re.search(wrong, comparison.wrong), comparison
    assert re.search(unknown, comparison.unknown), comparison
