"""The report of a run as Markdown: verdict, arms, evidence, crash, commands, environment."""

from __future__ import annotations

from vllm_repro.report.document import plain_text
from vllm_repro.report.model import RunReport
from vllm_repro.report.patches import patches_table
from vllm_repro.report.source_changes import diff_of, how_to_apply, untried_note
from vllm_repro.report.tables import arms_table, counters_table, throughput_section
from vllm_repro.report.text import shorten
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
from vllm_repro_diagnosis.evidence import simulation_mark


def markdown(report: RunReport) -> str:
    """Return the report of a run as the text of `report.md`."""
    worst = next((trial for _, trial in report.failures), None)
    explained = worst is not None and (worst.death is None or worst.death.exception)
    text = plain_text(
        "report.md",
        report=report,
        title=f"{report.scenario}: {report.verdict}{simulation_mark(report.evidence)}",
        notices=notices(report),
        sentence=plain_sentence(report),
        expected=expected_words(report.as_expected),
        details=details(report),
        cause=worst if explained else None,
        arms=arms_table(report),
        patches=patches_table(report),
        crash=next((pair for pair in report.failures if pair[1].death), None),
        crash_summary=crash_summary,
        root_traceback=root_traceback,
        first_of_each=first_of_each,
        crossed_word=crossed_word,
        throughput=throughput_section(report),
        counters=counters_table(report.measured),
        senders=senders(report),
        commands=[arm for arm in report.arms if arm.command],
        how_to_apply=how_to_apply,
        diff_of=diff_of,
        untried_note=untried_note,
        environment=environment_lines(report),
    )
    return f"{text}\n"


def root_traceback(death: Death, frames: int, limit: int) -> str:
    """Return a death's innermost frames and exception, each part in at most `limit` bytes.

    frames: most frames.
    """
    lines = [f"  {frame}" for frame in death.frames[-frames:]]
    if outer := len(death.frames) - len(lines):
        lines.insert(0, f"  [… {outer} outer frames …]")
    message = f"{death.exception}: {death.message or ''}".rstrip(": ")
    return "\n".join((shorten("\n".join(lines), limit), shorten(message, limit)))


def senders(report: RunReport) -> dict[tuple[str, ...], list[str]]:
    """Return {requests: names of the arms that sent exactly these}."""
    senders: dict[tuple[str, ...], list[str]] = {}
    for arm in report.arms:
        if arm.requests:
            senders.setdefault(arm.requests, []).append(arm.name)
    return senders


def environment_lines(report: RunReport) -> list[str]:
    """Return what a run was made on, in lines: vLLM, machine, GPUs, weights, Docker."""
    machine = report.environment
    cards = ", ".join(f"{gpu.name} ({gpu.memory_gb:g} GB)" for gpu in machine.gpus) or "none"
    weights = dict.fromkeys(arm.server.weights for arm in report.arms if arm.server.weights)
    return [
        f"{report.release}, evidence: {report.evidence}",
        f"{machine.os}, {machine.cpus} CPUs, {machine.memory_gb:g} GB, Python {machine.python}",
        f"GPUs: {cards}" + (f", driver {machine.driver}" if machine.driver else ""),
        *(f"Weights: {served}" for served in weights),
        *([f"Docker {machine.docker}"] if machine.docker else []),
        (
            f"vllm-repro {report.harness_version}, started {report.started_at}, took"
            f" {report.duration_s:.0f} s"
        ),
    ]
