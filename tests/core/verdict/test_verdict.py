from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden_files import assert_golden
from vllm_repro import vocabulary
from vllm_repro.trigger.trigger import TriggerResult
from vllm_repro.verdict.outcome import (
    NEVER_IDLE,
    Death,
    Outcome,
    TrialFacts,
    classify,
    is_unexplained,
)
from vllm_repro.verdict.statistics import (
    clean_needed,
    clean_streak,
    excluded_rate,
    fisher,
    lower_bound,
)
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
from vllm_repro_diagnosis.signature import How

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


HANG = Outcome.HANG
BAD, GOOD, UNKNOWN = Standing.BAD, Standing.GOOD, Standing.UNKNOWN
STRANGE = arm_result("reported", Expected.SPINS, [HANG], strange=1)
UNPROVED = arm_result("reported", Expected.HANGS, [HANG], unproved=1)
LIVED = arm("near-miss-129", Expected.DIES, *[CLEAN] * 50)
NEAR_RECORD = replace(RECORD, arm="near-miss-129")
LATER = {"record": RECORD, "version": "0.24.0"}
LIVES = {"expect": Expect.ALIVE}
PATCHED = {**LIVES, "patched": True}


def pool(outcome: Outcome, standing: Standing) -> ArmResult:
    """Return an arm with a status of its own."""
    return arm_result("small-pool", Expected.DIES, [outcome], standing=standing)


@pytest.mark.parametrize(
    ("arms", "standing", "given", "verdict", "expected"),
    [
        ([reported(CRASH), eager(CLEAN)], BAD, {}, Verdict.REPRODUCES, True),
        ([reported(CRASH), eager(CRASH)], BAD, {}, Verdict.REPRODUCES, False),
        ([reported(CRASH)], GOOD, {}, Verdict.REGRESSED, False),
        ([reported(CRASH)], UNKNOWN, {}, Verdict.REPRODUCES, True),
        ([reported(CLEAN)], GOOD, {}, Verdict.QUIET, True),
        ([reported(CLEAN)], BAD, {}, Verdict.QUIET, False),
        ([reported(CLEAN)], GOOD, {"expect": Expect.CRASH}, Verdict.QUIET, False),
        ([reported(CRASH)], BAD, LIVES, Verdict.REPRODUCES, False),
        ([reported(UNTRIGGERED)], BAD, LIVES, Verdict.INCONCLUSIVE, None),
        ([reported(UNTRIGGERED)], BAD, {}, Verdict.INCONCLUSIVE, None),
        ([reported(OTHER)], BAD, {}, Verdict.CHANGED, False),
        ([reported(OTHER, unexplained=1)], BAD, {}, Verdict.INCONCLUSIVE, None),
        ([reported(Outcome.INFRA)], BAD, {"expect": Expect.ANY}, Verdict.INCONCLUSIVE, None),
        ([reported(CRASH), eager(CRASH)], GOOD, {"expect": Expect.ANY}, Verdict.REGRESSED, True),
        ([errs(WRONG), eager(CLEAN)], BAD, {}, Verdict.REPRODUCES, True),
        ([errs(WRONG)], GOOD, {}, Verdict.REGRESSED, False),
        ([errs(OTHER)], BAD, {}, Verdict.CHANGED, False),
        ([reported(WRONG)], BAD, {}, Verdict.CHANGED, False),
        ([near(UNTRIGGERED)], BAD, {}, Verdict.INCONCLUSIVE, True),
        ([near(CLEAN)], BAD, {}, Verdict.QUIET, False),
        ([reported(CRASH), near(CRASH)], BAD, {}, Verdict.REPRODUCES, False),
        ([reported(CRASH), near(OTHER)], BAD, {}, Verdict.REPRODUCES, False),
        ([near(UNTRIGGERED, CLEAN)], BAD, {}, Verdict.INCONCLUSIVE, False),
        ([reported(CLEAN)], UNKNOWN, {"expect": Expect.CRASH}, Verdict.QUIET, False),
        ([reported(CRASH)], UNKNOWN, {"expect": Expect.CRASH}, Verdict.REPRODUCES, True),
        ([eager(CLEAN)], BAD, {}, Verdict.QUIET, True),
        ([], BAD, {}, Verdict.INCONCLUSIVE, None),
        # Fixed needs a record and enough quiet boots.
        ([reported(*[CLEAN] * 4)], GOOD, LATER, Verdict.FIXED, True),
        ([reported(*[CLEAN] * 3)], GOOD, LATER, Verdict.QUIET, True),
        ([reported(*[CLEAN] * 50)], GOOD, {**LATER, "record": None}, Verdict.QUIET, True),
        # A workaround that lives does not make the bug fixed.
        (
            [eager(*[CLEAN] * 50)],
            GOOD,
            {**LATER, "record": replace(RECORD, arm="eager")},
            Verdict.QUIET,
            True,
        ),
        # The release that died is not fixed by living.
        ([reported(*[CLEAN] * 50)], BAD, {**LATER, "version": "0.23.0"}, Verdict.QUIET, False),
        # A record counts for its arm only.
        ([LIVED], GOOD, LATER, Verdict.QUIET, True),
        ([LIVED], GOOD, {**LATER, "record": NEAR_RECORD}, Verdict.FIXED, True),
        # Between the releases that have the bug and those that do not, one arm still dies.
        ([reported(CLEAN), pool(CRASH, BAD)], UNKNOWN, {}, Verdict.REPRODUCES, True),
        ([reported(CLEAN), pool(CLEAN, BAD)], UNKNOWN, {}, Verdict.QUIET, False),
        ([reported(CLEAN), pool(CRASH, GOOD)], GOOD, {}, Verdict.REGRESSED, False),
        # Its own status wins over the scenario's, either way.
        ([reported(CLEAN), pool(CRASH, BAD)], GOOD, {}, Verdict.REPRODUCES, True),
        ([reported(CRASH), pool(CLEAN, GOOD)], BAD, {}, Verdict.REPRODUCES, True),
        # A patch is compared with the release that died.
        (
            [reported(*[CLEAN] * 4)],
            BAD,
            {**LATER, **PATCHED, "version": "0.23.0"},
            Verdict.FIXED,
            True,
        ),
        (
            [reported(*[CLEAN] * 3)],
            BAD,
            {**LATER, **PATCHED, "version": "0.23.0"},
            Verdict.QUIET,
            True,
        ),
        (
            [reported(*[CLEAN] * 50)],
            BAD,
            {**LATER, **LIVES, "version": "0.23.0"},
            Verdict.QUIET,
            True,
        ),
        ([reported(*[CLEAN] * 50)], BAD, {**LATER, **PATCHED}, Verdict.QUIET, True),
        # A patch short of the boundary is undecided.
        ([reported(UNTRIGGERED)], BAD, PATCHED, Verdict.INCONCLUSIVE, None),
        ([reported(CLEAN, UNTRIGGERED)], BAD, PATCHED, Verdict.INCONCLUSIVE, None),
        ([reported(CLEAN), near(UNTRIGGERED)], BAD, PATCHED, Verdict.QUIET, True),
        ([reported(CLEAN), eager(UNTRIGGERED)], BAD, PATCHED, Verdict.QUIET, None),
        ([reported(CRASH)], BAD, PATCHED, Verdict.REPRODUCES, False),
        # A hang of the other kind is not the bug.
        ([STRANGE], BAD, {}, Verdict.CHANGED, False),
        # 0.19.1 never admits the prompt (vllm-project/vllm#39734), so it hangs before the boundary.
        ([UNPROVED], BAD, {}, Verdict.INCONCLUSIVE, None),
        ([UNPROVED], GOOD, {}, Verdict.INCONCLUSIVE, None),
        ([UNPROVED], UNKNOWN, {}, Verdict.INCONCLUSIVE, None),
        # It is not alive, whatever the cause.
        ([UNPROVED], BAD, LIVES, Verdict.INCONCLUSIVE, False),
    ],
)
def test_verdicts(
    arms: list[ArmResult],
    standing: Standing,
    given: dict[str, Any],
    verdict: Verdict,
    expected: bool | None,
) -> None:
    report = decide(arms, standing=standing, **given)
    assert (report.verdict, report.expected) == (verdict, expected)


@pytest.mark.parametrize(
    ("report", "because"),
    [
        (
            decide([reported(CRASH), eager(CRASH)], standing=Standing.BAD),
            "unexpected in arm eager",
        ),
        (
            decide(
                [reported(*[CLEAN] * 3)], standing=Standing.GOOD, record=RECORD, version="0.24.0"
            ),
            "4 quiet boots are needed",
        ),
        (
            decide([reported(CRASH)], standing=Standing.GOOD, expect=Expect.ALIVE, patched=True),
            (
                "^reported with the patch: died in 1 of 1 boots; this release was"
                " declared good as it"
                " is$"
            ),
        ),
        (
            decide([reported(CRASH, *[OTHER] * 4, UNTRIGGERED)], standing=Standing.BAD),
            "^reported: died in 1 of 5 boots, besides other-crash x 4$",
        ),
        (
            decide([arm("reported", Expected.HANGS, CLEAN)], standing=Standing.GOOD),
            "that it hung in more than 95% of boots is excluded",
        ),
        (
            decide([UNPROVED], standing=Standing.BAD),
            "^reported: nothing can be said: 1 hang, 1 short of the boundary$",
        ),
        (
            decide(
                [reported(*[CLEAN] * 4)],
                standing=BAD,
                record=RECORD,
                version="0.23.0",
                patched=True,
            ),
            "the patch",
        ),
        (
            decide([reported(*[CLEAN] * 50)], standing=BAD, record=RECORD, version="0.23.0"),
            "^(?!.*the patch)",
        ),
    ],
)
def test_the_reason_of_a_verdict(report: VerdictReport, because: str) -> None:
    assert re.search(because, report.because)


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
    report = decide([reported(*seen)], standing=standing, expect=expect, record=RECORD)
    if report.verdict in (Verdict.QUIET, Verdict.FIXED):
        assert set(seen) == {CLEAN}
    if report.verdict in (Verdict.REPRODUCES, Verdict.REGRESSED):
        assert CRASH in seen


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
        ("0.23.0+with.xgrammar.0.2.7", "0.23.0", False),
    ],
)
def test_same_release(one: str | None, other: str | None, same: bool) -> None:
    assert same_release(one, other) is same


@pytest.mark.parametrize(
    ("version", "source"),
    [
        ("0.23.0+commit.4689392ab1", True),
        ("0.23.0+with.xgrammar.0.2.7", True),
        ("0.23.0", False),
        ("0.23.0+cpu", False),
        ("0.23.1rc1.dev5+gabc1234", False),
        (None, False),
    ],
)
def test_a_build_from_source_is_no_release(version: str | None, source: bool) -> None:
    assert from_source(version) is source


def test_a_failure_of_another_kind_is_a_boot_that_ran() -> None:
    twice = arm_result("reported", Expected.SPINS, [HANG, HANG], strange=1)
    assert (twice.crashed, twice.conclusive) == (1, 2)


@pytest.mark.parametrize(
    ("expected", "event"),
    [
        (Expected.DIES, "a crash"),
        (Expected.HANGS, "that it hung"),
        (Expected.ERRS, "that it answered wrongly"),
    ],
)
def test_the_event_that_quiet_boots_exclude(expected: Expected, event: str) -> None:
    assert expected.event == event


@pytest.mark.parametrize(
    ("found", "result", "crashed", "conclusive", "otherwise"),
    [
        # A hang of the other kind, and one short of the boundary.
        (STRANGE, Result.INCONCLUSIVE, 0, 0, (HANG,)),
        (
            arm_result("reported", Expected.SPINS, [HANG, HANG], strange=1),
            Result.REPRODUCES,
            1,
            2,
            (HANG,),
        ),
        (UNPROVED, Result.INCONCLUSIVE, 0, 0, (HANG,)),
        (
            arm_result("reported", Expected.HANGS, [HANG, HANG], unproved=1),
            Result.REPRODUCES,
            1,
            1,
            (HANG,),
        ),
        (arm("reported", Expected.HANGS, HANG, HANG), Result.REPRODUCES, 2, 2, ()),
        (arm("reported", Expected.HANGS, HANG, CRASH), Result.REPRODUCES, 1, 2, (CRASH,)),
        (arm("reported", Expected.HANGS, CRASH), Result.INCONCLUSIVE, 0, 0, (CRASH,)),
        # Other failures are boots too.
        (
            reported(CRASH, *[OTHER] * 4, UNTRIGGERED),
            Result.REPRODUCES,
            1,
            5,
            (OTHER,) * 4,
        ),
    ],
)
def test_failures_that_are_not_the_bug(
    found: ArmResult,
    result: Result,
    crashed: int,
    conclusive: int,
    otherwise: tuple[Outcome, ...],
) -> None:
    assert (found.result, found.crashed, found.conclusive) == (result, crashed, conclusive)
    assert found.otherwise == otherwise


@pytest.mark.parametrize(
    ("expected", "outcome", "during", "crossed", "unproved", "strange"),
    [
        # Without a signature an outcome needs the boundary.
        (Expected.HANGS, HANG, "the workload", False, True, False),
        (Expected.ERRS, WRONG, "the workload", False, True, False),
        (Expected.ERRS, WRONG, "the workload", True, False, False),
        (Expected.HANGS, WRONG, "the workload", False, False, False),
        (Expected.DIES, CRASH, "the workload", False, False, False),
        # The two kinds of hangs.
        (Expected.SPINS, HANG, NEVER_IDLE, True, False, False),
        (Expected.SPINS, HANG, "the workload", True, False, True),
        (Expected.HANGS, HANG, NEVER_IDLE, True, False, True),
        (Expected.HANGS, HANG, "the workload", True, False, False),
        (Expected.DIES, HANG, NEVER_IDLE, True, False, False),
    ],
)
def test_an_outcome_may_be_another_than_the_bug(
    expected: Expected, outcome: Outcome, during: str, crossed: bool, unproved: bool, strange: bool
) -> None:
    assert is_unproved(expected, outcome, crossed=crossed) is unproved
    assert is_strange(expected, outcome, during) is strange
    assert is_other(expected, outcome, during, crossed=crossed) is (unproved or strange)


@pytest.mark.parametrize(
    ("arms", "sentences"),
    [
        (
            [reported(*[CRASH] * 5), eager(*[CLEAN] * 3)],
            [
                (
                    "eager: died in 0 of 3 boots, against 5 of 5 of reported: too few boots to say"
                    " that it helps (--trials auto)"
                )
            ],
        ),
        ([reported(*[CRASH] * 5), eager(*[CLEAN] * 4)], ["less than 5 % of cases"]),
        ([reported(CLEAN), eager(CLEAN)], []),
    ],
)
def test_a_workaround_is_compared_with_the_arm_that_died(
    arms: list[ArmResult], sentences: list[str]
) -> None:
    for sentence, text in zip(comparisons(arms), sentences, strict=True):
        assert text in sentence


@pytest.mark.parametrize(
    ("outcomes", "alive"),
    [((CLEAN, UNTRIGGERED), True), ((CLEAN, Outcome.BOOT_FAILED), False), ((), False)],
)
def test_an_arm_lives_only_if_all_its_trials_do(outcomes: tuple[Outcome, ...], alive: bool) -> None:
    assert eager(*outcomes).alive is alive


@pytest.mark.parametrize(
    ("found", "bound"),
    [
        (reported(Outcome.CANCELLED, Outcome.BOOT_FAILED), "no trial finished"),
        (reported(Outcome.BOOT_FAILED), "no trial reached the workload"),
        (arm("reported", Expected.HANGS, HANG, HANG), "hung in 2 of 2 boots"),
    ],
)
def test_the_bound_of_an_arm(found: ArmResult, bound: str) -> None:
    assert found.bound.startswith(bound)


@pytest.mark.parametrize("expected", Expected)
def test_what_an_arm_can_declare_has_a_sign_and_a_word(expected: Expected) -> None:
    assert isinstance(expected.sign, Outcome)
    assert getattr(vocabulary, expected.value) is expected


LEADS: tuple[tuple[Outcome, ...], ...] = (
    (),
    (CRASH,),
    (CRASH, CLEAN, CLEAN),
    (CRASH, OTHER, OTHER),
    (CLEAN,),
    (CLEAN,) * 4,
    (Outcome.UNTRIGGERED,),
    (OTHER, CLEAN),
    (Outcome.INFRA,),
    (Outcome.CANCELLED,),
    (Outcome.BOOT_FAILED, CLEAN),
)
CONTROLS = (
    ("eager", Expected.LIVES, (CLEAN,)),
    ("eager", Expected.LIVES, (CLEAN,) * 4),
    ("eager", Expected.LIVES, (Outcome.UNTRIGGERED,)),
    ("eager", Expected.LIVES, (CRASH, OTHER)),
    ("near", Expected.UNTRIGGERED, (Outcome.UNTRIGGERED,)),
    ("near", Expected.UNTRIGGERED, (CLEAN, Outcome.UNTRIGGERED)),
    ("near", Expected.UNTRIGGERED, (Outcome.INFRA,)),
    ("near", Expected.UNTRIGGERED, (OTHER,)),
)
RECORDS = (
    Record(crashed=1, boots=1, run="run-1", version="0.23.0"),
    Record(crashed=5, boots=5, run="run-5", version="0.23.0+cpu"),
    Record(crashed=1, boots=40, run="run-40", version="nightly"),
    Record(crashed=5, boots=5, run="of-eager", version="0.23.0", arm="eager"),
)


def line(arms: Sequence[ArmResult], **given: object) -> str:
    """Return one row: the arms and arguments, the verdict, and the sentences."""
    asked = {"standing": Standing.BAD} | given
    report = decide(arms, **asked)  # type: ignore[arg-type]  # rows name their arguments
    shown = "; ".join(f"{arm.name} [{', '.join(arm.outcomes)}]" for arm in arms)
    output_text = ", ".join(
        f"{name}={getattr(value, 'run', value)}" for name, value in asked.items()
    )
    answer = {True: "expected", False: "surprise", None: "undecided"}[report.expected]
    rows = [
        f"{shown}  ({output_text})",
        f"    {report.verdict}, {answer} {list(report.surprises)}: {report.because}",
    ]
    return "\n".join([*rows, *(f"    {sentence}" for sentence in comparisons(arms))])


def bounds(arm: ArmResult) -> str:
    shown = ", ".join(arm.outcomes)
    return f"{arm.name} [{shown}]\n    {arm.result}, {arm.crashed} of {arm.conclusive}: {arm.bound}"


def lines() -> Iterator[str]:
    for verdict in Verdict:
        yield f"{verdict}: {verdict.tone}, git bisect {verdict.bisect_status}"
    leads = [arm_result("reported", Expected.DIES, outcomes) for outcomes in LEADS]
    leads.append(arm_result("reported", Expected.DIES, (OTHER,), unexplained=1))
    leads.append(
        arm_result("reported", Expected.HANGS, (Outcome.HANG, Outcome.HANG), strange=1, unproved=1)
    )
    leads.append(arm_result("reported", Expected.ERRS, (Outcome.WRONG_OUTPUT,), unproved=1))
    controls = [arm_result(*control) for control in CONTROLS]
    yield from map(bounds, (*leads, *controls))
    for lead in leads:
        for standing, expect in product(Standing, (Expect.DECLARED, Expect.ALIVE, Expect.CRASH)):
            yield line([lead], standing=standing, expect=expect)
        yield line([lead], expect=Expect.ANY)
        yield line([lead], standing=Standing.GOOD, patched=True)
    for lead, control in product(leads[1:7], controls):
        yield line([lead, control])
    for control, patched, expect in product(
        controls, (False, True), (Expect.DECLARED, Expect.ALIVE)
    ):
        yield line([control], patched=patched, expect=expect)
    yield line([leads[1], *controls[:2], controls[1]])
    yield line([controls[0], arm_result("other", Expected.LIVES, (CLEAN,))])
    yield line([controls[4], arm_result("other", Expected.UNTRIGGERED, (Outcome.UNTRIGGERED,))])
    for standing, own in product(Standing, repeat=2):
        yield line(
            [arm_result(f"small-{own}", Expected.DIES, (CRASH,), standing=own)], standing=standing
        )
    yield line([])
    quiet = (leads[4], leads[5], arm_result("reported", Expected.DIES, (CLEAN,) * 60))
    for lead, record, version, patched in product(
        quiet, RECORDS, ("0.23.0", "0.24.0", None), (False, True)
    ):
        yield line([lead], record=record, version=version, patched=patched)


def test_the_table_of_verdicts() -> None:
    assert_golden("verdicts.txt", "\n".join(lines()) + "\n")


CROSSED, NOT_CROSSED = TriggerResult(True, ("proof",)), TriggerResult(False, ("none",))
ALIVE = TrialFacts(ready=True, finding=CROSSED)


def died(signature: How | None) -> Death:
    return Death(
        detected_by="log",
        latency_s=0.01,
        exception="AssertionError",
        message="…",
        frames=(),
        signature=signature,
        channels=("log",),
    )


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (ALIVE, Outcome.CLEAN),
        (replace(ALIVE, finding=NOT_CROSSED), Outcome.UNTRIGGERED),
        (replace(ALIVE, death=died(How.MATCH)), Outcome.CRASH),
        (replace(ALIVE, death=died(How.NEAR)), Outcome.OTHER_CRASH),
        (replace(ALIVE, death=died(None)), Outcome.OTHER_CRASH),
        (TrialFacts(ready=False, finding=NOT_CROSSED, death=died(How.MATCH)), Outcome.CRASH),
        (TrialFacts(ready=False, finding=NOT_CROSSED, death=died(How.OTHER)), Outcome.BOOT_FAILED),
        (TrialFacts(ready=False, finding=NOT_CROSSED), Outcome.BOOT_FAILED),
        (replace(ALIVE, finding=NOT_CROSSED, hung="still"), Outcome.HANG),
        (replace(ALIVE, finding=NOT_CROSSED, wrong_output="empty"), Outcome.WRONG_OUTPUT),
        (replace(ALIVE, unsupported="no GPU", death=died(How.MATCH)), Outcome.UNSUPPORTED),
        (replace(ALIVE, hung="still", wrong_output="empty"), Outcome.HANG),
        (replace(ALIVE, death=died(None), hung="still", wrong_output="empty"), Outcome.OTHER_CRASH),
        (replace(ALIVE, infra="disk full", unsupported="no GPU"), Outcome.INFRA),
        (replace(ALIVE, infra="disk full", death=died(How.MATCH)), Outcome.INFRA),
        (replace(ALIVE, cancelled="Ctrl-C", infra="disk full"), Outcome.CANCELLED),
    ],
)
def test_order_of_classification(facts: TrialFacts, outcome: Outcome) -> None:
    assert classify(facts) is outcome


def test_every_outcome_and_declaration_has_its_facts() -> None:
    assert all(expected.did for expected in Expected)
    errors = {outcome for outcome in Outcome if outcome.facts.ci == "error"}
    assert errors == {Outcome.BOOT_FAILED, Outcome.INFRA, Outcome.CANCELLED}


@pytest.mark.parametrize(
    ("outcome", "signature", "unexplained"),
    [
        (Outcome.OTHER_CRASH, None, True),
        (Outcome.OTHER_CRASH, How.NEAR, True),
        (Outcome.OTHER_CRASH, How.OTHER, False),
        (Outcome.CANCELLED, None, False),
        (Outcome.BOOT_FAILED, None, False),
    ],
)
def test_a_death_that_may_be_this_bug(
    outcome: Outcome, signature: How | None, unexplained: bool
) -> None:
    assert is_unexplained(outcome, died(signature)) is unexplained
    assert not is_unexplained(outcome, None)


@pytest.mark.parametrize(
    ("crashed", "boots", "bound", "needed"),
    [
        (0, 10, 0.0, None),
        (1, 1, 0.05, 59),
        (5, 5, 0.55, 4),
        (4, 5, 0.34, 8),
        (5, 10, 0.22, 12),
    ],
)
def test_known_bounds(crashed: int, boots: int, bound: float, needed: int | None) -> None:
    assert lower_bound(crashed, boots) == pytest.approx(bound, abs=0.006)
    assert clean_needed(crashed, boots) == needed
    assert lower_bound(5_000, 10_000) == pytest.approx(0.4918, abs=1e-4)  # of a long history


@pytest.mark.parametrize(
    ("crashed", "boots", "streak"), [(0, 5, None), (1, 1, 72), (5, 5, 9), (30, 30, 5), (35, 70, 21)]
)
def test_quiet_nights_that_are_needed(crashed: int, boots: int, streak: int | None) -> None:
    assert clean_streak(crashed, boots) == streak


@pytest.mark.parametrize(("clean", "rate"), [(0, 1.0), (3, 0.63), (30, 0.10)])
def test_excluded_rates(clean: int, rate: float) -> None:
    assert excluded_rate(clean) == pytest.approx(rate, abs=0.005)


def test_only_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="4 crashes of 3 trials"):
        lower_bound(4, 3)
    with pytest.raises(ValueError, match="4 crashes of 3 trials"):
        fisher(4, 3, 0, 1)
    assert fisher(1, 2, 2, 2) == pytest.approx(1.0)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))))
@settings(max_examples=60)
def test_clean_needed_is_the_least_that_suffices(pair: tuple[int, int]) -> None:
    crashed, boots = pair
    rate, needed = lower_bound(crashed, boots), clean_needed(crashed, boots) or 0
    assert 0 < rate <= crashed / boots
    assert (1 - rate) ** needed <= 0.05 + 1e-6
    if needed > 1:
        assert (1 - rate) ** (needed - 1) > 0.05 - 1e-6


@pytest.mark.parametrize(
    ("sides", "chance"),
    [
        ((5, 5, 0, 4), 1 / 126),
        ((3, 3, 0, 3), 0.05),
        ((1, 1, 0, 1), 0.5),
        ((3, 4, 1, 4), 17 / 70),
        ((0, 3, 0, 3), 1.0),
    ],
)
def test_fishers_exact_test(sides: tuple[int, int, int, int], chance: float) -> None:
    assert fisher(*sides) == pytest.approx(chance)


@given(st.integers(1, 40), st.integers(0, 40))
def test_watching_asks_for_more_boots_than_one_comparison(crashed: int, quiet: int) -> None:
    once, watching = clean_needed(crashed, crashed + quiet), clean_streak(crashed, crashed + quiet)
    assert once is not None
    assert watching is not None
    assert watching >= once
    rate = lower_bound(crashed, crashed + quiet)
    assert (1 - rate) ** watching * crashed * (crashed + 1) <= 0.05 * (1 + 1e-6)
    assert clean_streak(0, quiet) is None
