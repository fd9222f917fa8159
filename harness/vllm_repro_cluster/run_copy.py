"""Local copy of the folder of a run on another node, written as the chunks of `item` come."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from vllm_repro import errors
from vllm_repro.errors import ReproError
from vllm_repro.journal.journal import Journal, read
from vllm_repro.report.build import build
from vllm_repro.report.files import FORMATS, write_reports
from vllm_repro.running.assess import Conclusion
from vllm_repro.running.folders import run_folder
from vllm_repro.running.job import Chosen, Job
from vllm_repro.running.run import signals_later
from vllm_repro.running.terminal import Progress
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.trigger.trigger import TriggerResult
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_cluster.item import ERROR, NODE, OUTPUT, SITE
from vllm_repro_diagnosis.boot_facts import boot_facts
from vllm_repro_diagnosis.evidence import Evidence


def write_reports_of(folder: Path, job: Job) -> None:
    """Write the reports of a run into its folder on this machine, from its journal.

    Signals wait until all are written.
    """
    with signals_later():
        write_reports(build(folder), job.scenario)


class RunCopy:
    """The copy of a run's folder on this machine, while a node of the cluster does the run.

    folder: None until the node sends a file of the run. reported: the reports that the node wrote
    have arrived.
    """

    def __init__(self, job: Job, progress: Progress, chosen: Chosen, folder: Path | None) -> None:
        self.folder, self.progress = folder, progress
        self._job, self._chosen = job, chosen
        self.begin()

    def begin(self) -> None:
        """Prepare for the chunks of another node: forget the last one and its error.

        Keep the folder.
        """
        self.node, self._line, self.reported = "", b"", False
        self._error: ReproError | None = None

    def take(self, name: str, at: int, data: bytes) -> None:
        """Take a chunk by its name, and write that of a file to the copy at the offset `at`.

        Print output, report the site to `chosen`, and keep an error for `why_lost`. The first
        file makes the folder.
        """
        if name == NODE:
            self.node = data.decode()
        elif name == OUTPUT:
            *lines, self._line = (self._line + data).split(b"\n")
            what = f"{self._job.scenario.id} {self._job.options.vllm or ''}".strip()
            for line in lines:
                self.progress.line(
                    f"{self.node}: {what}: {line.decode('utf-8', 'replace').strip()}"
                )
        elif name == SITE:
            self._chosen(_Site(**json.loads(data)), self._job.choice.why)
        elif name == ERROR:
            error = json.loads(data)
            self._error = getattr(errors, error["type"])(error["message"], hint=error["hint"])
        else:
            run, _, path = name.partition("/")
            if self.folder is None:
                self.folder = run_folder(self._job.out, self._job.scenario.id, run)
            self.reported |= path == FORMATS["json"]
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("r+b" if target.exists() else "wb") as file:
                file.seek(at)
                file.write(data)
                file.truncate()

    @property
    def finished(self) -> bool:
        """Return True if the journal holds the end of the run, without an interruption."""
        end = read(self.folder / "journal.jsonl").end if self.folder else None
        return end is not None and not end["interrupted"]

    def why_lost(self) -> str:
        """Return why the process of the run was lost; empty if the run finished.

        Raises the error that it left.
        """
        if self._error is not None:
            raise self._error
        return (
            "" if self.finished else f"the process of the run on the node {self.node} ended early"
        )

    def record_loss(self, why: str) -> None:
        """Append a `trial-ended` with the outcome infra for the boot that was lost with its node.

        Does nothing without a journal, or if no trial was running.
        """
        path = self.folder / "journal.jsonl" if self.folder else None
        if path is None or not path.exists():
            return
        recording = read(path)
        ended = {(entry["arm"], entry["trial"]) for entry in recording.of("trial-ended")}
        for entry in recording.of("trial-started"):
            arm, trial = entry["arm"], entry["trial"]
            if (arm, trial) in ended:
                continue
            conclusion = Conclusion(
                outcome=Outcome.INFRA,
                phase=None,
                trigger=TriggerResult(crossed=False, evidence=()),
                death=None,
                boot_s=None,
                version=None,
                sent=0,
                ok=0,
                why=why,
                captured={},
                boot=asdict(boot_facts([])),
                launched=True,
            )
            with Journal(path) as journal:
                journal.write(
                    "trial-ended",
                    arm=arm,
                    trial=trial,
                    duration_s=0.0,
                    log=f"logs/{arm}-{trial}.log",
                    rank_logs=[],
                    **conclusion.as_fields(),
                )


class _Site:
    """Facts of the vLLM that a node runs: kind of server, evidence and version."""

    def __init__(self, kind: str, evidence: str, version: str | None, why: str) -> None:
        self.kind, self.evidence, self.version = ServerKind(kind), Evidence(evidence), version
