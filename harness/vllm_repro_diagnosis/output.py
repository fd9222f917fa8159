"""A diagnosis as lines for people, and as values for JSON."""

from __future__ import annotations

from vllm_repro_diagnosis.evidence import banner, facts_of
from vllm_repro_diagnosis.judgement import Diagnosis

_MOST_FRAMES = 12
_DIED = {True: "died", False: "did not die", None: "cannot tell"}


def as_lines(diagnosis: Diagnosis) -> list[str]:
    """Return the lines to print: verdict, release and phase, the last frames, the exception."""
    lines = [f"{_DIED[diagnosis.died]}: {diagnosis.why}"]
    if facts_of(diagnosis.evidence).simulated:
        lines.insert(0, banner(diagnosis.evidence, diagnosis.vllm_version))
    if diagnosis.vllm_version:
        phase = f", phase: {diagnosis.phase}" if diagnosis.phase else ""
        lines.append(f"vLLM {diagnosis.vllm_version}{phase}")
    if diagnosis.exception:
        frames = diagnosis.frames[-_MOST_FRAMES:]
        lines += [f"  {frame.file}:{frame.function}" for frame in frames]
        lines.append(f"{diagnosis.exception}: {diagnosis.message or ''}".rstrip(": "))
    return lines


def as_values(diagnosis: Diagnosis) -> dict[str, object]:
    """Return what JSON output holds."""
    return {
        "evidence": diagnosis.evidence,
        "died": diagnosis.died,
        "phase": diagnosis.phase,
        "exception": diagnosis.exception,
        "message": diagnosis.message,
        "frames": [f"{frame.file}:{frame.function}" for frame in diagnosis.frames],
        "wrapped": diagnosis.root is not None and diagnosis.root.wrapped,
        "vllm_version": diagnosis.vllm_version,
        "why": diagnosis.why,
    }
