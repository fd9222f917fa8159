"""Process server: which environment it gets, and what of it is reported."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import Harness
from tests.core.servers.docker_helpers import IDLE, containers_of, running
from vllm_repro.command.container import ContainerSpec
from vllm_repro.errors import UsageError
from vllm_repro.host.lease import Lease, lease_folder
from vllm_repro.host.ports import free_port
from vllm_repro.host.processes import session_members
from vllm_repro.releases.operators import Fit, Misfit
from vllm_repro.releases.provision import Release
from vllm_repro.releases.sources import Source
from vllm_repro.running.job import refuse_unused_options
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers import process as module
from vllm_repro.servers.docker import DockerServer
from vllm_repro.servers.docker_engine import LEASE_LABEL, RUN_LABEL, Engine
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import ServedModel, process_launch
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.orphans import sweep
from vllm_repro.servers.process import ProcessServer, misfit, with_release
from vllm_repro.servers.site import choose
from vllm_repro_diagnosis.evidence import Evidence


def server_of(program: str, log: Path, **env: str) -> ProcessServer:
    return ProcessServer(
        (sys.executable, "-c", program),
        port=free_port(),
        log=log,
        env=env,
        kind=ServerKind.PROCESS,
        evidence=Evidence.CPU,
    )


@pytest.mark.anyio
async def test_the_environment_keeps_assertions_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLEX_ATTENTION")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_REPRO_REPORTS", str(tmp_path))
    monkeypatch.setenv("VLLM_USE_V1", "0")
    code = (
        "import json, os, sys; print(json.dumps([sys.flags.optimize, os.environ['VLLM_USE_V1']]))"
    )
    server = server_of(code, tmp_path / "log", VLLM_USE_V1="1")
    async with running(server) as facts:
        await server.exited()
    assert json.loads((tmp_path / "log").read_text(encoding="utf-8")) == [0, "1"]
    kept = {"VLLM_ATTENTION_BACKEND": "FLEX_ATTENTION", "VLLM_USE_V1": "1"}
    assert facts.env.items() >= kept.items()
    assert not {"VLLM_API_KEY", "VLLM_REPRO_REPORTS", "PYTHONOPTIMIZE"} & facts.env.keys()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("ends", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9)], ids=["exits", "killed"]
)
async def test_the_pid_of_an_ended_server_is_kept_for_its_session(
    ends: str, code: int, tmp_path: Path
) -> None:
    server = server_of(f"import os, sys; {ends}", tmp_path / "log")
    async with running(server) as facts:
        ended = await server.exited()
        assert (ended.code, psutil.pid_exists(facts.pid or 0)) == (code, True)
    assert not psutil.pid_exists(facts.pid or 0)


SOURCE = Source(folder=Path("/src/vllm"), commit="abc")
NO_BUILD = Source(release="0.33.0")


def release(folder: Path, *operators: str, source: Source = NO_BUILD) -> Release:
    """Return a release over the compiled parts of 0.32.0, which lack these operators."""
    misfits = tuple(
        Misfit(operator=name, where="_custom_ops.py:1", given=3, takes=2) for name in operators
    )
    return Release(
        version="0.33.0",
        torch="2.13.0",
        python=folder,
        packages=folder,
        executable=folder / "vllm",
        source=source,
        compiled="0.32.0",
        fit=Fit(fits=54, misfits=misfits),
    )


@pytest.mark.parametrize(
    ("operator", "attention", "flags", "unsupported"),
    [
        ("cpu_attention_with_kv_cache", True, "", True),
        ("cpu_attention_with_kv_cache", False, "", False),  # the lab replaces it
        ("get_scheduler_metadata", True, "", True),
        ("weight_packed_linear", True, "amx_tile", True),
        ("weight_packed_linear", True, "avx512f", False),
        ("fused_experts_cpu", True, "", False),  # the model has no experts
        ("cpu_gemm_wna16", True, "", False),
    ],
)
def test_only_an_operator_that_the_model_calls_is_unsupported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operator: str,
    attention: bool,
    flags: str,
    unsupported: bool,
) -> None:
    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset(flags.split()))
    why = misfit(
        release(tmp_path, operator), find("min-tokens-stop-ids").tiny_model, attention=attention
    )
    assert bool(why) is unsupported
    if unsupported:
        assert "the compiled parts of 0.32.0 do not fit the Python of 0.33.0" in why
        assert operator in why


def test_the_served_model_decides_and_not_the_reported_one(tmp_path: Path) -> None:
    """Report sco-hybrid with a model of experts; its tiny model in the lab has none."""
    scenario = find("sco-hybrid")
    assert scenario.lab is not None
    over = release(tmp_path, "fused_experts_cpu")
    assert misfit(over, scenario.tiny_model)
    assert misfit(over, scenario.lab.shape(scenario.model)) == ""


@pytest.mark.parametrize(
    "command",
    [
        "docker run --gpus all vllm/vllm-openai:v0.33.0 --model m --max-model-len 9",
        "docker run vllm/vllm-openai:v0.33.0 m --max-model-len 9",
        "vllm serve --model m -tp 2",
        "vllm serve -tp 2 --model=m --trust-remote-code",
        "vllm serve m --compilation-config '{\"a\": 1}'",
        "python -m vllm.entrypoints.openai.api_server --model m --dtype auto",
    ],
)
def test_each_line_of_a_shown_command_is_a_flag_with_its_value(command: str) -> None:
    scenario = dataclasses.replace(find("min-tokens-stop-ids"), command=command)
    launch = process_launch(
        scenario,
        scenario.arms[0],
        vllm=("vllm",),
        env={},
        weights=ServedModel(name="m"),
        port=8000,
        evidence=Evidence.GPU,
    )
    first, *lines = launch.render().split(" \\\n")
    assert first in ("vllm serve", "vllm serve m")
    assert [line for line in lines if not line.startswith("  -")] == []
    assert (first == "vllm serve m") is not any("--model" in line for line in lines)


def test_a_report_names_the_compiled_parts_of_a_tree(tmp_path: Path) -> None:
    scenario = find("min-tokens-stop-ids")
    launch = process_launch(
        scenario,
        scenario.arms[0],
        vllm=("vllm",),
        env={},
        weights=ServedModel(name="m"),
        port=8000,
        evidence=Evidence.CPU,
    )

    assert with_release(launch, None) is launch
    over = "over the compiled parts of 0.32.0"
    for installed, source, words in (
        (
            release(tmp_path, "fused_experts_cpu"),
            None,
            f"vLLM 0.33.0, which has no CPU build, {over}: 54 of 55 calls",
        ),
        (
            release(tmp_path, source=SOURCE),
            "/src/vllm@abc",
            f"the Python of /src/vllm@abc, {over}: 54 of 54 calls",
        ),
    ):
        made = with_release(launch, installed)
        assert (made.source, made.compiled) == (source, "0.32.0")
        assert words in "\n".join(made.differences)


@pytest.mark.parametrize("kind", list(ServerKind))
def test_a_vllm_that_is_no_release_runs_as_a_process_alone(kind: ServerKind) -> None:
    options = ServerOptions(vllm=SOURCE)
    if kind in (ServerKind.PROCESS, ServerKind.LAB, ServerKind.SCHEDULER):
        refuse_unused_options(options, kind)
    else:
        with pytest.raises(UsageError, match="runs releases only") as caught:
            refuse_unused_options(options, kind)
        assert "--server process or lab or scheduler" in (caught.value.hint or "")


def test_auto_takes_no_kind_that_cannot_run_a_source() -> None:
    options = ServerOptions(vllm=SOURCE)
    assert choose(find("tq-chunked-prefill"), options).kind is ServerKind.LAB
    assert choose(find("min-tokens-stop-ids"), options).kind is ServerKind.PROCESS


SERVE = """
import asyncio, sys, time
from pathlib import Path
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.process import ProcessServer
log, port = sys.argv[1:]
code = "import tempfile, time; print(tempfile.mkdtemp(), flush=True); time.sleep(600)"
program, kind = [sys.executable, "-c", code], ServerKind.PROCESS
server = ProcessServer(
    program, port=int(port), log=Path(log), env={}, kind=kind, evidence=Evidence.CPU
)
pid = asyncio.run(server.start()).pid
while not Path(log).read_text():
    time.sleep(0.02)
print(pid, flush=True)
time.sleep(600)
"""
SERVE_CONTAINER = """
import asyncio, sys, time
from pathlib import Path
from vllm_repro.command.container import ContainerSpec, Publish
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro.servers.docker import DockerServer
log, port, image, run, program = sys.argv[1:]
publish = (Publish(int(port)),)
spec = ContainerSpec(image=image, entrypoint=("python3", "-c", program), publish=publish)
server = DockerServer(spec, port=int(port), log=Path(log), run=run, evidence=Evidence.CPU)
print(asyncio.run(server.start()).container_id, flush=True)
time.sleep(600)
"""


def started(tmp_path: Path, program: str, *more: str) -> tuple[subprocess.Popen[str], str]:
    """Return a harness that runs one server, and the line that it printed about it."""
    words = [sys.executable, "-c", program, str(tmp_path / "log"), str(free_port()), *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    harness = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    assert harness.stdout is not None
    return harness, harness.stdout.readline().strip()


def kill_with_guard(harness: subprocess.Popen[str], server: str) -> None:
    for child in psutil.Process(harness.pid).children():
        if str(child.pid) != server:
            child.kill()
    harness.kill()


def test_without_its_guard_clean_ends_it_and_tells_whose_it_is(
    tmp_path: Path, harness: Harness
) -> None:
    killed, pid = started(tmp_path, SERVE)
    assert "nothing is left" in harness("clean", "--yes").out
    with killed:
        kill_with_guard(killed, pid)
    assert (
        f"left: process {pid}, started by pid {killed.pid} in {Path.cwd()}: "
        in harness("clean").out
    )
    assert session_members(int(pid)), "clean without --yes touches nothing"
    temporary = Path((tmp_path / "log").read_text(encoding="utf-8").strip())
    assert temporary.exists()
    assert f"removed: process {pid}" in harness("clean", "--yes").out
    assert not session_members(int(pid))
    assert not temporary.parent.exists()
    assert "nothing is left" in harness("clean").out
    assert list(lease_folder().iterdir()) == []


@pytest.mark.parametrize(
    ("log", "named"),
    [
        ("vllm-repro-server-a1/logs/server-1.log", True),
        ("vllm-repro-server-/logs/server-1.log", True),
        ("vllm-repro-server-x y/logs/server-1.log", True),
        ("vllm-repro-server-running/logs/server-1.log", False),
        ("vllm-repro-server-a1/server-1.log", False),
        ("someone-elses/logs/server-1.log", False),
    ],
)
def test_clean_names_the_logs_that_programs_left(
    tmp_path: Path, harness: Harness, monkeypatch: pytest.MonkeyPatch, log: str, named: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / log).parent.mkdir(parents=True)
    with (
        (tmp_path / log).open("w", encoding="utf-8") as file,
        subprocess.Popen(
            ["sleep", "60"], stdout=file if "running" in log else None, start_new_session=True
        ) as program,
    ):
        for words in (("clean",), ("clean", "--yes")):
            folder = (tmp_path / log).parents[1]
            assert (f"whose program was killed, in {folder}; rm -r" in harness(*words).out) is named
            assert (tmp_path / log).exists(), "an observation is not lost"
        program.kill()


def test_a_guard_that_was_killed_is_replaced() -> None:
    first, second = Lease("first"), Lease("second")
    assert second._guard is first._guard, "one guard for all servers"
    first._guard.kill()
    first._guard.wait()
    third = Lease("third")
    assert third._guard.poll() is None
    for lease in (first, second, third):
        lease.release()


@pytest.fixture
def bystander(docker_engine: Engine, base_image: str) -> Iterator[str]:
    """Create a container of another tool with labels like ours."""
    labels = {RUN_LABEL: "theirs", LEASE_LABEL: "theirs"}
    container = docker_engine.client.containers.create(base_image, ["true"], labels=labels)
    assert container.id is not None
    yield container.id
    docker_engine.client.api.remove_container(container.id)


@pytest.mark.docker
@pytest.mark.anyio
async def test_only_containers_whose_owner_is_gone_are_removed(
    bystander: str,
    base_image: str,
    docker_engine: Engine,
    run_id: str,
    program: Callable[..., ContainerSpec],
    serve: Callable[..., DockerServer],
    tmp_path: Path,
) -> None:
    unleased = docker_engine.client.containers.create(
        base_image, ["true"], labels={RUN_LABEL: run_id}
    )
    killed, orphan = started(tmp_path, SERVE_CONTAINER, base_image, run_id, IDLE)
    living = serve(program(IDLE))
    try:
        async with running(living) as facts:
            assert sweep() == [], "all owners live"
            with killed:
                kill_with_guard(killed, orphan)
            (line,) = sweep()
            by = f"running), started by pid {killed.pid} in {Path.cwd()} for the run {run_id}"
            assert by in line
            assert sweep() == []
            left = {container["Id"] for container in containers_of(docker_engine, run_id)}
            assert left == {facts.container_id, unleased.id}
            assert docker_engine.client.containers.get(bystander).status == "created"
    finally:
        unleased.remove()
