"""The run as Markdown: verdict first, then the arms, the proof, the death, the commands, the environment."""

from __future__ import annotations

from vllm_repro.report.budget import held
from vllm_repro.report.escape import cell, code, fence, plain
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, banner
from vllm_repro.report.patched import changed_files, patched_section
from vllm_repro.report.replaced import replaced_section
from vllm_repro.report.speed import soak_section, speed_section
from vllm_repro.report.table import arms_table
from vllm_repro.report.wording import death_line, expected_words, few, outlasted_line, refusals, simulated, telling

__all__ = ["environment_lines", "environment_list", "markdown", "senders"]

_MESSAGE, _LINES = 8_000, 40
"""Most bytes of a text that an engine printed, and most lines of a list: `report.json` has all of it."""


def markdown(report: RunReport) -> str:
    parts = [f"# {report.scenario}: {report.verdict.verdict}{simulated(report.evidence)}"]
    if notice := banner(report.evidence, report.version):
        parts.append(f"> **{notice}**")
    if changed := changed_files(report):
        parts.append(f"> **With vLLM's source changed, as shown below, in {cell('; '.join(changed))}.**")
    if report.shortfall:
        parts.append(f"> **{report.shortfall}. What follows is what the journal holds.**")
    parts.append(
        f"{plain(report.title)} ([{report.issue}]({report.issue_url})), vLLM {report.version or 'of unknown version'}."
    )
    parts.append(
        f"**{report.verdict.verdict}** ({expected_words(report.verdict.expected)}): {cell(report.verdict.because)}."
    )
    parts += [plain(text) + "." for text in (*report.comparisons, *refusals(report.arms))]
    for _, trial in report.failures[:1]:
        if trial.death is None or trial.death.exception:
            parts.append(f"Cause: {code(held(trial.why, _MESSAGE))}")
    parts.append(arms_table(report))
    parts.append(f"Trigger: {code(report.trigger)}. Declared: {cell(report.status)}.")
    parts += [_death(arm, trial) for arm, trial in report.deaths[:1]]
    parts.append("## Proof that the boundary was crossed, or not")
    parts.append("\n".join(_proof(arm) for arm in report.arms if arm.trials))
    if speed := speed_section(report.measured, rehearsal=report.rehearsal):
        parts.append(speed)
    if soak := soak_section(report.measured):
        parts.append(soak)
    if any(arm.requests for arm in report.arms):
        parts.append("## Requests")
        parts.append(_requests(report))
    parts.append("## Commands")
    first = next((arm for arm in report.arms if arm.command), None)
    parts += [_command(arm, None if arm is first else first) for arm in report.arms if arm.command]
    if patched := patched_section(report):
        parts.append(patched)
    if replaced := replaced_section(report):
        parts.append(replaced)
    if report.infra:
        troubles = few([cell(held(text, _MESSAGE)) for text in dict.fromkeys(report.infra)], _LINES)
        parts.append("## Trouble of the host\n\n" + "\n".join(f"- {text}" for text in troubles))
    parts.append("## Environment")
    parts.append(environment_list(report))
    parts.append("## Again")
    parts.append(fence(report.reproduce, "console"))
    return "\n\n".join(parts) + "\n"


def _death(arm: ArmReport, trial: TrialReport) -> str:
    death = trial.death
    assert death is not None
    said = " ".join(filter(None, (death_line(trial), outlasted_line(trial))))
    parts = [f"## The death in {code(arm.name)}", cell(said)]
    if death.exception:
        frames = "\n".join(f"  {frame}" for frame in death.frames[-15:])
        parts.append(fence(f"{frames}\n{held(f'{death.exception}: {death.message}', _MESSAGE)}", "text"))
    else:
        parts.append(plain(held(trial.why, _MESSAGE)))
    return "\n\n".join(parts)


def _proof(arm: ArmReport) -> str:
    lines = []
    shown, rest = telling(arm.trials)
    for trial in shown:
        crossed = "crossed" if trial.trigger.crossed else "not crossed"
        boot = f" Boot: {cell(trial.boot)}." if trial.boot else ""
        evidence = "; ".join(trial.trigger.evidence)
        lines.append(
            f"- {code(arm.name)}, trial {trial.number}: {crossed}. {cell(held(evidence, _MESSAGE))}.{boot}{_logs(trial)}"
        )
    lines += [f"- {code(arm.name)}: {text}." for text in rest]
    return "\n".join(lines)


def _logs(trial: TrialReport) -> str:
    """Of a server over several nodes: the log of each."""
    return f" Logs by rank: {', '.join((trial.log, *trial.rank_logs))}." if trial.rank_logs else ""


def senders(report: RunReport) -> dict[tuple[str, ...], list[str]]:
    """What was sent, each with the names of the arms that sent just that."""
    found: dict[tuple[str, ...], list[str]] = {}
    for arm in report.arms:
        if arm.requests:
            found.setdefault(arm.requests, []).append(arm.name)
    return found


def _requests(report: RunReport) -> str:
    lines = []
    for requests, names in senders(report).items():
        lines.append(f"{', '.join(map(code, names))}:\n")
        lines += few([f"{number}. {cell(request)}" for number, request in enumerate(requests, 1)], _LINES)
        lines.append("")
    return "\n".join(lines).rstrip()


def _command(arm: ArmReport, first: ArmReport | None) -> str:
    """The command in full, or what it changes of the first arm's."""
    why = f": {cell(arm.why)}" if arm.why else ""
    if first is not None:
        return (
            f"{code(arm.name)}{why}\n\nAs {code(first.name)}, "
            + (" and ".join(code(edit) for edit in arm.edits) if arm.edits else "with other requests")
            + "."
        )
    text = f"{code(arm.name)}{why}\n\n" + fence(arm.command, "console")
    if arm.server.get("digest"):
        text += f"\n\nImage {code(str(arm.server['image']))}, digest {code(arm.server['digest'])}."
    if arm.differences:
        text += "\n\nNot as reported:\n" + "\n".join(f"- {cell(difference)}" for difference in arm.differences)
    return text


def environment_list(report: RunReport) -> str:
    """Markdown of `environment_lines`."""
    return "\n".join(f"- {cell(line)}" for line in environment_lines(report))


def environment_lines(report: RunReport) -> list[str]:
    """What it ran on, as plain text."""
    environment = report.environment
    cards = ", ".join(f"{gpu['name']} ({gpu['memory_gb']:g} GB)" for gpu in environment["gpus"]) or "none"
    lines = [
        f"vLLM {report.version or 'unknown'}, evidence: {report.evidence}",
        f"{environment['os']}, {environment['cpus']} CPUs, {environment['memory_gb']:g} GB, Python {environment['python']}",
        f"GPUs: {cards}" + (f", driver {environment['driver']}" if environment["driver"] else ""),
    ]
    lines += [f"Weights: {weights}" for weights in _served(report)]
    if environment["docker"]:
        lines.append(f"Docker {environment['docker']}")
    lines.append(f"vllm-repro {report.harness_version}, started {report.started_at}, took {report.duration_s:.0f} s")
    return lines


def _served(report: RunReport) -> list[str]:
    return list(dict.fromkeys(weights for arm in report.arms if (weights := arm.server.get("weights"))))
