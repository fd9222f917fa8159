"""Patches of vLLM's source, declared in a scenario or read from a diff.

A patch replaces a text that occurs once in a file. So it fits releases in which the lines have
moved, and is refused for releases without that text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vllm_repro.errors import Unsupported, UsageError


@dataclass(frozen=True)
class Patch:
    """Replacement of one text in a file of vLLM.

    Raises `ValueError` for a file that is no Python file below `vllm/`, or if it changes nothing.
    """

    # Such as "vllm/v1/core/block_pool.py".
    file: str
    # Text to replace. It must occur once.
    was: str
    # Text in its place.
    now: str
    # Reason for the report.
    why: str = ""
    # `was` is whole lines, as in a diff.
    lines: bool = False

    def __post_init__(self) -> None:
        path = PurePosixPath(self.file)
        if (
            path.is_absolute()
            or ".." in path.parts
            or path.parts[:1] != ("vllm",)
            or path.suffix != ".py"
        ):
            raise ValueError(
                f"{self.file!r} is no file of vLLM's, such as 'vllm/v1/core/block_pool.py'"
            )
        if not self.was or self.was == self.now:
            raise ValueError(f"the change of {self.file} changes nothing")

    def __str__(self) -> str:
        return f"patched {self.file}"

    def apply(self, text: str) -> str:
        """Return the text of the file with the replacement made.

        Raises `Unsupported` unless it contains `was` exactly once.
        """
        starts = [
            place.start()
            for place in re.finditer(("(?m)^" if self.lines else "") + re.escape(self.was), text)
        ]
        count = len(starts)
        if count != 1:
            times = "nowhere" if not count else f"{count} times"
            first = next(line for line in self.was.splitlines() if line.strip()).strip()
            raise Unsupported(
                f"the patch does not fit this release: {self.file} has the text of"
                f" {self.why or 'the change'} {times}; it begins with {first!r}",
                hint="--vllm names a release that it was written for",
            )
        return text[: starts[0]] + self.now + text[starts[0] + len(self.was) :]


def read_diff(path: Path) -> tuple[Patch, ...]:
    """Return one patch for each hunk of a unified diff.

    Raises `UsageError` if it cannot be read, or does anything but change lines of Python files
    below `vllm/`.
    """
    from unidiff.errors import UnidiffParseError  # here: only --patch needs it
    from unidiff.patch import PatchSet

    name = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {name}: {error}", hint="name a unified diff, as git diff prints it"
        ) from error
    try:
        files = PatchSet(text)
    except UnidiffParseError as error:
        raise UsageError(
            f"{name} is no unified diff: {error}", hint="git diff > my-fix.diff"
        ) from error
    patches: list[Patch] = []
    for file in files:
        if file.is_added_file or file.is_removed_file or file.is_rename or file.is_binary_file:
            raise UsageError(
                f"{name} adds, removes or renames {file.path}, or changes one that is no text",
                hint="a patch here changes lines of files that are there",
            )
        for hunk in file:
            was, now = (
                "".join(line.value for line in lines)
                for lines in (hunk.source_lines(), hunk.target_lines())
            )
            try:
                patches.append(
                    Patch(
                        file.path,
                        was,
                        now,
                        f"hunk {len(patches) + 1} of {PurePosixPath(name).name}",
                        True,
                    )
                )
            except ValueError as error:
                raise UsageError(
                    f"{name}: {error}", hint="make the diff at the top of a vLLM checkout"
                ) from error
    if not patches:
        raise UsageError(
            f"{name} is no unified diff that changes anything", hint="git diff > my-fix.diff"
        )
    return tuple(patches)
