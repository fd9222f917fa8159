"""`--on`: what it refuses, and what it hands to the cluster."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.commands import WITH_SHORT_WAITS
from tests.conftest import Harness
from tests.golden_files import assert_refused
from vllm_repro.report.build import build
from vllm_repro.report.model import RunReport
from vllm_repro.running.job import Chosen, Job
from vllm_repro.running.resume import UnfinishedRun
from vllm_repro.running.run import run_one
from vllm_repro.running.terminal import Progress

TQ = "tq-chunked-prefill"


class Cluster:
    """A cluster that counts its jobs and runs each in this process, as `Fleet` would on a node."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def run(
        self, job: Job, progress: Progress, chosen: Chosen, unfinished: UnfinishedRun | None
    ) -> RunReport:
        self.jobs.append(job)
        return run_one(replace(job, elsewhere=None), progress, chosen, unfinished)

    def interrupt(self, name: str) -> None:
        raise AssertionError(name)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    one = Cluster()
    monkeypatch.setattr("vllm_repro_cluster.fleet.connect", lambda _: one)
    return one


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", TQ, "--on", "10.0.0.1:6379"), "--server auto looks at this machine"),
        (
            ("run", TQ, "--server", "attach", "--url", "http://x", "--on", "local"),
            "--url names one that runs",
        ),
        (("nightly", TQ, "--on", "10.0.0.1:6379"), "--server auto looks at this machine"),
        (
            ("nightly", "--server", "cpu", "--max-time", "1h", "--on", "local"),
            "--max-time is for runs one after the other",
        ),
        (
            (
                "bisect",
                TQ,
                "--bad",
                "0.23.0",
                "--good",
                "0.21.0",
                "--script",
                "true",
                "--on",
                "local",
            ),
            "--on has no meaning with --script",
        ),
    ],
)
def test_what_a_cluster_cannot_do_is_refused(
    words: tuple[str, ...], message: str, harness: Harness
) -> None:
    assert_refused(harness(*words), message)


def test_the_first_line_and_the_report_are_those_of_a_run_here(
    cluster: Cluster, harness: Harness
) -> None:
    words = ("run", TQ, "--server", "rehearsal", "--arm", "reported")
    here, there = harness(*words), harness(*words, "--on", "local")
    assert len(cluster.jobs) == 1
    assert here.status == there.status == 0
    assert here.out.splitlines()[0] == there.out.splitlines()[0]
    assert here.report["reproduce"] == there.report["reproduce"]  # it does not name the cluster


def test_an_interrupted_run_is_resumed_on_a_cluster(cluster: Cluster, harness: Harness) -> None:
    done = harness("run", TQ, "--server", "rehearsal", "--arm", "reported", "--trials", "2")
    journal = done.run / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    ended = [number for number, line in enumerate(lines) if b'"trial-ended"' in line]
    journal.write_bytes(b"".join(lines[: ended[0] + 1]))
    assert harness("run", "--resume", str(done.run), "--on", "local").status == 0
    assert len(cluster.jobs) == 1
    trials = [trial for arm in build(done.run).arms for trial in arm.trials]
    assert [(trial.number, trial.outcome.value) for trial in trials] == [(1, "crash"), (3, "crash")]


def test_nothing_imports_ray_without_the_option(tmp_path: Path) -> None:
    program = (
        f"{WITH_SHORT_WAITS}import sys; from vllm_repro.cli import main; "
        f"status = main(['versions', '{TQ}', '--server', 'rehearsal', '--versions', '0.23.0']); "
        "sys.exit(status or ('ray' in sys.modules and 'ray was imported'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
