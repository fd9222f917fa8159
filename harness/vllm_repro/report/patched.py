"""The section of a report that shows each change of vLLM's own source. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from vllm_repro.report.escape import cell, code, fence
from vllm_repro.report.model import ArmReport, RunReport
from vllm_repro.scenario.patch import Patch

__all__ = ["changed_files", "diff_of", "patched_section", "untried_in"]


def changed_files(report: RunReport) -> list[str]:
    """`reported, eager: vllm/a.py`, for the arms that did not run vLLM as released: once for those that change the same files."""
    arms: dict[tuple[str, ...], list[str]] = {}
    for arm in report.arms:
        if arm.patches:
            arms.setdefault(tuple(dict.fromkeys(patch.file for patch in arm.patches)), []).append(arm.name)
    return [f"{', '.join(names)}: {', '.join(files)}" for files, names in arms.items()]


def patched_section(report: RunReport) -> str:
    """The changes of each arm as a diff, with the hashes of the files that its server loaded; empty where vLLM is as released."""
    arms = [arm for arm in report.arms if arm.patches]
    return "\n\n".join(("## Changes of vLLM's source", *map(_arm, arms))) if arms else ""


def _arm(arm: ArmReport) -> str:
    whys = dict.fromkeys(patch.why for patch in arm.patches if patch.why)
    text = code(arm.name) + (f": {cell('; '.join(whys))}" if whys else "")
    text += "\n\n" + fence(diff_of(arm), "diff")
    loaded = arm.server.get("patched") or ()
    hashes = [
        f"- {code(changed['file'])} sha256 {code(changed['sha256'])}{_inside(changed)}{cell(''.join(untried_in(changed)))}"
        for changed in loaded
    ]
    return text + (
        "\n\nAs the server's own process found them:\n\n" + "\n".join(hashes) if hashes else "\n\nNo server loaded it."
    )


def diff_of(arm: ArmReport) -> str:
    """What is changed for `arm`, as a diff without line numbers."""
    return "\n".join(line for patch in arm.patches for line in _diff(patch))


def _inside(changed: Mapping[str, Any]) -> str:
    place = changed.get("inside")
    return f"; the same hash was read in the running container, of {code(place)}" if place else ""


def untried_in(changed: Mapping[str, Any]) -> list[str]:
    """What of a changed file cannot have run, each as the end of a line."""
    said = []
    if not changed.get("imported", True):
        said.append("; no process of the server imported it, so its change was not tried")
    if names := changed.get("untried"):
        said.append(f"; the lab runs something else for {', '.join(names)}, so that change was not tried")
    return said


def _diff(patch: Patch) -> list[str]:
    lines = difflib.unified_diff(
        patch.was.splitlines(), patch.now.splitlines(), f"a/{patch.file}", f"b/{patch.file}", lineterm=""
    )
    return [line for line in lines if not line.startswith("@@")]
