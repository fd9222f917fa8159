"""Flags of a command that a release does not have, before a boot is spent on finding out.

An old recipe or a typo makes vLLM's argument parser exit at once. That says nothing about the bug, so it must
not look like a crash at boot. The table behind this (`vllm_repro.command.flag_table`) is not complete and does not
pretend to be: a flag that it lacks is only noted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from packaging.version import InvalidVersion, Version

from vllm_repro.command import flag_table
from vllm_repro.command.flag_syntax import Flag, is_switch, positive
from vllm_repro.errors import UsageError

if TYPE_CHECKING:
    from vllm_repro.command.command import ServeCommand

__all__ = ["FlagNote", "Known", "NoteLevel", "known_flags", "unknown_flags"]

_SHORT_NAME = 10
"""Names up to this length, dashes included, are close to each other by chance: only one edit makes them
alike."""


class NoteLevel(StrEnum):
    REFUSED = "refused"  # the release's parser will exit
    TYPO = "typo"  # probably so: one or two edits away from a flag that exists
    UNLISTED = "unlisted"  # the table does not know


class FlagNote(NamedTuple):
    """flag: canonical. near: what was probably meant or replaces it, empty if nothing does. why: a phrase for
    people."""

    flag: str
    near: str
    why: str
    level: NoteLevel

    def __str__(self) -> str:
        return f"{self.flag}: {self.why}"


@dataclass(frozen=True)
class Known:
    """What is known of a flag's life: lacked by `absent_to` (and before), present in `since`, gone in
    `gone_by` (and after)."""

    since: Version | None = None
    absent_to: Version | None = None
    gone_by: Version | None = None

    def refused_by(self, version: Version) -> str | None:
        """Why a release does not have the flag; None if it has it, or if that was not looked up."""
        # A nightly carries what main has, which is more than the last release had and less than the next one.
        nightly = version.is_devrelease or version.local is not None
        if self.gone_by is not None and _minor(version) >= _minor(self.gone_by):
            return f"removed in {self.gone_by}"
        if self.absent_to is None or self.since is None:
            return None
        if nightly:
            return f"not there before {self.since}" if _next_minor(version) <= _minor(self.absent_to) else None
        return f"not there before {self.since}" if _base(version) <= self.absent_to else None


@cache
def known_flags() -> Mapping[str, Known]:
    """By canonical name (`--max-model-len`), without `--no-` forms."""
    known = {f"--{name}": Known() for name in flag_table.SEEN_THROUGHOUT.split()}
    for (lacking, having), names in flag_table.FIRST_SEEN.items():
        known |= {f"--{name}": Known(Version(having), Version(lacking)) for name in names.split()}
    for release, names in flag_table.ADDED.items():
        first = Version(release)
        # The release before it, whatever its last patch was called.
        before = Version(f"{first.major}.{first.minor - 1}.999")
        known |= {f"--{name}": Known(first, before) for name in names.split()}
    for release, names in flag_table.REMOVED.items():
        known |= {f"--{name}": Known(gone_by=Version(release)) for name in names.split()}
    return known


def unknown_flags(command: ServeCommand, version: str | None) -> list[FlagNote]:
    """Flags that the release refuses, that look mistyped, that lack their value, or that the table does not
    list, in the command's order.

    version: as the server reports it (`0.23.0`, `0.20.2rc1.dev35+g4845aee6b`), None when it is not known yet.
    `UsageError` if it is no version.
    """
    try:
        release = Version(version.removeprefix("v")) if version is not None else None
    except InvalidVersion:
        raise UsageError(f"{version!r} is not a vLLM version", hint="write it as 0.23.0") from None
    notes = (_note(flag.name, release) or _without_value(flag) for flag in command.flags)
    return [note for note in notes if note is not None]


def _note(name: str, release: Version | None) -> FlagNote | None:
    known = known_flags()
    head = name.partition(".")[0]
    base = head if head in known else positive(head)
    replacement = flag_table.NEVER_DEFINED.get(base[2:])
    if replacement is not None:
        instead = f"write {replacement}" if replacement else "leave it out"
        return FlagNote(
            name,
            replacement,
            f"not defined in any release from 0.19.1 to 0.32.0: {instead}",
            NoteLevel.REFUSED,
        )
    if base in known and (base == head or is_switch(base)):
        why = known[base].refused_by(release) if release is not None else None
        return FlagNote(name, "", why, NoteLevel.REFUSED) if why else None
    if base in known:
        return FlagNote(name, "", f"{base} is not known to have a --no- form", NoteLevel.UNLISTED)
    near = _nearest(base, known)
    if near:
        near = near if base == head else f"--no-{near[2:]}"
        return FlagNote(name, near, f"probably a typo of {near}", NoteLevel.TYPO)
    return FlagNote(name, "", "not known to this table", NoteLevel.UNLISTED)


def _without_value(flag: Flag) -> FlagNote | None:
    takes_one = flag.name in known_flags() and not is_switch(flag.name)
    if flag.value is not None or not takes_one or flag.name in flag_table.VALUE_OPTIONAL:
        return None
    return FlagNote(flag.name, "", "has no value", NoteLevel.REFUSED)


def _nearest(name: str, known: Mapping[str, Known]) -> str:
    limit = 1 if len(name) <= _SHORT_NAME else 2
    distances = ((_distance(name, other, limit), other) for other in known)
    close = sorted((distance, other) for distance, other in distances if distance <= limit)
    return close[0][1] if close else ""


def _distance(a: str, b: str, limit: int) -> int:
    """Edits (insert, delete, replace, swap of neighbours) from `a` to `b`; some number over `limit` where
    there are more."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        current = [i]
        for j, y in enumerate(b, 1):
            cost = min(row[j] + 1, current[j - 1] + 1, row[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            current.append(cost)
        before, row = row, current
    return row[-1]


def _minor(version: Version) -> tuple[int, int]:
    return version.major, version.minor


def _next_minor(version: Version) -> tuple[int, int]:
    return version.major, version.minor + 1


def _base(version: Version) -> Version:
    return Version(version.base_version)
