"""Draft of a comment on the upstream issue, or of a new issue for an unreported bug.

The most important comes first; what does not fit is left out from the end. Whatever logs and journal hold, a draft has at most 65,536
bytes, its code blocks are intact, and it mentions nobody.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
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

_SENTENCE, _CAUSE, _TABLE, _BLOCK, _LIST = 700, 1_200, 10_000, 8_000, 6_000
"""Most bytes of each part before its escapes, so that none takes the room of the others."""

_FRAMES = 12
_EVIDENCE = 160
"""Letters of a piece of evidence that is shown unfolded."""

_Part = tuple[str, str]
"""A part of a draft: its name, empty if it is always there, and its text, empty if the run has none."""


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
    first = next((arm for arm in report.arms if arm.command), None)
    lab_command = bool(title and flags and report.evidence == Evidence.LAB and first)
    if lab_command:
        command = _block("Flags (the lab's own command is folded below):", flags)
    else:
        command = _block(f"Command of {code(first.name)}:", first.command) if first else ""
    parts = [
        *(("", text) for text in _first_lines(report, title, duplicates, why)),
        ("the table of arms", _rows(markdown_table(arms_table(report)).split("\n"), _TABLE)),
        ("", _boundary(report)),
        ("the command", command),
        ("the requests", _requests(report) if title else ""),
        ("the change that helps", _helpful_patch(report) if title else ""),
        ("", _block("To run it again:", report.reproduce)),
        ("the environment", _rows(environment_list(report).split("\n"), _LIST)),
        ("the traceback", _traceback(report)),
        *_folded_parts(report, first, new=bool(title), lab_command=lab_command),
        *((f"the log {log.name}", _log(log)) for log in logs),
    ]
    body = _joined(parts, _footer(report))
    return Draft(body=body, title=title, issue=report.issue, duplicates=tuple(duplicates))


def _joined(parts: Sequence[_Part], footer: str) -> str:
    """Return the parts for which there is room, then the names of the others, then the footer."""
    room = LIMIT - size(footer) - _SENTENCE - len("\n\n\n\n\n")
    kept, missing = [], []
    for name, text in parts:
        needed = size(text) + len("\n\n")
        if text and needed <= room:
            kept.append(text)
            room -= needed
        elif text and name:
            missing.append(name)
    if missing:
        names = ", ".join(missing)
        kept.append(shorten(f"Left out for lack of room: {names}. The run's `report.md` has it.", _SENTENCE))
    return "\n\n".join((*kept, footer)) + "\n"


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


# ── what is read in half a minute ─────────────────────────────────────────────────────────────────────────────────────────


def _first_lines(report: RunReport, title: str, duplicates: Sequence[str], why: str) -> list[str]:
    lines = []
    if title and not report.rehearsal:  # the first line of a rehearsal must name it
        lines.append(f"<!-- A new issue. Title: {html(title).replace('--', '- -')} -->")
    lines.append(_verdict(report))
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
    if report.verdict.expected is False and not report.compared:  # a patch that fails contradicts no declaration
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


def _boundary(report: RunReport) -> str:
    if (shown := _shown_trial(report)) is None:
        return ""
    arm, trial = shown
    # The last ones are what was observed.
    last = [text for text in trial.trigger.evidence[-2:] if len(text) <= _EVIDENCE] or trial.trigger.evidence[-1:]
    evidence = cell(shorten("; ".join(last), _SENTENCE))
    return f"Boundary {crossed_word(trial)} in {code(shorten(arm.name, 60))}: {evidence or 'no evidence'}."


def _traceback(report: RunReport) -> str:
    shown = _shown_trial(report)
    if shown is None or (death := shown[1].death) is None:
        return ""
    arm, trial = shown
    lead = f"Root of the crash in {code(shorten(arm.name, 60))}. {cell(shorten(death_line(trial), _SENTENCE))}"
    if not death.exception:
        return f"{lead} {cell(shorten(trial.why, _SENTENCE))}"
    return _block(lead, root_traceback(death, _FRAMES, _BLOCK // 2), "text")


def _requests(report: RunReport) -> str:
    sent = _sent(report)
    return "Requests, in this order:\n\n" + _rows(sent, _LIST) if sent else ""


def _sent(report: RunReport) -> list[str]:
    return request_lines(next((arm.requests for arm in report.arms if arm.requests), ()))


def _helpful_patch(report: RunReport) -> str:
    """Return the patch with which the engine lived, if the run tried one and the server ran all of it."""
    arm = next((arm for arm in report.arms if arm.patches and arm.result.result is Result.QUIET), None)
    if arm is None or not report.failures or any(map(untried_note, arm.server.patched)):
        return ""
    did = report.failures[0][0].expected.did
    lead = f"With this change the engine lived ({code(shorten(arm.name, 60))}, {did} in 0 of {arm.result.conclusive} boots)."
    return _block(f"{lead} {how_to_apply(arm)}:", diff_of(arm), "diff")


# ── what is folded ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _folded_parts(report: RunReport, first: ArmReport | None, *, new: bool, lab_command: bool) -> Iterator[_Part]:
    """Yield the folded parts. new: the requests are shown above. lab_command: the lab's command is not."""
    if first is not None and lab_command:
        text = fence(shorten(first.command, _BLOCK), "console")
        yield "the command of the lab", _folded(f"Command of {first.name} in the lab", text)
    if first is not None and first.differences:
        whose = "How the lab's command differs" if lab_command else "How that command differs from the reported one"
        lines = [f"- {cell(shorten(text, _SENTENCE))}" for text in first.differences]
        yield "the differences from the report", _folded(f"{whose} ({len(lines)})", _rows(lines, _LIST))
    if arms := [_arm(arm, first) for arm in report.arms if arm.trials]:
        summary = "All evidence of the boundary, and what each arm changes"
        yield "the boundary in each arm", _folded(summary, _rows(arms, _LIST))
    if not new and (sent := _sent(report)):
        yield "the requests", _folded(f"Requests ({len(sent)})", _rows(sent, _LIST))
    for section in (
        patched_section(report),
        throughput_section(report.measured),
        soak_section(report.measured),
        replaced_section(report),
    ):
        heading, _, text = section.partition("\n\n")
        if text:
            summary = heading.removeprefix("## ")
            yield summary, _folded(summary, text)


def _arm(arm: ArmReport, first: ArmReport | None) -> str:
    edits = " and ".join(code(shorten(edit, 200)) for edit in arm.edits[:6]) if arm is not first else ""
    why = f": {cell(shorten(arm.why, 300))}" if arm.why else ""
    trials = "; ".join(
        f"trial {trial.number} {crossed_word(trial)} ({cell(shorten('; '.join(trial.trigger.evidence), _SENTENCE))})"
        for trial in arm.trials[:3]
    )
    return f"- {code(shorten(arm.name, 60))}{' ' + edits if edits else ''}{why}. {trials}."


def _log(log: LogExcerpts) -> str:
    return _folded(f"{log.name}, {log.size:,} bytes", fence(excerpt(log), "text"))


def _folded(summary: str, text: str) -> str:
    # GitHub reads Markdown inside HTML only between empty lines.
    return f"<details><summary>{html(shorten(summary, 200))}</summary>\n\n{text}\n\n</details>"


def _block(lead: str, text: str, language: str = "console") -> str:
    return f"{lead}\n\n{fence(shorten(text, _BLOCK), language)}"


def _rows(lines: Sequence[str], most: int) -> str:
    """Return the lines that fit into `most` bytes, at least the first, and the number of the others."""
    fitting = sum(total <= most for total in accumulate(size(line) + 1 for line in lines))
    shown = lines[: max(fitting, 1)]
    more = len(lines) - len(shown)
    return "\n".join(shown) + (f"\n\nand {more} more" if more else "")


def _footer(report: RunReport) -> str:
    return (
        f"<sub>Made by vllm-repro {cell(shorten(report.harness_version, 40))} from the journal of one run; a person sends it. "
        "Keys, user names, hosts and addresses are words in brackets.</sub>"
    )
