"""One run of one client against one server: both pinned, the client's processes watched, its report matched with the server's record."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.loadgen.clients import Client, Shape
from benchmarks.loadgen.driver import Done

SERVER_CORE, *_, CLIENT_CORE = [*sorted(os.sched_getaffinity(0)) * 2][:2]
Options = Mapping[str, object]
"""Options of the server by name: `{"ttft": 20, "fault": "cut"}`."""
NO_OPTIONS: Options = MappingProxyType({})
_TICK = 0.05
REAL_TIME = bool(os.environ.get("LOADGEN_REAL_TIME"))
"""Run server and clients in the real-time class (root): for a machine that others use, too."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """The client's process tree at one moment: processor seconds up to then, and anonymous memory in MiB."""

    at: float
    cpu_s: float
    mib: float


@dataclass(frozen=True)
class Run:
    """What client and server know of one run. Times by `time.perf_counter`.

    done: the requests by the client's own report; None if it wrote none. record: the same by the server. died: when the server was killed.
    status: the client's exit status; None if it had to be ended.
    """

    shape: Shape
    done: list[Done] | None
    record: list[dict[str, Any]]
    died: float | None
    began: float
    ended: float
    status: int | None
    cpu_s: float
    samples: tuple[Sample, ...]
    output: str

    @property
    def startup_s(self) -> float:
        return float(self.record[0]["got"]) - self.began

    @property
    def mib(self) -> float:
        return max((sample.mib for sample in self.samples), default=0.0)

    @property
    def tokens(self) -> int:
        return sum(int(one["sent"]) for one in self.record)

    def cpu_per_million(self) -> float:
        """Return processor seconds per million tokens, from the first request to the last token. Needs a record with times."""
        first, last = self.record[0]["got"], max(one["times"][-1] for one in self.record if one["times"])
        return (self._cpu_at(last) - self._cpu_at(first)) / self.tokens * 1e6

    def _cpu_at(self, at: float) -> float:
        before = max((one for one in self.samples if one.at <= at), key=lambda one: one.at)
        after = min((one for one in self.samples if one.at > at), key=lambda one: one.at, default=before)
        if after is before:
            return before.cpu_s
        return before.cpu_s + (after.cpu_s - before.cpu_s) * (at - before.at) / (after.at - before.at)

    def requests_per_s(self) -> float:
        """Return requests answered per second, without the first two waves: each later request came when another was done."""
        got = sorted(float(one["got"]) for one in self.record)
        skipped = 2 * self.shape.streams
        return (len(got) - 1 - skipped) / (got[-1] - got[skipped])

    def matched(self) -> Iterator[tuple[Done, dict[str, Any]]]:
        """Return each good request of the client with the server's record of it."""
        for one in self.done or ():
            if not one["error"] and one["times"]:
                yield one, self.record[int(one["text"].split()[0].removeprefix("r"))]

    def ttft_errors(self) -> list[float]:
        """Return |TTFT by the client - TTFT by the server| in seconds, sorted."""
        return sorted(
            abs((one["times"][0] - one["sent"]) - (true["times"][0] - true["got"])) for one, true in self.matched()
        )

    def itl_errors(self) -> list[float]:
        """Return |gap by the client - gap by the server| of all pairs of tokens in seconds, sorted."""
        return sorted(
            abs((b - a) - (d - c))
            for one, true in self.matched()
            for a, b, c, d in zip(one["times"], one["times"][1:], true["times"], true["times"][1:], strict=False)
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextlib.contextmanager
def serving(folder: Path, options: Options) -> Iterator[tuple[str, Path]]:
    """Run a server on its core. Yields its URL and the file of its record, which is there when this returns."""
    record = folder / "record.json"
    words = [sys.executable, "-m", "benchmarks.loadgen.server", "--record", str(record)]
    words += [f"--{name}={value}" for name, value in options.items()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: _pin(SERVER_CORE)) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{server.stdout.readline().split()[1]}", record
        finally:
            server.terminate()


def run(
    client: Client, shape: Shape, *, limit: float = 120.0, extra: Sequence[str] = (), server: Options = NO_OPTIONS
) -> Run:
    """Run one client against a server of its own. It is ended `limit` seconds after its start. extra: more words of its command."""
    with tempfile.TemporaryDirectory(prefix="vllm-repro-loadgen-") as name:
        folder = Path(name)
        samples: list[Sample] = []
        with serving(folder, server) as (url, record), (folder / "output.txt").open("wb") as output:
            words = [*client.argv(shape, url, folder), *extra]
            began = time.perf_counter()
            process = subprocess.Popen(
                words,
                env={**os.environ, **client.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: _pin(CLIENT_CORE),
            )
            status, cpu = _watch(process.pid, began + limit, samples)
            ended = time.perf_counter()
            process.returncode = status  # `wait4` has taken it
        done: list[Done] | None = None
        with contextlib.suppress(OSError, ValueError):  # no report, or half of one
            done = client.read(folder)
        found = json.loads(record.read_text())
        text = (folder / "output.txt").read_text(errors="replace")
        ended_itself = ended < began + limit
        kept = _journal(folder)
        return Run(
            shape=shape,
            done=done,
            record=found["requests"],
            died=found["died"],
            began=began,
            ended=ended,
            status=status if ended_itself else None,
            cpu_s=cpu,
            samples=tuple(samples),
            output=kept or text,
        )


def _journal(folder: Path) -> str:
    """Return the journal of a run of the command; empty if it is another client's folder."""
    return next((path.read_text() for path in folder.glob("loadgen/2*/journal.jsonl")), "")


def _watch(pid: int, until: float, samples: list[Sample]) -> tuple[int, float]:
    """Sample a process tree until it ends. Return its exit status and its processor seconds."""
    while True:
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if ended:
            with contextlib.suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        if time.perf_counter() > until:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        samples.append(_sample(pid))
        time.sleep(_TICK)


def _sample(pid: int) -> Sample:
    cpu = mib = 0.0
    for one in _tree(pid):
        with contextlib.suppress(OSError, IndexError):  # it has ended
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            cpu += sum(map(int, fields[11:15])) / _TICKS_PER_S
            status = Path(f"/proc/{one}/status").read_text()
            mib += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) / 1024
    return Sample(time.perf_counter(), cpu, mib)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


def _pin(core: int) -> None:
    os.sched_setaffinity(0, {core})
    if REAL_TIME:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
