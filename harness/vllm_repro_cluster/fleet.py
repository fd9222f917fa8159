"""Runs on a Ray cluster: `--on`.

Each run is one Ray task, which starts `item` on a node and yields its output.

The folder of a run is copied as it grows (`run_copy`). The copy is identical, so `--resume` works
after any loss. A server of several hosts gets as many nodes (`ranks`). Ray retries nothing: a run
whose node is lost is resumed from the copy.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_repro.errors import InfraError, ReproError, Unsupported, UsageError
from vllm_repro.journal.journal import Journal, read
from vllm_repro.report.build import build
from vllm_repro.report.model import RunReport
from vllm_repro.running.folders import (
    private_folders,
    private_hosts,
    private_sources,
    private_users,
)
from vllm_repro.running.job import Chosen, Job, repeat_command
from vllm_repro.running.resume import UnfinishedRun
from vllm_repro.running.run import signals_to, strongest_record
from vllm_repro.running.terminal import Progress
from vllm_repro.servers.options import needs_of
from vllm_repro_cluster.item import Item, start_item
from vllm_repro_cluster.run_copy import RunCopy, write_reports_of
from vllm_repro_diagnosis.evidence import Evidence

RESOURCE = "vllm_repro"
"""Ray resource of which a run takes one.

A node declares how many runs it can do at once. Without the resource a run takes a CPU.
"""

_CORES_PER_RUN = 4
"""Cores that a server and its client use on one machine."""
_ANSWERS_IN_S = 15.0
_ASKED_EVERY_S = 1.0
_STARTS_IN_S = 60.0
_ENDS_IN_S = 60.0
_CHECK = (
    "`ray start --head` starts a cluster and prints HOST:PORT, `ray status` shows it. One with a"
    " token needs RAY_AUTH_MODE=token here, one without RAY_AUTH_MODE=disabled"
)


@functools.cache
def connect(on: str) -> Fleet:
    """Connect to the cluster of `--on`, once in a process, and return it.

    Raises `UsageError` or `InfraError` if that fails.
    """
    return Fleet(ray_at(on))


def ray_at(on: str, node: str | None = None) -> Any:
    """Connect this process to a cluster and return Ray's module. Raises like `connect`.

    For `local` start a cluster on this machine, and set its new token in this environment.

    on: the value of `--on`, or the address of a cluster's head. node: the address of the node that
    this process is on; None if Ray has to find it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    where: dict[str, Any] = {"address": on, "_node_ip_address": node}
    if on == "local":
        runs = max(1, (os.cpu_count() or 1) // _CORES_PER_RUN)
        where |= {
            "resources": {RESOURCE: runs},
            "include_dashboard": False,
            "object_store_memory": 100 << 20,
        }
        # Else Ray writes a token to ~/.ray, by which `--on auto` could not talk to a cluster that
        # was started before.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray  # here: an extra, and it reads the environment
    except ImportError:
        raise UsageError(
            "--on needs Ray, which is not installed", hint="pip install 'vllm-repro[ray]'"
        ) from None
    if on.startswith("ray://"):
        raise UsageError(
            "Ray Client (ray://) cannot stream what a run writes",
            hint=(
                "call this on a machine of the cluster with --on auto, or send it there: ray job"
                " submit -- vllm-repro … --on auto"
            ),
        )
    if on not in ("local", "auto"):
        _refuse_silent(on)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(**where, log_to_driver=False, logging_level="error")
        # Ray waits forever for a cluster that started without the token of this user.
        ray.get(ray.remote(num_cpus=0, max_retries=0)(lambda: None).remote(), timeout=_STARTS_IN_S)
    except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
        text = _one_line(error)
        if "Version mismatch" in text:
            raise UsageError(
                text, hint="call this with the Python and the Ray of the cluster"
            ) from error
        raise InfraError(f"no Ray cluster at {on} takes a task: {text}", hint=_CHECK) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # Ray sets its own
    return ray


def _refuse_silent(address: str) -> None:
    """Raise `InfraError` if no Ray cluster answers at `address`, or if it refuses this command.

    `ray.init` would wait forever.
    """
    words = [
        "-m",
        "ray.scripts.scripts",
        "health-check",
        "--skip-version-check",
        "--address",
        address,
    ]
    try:
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=_ANSWERS_IN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InfraError(
            f"no Ray cluster answers at {address} within {_ANSWERS_IN_S:.0f} s", hint=_CHECK
        ) from None
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise InfraError(f"the Ray cluster at {address} refuses this command: {last}", hint=_CHECK)


def _one_line(error: Exception) -> str:
    """Return the class and the message of an exception in one line."""
    return f"{type(error).__name__}: {' '.join(f'{error}'.split())}"


class _HeadGone(InfraError):
    """The cluster has lost its head node and so all runs."""


class Fleet:
    """A Ray cluster that does runs. ray: Ray's connected module; tests pass a fake."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._head = str(ray.get_runtime_context().gcs_address)
        self._interrupted = ""
        self._begun = False

    def interrupt(self, name: str) -> None:
        """Note the signal that ends the command, so that each run stops soon."""
        self._interrupted = name

    def _on_signal(self, number: signal.Signals) -> None:
        """Note the first signal and raise `KeyboardInterrupt`; do nothing for later ones.

        It is noted because Ray discards exceptions raised in its callbacks.
        """
        if not self._interrupted:
            self.interrupt(number.name)
            raise KeyboardInterrupt(number.name)

    def room(self, job: Job) -> int:
        """Return how many such jobs the nodes can run at once, at least one.

        Raises `Unsupported` if no node has the resources of one.
        """
        demand, hosts = self._demand(job, Unsupported)
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        runs = [
            int(min(node.get(name, 0) / number for name, number in demand.items()))
            for node in nodes
        ]
        most = sum(runs) // hosts
        return next(
            (
                room
                for room in range(most, 0, -1)
                if sum(min(count, room) for count in runs) >= hosts * room
            ),
            1,
        )

    def run(
        self, job: Job, progress: Progress, chosen: Chosen, unfinished: UnfinishedRun | None
    ) -> RunReport:
        """Run `job` on a node, copy its folder to this machine, and return its report.

        If the node is lost, resume once on another. Start anew if that is another kind of machine.

        chosen: called with the facts of the node's vLLM. unfinished: the run to resume. Raises
        `InfraError` if the second node or the head is lost too, with the command to resume;
        `KeyboardInterrupt` after a signal before the run had a folder; and the errors of `run_one`.
        """
        repeat = repeat_command(
            "run",
            job,
            job.choice.kind,
            ("--vllm", job.options.vllm or job.version(job.choice.kind)),
        )
        job = replace(job, elsewhere=None, reproduce=job.reproduce or repeat)
        copy = RunCopy(job, progress, chosen, unfinished.folder if unfinished else None)
        lost = ""
        while True:
            try:
                with signals_to(self._on_signal):
                    trouble = self._try(job, copy, lost)
            except UsageError:
                if not lost or copy.folder is None:
                    raise
                write_reports_of(copy.folder, job)  # the observations stay there
                progress.line("the other node is another kind of machine; the run begins anew")
                copy.folder = None
                continue
            except _HeadGone as error:
                copy.record_loss(f"{error}")
                raise InfraError(f"{error}", hint=self._report_lost(copy, job)) from None
            except InfraError as error:
                if not lost:
                    raise
                trouble = f"{error}"
            if not trouble or self._interrupted or copy.finished:
                break
            copy.record_loss(trouble)
            if lost:
                raise InfraError(f"{lost}, and then {trouble}", hint=self._report_lost(copy, job))
            progress.line(f"{trouble}; the run is tried on another node")
            lost = trouble
        if copy.folder is None:
            raise KeyboardInterrupt(self._interrupted)
        if read(copy.folder / "journal.jsonl").cut:
            with Journal(copy.folder / "journal.jsonl") as journal:
                journal.write("run-ended", interrupted=self._interrupted)
            copy.reported = False
        if not copy.reported:
            write_reports_of(copy.folder, job)
        return build(copy.folder)

    @staticmethod
    def _report_lost(copy: RunCopy, job: Job) -> str:
        """Write the reports of a lost run; return the command that resumes it, else repeats it."""
        if copy.folder is None:
            return job.reproduce
        write_reports_of(copy.folder, job)
        return f"vllm-repro run --resume {shlex.quote(str(copy.folder))} --on CLUSTER"

    def _try(self, job: Job, copy: RunCopy, lost: str) -> str:
        """Run the job once on its node or nodes, and wait until it ends.

        Return how the node or its process was lost; empty if it was not, or if a signal interrupted
        the run.

        lost: how the node before was lost; empty for the first. Raises the error that the run left,
        `InfraError` if it could not be started, and `_HeadGone`.
        """
        ray = self._ray
        demand, nodes = self._demand(job, InfraError if lost else Unsupported)
        stream = group = None
        copy.begin()
        try:
            if nodes > 1:
                group = ray.util.placement_group([demand] * nodes, strategy="STRICT_SPREAD")
                needs = job.scenario.needs
                job = replace(
                    job,
                    scenario=replace(job.scenario, needs=replace(needs, gpus=needs.gpus // nodes)),
                )
            item = replace(
                _item(job, copy.folder, demand), nodes=nodes, group=group, cluster=self._head
            )
            stream = start_item(ray, item, 0, _files(job, copy.folder))
            began = looked = answered = time.monotonic()
            while not self._interrupted:
                ready, _ = ray.wait([stream], timeout=_ASKED_EVERY_S)
                if ready:
                    copy.take(*ray.get(next(stream)))
                    self._begun = True
                now = time.monotonic()
                if now - looked < _ASKED_EVERY_S:
                    continue
                looked = now
                if self._head_answers():
                    answered = now
                elif now - answered > _ANSWERS_IN_S:  # even if chunks still come
                    raise _HeadGone(f"the head node of the cluster, {self._head}, is gone")
                # later runs wait for earlier ones
                if not self._begun and now - began > _ANSWERS_IN_S:
                    where = f"{nodes} nodes have" if nodes > 1 else "a node has"
                    copy.progress.notify(f"waiting until {where} {_words(demand)} free")
        except StopIteration:
            return copy.why_lost()
        except _HeadGone:
            group = None  # it ends with this command
            raise
        except KeyboardInterrupt as name:
            self.interrupt(f"{name}" or "SIGINT")
        except ray.exceptions.RayTaskError as error:
            text = (
                f"the run could not be started on the node: {' '.join(f'{error.cause!r}'.split())}"
            )
            raise InfraError(text, hint="install the same vllm-repro on each node") from error
        except ray.exceptions.RayError as error:
            first = _one_line(error).partition(". ")[0]
            return f"the node {copy.node or 'of the run'} was lost: {first}"
        finally:
            if stream is not None and self._interrupted:
                ray.cancel(stream)
                with contextlib.suppress(Exception):
                    # until the node has ended its server
                    ray.wait([stream.completed()], timeout=_ENDS_IN_S)
            if group is not None:
                ray.util.remove_placement_group(group)
        return ""

    def _head_answers(self) -> bool:
        """Return False if nothing listens at the head.

        After a minute without a head Ray ends this process, with a status that has another meaning
        here.
        """
        host, _, port = self._head.rpartition(":")
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host.strip("[]"), int(port)), timeout=2),
        ):
            return True
        return False

    def _demand(self, job: Job, error: type[ReproError]) -> tuple[dict[str, int], int]:
        """Return (resources per node, number of nodes).

        A command for several nodes gets as many, or one if the cluster has too few. Raises `error`
        if no node has the resources: Ray would wait forever.
        """
        needs, kind = needs_of(job.scenario, job.options), job.choice.kind.facts
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        declared = any(RESOURCE in node["Resources"] for node in nodes)
        # one node, unless all arms want the same number of them and start processes of the host
        counts = {job.scenario.command_of(arm).number("--nnodes") or 1 for arm in job.arms}
        wants = counts.pop() if len(counts) == 1 and kind.started and not kind.container else 1
        for hosts in sorted({1, wants}, reverse=True):
            gpus = needs.gpus // hosts if kind.on_gpus else 0
            demand = {**({"GPU": gpus} if gpus else {}), RESOURCE if declared else "CPU": 1}
            able = [
                node
                for node in nodes
                if all(node["Resources"].get(name, 0) >= demand[name] for name in demand)
            ]
            if len(able) >= hosts:
                break
        if not able:
            has = "; ".join(
                f"{node['NodeManagerAddress']} has"
                f" {_words({name: node['Resources'].get(name, 0) for name in demand})}"
                for node in nodes
            )
            raise error(
                f"no node of the cluster has {_words(demand)}, which {job.scenario.id} needs:"
                f" {has}",
                hint=(
                    "add a node; `ray start --num-gpus N --resources '{\"vllm_repro\": 1}'`"
                    " declares what it has"
                ),
            )
        return demand, hosts


def _words(resources: Mapping[str, float]) -> str:
    """Return resources as words, such as `GPU 2, vllm_repro 1`."""
    return ", ".join(f"{name} {number:g}" for name, number in resources.items())


def _item(job: Job, folder: Path | None, demand: Mapping[str, int]) -> Item:
    """Return what a node needs to do a run: job, patches, working folder and resources."""
    private: dict[str, Sequence[Any]] = {
        "folders": [*private_folders(), *private_sources([job.options.vllm])],
        "hosts": private_hosts(job.scenario),
        "users": private_users(job.scenario),
    }
    return Item(
        job=replace(job, private=private),
        resume=folder.name if folder else "",
        diffs=tuple(path.read_bytes() for path in job.options.patch),
        folder=str(Path.cwd()),
        demand={
            "num_cpus": demand.get("CPU", 0),
            "num_gpus": demand.get("GPU", 0),
            "resources": {RESOURCE: 1} if RESOURCE in demand else {},
        },
    )


def _files(job: Job, folder: Path | None) -> dict[str, bytes]:
    """Return the files that a node needs to do a run: name and content.

    They are those of the run to resume, and the reports that a claim of `fixed` compares with.
    """
    runs, kind = job.out / job.scenario.id, job.choice.kind
    possible = [kind.facts.evidence] if kind.facts.evidence else Evidence
    records = (
        strongest_record(job.out, job.scenario, evidence, job.arms, job.version(kind))
        for evidence in possible
    )
    paths = [runs / record.run / "report.json" for record in records if record]
    paths += [path for path in folder.rglob("*") if path.is_file()] if folder else []
    return {path.relative_to(runs).as_posix(): path.read_bytes() for path in paths}
