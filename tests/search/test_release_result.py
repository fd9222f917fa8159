from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected, Standing, Verdict, arm_result, decide
from vllm_repro_search.versions.record import ReleaseResult, release_result


def in_release(*outcomes: Outcome, unexplained: int = 0, imitated: bool = True) -> ReleaseResult:
    return release_result(
        arm_result("reported", Expected.DIES, outcomes, unexplained=unexplained), imitated=imitated
    )


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([Outcome.CLEAN], ReleaseResult.LIVES),
        ([Outcome.CRASH, Outcome.CRASH], ReleaseResult.DIES),
        ([Outcome.CRASH, Outcome.CLEAN], ReleaseResult.SOMETIMES),
        ([Outcome.OTHER_CRASH, Outcome.CLEAN], ReleaseResult.FAILS_OTHERWISE),
        ([Outcome.HANG], ReleaseResult.FAILS_OTHERWISE),
        ([Outcome.UNTRIGGERED], ReleaseResult.UNTRIGGERED),
        ([Outcome.UNTRIGGERED, Outcome.CLEAN], ReleaseResult.UNDECIDED),
        ([Outcome.BOOT_FAILED, Outcome.BOOT_FAILED], ReleaseResult.BOOT_FAILED),
        ([Outcome.BOOT_FAILED, Outcome.INFRA], ReleaseResult.UNDECIDED),
        ([Outcome.UNSUPPORTED], ReleaseResult.UNSUPPORTED),
        ([Outcome.INFRA], ReleaseResult.INFRA),
        ([Outcome.CANCELLED], ReleaseResult.UNDECIDED),
        ([], ReleaseResult.UNDECIDED),
    ],
)
def test_result_of_a_release(outcomes: list[Outcome], expected: ReleaseResult) -> None:
    assert in_release(*outcomes) is expected


def test_a_release_lives_only_if_all_boots_crossed_and_lived() -> None:
    for outcomes in combinations_with_replacement(Outcome, 3):
        assert (in_release(*outcomes) is ReleaseResult.LIVES) == (
            set(outcomes) == {Outcome.CLEAN}
        ), outcomes


def test_an_unexplained_death_is_not_another_failure() -> None:
    assert in_release(Outcome.OTHER_CRASH, unexplained=1) is ReleaseResult.UNDECIDED
    assert (
        in_release(Outcome.OTHER_CRASH, Outcome.HANG, unexplained=1)
        is ReleaseResult.FAILS_OTHERWISE
    )


@pytest.mark.parametrize("unexplained", [9, 10])
def test_verdict_and_release_agree_on_failures_of_which_some_are_unexplained(
    unexplained: int,
) -> None:
    arm = arm_result("reported", Expected.DIES, [Outcome.OTHER_CRASH] * 10, unexplained=unexplained)
    changed = unexplained < 10
    assert (release_result(arm, imitated=True) is ReleaseResult.FAILS_OTHERWISE) is changed
    assert (decide([arm], standing=Standing.BAD).verdict is Verdict.CHANGED) is changed


def test_a_rehearsal_without_the_bug_is_undecided() -> None:
    assert in_release(Outcome.CLEAN, imitated=False) is ReleaseResult.UNDECIDED
