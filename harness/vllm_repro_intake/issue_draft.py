"""Draft of a comment on the upstream issue, or of a new issue for an unreported bug.

The cause comes first, then a change that shows it, a unit test, the script, and all else, folded.
A draft has at most 32,000 bytes, its code blocks are intact, and it mentions nobody. What its
sender must know is not in it: `vllm-repro draft` prints that.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from vllm_repro.report.document import plain_text
from vllm_repro.report.format import limited, plural
from vllm_repro.report.markdown import root_traceback
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, issue_url
from vllm_repro.report.source_changes import diff_of, how_to_apply, untried_note
from vllm_repro.report.tables import throughput_section
from vllm_repro.report.text import cell, code, fence, html, plain, shorten, size
from vllm_repro.report.wording import avoids, boundary, lab_rule, not_run_word, refusals
from vllm_repro.scenario.matching import matches, twins
from vllm_repro.scenario.prices import kept_prices
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.servers.base import Replaced
from vllm_repro.servers.launch import FIRST_RUNNER
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Result, Standing, Verdict
from vllm_repro_diagnosis.diagnosis import Diagnosis, Phase
from vllm_repro_diagnosis.evidence import Evidence, simulation_mark
from vllm_repro_diagnosis.root_cause import Root
from vllm_repro_diagnosis.tracebacks import Frame, Raised

MOST = 32_000
"""Bytes of a draft."""

_NAME, _SENTENCE, _CAUSE, _BLOCK, _LIST = 60, 500, 800, 3_000, 1_600
"""Most bytes of each part before its escapes, so that none takes the room of the others."""

_FRAMES = 8
_ISSUE = re.compile(r"[\w.-]+/[\w.-]+#\d+")

_Part = tuple[str, str]
"""Name of a part, empty if it is always there, and its text, empty if the run has none."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft of a GitHub issue or comment, in Markdown."""

    body: str
    # of a new issue; empty for a comment
    title: str
    # the one to comment on, or the nearest
    issue: str
    # issues about perhaps the same bug
    duplicates: tuple[str, ...] = ()
    # names of the parts for which there was no room
    left_out: tuple[str, ...] = ()
    # releases that are declared to be without the bug
    fixed_in: str = ""

    def command(self, path: Path) -> str:
        """Return the command with which a person sends the draft in the file `path`."""
        repository, _, number = self.issue.partition("#")
        words = ["comment", number, "--repo", repository]
        if self.title:
            words = ["create", "--repo", repository, "--title", self.title]
        return shlex.join(["gh", "issue", *words, "--body-file", str(path)])


def draft(
    report: RunReport,
    duplicates: Sequence[str] = (),
    *,
    flags: str = "",
    why: str = "",
    small: str = "",
    gpus: bool = True,
    test: str = "",
    script: str = "",
    no_script: str = "",
    diffs: Mapping[str, str] | None = None,
    reasons: Mapping[str, str] | None = None,
) -> Draft:
    """Return the draft of a GitHub issue or comment about a run.

    duplicates: issues about perhaps the same bug. flags: the reported command. why: the scenario's
    explanation. small: what ran in place of the reported model in the lab. gpus: the bug is one of
    vLLM on GPUs. test: a pytest file for vLLM. script: `repro.py`. no_script: why there is none.
    diffs: of patched arms by name, for `git apply`; other arms show a diff to apply by hand.
    reasons: of these changes, by arm.
    """
    title = "" if report.filed else f"[Bug]: {' '.join(shorten(report.title, 200).split())}"
    # its flags and its machine are not known
    attached = any(arm.server.kind == "attach" for arm in report.arms)
    lines = "\n".join(_first_lines(report, why, small, gpus))
    form = bool(title) and not report.rehearsal  # the first line of a rehearsal must name it
    asked = "### \N{BUG} Describe the bug\n\n" if form else ""
    only_changed = report.bug_seen and not any(arm.k for arm in report.arms if not arm.patches)
    environment = _folded(
        (
            "Environment of the client; that of the server is not known"
            if attached
            else "Environment of the run"
        ),
        fence(_environment(report, gpus=not attached), "text"),
    )
    parts = [
        ("", asked + lines),
        *(
            (f"the change in {_names(arms)}", _change(arms, diffs or {}, reasons or {}))
            for arms in _changed(report)[:4]
        ),
        ("the unit test", "" if only_changed or report.status.good else _unit_test(test)),
        ("", "" if attached else _flags(flags)),
        ("the script", "" if only_changed else _script(report, script, no_script)),
        ("", _arms(report)),
        ("the traceback", _traceback(report)),
        ("", _replaced(report)),
        *_measured(report),
        ("", f"### Your current environment\n\n{environment}" if form else environment),
        ("how the command differs from the reported one", _differences(report)),
    ]
    body, left_out = _joined(parts, _footer(report))
    return Draft(
        body=body,
        title=title,
        issue=report.issue,
        duplicates=tuple(duplicates),
        left_out=tuple(left_out),
        fixed_in=report.status.good,
    )


def _joined(parts: Sequence[_Part], footer: str) -> tuple[str, list[str]]:
    """Return the parts that fit into `MOST` bytes, then the footer; and the names left out.

    Room is kept for the parts without a name: a named one must fit beside them.
    """
    room = MOST - size(footer) - len("\n")
    reserved = sum(size(text) + len("\n\n") for name, text in parts if not name)
    kept, missing = [], []
    for name, text in parts:
        needed = size(text) + len("\n\n")
        reserved -= 0 if name else needed
        if text and needed <= room - (reserved if name else 0):
            kept.append(text)
            room -= needed
        elif text:
            missing.append(name or "what was replaced or where it ran")
    return "\n\n".join((*kept, footer)) + "\n", missing


def duplicates(report: RunReport, scenarios: Sequence[Scenario]) -> list[str]:
    """Return issues that may be about the same bug; empty if nothing failed.

    First come those whose signature a crash of the run has, then those that the scenario names.
    Issues of scenarios that are declared good for this release are left out. Whether an issue is
    still open is not checked.
    """
    if not report.failures:
        return []
    same = [
        match.scenario
        for crash in dict.fromkeys(
            _diagnosis(trial, report.vllm_version)
            for trial in (trial for arm in report.arms for trial in arm.trials)
        )
        for match in matches(crash, scenarios)
    ]
    issues = [scenario.issue for scenario in same if scenario.id != report.scenario]
    reported = [scenario for scenario in scenarios if scenario.id == report.scenario][:1]
    issues += [twin.issue for scenario in reported for twin in twins(scenario, scenarios)]
    issues += [*report.related, *(issue for scenario in reported for issue in scenario.related)]
    settled = {report.issue}
    for scenario in scenarios:
        if not scenario.filed or scenario.status.standing(report.vllm_version) is Standing.GOOD:
            settled.add(scenario.issue)
    return [issue for issue in dict.fromkeys(issues) if issue not in settled]


def _diagnosis(trial: TrialReport, version: str | None) -> Diagnosis:
    """Return a trial's death as a diagnosis, to match it with known signatures.

    It has no root without an exception, and `died` is False without a death.
    """
    death, raised = trial.death, None
    if death is not None and death.exception is not None:
        raised = Raised(
            exception=death.exception,
            message=death.message or "",
            frames=tuple(Frame(*frame.rpartition(":")[::2]) for frame in death.frames),
        )
    return Diagnosis(
        died=death is not None,
        phase=Phase(trial.phase) if death and trial.phase in set(Phase) else None,
        root=Root(raised=raised) if raised else None,
        vllm_version=version,
        why="",
    )


def _shown_trial(report: RunReport) -> tuple[ArmReport, TrialReport] | None:
    """Return (arm, trial) to show: a failed one of unchanged source, else a failed one, else any.

    None without trials.
    """
    unchanged = [pair for pair in report.failures if not pair[0].patches]
    return next(
        iter(
            (
                *unchanged,
                *report.failures,
                *[(arm, trial) for arm in report.arms for trial in arm.trials],
            )
        ),
        None,
    )


def _changed(report: RunReport) -> list[list[ArmReport]]:
    """Return the arms that change vLLM's source, a list for each change; those that help first."""
    by_change: dict[object, list[ArmReport]] = {}
    for arm in report.arms:
        if arm.patches:
            by_change.setdefault(arm.patches, []).append(arm)
    return sorted(by_change.values(), key=lambda arms: not any(map(avoids, arms)))


# ── what is read in half a minute


def _first_lines(report: RunReport, why: str, small: str, gpus: bool) -> Iterator[str]:
    """Yield the lines that are read first: verdict, cause, workarounds, releases, what ran.

    why, small, gpus: as in `draft`.
    """
    if report.status.good and not report.rehearsal:
        fixed = "**Fixed**: " * bool(re.fullmatch(r">=[\d.]+", report.status.good))
        yield f"{fixed}vLLM {cell(report.status.good)} is declared to be without this bug.\n"
    yield f"{_verdict(report)}\n"
    if (shown := _shown_trial(report)) and shown[1].severity is not None:
        cause = shorten(shown[1].why.partition(". cannot tell: ")[0], _CAUSE)
        yield (
            "- **What:**"
            f" {plain(cause) if shown[1].outcome is Outcome.WRONG_OUTPUT else code(cause)}"
        )
    if report.bug_seen:
        if why:
            yield f"- **Cause:** {_prose(_sentences(why, _CAUSE))}"
        if lives := limited([_count(arm, report) for arm in report.arms if avoids(arm)], 4):
            yield f"- **Not seen with:** {'; '.join(lives)}"
    yield f"- **Releases:** {cell(shorten(_declared(report), _SENTENCE))}"
    if report.banner:
        word, _, text = shorten(report.banner, _SENTENCE).partition(": ")
        yield f"- **{word}:** {cell(text)}{_holds(report, small, gpus)}"
    modelled = not any("computes no model" in part.effect for part in report.replaced)
    if any(FIRST_RUNNER in arm.server.env.items() for arm in report.arms):
        which = "the first" if modelled else "none ran; the scheduler was set for the first"
        yield f"- **Model runner:** {which} ({code('='.join(FIRST_RUNNER))}); no other was tried."
    yield from (f"- {plain(shorten(text, _SENTENCE))}." for text in refusals(report.arms)[:4])
    if report.shortfall:
        yield f"- **{report.shortfall}. This is what the journal holds.**"
    if not report.filed:
        own = report.issue.partition("#")[0]
        links = [
            f"[{each.removeprefix(own)}]({issue_url(each)})"
            for each in dict.fromkeys((report.issue, *report.related))
            if _ISSUE.fullmatch(each)
        ]
        yield f"- Related, not this bug: {', '.join(links)}"


def _prose(text: str) -> str:
    """Return a scenario's words on one line, with what stands in backticks as code."""
    span = re.compile(r"`([^`]+)`")
    written = plain(span.sub("\ue000", text))
    for name in span.findall(text):
        written = written.replace("\ue000", code(name), 1)
    return written


def _sentences(text: str, most: int) -> str:
    """Return the first sentences of a text, as many as `most` bytes hold."""
    sentences = re.split(r"(?<=\.)\s+", " ".join(text.split()))
    fitting = sum(
        total <= most for total in accumulate(size(sentence) + 1 for sentence in sentences)
    )
    return shorten(" ".join(sentences[: max(fitting, 1)]), most)


def _verdict(report: RunReport) -> str:
    """Return a sentence on the result of unchanged source, then one on changed source."""
    on = f"{cell(shorten(report.release, 2 * _NAME))}{simulation_mark(report.evidence)}"
    seen = [arm for arm in report.arms if arm.k and arm.expected.has_bug]
    quiet = [arm for arm in report.arms if arm.expected.has_bug and arm.result is Result.QUIET]
    if report.verdict is Verdict.REPRODUCES and seen:
        for arm in seen:
            if not arm.patches:
                return f"**Reproduces on {on}**: {_count(arm, report).removeprefix('`reported` ')}."
        lived = [_count(arm, report) for arm in quiet if not arm.patches]
        first = (
            f"**Did not reproduce on unchanged {on}**: {lived[0]}."
            if lived
            else f"**Not tried on unchanged {on}.**"
        )
        changed = (_count(arm, report) for arm in seen[:3])
        return f"{first} With vLLM's source changed: {'; '.join(changed)}."
    if report.verdict is Verdict.QUIET and quiet:
        count = _count(quiet[0], report).removeprefix("`reported` ")
        return f"**Did not reproduce on {on}**: {count}, with the boundary crossed."
    text = f"**{report.verdict.capitalize()} on {on}**: {cell(shorten(report.because, _SENTENCE))}."
    # a patch that fails contradicts no declaration
    if report.as_expected is False and not report.compared_patches:
        text += f" Declared was something else: {cell(shorten(_declared(report), 200))}."
    return text


def _declared(report: RunReport) -> str:
    """Return the releases that are declared with and without the bug, as a phrase."""
    good = (
        f"without: {report.status.good}" if report.status.good else "no release is declared fixed"
    )
    return f"with the bug: {report.status.bad}; {good}"


def _count(arm: ArmReport, report: RunReport) -> str:
    """Return how often an arm failed, as in `eager` (`--enforce-eager`) died in 0 of 1 boots."""
    edits = " and ".join(
        dict.fromkeys(edit for edit in arm.edits if not edit.startswith("patched "))
    )
    change = [f"{code(shorten(edits, 300))}"] if edits else []
    files = dict.fromkeys(patch.file.rpartition("/")[2] for patch in arm.patches)
    change += [f"{code(shorten(', '.join(files), 200))} changed"] if files else []
    did = next((each.expected.did for each in (arm, *report.arms) if each.expected.has_bug), "died")
    words = [code(shorten(arm.name, _NAME)), f"({', '.join(change)})" if change else ""]
    return " ".join(filter(None, [*words, f"{did} in {arm.k} of {arm.n} boots" if arm.n else ""]))


def _holds(report: RunReport, small: str, gpus: bool) -> str:
    """Return the sentences on why a failure in the lab holds on a GPU, as far as the run shows.

    Empty outside of the lab. small, gpus: as in `draft`.
    """
    if report.evidence != Evidence.LAB:
        return ""
    text = f" Replaced: {plural(len(report.replaced), 'part')}, listed below."
    deciding = "".join(
        f" {code('.'.join(part.name.split('.')[-2:]))}: {cell(part.effect)}."
        for part in report.replaced
        if part.name.startswith(("vllm.v1.core.", "vllm.v1.engine.")) and _has_effect(part)
    )
    death = next(
        (trial.death for _, trial in report.failures if trial.death and trial.death.frames), None
    )
    if not gpus:
        text += " The bug is one of vLLM on CPUs."
    elif rule := lab_rule(report):
        text += f" {rule}."
    elif report.bug_seen and death is not None:
        file, _, function = death.frames[-1].rpartition(":")
        where = f"{code(shorten(function, _NAME))} in {code(shorten(file, 200))}"
        if re.search(r"(^|[/_])cpu([/_.]|$)", file):
            text += f" {where}, which raised it, is for CPUs: a GPU does not run it."
        elif not any(part.name.endswith(f".{function}") for part in report.replaced):
            text += f" {where}, which raised it, is not replaced: a GPU runs the same lines."
    elif not deciding and any(trial.outcome is Outcome.HANG for _, trial in report.failures[:1]):
        text += " The scheduler is not changed."
    return text + deciding + (f" {cell(shorten(small, _SENTENCE))}." if small else "")


def _unit_test(test: str) -> str:
    """Return the folded pytest file; empty without one."""
    lead = "For `tests/v1/core`. It plays these requests without a model:\n\n"
    return _folded("Unit test", lead + fence(test, "python")) if test else ""


def _flags(flags: str) -> str:
    """Return the line with the flags of the command; empty if they are not known."""
    words = flags.replace("\\\n", " ").split()
    return f"**Flags:** {code(shorten(' '.join(words), _CAUSE))}" if flags else ""


def _script(report: RunReport, script: str, no_script: str) -> str:
    """Return the part with `repro.py`, else why the draft has none, else ""."""
    if report.bug_seen and any(
        trial.death and trial.phase in (Phase.BOOT, Phase.WARMUP)
        for _, trial in report.failures[:1]
    ):
        return "The engine dies while it boots, so there is no script."
    if no_script:
        return f"There is no script for a plain vLLM: {no_script}."
    return f"`repro.py` for a plain vLLM:\n\n{fence(script, 'python')}" if script else ""


# ── what is folded


def _arms(report: RunReport) -> str:
    """Return the folded list of the arms that were run, and the command of the run."""
    lines = [f"- {_arm(arm, report)}" for arm in report.arms]
    again = (
        f"With vllm-repro {cell(shorten(report.harness_version, 40))}:"
        f" {code(shorten(report.reproduce, _SENTENCE))}"
    )
    return _folded("What was run", f"{_rows(lines, _LIST)}\n\n{again}")


def _arm(arm: ArmReport, report: RunReport) -> str:
    """Return a line on one arm: its change, its outcomes and its boundary."""
    if not arm.trials:
        return f"{code(shorten(arm.name, _NAME))}: {not_run_word(arm)}"
    outcomes = ", ".join(dict.fromkeys(trial.outcome for trial in arm.trials))
    tested = f". Outcome: {outcomes}" if arm.n else f": {outcomes}, which decides nothing"
    return f"{_count(arm, report)}{tested}. Boundary {cell(shorten(boundary(arm.trials[0]), 200))}."


def _traceback(report: RunReport) -> str:
    """Return the folded traceback of the shown trial; empty without a death."""
    shown = _shown_trial(report)
    if shown is None or (death := shown[1].death) is None:
        return ""
    arm, trial = shown
    lead = (
        f"In {code(shorten(arm.name, _NAME))}, phase:"
        f" {cell(shorten(trial.phase or 'unknown', _NAME))}."
    )
    cause = (
        fence(root_traceback(death, _FRAMES, _BLOCK // 2), "text")
        if death.exception
        else cell(trial.why[:_SENTENCE])
    )
    return _folded("Traceback", f"{lead}\n\n{cause}")


def _names(arms: Sequence[ArmReport]) -> str:
    """Return the names of up to four arms, separated by commas."""
    return ", ".join(shorten(arm.name, _NAME) for arm in arms[:4])


def _change(arms: Sequence[ArmReport], diffs: Mapping[str, str], reasons: Mapping[str, str]) -> str:
    """Return the folded diff that these arms have in common. diffs, reasons: as in `draft`."""
    arm, diff, why = arms[0], diffs.get(arms[0].name, ""), reasons.get(arms[0].name, "")
    untried = "".join(cell(untried_note(file)) for file in arm.server.patched).removeprefix("; ")
    aim = "What it stands for" if arm.expected.has_bug else "Why it helps"
    text = (
        (f"{aim}: {_prose(shorten(why, _CAUSE))}.\n\n" * bool(why))
        + ("" if diff else f"{how_to_apply(arm)}.\n\n")
        + (f"{untried}.\n\n" if untried else "")
        + fence(diff or diff_of(arm), "diff")
    )
    return _folded(f"The change in {_names(arms)}{', for git apply' if diff else ''}", text)


def _measured(report: RunReport) -> Iterator[_Part]:
    """Yield the part on throughput, of this run or else of an earlier one; nothing without any."""
    heading, _, text = throughput_section(report).partition("\n\n")
    if not (report.measured and report.measured.shown) and (kept := kept_prices(report.scenario)):
        yield (
            "Throughput",
            "Measured in another run: "
            + " ".join(f"{cell(price)}." for price in kept)
            + " A ratio of fewer layers is no ratio of the whole model."
            * (" layers; " in str(kept)),
        )
    elif text:
        summary = heading.removeprefix("## ")
        yield summary, _folded(summary, text)


def _differences(report: RunReport) -> str:
    """Return the folded list of how the first arm that differs does so; "" if none does."""
    first = next((arm for arm in report.arms if arm.differences), None)
    if first is None:
        return ""
    return _folded(
        f"How the command of {first.name} differs from the reported one",
        _rows([f"- {cell(shorten(text, 300))}" for text in first.differences], _LIST),
    )


def _replaced(report: RunReport) -> str:
    """Return the folded names of the parts that the lab replaced, by effect; "" without any.

    `report.md` has the reasons, and why the others have no effect.
    """
    effects: dict[str, list[str]] = {}
    for part in report.replaced:
        effect = cell(part.effect) if _has_effect(part) else "no effect on the bug"
        effects.setdefault(effect, []).append(code(part.name.removeprefix("vllm.")))
    lines = [f"- {', '.join(names)}: {effect}" for effect, names in effects.items()]
    return (
        _folded(f"LAB: {plural(len(report.replaced), 'replaced part')}", _rows(lines, _BLOCK))
        if lines
        else ""
    )


def _has_effect(part: Replaced) -> bool:
    """Return True if the replacement changes what runs, by the lab's own account."""
    return not part.effect.startswith("none")


def _environment(report: RunReport, *, gpus: bool) -> str:
    """Return the machine and the software, with the headings of vLLM's collect_env.py.

    gpus: whether to list the GPUs.
    """
    cards = (
        f"GPU {number}: {gpu.name} ({gpu.memory_gb:g} GB)"
        for number, gpu in enumerate(report.environment.gpus)
    )
    return plain_text(
        "environment.txt",
        Path(__file__).with_name("templates"),
        machine=report.environment,
        gpus=gpus,
        cards=", ".join(cards) or "none",
        version=report.vllm_version and report.release.removeprefix("vLLM "),
        weights="; ".join(
            dict.fromkeys(arm.server.weights for arm in report.arms if arm.server.weights)
        ),
        line=lambda text: shorten(" ".join(text.split()), _SENTENCE),
    )


def _folded(summary: str, text: str) -> str:
    """Return text that GitHub shows when its summary line is clicked."""
    # GitHub reads Markdown inside HTML only between empty lines.
    return f"<details><summary>{html(shorten(summary, 200))}</summary>\n\n{text}\n\n</details>"


def _rows(lines: Sequence[str], most: int) -> str:
    """Return the lines that fit into `most` bytes, at least one, and the number of the others."""
    fitting = sum(total <= most for total in accumulate(size(line) + 1 for line in lines))
    shown = lines[: max(fitting, 1)]
    more = len(lines) - len(shown)
    return "\n".join(shown) + (f"\n\nand {more} more" if more else "")


def _footer(report: RunReport) -> str:
    """Return the draft's last line: what made it, and that secrets are replaced."""
    return (
        f"<sub>Made by vllm-repro {cell(shorten(report.harness_version, 40))} from the journal of"
        " one run; its cause is the scenario's, which knows other runs, too. Keys, user"
        " names, hosts and addresses are replaced by words in brackets.</sub>"
    )
