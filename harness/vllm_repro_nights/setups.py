"""Facts that make runs comparable: kind of build, signature of a death, flags of an arm."""

from __future__ import annotations

import hashlib
import re
import shlex
from enum import StrEnum

from packaging.version import InvalidVersion, Version

from vllm_repro.report.json_report import ArmJson
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import from_source


class Build(StrEnum):
    """Kind of build that a version number shows: a release, a nightly, or one from source."""

    NIGHTLY = "nightly"  # any build between releases, release candidates too
    RELEASE = "release"
    SOURCE = "source"  # a commit or a folder
    UNKNOWN = "unknown"


def build_of(version: str | None) -> Build:
    """Return the kind of vLLM build that a version number tells.

    `0.23.1rc1.dev123+gabc` is a nightly; `0.23.0+cu130` and `0.23.0.post1` are releases.
    """
    try:
        parsed = Version(version or "")
    except InvalidVersion:
        return Build.UNKNOWN
    if from_source(version):
        return Build.SOURCE
    return Build.NIGHTLY if parsed.is_prerelease else Build.RELEASE


def death_label(arm: ArmJson) -> str:
    """Return `match: AssertionError in _continuation_prefill` for the first death, or nothing.

    Cancelled trials do not count.
    """
    counted = (trial for trial in arm.trials if trial.outcome is not Outcome.CANCELLED)
    death = next((trial.death for trial in counted if trial.death), None)
    if death is None:
        return ""
    where = f" in {death.frames[-1].rpartition(':')[2]}" if death.frames else ""
    return f"{death.signature or 'unknown'}: {death.exception or 'no exception'}{where}"


_OF_THIS_RUN = (
    "-p",
    "--publish",
    "--port",
    "--host",
    "--name",
    "--label",
    "--network",
    "--mount",
    "-v",
    "--volume",
)


def setup_of(arm: ArmJson) -> str:
    """Return a hash of an arm's command without the ports, paths, names and image of this run.

    Figures of two setups are not compared.
    """
    try:
        words = shlex.split(arm.command)
    except ValueError:
        words = arm.command.split()
    kept: list[str] = []
    skip = False
    for word in words:
        if skip or word.partition("=")[0] in _OF_THIS_RUN:
            skip = not skip and "=" not in word
        elif word != arm.server.image:
            # keep only the last name of a path
            kept.append(re.sub(r"(^|=)[~.$]?\w*/.*/", r"\1", word))
    text = "\n".join([str(arm.server.kind), *kept])
    return hashlib.blake2s(text.encode(), digest_size=4).hexdigest()
