"""vLLM's own source: what patches change, and where a frame lies in a release."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from vllm_repro.report.json_report import PatchedFile
from vllm_repro.report.model import ArmReport, RunReport

_TAGGED = re.compile(r"(\d+\.\d+\.\d+(?:\.post\d+|rc\d+)?)(?:\+(?:cpu|cu\d+))?")
"""A version that vLLM's repository has a tag of."""


def changed_files(report: RunReport) -> list[str]:
    """Return a line for all arms that patch the same files: `reported, eager: vllm/a.py`."""
    arms: dict[tuple[str, ...], list[str]] = {}
    for arm in report.arms:
        if arm.patches:
            arms.setdefault(tuple(dict.fromkeys(patch.file for patch in arm.patches)), []).append(
                arm.name
            )
    return [f"{', '.join(names)}: {', '.join(files)}" for files, names in arms.items()]


def diff_of(arm: ArmReport) -> str:
    """Return the patches of an arm as a unified diff.

    Its line numbers are not those of the file, see `how_to_apply`.
    """
    return "\n".join(
        line for patch in arm.patches for line in _diff(patch.file, patch.was, patch.now)
    )


def whole_diff(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the diff of whole files as `git apply` takes it. before, after: texts by path."""
    lines = (
        line
        for file in after
        for line in difflib.unified_diff(
            before[file].splitlines(),
            after[file].splitlines(),
            f"a/{file}",
            f"b/{file}",
            lineterm="",
        )
    )
    return "\n".join(lines) + "\n"


def how_to_apply(arm: ArmReport) -> str:
    """Return how to apply an arm's diff, as a sentence without its full stop.

    Only a patch that was read from a diff is known to have whole lines.
    """
    if all(patch.lines for patch in arm.patches):
        return (
            "Apply it with `git apply --unidiff-zero`: its line numbers are not those of the file"
        )
    return "Apply it by hand: it may show parts of lines"


def _diff(file: str, was: str, now: str) -> Iterator[str]:
    """Yield the unified diff of one replaced text, with hunks that Git applies at any line."""
    lines = difflib.unified_diff(
        was.splitlines(), now.splitlines(), f"a/{file}", f"b/{file}", lineterm=""
    )
    for line in lines:
        # Git takes a hunk at line 1 only at the start of a file.
        yield re.sub(r"^@@ -(\d+)(,\d+)? \+(\d+)(,\d+)? @@$", _off_line_one, line)


def _off_line_one(hunk: re.Match[str]) -> str:
    """Return a hunk's header moved off line 1, which for Git is the start of a file only."""
    return f"@@ -{int(hunk[1]) + 1}{hunk[2] or ''} +{int(hunk[3]) + 1}{hunk[4] or ''} @@"


def untried_note(file: PatchedFile) -> str:
    """Return the end of a line about a patched file: changes that did not run; empty if all ran."""
    unimported = "; no process of the server imported it, so its change was not tried"
    replaced = (
        f"; the lab runs something else for {', '.join(file.untried)}, so that change was not tried"
    )
    return unimported * (file.imported is False) + replaced * bool(file.untried)


def frame_link(report: RunReport, arm: ArmReport, file: str, line: int) -> str:
    """Return the GitHub URL of a line in the release's source; of the file for line 0.

    Empty for all but unchanged files of a release.
    """
    release = _TAGGED.fullmatch(arm.server.vllm_version or report.vllm_version or "")
    released = (
        file.startswith("vllm/")
        and file.endswith(".py")
        and file not in {patch.file for patch in arm.patches}
    )
    if release is None or not released or report.rehearsal or arm.server.source:
        return ""
    return f"https://github.com/vllm-project/vllm/blob/v{release[1]}/{quote(file)}" + (
        f"#L{line}" if line else ""
    )
