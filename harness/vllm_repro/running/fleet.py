"""Runs on a Ray cluster: `--on`. Each is one Ray task, which starts `item` on a node and yields what that writes.

The folder of a run is copied as it grows, so it is the node's to the byte, and whatever is lost, `--resume` finds what was seen. Ray is
imported only here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from vllm_repro import errors
from vllm_repro.diagnosis.boot_facts import boot_facts
from vllm_repro.errors import InfraError, ReproError, Unsupported, UsageError
from vllm_repro.evidence import Evidence
from vllm_repro.journal.journal import Journal, read
from vllm_repro.report.build import build
from vllm_repro.report.files import write_reports
from vllm_repro.report.model import RunReport
from vllm_repro.running.assess import Conclusion
from vllm_repro.running.folders import private_folders, private_hosts, private_users, run_folder
from vllm_repro.running.item import ERROR, NODE, OUTPUT, SITE, Item, run_item
from vllm_repro.running.job import Chosen, Elsewhere, Job, repeat_command
from vllm_repro.running.resume import UnfinishedRun
from vllm_repro.running.run import signals_later, strongest_record
from vllm_repro.running.terminal import Progress
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import needs_of
from vllm_repro.trigger.trigger import TriggerResult
from vllm_repro.verdict.outcome import Outcome

__all__ = ["Fleet", "connect", "results"]

T = TypeVar("T")
R = TypeVar("R")

RESOURCE = "vllm_repro"
"""Ray's resource of which a run takes one. A node declares how many runs it bears; without it a run takes a CPU."""

_CORES_PER_RUN = 4
"""On one machine: a server and its client keep this many busy."""
_ANSWERS_IN_S = 15.0
_ASKED_EVERY_S = 1.0
_STARTS_IN_S = 60.0
_ENDS_IN_S = 60.0
_CHECK = (
    "`ray start --head` starts a cluster and prints HOST:PORT, `ray status` shows it. One with a token needs RAY_AUTH_MODE=token here, one "
    "without RAY_AUTH_MODE=disabled"
)


@functools.cache
def connect(on: str) -> Fleet:
    """Return the cluster that `--on` names. Raises `UsageError` or `InfraError` if there is none."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    where: dict[str, Any] = {"address": on}
    if on == "local":
        runs = max(1, (os.cpu_count() or 1) // _CORES_PER_RUN)
        where |= {"resources": {RESOURCE: runs}, "include_dashboard": False, "object_store_memory": 100 << 20}
        # Else Ray writes a token to ~/.ray, by which `--on auto` could not talk to a cluster that was started before.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray  # here: an extra, and it reads the environment
    except ImportError:
        raise UsageError("--on needs Ray, which is not installed", hint="pip install 'vllm-repro[ray]'") from None
    if on.startswith("ray://"):
        raise UsageError(
            "Ray Client (ray://) cannot stream what a run writes",
            hint="call this on a machine of the cluster with --on auto, or send it there: ray job submit -- vllm-repro … --on auto",
        )
    if on not in ("local", "auto"):
        _refuse_silent(on)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(**where, log_to_driver=False, logging_level="error")
        # Ray waits without end for a cluster that started without the token of this user.
        ray.get(ray.remote(num_cpus=0, max_retries=0)(lambda: None).remote(), timeout=_STARTS_IN_S)
    except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
        text = _one_line(error)
        if "Version mismatch" in text:
            raise UsageError(text, hint="call this with the Python and the Ray of the cluster") from error
        raise InfraError(f"no Ray cluster at {on} takes a task: {text}", hint=_CHECK) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # Ray sets its own
    return Fleet(ray)


def _refuse_silent(address: str) -> None:
    """Raise `InfraError` if no Ray cluster answers at `address`: `ray.init` waits for one without end."""
    words = ["-m", "ray.scripts.scripts", "health-check", "--skip-version-check", "--address", address]
    try:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=_ANSWERS_IN_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise InfraError(f"no Ray cluster answers at {address} within {_ANSWERS_IN_S:.0f} s", hint=_CHECK) from None
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise InfraError(f"the Ray cluster at {address} refuses this command: {last}", hint=_CHECK)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(f'{error}'.split())}"


def results(work: Callable[[T], R], items: Sequence[T], elsewhere: Elsewhere | None) -> Iterator[tuple[T, R]]:
    """Yield each item with the result of `work`: here one after the other, elsewhere all at once and the first to finish first."""
    if elsewhere is None or len(items) < 2:
        yield from ((item, work(item)) for item in items)
        return
    with ThreadPoolExecutor(len(items)) as threads:
        begun = {threads.submit(work, item): item for item in items}
        pending, never_begun = set(begun), None
        try:
            while pending:
                try:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                except KeyboardInterrupt as name:
                    elsewhere.interrupt(f"{name}" or "SIGINT")
                    continue
                for one in done:
                    if isinstance(one.exception(), KeyboardInterrupt):
                        never_begun = one.exception()
                    else:
                        yield begun[one], one.result()
            if never_begun is not None:
                raise never_begun
        finally:
            if pending:  # one of them raised
                elsewhere.interrupt("SIGTERM")


class _HeadGone(InfraError):
    """The cluster has lost its head node, and with it all runs."""


class Fleet:
    """A cluster that this process is connected to. ray: the module; tests give another one."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._head = str(ray.get_runtime_context().gcs_address)
        self._interrupted = ""
        self._begun = False

    def interrupt(self, name: str) -> None:
        self._interrupted = name

    def room(self, job: Job) -> int:
        """Return how many such jobs the nodes bear at once, at least one."""
        wanted = self._demand(job, Unsupported)
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return max(1, sum(int(min(node.get(name, 0) / number for name, number in wanted.items())) for node in nodes))

    def run(self, job: Job, progress: Progress, chosen: Chosen, unfinished: UnfinishedRun | None) -> RunReport:
        """Run `job` on a node, and if that is lost once more on another: from where the first one was, if the machines are alike."""
        repeat = repeat_command(
            "run", job, job.choice.kind, ("--vllm", job.options.vllm or job.version(job.choice.kind))
        )
        job = replace(job, elsewhere=None, reproduce=job.reproduce or repeat)
        copy = _Copy(job, progress, chosen, unfinished.folder if unfinished else None)
        lost = ""
        while True:
            try:
                trouble = self._try(job, copy, lost)
            except UsageError:
                if not lost or copy.folder is None:
                    raise
                _write_reports(copy.folder, job)  # what was seen stays there
                progress.line("the other node is another kind of machine; the run begins anew")
                copy.folder = None
                continue
            except _HeadGone as error:
                copy.record_loss(f"{error}")
                raise InfraError(f"{error}", hint=self._resume(copy, job)) from None
            except InfraError as error:
                if not lost:
                    raise
                trouble = f"{error}"
            if not trouble or self._interrupted:
                break
            copy.record_loss(trouble)
            if lost:
                raise InfraError(f"{lost}, and then {trouble}", hint=self._resume(copy, job))
            progress.line(f"{trouble}; the run is tried on another node")
            lost = trouble
        if copy.folder is None:
            raise KeyboardInterrupt(self._interrupted)
        if read(copy.folder / "journal.jsonl").cut:
            with Journal(copy.folder / "journal.jsonl") as journal:
                journal.write("run-ended", interrupted=self._interrupted)
            _write_reports(copy.folder, job)
        return build(copy.folder)

    @staticmethod
    def _resume(copy: _Copy, job: Job) -> str:
        if copy.folder is None:
            return job.reproduce
        _write_reports(copy.folder, job)
        return f"vllm-repro run --resume {shlex.quote(str(copy.folder))} --on CLUSTER"

    def _try(self, job: Job, copy: _Copy, lost: str) -> str:
        """Run the job on one node. Return how the node was lost; empty if it was not, or if a signal interrupted the run."""
        ray = self._ray
        demand = self._demand(job, InfraError if lost else Unsupported)
        stream = None
        copy.begin()
        try:
            rest = {RESOURCE: 1} if RESOURCE in demand else {}
            cores, gpus = demand.get("CPU", 0), demand.get("GPU", 0)
            task = ray.remote(num_returns="streaming", max_retries=0, num_cpus=cores, num_gpus=gpus, resources=rest)(
                run_item
            )
            stream = task.remote(_item(job, copy.folder), _files(job, copy.folder))
            began = asked = answered = time.monotonic()
            while not self._interrupted:
                ready, _ = ray.wait([stream], timeout=_ASKED_EVERY_S)
                if ready:
                    copy.take(*ray.get(next(stream)))
                    self._begun = True
                now = time.monotonic()
                if now - asked < _ASKED_EVERY_S:
                    continue
                asked = now
                if self._head_answers():
                    answered = now
                elif now - answered > _ANSWERS_IN_S:  # though chunks may still come
                    raise _HeadGone(f"the head node of the cluster, {self._head}, is gone")
                if not self._begun and now - began > _ANSWERS_IN_S:  # later runs wait for earlier ones
                    copy.progress.notify(f"waiting until a node has {_words(demand)} free")
        except StopIteration:
            return copy.ended()
        except KeyboardInterrupt as name:
            self.interrupt(f"{name}" or "SIGINT")
        except ray.exceptions.RayTaskError as error:
            text = f"the run could not be started on the node: {' '.join(f'{error.cause!r}'.split())}"
            raise InfraError(text, hint="install the same vllm-repro on each node") from error
        except ray.exceptions.RayError as error:
            first = _one_line(error).partition(". ")[0]
            return f"the node {copy.node or 'of the run'} was lost: {first}"
        if stream is not None:
            ray.cancel(stream)
            with contextlib.suppress(Exception):
                ray.wait([stream], timeout=_ENDS_IN_S)  # until the node has ended its server
        return ""

    def _head_answers(self) -> bool:
        """Return False if nothing listens at the head. After a minute of that Ray ends this process, with a status that has a meaning."""
        host, _, port = self._head.rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return True
        return False

    def _demand(self, job: Job, error: type[ReproError]) -> dict[str, int]:
        """Return the resources that the job needs. Raises `error` if no node has them: Ray itself would wait for ever."""
        gpus = needs_of(job.scenario, job.options).gpus if job.choice.kind.facts.on_gpus else 0
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        counted = any(RESOURCE in node["Resources"] for node in nodes)
        wanted = {"GPU": gpus} if gpus else {}
        wanted[RESOURCE if counted else "CPU"] = 1
        if not any(all(node["Resources"].get(name, 0) >= number for name, number in wanted.items()) for node in nodes):
            has = "; ".join(
                f"{node['NodeManagerAddress']} has {_words({name: node['Resources'].get(name, 0) for name in wanted})}"
                for node in nodes
            )
            raise error(
                f"no node of the cluster has {_words(wanted)}, which {job.scenario.id} needs: {has}",
                hint="add a node; `ray start --num-gpus N --resources '{\"vllm_repro\": 1}'` declares what it has",
            )
        return wanted


def _words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number:g}" for name, number in resources.items())


def _item(job: Job, folder: Path | None) -> Item:
    private: dict[str, Sequence[Any]] = {
        "folders": private_folders(),
        "hosts": private_hosts(job.scenario),
        "users": private_users(job.scenario),
    }
    return Item(
        job=replace(job, private=private),
        resume=folder.name if folder else "",
        diffs=tuple(path.read_bytes() for path in job.options.patch),
        folder=str(Path.cwd()),
    )


def _files(job: Job, folder: Path | None) -> dict[str, bytes]:
    """Return the files that a node needs: of the run to continue, and the reports that a claim of `fixed` rests on."""
    runs, kind = job.out / job.scenario.id, job.choice.kind
    possible = [kind.facts.evidence] if kind.facts.evidence else Evidence
    records = (strongest_record(job.out, job.scenario, one, job.arms, job.version(kind)) for one in possible)
    paths = [runs / record.run / "report.json" for record in records if record]
    paths += [path for path in folder.rglob("*") if path.is_file()] if folder else []
    return {path.relative_to(runs).as_posix(): path.read_bytes() for path in paths}


def _write_reports(folder: Path, job: Job) -> None:
    with signals_later():
        write_reports(build(folder), job.scenario)


class _Copy:
    """The copy of a run's folder on this machine. folder: None until it is known."""

    def __init__(self, job: Job, progress: Progress, chosen: Chosen, folder: Path | None) -> None:
        self.folder, self.progress = folder, progress
        self._job, self._chosen = job, chosen
        self.begin()

    def begin(self) -> None:
        """Prepare for the chunks of another node."""
        self.node, self._line = "", b""
        self._error: ReproError | None = None

    def take(self, name: str, at: int, data: bytes) -> None:
        """Take a chunk."""
        if name == NODE:
            self.node = data.decode()
        elif name == OUTPUT:
            *lines, self._line = (self._line + data).split(b"\n")
            what = " ".join(filter(None, (self._job.scenario.id, self._job.options.vllm)))
            for line in lines:
                self.progress.line(f"{self.node}: {what}: {line.decode('utf-8', 'replace').strip()}")
        elif name == SITE:
            self._chosen(_Site(**json.loads(data)), self._job.choice.why)
        elif name == ERROR:
            said = json.loads(data)
            self._error = getattr(errors, said["type"])(said["message"], hint=said["hint"])
        else:
            run, _, path = name.partition("/")
            if self.folder is None:
                self.folder = run_folder(self._job.out, self._job.scenario.id, run)
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("r+b" if target.exists() else "wb") as file:
                file.seek(at)
                file.write(data)
                file.truncate()

    def ended(self) -> str:
        """Return how the process of the run was lost; empty if it finished. Raises the error that it left."""
        if self._error is not None:
            raise self._error
        if self.folder is not None and not read(self.folder / "journal.jsonl").cut:
            return ""
        return f"the process of the run on the node {self.node} ended early"

    def record_loss(self, why: str) -> None:
        """Write the end of the boot that was lost with its node."""
        for journal, boot in self._open_boot():
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
            log = f"logs/{boot['arm']}-{boot['trial']}.log"
            journal.write("trial-ended", **boot, duration_s=0.0, log=log, rank_logs=[], **conclusion.as_fields())

    def _open_boot(self) -> Iterator[tuple[Journal, Mapping[str, Any]]]:
        path = self.folder / "journal.jsonl" if self.folder else None
        if path is None or not path.exists():
            return
        ended = {(entry["arm"], entry["trial"]) for entry in read(path).of("trial-ended")}
        for entry in read(path).of("trial-started"):
            if (entry["arm"], entry["trial"]) not in ended:
                with Journal(path) as journal:
                    yield journal, {"arm": entry["arm"], "trial": entry["trial"]}


class _Site:
    """The facts of a site on a node."""

    def __init__(self, kind: str, evidence: str, version: str | None, why: str) -> None:
        self.kind, self.evidence, self.version = ServerKind(kind), Evidence(evidence), version
