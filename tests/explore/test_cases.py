"""Cases: drawn, sent to the driver, shrunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.errors import UsageError
from vllm_repro.scenario.catalogue import find
from vllm_repro_explore.case import Case, Request, Setup
from vllm_repro_explore.draw import draw
from vllm_repro_explore.scenario_setup import draw_for, setup_from
from vllm_repro_explore.shrink import shrink

SEEDS = st.integers(min_value=1, max_value=10**6)


def test_the_server_of_a_scenario_is_the_setup() -> None:
    scenario = find("sco-hybrid")
    setup = setup_from(scenario, scenario.arms[0])
    assert (setup.layers, setup.window, setup.block, setup.blocks) == (
        ("full", "sliding"),
        128,
        32,
        330,
    )
    assert (setup.chunk, setup.seqs, setup.max_len) == (2048, 8, 7600)
    assert (setup.connector, setup.lazy, setup.hybrid, setup.cpu_blocks) == (
        "SimpleCPUOffloadConnector",
        False,
        True,
        1320,
    )
    arms = {arm.name: setup_from(scenario, arm) for arm in scenario.arms}
    assert arms["small-cpu-pool"].cpu_blocks == 160
    assert arms["lazy"].lazy
    assert arms["sco-off"].connector == ""
    assert not arms["hybrid-off"].hybrid


def test_a_server_with_another_flag_or_a_prefill_server_is_not_played() -> None:
    waits = find("sco-window-loads-wait")
    with pytest.raises(UsageError, match="not played: --prefix-cache-retention-interval"):
        setup_from(waits, next(arm for arm in waits.arms if arm.name == "all-kept"))
    fetches = find("nixl-failed-fetch-reserves")
    with pytest.raises(UsageError, match="not played: kv_load_failure_policy"):
        setup_from(fetches, fetches.arms[0])
    readmitted = {
        arm.name: setup_from(find("offloading-readmitted"), arm)
        for arm in find("offloading-readmitted").arms
    }
    assert [readmitted[name].asynchronous for name in ("reported", "synchronous")] == [True, False]
    assert readmitted["reported"].store_polls == 8
    urgent = setup_from(
        find("priority-uncomputed-blocks"), find("priority-uncomputed-blocks").arms[0]
    )
    assert (urgent.priority, urgent.threshold) == (True, 512)
    assert len({ask.priority for seed in range(9) for ask in draw_for(urgent, seed).asks}) == 4


@given(SEEDS)
def test_workloads_for_a_server_fit_it(seed: int) -> None:
    setup = Setup(max_len=300, connector="SimpleCPUOffloadConnector")
    case = draw_for(setup, seed)
    assert case.setup == setup
    for ask in case.asks:
        assert 1 <= ask.prompt <= ask.prompt + ask.answer <= setup.max_len
        assert 0 <= ask.shared <= ask.prompt


@given(SEEDS, st.integers(min_value=8, max_value=400))
def test_shrinking_ends_at_a_case_that_still_fails_and_is_no_larger(seed: int, length: int) -> None:
    case = draw(seed, "sco")

    def fails(candidate: Case) -> bool:
        return any(ask.prompt >= length for ask in candidate.asks)

    if not fails(case):
        return
    small = shrink(case, fails, budget=2000)
    assert fails(small.case)
    assert len(small.case.asks) == 1
    assert small.case.asks[0].prompt == length  # the smallest number that still fails, exactly
    assert (small.case.asks[0].answer, small.case.asks[0].abort, small.case.setup.draft) == (
        1,
        -1,
        0,
    )
    assert small.case.setup.max_len == length + 1


def test_what_a_failure_needs_is_kept() -> None:
    waves = ((Request(100, 8, 50), Request(90, 4)), (Request(100, 8, 50),))
    case = Case(Setup(layers=("sliding", "full"), asynchronous=True, runner=2, draft=0), waves, 1)

    def fails(candidate: Case) -> bool:
        shares = sum(ask.shared >= 20 for ask in candidate.asks)
        return (
            candidate.setup.asynchronous and candidate.setup.layers[0] == "sliding" and shares >= 2
        )

    small = shrink(case, fails).case
    assert small.setup.asynchronous
    assert (small.setup.layers, small.setup.runner) == (("sliding", "full"), 1)
    assert [ask.shared for ask in small.asks] == [20, 20]
    assert [ask.prompt for ask in small.asks] == [
        20,
        20,
    ], "no prompt is shorter than what it shares"


@given(SEEDS, st.integers(min_value=8, max_value=400))
def test_every_case_on_the_way_could_be_served(seed: int, length: int) -> None:
    case = draw(seed, "sco")
    blocks, prompt = min(4, case.setup.blocks), min(8, *(ask.prompt for ask in case.asks))
    played: list[Case] = []

    def fails(candidate: Case) -> bool:
        played.append(candidate)
        return any(ask.prompt + ask.shared >= length for ask in candidate.asks)

    shrink(case, fails)
    for candidate in played:
        assert candidate.setup.blocks >= blocks
        for ask in candidate.asks:
            assert ask.prompt >= prompt
            assert 0 <= ask.shared <= ask.prompt
            assert 1 <= ask.answer <= candidate.setup.max_len - ask.prompt


def test_the_budget_is_the_most_that_is_played() -> None:
    played = []

    def fails(candidate: Case) -> bool:
        played.append(candidate)
        return True

    assert shrink(draw(3, "plain"), fails, budget=5).tried == 5 == len(played)


def test_requests_are_sent_in_turn_where_together_is_not_needed() -> None:
    case = Case(Setup(), ((Request(100, 8), Request(90, 8)), (Request(80, 8), Request(70, 8))), 1)
    assert [len(wave) for wave in shrink(case, lambda one: len(one.asks) >= 4).case.waves] == [
        1,
        1,
        1,
        1,
    ]
    beside = shrink(
        case, lambda one: any(len(wave) > 1 for wave in one.waves) and len(one.asks) >= 3
    ).case
    assert sorted(len(wave) for wave in beside.waves) == [1, 2]
