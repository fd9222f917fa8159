"""Made-up runs in place of those of a map or a bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from vllm_repro.report.model import RunReport
from vllm_repro.running.job import Job
from vllm_repro.servers.rehearsal import RehearsalSite

Answer = Callable[[Job], RunReport]
MadeUp = Callable[[Answer], list[Job]]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    """Replace runs by `answer` and return the list of requested jobs."""

    def put(answer: Answer) -> list[Job]:
        asked: list[Job] = []

        def run_one(job: Job, _progress: object, opened: Callable[[object, str], None]) -> RunReport:
            asked.append(job)
            report = answer(job)
            opened(RehearsalSite(replace(job.options, vllm=None), job.scenario), job.choice.why)
            return report

        monkeypatch.setattr("vllm_repro_search.versions.sweep.run_one", run_one)
        return asked

    return put


def releases_of(jobs: list[Job]) -> list[str]:
    """Return the releases that were run."""
    return [str(job.options.vllm) for job in jobs]
