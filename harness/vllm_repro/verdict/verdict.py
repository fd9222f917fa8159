"""Results of arms, the verdict of a run over its arms, and the result of a release. Pure.

Bad beats unknown beats good. One matching crash makes an arm reproduce. An arm is quiet only if
every trial crossed the trigger and lived. Anything else is undecided, such as a death of unknown
cause, or a declared hang or wrong answer without evidence of the boundary.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from packaging.version import InvalidVersion, Version

from vllm_repro.verdict.outcome import NEVER_IDLE, Outcome, Tone
from vllm_repro.verdict.statistics import clean_needed, excluded_rate, fisher, lower_bound


class Expected(StrEnum):
    """Declared behaviour of an arm in the releases that have the bug."""

    DIES = "dies"
    LIVES = "lives"  # crosses the trigger and lives, in every release
    # lives without crossing the trigger, and must not be mistaken for proof
    UNTRIGGERED = "untriggered"
    ERRS = "errs"  # lives and answers wrongly
    HANGS = "hangs"  # leaves requests unanswered
    SPINS = "spins"  # keeps working with no request left

    @property
    def has_bug(self) -> bool:
        """Return True if the arm shows the bug in the releases that have it."""
        return _SIGNS[self].has_bug

    @property
    def sign(self) -> Outcome:
        """Outcome that counts as the bug in such an arm: a crash, unless it declares another."""
        return _SIGNS[self].outcome

    @property
    def did(self) -> str:
        """Verb for an arm that showed the bug, as reports write it: `died`, `hung`."""
        return _SIGNS[self].did

    @property
    def event(self) -> str:
        """Return what quiet boots exclude: `a crash`, `that it hung`."""
        return "a crash" if self.sign is Outcome.CRASH else f"that it {self.did}"


@dataclass(frozen=True, kw_only=True)
class _Sign:
    """Sign of the bug in an arm: the outcome, and the words for it."""

    # Outcome that is the bug.
    outcome: Outcome = Outcome.CRASH
    # Past tense for reports.
    did: str = "died"
    has_bug: bool = True
    # True if the bug is an engine that never goes idle, False if requests hang; None if it is no
    # hang.
    never_idle: bool | None = None


_SIGNS = {
    Expected.DIES: _Sign(),
    Expected.LIVES: _Sign(has_bug=False),
    Expected.UNTRIGGERED: _Sign(has_bug=False),
    Expected.ERRS: _Sign(outcome=Outcome.WRONG_OUTPUT, did="answered wrongly"),
    Expected.HANGS: _Sign(outcome=Outcome.HANG, did="hung", never_idle=False),
    Expected.SPINS: _Sign(outcome=Outcome.HANG, did="was never idle", never_idle=True),
}


class Standing(StrEnum):
    """Declared status of a release: it has the bug, it does not, or it is unknown."""

    BAD = "bad"
    GOOD = "good"
    UNKNOWN = "unknown"


class Expect(StrEnum):
    """`--expect`: what the caller expects of a run."""

    DECLARED = "declared"  # each arm does what the release's status says
    ALIVE = "alive"  # the engine lives in every arm
    CRASH = "crash"  # each arm that is declared to have the bug shows it, the others live
    ANY = "any"  # any verdict but inconclusive


class Result(StrEnum):
    """The result of one arm over its trials."""

    REPRODUCES = "reproduces"  # some boots show the bug, and none crosses the boundary without it
    QUIET = "quiet"  # every boot crossed the boundary and lived
    FLAKY = "flaky"  # some boots show the bug, others cross the boundary without it
    INCONCLUSIVE = "inconclusive"
    BLOCKED = "blocked"  # no trial got as far as its workload


class Verdict(StrEnum):
    """Verdict of a whole run, such as reproduces, fixed or inconclusive."""

    REPRODUCES = "reproduces"
    QUIET = "quiet"  # did not show the bug, but this does not prove a fix
    FIXED = "fixed"  # quiet in enough boots, compared with an earlier run that reproduced
    REGRESSED = "regressed"  # reproduces in a release that is declared good
    CHANGED = "changed"  # failed, and certainly not of this bug
    INCONCLUSIVE = "inconclusive"

    @property
    def tone(self) -> Tone:
        """The colour on the HTML page."""
        return _VERDICTS[self][0]

    @property
    def bisect_status(self) -> int:
        """The exit status for `git bisect run`: 0 good, 1 bad, 125 skip."""
        return _VERDICTS[self][1]


_VERDICTS: dict[Verdict, tuple[Tone, int]] = {
    Verdict.REPRODUCES: ("bad", 1),
    Verdict.QUIET: ("good", 0),
    Verdict.FIXED: ("good", 0),
    Verdict.REGRESSED: ("bad", 1),
    Verdict.CHANGED: ("bad", 125),
    Verdict.INCONCLUSIVE: ("warn", 125),
}


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """Result of one arm, with the counts of its trials and what they prove."""

    name: str
    expected: Expected
    result: Result
    # Trials that showed the bug in the way that the arm declares.
    crashed: int
    # Trials that count. After a crash, trials with other failures count too.
    conclusive: int
    # Sentence about what these numbers support.
    bound: str
    outcomes: tuple[Outcome, ...]
    # Deaths that may be this bug (`is_unexplained`), and unproved failures (`is_unproved`).
    unexplained: int = 0
    # Release by the arm's own status; None if the scenario's applies.
    standing: Standing | None = None
    # Trials with the bug's outcome that do not count as the bug (`is_strange`, `is_unproved`).
    strange: int = 0

    @property
    def otherwise(self) -> tuple[Outcome, ...]:
        """Return the outcomes of failures that are not counted as this bug.

        Those in `unexplained` may be this bug all the same.
        """
        sign = self.expected.sign
        ends = tuple(
            outcome
            for outcome in self.outcomes
            if outcome.facts.other_failure and outcome is not sign
        )
        return ends + (sign,) * self.strange

    @property
    def failed_otherwise(self) -> bool:
        """Return True if a failure is certainly not this bug."""
        return len(self.otherwise) > self.unexplained

    @property
    def alive(self) -> bool:
        """True if there were trials and the engine lived in all of them."""
        return bool(self.outcomes) and all(outcome.facts.alive for outcome in self.outcomes)


@dataclass(frozen=True, kw_only=True)
class Record:
    """Earlier run on this host in which the unpatched `arm` reproduced.

    It has the same kind of evidence. It proves nothing about other arms, whose flags or requests
    differ.
    """

    # Boots that showed the bug, of `boots` that count.
    crashed: int
    boots: int
    # Name of the run's folder.
    run: str
    # vLLM release.
    version: str
    arm: str = "reported"


@dataclass(frozen=True, kw_only=True)
class VerdictReport:
    """Verdict of a run, whether it was expected, and why."""

    verdict: Verdict
    # True, False (a surprise) or None (undecided).
    expected: bool | None
    # One sentence.
    because: str
    # Names of the arms that did not meet the expectation.
    surprises: tuple[str, ...] = ()


def counted(outcomes: Sequence[Outcome]) -> str:
    """Return outcomes as text, `crash, clean x 3`: each once, in order of first occurrence."""
    return ", ".join(
        f"{outcome}{f' x {times}' if times > 1 else ''}"
        for outcome, times in Counter(outcomes).items()
    )


def from_source(version: str | None) -> bool:
    """Return True for a build from a commit or a folder, such as `0.23.0+commit.4689392ab1`.

    Also for one with exchanged packages, such as `0.23.0+with.xgrammar.0.2.7`.
    """
    return bool(re.search(r"\+(commit|folder|with)\.", version or ""))


def same_release(first: str | None, second: str | None) -> bool:
    """Return True if two reported versions are of one release, or of one build from source.

    `0.28.0+cpu` and `0.28.0` are of one release. False if a version is unknown.
    """
    if from_source(first) or from_source(second):
        return first == second
    try:
        return Version(Version(first or "").public) == Version(Version(second or "").public)
    except InvalidVersion:
        return first is not None and first == second


def is_strange(expected: Expected, outcome: Outcome, during: str) -> bool:
    """Return True for a hang of another kind than the arm declares.

    Requests hang in an arm that is expected to spin, or the reverse. False for an arm that declares
    no hang. during: `NEVER_IDLE`, or what else the trial hung in.
    """
    never_idle = _SIGNS[expected].never_idle
    return (
        outcome is Outcome.HANG
        and never_idle is not None
        and (during == NEVER_IDLE) is not never_idle
    )


def is_unproved(expected: Expected, outcome: Outcome, *, crossed: bool) -> bool:
    """Return True for the bug's hang or wrong answer if the trigger was not crossed.

    It has no signature, so it may be another bug.
    """
    return outcome is expected.sign and outcome is not Outcome.CRASH and not crossed


def is_other(expected: Expected, outcome: Outcome, during: str, *, crossed: bool) -> bool:
    """Return True if `is_strange` or `is_unproved`: the trial must not be counted as the bug."""
    return is_strange(expected, outcome, during) or is_unproved(expected, outcome, crossed=crossed)


def arm_result(
    name: str,
    expected: Expected,
    outcomes: Sequence[Outcome],
    *,
    unexplained: int = 0,
    standing: Standing | None = None,
    strange: int = 0,
    unproved: int = 0,
) -> ArmResult:
    """Return the result of an arm from the outcomes of its trials.

    Without outcomes it is inconclusive. unexplained: number of deaths that may be this bug.
    standing: as in `ArmResult`. strange, unproved: numbers of trials for which `is_strange` and
    `is_unproved` are True; a trial for which both are counts as strange only.
    """
    count = Counter(outcomes)
    crashed, clean = count[expected.sign] - strange - unproved, count[Outcome.CLEAN]
    conclusive = crashed + clean
    if crashed:
        others = (
            sum(
                outcome.facts.other_failure and outcome is not expected.sign for outcome in outcomes
            )
            + strange
        )
        # boots that ran, and in which another failure may have come before this one
        conclusive += others
        result = Result.FLAKY if clean else Result.REPRODUCES
        bound = (
            f"{expected.did} in {crashed} of {conclusive} boots (95 % confidence: in at least"
            f" {lower_bound(crashed, conclusive):.0%} of boots)"
        )
    elif outcomes and not any(outcome.facts.ran for outcome in outcomes):
        # An interrupted trial may have got further than the boot.
        far = "finished" if Outcome.CANCELLED in outcomes else "reached the workload"
        result, bound = Result.BLOCKED, f"no trial {far}"
    elif clean and clean == len(outcomes):
        result = Result.QUIET
        bound = f"{expected.did} in 0 of {clean} boots: {_excluded_text(expected, clean)}"
    else:
        result = Result.INCONCLUSIVE
        seen = (
            ", ".join(f"{number} {outcome}" for outcome, number in count.items()) or "no trial ran"
        )
        bound = f"nothing can be said: {seen}" + (
            f", {unproved} short of the boundary" if unproved else ""
        )
    return ArmResult(
        name=name,
        expected=expected,
        result=result,
        crashed=crashed,
        conclusive=conclusive,
        bound=bound,
        outcomes=tuple(outcomes),
        unexplained=unexplained + unproved,
        standing=standing,
        strange=strange + unproved,
    )


def _excluded_text(expected: Expected, clean: int) -> str:
    """Return the rate of the bug that `clean` quiet boots exclude, as text."""
    return f"{expected.event} in more than {excluded_rate(clean):.0%} of boots is excluded"


def _arm_as_expected(arm: ArmResult, standing: Standing, expect: Expect) -> bool | None:
    """Return whether the arm meets the expectation; None if its trials do not decide.

    standing: status of the release for this arm.
    """
    died = arm.crashed > 0 or bool(arm.otherwise)
    quiet = arm.result is Result.QUIET
    if expect is Expect.ALIVE:
        if died:
            return False
        # An engine that did not reach the boundary is not tested.
        lived = arm.alive if arm.expected is Expected.UNTRIGGERED else quiet
        return True if lived else None
    if arm.expected is Expected.UNTRIGGERED:
        if died:
            return False
        return set(arm.outcomes) == {Outcome.UNTRIGGERED} if arm.alive else None
    if not arm.expected.has_bug:
        return False if died else True if quiet else None
    if not arm.crashed and not quiet:
        # Another failure is a surprise if its cause is known.
        return False if arm.failed_otherwise else None
    if expect is not Expect.CRASH and standing is Standing.UNKNOWN:
        return True
    return (arm.crashed > 0) is (expect is Expect.CRASH or standing is Standing.BAD)


def _why_quiet(
    arms: Sequence[ArmResult], record: Record | None, version: str | None, *, patched: bool
) -> tuple[Verdict, str]:
    """Return `fixed` or `quiet` for arms that are all quiet, with the reason.

    record, version, patched: as in `decide`.
    """
    expected, clean = arms[0].expected, arms[0].outcomes.count(Outcome.CLEAN)
    lived = f"the boundary was crossed and the engine lived, {clean} of {clean}"
    if any(not arm.expected.has_bug for arm in arms):
        # An arm that lives in every release proves nothing about the bug.
        names = ", ".join(arm.name for arm in arms)
        should = "with its change of vLLM's source" if patched else "as it should in any release"
        return Verdict.QUIET, f"{names}: {lived}, {should}; the reported arm was not run"
    # a record counts only for boots of the same arm
    if record is None or record.arm != arms[0].name:
        nothing = "Nothing to compare with yet: no reproducing run is on record for this host"
        return Verdict.QUIET, f"{lived}: {_excluded_text(expected, clean)}. {nothing}"
    released = " as released" if patched else ""
    on_record = (
        f"{expected.did} in {record.crashed} of {record.boots} boots with"
        f" {record.version}{released} ({record.run})"
    )
    here = f"{on_record}, 0 of {clean} here{' with the patch' if patched else ''}"
    same = same_release(record.version, version)
    if same and not patched:
        return Verdict.QUIET, f"{here} with the same release: it comes and goes, or the runs differ"
    if patched and not same:
        # Another release died: this one may live without the patch.
        there = f"0 of {clean} with {version or 'this release'} and the patch"
        return Verdict.QUIET, f"{on_record}, {there}: run that release without the patch first"
    needed = clean_needed(record.crashed, record.boots)
    if needed is None or clean < needed:
        return (
            Verdict.QUIET,
            f"{here}: {needed} quiet boots are needed before this may be called fixed (--trials)",
        )
    chance = "a fix that does nothing would look like this in less than 5 % of cases"
    return Verdict.FIXED, f"{here}: {chance} ({_fisher_text(record.crashed, record.boots, clean)})"


def _fisher_text(crashed: int, boots: int, clean: int) -> str:
    """Return Fisher's p of `crashed` of `boots` against 0 of `clean` boots, as text."""
    return f"Fisher's exact test: p = {fisher(crashed, boots, 0, clean):.2g}"


TOO_FEW = "too few boots to say that it helps (--trials auto)"
"""End of a comparison that proves nothing."""


def comparisons(arms: Sequence[ArmResult]) -> tuple[str, ...]:
    """Return how much quiet arms prove as workarounds for an arm with the bug in the same run.

    One sentence for each number of boots. Empty if no arm showed the bug or no other was quiet.
    """
    dying = next((arm for arm in arms if arm.expected.has_bug and arm.crashed), None)
    quiet = [arm for arm in arms if arm.expected is Expected.LIVES and arm.result is Result.QUIET]
    if dying is None:
        return ()
    names: dict[int, list[str]] = {}
    for arm in quiet:
        names.setdefault(arm.conclusive, []).append(arm.name)
    needed = clean_needed(dying.crashed, dying.conclusive)
    return tuple(
        _comparison(dying, ", ".join(quiet_names), clean, needed)
        for clean, quiet_names in names.items()
    )


def _comparison(dying: ArmResult, names: str, clean: int, needed: int | None) -> str:
    """Return a sentence on what `clean` quiet boots of each of the arms `names` prove.

    needed: the quiet boots for a proof; None if none are enough.
    """
    did = dying.expected.did
    seen = (
        f"{names}: {did} in 0 of {clean} boots, against {dying.crashed} of {dying.conclusive} of"
        f" {dying.name}"
    )
    if needed is None or clean < needed:
        return f"{seen}: {TOO_FEW}"
    return (
        f"{seen}: a workaround that does nothing would look like this in less than 5 % of cases "
        f"({_fisher_text(dying.crashed, dying.conclusive, clean)})"
    )


def decide(
    arms: Sequence[ArmResult],
    *,
    standing: Standing,
    expect: Expect = Expect.DECLARED,
    record: Record | None = None,
    version: str | None = None,
    patched: bool = False,
) -> VerdictReport:
    """Return the verdict of a run over the results of its arms.

    The arms that are declared to have the bug decide, or all arms if none of these ran. Whether it
    was expected depends on all arms, and with `Expect.ANY` only on whether it is decided.
    standing: status of the release, for arms without their own. record: an earlier run that
    reproduced; without one a quiet run is never `fixed`. version: the vLLM of this run. patched: a
    patch of the source was applied in all arms.
    """
    led_by = [arm for arm in arms if arm.expected.has_bug] or list(arms)
    verdict, because = _verdict(led_by, standing, record, version, patched=patched)
    if expect is Expect.ANY:
        decided = None if verdict is Verdict.INCONCLUSIVE else True
        return VerdictReport(verdict=verdict, expected=decided, because=because)
    answers = [_arm_as_expected(arm, arm.standing or standing, expect) for arm in arms]
    surprises = [arm for arm, answer in zip(arms, answers, strict=True) if answer is False]
    if surprises:
        for arm in surprises:
            if arm not in led_by or verdict in (Verdict.QUIET, Verdict.FIXED):
                because += f"; unexpected in arm {arm.name}: {counted(arm.outcomes)}"
        names = tuple(arm.name for arm in surprises)
        return VerdictReport(verdict=verdict, expected=False, because=because, surprises=names)
    if None in answers or not answers:
        return VerdictReport(verdict=verdict, expected=None, because=because)
    if verdict is Verdict.INCONCLUSIVE:
        ran = ", ".join(arm.name for arm in arms)
        did = "alive" if expect is Expect.ALIVE else "as declared"
        because = f"{ran}: {did} ({arms[0].outcomes[0]}); the bug itself was not put to the test"
    return VerdictReport(verdict=verdict, expected=True, because=because)


def _verdict(
    led_by: Sequence[ArmResult],
    standing: Standing,
    record: Record | None,
    version: str | None,
    *,
    patched: bool,
) -> tuple[Verdict, str]:
    """Return the verdict and the reason for it.

    led_by: the results that decide. The other arguments are those of `decide`.
    """
    with_patch = " with the patch" if patched else ""
    if reproducing := next((arm for arm in led_by if arm.crashed), None):
        did, counts = reproducing.expected.did, f"{reproducing.crashed} of {reproducing.conclusive}"
        besides = f", besides {counted(reproducing.otherwise)}" if reproducing.otherwise else ""
        because = f"{reproducing.name}{with_patch}: {did} in {counts} boots{besides}"
        if (reproducing.standing or standing) is not Standing.GOOD:
            return Verdict.REPRODUCES, because
        return Verdict.REGRESSED, f"{because}; this release was declared good" + (
            " as it is" if patched else ""
        )
    if changed := next((arm for arm in led_by if arm.failed_otherwise), None):
        return (
            Verdict.CHANGED,
            f"{changed.name}{with_patch}: {changed.otherwise[0]}, and not of this bug",
        )
    undecided = next((arm for arm in led_by if arm.result is not Result.QUIET), None)
    if undecided is not None:
        return Verdict.INCONCLUSIVE, f"{undecided.name}{with_patch}: {undecided.bound}"
    if not led_by:
        return Verdict.INCONCLUSIVE, "no trial finished"
    return _why_quiet(led_by, record, version, patched=patched)


def exit_status(expected: bool | None) -> int:
    """Return a run's exit status: 0 as expected, 1 a surprise, 2 undecided."""
    return {True: 0, False: 1, None: 2}[expected]
