"""Reduction of a command: delta debugging, and what real arms allow to remove."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scenario_texts import arm_of
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.scenario.workload import (
    Conversation,
    Request,
    Together,
    chat,
    conversation,
    flag,
    pause,
    together,
)
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions
from vllm_repro_search.minimize.plan import Attempt, MinimizationPlan
from vllm_repro_search.minimize.verb import Reducible, reducible
from vllm_repro_search.plan import SearchState

Units = tuple[int, ...]
Engine = Callable[[Units], Attempt]
N = 14
NEEDED = st.frozensets(st.integers(0, N - 1), max_size=5)
START = st.integers(0, N).map(
    lambda requests: MinimizationPlan(requests=requests, others=N - requests)
)
SMALL = MinimizationPlan(requests=2, others=5)


def settle(search: MinimizationPlan, engine: Engine) -> MinimizationPlan:
    """Return the finished search.

    Every step is made anew from the list of attempts, as after a resume.
    """
    while (units := search.next()) is not None:
        assert units not in {attempt.units for attempt in search.attempts}, "no set is booted twice"
        assert units == tuple(sorted(units))
        search = MinimizationPlan(
            requests=search.requests,
            others=search.others,
            attempts=(*search.attempts, engine(units)),
        )
    return search


def needs(*needed: frozenset[int]) -> Engine:
    """Return an engine that crashes with all units of one of these sets."""
    return lambda units: Attempt(units, any(one <= set(units) for one in needed))


def assert_minimal(found: MinimizationPlan, engine: Engine) -> None:
    """Assert that the kept units crash, and that a boot without any of them does not."""
    assert found.kept is not None
    assert engine(found.kept).crashed
    booted = {attempt.units: attempt.crashed for attempt in found.attempts}
    for unit in found.kept:
        assert booted[tuple(one for one in found.kept if one != unit)] is False


@given(START, NEEDED)
def test_exactly_what_is_needed_is_left_after_few_boots(
    start: MinimizationPlan, needed: frozenset[int]
) -> None:
    found = settle(start, needs(needed))
    assert (found.state, frozenset(found.kept or ())) == (SearchState.FOUND, needed)
    assert_minimal(found, needs(needed))
    assert len(found.attempts) <= 1 + N + 2 * len(needed) * math.log2(N)


@given(START, st.lists(NEEDED, min_size=1, max_size=3))
def test_one_of_several_ways_to_crash_is_left(
    start: MinimizationPlan, ways: list[frozenset[int]]
) -> None:
    found = settle(start, needs(*ways))
    assert frozenset(found.kept or ()) in ways
    assert_minimal(found, needs(*ways))


@given(st.sets(st.frozensets(st.integers(0, 6))), st.sets(st.frozensets(st.integers(0, 6))))
def test_no_single_unit_of_the_rest_can_go(
    crashes: set[frozenset[int]], refusals: set[frozenset[int]]
) -> None:
    def engine(units: Units) -> Attempt:
        crashed = len(units) == 7 or frozenset(units) in crashes
        return Attempt(units, crashed, refused=not crashed and frozenset(units) in refusals)

    found = settle(SMALL, engine)
    assert found.state is SearchState.FOUND
    assert_minimal(found, engine)
    assert len(found.attempts) <= 7 * 8


@given(NEEDED, st.integers(0, 60))
def test_a_resumed_search_gives_the_same_answer(needed: frozenset[int], cut: int) -> None:
    whole = settle(MinimizationPlan(requests=3, others=N - 3), needs(needed))
    begun = MinimizationPlan(requests=3, others=N - 3).after(*whole.attempts[:cut])
    assert begun.attempts == whole.attempts[:cut]
    assert settle(begun, needs(needed)) == whole


def test_groups_of_one_part_go_before_single_units_of_all() -> None:
    found = settle(MinimizationPlan(requests=2, others=4), needs(frozenset({1, 5})))
    whole, *tried = ["".join(map(str, attempt.units)) for attempt in found.attempts]
    assert (whole, tried) == ("012345", ["0145", "01", "145", "45", "15", "1", "5"])


def test_refused_units_without_which_nothing_crashes_are_kept() -> None:
    def engine(units: Units) -> Attempt:
        return Attempt(units, crashed=len(units) == 3, refused=len(units) == 2)

    assert settle(MinimizationPlan(requests=0, others=3), engine).kept == (0, 1, 2)


def test_a_whole_command_that_does_not_crash_ends_it() -> None:
    assert settle(SMALL, lambda units: Attempt(units, crashed=False)).state is SearchState.QUIET
    refused = settle(SMALL, lambda units: Attempt(units, crashed=False, refused=True))
    assert (refused.state, refused.kept, len(refused.attempts)) == (
        SearchState.STUCK,
        None,
        1,
    )
    assert SMALL.state is SearchState.OPEN


def test_requests_that_a_crash_left_unsent_cost_no_boot() -> None:
    def engine(units: Units) -> Attempt:
        return Attempt(
            units, {1, 5} <= set(units), unused=tuple(unit for unit in units if 1 < unit < 4)
        )

    found = settle(MinimizationPlan(requests=4, others=3), engine)
    assert found.kept == (1, 5)
    assert not any({2, 3} & set(attempt.units) for attempt in found.attempts[1:])


@pytest.mark.parametrize("group", [(2, 6), (2, 3, 6)])
def test_flags_that_need_each_other_are_removed_together(group: Units) -> None:
    """vLLM refuses some flags of the group without the others; the crash needs unit 4 alone."""

    def engine(units: Units) -> Attempt:
        refused = 0 < len(set(group) & set(units)) < len(group)
        return Attempt(units, not refused and 4 in units, refused)

    found = settle(SMALL, engine)
    assert found.kept == (4,)
    assert_minimal(found, engine)


def test_a_flag_that_another_one_needs_goes_after_it() -> None:
    def engine(units: Units) -> Attempt:
        refused = 3 not in units and 6 in units
        return Attempt(units, not refused and 4 in units, refused)

    assert settle(SMALL, engine).kept == (4,)


MTP = find("tq-mtp-cudagraphs")
WORKLOAD = (
    chat(name="a", prompt=flag("--max-num-batched-tokens") + 1),
    pause(1),
    together(chat(name="b", prompt=10), chat(name="c", prompt=10), chat(name="d", prompt=10)),
    conversation(first=10, adds=[10, 10], name="e"),
)


def parts_of(
    scenario: Scenario,
    kind: ServerKind = ServerKind.LAB,
    arm: str = "reported",
    weights: str | None = None,
) -> Reducible:
    return reducible(scenario, arm_of(scenario, arm), kind, ServerOptions(weights=weights))


def names(parts: Reducible, *, kind: str = "flag") -> list[str]:
    return [unit.text.split()[0] for unit in parts.units if unit.kind == kind]


def with_workload() -> tuple[Scenario, Reducible]:
    scenario = replace(MTP, workload=WORKLOAD)
    return scenario, parts_of(scenario)


def test_flags_that_the_lab_needs_sets_or_removes_stay() -> None:
    parts = parts_of(MTP)
    assert [unit.text for unit in parts.units] == [
        "short chat of 100 tokens",
        "longer chat of 1000 tokens",
        "--tensor-parallel-size 1",
        "--max-model-len 125000",
        "--max-num-batched-tokens 4128",
        "--max-num-seqs 1",
        "--kv-cache-dtype turboquant_k8v4",
        "--enable-chunked-prefill",
        "--enable-prefix-caching",
        "--disable-custom-all-reduce",
        "--trust-remote-code",
        """--speculative-config '{"method":"mtp","num_speculative_tokens":3}'""",
    ]
    assert parts.untried == ("--quantization", "--dtype", "--gpu-memory-utilization")
    bare = parts.with_units(())
    lab = MTP.command_in_lab(bare)
    assert [f.name for f in lab.flags] == [
        "--model",
        "--dtype",
        "--block-size",
        "--compilation-config.mode",
    ]
    assert [f.name for f in MTP.command_of(bare).flags] == [
        "--model",
        "--quantization",
        "--dtype",
        "--gpu-memory-utilization",
    ]
    assert bare.workload == ()


def test_a_dummy_model_keeps_its_edits_other_servers_do_not() -> None:
    dummy = parts_of(MTP, ServerKind.PROCESS, weights="dummy")
    assert dummy.untried == ("--quantization",)
    assert "--dtype" in names(dummy)
    whole = parts_of(MTP, ServerKind.REHEARSAL)
    assert whole.untried == ()
    assert {"--quantization", "--gpu-memory-utilization"} <= set(names(whole))


def test_all_units_together_are_the_arm_itself() -> None:
    parts = parts_of(MTP)
    arm = parts.with_units(range(len(parts.units)))
    assert (MTP.command_in_lab(arm), arm.workload) == (
        MTP.command_in_lab(MTP.arms[0]),
        tuple(MTP.workload),
    )
    assert arm.edits == ()


def test_a_value_for_the_lab_is_not_the_one_to_paste() -> None:
    parts = parts_of(MTP, arm="no-chunked-prefill")
    values = {unit.name: (unit.text, unit.booted) for unit in parts.units if unit.kind == "flag"}
    assert values["--max-model-len"] == ("--max-model-len 125000", "--max-model-len 4128")
    assert values["--max-num-seqs"] == ("--max-num-seqs 1", "")
    assert (
        MTP.command_in_lab(parts.with_units(range(len(parts.units)))).get("--max-model-len")
        == "4128"
    )
    own = parts_of(MTP, ServerKind.DOCKER, arm="no-chunked-prefill")
    assert {unit.booted for unit in own.units} == {""}


def test_an_edit_of_the_arm_is_a_unit_too() -> None:
    parts = parts_of(MTP, arm="no-chunked-prefill")
    assert {"--no-enable-chunked-prefill", "--max-model-len"} <= set(names(parts))
    place = [unit.text for unit in parts.units].index("--no-enable-chunked-prefill")
    kept = [number for number in range(len(parts.units)) if number != place]
    arm = parts.with_units(kept)
    assert not MTP.command_in_lab(arm).has("--no-enable-chunked-prefill")
    assert f"{arm.edits[-1]}" == "without --no-enable-chunked-prefill"


def test_variables_are_units_unless_secret_or_not_passed_on() -> None:
    scenario = replace(
        MTP,
        command=(
            "VLLM_USE_X=1 HF_TOKEN=hf_x docker run -e VLLM_Y=2 vllm/vllm-openai:v0.20.2 --model a/b"
            " -tp 1"
        ),
    )
    docker = parts_of(scenario, ServerKind.DOCKER)
    assert names(docker, kind="variable") == ["VLLM_Y=2", "VLLM_USE_X=1"]
    assert docker.untried == ("HF_TOKEN",)
    bare = scenario.command_of(docker.with_units(()))
    assert bare.container is not None
    assert (bare.container.env, [name for name, _ in bare.env]) == ((), ["HF_TOKEN"])
    process = parts_of(scenario, ServerKind.PROCESS)
    assert (names(process, kind="variable"), process.untried) == (
        ["VLLM_USE_X=1"],
        ("VLLM_Y", "HF_TOKEN"),
    )


def test_requests_go_one_by_one_and_keep_their_size() -> None:
    scenario, parts = with_workload()
    assert [unit.kind for unit in parts.units].count("request") == 7
    assert [unit.kind for unit in parts.units].count("pause") == 1
    some = parts.with_units((0, 2, 4, 6, 7))
    assert some.workload is not None
    first, two, talk = some.workload
    assert isinstance(first, Request)
    assert first.prompt == 4129
    assert not scenario.command_in_lab(some).has("--max-num-batched-tokens")
    assert isinstance(two, Together)
    assert [request.name for request in two.requests] == ["b", "d"]
    assert isinstance(talk, Conversation)
    assert [turn.name for turn in talk.turns] == ["e 2", "e 3"]
    alone = parts.with_units((3, 5)).workload
    assert alone is not None
    assert isinstance(alone[0], Request)
    assert isinstance(alone[1], Conversation), "the messages of a conversation are made differently"


@pytest.mark.parametrize(
    ("kept", "sent", "unsent"),
    [
        (range(9), 0, (0, 1, 2, 3, 4, 5, 6, 7)),
        (range(9), 1, (2, 3, 4, 5, 6, 7)),
        (range(9), 2, (3, 4, 5, 6, 7)),
        (range(9), 4, (5, 6, 7)),
        (range(9), 5, (6, 7)),
        (range(9), 7, ()),
        ((1, 2, 8), 1, ()),
        ((1, 2, 8), 0, (2,)),  # it may have needed the pause
        ((8,), 0, ()),
    ],
)
def test_what_was_not_sent_is_not_needed(
    kept: range | tuple[int, ...], sent: int, unsent: tuple[int, ...]
) -> None:
    assert with_workload()[1].unsent(tuple(kept), sent) == unsent
