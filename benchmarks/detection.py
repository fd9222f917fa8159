"""Time from an engine's death to each sign of it, for every channel of the package's own watcher.

Servers: a vLLM release as a process, and the same in a container. Deaths: SIGKILL of EngineCore, of
the API server and of the worker, timed from just before the signal; and #54195's request, timed
from the first fatal log line. That line's time is the log file's mtime for a process, and dockerd's
timestamp for a container. Two requests are in flight, one streamed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from vllm_repro.client.client import Client
from vllm_repro.errors import ReproError
from vllm_repro.journal.journal import Journal
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import Source
from vllm_repro.running.death_signs import Channel, log_sign
from vllm_repro.running.state import TimeLimits
from vllm_repro.running.watch import Watch
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.base import Server
from vllm_repro.servers.docker_engine import connect
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import Launch
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import Site, site_class

VERSION = "0.28.0"
REAL_IMAGE = f"vllm-repro/vllm-cpu:{VERSION}"
DEADLY = {"max_tokens": 4, "min_tokens": 1, "stop_token_ids": [999999]}
LASTING = {"max_tokens": 8000, "ignore_eos": True}

VICTIMS = {
    "EngineCore killed": "VLLM::EngineCor",
    "API server killed": "",
    "worker killed": "VLLM::Worker",
}
REQUEST = "a request"
DEATHS = (*VICTIMS, REQUEST)


class Spoilt(Exception):
    """The requests ended before the death, so nothing was in flight."""


@dataclass(frozen=True)
class Setting:
    """One kind of server, and how many deaths to measure on it."""

    title: str
    site: Site
    n: int


@dataclass(frozen=True)
class Seen:
    """Result of one death: seconds to each channel's first sign, and to the first decisive one."""

    channels: dict[Channel, float]
    decided: float
    decided_by: Channel


class FatalLine(threading.Thread):
    """Watcher for the first fatal line of a log, polling each millisecond.

    `moment` is the file's mtime, which may be one kernel tick early, so a delay may be one tick too
    long.
    """

    def __init__(self, log: Path) -> None:
        super().__init__(daemon=True)
        self.moment: float | None = None
        self._file = log.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._over = threading.Event()

    def run(self) -> None:
        rest = b""
        while not self._over.wait(0.001):
            data = self._file.read()
            if not data:
                continue
            written = os.fstat(self._file.fileno()).st_mtime
            *lines, rest = (rest + data).split(b"\n")
            if any(_is_fatal(line) for line in lines):
                self.moment = written
                return

    def end(self) -> float | None:
        self._over.set()
        self.join()
        self._file.close()
        return self.moment


def _is_fatal(line: bytes) -> bool:
    found = log_sign(line.decode("utf-8", "replace"))
    return found is not None and found[1]


def _fatal_line_of(container: str) -> float | None:
    """Return dockerd's timestamp of a container's first fatal line."""
    with contextlib.closing(connect()) as engine:
        raw: bytes = engine.client.api.logs(container, timestamps=True)
    for line in raw.split(b"\n"):
        if _is_fatal(line):
            return datetime.fromisoformat(line.split(b" ", 1)[0].decode()).timestamp()
    return None


def _victim(server: Server, name: str) -> int:
    """Return the pid to kill: the first process with this name prefix; API server if empty."""
    pids = server.processes()
    if not name:
        return pids[0]
    for pid in pids[1:]:
        process = psutil.Process(pid)
        if process.cmdline()[0].startswith(name):
            return pid
    raise LookupError(f"no process {name} among {pids}")


async def _ask(watch: Watch, body: dict[str, Any]) -> str | None:
    """Send a request and return its finish reason."""
    answer, _ = await watch.ask("/v1/completions", {"prompt": "hello", "temperature": 0, **body})
    return answer.finish_reason


async def one_death(
    launch: Launch, server: Server, log: Path, journal: Journal, death: str
) -> Seen:
    """Boot a server, kill it, and return the signs. Raise `RuntimeError` or `Spoilt`."""
    try:
        facts = await server.start()
        async with (
            Client(server.base_url) as client,
            Watch(server, launch.kind, client, journal, TimeLimits(), lambda _: None) as watch,
        ):
            if not await watch.until_ready():
                raise RuntimeError(f"not ready: {[sign.detail for sign in watch.signs]}")
            model = {"model": await client.model_name()}
            await _ask(watch, {**model, "max_tokens": 4})
            tasks = [asyncio.create_task(_ask(watch, {**model, **LASTING, "stream": True}))]
            if death != REQUEST:
                tasks.append(asyncio.create_task(_ask(watch, {**model, **LASTING})))
            # Kill at a random moment, after some steps, so that it does not align with the
            # watcher's polling.
            await asyncio.sleep(0.1 + 0.3 * random.random())
            if watch.signs:
                raise RuntimeError(f"it died by itself: {watch.signs}")
            moment: float | None
            if death == REQUEST:
                line = FatalLine(log)
                line.start()
                tasks.append(asyncio.create_task(_ask(watch, {**model, **DEADLY})))
            else:
                victim = _victim(server, VICTIMS[death])
                moment = time.time()
                os.kill(victim, signal.SIGKILL)
            await asyncio.wait_for(watch.dead.wait(), 120)
            await watch.aftermath()
            ended, _ = await asyncio.wait(tasks, timeout=5)
            for task in tasks:
                task.cancel()
            watch.stopping()
            if death == REQUEST:
                moment = line.end()
                if facts.container_id is not None:
                    moment = await asyncio.to_thread(_fatal_line_of, facts.container_id)
            if moment is None:
                raise RuntimeError("no fatal line in the log")
            channels = {sign.channel: sign.at - moment for sign in watch.signs}
            decided = min((sign for sign in watch.signs if sign.decisive), key=lambda sign: sign.at)
            if any(task.result() == "length" for task in ended):
                raise Spoilt
            return Seen(channels, decided.at - moment, decided.channel)
    finally:
        await server.stop()


def measure(setting: Setting, scenario: Scenario, arm: Arm) -> None:
    """Measure all deaths of one setting in turn and print its table."""
    seen: dict[str, list[Seen]] = {death: [] for death in DEATHS}
    spoilt = 0
    todo = [(number, death) for number in range(1, setting.n + 1) for death in DEATHS]
    try:
        while todo:
            number, death = todo.pop(0)
            try:
                with tempfile.TemporaryDirectory(prefix="vllm-repro-bench-") as folder:
                    log = Path(folder) / "server.log"
                    launch, server = setting.site.server(
                        scenario, arm, number, log, f"bench-{os.getpid()}"
                    )
                    with Journal(Path(folder) / "journal.jsonl") as journal:
                        one = asyncio.run(one_death(launch, server, log, journal, death))
            except Spoilt:
                spoilt += 1
                if spoilt > 3 * setting.n:
                    raise RuntimeError(
                        "too much else runs on this machine to time anything"
                    ) from None
                todo.insert(0, (number, death))
                continue
            seen[death].append(one)
    finally:  # an interrupted measurement keeps what it has
        _print(setting, seen, spoilt)


def _print(setting: Setting, seen: dict[str, list[Seen]], spoilt: int) -> None:
    if not any(seen.values()):
        return
    print(f"\n### {setting.title}\n")
    print("\n".join(_table(seen)), flush=True)
    if spoilt:
        print(
            f"\n{spoilt} boots did not count and were repeated: their requests had ended before the"
            " death.",
            flush=True,
        )


def _table(seen: dict[str, list[Seen]]) -> Iterator[str]:
    yield "| death | channel | median | min..max | seen in |"
    yield "|---|---|---|---|---|"
    for death, trials in seen.items():
        if not trials:
            continue
        yield _row(
            f"**{death}**", "**first decisive sign**", [one.decided for one in trials], len(trials)
        )
        channels = {channel for one in trials for channel in one.channels}
        rows = [
            (channel, [one.channels[channel] for one in trials if channel in one.channels])
            for channel in channels
        ]
        for channel, delays in sorted(rows, key=lambda row: statistics.median(row[1])):
            first = sum(one.decided_by is channel for one in trials)
            yield _row(
                "", f"{channel}{f' (first in {first})' if first else ''}", delays, len(trials)
            )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def _row(death: str, channel: str, delays: Sequence[float], n: int) -> str:
    return (
        f"| {death} | {channel} | {_ms(statistics.median(delays))} "
        f"| {_ms(min(delays))} .. {_ms(max(delays))} | {len(delays)} of {n} |"
    )


def settings(scenario: Scenario, process: int, containers: int) -> Iterator[Setting]:
    """Return the settings that this machine can run, and print why others are left out."""
    wanted = (
        (
            f"vLLM {VERSION}, a process",
            ServerKind.PROCESS,
            ServerOptions(vllm=Source(release=VERSION)),
            process,
        ),
        (
            f"vLLM {VERSION}, a container",
            ServerKind.DOCKER,
            ServerOptions(vllm=Source(release=VERSION), image=REAL_IMAGE),
            containers,
        ),
    )
    for title, kind, options, n in wanted:
        if n == 0:
            continue
        if kind is ServerKind.PROCESS and ReleaseCache().get(Source(release=VERSION)) is None:
            print(
                f"not measured: {title}: the release is not in the cache; a `vllm-repro run`"
                " installs it"
            )
            continue
        try:
            yield Setting(f"{title}, n={n} a death", site_class(kind)(options, scenario, print), n)
        except ReproError as error:
            print(f"not measured: {title}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--process",
        type=int,
        default=5,
        metavar="N",
        help="boots a death of the release as a process",
    )
    parser.add_argument(
        "--containers", type=int, default=3, metavar="N", help="the same in a container"
    )
    given = parser.parse_args()
    scenario = find("min-tokens-stop-ids")
    arm = next(arm for arm in scenario.arms if arm.name == "reported")
    for setting in settings(scenario, given.process, given.containers):
        measure(setting, scenario, arm)


if __name__ == "__main__":
    main()
