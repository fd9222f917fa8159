from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro.running.boots import MOST, Boots, undecided_arms
from vllm_repro.scenario.scenario import Arm
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import ArmResult, Expected, Record, arm_result, comparisons

CRASH, CLEAN, UNTRIGGERED = Outcome.CRASH, Outcome.CLEAN, Outcome.UNTRIGGERED
REPORTED, EAGER, NEAR = (
    Arm("reported", Expected.DIES),
    Arm("eager", Expected.LIVES),
    Arm("near", Expected.UNTRIGGERED),
)


def boots(
    arms: list[Arm], does: Callable[[str, int], Outcome], record: Record | None = None
) -> dict[str, int]:
    """Return how often each arm is booted in a run whose boot n of an arm ends as `does` returns."""
    done = Boots()

    def results() -> list[ArmResult]:
        return [arm_result(arm.name, arm.expected, done.outcomes[arm.name]) for arm in arms]

    for arm in done.in_turn(arms, lambda: undecided_arms(results(), record, "0.24.0")):
        done.last[arm.name] += 1
        done.finish(arm.name, arm.expected, does(arm.name, done.last[arm.name]), "", crossed=True)
    return {arm.name: done.last[arm.name] for arm in arms}


def fixed(**outcomes: Outcome) -> Callable[[str, int], Outcome]:
    return lambda name, _: outcomes[name]


@pytest.mark.parametrize(
    ("arms", "outcomes", "record", "expected"),
    [
        ([REPORTED], {"reported": CRASH}, None, {"reported": 1}),
        (
            [REPORTED, EAGER, NEAR],
            {"reported": CRASH, "eager": CLEAN, "near": UNTRIGGERED},
            None,
            (5, 4, 1),
        ),
        ([REPORTED, EAGER], {"reported": CRASH, "eager": CRASH}, None, (1, 1)),
        ([REPORTED, EAGER], {"reported": CRASH, "eager": UNTRIGGERED}, None, (1, 1)),
        ([REPORTED, EAGER], {"reported": CLEAN, "eager": CLEAN}, None, (4, 1)),
        (
            [REPORTED],
            {"reported": CLEAN},
            Record(crashed=5, boots=5, run="r", version="0.23.0"),
            (4,),
        ),
        (
            [REPORTED],
            {"reported": CLEAN},
            Record(crashed=3, boots=5, run="r", version="0.23.0"),
            (15,),
        ),
        # Fifty-nine boots would be needed, so none is added.
        (
            [REPORTED],
            {"reported": CLEAN},
            Record(crashed=1, boots=1, run="r", version="0.23.0"),
            (1,),
        ),
        ([REPORTED], {"reported": Outcome.INFRA}, None, (2,)),
        ([REPORTED], {"reported": Outcome.OTHER_CRASH}, None, (1,)),
        ([REPORTED, EAGER], {"reported": Outcome.HANG, "eager": CLEAN}, None, (1, 1)),
    ],
)
def test_boots_until_it_is_decided(
    arms: list[Arm],
    outcomes: dict[str, Outcome],
    record: Record | None,
    expected: tuple[int, ...] | dict[str, int],
) -> None:
    found = boots(arms, fixed(**outcomes), record)
    assert tuple(found.values()) == (
        tuple(expected.values()) if isinstance(expected, dict) else expected
    )


@pytest.mark.parametrize(
    ("record", "needed"),
    [
        (
            Record(crashed=3, boots=3, run="r", version="0.24.0"),
            7,
        ),  # of the release that is patched: what its own deaths ask for
        # of another release: it decides nothing
        (Record(crashed=3, boots=3, run="r", version="0.23.0"), 4),
        (Record(crashed=3, boots=3, run="r", version="0.24.0", arm="near"), 4),
        (None, 4),
    ],
)
def test_a_patch_boots_as_often_as_deaths_of_its_release_ask(
    record: Record | None, needed: int
) -> None:
    boots = 0
    while undecided_arms(
        [arm_result("reported", Expected.DIES, [CLEAN] * boots)], record, "0.24.0+cpu", patched=True
    ):
        boots += 1
    assert boots == needed


def test_one_infra_boot_is_repeated_and_does_not_count() -> None:
    arms = [REPORTED, EAGER]
    done = Boots()
    for booted in done.in_turn(
        arms, lambda: [arm.name for arm in arms if len(done.outcomes[arm.name]) < 2]
    ):
        done.last[booted.name] += 1
        spoiled = booted is EAGER and done.last[booted.name] == 1
        done.finish(
            booted.name,
            booted.expected,
            Outcome.INFRA if spoiled else Outcome.CLEAN,
            "",
            crossed=True,
        )
    assert (done.last, done.outcomes["eager"]) == ({"reported": 2, "eager": 3}, [Outcome.CLEAN] * 2)


def test_a_bug_in_four_of_five_boots_needs_more_quiet_boots() -> None:
    def does(name: str, number: int) -> Outcome:
        return CRASH if name == "reported" and number != 5 else CLEAN

    assert boots([REPORTED, EAGER], does) == {"reported": 5, "eager": 8}


@pytest.mark.parametrize("arms", [[("reported", 1)], [("reported", 1), ("eager", 0)]])
def test_a_hang_that_is_not_the_bug_is_no_reason_to_boot_again(arms: list[tuple[str, int]]) -> None:
    expected = {"reported": Expected.SPINS, "eager": Expected.LIVES}
    outcomes = {"reported": Outcome.HANG, "eager": CLEAN}
    assert not undecided_arms(
        [arm_result(name, expected[name], [outcomes[name]], strange=odd) for name, odd in arms]
    )


@given(
    st.lists(st.sampled_from([CRASH, CLEAN, CLEAN, UNTRIGGERED]), min_size=60, max_size=60),
    st.booleans(),
)
@settings(max_examples=60)
def test_it_always_ends(outcomes: list[Outcome], compared: bool) -> None:
    arms = [REPORTED, EAGER] if compared else [REPORTED]
    offset = {"reported": 0, "eager": 30}
    found = boots(arms, lambda name, number: outcomes[offset[name] + number - 1])
    assert all(1 <= number <= MOST for number in found.values())


def test_what_quiet_arms_show_beside_a_dying_one() -> None:
    def result(arm: Arm, *outcomes: Outcome) -> ArmResult:
        return arm_result(arm.name, arm.expected, outcomes)

    (sentence,) = comparisons([result(REPORTED, *[CRASH] * 5), result(EAGER, *[CLEAN] * 4)])
    assert sentence.startswith("eager: died in 0 of 4 boots, against 5 of 5 of reported")
    assert "in less than 5 % of cases (Fisher's exact test: p = 0.0079)" in sentence
    (sentence,) = comparisons([result(REPORTED, CRASH), result(EAGER, CLEAN)])
    assert "too few boots to say that it helps" in sentence
    assert comparisons([result(REPORTED, CLEAN), result(EAGER, CLEAN)]) == ()
    assert (
        comparisons([result(REPORTED, CRASH), result(EAGER, CRASH), result(NEAR, UNTRIGGERED)])
        == ()
    )
