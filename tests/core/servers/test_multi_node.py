"""One server over several nodes."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import lives
from tests.core.servers.docker_helpers import running
from tests.report_examples import DIED
from vllm_repro.cli import parser
from vllm_repro.command.container import ContainerSpec, Publish
from vllm_repro.command.parse import parse
from vllm_repro.errors import InfraError
from vllm_repro.host.ports import free_port
from vllm_repro.releases.known import RELEASES
from vllm_repro.scenario.catalogue import find, find_arms
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import Launch
from vllm_repro.servers.multi_node import (
    Meeting,
    MultiNodeServer,
    container_nodes,
    node_count,
    process_nodes,
)
from vllm_repro.servers.process import ProcessServer
from vllm_repro_diagnosis.evidence import Evidence

pytestmark = pytest.mark.anyio
MEETING = Meeting(port=9000)


def launch(flags: str, evidence: Evidence = Evidence.CPU) -> Launch:
    command = parse(f"vllm serve m --host 127.0.0.1 --port 8001 {flags}")
    argv = ("/r/bin/vllm", "serve", *command.argv())
    return Launch(
        kind=ServerKind.PROCESS,
        evidence=evidence,
        command=command,
        argv=argv,
        env={"A": "1"},
        port=8001,
    )


@pytest.mark.parametrize("flags", ["", "--tensor-parallel-size 2", "--nnodes 1"])
def test_one_node_stays_as_it_is(flags: str) -> None:
    alone = launch(flags)
    assert (node_count(alone), process_nodes(alone, MEETING)) == (1, [alone])


@given(st.integers(2, 8))
def test_every_node_has_a_rank_and_only_the_first_has_http(nodes: int) -> None:
    head, *followers = process_nodes(
        launch(f"--nnodes {nodes} --tensor-parallel-size {nodes}"), MEETING
    )
    commands = [parse(f"vllm serve {' '.join(node.argv[2:])}") for node in (head, *followers)]
    assert [command.number("--node-rank") for command in commands] == list(range(nodes))
    assert [command.has("--headless") for command in commands] == [False, *[True] * (nodes - 1)]
    assert [command.has("--port") for command in commands] == [True, *[False] * (nodes - 1)]
    assert {command.number("--master-port") for command in commands} == {9000}
    assert {command.get("--master-addr") for command in commands} == {"127.0.0.1"}
    assert (head.argv[:2], head.env["GLOO_SOCKET_IFNAME"]) == (("/r/bin/vllm", "serve"), "lo")
    assert all(follower.env == dict(head.env) for follower in followers)


@pytest.mark.parametrize(
    "flags", ["--tensor-parallel-size 4", "--tensor-parallel-size 2 --pipeline-parallel-size 2"]
)
def test_on_gpus_each_node_gets_its_own(flags: str) -> None:
    whole = launch(f"--nnodes 2 {flags}", Evidence.GPU)
    head, follower = process_nodes(whole, MEETING)
    assert head.differences[-1] == "2 nodes as processes on one host, which meet at 127.0.0.1:9000"
    assert [node.env["CUDA_VISIBLE_DEVICES"] for node in (head, follower)] == ["0,1", "2,3"]
    assert "GLOO_SOCKET_IFNAME" not in head.env
    leased = process_nodes(replace(whole, gpus=("1", "4", "5", "7")), MEETING)
    assert [node.env["CUDA_VISIBLE_DEVICES"] for node in leased] == ["1,4", "5,7"]


def test_containers_share_the_network_of_the_first() -> None:
    alone = launch("--nnodes 2 --tensor-parallel-size 2")
    words = ("m", "--nnodes", "2", "--tensor-parallel-size", "2")
    spec = ContainerSpec(image="image", argv=words, name="run-a-1", publish=(Publish(8001),))
    head, launched = container_nodes(replace(alone, container=spec))
    other = launched.container
    assert head.container is not None
    assert other is not None
    assert (head.container.name, head.container.network, head.container.publish) == (
        "run-a-1",
        None,
        (Publish(8001),),
    )
    assert (other.name, other.network, other.publish) == ("run-a-1-rank1", "container:run-a-1", ())
    assert other.argv[-1] == "--headless"
    commands = [parse(f"vllm serve {' '.join(one.argv)}") for one in (head.container, other)]
    assert [command.number("--node-rank") for command in commands] == [0, 1]
    assert {command.get("--master-addr") for command in commands} == {"127.0.0.1"}


SLEEP = "import time; print('up', flush=True); time.sleep(600)"
WITH_CHILD = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time;"
    " time.sleep(600)']); time.sleep(600)"
)


def server(tmp_path: Path, head: str, *others: str) -> MultiNodeServer:
    def process(name: str, code: str) -> ProcessServer:
        return ProcessServer(
            (sys.executable, "-c", code),
            port=free_port(),
            log=tmp_path / name,
            env={},
            kind=ServerKind.PROCESS,
            evidence=Evidence.CPU,
            grace=2.0,
        )

    names = ["reported-1.log", "reported-1.rank1.log", "reported-1.rank2.log"]
    return MultiNodeServer(
        [process(name, code) for name, code in zip(names, (head, *others), strict=False)]
    )


async def test_all_are_started_named_and_ended(tmp_path: Path) -> None:
    ranked = server(tmp_path, SLEEP, SLEEP, WITH_CHILD)
    facts = await ranked.start()
    assert [rank.rank for rank in facts.ranks] == [1, 2]
    names = [path.name for path in ranked.rank_logs]
    assert names == ["reported-1.rank1.log", "reported-1.rank2.log"]
    while len(ranked.processes()) < 2:
        await asyncio.sleep(0.05)
    pids = {facts.pid or 0, *(rank.pid or 0 for rank in facts.ranks), *ranked.processes()}
    assert ranked.processes()[0] == facts.pid, "the API server's process comes first"
    await ranked.stop()
    await ranked.stop()
    assert (len(pids), [pid for pid in pids if lives(pid)]) == (4, [])


async def test_an_exit_of_another_node_is_reported_with_its_rank(tmp_path: Path) -> None:
    ranked = server(tmp_path, SLEEP, SLEEP, "raise SystemExit(3)")
    async with running(ranked):
        rank, ended = await asyncio.wait_for(ranked.rank_exited(), 20)
    assert (rank, ended.code) == (2, 3)


async def test_a_node_that_cannot_be_started_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked = server(tmp_path, SLEEP, SLEEP)
    monkeypatch.setattr(ranked.followers[0], "argv", ("/does/not/exist",))
    with pytest.raises(InfraError, match="cannot start"):
        await ranked.start()
    assert ranked.head.processes() == ()


async def test_a_node_that_stays_when_the_first_is_gone_is_named(tmp_path: Path) -> None:
    ranked = server(tmp_path, "raise SystemExit(0)", "raise SystemExit(0)", SLEEP)
    async with running(ranked):
        await asyncio.wait_for(ranked.exited(), 20)
        assert await ranked.surviving_ranks(2.0) == (2,)
        await ranked.stop()
        assert await ranked.surviving_ranks(2.0) == ()


SCRIPTS = Path(__file__).parents[3] / "fixtures" / "gpu_host"
RUNS = (SCRIPTS / "runs.txt").read_text(encoding="utf-8").splitlines()
PINS = (SCRIPTS / "requirements.txt").read_text(encoding="utf-8").splitlines()
STUBS = {
    "harness/packages/vllm_repro/__main__.py": (
        "import subprocess, sys\nsys.exit(subprocess.call(['vllm', *sys.argv[1:]]))"
    ),
    "shared/packages/shared.py": "NAME = 'vllm of the pieces:'",
    "vllm-0.1.0/packages/vllm/entrypoints/cli/main.py": (
        "import shared, sys\nsys.exit(' '.join([shared.NAME, *sys.argv[1:]]))"
    ),
}


@pytest.mark.parametrize("line", RUNS)
def test_each_line_names_a_release_a_scenario_and_its_arms(line: str) -> None:
    version, scenario, *options = line.split()
    arguments = parser("run").parse_args(["run", scenario, *options])
    assert version in RELEASES
    assert find_arms(find(scenario), arguments.arm)


def test_each_pin_is_exact() -> None:
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", pin) for pin in PINS)
    assert sorted(set(PINS)) == PINS


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stubs in pieces, with the scripts, a line that can run and one whose release is not there."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    for name, text in STUBS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    folder = tmp_path / "pieces"
    folder.mkdir()
    pack = runpy.run_path(str(SCRIPTS / "pack"))
    for archive in ("harness", "shared", "vllm-0.1.0"):
        assert len(pack["archive"](tmp_path / archive, folder, 150)) > 1
    pack["write_lists"](folder)
    shutil.copy(SCRIPTS / "run", folder)
    (folder / "runs.txt").write_text("0.2.0 other\n0.1.0 stub --arm a\n", encoding="utf-8")
    return folder


def run(pieces: Path) -> subprocess.CompletedProcess[str]:
    command = [f"{pieces}/run", f"{pieces}", f"{pieces}/out", "60"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_pieces_are_joined_and_each_line_runs(pieces: Path) -> None:
    first, second = run(pieces).stdout.splitlines()
    assert first == "0.2.0 other: not run, pieces of vllm-0.2.0 are missing or damaged"
    assert second.startswith("0.1.0 stub: exit status 1, ")
    words = f"run stub --arm a --server process --vllm 0.1.0 --out {pieces}/out"
    assert f"vllm of the pieces: {words}" in second


@pytest.mark.parametrize(
    ("archive", "said"),
    [
        ("vllm-0.1.0", "0.1.0 stub: not run, pieces of vllm-0.1.0 are missing or damaged"),
        ("shared", "run: shared: a piece is missing or damaged"),
    ],
)
def test_a_changed_piece_is_not_unpacked(archive: str, said: str, pieces: Path) -> None:
    with (pieces / f"{archive}.tar.gz.01").open("ab") as piece:
        piece.write(b"x")
    done = run(pieces)
    assert f"{archive}.tar.gz.01: FAILED" in done.stdout
    assert said in done.stdout + done.stderr


def test_a_run_that_leaves_the_host_does_not_name_it(tmp_path: Path) -> None:
    head, *rest = (DIED / "journal.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    started = json.dumps(json.loads(head) | {"hosts": ["gpu-host-7"], "reproduce": "on gpu-host-7"})
    for name, text in {
        "journal.jsonl": "".join([started, "\n", *rest]),
        "requests.jsonl": "",
        "logs/reported-1.log": "INFO gpu-host-7\n",
        "terminal.txt": "on gpu-host-7\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, str(SCRIPTS / "redact.py"), str(tmp_path)]
    assert subprocess.check_output(command, text=True) == "reproduces\n"
    texts = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("gpu-host-7" in text for text in texts)
