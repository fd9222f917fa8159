"""One trial: boot one arm, run its workload, watch its server, and write the journal."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_repro.client.client import Client, HTTPError, is_rehearsal, release_of
from vllm_repro.client.sdk import FailedRequest, sdk_view
from vllm_repro.errors import HarnessBug, InfraError, ReproError, Unsupported
from vllm_repro.host.gpu_lease import await_free_memory
from vllm_repro.running.assess import Conclusion, assess
from vllm_repro.running.measure import TrialMeasurer
from vllm_repro.running.state import Trial
from vllm_repro.running.watch import Watch
from vllm_repro.running.workload import WorkloadRunner
from vllm_repro.servers.base import Server
from vllm_repro.verdict.outcome import Outlasted
from vllm_repro_diagnosis.boot_facts import evidence_in
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_diagnosis.log_text import read_lines

if TYPE_CHECKING:
    from vllm_repro.releases.provision import Release

T = TypeVar("T")

Work = Callable[[WorkloadRunner], Awaitable[None]]
"""What to do with a server that is ready, such as to send the workload."""

_NEEDED_LATER = (
    "jinja2",
    "openai.types.chat",
    "vllm_repro.report.build",
    "vllm_repro.report.files",
    "vllm_repro.report.summary",
)
"""Modules to import during the boot: the SDK, whose retries follow a crash, and the report."""

_OUTLAST = 10.0
"""Seconds in which other nodes' servers must follow the first one.

A server whose worker died exits within three.
"""

_SDK_TOTAL = 10.0
"""Seconds for the SDK to see a crash, at most.

Its retries come within two, and a dying vLLM answers or is gone within five.
"""


async def _run_workload(runner: WorkloadRunner) -> None:
    """Send the scenario's workload, then run the measurements."""
    await runner.run()
    await TrialMeasurer(runner).run()


async def load_alone(runner: WorkloadRunner) -> None:
    """Check that the engine lives, then measure the scenario's loads without its workload."""
    if await runner.find_model():
        await runner.canary()
        await TrialMeasurer(runner).load()


async def run_trial(trial: Trial, work: Work = _run_workload, what: str = "trial") -> Conclusion:
    """Boot the arm, run its workload, end the server, and return what the trial showed.

    When this returns or is cancelled, the server is gone and the journal has the conclusion.

    work: what to do with the server once it is ready. It must return soon after
    `runner.watch.over()`. what: begins the names of the first and last entry in the journal.

    Raises `HarnessBug`, with the server gone and no conclusion in the journal, and
    `asyncio.CancelledError`. Any other `ReproError` is an outcome.
    """
    began = time.time()
    trial.journal.write(
        f"{what}-started",
        **trial.label,
        expected=trial.arm.expected,
        command=trial.launch.render(),
        server=trial.launch.kind,
        evidence=trial.launch.evidence,
        differences=trial.launch.differences,
        weights=trial.launch.weights,
        depth=trial.launch.depth,
    )
    cancelled = False
    try:
        await _boot_and_work(trial, work)
    except Unsupported as error:
        trial.seen.unsupported = error.with_hint
    except HarnessBug:
        raise
    except ReproError as error:
        trial.seen.infra = error.with_hint
    except asyncio.CancelledError:
        cancelled = True
        trial.seen.cancelled = "the run was interrupted"
    finally:
        ending = time.monotonic()
        _, interrupted = await _shielded(trial.server.stop())
        took = time.monotonic() - ending
        trial.seen.outlasted = tuple(
            replace(process, ended_s=round(took, 1)) for process in trial.seen.outlasted
        )
        cancelled = cancelled or interrupted
    # A full disk may crash a server or truncate its log. No sign of death shows that.
    trial.seen.infra = trial.seen.infra or _full_disk(trial.journal.path.parent)
    # From here on an interrupt must not lose the observations.
    conclusion, interrupted = await _shielded(
        asyncio.to_thread(
            assess, trial.scenario, trial.launch.command, trial.seen, trial.log, trial.arm.trigger
        )
    )
    trial.journal.write(
        f"{what}-ended",
        **trial.label,
        duration_s=time.time() - began,
        log=f"logs/{trial.log.name}",
        rank_logs=[f"logs/{path.name}" for path in trial.server.rank_logs],
        **conclusion.as_fields(),
    )
    if cancelled or interrupted:
        raise asyncio.CancelledError
    return conclusion


def _full_disk(folder: Path) -> str | None:
    """Return why `folder` cannot be written to; None if it can.

    Write 64 KiB to a temporary file: a quota shows only when writing.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(65_536))
            file.flush()
    except OSError as error:
        return (
            f"cannot write to the folder of the run: {error.strerror} (free some space, or name"
            " another --out)"
        )
    return None


async def _shielded(work: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """Await `work`, shielded from cancellation; return (result, was_cancelled).

    Raise what `work` raises.
    """
    task = asyncio.ensure_future(work)
    interrupted = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            interrupted = True
        except Exception:
            break  # raised again below, by the task itself
    return task.result(), interrupted


async def _boot_and_work(trial: Trial, work: Work) -> None:
    """Start the server, watch it, wait until it is ready, and do the work.

    After a death also record what an SDK client sees, and wait for the end of the log. What was
    seen is in `trial.seen`. The server may still run when this returns. Raises `ReproError` if the
    server cannot be started or watched.
    """
    waited = await asyncio.to_thread(await_free_memory, trial.gpus)
    if trial.gpus:
        trial.journal.write("gpus-free", **trial.label, gpus=trial.gpus, waited_s=round(waited, 1))
    trial.notify("starting the server")
    launched = time.monotonic()
    started = trial.launch.kind.facts.started
    checks_during_boot = (
        asyncio.create_task(asyncio.to_thread(_while_booting, trial.launch.release))
        if started
        else None
    )
    facts = await trial.server.start()
    trial.journal.write("server-started", **trial.label, facts=facts)
    trial.seen.facts = facts
    trial.seen.tiny_model = trial.launch.tiny_model
    async with (
        Client(trial.server.base_url, api_key=trial.api_key) as client,
        Watch(
            trial.server,
            trial.launch.kind,
            client,
            trial.journal,
            trial.limits,
            trial.notify,
            trial.gpus,
        ) as watch,
    ):
        trial.seen.signs = watch.signs
        model = ""
        try:
            ready = await watch.until_ready()
            booted_s = time.monotonic() - launched  # before the wait for the imports below
            if checks_during_boot is not None:
                await checks_during_boot
            # In a thread: a look into a container takes longer than any watched channel may wait.
            booted = await asyncio.to_thread(trial.server.booted, facts, ready=ready)
            if booted != facts:
                trial.seen.facts = booted
                trial.journal.write("server-booted", **trial.label, facts=booted)
            if ready:
                trial.seen.boot_s = booted_s
                trial.seen.ready = True
                trial.seen.version = await _version(client, trial.launch.evidence)
                if started:
                    await asyncio.to_thread(_check_evidence, trial)
                trial.journal.write(
                    "ready", **trial.label, boot_s=trial.seen.boot_s, version=trial.seen.version
                )
                runner = WorkloadRunner(trial, client, watch)
                await work(runner)
                model = runner.model
            if watch.dead.is_set() and not watch.broken:
                trial.notify("the engine died; waiting for the end of its log")
                async with asyncio.TaskGroup() as group:
                    # A retry may crash another user's server again.
                    if model and trial.seen.sent and started:
                        group.create_task(_record_sdk_view(trial, model, watch.failed))
                    await watch.aftermath()
                if watch.exit is not None:
                    trial.seen.outlasted = await _outlasted(trial.server)
        finally:
            trial.seen.hung = watch.hung
            trial.seen.exit = watch.exit
            trial.seen.preemptions = watch.counters.preemptions
            trial.seen.refuted_lines = watch.refuted_lines
            watch.stopping()


def _while_booting(release: Release | None) -> None:
    """Check the release's files and import modules for later, while the server boots.

    Raises `InfraError` as `ReleaseCache.check` does.
    """
    if release is not None:
        # here: most servers are no release of the cache
        from vllm_repro.releases.provision import ReleaseCache

        ReleaseCache().check(release)
    for name in _NEEDED_LATER:
        importlib.import_module(name)


async def _record_sdk_view(trial: Trial, model: str, failed: FailedRequest | None) -> None:
    """Write to the journal what a program with the `openai` SDK sees of the crash.

    Send requests to the dead server for at most ten seconds. Write nothing if that fails. failed:
    the request in which the death showed, if there was one.
    """
    # without it the report lacks one sentence; the outcome must not change
    with contextlib.suppress(Exception):
        view = sdk_view(
            trial.server.base_url, model, _SDK_TOTAL, failed=failed, api_key=trial.api_key
        )
        seen = await asyncio.wait_for(view, _SDK_TOTAL)
        trial.journal.write("client-saw", **trial.label, **asdict(seen))


async def _outlasted(server: Server) -> tuple[Outlasted, ...]:
    """Wait ten seconds; return the other nodes' servers that still run after the first one's exit.

    Return early if all have exited.
    """
    before = [path.stat().st_size for path in server.rank_logs]
    ranks = await server.surviving_ranks(_OUTLAST)
    sizes = [path.stat().st_size for path in server.rank_logs]
    return tuple(
        Outlasted(rank=rank, watched_s=_OUTLAST, silent=sizes[rank - 1] == before[rank - 1])
        for rank in ranks
    )


def _check_evidence(trial: Trial) -> None:
    """Raise `InfraError` if the server's log shows another device than the run reports.

    Do nothing without a log, or if the log does not show the device.
    """
    path, reported = trial.server.log_path, trial.launch.evidence
    if path is None or not path.exists():
        return
    with path.open("rb") as file:
        shown = evidence_in(read_lines(file))
    if shown not in (Evidence.UNKNOWN, reported):
        raise InfraError(
            f"the evidence of this run is {reported}, but the server's log shows {shown}",
            hint="start this vllm by hand and name it with --server attach --url",
        )


async def _version(client: Client, evidence: Evidence) -> str | None:
    """Return the release that the server's `/version` reports; None if it reports none.

    Raises `InfraError` if a rehearsal engine answers in place of vLLM.
    """
    try:
        response = await client.get("/version", timeout=30.0)
        release = release_of(response)
    except (HTTPError, ValueError, LookupError, TypeError):  # the report shows it as unknown
        return None
    if is_rehearsal(response) and evidence is not Evidence.REHEARSAL:
        raise InfraError(
            "this server is the rehearsal engine, not vLLM",
            hint="name an image or a vllm that is vLLM's own",
        )
    return release
