"""The verbs `show` and `run` as functions of the Python API."""

from __future__ import annotations

import asyncio
import io
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_repro.errors import ReproError, UsageError
from vllm_repro.releases.sources import parse_source
from vllm_repro.report.model import RunReport
from vllm_repro.report.runs import Run, run_of
from vllm_repro.running.folders import default_out
from vllm_repro.running.job import (
    MOST_TRIALS,
    Job,
    SiteFacts,
    choice_of,
    first_line,
    refuse_unused_options,
    usual_expectation,
    with_patches,
)
from vllm_repro.running.run import run_one
from vllm_repro.running.state import MeasureOptions, TimeLimits
from vllm_repro.running.terminal import Progress
from vllm_repro.scenario.catalogue import find, find_arms
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.servers.options import ServerOptions
from vllm_repro.verdict.verdict import Expect

_LOG = logging.getLogger("vllm_repro")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of a finished run: its folder, its report and its verdict."""

    # folder of its journal and reports
    folder: Path
    # content of `report.json`
    report: Run

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def verdict(self) -> str:
        """The verdict on the scenario, such as `reproduces`."""
        return str(self.report.verdict)

    @property
    def expected(self) -> bool | None:
        """True if the verdict is as expected; None if the run is undecided."""
        return None if self.report.undecided else self.report.expected


def load_scenario(path: str | os.PathLike[str]) -> Scenario:
    """Return the scenario that `path` names: a file, an id, or the number or URL of an issue.

    The file is read, not run. Raises `UsageError` if there is none, and `ScenarioError` with every
    mistake of the file.
    """
    return find(os.fspath(path))


def run(
    scenario: Scenario | str | os.PathLike[str],
    *,
    server: str = "auto",
    vllm: str | None = None,
    url: str | None = None,
    image: str | None = None,
    model: str | None = None,
    weights: str | None = None,
    log: str | os.PathLike[str] | None = None,
    patch: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    arms: str | Sequence[str] = (),
    trials: int | Literal["auto"] | None = 1,
    seed: int = 1,
    answer_stall: float = TimeLimits.answer_stall,
    throughput: bool | None = None,
    outputs: bool = False,
    expect: str | None = None,
    out: str | os.PathLike[str] | None = None,
) -> RunResult:
    """Run a scenario as `vllm-repro run` does, and return the result.

    The options and the reports are the same. It blocks for minutes.

    arms, patch: one or several. trials: boots of each arm; "auto" or None for as many as decide its
    claim. answer_stall: seconds without progress after which requests in flight are a hang.
    throughput: as `--throughput` and `--no-throughput`, None for neither. Raises
    `KeyboardInterrupt` after an interrupt, with the report written; else as the command fails:
    `UsageError`, `ScenarioError`, `CommandError`, `Unsupported`, `InfraError`.
    """
    patches = [patch] if isinstance(patch, str | os.PathLike) else patch or ()
    arms = [arms] if isinstance(arms, str) else arms
    loaded = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
    options = ServerOptions(
        server=server,
        vllm=parse_source(vllm) if vllm else None,
        url=url,
        image=image,
        model=model,
        weights=weights,
        log=Path(log) if log is not None else None,
        patch=tuple(map(Path, patches)),
    )
    if expect not in (None, *Expect):
        raise UsageError(
            f"expect={expect!r} is none of {', '.join(Expect)}",
            hint="name one of these, or leave expect out",
        )
    auto = trials in (None, "auto")
    if not (auto or (isinstance(trials, int) and 1 <= trials <= MOST_TRIALS)):
        raise UsageError(
            f"trials={trials!r} is no number of boots from 1 to {MOST_TRIALS}",
            hint='name such a number, or "auto" for as many as decide the claim of each arm',
        )
    choice = choice_of(loaded, options)
    refuse_unused_options(options, choice.kind)
    compared = len(options.patch) > 1
    tried = loaded.leading if compared and not arms else find_arms(loaded, list(arms))
    job = Job(
        name=loaded.id if isinstance(scenario, Scenario) else os.fspath(scenario),
        scenario=loaded,
        options=options,
        choice=choice,
        arms=with_patches(loaded, tried, options.patch) if compared else tried,
        named_arms=arms,
        trials=None if trials == "auto" else trials,
        seed=seed,
        out=Path(out) if out is not None else default_out(),
        limits=TimeLimits(answer_stall=answer_stall),
        expect=Expect(expect) if expect else usual_expectation(options),
        measure=MeasureOptions(throughput, outputs),
        compared=compared,
    )

    def chosen(site: SiteFacts, why: str) -> None:
        _LOG.info(first_line(site, why, job.version(site.kind)))

    def work() -> RunReport:
        return run_one(job, Progress(io.StringIO()), chosen)

    try:
        report = ThreadPoolExecutor(1).submit(work).result() if _in_notebook() else work()
    except ReproError as error:
        raise error.with_traceback(None) from None  # else its lines would hide the message
    if report.interrupted:
        raise KeyboardInterrupt(report.interrupted)
    return RunResult(folder=report.folder, report=run_of(report))


def _in_notebook() -> bool:
    """Return True in a thread with a running event loop: a run cannot start its own there."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
