"""The runs of a folder of reports, each read from its `report.json`.

There is no other store: removing a run's folder removes it from the history.
"""

from __future__ import annotations

import contextlib
import re
from datetime import datetime
from pathlib import Path

import msgspec

from vllm_repro.conversion import decode
from vllm_repro.errors import ReproError
from vllm_repro.journal.journal import legible
from vllm_repro.report.build import build
from vllm_repro.report.runs import Run, run_of
from vllm_repro_diagnosis.evidence import facts_of


def read_runs(root: Path) -> tuple[list[Run], list[str]]:
    """Return the runs below `root` by start time, and the folders whose journal holds no run.

    A run that is still being written is left out.
    """
    runs: list[Run] = []
    unreadable: list[str] = []
    for journal in sorted(root.glob("*/*/journal.jsonl")):
        name = journal.parent.relative_to(root).as_posix()
        if journal.parent.is_symlink():
            continue
        try:
            run = _read(journal.parent)
        except ReproError:
            unreadable.append(name)
            continue
        if run is not None and run.id == name:  # else a copy, such as an example
            runs.append(run)
    return sorted(runs, key=lambda run: (run.started_at, run.id)), unreadable


def _read(folder: Path) -> Run | None:
    """Return a run from its report or its journal; None while it is being written.

    The journal is read if the report is missing, older, or of another version of vllm-repro.
    """
    report, journal = folder / "report.json", folder / "journal.jsonl"
    with contextlib.suppress(OSError, ValueError):
        if report.stat().st_mtime_ns >= journal.stat().st_mtime_ns:
            return _decoded(report.read_bytes(), folder)
    if _being_written(journal):
        return None
    with legible(folder):
        run = run_of(build(folder))
        facts_of(run.evidence)  # refuse an unknown kind
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


def _being_written(path: Path) -> bool:
    """Return True if a process holds this journal.

    Reads the kernel's list of locks: taking the lock could disturb a run.
    """
    try:
        inode = path.stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return False
    return any(" FLOCK " in line and f":{inode} " in line for line in locks.splitlines())
