"""The section of a report that names each part of vLLM that did not run as it was written. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_repro.report.escape import cell, code
from vllm_repro.report.model import RunReport

__all__ = ["replaced_section"]


def replaced_section(report: RunReport) -> str:
    """A table of the replaced names, the same for all arms; empty where vLLM ran whole."""
    parts: Sequence[Mapping[str, str]] = next(
        (arm.server["replaced"] for arm in report.arms if arm.server.get("replaced")), ()
    )
    if not parts:
        return ""
    rows = ["| replaced | why | effect on the bug |", "|---|---|---|"]
    rows += [
        f"| {code(part['name'], in_table=True)} | {cell(part['why'])} | {cell(part['effect'])} |" for part in parts
    ]
    files = {part["file"]: part["sha256"] for part in parts}
    hashes = "\n".join(f"- {code(file)} sha256 {code(digest)}" for file, digest in files.items())
    return (
        "## LAB: what was replaced\n\n" + "\n".join(rows) + f"\n\nIn the files, as this release has them:\n\n{hashes}"
    )
