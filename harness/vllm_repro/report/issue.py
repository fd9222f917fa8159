"""The draft of what a person may send upstream about a run: a comment on its issue, or a new issue where nobody has reported the bug. Pure.

The most important comes first, and what does not fit is left out from the end. Whatever a log or a journal holds, a draft has at most
65,536 characters, its code blocks hold, and it calls nobody.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vllm_repro.journal.log_excerpts import LogPieces
from vllm_repro.report.budget import LIMIT, excerpt, fitted, held, size
from vllm_repro.report.escape import cell, code, fence, html, plain
from vllm_repro.report.markdown import environment_list
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, banner, issue_url
from vllm_repro.report.patched import changed_files, diff_of, patched_section
from vllm_repro.report.replaced import replaced_section
from vllm_repro.report.speed import soak_section, speed_section
from vllm_repro.report.table import arms_table
from vllm_repro.report.wording import death_line, refusals, simulated
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Result

__all__ = ["Draft", "draft"]

_SENTENCE, _CAUSE, _TABLE, _COMMAND, _TRACEBACK, _LISTED, _LOG = 700, 1_200, 10_000, 8_000, 8_000, 6_000, 32_000
"""Most bytes of each part, so that no one of them takes the room of all."""

_FRAMES = 12

_LEFT_OUT = "Left out, for it did not fit: {}. The run's `report.md` has it."

_PROOF = 160  # letters of a piece of evidence that is read at a glance

Make = Callable[[int], str]


@dataclass(frozen=True)
class Draft:
    """body: Markdown. title: of a new issue, empty for a comment. issue: `owner/repository#number`, what is commented on or is nearest.
    alike: issues that may be about the same."""

    body: str
    title: str
    issue: str
    alike: tuple[str, ...] = ()

    @property
    def alike_urls(self) -> list[str]:
        return [issue_url(issue) for issue in self.alike]

    def command(self, path: Path) -> str:
        """What sends the draft in the file `path`, for a person to run."""
        repository, _, number = self.issue.partition("#")
        if self.title:
            words = ["gh", "issue", "create", "--repo", repository, "--title", self.title, "--body-file", str(path)]
        else:
            words = ["gh", "issue", "comment", number, "--repo", repository, "--body-file", str(path)]
        return shlex.join(words)


def draft(
    report: RunReport, logs: Sequence[LogPieces] = (), alike: Sequence[str] = (), *, flags: str = "", why: str = ""
) -> Draft:
    """logs: of the trials that failed, the most telling first. alike: issues that may be about the same. flags: the scenario's own command,
    for a new issue out of the lab, whose command nobody else can run. why: what the scenario says of the cause, for a new issue."""
    title = "" if report.filed else f"[Bug]: {' '.join(held(report.title, 200).split())}"
    page = _Page(_footer(report))
    if title and not report.rehearsal:  # whose first line says what it is, and which is nobody's issue
        page.add("", lambda _: f"<!-- A new issue. Title: {html(title).replace('--', '- -')} -->")
    for make in _first_lines(report, alike, why):
        page.add("", make)
    page.add("the table of arms", lambda room: _rows(arms_table(report), room), _TABLE)
    telling = _telling(report)
    if telling:
        page.add("", lambda _: _proof(*telling))
    first = next((arm for arm in report.arms if arm.command), None)
    folds_command = bool(title and flags and report.evidence == "lab" and first)
    if folds_command:
        lead = "Flags (the lab's own command is folded below):"
        page.add("the flags", lambda room: _block(lead, flags, room), _COMMAND)
    elif first is not None:
        page.add("the command", lambda room: _block(f"Command of {code(first.name)}:", first.command, room), _COMMAND)
    if title:
        page.add("the requests", lambda room: _requests(report, room), _COMMAND)
        page.add("the change that helps", lambda room: _cure(report, room), _COMMAND)
    page.add("", lambda room: _block("All of it again:", report.reproduce, room), _COMMAND)
    page.add("the environment", lambda room: _rows(environment_list(report), room), _LISTED)
    if telling and telling[1].death:
        page.add("the traceback", partial(_traceback, *telling), _TRACEBACK)
    for name, make in _details(report, first, unfolded=bool(title), command=folds_command):
        page.add(name, make)
    for number, log in enumerate(logs):
        most = min(_LOG, page.left // (len(logs) - number))
        page.add(f"the log {log.name}", partial(_log, log), most)
    return Draft(page.text(), title, report.issue, tuple(alike))


def _telling(report: RunReport) -> tuple[ArmReport, TrialReport] | None:
    """The trial that a reader should see: one that failed, else the first there is."""
    return next(iter((*report.failures, *((arm, trial) for arm in report.arms for trial in arm.trials))), None)


class _Page:
    """Parts in their order, each taken as far as there is room; what stands below them all has its room from the start."""

    def __init__(self, footer: str) -> None:
        self._parts: list[str] = []
        self._missing: list[str] = []
        self._footer = footer
        self.left = LIMIT - size(footer) - 2 - _SENTENCE  # a sentence may have to say what is missing

    def add(self, name: str, make: Make, most: int = LIMIT) -> None:
        text = fitted(make, min(most, self.left - 2))
        if text:
            self._parts.append(text)
            self.left -= size(text) + 2
        elif name and make(LIMIT):
            self._missing.append(name)

    def text(self) -> str:
        missing = [held(_LEFT_OUT.format(", ".join(self._missing)), _SENTENCE - 4)] if self._missing else []
        return "\n\n".join((*self._parts, *missing, self._footer)) + "\n"


# ── what is read in half a minute ─────────────────────────────────────────────────────────────────────────────────────────


def _first_lines(report: RunReport, alike: Sequence[str], why: str) -> list[Make]:
    verdict = f"{report.verdict.verdict[:1].upper()}{report.verdict.verdict[1:]}"
    version = cell(held(report.version or "of unknown version", 60))
    found = (
        f"**{verdict} on vLLM {version}{simulated(report.evidence)}**: {cell(held(report.verdict.because, _SENTENCE))}."
    )
    if report.verdict.expected is False:
        found += f" That is not what was known: {cell(held(report.status, 200))}."
    parts: list[Make] = [lambda _: found]
    if (telling := _telling(report)) and telling[1].failed is not None:
        arm, trial = telling
        said = held(trial.why, _CAUSE)
        wrong = trial.outcome is Outcome.WRONG_OUTPUT
        parts.append(lambda _: f"In {code(held(arm.name, 60))} {plain(said)}." if wrong else code(said))
    if why and not report.filed and report.seen:  # else it would explain what nobody saw
        parts.append(lambda _: plain(held(" ".join(why.split()), _CAUSE)))
    if not report.filed:
        parts.append(lambda _: f"No report of this was found; nearest is {_link(report.issue, beside=report.issue)}.")
    parts.append(lambda _: _what_was_run(report))
    as_released = not report.filed and not any(arm.patches for arm, _ in report.failures)
    if (changed := changed_files(report)) and not as_released:
        text = cell(held("; ".join(changed), _SENTENCE))
        parts.append(lambda _: f"**With vLLM's source changed, see the diff below, in {text}.**")
    if said_more := (*report.comparisons[:3], *refusals(report.arms)[:3]):
        parts.append(lambda _: " ".join(f"{plain(held(text, _SENTENCE))}." for text in said_more))
    if alike:
        links = ", ".join(_link(issue, beside=report.issue) for issue in alike[:8])
        parts.append(lambda _: f"> **May be the same, check before sending:** {links}")
    return parts


def _what_was_run(report: RunReport) -> str:
    boots = [f"{code(held(arm.name, 60))} ({len(arm.trials)})" for arm in report.arms if arm.trials]
    kind = next((str(arm.server["kind"]) for arm in report.arms if arm.server.get("kind")), "none")
    named = ", ".join(boots[:12]) + (f" and {len(boots) - 12} more" if len(boots) > 12 else "")
    text = f"Booted: {named or 'nothing'}; server: {cell(held(kind, 40))}."
    if report.interrupted or report.killed:
        text += " **The run was cut short: this is what was seen until then.**"
    elif report.cut:
        text += f" **{report.shortfall}.**"
    notice = banner(report.evidence, report.version and held(report.version, 60))
    return text + (f" {cell(notice)}" if notice else "")


def _link(issue: str, beside: str = "") -> str:
    """A link that is meant: the issues that a scenario names, and no others. By its number alone where `beside` is of that repository."""
    repository, sign, number = issue.partition("#")
    same = repository == beside.partition("#")[0]
    return f"[{sign + number if same else issue}]({issue_url(issue)})"


def _proof(arm: ArmReport, trial: TrialReport) -> str:
    word = "crossed" if trial.trigger.crossed else "not crossed"
    # The last ones are what was seen; what led there is folded.
    last = [text for text in trial.trigger.evidence[-2:] if len(text) <= _PROOF] or trial.trigger.evidence[-1:]
    evidence = cell(held("; ".join(last), _SENTENCE))
    return f"Boundary {word} in {code(held(arm.name, 60))}: {evidence or 'nothing tells'}."


def _traceback(arm: ArmReport, trial: TrialReport, room: int) -> str:
    death = trial.death
    assert death is not None
    lead = f"Root of the death in {code(held(arm.name, 60))}. {cell(held(death_line(trial), _SENTENCE))}"
    if not death.exception:
        return f"{lead} {cell(held(trial.why, _SENTENCE))}"
    frames = [f"  {frame}" for frame in death.frames[-_FRAMES:]]
    if left := len(death.frames) - len(frames):
        frames.insert(0, f"  [… {left} outer frames …]")
    said = held(f"{death.exception}: {death.message or ''}".rstrip(": "), max(room // 2, 200))
    return _block(lead, held("\n".join(frames), max(room // 3, 200)) + f"\n{said}", room, "text")


def _sent(report: RunReport) -> list[str]:
    requests = next((arm.requests for arm in report.arms if arm.requests), ())
    return [f"{number}. {cell(held(one, _SENTENCE))}" for number, one in enumerate(requests, 1)]


def _requests(report: RunReport, room: int) -> str:
    sent = _sent(report)
    return "Requests, in this order:\n\n" + _rows("\n".join(sent), room - 40) if sent else ""


def _cure(report: RunReport, room: int) -> str:
    """The change of vLLM's source with which the engine lived, where the run tried one."""
    arm = next((arm for arm in report.arms if arm.patches and arm.result.result is Result.QUIET), None)
    if arm is None or not report.failures:
        return ""
    did = report.failures[0][0].expected.did
    lead = f"With this change the engine lived ({code(held(arm.name, 60))}, 0 of {arm.result.conclusive} {did}):"
    return f"{lead}\n\n{fitted(lambda most: fence(held(diff_of(arm), most), 'diff'), room - size(lead) - 2)}"


# ── what is folded ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _details(report: RunReport, first: ArmReport | None, *, unfolded: bool, command: bool) -> list[tuple[str, Make]]:
    """unfolded: the requests stand above already. command: the lab's does not."""
    found: list[tuple[str, Make]] = []

    def fold(name: str, summary: str, make: Make) -> None:
        found.append((name, lambda room: _folded(summary, make, min(room, _TABLE))))

    if first is not None and command:
        fold(
            "the command",
            f"Command of {first.name} in the lab",
            lambda room: fence(held(first.command, room), "console"),
        )
    if first is not None and first.differences:
        lines = [f"- {cell(held(text, _SENTENCE))}" for text in first.differences]
        heading = (
            f"How the lab's command differs ({len(lines)})"
            if command
            else f"How that command differs from the reported one ({len(lines)})"
        )
        fold("the differences from the report", heading, lambda room: _rows("\n".join(lines), room))
    if arms := "\n".join(_arm(arm, first) for arm in report.arms if arm.trials):
        fold(
            "the boundary in each arm",
            "All evidence of the boundary, and what each arm changes",
            lambda room: _rows(arms, room),
        )
    if not unfolded and (sent := _sent(report)):
        fold("the requests", f"Requests ({len(sent)})", lambda room: _rows("\n".join(sent), room))
    for section in (
        patched_section(report),
        speed_section(report.measured, rehearsal=report.rehearsal),
        soak_section(report.measured),
        replaced_section(report),
    ):
        heading, _, text = section.partition("\n\n")
        if text:
            summary = heading.removeprefix("## ")
            fold(summary, summary, partial(_whole, text))
    return found


def _whole(text: str, _: int) -> str:
    """What can be shown only whole."""
    return text


def _arm(arm: ArmReport, first: ArmReport | None) -> str:
    edits = " and ".join(code(held(edit, 200)) for edit in arm.edits[:6]) if arm is not first else ""
    why = f": {cell(held(arm.why, 300))}" if arm.why else ""
    seen = "; ".join(
        f"trial {trial.number} {'crossed' if trial.trigger.crossed else 'not crossed'} "
        f"({cell(held('; '.join(trial.trigger.evidence), _SENTENCE))})"
        for trial in arm.trials[:3]
    )
    return f"- {code(held(arm.name, 60))}{' ' + edits if edits else ''}{why}. {seen}."


def _log(log: LogPieces, room: int) -> str:
    heading = f"{log.name}: {log.size:,} bytes, its start, first error and end"
    return _folded(heading, lambda most: fence(excerpt(log, most), "text"), room)


def _folded(summary: str, make: Make, room: int) -> str:
    # The empty lines end the HTML, so that what lies between is Markdown again.
    head, tail = f"<details><summary>{html(held(summary, 200))}</summary>\n\n", "\n\n</details>"
    text = fitted(make, room - size(head) - size(tail))
    return f"{head}{text}{tail}" if text else ""


def _block(lead: str, text: str, room: int, language: str = "console") -> str:
    return f"{lead}\n\n{fitted(lambda most: fence(held(text, most), language), room - size(lead) - 2)}"


def _rows(text: str, room: int) -> str:
    """As many lines as there is room for; the rest is counted."""
    lines = text.split("\n")
    while len(lines) > 1 and size("\n".join(lines)) > room - 40:
        lines = lines[: max(1, len(lines) * 7 // 8)]
    left = text.count("\n") + 1 - len(lines)
    return "\n".join(lines) + (f"\n\nand {left} more" if left else "")


def _footer(report: RunReport) -> str:
    return (
        f"<sub>Made by vllm-repro {cell(held(report.harness_version, 40))} from the journal of one run; a person sends it. "
        "Keys, user names, hosts and addresses are words in brackets.</sub>"
    )
