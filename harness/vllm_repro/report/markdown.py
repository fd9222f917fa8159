"""The report of a run as Markdown: verdict, arms, evidence, crash, commands, environment."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_repro.report.format import limited
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, issue_url
from vllm_repro.report.patches import patches_section
from vllm_repro.report.source_changes import patched_section, replaced_section
from vllm_repro.report.tables import arms_table, counters_section, throughput_section
from vllm_repro.report.text import cell, code, fence, markdown_table, plain, shorten
from vllm_repro.report.wording import (
    crash_summary,
    crossed_word,
    details,
    expected_words,
    first_of_each,
    notices,
    plain_sentence,
)
from vllm_repro.verdict.outcome import Death
from vllm_repro_diagnosis.evidence import banner, simulated

__all__ = ["environment_lines", "environment_list", "markdown", "request_lines", "root_traceback", "senders"]

_MESSAGE, _REQUEST, _MOST_LINES = 8_000, 700, 40
"""Most bytes of an engine's text and of a request, and most lines of a list. `report.json` has all of it."""


def markdown(report: RunReport) -> str:
    """Return `report.md`."""
    sections = [
        *_summary(report),
        markdown_table(arms_table(report)),
        patches_section(report),
        f"Trigger: {code(report.trigger)}. Declared: {cell(report.status)}.",
        *[_death(arm, trial) for arm, trial in report.failures if trial.death][:1],
        "## Evidence of the boundary",
        "\n".join(_evidence(arm) for arm in report.arms if arm.trials),
        throughput_section(report.measured),
        counters_section(report),
        _requests(report),
        _commands(report),
        patched_section(report),
        replaced_section(report),
        _infra(report),
        f"## Environment\n\n{environment_list(report)}",
        f"## Again\n\n{fence(report.reproduce, 'console')}",
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _summary(report: RunReport) -> list[str]:
    parts = [f"# {report.scenario}: {report.verdict.verdict}{simulated(report.evidence)}"]
    if notice := banner(report.evidence, report.version):
        parts.append(f"> **{notice}**")
    parts += [f"> **{cell(text)}.**" for text in notices(report)]
    parts.append(f"{plain(report.title)} ([{report.issue}]({issue_url(report.issue)})).")
    parts.append(f"**{plain(plain_sentence(report))}.**")
    verdict = f"**{report.verdict.verdict}** ({expected_words(report.verdict.expected)})"
    parts.append(f"{verdict}: {cell(report.verdict.because)}.")
    parts += [plain(text) + "." for text in details(report)]
    for _, trial in report.failures[:1]:
        if trial.death is None or trial.death.exception:
            parts.append(f"Cause: {code(shorten(trial.why, _MESSAGE))}")
    return parts


def _death(arm: ArmReport, trial: TrialReport) -> str:
    death = trial.death
    assert death is not None
    text = f"## The crash in {code(arm.name)}\n\n{cell(crash_summary(trial))}\n\n"
    if not death.exception:
        return text + plain(shorten(trial.why, _MESSAGE))
    return text + fence(root_traceback(death, 15, _MESSAGE), "text")


def root_traceback(death: Death, frames: int, limit: int) -> str:
    """Return the innermost `frames` and the exception, each in at most `limit` bytes."""
    lines = [f"  {frame}" for frame in death.frames[-frames:]]
    if outer := len(death.frames) - len(lines):
        lines.insert(0, f"  [… {outer} outer frames …]")
    message = f"{death.exception}: {death.message or ''}".rstrip(": ")
    return "\n".join((shorten("\n".join(lines), limit), shorten(message, limit)))


def _evidence(arm: ArmReport) -> str:
    lines = []
    shown, more = first_of_each(arm.trials)
    for trial in shown:
        parts = [
            f"- {code(arm.name)}, trial {trial.number}: {crossed_word(trial)}",
            cell(shorten("; ".join(trial.trigger.evidence), _MESSAGE)),
            f"Boot: {cell(trial.boot)}" if trial.boot else "",
            f"Logs by rank: {', '.join((trial.log, *trial.rank_logs))}" if trial.rank_logs else "",
        ]
        lines.append(". ".join(filter(None, parts)) + ".")
    lines += [f"- {code(arm.name)}: {text}." for text in more]
    return "\n".join(lines)


def senders(report: RunReport) -> dict[tuple[str, ...], list[str]]:
    """Return the requests, each list with the names of the arms that sent it."""
    found: dict[tuple[str, ...], list[str]] = {}
    for arm in report.arms:
        if arm.requests:
            found.setdefault(arm.requests, []).append(arm.name)
    return found


def _requests(report: RunReport) -> str:
    parts = []
    for requests, names in senders(report).items():
        lines = limited(request_lines(requests), _MOST_LINES)
        parts.append(f"{', '.join(map(code, names))}:\n\n" + "\n".join(lines))
    return "\n\n".join(("## Requests", *parts)) if parts else ""


def request_lines(requests: Sequence[str]) -> list[str]:
    return [f"{number}. {cell(shorten(request, _REQUEST))}" for number, request in enumerate(requests, 1)]


def _commands(report: RunReport) -> str:
    arms = [arm for arm in report.arms if arm.command]
    parts = [_whole_command(arm) for arm in arms[:1]] + [_changed_command(arm, arms[0]) for arm in arms[1:]]
    return "\n\n".join(("## Commands", *parts))


def _whole_command(arm: ArmReport) -> str:
    text = f"{code(arm.name)}{_why(arm)}\n\n" + fence(arm.command, "console")
    if arm.server.digest:
        text += f"\n\nImage {code(str(arm.server.image))}, digest {code(arm.server.digest)}."
    if arm.differences:
        text += "\n\nNot as reported:\n" + "\n".join(f"- {cell(difference)}" for difference in arm.differences)
    return text


def _changed_command(arm: ArmReport, first: ArmReport) -> str:
    edits = " and ".join(code(edit) for edit in arm.edits) or "with other requests"
    return f"{code(arm.name)}{_why(arm)}\n\nAs {code(first.name)}, {edits}."


def _why(arm: ArmReport) -> str:
    return f": {cell(arm.why)}" if arm.why else ""


def _infra(report: RunReport) -> str:
    if not report.infra:
        return ""
    lines = limited([cell(shorten(text, _MESSAGE)) for text in report.infra], _MOST_LINES)
    return "## Trouble of the host\n\n" + "\n".join(f"- {line}" for line in lines)


def environment_list(report: RunReport) -> str:
    return "\n".join(f"- {cell(line)}" for line in environment_lines(report))


def environment_lines(report: RunReport) -> list[str]:
    """Return what the run was made on, as plain text."""
    machine = report.environment
    cards = ", ".join(f"{gpu.name} ({gpu.memory_gb:g} GB)" for gpu in machine.gpus) or "none"
    weights = dict.fromkeys(arm.server.weights for arm in report.arms if arm.server.weights)
    return [
        f"vLLM {report.version or 'unknown'}, evidence: {report.evidence}",
        f"{machine.os}, {machine.cpus} CPUs, {machine.memory_gb:g} GB, Python {machine.python}",
        f"GPUs: {cards}" + (f", driver {machine.driver}" if machine.driver else ""),
        *(f"Weights: {served}" for served in weights),
        *([f"Docker {machine.docker}"] if machine.docker else []),
        f"vllm-repro {report.harness_version}, started {report.started_at}, took {report.duration_s:.0f} s",
    ]
