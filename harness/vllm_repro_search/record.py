"""Shared part of the records of all searches, and their page in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_repro.report.model import issue_url
from vllm_repro.report.text import fence
from vllm_repro_diagnosis.evidence import banner, simulated

__all__ = ["SearchRecord", "page"]


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """A search that boots servers, perhaps unfinished.

    status: what the scenario declares. evidence: None if no server ever started. stopped: the limit or signal that ended it early.
    """

    scenario: str
    issue: str
    title: str
    status: Mapping[str, Any]
    arm: str
    server: str
    evidence: str | None
    harness_version: str
    started_at: str
    duration_s: float
    reproduce: str
    stopped: str | None = None

    @property
    def boots(self) -> Sequence[object]:
        raise NotImplementedError

    @property
    def exit_status(self) -> int:
        """Return 0 for an answer, 1 for a surprise, 2 if undecided."""
        raise NotImplementedError


def page(found: SearchRecord, heading: str, reading: str, parts: Iterable[str], *, version: str | None) -> str:
    """Return a record as Markdown. reading: the answer, in Markdown. parts: paragraphs below it. version: empty if there are several."""
    evidence = found.evidence or ""
    paragraphs = [f"# {found.scenario}: {heading}{simulated(evidence)}"]
    if notice := banner(evidence, version):
        paragraphs.append(f"> **{notice}**")
    if found.stopped:
        paragraphs.append(f"> **Stopped by {found.stopped}: this is what was known then.**")
    paragraphs.append(
        f"{found.title} ([{found.issue}]({issue_url(found.issue)})). {f'Arm: {found.arm}.' if found.arm else ''}".rstrip()
    )
    paragraphs += [reading, *parts]
    server = "Server" if version == "" else f"vLLM: {version or 'unknown'}, server"
    paragraphs.append(
        f"{server}: {found.server}, evidence: {found.evidence or 'none'}. vllm-repro {found.harness_version}, "
        f"started {found.started_at}, took {found.duration_s:.0f} s."
    )
    paragraphs.append(fence(found.reproduce, "console"))
    return "\n\n".join(paragraphs) + "\n"
