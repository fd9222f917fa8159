"""Watch of one server on every channel at once, from its launch to its exit.

    async with Watch(server, kind, client, journal, limits, notify) as watch:
        await watch.until_ready()
        ... the workload, whose requests go through watch.ask() ...
        await watch.aftermath()

Channels: the process or container, the processes under it, the log as it grows, `/health`, the
answers of requests in flight, a canary, and the counters of `/metrics`. The first decisive sign
sets `dead`, as does a channel that fails (`broken`); later signs are still recorded. After
`stopping()` no sign counts, because the harness then ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import psutil

from vllm_repro.client.answer import Answer
from vllm_repro.client.client import Client, HTTPError, TimeoutException
from vllm_repro.client.load import LoadClient
from vllm_repro.client.sdk import FailedRequest
from vllm_repro.errors import InfraError
from vllm_repro.host.machine import GpuUse, gpu_use
from vllm_repro.host.processes import is_alive
from vllm_repro.journal.journal import Journal
from vllm_repro.report.format import plural
from vllm_repro.running.counters import Counters
from vllm_repro.running.death_signs import Channel, DeathSign, log_sign, sign_of_answer
from vllm_repro.running.idle import CpuSample, engine_cpu_seconds, is_idle
from vllm_repro.running.log_file import follow
from vllm_repro.running.state import TimeLimits
from vllm_repro.servers.base import Exit, Server
from vllm_repro.servers.kinds import ServerKind
from vllm_repro_diagnosis.live import observe
from vllm_repro_diagnosis.standstill import judge

_LAST_LOOK = 0.2
"""Seconds to wait after a rehearsal's last answer; also those for which vLLM must be idle."""
_LAST_LOOK_AT_VLLM = 1.0
"""Most seconds to wait after vLLM's last answer."""
_SETTLED = 0.5
"""Seconds without a new log line after which to stop reading the log.

The log of a dead server is then complete, and a restarted process is left alone.
"""
_SECOND_WITNESS = 2.0
"""Seconds for another channel to confirm a death that the log reports."""
_NO_COMPLETIONS = (400, 404, 501)
"""Statuses of `/v1/completions` on a server of a pooling model; releases differ."""
_SICK = (None, 500, 503)
"""Statuses of `/health` when the engine is dead; None: no connection."""
_LOOK_AGAIN = (0.02, 0.25, 0.75)
"""Seconds between further looks: a gateway may answer for the server."""
# seconds between two looks at the processes, the counters and the GPUs
_CHILDREN_POLL = 0.25
_COUNTERS_POLL = 0.5
_GPU_POLL = 5.0
_QUIET = 5.0
"""Seconds without progress after which a wait is shown."""


class Watch:
    """Watch of one server on all channels, from its launch to its exit, for signs of death.

    notify: called with lines of progress. See the module.
    """

    def __init__(
        self,
        server: Server,
        kind: ServerKind,
        client: Client,
        journal: Journal,
        limits: TimeLimits,
        notify: Callable[[str], None],
        gpus: Sequence[str] = (),
    ) -> None:
        self.server = server
        self.kind = kind
        self.client = client
        self.journal = journal
        self.limits = limits
        self.notify = notify
        self.gpus = gpus
        self.signs: list[DeathSign] = []
        self.dead = asyncio.Event()
        self.exit: Exit | None = None
        """How the server exited, also after an ordered shutdown."""
        self.hung: str | None = None
        """The sentence on a hang, during the boot or later."""
        self.counters = Counters(server.base_url, client, self.note, new=kind.facts.started)
        self.gpu_uses: list[GpuUse] = []
        """Readings of the leased cards since the last phase.

        Taken only during a load: each reading starts a process.
        """
        self.in_flight = 0
        """Requests of the harness, canaries included, that have no answer yet."""
        self.load: LoadClient | None = None
        """The client of the load that is being measured."""
        self.failed: FailedRequest | None = None
        """The request in which a death showed.

        It is the first failed one since the last token, or one whose error names the death.
        """
        self.broken = False
        """A channel failed, so `dead` is set although the engine may live."""
        self.fatal_lines = 0
        """Lines of the log so far that report a death."""
        self.refuted_lines = 0
        """Of `fatal_lines`, those that came before a canary that returned a token."""
        self._ready = False
        self._stopping = False
        self._last_growth = time.monotonic()
        self._last_line = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()

    async def __aenter__(self) -> Self:
        for channel in (
            self._watch_exit(),
            self._watch_ranks(),
            self._watch_health(),
            self._watch_children(),
            self._watch_counters(),
            self._watch_gpus(),
        ):
            self._start(channel)
        if self.server.log_path is not None:
            self._start(self._watch_log(self.server.log_path))
        for rank, path in enumerate(self.server.rank_logs, 1):
            self._start(self._watch_log(path, rank))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        for broken in (end for end in ends if isinstance(end, Exception)):
            # A failed channel sees nothing more, so its silence proves nothing.
            self.journal.write("channel-broken", detail=f"{type(broken).__name__}: {broken}")
            raise broken

    def _start(self, channel: Coroutine[Any, Any, None]) -> None:
        """Run the watch of one channel as a task, until the `with` block ends."""
        task = asyncio.create_task(channel)
        task.add_done_callback(self._channel_ended)
        self._tasks.append(task)

    def _channel_ended(self, task: asyncio.Task[None]) -> None:
        """End the trial at once if a channel failed, for example because the disk is full.

        Set `broken`, `dead` and `ended`; `__aexit__` raises the exception of the channel.
        """
        if not task.cancelled() and task.exception() is not None:
            self.broken = True
            self.dead.set()
            self._over.set()

    async def until_ready(self) -> bool:
        """Wait until `/health` answers 200, read the counters for the first time, and return True.

        Return False if the engine died, a channel failed or the container engine was lost. Also
        after `limits.boot_stall` seconds without a new log line: set `hung` then. Other channels
        judge health, counters and processes only once this returned True.

        Raises `InfraError` if another server listens at the URL.
        """
        began = time.monotonic()
        while not self.dead.is_set() and not (self.exit is not None and self.exit.lost):
            if await self._health_status() == 200 and not self.dead.is_set():
                if listener := await asyncio.to_thread(self.server.other_listener):
                    raise InfraError(
                        f"another server listens at {self.server.base_url}: {listener}"
                    )
                # A silent restart shows as a difference to this reading, so take it before any
                # request.
                await self.counters.scrape()
                self._ready = True
                return True
            quiet = time.monotonic() - max(self._last_growth, began)
            if quiet > self.limits.boot_stall:
                self.hung = (
                    f"nothing moved for {quiet:.0f} s while it booted; the last line was:"
                    f" {self._last_line[:200]}"
                )
                self.journal.write("boot-stalled", seconds=quiet, last_line=self._last_line[:500])
                return False
            waited = time.monotonic() - began
            self.notify(
                f"booting for {waited:.0f} s, waiting for /health; last line {quiet:.0f} s ago:"
                f" {self._last_line[:100]}"
            )
            await self._sleep_unless_dead(0.1 if waited < 60 else 0.5)
        return False

    async def ask(
        self,
        endpoint: str,
        body: Mapping[str, Any],
        *,
        canary: bool = False,
        by: LoadClient | None = None,
    ) -> tuple[Answer, bool]:
        """Send a request; return its answer, and True if that names a dead engine.

        Note a sign of death in the answer, and keep its request in `failed`. by: the client of a
        load if there is one.
        """
        self.in_flight += 1
        try:
            answer = await (by or self.client).ask(endpoint, body)
        finally:
            self.in_flight -= 1
        sign = sign_of_answer(answer, canary=canary)
        if sign is not None:
            if (
                answer.error is not None
                and not canary
                and (
                    self.failed is None
                    or answer.names_dead_engine > self.failed.answer.names_dead_engine
                )
            ):
                self.failed = FailedRequest(endpoint, body, answer)
            self.note(sign)
        return answer, sign is not None and answer.names_dead_engine

    async def aftermath(self) -> None:
        """Wait until the server is gone and its log is complete, at most `limits.grace` seconds.

        Call it after the first sign of death. If the server was restarted, its first process is
        gone already: wait half a second, and leave the second one alone.
        """
        began = time.monotonic()
        while (waited := time.monotonic() - began) < self.limits.grace:
            settled = time.monotonic() - self._last_growth > _SETTLED
            restarted = any(sign.channel is Channel.RESTART for sign in self.signs)
            if (restarted and waited > _SETTLED) or (settled and self.exit is not None):
                break
            await asyncio.sleep(0.05)

    async def last_look(self) -> None:
        """Wait briefly: the engine may still crash in the step after the last response.

        At most a second, or 0.2 s for a rehearsal. Return early once the engine is dead or idle.
        """
        end = time.monotonic() + (_LAST_LOOK_AT_VLLM if self.kind.facts.runs_vllm else _LAST_LOOK)
        samples: list[CpuSample] = []
        while not self.dead.is_set() and time.monotonic() < end:
            spent = None
            # an engine that waits for a GPU may use no processor time
            if self.kind.facts.started and not self.gpus:
                spent = await asyncio.to_thread(lambda: engine_cpu_seconds(self.server.processes()))
            if spent is not None:
                samples.append(CpuSample(time.monotonic(), spent))
                if is_idle(samples, _LAST_LOOK):
                    return
            await self._sleep_unless_dead(_LAST_LOOK / 10)

    def stopping(self) -> None:
        """Ignore every sign from now on: the server is being stopped."""
        self._stopping = True

    async def hang(self, detail: str, seconds: float) -> None:
        """Record a hang: the engine has made no progress for `seconds`.

        Read the stacks of its processes. Set `hung` to `detail`, a sentence, and to where it hangs;
        set `ended`; write both to the journal, and note a sign that is not decisive.
        """
        now = time.time()
        self.journal.write("hung", detail=detail, seconds=seconds)
        self.hung = detail
        waited = seconds if self.in_flight else 0.0
        pids = self.server.processes()
        # without it the report lacks a sentence; the outcome must not change
        with contextlib.suppress(Exception):
            stands = judge(await asyncio.to_thread(observe, self.server.base_url, pids, waited))
            self.hung = f"{detail}. {stands.kind}: {stands.why}"
            self.journal.write("stands", kind=stands.kind, why=stands.why, stacks=stands.folded)
        self.note(DeathSign(Channel.COUNTERS, detail, now, now - seconds, decisive=False))
        self._over.set()

    def note(self, sign: DeathSign) -> None:
        """Record a sign and write it to the journal; the first decisive one sets `dead`.

        Ignore it after `stopping`. Ignore a second sign of a channel, too, unless it is decisive
        and the first was not.
        """
        if self._stopping:
            return
        if any(old.channel is sign.channel and old.decisive >= sign.decisive for old in self.signs):
            return  # keep one per channel, unless only the new one is decisive
        self.signs.append(sign)
        self.journal.write(
            "sign",
            channel=sign.channel,
            detail=sign.detail,
            at=sign.at,
            since=sign.since,
            decisive=sign.decisive,
        )
        if sign.decisive:
            self.dead.set()
            self._over.set()

    async def _watch_exit(self) -> None:
        """Wait until the server's process or container exits, set `exit`, and note that sign.

        It is no sign if the container engine was lost: the server may still run.
        """
        self.exit = await self.server.exited()
        self.journal.write(
            "exited",
            code=self.exit.code,
            detail=self.exit.detail,
            oom_killed=self.exit.oom_killed,
            lost=self.exit.lost,
            asked=self._stopping,
        )
        if self.exit.lost:
            return
        if self.exit.oom_killed:
            self.note(DeathSign(Channel.OOM_KILL, self.exit.detail, self.exit.at, self.exit.at))
        channel = Channel.CONTAINER if self.kind.facts.container else Channel.PROCESS
        self.note(DeathSign(channel, self.exit.detail, self.exit.at, self.exit.at))

    async def _watch_log(self, path: Path, rank: int = 0) -> None:
        """Follow the log of a node, and note each line that reports a death.

        Each new line counts as progress of the boot. rank: of the node; 0 for the first one.
        """
        async for line, written in follow(path):
            self._last_growth = time.monotonic()
            if line.strip() and not rank:
                self._last_line = line.strip()
            self._see_line(rank, line, written)

    def _see_line(self, rank: int, line: str, written: float) -> None:
        """Note a log line as a sign if it reports a death.

        Add a decisive one of the first node to `fatal_lines`. If the server was ready or is
        attached, it must be confirmed first (`_confirm`). written: when, in epoch seconds.
        """
        known_sign = log_sign(line)
        if known_sign is None:
            return
        now, text = time.time(), line.strip()[:500]
        sign = DeathSign(
            Channel.RANK if rank else Channel.LOG,
            f"rank {rank}: {text}" if rank else text,
            now,
            min(written, now),
            decisive=known_sign[1],
        )
        if sign.decisive and not rank:
            self.fatal_lines += 1
            if (self._ready or not self.kind.facts.started) and not self._stopping:
                self._start(self._confirm(sign, wait=_SECOND_WITNESS))
                return
        self.note(sign)

    async def _confirm(self, sign: DeathSign, *, wait: float = 0.0) -> None:
        """Confirm a sign of death of a ready server: it counts unless the engine returns a token.

        A log may quote such a line, and a gateway may answer `/health`.

        Note the sign as not decisive, and wait `wait` seconds for another channel, which shows a
        real death in milliseconds. Then ask for a token; without one the sign is decisive.
        """
        self.note(replace(sign, decisive=False))
        await self._sleep_unless_dead(wait)
        quoted = sign.channel is Channel.LOG and self.refuted_lines == self.fatal_lines
        if self.dead.is_set() or self._stopping or quoted:
            return
        lives = False
        try:
            async with asyncio.timeout(self.limits.grace):
                lives = gave_a_token(await self.ask_for_a_token(await self.client.model_name()))
        except (TimeoutError, HTTPError, ValueError, LookupError, TypeError):
            pass  # without an answer the sign stands
        if not lives:
            self.note(sign)

    async def ask_for_a_token(self, model: str) -> Answer:
        """Send the canary, a request for one token: only its answer proves that the engine steps.

        A server of a pooling model has no completions: send it a word to pool instead. A token
        refutes the log's lines so far (`refuted_lines`) and clears `failed`.
        """
        lines = self.fatal_lines
        body = {"model": model, "prompt": "hello", "max_tokens": 1, "temperature": 0}
        answer, _ = await self.ask("/v1/completions", body, canary=True)
        if answer.status in _NO_COMPLETIONS:
            pooled, _ = await self.ask("/pooling", {"model": model, "input": "hello"}, canary=True)
            answer = pooled if pooled.status == 200 else answer
        if gave_a_token(answer):
            self.refuted_lines = lines
            self.failed = None
        return answer

    async def _watch_ranks(self) -> None:
        """Wait until the server of a further node exits; during the boot, note that as a death.

        Raises `InfraError` if its container engine was lost.
        """
        rank, ended = await self.server.rank_exited()
        self.journal.write(
            "rank-exited", rank=rank, code=ended.code, detail=ended.detail, ready=self._ready
        )
        if ended.lost:
            raise InfraError(f"rank {rank}: {ended.detail}")
        if not self._ready:
            # The first node would wait for it forever. After the boot the engine may run without
            # that process.
            self.note(DeathSign(Channel.RANK, f"rank {rank}: {ended.detail}", ended.at, ended.at))

    async def _health_status(self) -> int | None:
        """Return the status of `/health`; None if nothing answers, 0 if it took too long."""
        try:
            return (await self.client.get("/health", timeout=5.0)).status_code
        except TimeoutException:
            return 0
        except (HTTPError, OSError):
            return None

    async def _watch_health(self) -> None:
        """Poll `/health` of a ready server, and confirm a death if it keeps failing."""
        refuted = False
        while True:
            await asyncio.sleep(0.1)
            if not self._ready:
                continue
            first = time.time()
            for pause in (*_LOOK_AGAIN, 0.0):
                status = await self._health_status()
                if status not in _SICK:
                    refuted = False
                    break
                await asyncio.sleep(pause)
            else:
                if not refuted:
                    detail = f"answers {status}" if status else "the connection is refused or reset"
                    await self._confirm(
                        DeathSign(Channel.HEALTH, f"/health: {detail}", time.time(), first)
                    )
                    refuted = True

    async def _watch_children(self) -> None:
        """Note when EngineCore or a worker exits after the boot while the API server still runs."""
        known: dict[int, str] = {}
        leader: int | None = None
        while True:
            await asyncio.sleep(_CHILDREN_POLL)
            pids = self.server.processes()
            if leader is None and pids:
                leader = pids[0]
            if leader is None or not pids or pids[0] != leader:
                # After the API server exits the next process is first, and the rest of the engine
                # exits too.
                known.clear()
                continue
            children = pids[1:]
            for pid in [pid for pid in known if pid not in children]:
                name = known.pop(pid)
                if self._ready and is_alive(leader) and name.startswith("VLLM::"):
                    now = time.time()
                    self.note(
                        DeathSign(
                            Channel.ENGINE_PROCESS,
                            f"{name} (pid {pid}) is gone, the API server is there",
                            now,
                            now,
                        )
                    )
            for pid in children:
                # gone, or without a command line yet
                with contextlib.suppress(psutil.Error, IndexError):
                    # vLLM names a process some time after its start, so read the name again until
                    # then.
                    if not known.get(pid, "").startswith("VLLM::"):
                        known[pid] = _own_name(psutil.Process(pid))

    async def _watch_counters(self) -> None:
        """Poll `/metrics`; record a hang if nothing moves for `limits.answer_stall` seconds.

        Only while a request is in flight. Raises `InfraError` instead if `/metrics` never answered.
        """
        moved = time.monotonic()
        last: tuple[float, ...] = ()
        seen: set[tuple[float, ...]] = set()
        while True:
            await asyncio.sleep(_COUNTERS_POLL)
            if not self._ready:
                moved = time.monotonic()
                continue
            reading = await self.counters.scrape()
            if self.dead.is_set():
                continue
            # A hung API server answers no /metrics either: count no reading as no progress.
            counted = last[1:] if reading is None else reading.progress
            running = 0.0 if reading is None else reading.running
            before, last = (
                last,
                (
                    self.client.received + (self.load.received if self.load else 0),
                    *counted,
                ),
            )
            # Progress is a state of the counters that was not seen before. One that only repeats
            # states, as a request that is preempted again and again does, makes none. New answers
            # or generated tokens make all states new.
            if last[:-1] != before[:-1]:
                seen.clear()
            if last not in seen or (self.in_flight == 0 and running == 0):
                moved = time.monotonic()
            seen.add(last)
            still = time.monotonic() - moved
            if still > _QUIET and not self.ended:
                waits = f"waiting for {plural(self.in_flight, 'answer')}"
                limit = f"a hang after {self.limits.answer_stall:.0f} s"
                self.notify(f"{waits}: nothing moved for {still:.0f} s; {limit}")
            if still > self.limits.answer_stall and not self.ended:
                if not self.counters.answered:
                    raise InfraError(
                        f"/metrics never answered, so a request of {still:.0f} s may be slow or"
                        " hang",
                        hint="serve /metrics, or wait longer with --answer-stall",
                    )
                counters = (
                    "/metrics does not answer"
                    if reading is None
                    else f"{running:g} requests running"
                )
                await self.hang(
                    f"{counters}, {self.in_flight} of ours in flight, and nothing moved for"
                    f" {still:.0f} s; /health answers {await self._health_status() or 'nothing'}",
                    still,
                )

    async def _watch_gpus(self) -> None:
        """Sample the leased GPUs every five seconds while a load is measured."""
        while self.gpus:
            await asyncio.sleep(_GPU_POLL)
            with contextlib.suppress(InfraError):  # the figures are the same without it
                if self.load and (use := await asyncio.to_thread(gpu_use, self.gpus)):
                    self.gpu_uses.append(use)

    async def over(self) -> None:
        """Wait until the engine is dead or hung, or a channel failed."""
        await self._over.wait()

    @property
    def ended(self) -> bool:
        """True if the engine is dead or hung, or a channel failed."""
        return self._over.is_set()

    async def _sleep_unless_dead(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the engine is dead if that is sooner."""
        with contextlib.suppress(asyncio.TimeoutError):  # it lives
            await asyncio.wait_for(self.dead.wait(), seconds)


def gave_a_token(answer: Answer) -> bool:
    """Return True if the answer to the canary proves that the engine steps."""
    return answer.status == 200 and answer.error is None and not answer.empty


def _own_name(process: psutil.Process) -> str:
    """Return the name that a process set; empty for a new fork, which has its parent's name.

    A compiler that EngineCore starts is such a fork at first; its end is not a death of the engine.
    """
    name = process.cmdline()[0]
    parent = process.parent()
    return "" if parent is not None and parent.cmdline()[:1] == [name] else name
