"""Releases that a search may name."""

from __future__ import annotations

from bisect import bisect

from packaging.version import Version

from vllm_repro.errors import UsageError
from vllm_repro.releases.known import RELEASES
from vllm_repro.releases.versions import release_version


def published_release(text: str) -> str:
    """Return the full number of a release: `v0.28` gives `0.28.0`, like `release_version`.

    Raises `UsageError` also for one that was never published.

    Only final releases between the oldest and the newest of the list are checked.
    """
    known, requested = [*map(Version, RELEASES)], Version(version := release_version(text))
    place = bisect(known, requested)
    if (
        requested not in known
        and 0 < place < len(known)
        and not requested.is_prerelease
        and not requested.is_postrelease
    ):
        hint = f"the releases next to it are {known[place - 1]} and {known[place]}"
        raise UsageError(f"there is no vLLM {version}", hint=hint)
    return version
