"""Runs on a real Ray cluster of three nodes on this machine: `--on`.

They are rehearsals, so that only Ray takes time.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import Harness
from vllm_repro.host.ports import free_port
from vllm_repro.journal.journal import read
from vllm_repro.servers.orphans import sweep

pytestmark = [
    pytest.mark.live,
    pytest.mark.alone,
    pytest.mark.filterwarnings("ignore"),
]  # alone: they look for processes

SCENARIO = "tq-chunked-prefill"
_MB = 1 << 20
_HEALTH = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}
"""A node that does not answer is lost after some seconds.

By Ray's own values it takes half a minute.
"""


class Nodes:
    """A head without room for a run, and two nodes with room for one each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        small = {"num_cpus": 1, "object_store_memory": 100 * _MB}
        head = {**small, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.add_node(**small, resources={"vllm_repro": 1}) for _ in range(2)]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def kill_the_one_that_runs(self) -> None:
        """Kill the node of the only run, without a word to the others."""
        (item,) = items()
        above = {parent.pid for parent in item.parents()}
        (node,) = (
            node
            for node in self.nodes
            if any(one.process.pid in above for one in node.all_processes["raylet"])
        )
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


def items() -> list[psutil.Process]:
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if "vllm_repro_cluster.item_process" in (one.info["cmdline"] or ())
    ]


@contextmanager
def started(state: Path) -> Iterator[Nodes]:
    """Yield a new cluster whose nodes keep the state of their runs in a folder."""
    with in_state(state) as environment:
        environment.setenv("VLLM_WATCHDOG_TIME_S", "0.3")  # as `own_state`
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name, value in _HEALTH.items():
            environment.setenv(f"RAY_health_check_{name}", f"{value}")
        nodes = Nodes()
    yield nodes
    nodes.cluster.shutdown()


@contextmanager
def in_state(state: Path) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_STATE_HOME", str(state))
        yield environment


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Yield a cluster for the tests that lose none of its nodes."""
    state = tmp_path_factory.mktemp("state")
    with started(state) as nodes:
        yield nodes
    with in_state(state):
        sweep()


@pytest.fixture
def cluster(own_state: Path) -> Iterator[Nodes]:
    """Yield a cluster for one test, which may lose nodes."""
    with started(own_state) as nodes:
        yield nodes


Command = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    begun: list[subprocess.Popen[str]] = []

    def call(*words: str) -> subprocess.Popen[str]:
        program = [sys.executable, "-m", "vllm_repro", *words]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        begun.append(subprocess.Popen(program, cwd=tmp_path, text=True, **pipes))
        return begun[-1]

    yield call
    for one in begun:
        one.kill()
        one.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out + err


def trials(folder: Path) -> list[tuple[str, str]]:
    """Return arm and outcome of each trial of a run."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return [(arm["name"], trial["outcome"]) for arm in report["arms"] for trial in arm["trials"]]


def until_in_journal(out: Path, event: str, count: int) -> Path:
    """Wait for so many entries in the copy of the only run, and return its folder."""
    for _ in range(1200):
        for journal in out.glob("*/2*/journal.jsonl"):
            if len(list(read(journal).of(event))) >= count:
                return journal.parent
        time.sleep(0.1)
    raise AssertionError(f"no {count} entries {event} within two minutes")


def until_no_item() -> None:
    for _ in range(600):
        if not items():
            return
        time.sleep(0.1)
    raise AssertionError(f"{[one.cmdline() for one in items()]} still run")


def same(rows: Sequence[dict[str, Any]]) -> list[Any]:
    names = ("version", "vllm_version", "verdict", "expected")
    return [[row[name] for name in names] + [arm["fate"] for arm in row["arms"]] for row in rows]


def test_a_map_over_two_nodes_is_that_of_one_machine(
    shared: Nodes, command: Command, harness: Harness, tmp_path: Path
) -> None:
    words = ("versions", SCENARIO, "--server", "rehearsal", "--versions", "0.21.0,0.23.0,0.24.0")
    status, text = ended(command(*words, "--on", shared.address, "--out", "there"))
    assert status == 0, text
    there = json.loads(
        (tmp_path / "there" / SCENARIO / "versions" / "latest" / "versions.json").read_bytes()
    )
    here = json.loads(harness(*words, "--json").out)
    assert same(there["rows"]) == same(here["rows"])


def test_a_run_goes_on_when_its_node_is_killed(
    cluster: Nodes, command: Command, tmp_path: Path
) -> None:
    run = command(
        "run",
        SCENARIO,
        "--server",
        "rehearsal",
        "--arm",
        "reported",
        "--trials",
        "8",
        "--on",
        cluster.address,
    )
    folder = until_in_journal(tmp_path / "reports", "trial-ended", 2)
    cluster.kill_the_one_that_runs()
    status, text = ended(run)
    assert status == 0, text
    assert "was lost" in text
    outcomes = [outcome for _, outcome in trials(folder)]
    assert outcomes.count("crash") == 8
    assert outcomes.count("infra") == 1
    until_no_item()


def test_a_killed_command_leaves_no_server_and_is_resumed(
    shared: Nodes, command: Command, tmp_path: Path
) -> None:
    run = command(
        "run",
        SCENARIO,
        "--server",
        "rehearsal",
        "--arm",
        "reported",
        "--trials",
        "8",
        "--on",
        shared.address,
    )
    folder = until_in_journal(tmp_path / "reports", "trial-ended", 2)
    run.kill()
    until_no_item()
    status, text = ended(command("run", "--resume", str(folder), "--on", shared.address))
    assert status == 0, text
    assert [outcome for _, outcome in trials(folder)].count("crash") == 8


@pytest.fixture
def third_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers whose third request gets no answer. The arm `reported` dies before it."""
    monkeypatch.setenv("VLLM_REHEARSAL_FAULT", "hang:3")


@pytest.mark.usefixtures("third_hangs")  # before the cluster, whose nodes take the environment
def test_an_interrupted_command_reports_what_it_saw(
    cluster: Nodes, command: Command, tmp_path: Path
) -> None:
    arms = ("--arm", "reported", "--arm", "eager")
    run = command(
        "run", SCENARIO, "--server", "rehearsal", *arms, "--trials", "1", "--on", cluster.address
    )
    folder = until_in_journal(tmp_path / "reports", "ready", 2)
    run.send_signal(signal.SIGINT)
    status, text = ended(run)
    assert status == 130, text
    assert "resume:" in text
    assert trials(folder) == [("reported", "crash")]
    until_no_item()


def test_a_lost_head_ends_the_command_with_the_way_to_continue(
    cluster: Nodes, command: Command, tmp_path: Path
) -> None:
    run = command(
        "run",
        SCENARIO,
        "--server",
        "rehearsal",
        "--arm",
        "reported",
        "--trials",
        "90",
        "--on",
        cluster.address,
    )
    folder = until_in_journal(tmp_path / "reports", "trial-ended", 1)
    cluster.cluster.remove_node(cluster.cluster.head_node, allow_graceful=False)
    status, text = ended(run)
    assert status == 2, text
    assert f"is gone\n  next: vllm-repro run --resume reports/{SCENARIO}/{folder.name}" in text
    assert trials(folder)


def test_what_the_cluster_lacks_is_named_at_once(shared: Nodes, command: Command) -> None:
    words = ("run", SCENARIO, "--server", "process", "--no-throughput", "--vllm", "0.23.0")
    status, text = ended(command(*words, "--on", shared.address))
    assert status == 2, text
    assert "no node of the cluster has GPU 1, vllm_repro 1" in text
    assert "GPU 0, vllm_repro 1" in text


def test_an_address_without_a_cluster_is_reported(command: Command) -> None:
    status, text = ended(
        command("run", SCENARIO, "--server", "rehearsal", "--on", f"127.0.0.1:{free_port()}")
    )
    assert status == 2
    assert "no Ray cluster answers" in text


def test_ray_client_is_refused_with_what_to_do_instead(command: Command) -> None:
    status, text = ended(
        command("run", SCENARIO, "--server", "rehearsal", "--on", "ray://127.0.0.1:10001")
    )
    assert status == 64
    assert "--on auto" in text


def test_a_cluster_on_this_machine_needs_no_other(command: Command) -> None:
    status, text = ended(
        command("run", SCENARIO, "--server", "rehearsal", "--arm", "reported", "--on", "local")
    )
    assert status == 0, text
