"""Comparison of patches: what each does to the failure of the release as it is."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_repro.report.format import columns
from vllm_repro.report.json_report import ComparedPatch
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, counted_trials
from vllm_repro.report.source_changes import untried_note
from vllm_repro.report.text import Table
from vllm_repro.report.wording import NOT_RUN
from vllm_repro.verdict.outcome import NEVER_IDLE, Outcome
from vllm_repro.verdict.statistics import clean_needed
from vllm_repro.verdict.verdict import Result


def compared_patches(arms: Sequence[ArmReport]) -> tuple[ComparedPatch, ...]:
    """Return a comparison row for the first arm and each arm with a patch of the command line.

    The first arm is the release as it is, or with its own patches.
    """
    first = arms[0]
    unpatched = ((), first.patches)
    return tuple(
        _compared_patch(arm, first) for arm in arms if arm is first or arm.patches not in unpatched
    )


def _compared_patch(arm: ArmReport, first: ArmReport) -> ComparedPatch:
    """Return an arm's row of the comparison: boots that failed, and the result for its patch.

    first: the arm to compare with.
    """
    trials = [trial for trial in counted_trials(arm.trials) if trial.outcome.facts.tested]
    return ComparedPatch(
        arm=arm.name,
        patched=arm is not first,
        failed=sum(map(bool, map(_failure, trials))),
        boots=len(trials),
        reading=_reading(arm, first),
        requests=tuple(dict.fromkeys(name for trial in trials for name in trial.failed)),
    )


def _reading(arm: ArmReport, first: ArmReport) -> str:
    """Return the result for an arm's patch: `fixed`, `not tested`, `newly failing: …`.

    For the first arm itself, the release as it is: `fails: …`, that it does not fail, or
    `undecided: …`.
    """
    failures, as_released = _failures(arm), _failures(first)
    if arm is first and failures:
        return f"fails: {', '.join(failures)}"
    if arm is first and first.result is Result.QUIET:
        return "does not fail, so there is nothing to compare"
    if arm is first:
        return _undecided(arm)
    if not as_released and first.result is not Result.QUIET:
        return "not compared: the release as it is was not tested"
    if arm.patch_untried:
        return "not tested: no process ran the patch"
    part = "; part of the patch did not run" if any(map(untried_note, arm.server.patched)) else ""
    return _patch_effect(arm, first, failures, as_released) + part


def _patch_effect(
    arm: ArmReport, first: ArmReport, failures: list[str], as_released: list[str]
) -> str:
    """Return how a patch changed the failures of the first arm, the release as it is.

    failures, as_released: those of `arm` and of `first`.
    """
    new = [failure for failure in failures if failure not in as_released]
    if failures:
        still = ["still failing"] if len(new) < len(failures) else []
        return "; ".join(still + [f"newly failing: {', '.join(new)}" for _ in new[:1]])
    if arm.result is not Result.QUIET:
        return _undecided(arm)
    if not as_released:
        return "does not fail either"
    needed = clean_needed(first.k, first.n)
    if needed is None:
        return "does not fail; the release did not show this bug, so no number of boots is enough"
    return "fixed" if arm.n >= needed else "does not fail; too few boots to call it fixed"


def _undecided(arm: ArmReport) -> str:
    """Return `undecided: ` and the last outcome other than clean; `not run` without one."""
    trial = next((trial for trial in arm.trials[::-1] if trial.outcome is not Outcome.CLEAN), None)
    return f"undecided: {trial.outcome}: {trial.why}" if trial else NOT_RUN


def _failures(arm: ArmReport) -> list[str]:
    """Return the different failures of an arm's trials that count, as by `_failure`."""
    return list(dict.fromkeys(filter(None, map(_failure, counted_trials(arm.trials)))))


def _failure(trial: TrialReport) -> str:
    """Return the failure of a trial, such as `AssertionError in lock`; empty if it did not fail.

    Two boots with the same failure have the same text.
    """
    if trial.outcome.facts.alive or not trial.outcome.facts.tested:
        return ""
    if trial.outcome is Outcome.HANG:
        return "is never idle" if trial.during == NEVER_IDLE else "hang"
    boot = "boot: " if trial.outcome is Outcome.BOOT_FAILED else ""
    if trial.death is None or not trial.death.exception:
        return boot + (
            "wrong output" if trial.outcome is Outcome.WRONG_OUTPUT else "no cause in the log"
        )
    where = f" in {trial.death.frames[-1].rpartition(':')[2]}" if trial.death.frames else ""
    return f"{boot}{trial.death.exception}{where}"


def patches_table(report: RunReport) -> Table | None:
    """Return a row for the unchanged release and one for each patch; None without patches."""
    rows = tuple(
        (
            (
                row.arm
                if row.patched
                else f"{row.arm} ({'its own' if report.arms[0].patches else 'none'})"
            ),
            f"{row.failed} of {row.boots}",
            row.reading,
            ", ".join(row.requests) or "-",
        )
        for row in report.compared_patches
    )
    return Table(("patch", "failed", "reading", "failed requests"), rows) if rows else None


def patches_lines(report: RunReport) -> list[str]:
    """Return the comparison of patches as lines for the terminal; no lines without patches."""
    table = patches_table(report)
    return ["", *columns([table.heads, *table.rows], (40, 12, 120, 60))] if table else []
