"""The releases at which a declared status changes, and those that were run, in one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_repro.scenario.scenario import Status
from vllm_repro.verdict.outcome import Tone
from vllm_repro.verdict.verdict import Standing, same_release

__all__ = ["Seen", "StripRelease", "version_strip"]

_DECLARED: Mapping[Standing, tuple[str, Tone]] = {
    Standing.BAD: ("declared bad", "bad"),
    Standing.GOOD: ("declared good", "good"),
    Standing.UNKNOWN: ("not declared", "dull"),
}

Seen = tuple[str, Tone]
"""What a release did, in a word or two, and its colour."""


@dataclass(frozen=True, kw_only=True)
class StripRelease:
    """One release. declared, seen: words and colour; seen is None if it was not run."""

    version: str
    declared: Seen
    seen: Seen | None


def version_strip(status: Status, seen: Mapping[str, Seen]) -> list[StripRelease]:
    """Return the releases in order. seen: by release, those that were run."""
    bounds = (part.version for part in (*SpecifierSet(status.bad), *SpecifierSet(status.good)))
    unseen = [bound for bound in dict.fromkeys(bounds) if not any(same_release(bound, one) for one in seen)]
    return [
        StripRelease(version=one, declared=_DECLARED[status.standing(one)], seen=seen.get(one))
        for one in sorted((*unseen, *seen), key=_place)
    ]


def _place(version: str) -> tuple[bool, Version]:
    """Return the place of a version; one that is no version number comes last."""
    try:
        return False, Version(version)
    except InvalidVersion:
        return True, Version("0")
