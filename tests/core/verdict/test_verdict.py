from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.verdict.outcome import NEVER_IDLE, Outcome
from vllm_repro.verdict.verdict import (
    ArmResult,
    Expect,
    Expected,
    Record,
    Result,
    Standing,
    Verdict,
    VerdictReport,
    arm_result,
    comparisons,
    decide,
    exit_status,
    from_source,
    is_other,
    is_strange,
    is_unproved,
    same_release,
)

CRASH, CLEAN, UNTRIGGERED, OTHER = (
    Outcome.CRASH,
    Outcome.CLEAN,
    Outcome.UNTRIGGERED,
    Outcome.OTHER_CRASH,
)
WRONG = Outcome.WRONG_OUTPUT


RECORD = Record(crashed=5, boots=5, run="r", version="0.23.0")


def arm(name: str, expected: Expected, *outcomes: Outcome, unexplained: int = 0) -> ArmResult:
    return arm_result(name, expected, outcomes, unexplained=unexplained)


def reported(*outcomes: Outcome, unexplained: int = 0) -> ArmResult:
    return arm("reported", Expected.DIES, *outcomes, unexplained=unexplained)


def errs(*outcomes: Outcome) -> ArmResult:
    return arm("reported", Expected.ERRS, *outcomes)


def eager(*outcomes: Outcome) -> ArmResult:
    return arm("eager", Expected.LIVES, *outcomes)


def near(*outcomes: Outcome) -> ArmResult:
    return arm("near", Expected.UNTRIGGERED, *outcomes)


@pytest.mark.parametrize(
    ("outcomes", "result"),
    [
        ((CRASH,), Result.REPRODUCES),
        ((CRASH, CLEAN), Result.FLAKY),
        ((CRASH, UNTRIGGERED), Result.REPRODUCES),
        ((CLEAN, CLEAN), Result.QUIET),
        ((CLEAN, UNTRIGGERED), Result.INCONCLUSIVE),
        ((CLEAN, OTHER), Result.INCONCLUSIVE),
        ((Outcome.INFRA, Outcome.UNSUPPORTED), Result.BLOCKED),
        ((CLEAN, Outcome.INFRA), Result.INCONCLUSIVE),
        ((), Result.INCONCLUSIVE),
    ],
)
def test_bad_beats_unknown_beats_good(outcomes: tuple[Outcome, ...], result: Result) -> None:
    assert reported(*outcomes).result is result


@pytest.mark.parametrize(
    ("arms", "standing", "expect", "verdict", "expected"),
    [
        ([reported(CRASH), eager(CLEAN)], Standing.BAD, Expect.DECLARED, Verdict.REPRODUCES, True),
        ([reported(CRASH), eager(CRASH)], Standing.BAD, Expect.DECLARED, Verdict.REPRODUCES, False),
        ([reported(CRASH)], Standing.GOOD, Expect.DECLARED, Verdict.REGRESSED, False),
        ([reported(CRASH)], Standing.UNKNOWN, Expect.DECLARED, Verdict.REPRODUCES, True),
        ([reported(CLEAN)], Standing.GOOD, Expect.DECLARED, Verdict.QUIET, True),
        ([reported(CLEAN)], Standing.BAD, Expect.DECLARED, Verdict.QUIET, False),
        ([reported(CLEAN)], Standing.GOOD, Expect.CRASH, Verdict.QUIET, False),
        ([reported(CRASH)], Standing.BAD, Expect.ALIVE, Verdict.REPRODUCES, False),
        ([reported(UNTRIGGERED)], Standing.BAD, Expect.ALIVE, Verdict.INCONCLUSIVE, None),
        ([reported(UNTRIGGERED)], Standing.BAD, Expect.DECLARED, Verdict.INCONCLUSIVE, None),
        ([reported(OTHER)], Standing.BAD, Expect.DECLARED, Verdict.CHANGED, False),
        (
            [reported(OTHER, unexplained=1)],
            Standing.BAD,
            Expect.DECLARED,
            Verdict.INCONCLUSIVE,
            None,
        ),
        ([reported(Outcome.INFRA)], Standing.BAD, Expect.ANY, Verdict.INCONCLUSIVE, None),
        ([reported(CRASH), eager(CRASH)], Standing.GOOD, Expect.ANY, Verdict.REGRESSED, True),
        ([errs(WRONG), eager(CLEAN)], Standing.BAD, Expect.DECLARED, Verdict.REPRODUCES, True),
        ([errs(WRONG)], Standing.GOOD, Expect.DECLARED, Verdict.REGRESSED, False),
        ([errs(OTHER)], Standing.BAD, Expect.DECLARED, Verdict.CHANGED, False),
        ([reported(WRONG)], Standing.BAD, Expect.DECLARED, Verdict.CHANGED, False),
        ([near(UNTRIGGERED)], Standing.BAD, Expect.DECLARED, Verdict.INCONCLUSIVE, True),
        ([near(CLEAN)], Standing.BAD, Expect.DECLARED, Verdict.QUIET, False),
        ([reported(CRASH), near(CRASH)], Standing.BAD, Expect.DECLARED, Verdict.REPRODUCES, False),
        ([reported(CRASH), near(OTHER)], Standing.BAD, Expect.DECLARED, Verdict.REPRODUCES, False),
        ([near(UNTRIGGERED, CLEAN)], Standing.BAD, Expect.DECLARED, Verdict.INCONCLUSIVE, False),
        ([reported(CLEAN)], Standing.UNKNOWN, Expect.CRASH, Verdict.QUIET, False),
        ([reported(CRASH)], Standing.UNKNOWN, Expect.CRASH, Verdict.REPRODUCES, True),
        ([eager(CLEAN)], Standing.BAD, Expect.DECLARED, Verdict.QUIET, True),
        ([], Standing.BAD, Expect.DECLARED, Verdict.INCONCLUSIVE, None),
    ],
)
def test_verdicts(
    arms: list[ArmResult],
    standing: Standing,
    expect: Expect,
    verdict: Verdict,
    expected: bool | None,
) -> None:
    report = decide(arms, standing=standing, expect=expect)
    assert (report.verdict, report.expected) == (verdict, expected)


def test_fixed_needs_a_record_and_enough_quiet_boots() -> None:
    def verdict(clean: int, record: Record | None) -> VerdictReport:
        return decide(
            [reported(*[CLEAN] * clean)], standing=Standing.GOOD, record=record, version="0.24.0"
        )

    assert verdict(4, RECORD).verdict is Verdict.FIXED
    assert verdict(3, RECORD).verdict is Verdict.QUIET
    assert "4 quiet boots are needed" in verdict(3, RECORD).because
    assert verdict(50, None).verdict is Verdict.QUIET


def test_the_surprising_arm_is_named() -> None:
    report = decide([reported(CRASH), eager(CRASH)], standing=Standing.BAD)
    assert report.surprises == ("eager",)
    assert "unexpected in arm eager" in report.because


def test_exit_statuses() -> None:
    assert [exit_status(answer) for answer in (True, False, None)] == [0, 1, 2]
    assert {verdict: verdict.bisect_status for verdict in Verdict} == {
        Verdict.REPRODUCES: 1,
        Verdict.REGRESSED: 1,
        Verdict.QUIET: 0,
        Verdict.FIXED: 0,
        Verdict.CHANGED: 125,
        Verdict.INCONCLUSIVE: 125,
    }


outcomes = st.lists(st.sampled_from(Outcome), max_size=6)


@given(outcomes, st.sampled_from(Standing), st.sampled_from(Expect))
def test_quiet_and_fixed_need_proof(
    seen: list[Outcome], standing: Standing, expect: Expect
) -> None:
    report = decide(
        [reported(*seen)],
        standing=standing,
        expect=expect,
        record=RECORD,
    )
    if report.verdict in (Verdict.QUIET, Verdict.FIXED):
        assert seen
        assert set(seen) == {CLEAN}
    if report.verdict in (Verdict.REPRODUCES, Verdict.REGRESSED):
        assert CRASH in seen


def test_a_workaround_that_lives_does_not_make_the_bug_fixed() -> None:
    record = replace(RECORD, arm="eager")
    report = decide([eager(*[CLEAN] * 50)], standing=Standing.GOOD, record=record, version="0.24.0")
    assert report.verdict is Verdict.QUIET


def test_the_release_that_died_is_not_fixed_by_living() -> None:
    report = decide(
        [reported(*[CLEAN] * 50)], standing=Standing.BAD, record=RECORD, version="0.23.0"
    )
    assert (report.verdict, report.expected) == (Verdict.QUIET, False)


def small_pool(*outcomes: Outcome, standing: Standing) -> ArmResult:
    return arm_result("small-pool", Expected.DIES, outcomes, standing=standing)


@pytest.mark.parametrize(
    ("arms", "standing", "verdict", "expected"),
    [
        # Between the releases that have the bug and those that do not, one arm still dies.
        (
            [reported(CLEAN), small_pool(CRASH, standing=Standing.BAD)],
            Standing.UNKNOWN,
            Verdict.REPRODUCES,
            True,
        ),
        (
            [reported(CLEAN), small_pool(CLEAN, standing=Standing.BAD)],
            Standing.UNKNOWN,
            Verdict.QUIET,
            False,
        ),
        (
            [reported(CLEAN), small_pool(CRASH, standing=Standing.GOOD)],
            Standing.GOOD,
            Verdict.REGRESSED,
            False,
        ),
        # Its own status wins over the scenario's, either way.
        (
            [reported(CLEAN), small_pool(CRASH, standing=Standing.BAD)],
            Standing.GOOD,
            Verdict.REPRODUCES,
            True,
        ),
        (
            [reported(CRASH), small_pool(CLEAN, standing=Standing.GOOD)],
            Standing.BAD,
            Verdict.REPRODUCES,
            True,
        ),
    ],
)
def test_an_arm_may_have_bad_releases_of_its_own(
    arms: list[ArmResult], standing: Standing, verdict: Verdict, expected: bool
) -> None:
    report = decide(arms, standing=standing)
    assert (report.verdict, report.expected) == (verdict, expected)


@pytest.mark.parametrize(
    ("clean", "version", "patched", "verdict"),
    [
        (4, "0.23.0", True, Verdict.FIXED),
        (3, "0.23.0", True, Verdict.QUIET),
        (50, "0.23.0", False, Verdict.QUIET),
        (50, "0.24.0", True, Verdict.QUIET),
    ],
)
def test_a_patch_is_compared_with_the_release_that_died(
    clean: int, version: str, patched: bool, verdict: Verdict
) -> None:
    arms = [reported(*[CLEAN] * clean)]
    report = decide(
        arms,
        standing=Standing.BAD,
        expect=Expect.ALIVE,
        record=RECORD,
        version=version,
        patched=patched,
    )
    assert report.verdict is verdict
    assert ("the patch" in report.because) is patched


def test_a_patch_short_of_the_boundary_is_undecided() -> None:
    def expected(*arms: ArmResult) -> bool | None:
        return decide(list(arms), standing=Standing.BAD, expect=Expect.ALIVE, patched=True).expected

    assert expected(reported(UNTRIGGERED)) is None
    assert expected(reported(CLEAN, UNTRIGGERED)) is None
    assert expected(reported(CLEAN), near(UNTRIGGERED)) is True
    assert expected(reported(CLEAN), eager(UNTRIGGERED)) is None
    assert expected(reported(CRASH)) is False


def test_because_names_the_patch() -> None:
    died = decide([reported(CRASH)], standing=Standing.GOOD, expect=Expect.ALIVE, patched=True)
    assert (
        died.because
        == "reported with the patch: died in 1 of 1 boots; this release was declared good as it is"
    )


def test_a_record_counts_for_its_own_arm_only() -> None:
    other = arm("near-miss-129", Expected.DIES, *[CLEAN] * 50)
    assert (
        decide([other], standing=Standing.GOOD, record=RECORD, version="0.24.0").verdict
        is Verdict.QUIET
    )
    own = replace(RECORD, arm="near-miss-129")
    assert (
        decide([other], standing=Standing.GOOD, record=own, version="0.24.0").verdict
        is Verdict.FIXED
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("0.28.0+cpu", "0.28.0", True),
        ("0.28.0", "0.28.0.post1", False),
        ("0.28", "0.28.0", True),
        (None, None, False),
        ("main", "main", True),
        ("main", "0.28.0", False),
        ("0.23.0+commit.4689392ab1", "0.23.0", False),
        ("0.23.0", "0.23.0+folder.4689392ab1", False),
        ("0.23.0+commit.4689392ab1", "0.23.0+commit.4689392ab1", True),
    ],
)
def test_same_release(one: str | None, other: str | None, same: bool) -> None:
    assert same_release(one, other) is same


def test_a_build_from_source_is_no_release() -> None:
    assert from_source("0.23.0+commit.4689392ab1")
    assert not any(map(from_source, ("0.23.0", "0.23.0+cpu", "0.23.1rc1.dev5+gabc1234", None)))


def test_a_hang_of_the_other_kind_is_not_the_bug() -> None:
    other = arm_result("reported", Expected.SPINS, [Outcome.HANG], strange=1)
    assert (other.result, other.crashed, other.otherwise) == (
        Result.INCONCLUSIVE,
        0,
        (Outcome.HANG,),
    )
    report = decide([other], standing=Standing.BAD)
    assert (report.verdict, report.expected) == (Verdict.CHANGED, False)
    mixed = arm_result("reported", Expected.SPINS, [Outcome.HANG, Outcome.HANG], strange=1)
    assert (mixed.result, mixed.crashed, mixed.otherwise) == (Result.REPRODUCES, 1, (Outcome.HANG,))


def test_other_failures_are_boots_too_and_are_named() -> None:
    mixed = arm_result("reported", Expected.DIES, [CRASH, *[Outcome.OTHER_CRASH] * 4, UNTRIGGERED])
    assert (mixed.result, mixed.crashed, mixed.conclusive) == (Result.REPRODUCES, 1, 5)
    because = decide([mixed], standing=Standing.BAD).because
    assert because == "reported: died in 1 of 5 boots, besides other-crash x 4"


def test_a_hang_short_of_the_boundary_is_undecided() -> None:
    """0.19.1 never admits the prompt (vllm-project/vllm#39734), so it hangs before the boundary."""
    other = arm_result("reported", Expected.HANGS, [Outcome.HANG], unproved=1)
    assert (other.result, other.crashed, other.otherwise) == (
        Result.INCONCLUSIVE,
        0,
        (Outcome.HANG,),
    )
    for standing in Standing:
        shown = decide([other], standing=standing)
        assert (shown.verdict, shown.expected) == (Verdict.INCONCLUSIVE, None)
        assert shown.because == "reported: nothing can be said: 1 hang, 1 short of the boundary"
    assert decide([other], standing=Standing.BAD, expect=Expect.ALIVE).expected is False, (
        "it is not alive, whatever it has"
    )
    mixed = arm_result("reported", Expected.HANGS, [Outcome.HANG, Outcome.HANG], unproved=1)
    assert (mixed.result, mixed.crashed, mixed.conclusive) == (Result.REPRODUCES, 1, 1)


@pytest.mark.parametrize(
    ("expected", "outcome", "crossed", "unproved"),
    [
        (Expected.HANGS, Outcome.HANG, False, True),
        (Expected.ERRS, WRONG, False, True),
        (Expected.ERRS, WRONG, True, False),
        (Expected.HANGS, WRONG, False, False),
        (Expected.DIES, CRASH, False, False),
    ],
)
def test_outcomes_without_a_signature_need_the_boundary(
    expected: Expected, outcome: Outcome, crossed: bool, unproved: bool
) -> None:
    assert is_unproved(expected, outcome, crossed=crossed) is unproved
    assert is_other(expected, outcome, "the workload", crossed=crossed) is unproved


@pytest.mark.parametrize(
    ("expected", "during", "strange"),
    [
        (Expected.SPINS, NEVER_IDLE, False),
        (Expected.SPINS, "the workload", True),
        (Expected.HANGS, NEVER_IDLE, True),
        (Expected.HANGS, "the workload", False),
        (Expected.DIES, NEVER_IDLE, False),
    ],
)
def test_the_two_kinds_of_hangs(expected: Expected, during: str, strange: bool) -> None:
    assert is_strange(expected, Outcome.HANG, during) is strange
    assert is_other(expected, Outcome.HANG, during, crossed=True) is strange


def test_a_workaround_is_compared_with_the_arm_that_died() -> None:
    dying = reported(*[CRASH] * 5)
    (few,) = comparisons([dying, eager(*[CLEAN] * 3)])
    (enough,) = comparisons([dying, eager(*[CLEAN] * 4)])
    assert (
        few
        == "eager: died in 0 of 3 boots, against 5 of 5 of reported: too few boots to say that it"
        " helps (--trials auto)"
    )
    assert "less than 5 % of cases" in enough
    assert comparisons([reported(CLEAN), eager(CLEAN)]) == ()


def test_an_arm_lives_only_if_all_its_trials_do() -> None:
    assert (
        eager(CLEAN, UNTRIGGERED).alive,
        eager(CLEAN, Outcome.BOOT_FAILED).alive,
        eager().alive,
    ) == (
        True,
        False,
        False,
    )


def test_bound_of_blocked_arms() -> None:
    assert (
        arm("reported", Expected.DIES, Outcome.CANCELLED, Outcome.BOOT_FAILED).bound
        == "no trial finished"
    )
    assert (
        arm("reported", Expected.DIES, Outcome.BOOT_FAILED).bound == "no trial reached the workload"
    )


def test_an_arm_that_hangs() -> None:
    hung = arm("reported", Expected.HANGS, Outcome.HANG, Outcome.HANG)
    assert (hung.result, hung.crashed, hung.otherwise) == (Result.REPRODUCES, 2, ())
    assert hung.bound.startswith("hung in 2 of 2 boots")
    quiet = decide([arm("reported", Expected.HANGS, CLEAN)], standing=Standing.GOOD)
    assert "that it hung in more than 95% of boots is excluded" in quiet.because
