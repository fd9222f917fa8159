from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.release_result import Fate, fate
from vllm_repro.verdict.verdict import Expected, arm_result


def of(*outcomes: Outcome, unexplained: int = 0, imitated: bool = True) -> Fate:
    return fate(arm_result("reported", Expected.DIES, outcomes, unexplained=unexplained), imitated=imitated)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([Outcome.CLEAN], Fate.LIVES),
        ([Outcome.CRASH, Outcome.CRASH], Fate.DIES),
        ([Outcome.CRASH, Outcome.INFRA], Fate.DIES),
        ([Outcome.CRASH, Outcome.CLEAN], Fate.SOMETIMES),
        ([Outcome.OTHER_CRASH, Outcome.CLEAN], Fate.FAILS_OTHERWISE),
        ([Outcome.HANG], Fate.FAILS_OTHERWISE),
        ([Outcome.WRONG_OUTPUT], Fate.FAILS_OTHERWISE),
        ([Outcome.UNTRIGGERED], Fate.UNTRIGGERED),
        ([Outcome.UNTRIGGERED, Outcome.CLEAN], Fate.UNDECIDED),
        ([Outcome.BOOT_FAILED, Outcome.BOOT_FAILED], Fate.BOOT_FAILED),
        ([Outcome.BOOT_FAILED, Outcome.INFRA], Fate.UNDECIDED),
        ([Outcome.UNSUPPORTED], Fate.UNSUPPORTED),
        ([Outcome.INFRA], Fate.INFRA),
        ([Outcome.CANCELLED], Fate.UNDECIDED),
        ([], Fate.UNDECIDED),
    ],
)
def test_what_the_trials_of_an_arm_say_of_a_release(outcomes: list[Outcome], expected: Fate) -> None:
    assert of(*outcomes) is expected


def test_only_boots_that_crossed_the_boundary_and_lived_make_a_release_live() -> None:
    for outcomes in combinations_with_replacement(Outcome, 3):
        assert (of(*outcomes) is Fate.LIVES) == (set(outcomes) == {Outcome.CLEAN}), outcomes


def test_a_death_without_a_cause_is_not_said_to_be_another_one() -> None:
    assert of(Outcome.OTHER_CRASH, unexplained=1) is Fate.UNDECIDED
    assert of(Outcome.OTHER_CRASH, Outcome.HANG, unexplained=1) is Fate.FAILS_OTHERWISE


def test_a_rehearsal_of_a_bug_that_it_does_not_have_decides_nothing_by_living() -> None:
    assert of(Outcome.CLEAN, imitated=False) is Fate.UNDECIDED
