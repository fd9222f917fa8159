"""`VllmServer` on the rehearsal engine, whose processes are real."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import lives
from vllm_repro.errors import CommandError, HarnessBug, Unsupported, UsageError
from vllm_repro.running import live_server
from vllm_repro.running.live_server import EngineDied, VllmServer
from vllm_repro.running.state import Trial
from vllm_repro.running.trial import Work, run_trial
from vllm_repro_diagnosis.evidence import Evidence

pytestmark = pytest.mark.usefixtures("short_waits")


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the folders of servers that died out of the machine's. No server may stay."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    assert live_server.RUNNING == []


COMMAND = "vllm serve Qwen/Qwen3-0.6B --max-model-len 2048"
ODD = {"min_tokens": 1, "stop_token_ids": [999999]}


def booted(**options: Any) -> VllmServer:
    return VllmServer(COMMAND, **{"server": "rehearsal", "vllm": "0.28.0", **options})


def complete(server: VllmServer, **more: Any) -> str:
    answer = server.client().completions.create(
        model=server.model, prompt="hello", max_tokens=4, extra_body=more
    )
    return answer.choices[0].text


def gone(pids: tuple[int, ...]) -> bool:
    """Return True if there were processes, and none lives."""
    return bool(pids) and not any(map(lives, pids))


def kill_engine(server: VllmServer) -> None:
    (core,) = (pid for pid in server.pids if psutil.Process(pid).name() == "VLLM::EngineCor")
    os.kill(core, signal.SIGKILL)


def test_a_server_that_lives_leaves_nothing() -> None:
    with booted(env={"OF_THE_CALL": "1"}) as server:
        pids, log = server.pids, server.log
        assert psutil.Process(pids[0]).environ()["OF_THE_CALL"] == "1"
        assert complete(server)
        assert server.evidence is Evidence.REHEARSAL
        assert "Uvicorn running" in log.read_text(encoding="utf-8") or log.stat().st_size > 1000
        server.assert_alive()
        client = server.client(max_retries=0)
        assert [server] == live_server.RUNNING
    assert gone(pids)
    assert not log.parents[1].exists()
    assert live_server.RUNNING == []
    assert client.is_closed()
    server.close()
    with pytest.raises(UsageError, match="closed"):
        server.assert_alive()


def test_the_root_exception_replaces_what_the_program_saw(tmp_path: Path) -> None:
    import openai  # here, because each worker would wait for it

    with (  # noqa: PT012  # the body is under test
        pytest.raises(EngineDied) as caught,
        booted(folder=tmp_path) as server,
    ):
        pids = server.pids
        complete(server, **ODD)
    died = caught.value
    assert isinstance(died.__cause__, openai.APIConnectionError | openai.InternalServerError)
    message = "index 999999 is out of bounds for dimension 1 with size 151936"
    assert (died.exception, died.message) == ("IndexError", message)
    assert died.frames[-1] == "vllm/v1/sample/logits_processor/builtin.py:apply"
    assert died.log == tmp_path / "logs" / "server-1.log"
    head, *_, simulated, _ = str(died).splitlines()
    assert head == f"IndexError: {died.message}"
    assert simulated.startswith("REHEARSAL: ")
    assert gone(pids)


def test_a_death_that_the_body_did_not_notice_is_raised_once() -> None:
    with pytest.raises(EngineDied, match=r"EngineCore|died|exit") as caught, booted() as server:
        kill_engine(server)
    assert (caught.value.exception, caught.value.__cause__) == (None, None)
    assert caught.value.log.exists(), "the log of a death stays"
    server.close()


def test_a_dead_engine_is_not_alive() -> None:
    with booted() as server:
        kill_engine(server)
        for _ in ("this test", "the next test of the module"):
            with pytest.raises(EngineDied):
                server.assert_alive()


def test_each_server_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """The log of another server may hold its death."""
    with booted(folder=tmp_path) as server:
        server.assert_alive()
    with pytest.raises(UsageError, match="log of another server"), booted(folder=tmp_path):
        pass


@pytest.mark.parametrize(("error", "dies"), [(ZeroDivisionError, False), (KeyboardInterrupt, True)])
def test_an_error_or_interrupt_of_the_body_is_raised(
    error: type[BaseException], dies: bool
) -> None:
    with pytest.raises(error), booted() as server:  # noqa: PT012  # the body is under test
        pids = server.pids
        if dies:
            kill_engine(server)
        raise error
    assert gone(pids)


def test_an_interrupt_of_the_boot_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_REHEARSAL_FAULT", "stuck-boot")
    # a shell ignores it in what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    server = booted()
    threading.Timer(1.0, signal.raise_signal, (signal.SIGINT,)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        server.__enter__()
    assert time.monotonic() - began < 30
    assert server.pids == ()


@pytest.mark.parametrize(
    ("fault", "words"), [("boot", r"\w"), ("hang", r"nothing moved for \d+ s")]
)
def test_an_engine_that_dies_in_its_boot_or_hangs(
    monkeypatch: pytest.MonkeyPatch, fault: str, words: str
) -> None:
    import openai  # here, because each worker would wait for it

    monkeypatch.setenv("VLLM_REHEARSAL_FAULT", fault)
    with pytest.raises(EngineDied, match=words) as caught, booted(answer_stall=2) as server:
        complete(server)
    assert bool(caught.value.exception) is (fault == "boot")
    assert isinstance(caught.value.__cause__, openai.APIConnectionError) is (fault == "hang")


@pytest.mark.parametrize("when", ["boot", "later"])
def test_a_fault_of_the_harness_is_no_living_engine(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise HarnessBug("broken")

    begin = threading.Event()

    async def breaks(trial: Trial, work: Work) -> None:
        task = asyncio.ensure_future(run_trial(trial, work))
        while not begin.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait((task,))
        raise HarnessBug("broken")

    monkeypatch.setattr(live_server, "run_trial", broken if when == "boot" else breaks)
    with pytest.raises(HarnessBug, match="broken"), booted() as server:  # noqa: PT012  # it raises
        begin.set()
        while server.pids:
            time.sleep(0.05)
        server.assert_alive()


def test_auto_never_takes_an_imitation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with (
        pytest.raises(Unsupported, match="no vLLM is installed here") as caught,
        VllmServer(COMMAND),
    ):
        pytest.fail("there is none")
    assert 'vllm="' in caught.value.hint


@pytest.mark.parametrize(
    ("command", "options", "kind", "text"),
    [
        ("vllm serve", {}, CommandError, "names no model"),
        ("ls", {}, CommandError, "no server command"),
        (COMMAND, {"vllm": "banana"}, UsageError, "is not the number of a vLLM release"),
        (COMMAND, {"image": "x"}, UsageError, "no meaning with --server rehearsal"),
    ],
)
def test_wrong_arguments(
    command: str, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text), VllmServer(command, **{"server": "rehearsal", **options}):
        pytest.fail("it must not boot")
