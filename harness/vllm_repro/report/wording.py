"""Short phrases that several formats share."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from vllm_repro.report.document import plain_text
from vllm_repro.report.format import seconds
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, counted_trials
from vllm_repro.report.source_changes import changed_files, untried_note
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.statistics import clean_needed
from vllm_repro.verdict.verdict import TOO_FEW, Result, Verdict
from vllm_repro_diagnosis.evidence import facts_of

INTERRUPTED, NOT_RUN = "interrupted", "not run"

_REASON = 200
"""Letters of a server's own reason that fit into a sentence."""

_FIRST = 3
"""Trials of one outcome that a report describes; the others are counted."""
_SHORT = 80
"""Letters of a change that fit into the first sentence."""


# ── sentences about a run
# ─────────────────────────────────────────────────────────────────────────────────────────────────


def notices(report: RunReport) -> list[str]:
    """Return what a reader must know before the verdict, as sentences without their stop.

    These are changed sources and an incomplete journal.
    """
    changed = "; ".join(changed_files(report))
    texts = (
        changed and f"With vLLM's source changed, as shown below, in {changed}",
        report.shortfall and f"{report.shortfall}. This is what the journal holds",
    )
    return list(filter(None, texts))


def plain_sentence(report: RunReport) -> str:
    """Return a sentence, without its stop: was the bug seen, what avoided it, the declared fix."""
    tested = any(arm.expected.has_bug and arm.result is Result.QUIET for arm in report.arms)
    fixed = re.fullmatch(r">=([\d.]+)", report.status.good)
    return plain_text(
        "sentence.txt",
        report=report,
        who=facts_of(report.evidence).actor.format(release=report.release),
        changed=_source_word(report),
        failed=_failed(report),
        quiet=tested and report.verdict in (Verdict.QUIET, Verdict.FIXED),
        avoided=_avoided(report),
        too_few=TOO_FEW,
        fixed=fixed and fixed[1],
    )


def _failed(report: RunReport) -> ArmReport | None:
    """Return the first arm that showed the bug, or None."""
    return next((arm for arm in report.arms if arm.expected.has_bug and arm.k), None)


def _avoided(report: RunReport) -> dict[int, tuple[bool, list[str]]]:
    """Return {boots: (enough, changes)}: the changes with which so many boots avoided the bug.

    enough: so many boots prove that a change helps. Empty if no arm showed the bug.
    """
    failed = _failed(report)
    avoided: dict[int, tuple[bool, list[str]]] = {}
    for arm in report.arms if failed else ():
        if failed and avoids(arm) and arm.edits:
            needed = clean_needed(failed.k, failed.n)
            enough = needed is not None and arm.n >= needed
            changes = avoided.setdefault(arm.n, (enough, []))[1]
            changes += [text for text in [_difference(arm, failed)] if text not in changes]
    return avoided


def _source_word(report: RunReport) -> str:
    """Return `with its source changed` if the arm that showed the bug is patched; else empty.

    If no arm showed the bug, all arms that ran must be patched.
    """
    ran = [arm for arm in report.arms if arm.trials]
    failed = [arm for arm in ran if arm.expected.has_bug and arm.k]
    return (
        "with its source changed" if ran and all(arm.patches for arm in failed[:1] or ran) else ""
    )


def avoids(arm: ArmReport) -> bool:
    """Return True if the engine lived with the arm's changes, and the server ran all patches."""
    ran = not any(map(untried_note, arm.server.patched))
    return arm.result is Result.QUIET and not arm.expected.has_bug and ran


def _difference(arm: ArmReport, failed: ArmReport) -> str:
    """Return the changes that `arm` has and `failed` has not, such as `with --enforce-eager`.

    If they are too long or none: `in the arm NAME`.
    """
    edits = [
        re.sub("^patched ", "with a change of ", edit)
        for edit in arm.edits
        if edit not in failed.edits
    ]
    words = " and ".join(dict.fromkeys(edits))
    return words if 0 < len(words) <= _SHORT else f"in the arm {arm.name}"


def details(report: RunReport) -> list[str]:
    """Return further sentences of a report, below `plain_sentence`, without full stops.

    They are about the lab's own exception, comparisons and refused requests. `plain_sentence` has
    the comparisons that prove too little.
    """
    proved = [text for text in report.comparisons if TOO_FEW not in text or not _avoided(report)]
    return [*filter(None, [lab_rule(report)]), *proved, *refusals(report.arms)]


def lab_rule(report: RunReport) -> str:
    """Return a note, without its stop, if the lab itself raised the exception; else empty."""
    deaths = (trial.death for _, trial in report.failures if trial.death and trial.death.frames)
    if not any(death.frames[-1].startswith("vllm_repro_lab/") for death in deaths):
        return ""
    return (
        "The lab's rule about captured graphs raised this exception, in torch's words; on a GPU,"
        " C++ code raises it"
    )


def crash_summary(trial: TrialReport) -> str:
    """Return how the death was detected and what a client saw, in one line."""
    return " ".join(crash_sentences(trial))


def crash_sentences(trial: TrialReport) -> list[str]:
    """Return sentences: how the death was detected, what a client saw, which servers survived.

    Empty if nothing of this was seen.
    """
    ranks = trial.death.ranks if trial.death else ()
    of_ranks = [trial.log.removesuffix(".log") + f".rank{rank}.log" for rank in ranks]
    logs = [log if rank else trial.log for rank, log in zip(ranks, of_ranks, strict=True)]
    text = plain_text("crash.txt", trial=trial, latency=_latency, logs=logs, seconds=seconds)
    return text.splitlines()


def _latency(value_s: float | None) -> str:
    """Return seconds until a death was detected as `after 20 ms` or `after 1.5 s`."""
    if value_s is None:
        return "at an unknown time"
    return f"after {value_s * 1000:.0f} ms" if value_s < 1 else f"after {value_s:.1f} s"


def refused_words(refused: Sequence[tuple[int, str]], sent: int) -> str:
    """Return `refused: 3 of 18 requests (400 x 3): Input is too long`.

    refused: the status and the error text of each. The first text is given.
    """
    counts = Counter(status for status, _ in refused).items()
    words = ", ".join(
        f"{status} x {times}" if times > 1 else f"{status}" for status, times in counts
    )
    reason = " ".join(refused[0][1].split())[:_REASON].rstrip(".")
    return f"refused: {len(refused)} of {sent} requests ({words}){reason and f': {reason}'}"


def refusals(arms: Sequence[ArmReport]) -> list[str]:
    """Return `eager: refused: 1 of 2 requests (400): …` for each arm whose server refused some."""
    refused = {arm.name: [trial for trial in arm.trials if trial.refused] for arm in arms}
    return [f"{name}: {_refused_by(trials)}" for name, trials in refused.items() if trials]


def _refused_by(trials: Sequence[TrialReport]) -> str:
    """Return how many requests of an arm's trials were refused, with which statuses, and why."""
    refused = [refusal for trial in trials for refusal in trial.refused]
    return refused_words(refused, sum(trial.requests["sent"] for trial in trials))


# ── which trials are shown
# ────────────────────────────────────────────────────────────────────────────────────────────────


def grouped(trials: Sequence[TrialReport]) -> list[tuple[TrialReport, str]]:
    """Return (trial, suffix) for each row of a table: a row for each trial.

    From four trials on, it is a row for each outcome, with the first such trial. suffix: ` x 5` for
    several trials, `, repeated` for a trial that does not count.
    """
    counted = {trial.number for trial in counted_trials(trials)}
    rows = [(trial, "") for trial in trials]
    if len(trials) >= 4:
        first = {trial.outcome: trial for trial in reversed(trials)}
        rows = [
            (trial, f" x {sum(t.outcome is outcome for t in trials)}")
            for outcome, trial in first.items()
        ]
    return [
        (trial, times if trial.number in counted else f"{times}, repeated") for trial, times in rows
    ]


def first_of_each(trials: Sequence[TrialReport]) -> tuple[list[TrialReport], list[str]]:
    """Return the first three trials of each outcome, and sentences that count the others."""
    groups: defaultdict[Outcome, list[TrialReport]] = defaultdict(list)
    for trial in trials:
        groups[trial.outcome].append(trial)
    shown = [trial for trial in trials if trial in groups[trial.outcome][:_FIRST]]
    others = {outcome: group[_FIRST:] for outcome, group in groups.items() if group[_FIRST:]}
    return shown, [
        f"{len(group):,} more: {outcome}, the boundary crossed in"
        f" {sum(trial.trigger.crossed for trial in group):,}"
        for outcome, group in others.items()
    ]


# ── words
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def not_run_word(arm: ArmReport) -> str:
    """Return `interrupted` or `not run` for an arm without a finished trial; else empty.

    It is `interrupted` if a trial of the arm was started.
    """
    return "" if arm.trials else INTERRUPTED if arm.command else NOT_RUN


def outcome_word(trial: TrialReport) -> str:
    """Return a trial's outcome, and how a death compares with the signature: `crash, match`."""
    return trial.outcome + (
        f", {trial.death.signature}" if trial.death and trial.death.signature else ""
    )


def expected_words(expected: bool | None) -> str:
    """Return `as expected`, `a surprise`, or `undecided` for None."""
    return {True: "as expected", False: "a surprise", None: "undecided"}[expected]


def crossed_word(trial: TrialReport) -> str:
    """Return `crossed`, `not crossed`, or `not tested` for a trial that did not test the engine."""
    if trial.trigger.crossed:
        return "crossed"
    return "not crossed" if trial.outcome.facts.tested else "not tested"


def boundary(trial: TrialReport) -> str:
    """Return whether the boundary was crossed, with brief evidence, for a cell of a table."""
    if not trial.trigger.crossed and trial.death is not None and trial.phase == "boot":
        return "not reached: died at boot"
    word = crossed_word(trial)
    return f"{word}: {trial.brief}" if trial.brief else word


def engine_word(trial: TrialReport) -> str:
    """Return the state of the engine: `died (detected after 20 ms)`, `alive`."""
    if trial.death is not None:
        return f"died (detected {_latency(trial.death.latency_s)})"
    return trial.outcome.facts.engine
