"""Every sentence that `decide` and `comparisons` can give, as one reviewed table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from tests.golden_files import assert_golden
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import (
    ArmResult,
    Expect,
    Expected,
    Record,
    Standing,
    Verdict,
    arm_result,
    comparisons,
    decide,
)

CLEAN, CRASH, OTHER = Outcome.CLEAN, Outcome.CRASH, Outcome.OTHER_CRASH
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
