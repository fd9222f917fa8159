"""Releases of vLLM, and those of them with a CPU build, in `known.json`.

make known-releases     # read them again from the package index that pip is configured with
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

from vllm_repro.releases.versions import DISTRIBUTION, OLDEST

_FILE = Path(__file__).with_name("known.json")
_KNOWN: dict[str, list[str]] = json.loads(_FILE.read_text(encoding="utf-8"))

RELEASES = tuple(_KNOWN["vllm"])
"""Releases that the harness supports, oldest first."""

CPU_BUILDS = tuple(_KNOWN[DISTRIBUTION])
"""Releases with a CPU build, oldest first."""
NEWEST = RELEASES[-1]


def nearest_cpu_build(version: str) -> str:
    """Return the newest release with a CPU build that is no newer than `version`.

    Return the oldest one if all are newer.
    """
    return next(
        (build for build in reversed(CPU_BUILDS) if Version(build) <= Version(version)),
        CPU_BUILDS[0],
    )


def compiled_parts(version: str | None) -> str | None:
    """Return the release whose compiled parts `version` uses on a CPU.

    None if `version` has a CPU build of its own, or is no known release.
    """
    known = version in RELEASES and version not in CPU_BUILDS
    return nearest_cpu_build(version) if version and known else None


def _published(name: str) -> list[str]:
    """Return the final releases of a package on pip's index since `OLDEST`, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = next(line for line in printed.splitlines() if line.startswith("Available versions: "))
    versions = {Version(word) for word in line.partition(": ")[2].split(", ")}
    return [
        str(version)
        for version in sorted(versions)
        if version.release[:2] >= OLDEST and not version.is_postrelease
    ]


if __name__ == "__main__":
    known = {name: _published(name) for name in ("vllm", DISTRIBUTION)}
    lines = [f" {json.dumps(name)}: {json.dumps(releases)}" for name, releases in known.items()]
    _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
