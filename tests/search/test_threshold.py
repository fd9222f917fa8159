"""Search of the shortest crashing prompt: its steps, its boots, and scenarios that have one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scenario_texts import arm_of
from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.workload import chat
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions
from vllm_repro_search.plan import SearchState
from vllm_repro_search.threshold.plan import PromptResult, PromptSent, ThresholdPlan
from vllm_repro_search.threshold.verb import lengths_of, probes_of


def settle(
    search: ThresholdPlan, crashes: Callable[[int], bool], skips: frozenset[int] = frozenset()
) -> tuple[ThresholdPlan, int]:
    """Return the finished search, and its boots."""
    boots = 0
    while plan := search.next():
        boots += 1
        assert boots < 200
        for place, length in enumerate(plan):
            answer = (
                PromptResult.SKIP
                if length in skips
                else PromptResult.CRASH
                if crashes(length)
                else PromptResult.QUIET
            )
            search = search.after(PromptSent(length, answer, first=place == 0))
            if answer is not PromptResult.QUIET:
                break
    return search, boots


def crashes_of(search: ThresholdPlan) -> int:
    return sum(probe.answer is PromptResult.CRASH for probe in search.probes)


BOUNDS = st.tuples(st.integers(1, 50), st.integers(2, 4000), st.integers(0, 4000)).map(
    lambda drawn: ThresholdPlan(
        low=drawn[0], guess=drawn[0] + drawn[1], high=drawn[0] + drawn[1] + drawn[2]
    )
)


@given(BOUNDS)
def test_a_right_formula_costs_at_most_four_crashes(search: ThresholdPlan) -> None:
    found, boots = settle(search, lambda length: length >= search.guess)
    assert (found.state, found.shortest_crash, found.longest_quiet) == (
        SearchState.FOUND,
        search.guess,
        search.guess - 1,
    )
    assert boots == crashes_of(found) <= 4


@given(BOUNDS, st.data())
def test_any_threshold_is_found_whatever_the_formula_is(
    search: ThresholdPlan, data: st.DataObject
) -> None:
    real = data.draw(st.integers(search.low + 1, search.high))
    found, _ = settle(search, lambda length: length >= real)
    assert (found.state, found.shortest_crash, found.longest_quiet) == (
        SearchState.FOUND,
        real,
        real - 1,
    )


@given(BOUNDS)
def test_an_engine_without_the_bug_takes_the_fewest_boots(search: ThresholdPlan) -> None:
    found, boots = settle(search, lambda _: False)
    assert (found.state, found.longest_quiet, boots) == (SearchState.QUIET, search.high, 1)


def test_an_engine_that_always_crashes_is_recognized() -> None:
    found, _ = settle(ThresholdPlan(low=1, guess=100, high=200), lambda _: True)
    assert (found.state, found.shortest_crash, found.longest_quiet) == (
        SearchState.ALL,
        1,
        None,
    )


@given(BOUNDS.filter(lambda search: search.high > search.guess + 2))
def test_a_quiet_prompt_above_the_threshold_is_a_surprise(search: ThresholdPlan) -> None:
    found, _ = settle(search, lambda length: search.guess <= length < search.high)
    assert (found.state, found.quiet_above) == (SearchState.SURPRISE, (search.high,))


def test_a_crash_that_needs_the_prompts_before_it_is_a_surprise() -> None:
    search = ThresholdPlan(low=1, guess=100, high=200)
    found = search.after(
        *(PromptSent(one, PromptResult.QUIET) for one in (1, 50, 99)),
        PromptSent(100, PromptResult.CRASH),
    )
    assert found.next() == (100,), "alone on a fresh server"
    quiet = found.after(PromptSent(100, PromptResult.QUIET, first=True))
    assert (quiet.state, quiet.longest_quiet, quiet.next()) == (
        SearchState.SURPRISE,
        99,
        None,
    )


def test_the_prompts_of_a_search() -> None:
    search = ThresholdPlan(low=1, guess=100, high=200)
    assert search.next() == (1, 50, 99, 100, 101, 103, 107, 115, 131, 163, 200)
    early = search.after(
        PromptSent(1, PromptResult.QUIET),
        PromptSent(50, PromptResult.QUIET),
        PromptSent(99, PromptResult.CRASH),
    )
    assert early.next() == (
        58,
        65,
        71,
        76,
        80,
        83,
        86,
        88,
        *range(90, 99),
    ), "0.165 of the gap each: a crash costs 10 quiet prompts"
    assert early.after(PromptSent(58, PromptResult.SKIP)).next_prompt() == PromptSent(
        57, PromptResult.QUIET
    )
    assert (search.next_prompt(), early.next_prompt()) == (
        PromptSent(1, PromptResult.QUIET),
        PromptSent(58, PromptResult.QUIET),
    )
    known = search.after(
        *(PromptSent(one, PromptResult.QUIET) for one in (1, 50, 99)),
        PromptSent(100, PromptResult.CRASH),
    )
    assert replace(known, probes=known.probes[:-1]).next_prompt() == PromptSent(
        100, PromptResult.CRASH
    )
    for check in (100, 150, 200):
        assert (known.state, known.next_prompt(), known.next()) == (
            SearchState.OPEN,
            PromptSent(check, PromptResult.CRASH),
            (check,),
        )
        known = known.after(PromptSent(check, PromptResult.CRASH, first=True))
    assert (known.state, known.next()) == (SearchState.FOUND, None)


def test_a_crash_is_sent_again_alone_unless_it_was_first() -> None:
    search = ThresholdPlan(low=1, guess=100, high=201).after(
        PromptSent(99, PromptResult.QUIET), PromptSent(100, PromptResult.CRASH)
    )
    assert search.next() == (100,)
    for again in (
        PromptSent(100, PromptResult.CRASH),
        PromptSent(100, PromptResult.CRASH, first=True),
    ):
        assert search.after(again).next_prompt() == PromptSent(150, PromptResult.CRASH), (
            "the middle of 100 and 201"
        )
    assert replace(search, probes=()).after(
        PromptSent(100, PromptResult.CRASH, first=True), PromptSent(99, PromptResult.QUIET)
    ).next() == (150,)
    assert (
        ThresholdPlan(low=1, guess=3, high=3)
        .after(
            PromptSent(1, PromptResult.SKIP),
            PromptSent(2, PromptResult.SKIP),
            PromptSent(3, PromptResult.CRASH),
        )
        .state
        is SearchState.STUCK
    )


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        ((PromptResult.QUIET, PromptResult.QUIET, PromptResult.SKIP), SearchState.STUCK),
        ((PromptResult.QUIET, PromptResult.SKIP, PromptResult.QUIET), SearchState.STUCK),
        ((PromptResult.QUIET, PromptResult.SKIP, PromptResult.CRASH), SearchState.STUCK),
        ((PromptResult.SKIP, PromptResult.CRASH, PromptResult.CRASH), SearchState.STUCK),
        ((PromptResult.QUIET, PromptResult.QUIET, PromptResult.QUIET), SearchState.QUIET),
    ],
)
def test_lengths_without_an_answer_leave_it_open(
    answers: tuple[PromptResult, ...], state: SearchState
) -> None:
    search = ThresholdPlan(low=1, guess=2, high=3).after(
        *(PromptSent(at, one, first=True) for at, one in enumerate(answers, 1))
    )
    assert (search.next_prompt(), search.state) == (None, state)


def test_a_boot_has_at_most_40_prompts() -> None:
    search = ThresholdPlan(low=1, guess=99_998, high=100_000).after(
        PromptSent(99_997, PromptResult.CRASH)
    )
    assert len(search.next() or ()) == 40


@given(BOUNDS, st.data())
def test_skips_never_give_a_wrong_threshold(search: ThresholdPlan, data: st.DataObject) -> None:
    real = data.draw(st.integers(search.low + 1, search.high))
    skips = frozenset(data.draw(st.sets(st.integers(search.low, search.high), max_size=6)))
    found, _ = settle(search, lambda length: length >= real, skips)
    if found.state is SearchState.FOUND:
        assert (found.shortest_crash, found.longest_quiet) == (real, real - 1)
    else:
        assert found.state in (SearchState.STUCK, SearchState.QUIET)
        assert found.state is not SearchState.QUIET or not found.lengths(PromptResult.CRASH)


QUIET: dict[str, Any] = {"status": 200, "error": None, "finish_reason": "length"}
DEAD: dict[str, Any] = {
    "status": 200,
    "error": "EngineCore died",
    "finish_reason": None,
    "usage": None,
}
REFUSED: dict[str, Any] = {"status": 400, "error": "too long", "finish_reason": None, "usage": None}
Q, C, S = PromptResult.QUIET, PromptResult.CRASH, PromptResult.SKIP


def boot(outcome: str, *answers: dict[str, Any] | None, trial: int = 1) -> list[Entry]:
    """Return the journal of a boot with prompts of 10, 20, 30, … tokens; None: no answer."""
    entries = []
    for length, answer in zip(range(10, 1000, 10), answers, strict=False):
        label = {"trial": trial, "name": f"{length} tokens"}
        entries.append(Entry(0, "request-sent", label))
        if answer is not None:
            entries.append(
                Entry(0, "answer", {"usage": {"prompt_tokens": length}, **answer, **label})
            )
    return [
        *entries,
        Entry(0, "trial-ended", {"trial": trial, "outcome": outcome, "why": "a reason"}),
    ]


def probes(*entries: Entry) -> tuple[PromptSent, ...]:
    return probes_of(Recording(entries, cut=False))


@pytest.mark.parametrize(
    ("outcome", "answers", "expected"),
    [
        ("crash", [QUIET, QUIET, DEAD], [Q, Q, C]),
        ("crash", [QUIET, None], [Q, C]),
        ("crash", [DEAD], [C]),
        ("clean", [QUIET, QUIET], [Q, Q]),
        ("untriggered", [QUIET], [Q]),
        ("untriggered", [QUIET, REFUSED, QUIET], [Q, S, Q]),
        ("crash", [REFUSED, DEAD], [S, C]),
        # Two prompts without an answer: either may be the one that crashed it.
        ("crash", [QUIET, DEAD, DEAD], [Q, S, S]),
        # It died after the last answer: neither quiet nor a crash of that prompt.
        ("crash", [QUIET, QUIET], [Q, S]),
        ("crash", [QUIET, REFUSED], [Q, S]),
        ("other-crash", [QUIET, DEAD], [Q, S]),
        ("hang", [QUIET, None], [Q, S]),
        ("wrong-output", [QUIET, QUIET], [Q, S]),
        # The host spoiled the last one: it is sent again.
        ("infra", [QUIET, None], [Q]),
        ("boot-failed", [], []),
        ("clean", [{**QUIET, "usage": {"prompt_tokens": 11}}, {**QUIET, "usage": None}], [S, S]),
        ("clean", [{**QUIET, "finish_reason": None}, {**QUIET, "status": 500}], [S, S]),
        ("clean", [{**QUIET, "error": "cut off"}], [S]),
    ],
)
def test_what_each_prompt_did(
    outcome: str, answers: Sequence[dict[str, Any] | None], expected: list[PromptResult]
) -> None:
    found = probes(*boot(outcome, *answers))
    assert [one.answer for one in found] == expected
    assert [one.length for one in found] == [10, 20, 30][: len(expected)]
    assert [one.first for one in found] == [True, False, False][: len(expected)]


def test_only_the_last_trial_of_a_run_counts() -> None:
    found = probes(
        *boot("crash", None, trial=2),
        *boot("infra", QUIET, QUIET),
        *boot("crash", None, trial=2)[-1:],
    )
    assert found == (PromptSent(10, PromptResult.CRASH, first=True),)


def lengths(
    name: str, arm: str = "reported", kind: ServerKind = ServerKind.LAB
) -> tuple[int, int, int]:
    scenario = find(name)
    again = "vllm-repro run"
    plan, _ = lengths_of(scenario, arm_of(scenario, arm), kind, ServerOptions(), again)
    return plan.low, plan.guess, plan.high


def test_the_search_begins_where_the_trigger_computes_it() -> None:
    assert lengths("tq-chunked-prefill") == (100, 4096 + 129, 2 * (4096 + 129))
    assert lengths("tq-chunked-prefill", kind=ServerKind.REHEARSAL) == (100, 4225, 8450)
    assert lengths("tq-chunked-prefill", "near-miss-129") == (
        32,
        4225,
        8450,
    ), "no prompt of the arm is shorter"
    assert lengths("dsv4-tp2") == (400, 760, 1520)


@pytest.mark.parametrize(("longest", "high"), [(9000, 9000), (500_000, 102_400 - 8)])
def test_the_longest_prompt_fits_workload_and_model(longest: int, high: int) -> None:
    scenario = find("tq-chunked-prefill")
    arm = replace(scenario.arms[0], workload=(chat(prompt=100), chat(prompt=longest)))
    assert lengths_of(scenario, arm, ServerKind.LAB, ServerOptions(), "")[0].high == high
