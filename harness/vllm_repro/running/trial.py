"""One trial: one boot of one arm and its workload, watched from launch to end, everything into the journal.

This is the edge where the effects meet. What the trial *means* is not decided here: `assess` reads the facts and gives the
outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx

from vllm_repro.client.client import Client
from vllm_repro.errors import HarnessBug, ReproError, Unsupported
from vllm_repro.journal.journal import Journal
from vllm_repro.running.assess import Conclusion, Seen, assess
from vllm_repro.running.measure import Measure
from vllm_repro.running.options import Wishes
from vllm_repro.running.watch import Patience, Watch
from vllm_repro.running.work import Work
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.base import Server, ServerFacts
from vllm_repro.servers.launch import Launch
from vllm_repro.verdict.outcome import Outlasted

__all__ = ["Trial", "run_trial"]

T = TypeVar("T")

_OUTLAST = 10.0
"""Seconds that other nodes' servers have to follow the first one. One whose worker died ends within three."""


@dataclass
class Trial:
    """Everything that one trial needs, and what it saw so far."""

    scenario: Scenario
    arm: Arm
    number: int
    launch: Launch
    server: Server
    log: Path
    patience: Patience
    seed: int
    journal: Journal
    requests: Journal
    say: Callable[[str], None]
    api_key: str | None = None
    wishes: Wishes = field(default_factory=Wishes)
    seen: Seen = field(default_factory=Seen)

    @property
    def label(self) -> dict[str, Any]:
        return {"arm": self.arm.name, "trial": self.number}


async def run_trial(trial: Trial) -> Conclusion:
    """Runs it to its end and concludes. The server is gone and the journal has the conclusion when this returns or raises.

    Raises only `asyncio.CancelledError`, after the same clean-up; what goes wrong otherwise is an outcome.
    """
    began = time.time()
    trial.journal.write(
        "trial-started",
        **trial.label,
        expected=trial.arm.expected,
        command=trial.launch.render(),
        server=trial.launch.kind,
        evidence=trial.launch.evidence,
        differences=trial.launch.differences,
        weights=trial.launch.weights,
    )
    cancelled = False
    try:
        await _boot_and_work(trial)
    except Unsupported as error:
        trial.seen.unsupported = error.told
    except HarnessBug:
        raise
    except ReproError as error:
        trial.seen.infra = error.told
    except asyncio.CancelledError:
        cancelled = True
        trial.seen.cancelled = "the run was interrupted"
    finally:
        ending = time.monotonic()
        _, interrupted = await _undisturbed(trial.server.stop())
        took = time.monotonic() - ending
        trial.seen.outlasted = tuple(replace(one, ended_s=round(took, 1)) for one in trial.seen.outlasted)
        cancelled = cancelled or interrupted
    # From here on the trial is over, and an interrupt must not take what it saw with it.
    conclusion, interrupted = await _undisturbed(
        asyncio.to_thread(assess, trial.scenario, trial.launch.command, trial.seen, trial.log, trial.arm.trigger)
    )
    trial.journal.write(
        "trial-ended",
        **trial.label,
        duration_s=time.time() - began,
        log=f"logs/{trial.log.name}",
        rank_logs=[f"logs/{path.name}" for path in trial.server.rank_logs],
        **conclusion.as_fields(),
    )
    if cancelled or interrupted:
        raise asyncio.CancelledError
    return conclusion


async def _undisturbed(work: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """Awaits `work` to its end, whoever cancels meanwhile; what it returns, and whether somebody did."""
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


async def _boot_and_work(trial: Trial) -> None:
    trial.say("starting the server")
    launched = time.monotonic()
    facts: ServerFacts = await trial.server.start()
    trial.journal.write("server-started", **trial.label, facts=facts)
    trial.seen.facts = facts
    trial.seen.stand_in = trial.launch.stand_in
    async with (
        Client(trial.server.base_url, api_key=trial.api_key) as client,
        Watch(trial.server, trial.launch.kind, client, trial.journal, trial.patience, trial.say) as watch,
    ):
        trial.seen.signs = watch.signs
        try:
            ready = await watch.until_ready()
            # In a thread: to look into a container takes longer than anything that is watched here may wait.
            booted = await asyncio.to_thread(trial.server.booted, facts, ready=ready)
            if booted != facts:
                trial.seen.facts = booted
                trial.journal.write("server-booted", **trial.label, facts=booted)
            if ready:
                trial.seen.boot_s = time.monotonic() - launched
                trial.seen.ready = True
                trial.seen.version = await _version(client)
                trial.journal.write("ready", **trial.label, boot_s=trial.seen.boot_s, version=trial.seen.version)
                work = Work(trial, client, watch)
                await work.run()
                await Measure(work).run()
            if watch.dead.is_set():
                trial.say("the engine died; waiting for the end of its log")
                await watch.aftermath()
                if watch.exit is not None:
                    trial.seen.outlasted = await _outlasted(trial.server)
        finally:
            trial.seen.hung = watch.hung
            trial.seen.exit = watch.exit
            watch.stopping()


async def _outlasted(server: Server) -> tuple[Outlasted, ...]:
    """The other nodes' servers that do not follow the first one, which is gone."""
    before = [path.stat().st_size for path in server.rank_logs]
    ranks = await server.surviving_ranks(_OUTLAST)
    sizes = [path.stat().st_size for path in server.rank_logs]
    return tuple(Outlasted(rank=rank, watched_s=_OUTLAST, silent=sizes[rank - 1] == before[rank - 1]) for rank in ranks)


async def _version(client: Client) -> str | None:
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):  # the report says that it is not known
        return str((await client.get("/version", timeout=30.0)).json()["version"])
    return None
