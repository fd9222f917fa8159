"""Made-up runs in place of those of a search, and the fields that its record has in every test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_repro.report.model import RunReport
from vllm_repro.running.job import Job
from vllm_repro.scenario.scenario import Status
from vllm_repro.servers.rehearsal import RehearsalSite
from vllm_repro_search.versions.record import VersionMap

Answer = Callable[[Job], RunReport]
MadeUp = Callable[[Answer], list[Job]]

FIELDS: dict[str, Any] = {
    "scenario": "tq-chunked-prefill",
    "issue": "vllm-project/vllm#41726",
    "title": "a title",
    "status": Status(bad=">=0.21.0,<0.24.0", good=">=0.24.0"),
    "server": "lab",
    "evidence": "lab",
    "harness_version": "0",
    "started_at": "2026-11-23T00:00:00Z",
    "duration_s": 1.0,
    "reproduce": "vllm-repro search",
}
"""Of a `SearchRecord`."""


@pytest.fixture(autouse=True)
def sound_maps(tmp_path: Path) -> Iterator[None]:
    """Raise `msgspec.ValidationError` for a `versions.json` of the test that breaks its schema."""
    yield
    for path in (tmp_path / "reports").rglob("versions.json"):
        msgspec.json.decode(path.read_bytes(), type=VersionMap)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> MadeUp:
    """Replace runs by `answer` and return the list of requested jobs.

    The cache is empty: a search prefers releases that are installed.
    """
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path_factory.mktemp("cache")))

    def put(answer: Answer) -> list[Job]:
        asked: list[Job] = []

        def run_one(
            job: Job, _progress: object, opened: Callable[[object, str], None]
        ) -> RunReport:
            asked.append(job)
            report = answer(job)
            opened(RehearsalSite(replace(job.options, vllm=None), job.scenario), job.choice.why)
            return report

        for module in ("versions.verb", "boot_search"):
            monkeypatch.setattr(f"vllm_repro_search.{module}.run_one", run_one)
        return asked

    return put


def record_in(out: Path, verb: str) -> dict[str, Any]:
    """Return the record of the only search of a kind."""
    (path,) = out.glob(f"*/{verb}/2*/*.json")
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def releases_of(jobs: list[Job]) -> list[str]:
    """Return the releases that were run."""
    return [str(job.options.vllm) for job in jobs]
