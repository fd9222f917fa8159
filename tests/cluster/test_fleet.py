"""Runs elsewhere: the copy of a run's folder, lost nodes, interrupts.

A fake stands in for Ray; tests/live/test_ray.py has the real one.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import json
import shutil
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from tests.commands import started, write_script
from vllm_repro.errors import InfraError, ReproError, Unsupported, UsageError
from vllm_repro.host.ports import free_port
from vllm_repro.journal.journal import Journal, read
from vllm_repro.report.model import RunReport
from vllm_repro.running.elsewhere import results
from vllm_repro.running.job import Job, SiteFacts
from vllm_repro.running.resume import read_run
from vllm_repro.running.terminal import Progress
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import ServerChoice
from vllm_repro_cluster import fleet as fleets
from vllm_repro_cluster.fleet import Fleet, connect
from vllm_repro_cluster.item import ERROR, NODE, OUTPUT, SITE, Chunk, Item, _unsent_changes
from vllm_repro_cluster.run_copy import RunCopy

SCENARIO = "tq-chunked-prefill"
SITE_FACTS = b'{"kind": "rehearsal", "evidence": "rehearsal", "version": null, "why": ""}'


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(f"{cause}")
        self.cause = cause


TWO_HOSTS = {"scenario": find("dsv4-tp2"), "arms": find("dsv4-tp2").leading}

Task = Callable[[Item, Mapping[str, bytes]], Iterator[Chunk]]


class Stream:
    """The chunks of a task."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks = chunks

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def completed(self) -> Stream:
        return self


class FakeRay:
    """What `Fleet` uses of Ray.

    tasks: what each node in turn yields. alive: how many nodes live, each with `resources`.
    """

    exceptions = types.SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(
        self, *tasks: Task, resources: Mapping[str, float] | None = None, alive: int = 1
    ) -> None:
        self._tasks = list(tasks)
        self._alive = alive
        # Placement groups that were made and not removed, each as (bundles, strategy).
        self.groups: list[Any] = []
        placed = types.SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda group, **place: (group, place)
        )
        self.util = types.SimpleNamespace(
            placement_group=self._group,
            remove_placement_group=self.groups.remove,
            scheduling_strategies=placed,
        )
        self._resources = {"CPU": 2.0} if resources is None else resources
        self.demands: list[dict[str, Any]] = []
        self.cancelled = 0
        # Item and files that each task got.
        self.sent: list[tuple[Item, dict[str, bytes]]] = []
        # Port of the head node; 0 if it does not answer.
        self.head = 0

    def _group(self, bundles: Any, strategy: str) -> Any:
        self.groups.append((bundles, strategy))
        return self.groups[-1]

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(gcs_address=f"127.0.0.1:{self.head or free_port()}")

    def nodes(self) -> list[dict[str, Any]]:
        dead = {
            "Alive": False,
            "NodeManagerAddress": "10.0.0.9",
            "Resources": {"GPU": 8.0, "CPU": 64.0},
        }
        living = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": self._resources}
        return [*[living] * self._alive, dead]

    def remote(self, **demand: Any) -> Callable[[Any], Any]:
        self.demands.append(demand)
        task = self._tasks.pop(0)

        def remote(item: Item, files: Mapping[str, bytes]) -> Stream:
            self.sent.append((item, dict(files)))
            return Stream(task(item, files))

        return lambda _: types.SimpleNamespace(remote=remote)

    def wait(self, streams: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return streams, []

    def get(self, chunk: Chunk) -> Chunk:
        return chunk

    def cancel(self, _: object) -> None:
        self.cancelled += 1


def job_in(out: Path, **more: Any) -> Job:
    scenario = find(SCENARIO)
    fields: dict[str, Any] = {
        "name": SCENARIO,
        "scenario": scenario,
        "options": ServerOptions(server="rehearsal"),
        "choice": ServerChoice(ServerKind.REHEARSAL, ""),
        "arms": scenario.leading,
        "named_arms": ["reported"],
        "trials": 2,
        "seed": 1,
        "out": out,
    }
    return Job(**fields | more)


def served_by(kind: ServerKind) -> dict[str, Any]:
    return {"choice": ServerChoice(kind, ""), "options": ServerOptions(server=kind)}


def run(
    fleet: Fleet, job: Job, *, resume: Path | None = None, seen: list[SiteFacts] | None = None
) -> RunReport:
    shown = io.StringIO()
    unfinished = read_run(resume) if resume else None
    try:
        return fleet.run(
            job,
            Progress(shown),
            lambda site, _: (seen if seen is not None else []).append(site),
            unfinished,
        )
    finally:
        print(shown.getvalue())


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the reports of a finished rehearsal of two boots. All workers use one run."""
    out = tmp_path_factory.getbasetemp().parent / "finished-run"
    with out.with_suffix(".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            words = ("run", SCENARIO, "--server", "rehearsal", "--arm", "reported", "--trials", "2")
            new = out.with_suffix(".new")
            state = str(new / "state")
            process = started(new, *words, XDG_STATE_HOME=state, VLLM_WATCHDOG_TIME_S="0.1")
            assert process.wait() == 0
            new.rename(out)
    return out


@pytest.fixture
def original(finished: Path, tmp_path: Path) -> Path:
    """Return the folder of a finished rehearsal of two boots, as on a node."""
    shutil.copytree(finished, tmp_path / "node", symlinks=True)
    return (tmp_path / "node" / SCENARIO / "latest").resolve()


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def fails_with(kind: str, message: str, hint: str = "") -> Task:
    """Return a task of a node that cannot run the item."""
    error = json.dumps({"type": kind, "message": message, "hint": hint})
    return lambda *_: iter([(ERROR, 0, error.encode())])


def yields(folder: Path, *, lines: int | None = None, then: BaseException | None = None) -> Task:
    """Return a task that yields a run's folder, or the first lines of its journal."""

    def task(_: Item, __: Mapping[str, bytes]) -> Iterator[Chunk]:
        yield NODE, 0, b"10.0.0.1"
        yield SITE, 0, SITE_FACTS
        first = b"".join((folder / "journal.jsonl").read_bytes().splitlines(keepends=True)[:lines])
        yield f"{folder.name}/journal.jsonl", 0, first
        if lines is None:
            yield from _unsent_changes(folder, folder.parent, folder, {}, ended=True)
        if then is not None:
            raise then

    return task


def lines_until(folder: Path, event: str, nth: int) -> int:
    """Return the number of lines of a journal up to the nth entry of an event."""
    entries = enumerate(read(folder / "journal.jsonl").entries, 1)
    return [number for number, entry in entries if entry.event == event][nth - 1]


def test_the_copy_is_the_folder_of_the_node(original: Path, tmp_path: Path) -> None:
    seen: list[SiteFacts] = []
    report = run(Fleet(FakeRay(yields(original))), job_in(tmp_path / "here"), seen=seen)
    assert report.folder == tmp_path / "here" / SCENARIO / original.name
    assert files_of(report.folder) == files_of(original)
    assert (tmp_path / "here" / SCENARIO / "latest").resolve() == report.folder.resolve()
    assert report.folder.stat().st_mode & 0o077 == 0
    assert [(site.kind, site.version) for site in seen] == [(ServerKind.REHEARSAL, None)]
    assert report.as_expected is True


def test_lines_of_a_node_name_it_and_the_run(tmp_path: Path) -> None:
    shown = io.StringIO()
    copy = RunCopy(job_in(tmp_path), Progress(shown), lambda *_: None, None)
    for chunk in (
        (NODE, 0, b"10.0.0.1"),
        (OUTPUT, 0, b"  reported 1: cr"),
        (OUTPUT, 16, b"ash (boot 1 s)\nnext"),
    ):
        copy.take(*chunk)
    assert shown.getvalue() == f"10.0.0.1: {SCENARIO}: reported 1: crash (boot 1 s)\n"


def test_growing_files_are_sent_and_rewritten_ones_at_the_end(tmp_path: Path) -> None:
    run, copy = tmp_path / "runs" / "r", tmp_path / "copy" / "r"
    (run / "logs").mkdir(parents=True)
    copy.mkdir(parents=True)
    sent: dict[str, int] = {}
    there = RunCopy(job_in(tmp_path), Progress(io.StringIO()), lambda *_: None, copy)

    def send(*, ended: bool = False) -> list[str]:
        chunks = list(_unsent_changes(tmp_path, tmp_path / "runs", run, sent, ended=ended))
        for chunk in chunks:
            there.take(*chunk)
        return [f"{name}@{at}" for name, at, _ in chunks]

    (run / "journal.jsonl").write_bytes(b'{"a": 1}\n{"b"')
    (run / "requests.jsonl").touch()
    (run / "report.md").write_text("much longer than what follows", encoding="utf-8")
    (copy / "report.md").write_text(
        "that of the interrupted run, which is longer still", encoding="utf-8"
    )
    assert (send(), send()) == (["r/journal.jsonl@0", "r/requests.jsonl@0"], [])
    with (run / "journal.jsonl").open("ab") as file:
        file.write(b": 2}\n")
    (run / "logs" / "reported-1.log").write_bytes(b"x" * (3 << 20))
    assert send() == [
        "r/journal.jsonl@13",
        *(f"r/logs/reported-1.log@{mb << 20}" for mb in range(3)),
    ]
    (run / "report.md").write_text("short", encoding="utf-8")
    assert (send(ended=True), files_of(copy)) == (["r/report.md@0"], files_of(run))


def test_a_run_resumes_on_another_node_and_a_lost_boot_is_infra(
    original: Path, tmp_path: Path
) -> None:
    cut = lines_until(original, "trial-started", 2)

    def resumes(item: Item, files: Mapping[str, bytes]) -> Iterator[Chunk]:
        with Journal(tmp_path / "rest.jsonl") as rest:
            for entry in read(original / "journal.jsonl").entries[cut:]:
                trial = {"trial": 3} if "trial" in entry.fields else {}
                rest.write(entry.event, **{**entry.fields, **trial})
        name = f"{item.resume}/journal.jsonl"
        yield name, len(files[name]), (tmp_path / "rest.jsonl").read_bytes()

    ray = FakeRay(yields(original, lines=cut, then=RayError("the node died")), resumes)
    (arm,) = run(Fleet(ray), job_in(tmp_path / "here")).arms
    assert [trial.outcome.value for trial in arm.trials] == ["crash", "infra", "crash"]
    assert arm.trials[1].why == "the node [address] was lost: RayError: the node died"
    _, (item, files) = ray.sent
    assert item.resume == original.name
    assert b"the node died" in files[f"{original.name}/journal.jsonl"]
    assert (arm.k, arm.n) == (2, 2)


@pytest.mark.parametrize("loss", [None, RayError("the node died")], ids=["its process", "its node"])
def test_a_run_that_is_lost_once_it_has_ended_is_reported_here(
    original: Path, tmp_path: Path, loss: RayError | None
) -> None:
    whole = lines_until(original, "run-ended", 1)
    report = run(
        Fleet(FakeRay(yields(original, lines=whole, then=loss))), job_in(tmp_path / "here")
    )
    assert report.folder.name == original.name
    assert files_of(report.folder).keys() >= {"report.json", "report.md"}


def test_a_run_begins_anew_on_a_node_of_another_kind(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = lines_until(original, "trial-ended", 1)
    fresh = original.parent / "20990101T000000Z-abcdef"
    shutil.copytree(original, fresh)

    refuses = fails_with("UsageError", "its machine has changed since")
    ray = FakeRay(yields(original, lines=cut, then=RayError("gone")), refuses, yields(fresh))
    assert run(Fleet(ray), job_in(tmp_path / "here")).folder.name == fresh.name
    assert "another kind of machine" in capsys.readouterr().out
    first = tmp_path / "here" / SCENARIO / original.name
    assert (first / "report.md").exists()  # of what was seen before


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask at once whether the head node answers."""
    monkeypatch.setattr(fleets, "_ANSWERS_IN_S", 0.0)
    monkeypatch.setattr(fleets, "_ASKED_EVERY_S", 0.0)


def assert_resumable(ray: FakeRay, error: str, tmp_path: Path, original: Path) -> None:
    """Check that a run fails with `error` and a hint that resumes it."""
    with pytest.raises(InfraError, match=error) as caught:
        run(Fleet(ray), job_in(tmp_path / "here"))
    folder = tmp_path / "here" / SCENARIO / original.name
    assert caught.value.hint == f"vllm-repro run --resume {folder} --on CLUSTER"
    assert read_run(folder).trials.outcomes["reported"]


def test_a_second_loss_is_an_error_with_the_way_to_continue(original: Path, tmp_path: Path) -> None:
    cut = lines_until(original, "trial-ended", 1)

    def lost_too(_: Item, __: Mapping[str, bytes]) -> Iterator[Chunk]:
        yield NODE, 0, b"10.0.0.2"
        raise RayError("gone as well")

    ray = FakeRay(yields(original, lines=cut, then=RayError("gone")), lost_too)
    assert_resumable(ray, r"10\.0\.0\.1 was lost.*10\.0\.0\.2 was lost", tmp_path, original)


@pytest.mark.usefixtures("impatient")
def test_a_lost_head_is_an_error_with_the_way_to_continue(original: Path, tmp_path: Path) -> None:
    cut = lines_until(original, "trial-started", 2)
    head = socket.create_server(("127.0.0.1", 0))

    def loses_its_head(item: Item, files: Mapping[str, bytes]) -> Iterator[Chunk]:
        yield from yields(original, lines=cut)(item, files)
        head.close()
        yield OUTPUT, 0, b""
        raise AssertionError("the head was not missed")

    ray = FakeRay(loses_its_head)
    ray.head = head.getsockname()[1]
    gone = r"the head node of the cluster, 127\.0\.0\.1:\d+, is gone"
    assert_resumable(ray, gone, tmp_path, original)


def interrupting_a_callback(folder: Path, lines: int) -> Task:
    """Return a task that is interrupted while Ray's compiled code runs, which swallows it."""

    def task(item: Item, files: Mapping[str, bytes]) -> Iterator[Chunk]:
        yield from yields(folder, lines=lines)(item, files)
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        yield OUTPUT, 0, b"one more line\n"
        raise AssertionError("the run goes on")

    return task


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_an_interrupted_run_ends_on_the_node_and_can_be_resumed(
    original: Path, tmp_path: Path, name: str
) -> None:
    cut = lines_until(original, "trial-ended", 1)
    tasks = {
        "SIGTERM": yields(original, lines=cut, then=KeyboardInterrupt("SIGTERM")),
        "SIGINT": interrupting_a_callback(original, cut),
    }
    ray = FakeRay(tasks[name])
    report = run(Fleet(ray), job_in(tmp_path / "here"))
    assert (report.interrupted, ray.cancelled) == (name, 1)
    assert (report.folder / "report.json").exists()
    assert read_run(report.folder).trials.outcomes["reported"]


def test_a_run_interrupted_before_its_start_has_no_folder(original: Path, tmp_path: Path) -> None:
    fleet = Fleet(FakeRay(yields(original)))
    fleet.interrupt("SIGINT")
    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        run(fleet, job_in(tmp_path / "here"))
    assert not (tmp_path / "here").exists()


def without_the_package(*_: object) -> Iterator[Chunk]:
    raise RayTaskError(ModuleNotFoundError("No module named 'vllm_repro'"))
    yield


@pytest.mark.parametrize(
    ("task", "kind", "message", "hint"),
    [
        *(
            (fails_with(kind.__name__, "no wheel", "name another"), kind, "no wheel", "another")
            for kind in (InfraError, Unsupported, UsageError)
        ),
        (
            without_the_package,
            InfraError,
            "No module named 'vllm_repro'",
            "install the same vllm-repro",
        ),
    ],
)
def test_the_error_of_a_node_is_raised_here(
    task: Task, kind: type[ReproError], message: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message) as caught:
        run(Fleet(FakeRay(task)), job_in(tmp_path))
    assert (type(caught.value), hint in caught.value.hint) == (kind, True)
    assert not list(tmp_path.iterdir())


def test_a_missing_resource_is_named_with_what_the_cluster_has(tmp_path: Path) -> None:
    ray = FakeRay(resources={"CPU": 4.0, "vllm_repro": 1.0})
    with pytest.raises(Unsupported) as caught:
        run(Fleet(ray), job_in(tmp_path, **served_by(ServerKind.DOCKER)))
    assert (
        f"{caught.value}"
        == "no node of the cluster has GPU 1, vllm_repro 1, which tq-chunked-prefill needs:"
        " 10.0.0.1 has GPU 0, vllm_repro 1"
    )
    assert ray.demands == []


@pytest.mark.parametrize(
    ("has", "room", "demand"),
    [
        ({"CPU": 2.0}, 2, {"num_gpus": 0, "num_cpus": 1, "resources": {}}),
        (
            {"CPU": 9.0, "vllm_repro": 3.0},
            3,
            {"num_gpus": 0, "num_cpus": 0, "resources": {"vllm_repro": 1}},
        ),
    ],
)
def test_a_run_takes_one_of_what_living_nodes_declare(
    has: dict[str, float], room: int, demand: dict[str, Any], original: Path, tmp_path: Path
) -> None:
    ray = FakeRay(yields(original), resources=has)
    job = job_in(tmp_path / "here")
    assert Fleet(ray).room(job) == room
    run(Fleet(ray), job)
    assert ray.demands == [{"num_returns": "streaming", "max_retries": 0, **demand}]


def test_a_job_of_two_hosts_has_no_room_twice_on_one_large_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = FakeRay()
    node = {"Alive": True, "NodeManagerAddress": "10.0.0.1"}
    nodes = [{**node, "Resources": {"CPU": size}} for size in (7.0, 1.0)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert Fleet(ray).room(job_in(tmp_path, **TWO_HOSTS)) == 1


def test_a_scenario_of_two_hosts_takes_two_nodes_while_it_runs(
    original: Path, tmp_path: Path
) -> None:
    ray = FakeRay(yields(original), resources={"vllm_repro": 1.0}, alive=2)
    job = job_in(tmp_path / "here", **TWO_HOSTS)
    copy = RunCopy(job_in(tmp_path), Progress(io.StringIO()), lambda *_: None, None)
    Fleet(ray)._try(job, copy, "")
    group = ([{"vllm_repro": 1}, {"vllm_repro": 1}], "STRICT_SPREAD")
    ((item, _),) = ray.sent
    assert (item.nodes, item.group, item.job.scenario.needs.gpus) == (2, group, 1)
    assert ray.demands[0]["scheduling_strategy"] == (group, {"placement_group_bundle_index": 0})
    assert ray.groups == []


@pytest.mark.usefixtures("impatient")
def test_nobody_is_asked_to_free_the_nodes_of_a_lost_head(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endless = itertools.repeat((OUTPUT, 0, b""))
    ray = FakeRay(lambda *_: endless, resources={"vllm_repro": 1.0}, alive=2)
    monkeypatch.setattr(
        ray.util, "remove_placement_group", lambda _: pytest.fail("Ray would wait for the head")
    )
    with pytest.raises(InfraError, match="is gone"):
        run(Fleet(ray), job_in(tmp_path, **TWO_HOSTS))


@pytest.mark.parametrize(
    ("kind", "alive", "cards", "demand"),
    [
        (ServerKind.REHEARSAL, 1, 0.0, ({"CPU": 1}, 1)),
        (ServerKind.REHEARSAL, 2, 0.0, ({"CPU": 1}, 2)),
        (ServerKind.REHEARSAL, 3, 0.0, ({"CPU": 1}, 2)),
        (ServerKind.PROCESS, 2, 1.0, ({"GPU": 1, "CPU": 1}, 2)),  # each host has its share
        (ServerKind.PROCESS, 2, 2.0, ({"GPU": 1, "CPU": 1}, 2)),
        (ServerKind.DOCKER, 2, 2.0, ({"GPU": 2, "CPU": 1}, 1)),  # containers stay on one host
    ],
)
def test_the_nodes_that_a_scenario_of_two_hosts_takes(
    kind: ServerKind, alive: int, cards: float, demand: Any, tmp_path: Path
) -> None:
    fleet = Fleet(FakeRay(resources={"CPU": 1.0, **({"GPU": cards} if cards else {})}, alive=alive))
    assert fleet._demand(job_in(tmp_path, **TWO_HOSTS, **served_by(kind)), Unsupported) == demand


def test_a_resumed_run_brings_its_folder_to_the_node(original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here" / SCENARIO / original.name
    shutil.copytree(original, folder)
    journal = b"".join((folder / "journal.jsonl").read_bytes().splitlines(keepends=True)[:-3])
    (folder / "journal.jsonl").write_bytes(journal)
    ray = FakeRay(yields(original))
    run(Fleet(ray), job_in(tmp_path / "here"), resume=folder)
    ((item, files),) = ray.sent
    assert item.resume == folder.name
    assert f"{folder.name}/logs/reported-1.log" in files
    assert files[f"{folder.name}/journal.jsonl"] == journal


def test_an_earlier_report_and_private_names_travel_with_a_run(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim of "fixed" rests on the earlier report."""
    before = tmp_path / "here" / SCENARIO / "20250101T000000Z-abcdef"
    shutil.copytree(original, before)
    monkeypatch.setenv("HOME", "/home/somebody")
    ray = FakeRay(yields(original))
    run(Fleet(ray), job_in(tmp_path / "here"))
    ((item, files),) = ray.sent
    assert list(files) == [f"{before.name}/report.json"]
    assert ("/home/somebody", "$HOME") in item.job.private["folders"]
    assert item.job.elsewhere is None


class Elsewhere:
    """Runs that last until they are interrupted."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.over = threading.Event()

    def run(self, *_: object) -> RunReport:
        raise AssertionError("not called")

    def interrupt(self, name: str) -> None:
        self.names.append(name)
        self.over.set()

    def room(self, _: Job) -> int:
        return 1


def test_items_run_in_turn_here_and_at_once_elsewhere() -> None:
    threads: list[str] = []

    def work(number: int) -> int:
        threads.append(threading.current_thread().name)
        return number * 2

    assert list(results(work, [1, 2, 3], None)) == [(1, 2), (2, 4), (3, 6)]
    assert set(threads) == {threading.current_thread().name}
    both = threading.Barrier(2, timeout=10)
    assert sorted(results(lambda number: number + 0 * both.wait(), [1, 2], Elsewhere())) == [
        (1, 1),
        (2, 2),
    ]


def test_an_error_of_one_item_ends_the_others() -> None:
    there = Elsewhere()

    def work(number: int) -> int:
        if number == 1:
            raise UsageError("wrong")
        assert there.over.wait(10)
        return number

    with pytest.raises(UsageError, match="wrong"):
        list(results(work, [1, 2], there))
    assert there.names == ["SIGTERM"]


def test_a_signal_interrupts_all_items_and_their_results_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = Elsewhere()
    calls = []

    def interrupted_once(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt("SIGHUP")
        return futures.wait(*arguments, **more)

    def work(number: int) -> int:
        assert there.over.wait(10)
        if number == 2:
            raise KeyboardInterrupt("SIGHUP")  # it had not begun
        return number

    monkeypatch.setattr("vllm_repro.running.elsewhere.wait", interrupted_once)
    found: list[tuple[int, int]] = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(results(work, [1, 2, 3], there))
    assert (sorted(found), there.names) == ([(1, 1), (3, 3)], ["SIGHUP"])


@pytest.mark.usefixtures("sigint")
def test_a_signal_that_another_thread_gets_is_noticed() -> None:
    there = Elsewhere()

    def work(number: int) -> bool:
        if number == 1:
            time.sleep(0.2)  # until the main thread waits
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return there.over.wait(10)

    assert sorted(results(work, [1, 2], there)) == [(1, True), (2, True)]


@pytest.fixture
def no_connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # `connect` sets them
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")
    connect.cache_clear()
    yield
    connect.cache_clear()


@pytest.mark.usefixtures("no_connection")
def test_without_ray_the_message_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="Ray, which is not installed") as caught:
        connect("local")
    assert caught.value.hint == "pip install 'vllm-repro[ray]'"


@pytest.mark.usefixtures("no_connection")
@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (
            RuntimeError("Version mismatch:\n    Ray: 2.9.0\n    Python: 3.10.1"),
            UsageError,
            "mismatch: Ray: 2.9.0 Python: 3.10.1",
        ),
        (
            ConnectionError("Could not find any running Ray"),
            InfraError,
            "no Ray cluster at auto takes a task: ConnectionError: Could",
        ),
        (
            RuntimeError("Failed to start GCS"),
            InfraError,
            "takes a task: RuntimeError: Failed to start GCS",
        ),
        (RayError("InvalidAuthToken"), InfraError, "takes a task: RayError: InvalidAuthToken"),
    ],
)
def test_why_a_cluster_cannot_be_used_is_reported(
    raised: Exception, kind: type[ReproError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise raised

    monkeypatch.setitem(
        sys.modules, "ray", types.SimpleNamespace(init=init, exceptions=FakeRay.exceptions)
    )
    with pytest.raises(kind, match=message) as caught:
        connect("auto")
    assert caught.value.hint


@pytest.mark.usefixtures("no_connection")
@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import time; time.sleep(9)", "no Ray cluster answers at 10.0.0.1:6379 within"),
        (
            "raise SystemExit('Authentication token is missing')",
            "refuses this command: Authentication token is missing",
        ),
    ],
)
def test_an_address_is_tried_before_ray_waits_for_it(
    program: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = write_script(tmp_path / "python", f'exec {sys.executable} -c "{program}"')
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(fleets, "_ANSWERS_IN_S", 2.0)
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace())
    with pytest.raises(InfraError, match=message):
        connect("10.0.0.1:6379")
