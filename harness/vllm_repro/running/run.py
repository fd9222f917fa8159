"""One run: the trials of one scenario's arms, their journal, and the reports.

The folder, the journal's first line and the link `latest` exist before the first server is started.
The first signal interrupts the run: the server is ended and the reports are written. Later signals
do nothing: they could leave a server behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from vllm_repro import __version__
from vllm_repro.errors import ReproError, UsageError
from vllm_repro.host.host_id import hosted_by
from vllm_repro.host.machine import Machine, look
from vllm_repro.journal.journal import SCHEMA, Journal, json_of, read
from vllm_repro.journal.redact import Redactor, known_secrets
from vllm_repro.running.folders import (
    private_folders,
    private_hosts,
    private_sources,
    private_users,
    run_folder,
)
from vllm_repro.running.job import Chosen, Job, repeat_command
from vllm_repro.running.state import ARM_S, MeasureOptions, Trial
from vllm_repro.running.terminal import Progress
from vllm_repro.running.trial import load_alone, run_trial
from vllm_repro.running.trial_order import Trials, undecided_arms
from vllm_repro.scenario.patch import read_diff
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.orphans import sweep
from vllm_repro.servers.site import Site, open_site
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.statistics import lower_bound
from vllm_repro.verdict.throughput import withheld
from vllm_repro.verdict.verdict import Expected, Record, arm_result, same_release
from vllm_repro_diagnosis.evidence import Evidence, simulation_mark

if TYPE_CHECKING:  # they import the reports
    from vllm_repro.report.model import RunReport
    from vllm_repro.running.resume import UnfinishedRun

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a run, Ctrl-\\ included.

Servers run in other sessions: a signal that ends this process alone would leave them running.
"""


def run_one(
    job: Job,
    progress: Progress,
    chosen: Chosen = lambda *_: None,
    unfinished: UnfinishedRun | None = None,
) -> RunReport:
    """Run `job` until it is finished or a signal interrupts it, and write every report.

    An interrupted run has a report too, marked so. An `unfinished` run is resumed in its folder.
    Raises `UsageError`, `InfraError` or `Unsupported` if there is no server or the job differs from
    that of the unfinished run. Then it makes no folder.
    """
    if job.elsewhere is not None:
        return job.elsewhere.run(job, progress, chosen, unfinished)
    for line in sweep():
        progress.line(f"left by a killed run, removed: {line}")
    site = open_site(job.scenario, job.options, job.choice, progress.line, chosen=chosen)
    site.others = job.others
    repeat = job.reproduce or repeat_command(
        "run", job, site.kind, ("--vllm", job.options.vllm or job.version(site.kind))
    )
    job = replace(
        job,
        arms=_arms_to_run(job, site, progress),
        reproduce=repeat,
        measure=resolve_measure(job.measure, site.kind, site.evidence, job.trials),
    )
    try:
        with site.leased(job.scenario, job.options, progress.line):
            return _run(job, site, progress, unfinished)
    finally:
        progress.close()


def resolve_measure(
    options: MeasureOptions, kind: ServerKind, evidence: Evidence, trials: int | None
) -> MeasureOptions:
    """Return the options with `throughput` decided; unchanged if the user decided it.

    By default it is measured, a minute an arm, if the harness starts the server and the figures of
    such evidence count. trials: boots of each arm, as in `Job`.
    """
    if options.throughput is not None:
        return options
    counts = kind.facts.started and not withheld(evidence)
    most_s = ARM_S if trials == 1 else ARM_S / 2
    return replace(options, throughput=counts, most_s=most_s if counts else None)


def _arms_to_run(job: Job, site: Site, progress: Progress) -> list[Arm]:
    """Return the arms to run on `site`, each with the patch of the command line, if any.

    If the user named no arms, leave out those that are not usual on the site, and print a line on
    them. With a patch of the command line, also leave out arms that have their own. With
    `job.compared`, return the arms of the job as they are.
    """
    if job.compared:
        return list(job.arms)
    arms = list(job.arms) if job.named_arms else site.usual_arms(job.scenario, job.arms)
    if len(arms) < len(job.arms):
        others = ", ".join(arm.name for arm in job.arms if arm not in arms)
        progress.line(f"{len(arms)} of {len(job.arms)} arms; --arm all runs these too: {others}")
    if not job.options.patch:
        return arms
    if not job.named_arms:
        # two patches of the same lines would conflict
        arms = [arm for arm in arms if not arm.patches]
    extra = read_diff(job.options.patch[0])
    return [replace(arm, patches=(*arm.patches, *extra)) for arm in arms]


def _run(job: Job, site: Site, progress: Progress, unfinished: UnfinishedRun | None) -> RunReport:
    """Run the job's trials on `site` with a journal, write the reports, and return the report.

    Raises `UsageError`, before it makes a folder, if `unfinished` was another job or no arm can run
    on an attached server.
    """
    record = strongest_record(
        job.out, job.scenario, site.evidence, job.arms, job.version(site.kind)
    )
    # before there is a folder: a refused run must not move `latest`
    arms = _arms_in_order(job, site)
    header = _header(job, site, look(), record)
    redactor = Redactor(secrets=known_secrets(os.environ), names=False)
    if unfinished is not None:
        unfinished.refuse_changed(redactor.deep(json_of(header)))
    folder = unfinished.folder if unfinished is not None else run_folder(job.out, job.scenario.id)
    with (
        Journal(folder / "journal.jsonl", redactor) as journal,
        Journal(folder / "requests.jsonl", redactor) as requests,
    ):
        journal.write("run-resumed" if unfinished is not None else "run-started", **header)
        trials = _Trials(
            job=job,
            site=site,
            arms=arms,
            folder=folder,
            journal=journal,
            requests=requests,
            progress=progress,
            record=record,
            unfinished=unfinished,
        )
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(trials.run())
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            trials.interrupted_by = trials.interrupted_by or f"{error}" or "SIGINT"
        finally:
            journal.write("run-ended", interrupted=trials.interrupted_by)
    with signals_later():
        return _write_reports(folder, job.scenario)


def _write_reports(folder: Path, scenario: Scenario) -> RunReport:
    """Write the report files of the run in `folder`, and return its report.

    Raises a `ReproError` that names the verdict if a file cannot be written.
    """
    from vllm_repro.report.build import build
    from vllm_repro.report.files import write_reports  # here: only the end of a run needs them

    report = build(folder)
    try:
        write_reports(report, scenario)
    # the journal holds everything; do not lose the verdict of hours of trials
    except ReproError as error:
        verdict = f"{report.verdict}{simulation_mark(report.evidence)}"
        raise type(error)(f"the verdict is {verdict}, and {error}", hint=error.hint) from error
    return report


def _header(job: Job, site: Site, machine: Machine, record: Record | None) -> dict[str, Any]:
    """Return the fields of a run's first journal line: scenario, arms, server, machine, names."""
    scenario, in_lab = job.scenario, site.kind.facts.in_lab
    return {
        "schema": SCHEMA,
        "harness_version": __version__,
        "scenario": scenario.id,
        "issue": scenario.issue,
        "filed": scenario.filed,
        "related": scenario.related,
        "title": scenario.title,
        "status": {"bad": scenario.status.bad, "good": scenario.status.good},
        "trigger": str(scenario.trigger),
        "expect": job.expect,
        "evidence": site.evidence,
        "server": site.kind,
        "trials": job.trials,
        "compared": job.compared,
        "seed": job.seed,
        "wishes": job.measure,
        "loads": scenario.loads,
        "output": scenario.output,
        "errs": any(arm.expected is Expected.ERRS for arm in scenario.arms),
        "version": job.version(site.kind),
        "arms": [
            {
                "name": arm.name,
                "expected": arm.expected,
                "why": arm.why,
                "edits": (
                    [str((in_lab and edit.in_lab) or edit) for edit in arm.edits]
                    + [*map(str, arm.patches)]
                ),
                "patches": arm.patches,
                "bad": arm.bad,
            }
            for arm in job.arms
        ],
        "reproduce": job.reproduce,
        "record": record,
        "machine": machine,
        "host": hosted_by(asdict(machine)),
        "docker": site.engine_version,
        "folders": [
            *private_folders(),
            *private_sources([job.options.vllm]),
            *job.private.get("folders", ()),
        ],
        "hosts": [*private_hosts(scenario), *job.private.get("hosts", ())],
        "users": [*private_users(scenario), *job.private.get("users", ())],
        "imitated": site.imitates(scenario),
    }


def _arms_in_order(job: Job, site: Site) -> list[Arm]:
    """Return the arms to boot, in order; on an attached server not those with edits.

    An attached server has one command, so try only arms without edits, first those that should
    live. Raises `UsageError` if there is none.
    """
    if site.kind.facts.started:
        return list(job.arms)
    arms = [arm for arm in job.arms if not arm.edits]
    if not arms:
        raise UsageError(
            f"the arm {job.arms[0].name} changes the server's flags, which a running server"
            " does not",
            hint="start the server with those flags and attach with the arm `reported`",
        )
    return sorted(arms, key=lambda arm: arm.expected.has_bug)


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Hold signals back during the block, so that a report is written whole; then raise the first.

    Do nothing in another thread than the main one. The signals are those of `signals_to`.
    """
    came: list[signal.Signals] = []
    with signals_to(came.append):
        yield
    if came:
        signal.raise_signal(came[0])


@contextlib.contextmanager
def signals_to(on_signal: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Call `on_signal` for each SIGINT, SIGTERM, SIGHUP and SIGQUIT during the block.

    Do nothing in another thread than the main one. A SIGHUP or SIGQUIT that the process ignores
    stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number, handler in before.items():
            # Keep ignored signals ignored: with nohup the run must outlive its terminal.
            if handler is not signal.SIG_IGN or number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, _: on_signal(signal.Signals(number)))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None if it was not set from Python


@dataclass(kw_only=True)
class _Trials:
    """The trials of one run, one after the other."""

    job: Job
    site: Site
    arms: Sequence[Arm]
    folder: Path
    journal: Journal
    requests: Journal
    progress: Progress
    record: Record | None
    unfinished: UnfinishedRun | None
    interrupted_by: str | None = None

    def __post_init__(self) -> None:
        self._version = self.job.version(self.site.kind)
        self._done = self.unfinished.trials if self.unfinished else Trials()

    async def run(self) -> None:
        """Run trials until each arm has enough; boot arms again that died before their load.

        Return earlier if further trials make no sense. Raises `asyncio.CancelledError` after the
        first signal, which sets `interrupted_by`.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with signals_to(lambda number: loop.call_soon_threadsafe(self._interrupt, number, task)):
            for arm in self._done.in_turn(self.arms, self._arms_due):
                self._done.last[arm.name] += 1
                if await self._try_arm(arm, self._done.last[arm.name]):
                    return
            for arm in self._unmeasured():
                self._done.last[arm.name] += 1
                self.progress.line(f"{arm.name}: booted once more, for its load alone")
                trial = self._make_trial(arm, self._done.last[arm.name])
                await run_trial(trial, load_alone, "load")

    def _unmeasured(self) -> list[Arm]:
        """Return the arms to boot again for their load alone: those that died before it was sent.

        Empty if throughput is not measured or the server is attached.
        """
        if not (self.job.measure.throughput and self.site.kind.facts.started):
            return []
        recording = read(self.journal.path)
        booted = {entry["arm"] for entry in recording.of("ready")}
        measured = {
            entry["arm"]
            for event in ("throughput-point", "measure-stopped", "load-ended")
            for entry in recording.of(event)
            if entry.get("outcome") != Outcome.CANCELLED
        }
        return [
            arm for arm in self.arms if arm.name in booted - measured and self._has_own_server(arm)
        ]

    def _has_own_server(self, arm: Arm) -> bool:
        """Return True if no earlier arm of this run has the same server."""
        return self.job.scenario.has_own_server(arm, self.arms)

    def _interrupt(self, number: signal.Signals, task: asyncio.Task[None]) -> None:
        """Cancel the trial in progress at the first signal, so that its server is ended.

        Keep the signal's name in `interrupted_by`. Ignore later signals.
        """
        # Only once: a second Ctrl-C must not interrupt the clean-up, or it would leave a server
        # behind.
        if self.interrupted_by is None:
            self.interrupted_by = number.name
            task.cancel()
            self.progress.notify(f"{number.name}: ending the server; what was seen so far is kept")

    def _arms_due(self) -> list[str]:
        """Return the names of the arms that need another trial."""
        outcomes, trials = self._done.outcomes, self.job.trials
        if trials is not None:
            return [arm.name for arm in self.arms if len(outcomes[arm.name]) < trials]
        results = [
            arm_result(
                arm.name, arm.expected, outcomes[arm.name], strange=self._done.strange[arm.name]
            )
            for arm in self.arms
        ]
        patched = all(arm.patches for arm in self.arms)
        return undecided_arms(results, self.record, self._version, patched=patched)

    async def _try_arm(self, arm: Arm, number: int) -> bool:
        """Run one trial, count it, and print its line. Return True if no further trial makes sense.

        number: of the trial, among those of its arm.
        """
        conclusion = await run_trial(self._make_trial(arm, number))
        crossed = conclusion.trigger.crossed
        self._done.finish(
            arm.name, arm.expected, conclusion.outcome, conclusion.during, crossed=crossed
        )
        self._version = conclusion.version or self._version
        self.progress.done(arm, number, conclusion)
        # A patch that does not fit does not affect the other arms.
        ends = self.site.ends_after(conclusion.outcome, launched=conclusion.launched)
        return ends and not arm.patches

    def _make_trial(self, arm: Arm, number: int) -> Trial:
        """Return the trial `number` of an arm, with its server, which is not started yet."""
        job, site = self.job, self.site
        log = self.folder / "logs" / f"{arm.name}-{number}.log"
        launch, server = site.server(job.scenario, arm, number, log, self.folder.name)
        return Trial(
            scenario=job.scenario,
            arm=arm,
            number=number,
            launch=launch,
            server=server,
            gpus=site.gpus,
            log=log,
            limits=job.limits,
            seed=job.seed,
            journal=self.journal,
            requests=self.requests,
            notify=lambda text: self.progress.notify(f"{arm.name}: {text}"),
            # a server that we start takes it from the same environment
            api_key=os.environ.get("VLLM_API_KEY"),
            measure=job.measure,
            own_server=self._has_own_server(arm),
        )


def strongest_record(
    out: Path, scenario: Scenario, evidence: str, arms: Sequence[Arm], version: str | None = None
) -> Record | None:
    """Return the earlier run of the scenario in `out`, of this evidence, whose crashes prove most.

    Only crashes of the first of `arms` with the bug count. Return None if there is no such arm or
    run; ignore reports that cannot be read.

    version: the release of `arms`. If they patch it, a run of that release is stronger than any
    other. `verdict.decide` weighs it.
    """
    records: list[Record] = []
    leading = next((arm for arm in arms if arm.expected.has_bug), None)
    if leading is None:
        return None
    over = version if leading.patches else None
    for path in (out / scenario.id).glob("*/report.json"):
        if path.parent.is_symlink():
            continue
        # Ignore an incomplete report, one without this arm, and one of another harness.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            report = json.loads(path.read_text(encoding="utf-8"))
            arm = {arm["name"]: arm for arm in report["arms"]}[leading.name]
            # the patch may have caused such a death
            if arm["k"] and report["evidence"] == evidence and not arm["server"].get("patched"):
                records.append(
                    Record(
                        crashed=arm["k"],
                        boots=arm["n"],
                        run=path.parent.name,
                        version=str(arm["server"]["vllm_version"]),
                        arm=leading.name,
                    )
                )

    def strength(record: Record) -> tuple[bool, float, str]:
        return (
            same_release(record.version, over),
            lower_bound(record.crashed, record.boots),
            record.run,
        )

    return max(records, key=strength, default=None)
