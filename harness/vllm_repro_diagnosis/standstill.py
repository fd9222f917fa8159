"""Judgement of a live server: if it hangs, and which part of it does. Pure.

A hang is claimed only if requests are pending, no counter moved, and the part that should work
sleeps, is stopped, or steps without tokens. A busy process may be slow: its stacks or its peers
must show more. Otherwise the finding is "cannot tell", with what to look at next.

Function names outlive releases of vLLM, so stacks are judged by them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from vllm_repro_diagnosis.metrics import MetricsReading

_ASLEEP = 0.03
"""Most processors that a sleeping process uses: threads that watch others wake up now and then."""
_WORKS = 0.3
_LOOKS = 4
"""Fewest looks at a process that show what it does: a busy machine may delay this program, too."""
_TOLD, _STEPS = 45.0, 20.0
"""Sleeps a second of an API server that gets the outputs of many steps, and of an EngineCore that
steps. The readings here and probes of `/health` cause up to 40 in an API server."""
_FRAMES, _MOST_STACKS = 14, 8
_WAITING_FOR_REQUESTS = frozenset({"_process_input_queue"})
_WAITING_FOR_WORKERS = frozenset({"_wait_for_response", "dequeue", "get_response"})
_WAITING = _WAITING_FOR_REQUESTS | _WAITING_FOR_WORKERS
_WITHOUT_TOKENS = frozenset({"kv_connector_no_forward"})
_GPU_WAITS = frozenset({"synchronize", "get_output", "async_output_busy_loop"})
_MODEL = frozenset({"_model_forward", "forward", "compute_logits", "_sample", "propose"})
_ON_GPU = _MODEL | _GPU_WAITS | {"execute_model", "sample_tokens"}
"""Functions in which a model computes: on a GPU it does so while its process calls others."""
_QUEUE = ("futex_do_wait", "futex_wait_queue", "futex_wait_queue_me", "do_futex")
"""Kernel functions in which a thread waits for a queue of its process, as an idle EngineCore."""
_POLLING = frozenset({"poll", "recv_multipart"})
_BOOTING = frozenset({"load_model", "wait_for_engine_startup", "wait_for_ready"})
_OF_WORKERS = (
    "vllm/v1/worker/",
    "vllm/model_executor/",
    "vllm/distributed/parallel_state",
    "torch/",
)
_OF_SCHEDULER = ("vllm/v1/core/", "vllm/v1/structured_output/")


class Role(StrEnum):
    """Part that a process has in a server: API server, EngineCore, worker or helper."""

    API = "API server"
    ENGINE = "EngineCore"
    WORKER = "worker"
    OTHER = "helper"


class Kind(StrEnum):
    """State of a live server: slow, idle, a hang and where, dead, or unknown."""

    SLOW = "slow but alive"
    IDLE = "idle"
    SCHEDULER = "hang in the scheduler (EngineCore)"
    WORKER = "hang in a worker or collective"
    API = "hang in the API server"
    DEAD = "dead engine"
    UNKNOWN = "cannot tell"

    @property
    def hangs(self) -> bool:
        """Return True if it is a hang, of the scheduler, a worker or the API server."""
        return self in (Kind.SCHEDULER, Kind.WORKER, Kind.API)


_HANG_OF = {Role.API: Kind.API, Role.ENGINE: Kind.SCHEDULER, Role.WORKER: Kind.WORKER}


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Python stack of a thread."""

    thread: str
    # file:function, outermost first
    frames: tuple[str, ...]

    @property
    def functions(self) -> set[str]:
        """Return the names of the functions in the stack, without files and classes."""
        return {frame.rpartition(":")[2].rpartition(".")[2] for frame in self.frames}

    @property
    def reads_requests(self) -> bool:
        """Return True for EngineCore's thread that reads requests, if it is not waiting for one."""
        return "process_input_sockets" in self.functions and not _POLLING & self.functions

    @property
    def folded(self) -> str:
        """Return the innermost frames in a line, as flame graphs read them."""
        return ";".join((self.thread, *self.frames[-_FRAMES:]))


@dataclass(frozen=True, kw_only=True)
class ProcessReading:
    """Readings of one server process over some seconds: CPU, sleeps and Python stacks."""

    pid: int
    name: str
    role: Role
    # letters of its main thread, as in ps, one for each look
    states: str
    # processors used by all its threads, and by its main thread
    cpu: float = 0.0
    main_cpu: float = 0.0
    # times a second that the main thread went to sleep by itself
    switches: float = 0.0
    # kernel function in which the main thread sleeps; "" if it cannot be seen
    waits_in: str = ""
    # it has a GPU open
    gpu: bool = False
    # stacks of its threads, at several moments; empty without py-spy
    stacks: tuple[tuple[Stack, ...], ...] = ()

    def __str__(self) -> str:
        return f"{self.role} (pid {self.pid})"

    @property
    def line(self) -> str:
        """Return the readings of the process in one line, without stacks."""
        wait = f", sleeps in {self.waits_in}" if self.waits_in else ""
        return (
            f"{self}: {self.cpu:.0%} of a processor, states {self.states or 'unknown'}{wait},"
            f" {self.switches:.0f} sleeps a second"
        )

    @property
    def stopped(self) -> bool:
        """Return True if a signal or a debugger has stopped it (state T or t)."""
        return self.states[-1:] in ("T", "t")

    @property
    def asleep(self) -> bool:
        """Return True if it did nothing, and did not wait for a processor or a disk.

        One look may meet the moment in which a sleeper wakes up to look for work.
        """
        awake = sum(letter not in "SI" for letter in self.states)
        return len(self.states) >= _LOOKS and self.cpu < _ASLEEP and awake <= 1

    @property
    def waits_for_cpu(self) -> bool:
        """Return True if its main thread ran or waited for a processor at most looks (state R)."""
        return self.states.count("R") * 2 > max(len(self.states), 3)

    @property
    def works(self) -> bool:
        """Return True if it uses a processor, or waits for one most of the time."""
        return self.cpu > _WORKS or self.waits_for_cpu

    @property
    def main(self) -> list[Stack]:
        """Return the stacks of its main thread, one for each moment; empty without py-spy."""
        stacks = [stack for dump in self.stacks for stack in dump if stack.frames]
        return [stack for stack in stacks if stack.thread == "MainThread"]

    @property
    def waits_for_program(self) -> bool:
        """Return True if it waits for a program that it started, or for a lock between programs."""
        frames = (frame for stack in self.main for frame in stack.frames)
        return any(frame.startswith(("subprocess.py:", "filelock/")) for frame in frames)

    @property
    def runs_model(self) -> bool:
        """Return True if it may be running the model, or waits for a program such as a compiler."""
        functions = _ON_GPU if self.gpu else _MODEL
        seen = any(stack.functions & functions for stack in self.main)
        return seen or self.waits_for_program or (self.works and not self.main)

    @property
    def may_wait_for_gpu(self) -> bool:
        """Return True if it has a GPU, and its stacks show a wait for it or were not read."""
        return self.gpu and not (
            self.main and all(_GPU_WAITS.isdisjoint(stack.functions) for stack in self.main)
        )

    def always_in(self, functions: frozenset[str]) -> bool:
        """Return True if each stack of its main thread has one of the functions.

        False without a stack.
        """
        return bool(self.main) and all(functions & stack.functions for stack in self.main)

    def always_at(self, files: Sequence[str]) -> bool:
        """Return True if the innermost vLLM or torch frame of each main-thread stack is in `files`.

        files: path prefixes, as in `vllm/v1/core/`. False without a stack, or if one has no such
        frame.
        """
        inner = [
            next(
                (
                    frame
                    for frame in reversed(stack.frames)
                    if frame.startswith(("vllm/", "torch/"))
                ),
                "",
            )
            for stack in self.main
        ]
        return bool(inner) and all(frame.startswith(tuple(files)) for frame in inner)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Observations of a running server over `seconds`, for `judge`."""

    url: str
    seconds: float
    # status of /health, or why there was none; "" if it was not asked
    health: str = ""
    version: str = ""
    # None: no answer
    metrics: tuple[MetricsReading | None, ...] = ()
    # seconds for which the caller has waited for an answer; 0 if it is not known
    waited: float = 0.0
    # connections that stayed open, and those of them whose clients do not read their answers
    clients: int = 0
    unread: int = 0
    # command line of the API server
    command: str = ""
    processes: tuple[ProcessReading, ...] = ()

    def with_role(self, role: Role) -> list[ProcessReading]:
        """Return the processes that have this role, such as all workers."""
        return [process for process in self.processes if process.role is role]

    @property
    def servers(self) -> list[ProcessReading]:
        """Return the API servers, EngineCores and workers, without helpers."""
        return [process for process in self.processes if process.role is not Role.OTHER]

    @property
    def may_get_outputs(self) -> bool:
        """Return True if the API server may be getting outputs of many steps, or was not read."""
        return all(process.switches > _TOLD for process in self.with_role(Role.API))

    @property
    def pages(self) -> list[MetricsReading]:
        """Return the readings of `/metrics` with counters of vLLM."""
        return [page for page in self.metrics if page is not None and page.counts]

    @property
    def requests(self) -> str:
        """Return words for the last counts of requests, running and waiting."""
        return next(
            (
                f"{page.running:g} requests running, {page.waiting:g} waiting"
                for page in self.pages[-1:]
            ),
            "requests not counted",
        )

    @property
    def open(self) -> bool:
        """Return True if a request is unfinished.

        `/metrics` counts it, the caller waits for its answer, or EngineCore is still reading it in.
        """
        counted = any(page.running + page.waiting for page in self.pages[-1:])
        return bool(counted or self.waited or any(map(_busy_reader, self.with_role(Role.ENGINE))))

    @property
    def pending(self) -> bool:
        """Return True if a request is unfinished or a step may run: counters change at its end."""
        return (
            self.open
            or any(worker.works for worker in self.with_role(Role.WORKER))
            or any(
                engine.main and not engine.always_in(_WAITING_FOR_REQUESTS)
                for engine in self.with_role(Role.ENGINE)
            )
        )

    @property
    def unseen(self) -> list[str]:
        """Return what could not be read, each with what to do about it."""
        parts = self.servers
        gaps = {
            "processes (name one with --pid, on the server's host or in its container)": not parts,
            "/health and /metrics (name the server with --url)": not self.url,
            "counters of vLLM in /metrics": bool(self.url) and not self.pages,
            "Python stacks (install py-spy and run this as root or as the server's user)": bool(
                parts
            )
            and not any(process.stacks for process in parts),
        }
        return [gap for gap, open_ in gaps.items() if open_]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Diagnosis of a live server: its state, why, in which processes it hangs, and what to do."""

    kind: Kind
    why: str
    # processes in which it stands
    at: tuple[ProcessReading, ...] = ()
    do: str = ""

    @property
    def folded(self) -> list[str]:
        """Return up to 8 stacks of the processes in `at`, each with how often it was seen."""
        counts = Counter(
            f"{process.name};{stack.folded}"
            for process in self.at
            for dump in process.stacks
            for stack in dump
            if stack.frames and (stack.thread == "MainThread" or stack.reads_requests)
        )
        return [f"{stack} {number}" for stack, number in counts.most_common(_MOST_STACKS)]


def judge(reading: Reading) -> Finding:
    """Return the state of a running server: a hang, slow, idle, dead, or "cannot tell"."""
    for finding in _findings(reading):
        return finding
    return _unknown(f"no counter moved in {reading.seconds:.0f} s, {reading.requests}")


_RESTART = "keep the stacks for a report; only a restart helps"
_TRANSFER = ", unless a KV transfer may take so long"
_AGAIN = "run this again after 30 s: a hang looks the same then"


def _unknown(why: str, do: str = _AGAIN) -> Finding:
    """Return the finding "cannot tell", with the reason and what to do next."""
    return Finding(kind=Kind.UNKNOWN, why=why, do=do)


def _findings(reading: Reading) -> Iterator[Finding]:
    """Yield the findings whose conditions hold, the surest first."""
    yield from _ended(reading)
    yield from _stopped(reading)
    yield from _silent(reading)
    yield from _moving(reading)
    if len(reading.metrics) == 1 or any(len(each.states) < _LOOKS for each in reading.servers):
        yield _unknown("this machine was too busy to read the server often enough")
    yield from _stepping(reading)
    if not reading.pending:
        yield from _idle(reading)
    else:
        yield from _computing(reading)
        yield from _inactive(reading)


def _ended(reading: Reading) -> Iterator[Finding]:
    """Yield a dead or missing server: `/health` answers 5xx, or nothing listens."""
    if reading.health.startswith("5"):
        yield Finding(
            kind=Kind.DEAD,
            why=f"/health answers {reading.health}: the engine has failed",
            do="read its log: vllm-repro diagnose FILE",
        )
    elif "refused" in reading.health:
        yield _unknown(
            f"nothing listens at {reading.url}: the server boots, or has ended",
            "read its log: vllm-repro diagnose FILE",
        )


def _stopped(reading: Reading) -> Iterator[Finding]:
    """Yield each process that a signal or a debugger has stopped."""
    for process in reading.processes:
        if process.stopped and process.role in _HANG_OF:
            by = "a debugger" if process.states.endswith("t") else "a signal such as SIGSTOP"
            yield Finding(
                kind=_HANG_OF[process.role],
                why=f"{process} is stopped by {by} (state {process.states[-1]})",
                at=(process,),
                do=f"find who stopped it; kill -CONT {process.pid} lets it continue",
            )


def _silent(reading: Reading) -> Iterator[Finding]:
    """Yield a server that does not answer over HTTP: it hangs, boots or is busy."""
    if not reading.url or reading.health.isdigit() or any(reading.metrics):
        return
    servers = reading.with_role(Role.API)
    why = f"/health and /metrics of {reading.url} gave no answer in {reading.seconds:.0f} s"
    if any(process.always_in(_BOOTING) for process in servers) or not servers:
        yield _unknown(why + (" (it boots)" if servers else ""))
    elif all(process.asleep for process in servers):
        yield Finding(
            kind=Kind.API,
            why=f"{why}, and {servers[0]} sleeps: it waits for something else than requests",
            at=tuple(servers),
            do=_RESTART,
        )
    else:
        busy = next(process for process in servers if not process.asleep)
        yield _unknown(f"{why}, but {busy} is busy ({busy.cpu:.0%} of a processor)")


def _moving(reading: Reading) -> Iterator[Finding]:
    """Yield an engine that makes progress: tokens came, or a prompt takes more of the KV cache."""
    pages = reading.pages
    if not pages:
        return
    first, last = pages[0], pages[-1]
    tokens = last.generation_tokens - first.generation_tokens
    usage = [page.kv_usage for page in pages]
    if first.progress[:3] != last.progress[:3]:
        moved = f"{tokens:.0f} tokens in {reading.seconds:.0f} s"
    elif usage == sorted(usage) and len(set(usage)) > (2 if reading.may_get_outputs else 1):
        moved = f"a prompt takes more of the KV cache: {usage[0]:.1%}, then {usage[-1]:.1%}"
    else:
        return
    yield Finding(
        kind=Kind.SLOW,
        why=f"{moved}, {reading.requests}",
        do="it makes progress: if that is too little, send less at once or look at the prompts",
    )


def _stepping(reading: Reading) -> Iterator[Finding]:
    """Yield a hang for each EngineCore that is busy while no token comes.

    It steps again and again, or its scheduler or the thread that reads requests does not return.
    """
    usage = [page.kv_usage for page in reading.pages]
    falls = sum(later < before for before, later in pairwise(usage))
    preempted = {page.preemptions for page in reading.pages if page.preemptions is not None}
    empty = any(
        _WITHOUT_TOKENS & stack.functions for process in reading.processes for stack in process.main
    )
    for engine in reading.with_role(Role.ENGINE):
        # all the time: it also polls for a second when a long step begins
        busy = engine.main_cpu > _WORKS or engine.waits_for_cpu or engine.switches > _STEPS
        # in a long step it waits for its workers
        begins = sum(stack.functions.isdisjoint(_WAITING) for stack in engine.main) > 1
        within = ""
        if falls > 1 and len(preempted) > 1 and not engine.asleep:
            within = f"it preempted requests {max(preempted) - min(preempted):.0f} times"
        elif busy and (
            empty or ((begins or reading.may_get_outputs) and not _model_runs(reading, engine))
        ):
            within = "it steps again and again"
        elif engine.main_cpu > _WORKS and engine.always_at(_OF_SCHEDULER):
            within = "it does not return from the scheduler"
        elif (
            engine.cpu > _WORKS
            and engine.main_cpu < _ASLEEP
            and (busy_thread := _busy_reader(engine))
        ):
            within = f"its thread {busy_thread} does not return, so no request reaches it"
        if within:
            yield Finding(
                kind=Kind.SCHEDULER,
                why=(
                    f"{engine} works ({engine.cpu:.0%} of a processor), but no token came in"
                    f" {reading.seconds:.0f} s: {within}; {reading.requests}"
                ),
                at=(engine,),
                do=f"{_RESTART}{_TRANSFER if 'kv_connector' in reading.command else ''}",
            )


def _busy_reader(engine: ProcessReading) -> str:
    """Return the thread that reads requests if it works in each of two or more dumps; else ""."""
    busy = [[stack.thread for stack in dump if stack.reads_requests] for dump in engine.stacks]
    return busy[0][0] if len(busy) > 1 and all(busy) else ""


def _model_runs(reading: Reading, engine: ProcessReading) -> bool:
    """Return True if a model may run in the step: in a worker, or in EngineCore itself."""
    return any(runner.runs_model for runner in reading.with_role(Role.WORKER) or [engine])


def _idle(reading: Reading) -> Iterator[Finding]:
    """Yield a finding if the engine does nothing: idle, slow clients, or "cannot tell".

    Call it if no request is pending.
    """
    engines = reading.with_role(Role.ENGINE)
    asleep = sum(page.asleep for page in reading.pages[-1:])
    if not (reading.pages or engines) or not all(engine.asleep for engine in engines):
        return
    if not reading.processes and not asleep:
        # a request of which no step has ended yet is not counted
        yield _unknown(
            f"the counters show nothing to do ({reading.requests}), but they change only at the end"
            " of a step",
            "if a client waits, name a process with --pid on its host or in its container",
        )
    elif any(not engine.main and engine.waits_in not in ("", *_QUEUE) for engine in engines):
        yield _unknown("EngineCore sleeps, perhaps within a step: its stack would tell")
    elif reading.clients > reading.unread and not asleep:
        yield _unknown(
            f"the engine has nothing to do, but {reading.clients} connections stay open: their"
            " requests are still in the API server, or the engine lost them"
        )
    elif reading.unread:
        yield Finding(
            kind=Kind.SLOW,
            why=f"{reading.unread} clients do not read their answers; {reading.requests}",
            do="look at these clients and at proxies: the engine has nothing to do",
        )
    else:
        yield Finding(
            kind=Kind.IDLE,
            why="/sleep put the engine to sleep"
            if asleep
            else f"nothing to do: {reading.requests}",
            do=(
                "wake it up with POST /wake_up"
                if asleep
                else "if a client waits, its request is not here: look at the client and at proxies"
            ),
        )


def _computing(reading: Reading) -> Iterator[Finding]:
    """Yield a finding if a worker is busy: a slow step, a worker that hangs, or "cannot tell"."""
    runners = reading.with_role(Role.WORKER) or reading.with_role(Role.ENGINE)
    working = [process for process in runners if process.works]
    # one that waits for the next step, or for a program, does not hold up the others
    resting = [
        process
        for process in runners
        if process.asleep and process.main and not process.waits_for_program
        if not process.always_in(_WAITING_FOR_WORKERS)
    ]
    helpers = [process for process in reading.with_role(Role.OTHER) if process.works]
    staged = any("PP" in process.name for process in runners)
    if working and resting and not staged and not helpers:
        yield Finding(
            kind=Kind.WORKER,
            why=(
                f"{resting[0]} sleeps while {working[0]} works, and no token came in"
                f" {reading.seconds:.0f} s; {reading.requests}"
            ),
            at=tuple(resting + working),
            do=_RESTART,
        )
    elif helpers or working:
        busy = (helpers or working)[0]
        # without a stack: a process spins in a collective, too
        in_model = any(stack.functions & _MODEL for stack in busy.main)
        waits = busy.always_in(_WAITING_FOR_WORKERS)
        if busy.gpu or waits or not (in_model or helpers):
            yield _unknown(
                f"{busy} is busy, but no token came in {reading.seconds:.0f} s: a long step, or it"
                f" waits for {'a GPU' if busy.gpu else 'another process'}; {reading.requests}",
            )
        else:
            yield Finding(
                kind=Kind.SLOW,
                why=f"{busy} ({busy.name}) works, no step is done yet; {reading.requests}",
                at=(busy,),
                do="wait for the end of this step; shorter prompts or more processors help",
            )


def _inactive(reading: Reading) -> Iterator[Finding]:
    """Yield a hang or "cannot tell" if EngineCore and all workers use no processor.

    Call it if requests are pending.
    """
    engines, workers = reading.with_role(Role.ENGINE), reading.with_role(Role.WORKER)
    if not engines or not all(process.asleep for process in engines + workers):
        return
    if any(process.may_wait_for_gpu for process in engines + workers):
        yield _unknown(f"the workers wait for their GPUs; {reading.requests}")
        return
    if any(process.waits_for_program for process in engines + workers):
        yield _unknown(
            f"the engine waits for another program, perhaps a compiler; {reading.requests}"
        )
        return
    engine = engines[0]
    stuck = [worker for worker in workers if not worker.always_in(_WAITING_FOR_WORKERS)]
    if engine.main:
        of_worker = engine.always_in(_WAITING_FOR_WORKERS) or engine.always_at(_OF_WORKERS)
    else:
        of_worker = bool(workers) and any(page.running for page in reading.pages[-1:])
    at = (engine, *(stuck or workers)) if of_worker else (engine,)
    what = "a step does not end" if of_worker else "it schedules nothing"
    yield Finding(
        kind=Kind.WORKER if of_worker else Kind.SCHEDULER,
        why=(
            f"{' and '.join(map(str, at[:3]))} did nothing for {reading.seconds:.0f} s, although"
            f" requests are pending ({reading.requests}): {what}"
        ),
        at=at,
        do=_RESTART if of_worker else f"{_RESTART}, unless /pause was called",
    )
