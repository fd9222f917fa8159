"""Releases of vLLM, and those of them with a CPU build, in `known.json`.

make known-releases     # read them again from the package index that pip is configured with
"""

from __future__ import annotations

import json
import subprocess
import sys
from bisect import bisect
from pathlib import Path

from packaging.version import Version

from vllm_repro.errors import UsageError
from vllm_repro.releases.versions import DISTRIBUTION, OLDEST

__all__ = ["CPU_BUILDS", "NEWEST", "RELEASES", "nearest_cpu_build", "refuse_unpublished"]

_FILE = Path(__file__).with_name("known.json")
_KNOWN: dict[str, list[str]] = json.loads(_FILE.read_text(encoding="utf-8"))

RELEASES = tuple(_KNOWN["vllm"])
"""Releases that the harness supports, oldest first."""

CPU_BUILDS = tuple(_KNOWN[DISTRIBUTION])
NEWEST = RELEASES[-1]


def refuse_unpublished(version: str) -> None:
    """Raise `UsageError` for a final release that was never published. Newer ones than the list, and older ones, pass."""
    known, wanted = [*map(Version, RELEASES)], Version(version)
    if wanted in known or not known[0] < wanted < known[-1] or wanted.is_prerelease or wanted.is_postrelease:
        return
    place = bisect(known, wanted)
    raise UsageError(
        f"there is no vLLM {version}", hint=f"the releases next to it are {known[place - 1]} and {known[place]}"
    )


def nearest_cpu_build(version: str) -> str:
    """Return the newest CPU build that is not newer than `version`, or the oldest one."""
    return next((build for build in reversed(CPU_BUILDS) if Version(build) <= Version(version)), CPU_BUILDS[0])


def _published(name: str) -> list[str]:
    """Return the releases of a package on the index, oldest first, without pre- and post-releases."""
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = next(line for line in printed.splitlines() if line.startswith("Available versions: "))
    found = {Version(word) for word in line.partition(": ")[2].split(", ")}
    return [str(one) for one in sorted(found) if one.release[:2] >= OLDEST and not one.is_postrelease]


if __name__ == "__main__":
    known = {name: _published(name) for name in ("vllm", DISTRIBUTION)}
    lines = [f" {json.dumps(name)}: {json.dumps(releases)}" for name, releases in known.items()]
    _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
