"""Draft of a comment on the upstream issue, or of a new issue for an unreported bug.

The most important comes first; what does not fit is left out from the end. Whatever logs and journal hold, a draft has at most 65,536
bytes, its code blocks are intact, and it mentions nobody.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vllm_repro.diagnosis.diagnosis import Diagnosis, Phase
from vllm_repro.diagnosis.root_cause import Root
from vllm_repro.diagnosis.tracebacks import Frame, Raised
from vllm_repro.evidence import Evidence
from vllm_repro.journal.log_excerpts import LogExcerpts
from vllm_repro.report.format import limited
from vllm_repro.report.markdown import environment_list, request_lines, root_traceback
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, banner, issue_url
from vllm_repro.report.source_changes import (
    changed_files,
    diff_of,
    how_to_apply,
    patched_section,
    replaced_section,
    untried_note,
)
from vllm_repro.report.tables import arms_table, soak_section, throughput_section
from vllm_repro.report.text import (
    LIMIT,
    cell,
    code,
    excerpt,
    fence,
    fit,
    html,
    markdown_table,
    plain,
    shorten,
    size,
)
from vllm_repro.report.wording import context, crossed_word, death_line, simulated
from vllm_repro.scenario.matching import matches, twins
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Result, Standing

__all__ = ["Draft", "draft", "duplicates"]

_SENTENCE, _CAUSE, _TABLE, _COMMAND, _TRACEBACK, _LIST, _LOG = 700, 1_200, 10_000, 8_000, 8_000, 6_000, 32_000
"""Most bytes of each part, so that none takes the room of the others."""

_FRAMES = 12
_EVIDENCE = 160
"""Letters of a piece of evidence that is shown unfolded."""

_Make = Callable[[int], str]
"""Makes a part in about so many bytes."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft in Markdown.

    title: of a new issue, empty for a comment. issue: the one to comment on, or the nearest. duplicates: issues about perhaps the same.
    """

    body: str
    title: str
    issue: str
    duplicates: tuple[str, ...] = ()

    @property
    def duplicate_urls(self) -> list[str]:
        return [issue_url(issue) for issue in self.duplicates]

    def command(self, path: Path) -> str:
        """Return the command with which a person sends the draft in the file `path`."""
        repository, _, number = self.issue.partition("#")
        if self.title:
            words = ["gh", "issue", "create", "--repo", repository, "--title", self.title, "--body-file", str(path)]
        else:
            words = ["gh", "issue", "comment", number, "--repo", repository, "--body-file", str(path)]
        return shlex.join(words)


def draft(
    report: RunReport,
    logs: Sequence[LogExcerpts] = (),
    duplicates: Sequence[str] = (),
    *,
    flags: str = "",
    why: str = "",
) -> Draft:
    """Return the draft about a run.

    logs: of the failed trials, the most important first. flags: the scenario's command, for a new issue from the lab, whose own command
    nobody else can run. why: the scenario's explanation, for a new issue.
    """
    title = "" if report.filed else f"[Bug]: {' '.join(shorten(report.title, 200).split())}"
    page = _Page(_footer(report))
    if title and not report.rehearsal:  # the first line of a rehearsal must name it
        page.add("", lambda _: f"<!-- A new issue. Title: {html(title).replace('--', '- -')} -->")
    for text in _first_lines(report, duplicates, why):
        page.add("", _fixed(text))
    page.add("the table of arms", partial(_rows, markdown_table(arms_table(report))), _TABLE)
    shown = _shown_trial(report)
    if shown:
        page.add("", lambda _: _boundary(*shown))
    first = next((arm for arm in report.arms if arm.command), None)
    lab_command = bool(title and flags and report.evidence == Evidence.LAB and first)
    if lab_command:
        lead = "Flags (the lab's own command is folded below):"
        page.add("the flags", lambda room: _block(lead, flags, room), _COMMAND)
    elif first is not None:
        page.add("the command", lambda room: _block(f"Command of {code(first.name)}:", first.command, room), _COMMAND)
    if title:
        page.add("the requests", partial(_requests, report), _COMMAND)
        page.add("the change that helps", partial(_helpful_patch, report), _COMMAND)
    page.add("", lambda room: _block("To run it again:", report.reproduce, room), _COMMAND)
    page.add("the environment", partial(_rows, environment_list(report)), _LIST)
    if shown and shown[1].death:
        page.add("the traceback", partial(_traceback, *shown), _TRACEBACK)
    _add_folded(page, report, first, new=bool(title), lab_command=lab_command)
    for number, log in enumerate(logs):
        most = min(_LOG, page.room // (len(logs) - number))
        page.add(f"the log {log.name}", partial(_log, log), most)
    return Draft(body=page.text(), title=title, issue=report.issue, duplicates=tuple(duplicates))


def duplicates(report: RunReport, scenarios: Sequence[Scenario]) -> list[str]:
    """Return issues that may be about the same: those whose signature a death has, then those that the scenario names.

    Issues of scenarios that are declared good for this release are left out. Whether an issue is still open is not checked.
    """
    if not report.failures:
        return []
    found: list[str] = []
    for death in dict.fromkeys(_diagnosis(trial, report.version) for arm in report.arms for trial in arm.trials):
        found += [match.scenario.issue for match in matches(death, scenarios) if match.scenario.id != report.scenario]
    own = next((scenario for scenario in scenarios if scenario.id == report.scenario), None)
    if own is not None:
        found += [twin.issue for twin in twins(own, scenarios)]
    found += [*report.related, *(own.related if own is not None else ())]
    settled = {one.issue for one in scenarios if not one.filed or one.status.standing(report.version) is Standing.GOOD}
    return [issue for issue in dict.fromkeys(found) if issue != report.issue and issue not in settled]


def _diagnosis(trial: TrialReport, version: str | None) -> Diagnosis:
    death, raised = trial.death, None
    if death is not None and death.exception is not None:
        frames = tuple(Frame(*frame.rpartition(":")[::2]) for frame in death.frames)
        raised = Raised(exception=death.exception, message=death.message or "", frames=frames)
    return Diagnosis(
        died=death is not None,
        phase=Phase(trial.phase) if death and trial.phase in set(Phase) else None,
        root=Root(raised=raised) if raised else None,
        vllm_version=version,
        why="",
    )


def _shown_trial(report: RunReport) -> tuple[ArmReport, TrialReport] | None:
    """Return the most important failed trial, else the first one."""
    return next(iter((*report.failures, *((arm, trial) for arm in report.arms for trial in arm.trials))), None)


class _Page:
    """The parts of a draft in their order, each taken if there is room for it. The footer's room is reserved."""

    def __init__(self, footer: str) -> None:
        self._parts: list[str] = []
        self._missing: list[str] = []
        self._footer = footer
        self.room = LIMIT - size(footer) - 2 - _SENTENCE  # for the sentence on what is missing

    def add(self, name: str, make: _Make, most: int = LIMIT) -> None:
        text = fit(make, min(most, self.room - 2))
        if text:
            self._parts.append(text)
            self.room -= size(text) + 2
        elif name and make(LIMIT):
            self._missing.append(name)

    def fold(self, name: str, summary: str, make: _Make) -> None:
        """Add a part that is folded."""
        self.add(name, lambda room: _folded(summary, make, min(room, _TABLE)))

    def text(self) -> str:
        parts = [*self._parts]
        if self._missing:
            names = ", ".join(self._missing)
            parts.append(shorten(f"Left out for lack of room: {names}. The run's `report.md` has it.", _SENTENCE - 4))
        return "\n\n".join((*parts, self._footer)) + "\n"


# ── what is read in half a minute ─────────────────────────────────────────────────────────────────────────────────────────


def _first_lines(report: RunReport, duplicates: Sequence[str], why: str) -> list[str]:
    lines = [_verdict(report)]
    if (shown := _shown_trial(report)) and shown[1].severity is not None:
        arm, trial = shown
        cause = shorten(trial.why, _CAUSE)
        wrong = trial.outcome is Outcome.WRONG_OUTPUT
        lines.append(f"In {code(shorten(arm.name, 60))} {plain(cause)}." if wrong else code(cause))
    if why and not report.filed and report.bug_seen:
        lines.append(plain(shorten(" ".join(why.split()), _CAUSE)))
    if not report.filed:
        lines.append(f"No report of this was found; nearest is {_link(report.issue, beside=report.issue)}.")
    lines.append(_what_was_run(report))
    failed_as_released = not report.filed and not any(arm.patches for arm, _ in report.failures)
    if (changed := changed_files(report)) and not failed_as_released:
        text = cell(shorten("; ".join(changed), _SENTENCE))
        lines.append(f"**With vLLM's source changed, see the diff below, in {text}.**")
    if duplicates:
        links = ", ".join(_link(issue, beside=report.issue) for issue in duplicates[:8])
        lines.append(f"> **May be the same, check before sending:** {links}")
    return lines


def _verdict(report: RunReport) -> str:
    verdict = report.verdict.verdict
    version = cell(shorten(report.version or "of unknown version", 60))
    because = cell(shorten(report.verdict.because, _SENTENCE))
    text = f"**{verdict[:1].upper()}{verdict[1:]} on vLLM {version}{simulated(report.evidence)}**: {because}."
    if report.verdict.expected is False:
        text += f" Declared was something else: {cell(shorten(report.status, 200))}."
    return " ".join((text, *(f"{plain(shorten(sentence, _SENTENCE))}." for sentence in context(report)[:8])))


def _what_was_run(report: RunReport) -> str:
    trials = [f"{code(shorten(arm.name, 60))} ({len(arm.trials)})" for arm in report.arms if arm.trials]
    kind = next((str(arm.server.kind) for arm in report.arms if arm.server.kind), "none")
    text = f"Trials: {', '.join(limited(trials, 12)) or 'none'}; server: {cell(shorten(kind, 40))}."
    if report.shortfall:
        text += f" **{report.shortfall}. This is what the journal holds.**"
    notice = banner(report.evidence, report.version and shorten(report.version, 60))
    return text + (f" {cell(notice)}" if notice else "")


def _link(issue: str, beside: str = "") -> str:
    """Return a link to an issue, by its number alone if `beside` is of the same repository."""
    repository, sign, number = issue.partition("#")
    same = repository == beside.partition("#")[0]
    return f"[{sign + number if same else issue}]({issue_url(issue)})"


def _boundary(arm: ArmReport, trial: TrialReport) -> str:
    # The last ones are what was observed.
    last = [text for text in trial.trigger.evidence[-2:] if len(text) <= _EVIDENCE] or trial.trigger.evidence[-1:]
    evidence = cell(shorten("; ".join(last), _SENTENCE))
    return f"Boundary {crossed_word(trial)} in {code(shorten(arm.name, 60))}: {evidence or 'no evidence'}."


def _traceback(arm: ArmReport, trial: TrialReport, room: int) -> str:
    death = trial.death
    assert death is not None
    lead = f"Root of the crash in {code(shorten(arm.name, 60))}. {cell(shorten(death_line(trial), _SENTENCE))}"
    if not death.exception:
        return f"{lead} {cell(shorten(trial.why, _SENTENCE))}"
    return _block(lead, root_traceback(death, _FRAMES, max(room // 2, 200)), room, "text")


def _requests(report: RunReport, room: int) -> str:
    sent = _sent(report)
    return "Requests, in this order:\n\n" + _rows("\n".join(sent), room - 40) if sent else ""


def _sent(report: RunReport) -> list[str]:
    return request_lines(next((arm.requests for arm in report.arms if arm.requests), ()))


def _helpful_patch(report: RunReport, room: int) -> str:
    """Return the patch with which the engine lived, if the run tried one and the server ran all of it."""
    arm = next((arm for arm in report.arms if arm.patches and arm.result.result is Result.QUIET), None)
    if arm is None or not report.failures or any(map(untried_note, arm.server.patched)):
        return ""
    did = report.failures[0][0].expected.did
    lead = f"With this change the engine lived ({code(shorten(arm.name, 60))}, {did} in 0 of {arm.result.conclusive} boots)."
    return _block(f"{lead} {how_to_apply(arm)}:", diff_of(arm), room, "diff")


# ── what is folded ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _add_folded(page: _Page, report: RunReport, first: ArmReport | None, *, new: bool, lab_command: bool) -> None:
    """Add the folded parts. new: the requests are shown above. lab_command: the lab's command is not."""
    if first is not None and lab_command:
        command = first.command
        summary = f"Command of {first.name} in the lab"
        page.fold("the command", summary, lambda room: fence(shorten(command, room), "console"))
    if first is not None and first.differences:
        whose = "How the lab's command differs" if lab_command else "How that command differs from the reported one"
        summary = f"{whose} ({len(first.differences)})"
        lines = "\n".join(f"- {cell(shorten(text, _SENTENCE))}" for text in first.differences)
        page.fold("the differences from the report", summary, partial(_rows, lines))
    if arms := "\n".join(_arm(arm, first) for arm in report.arms if arm.trials):
        summary = "All evidence of the boundary, and what each arm changes"
        page.fold("the boundary in each arm", summary, partial(_rows, arms))
    if not new and (sent := _sent(report)):
        page.fold("the requests", f"Requests ({len(sent)})", partial(_rows, "\n".join(sent)))
    for section in (
        patched_section(report),
        throughput_section(report.measured),
        soak_section(report.measured),
        replaced_section(report),
    ):
        heading, _, text = section.partition("\n\n")
        if text:
            summary = heading.removeprefix("## ")
            page.fold(summary, summary, _fixed(text))  # whole or not at all


def _arm(arm: ArmReport, first: ArmReport | None) -> str:
    edits = " and ".join(code(shorten(edit, 200)) for edit in arm.edits[:6]) if arm is not first else ""
    why = f": {cell(shorten(arm.why, 300))}" if arm.why else ""
    trials = "; ".join(
        f"trial {trial.number} {crossed_word(trial)} ({cell(shorten('; '.join(trial.trigger.evidence), _SENTENCE))})"
        for trial in arm.trials[:3]
    )
    return f"- {code(shorten(arm.name, 60))}{' ' + edits if edits else ''}{why}. {trials}."


def _log(log: LogExcerpts, room: int) -> str:
    heading = f"{log.name}, {log.size:,} bytes"
    return _folded(heading, lambda most: fence(shorten(excerpt(log), most), "text"), room)


def _folded(summary: str, make: _Make, room: int) -> str:
    # GitHub reads Markdown inside HTML only between empty lines.
    head, tail = f"<details><summary>{html(shorten(summary, 200))}</summary>\n\n", "\n\n</details>"
    text = fit(make, room - size(head) - size(tail))
    return f"{head}{text}{tail}" if text else ""


def _fixed(text: str) -> _Make:
    return lambda _: text


def _block(lead: str, text: str, room: int, language: str = "console") -> str:
    return f"{lead}\n\n{fit(lambda most: fence(shorten(text, most), language), room - size(lead) - 2)}"


def _rows(text: str, room: int) -> str:
    """Return as many lines as there is room for, and the number of the others."""
    lines = text.split("\n")
    while len(lines) > 1 and size("\n".join(lines)) > room - 40:
        lines = lines[: max(1, len(lines) * 7 // 8)]
    more = text.count("\n") + 1 - len(lines)
    return "\n".join(lines) + (f"\n\nand {more} more" if more else "")


def _footer(report: RunReport) -> str:
    return (
        f"<sub>Made by vllm-repro {cell(shorten(report.harness_version, 40))} from the journal of one run; a person sends it. "
        "Keys, user names, hosts and addresses are words in brackets.</sub>"
    )
