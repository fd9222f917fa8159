"""The runs of a folder of reports, each read from its `report.json`.

There is no other store: removing a run's folder removes it from the history.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shlex
from datetime import datetime
from enum import StrEnum
from pathlib import Path

import msgspec
from packaging.version import InvalidVersion, Version

from vllm_repro.conversion import convert, decode
from vllm_repro.errors import ReproError
from vllm_repro.host.host_id import hardware
from vllm_repro.journal.journal import being_written, legible
from vllm_repro.report.build import build
from vllm_repro.report.json_report import ArmJson, RunJson, report_dict
from vllm_repro.report.model import RunReport
from vllm_repro.report.rendered import Rendered
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Result, from_source
from vllm_repro_diagnosis.evidence import facts_of

__all__ = ["Build", "Run", "build_of", "read_runs", "run_id", "run_of", "setup_of", "signature_of"]


class Build(StrEnum):
    """Kind of vLLM build."""

    NIGHTLY = "nightly"  # any build between releases, release candidates too
    RELEASE = "release"
    SOURCE = "source"  # a commit or a folder
    UNKNOWN = "unknown"


class Run(RunJson, frozen=True, kw_only=True):
    """A run. id: its folder, relative to that of all reports."""

    id: str = ""

    @property
    def surprise(self) -> bool:
        return not (self.expected or self.undecided)

    @property
    def hardware(self) -> str:
        return hardware(msgspec.to_builtins(self.environment))

    @property
    def leading(self) -> list[ArmJson]:
        """Return the arms that should show the bug, in unpatched vLLM."""
        return [arm for arm in self.arms if arm.expected.has_bug and not arm.patched]

    @property
    def died(self) -> ArmJson | None:
        """Return the first leading arm that showed the bug."""
        return next((arm for arm in self.leading if arm.k), None)

    @property
    def quiet(self) -> int:
        """Return the boots in which every leading arm crossed the trigger and lived; 0 if one of them did not.

        A rehearsal that does not have the bug lives whatever vLLM does.
        """
        if not self.imitated or any(arm.result is not Result.QUIET for arm in self.leading):
            return 0
        return min((arm.n for arm in self.leading), default=0)


def read_runs(root: Path) -> tuple[list[Run], list[str]]:
    """Return the runs below `root` in the order of their start, and the folders whose journal holds no run.

    A run that is still being written is left out.
    """
    runs: list[Run] = []
    unreadable: list[str] = []
    rendered = Rendered(root)
    for journal in sorted(root.glob("*/*/journal.jsonl")):
        name = journal.parent.relative_to(root).as_posix()
        if journal.parent.is_symlink():
            continue
        try:
            run = _read(journal.parent, name, rendered)
        except ReproError:
            unreadable.append(name)
            continue
        if run is not None and run.id == name:  # else a copy, such as an example
            runs.append(run)
    rendered.save()
    return sorted(runs, key=lambda run: (run.started_at, run.id)), unreadable


def _read(folder: Path, name: str, rendered: Rendered) -> Run | None:
    """Return a run from its report; from its journal if the report is missing, older, or of another version of vllm-repro."""
    report, journal = folder / "report.json", folder / "journal.jsonl"
    with contextlib.suppress(OSError, ValueError):
        if report.stat().st_mtime_ns >= journal.stat().st_mtime_ns:
            return _decoded(report.read_bytes(), folder)
    if being_written(journal):
        return None
    with legible(folder):
        state = journal.stat()
        if kept := rendered.get(name, state):
            return _decoded(kept, folder)
        run = run_of(build(folder))
        rendered.add(name, state, msgspec.json.encode(run))
        return run


_WITH_RATE = re.compile(rb'"rate": ?(?:[1-9]|0\.0*[1-9])')


def _decoded(report: bytes, folder: Path) -> Run:
    """Return the run in a report. Raises `ValueError` if it is of another version of vllm-repro."""
    if _WITH_RATE.search(report):
        raise ValueError("its figures at a rate are no longer read")
    run = decode(report, Run)
    datetime.fromisoformat(run.started_at)
    facts_of(run.evidence)
    return msgspec.structs.replace(run, id=f"{run.scenario}/{folder.name}")


def run_of(report: RunReport) -> Run:
    return convert({**report_dict(report), "id": run_id(report)}, Run)


def run_id(report: RunReport) -> str:
    return f"{report.scenario}/{report.folder.name}"


def build_of(version: str | None) -> Build:
    """Return the kind of build: `0.23.1rc1.dev123+gabc` is a nightly, `0.23.0+cu130` and `0.23.0.post1` are releases."""
    try:
        parsed = Version(version or "")
    except InvalidVersion:
        return Build.UNKNOWN
    if from_source(version):
        return Build.SOURCE
    return Build.NIGHTLY if parsed.is_prerelease else Build.RELEASE


def signature_of(arm: ArmJson) -> str:
    """Return `match: AssertionError in _continuation_prefill` for the first death outside a cancelled trial, or nothing."""
    death = next((one.death for one in arm.trials if one.death and one.outcome is not Outcome.CANCELLED), None)
    if death is None:
        return ""
    where = f" in {death.frames[-1].rpartition(':')[2]}" if death.frames else ""
    return f"{death.signature or 'unknown'}: {death.exception or 'no exception'}{where}"


_OF_THIS_RUN = ("-p", "--publish", "--port", "--host", "--name", "--label", "--network", "--mount", "-v", "--volume")


def setup_of(arm: ArmJson) -> str:
    """Return a hash of an arm's command without the ports, paths, names and image of this run. Figures of two setups are not compared."""
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
            kept.append(re.sub(r"(^|=)[~.$]?\w*/.*/", r"\1", word))  # keep only the last name of a path
    text = "\n".join([str(arm.server.kind), *kept])
    return hashlib.blake2s(text.encode(), digest_size=4).hexdigest()
