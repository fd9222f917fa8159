from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.conftest import Harness
from tests.core.running.test_assess import SPINS
from tests.fake_vllm import FakeVllm, answering
from tests.golden_files import assert_refused
from tests.web import httpx
from vllm_repro.host.ports import free_port
from vllm_repro.resources import rehearsal_engine
from vllm_repro.running.assess import assess
from vllm_repro.running.job import first_line
from vllm_repro.running.state import Observed
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.attach import (
    AttachServer,
    AttachSite,
    evidence_of,
    find_log,
    find_process,
    own_lines_begin,
)
from vllm_repro.servers.base import ServerFacts
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.lab import LabSite
from vllm_repro.servers.options import ServerOptions
from vllm_repro.trigger.conditions import chunked_prefill
from vllm_repro.trigger.trigger import SentRequest
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_diagnosis.evidence import Evidence


@contextlib.contextmanager
def booted(
    output: int | BinaryIO, fault: str = ""
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a rehearsal engine by hand until the end of the test."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, str(rehearsal_engine()), "serve", "some-model", "--port", str(port)],
        env={**os.environ, "VLLM_REHEARSAL_VERSION": "0.28.0", "VLLM_REHEARSAL_FAULT": fault},
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
    try:
        while find_process(url) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield url, process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, Path, int]]:
    """Start a rehearsal engine whose log also holds an earlier server.

    `request.param`: its fault.
    """
    log = tmp_path / "server.log"
    log.write_text(
        "(APIServer pid=1) ERROR 01-01 00:00:00 [core.py:1] EngineCore encountered a fatal"
        " error.\n",
        encoding="utf-8",
    )
    with log.open("ab") as output, booted(output, getattr(request, "param", "")) as (url, process):
        yield url, log, process.pid


def test_process_and_log_of_a_running_server_are_found(running: tuple[str, Path, int]) -> None:
    url, log, pid = running
    assert (find_process(url), find_log(pid)) == (pid, log)
    assert find_process("http://example.invalid:1") is None


def test_a_url_without_a_port_has_that_of_its_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_repro.servers.attach.listeners", lambda port: {port: None})
    urls = ("http://127.0.0.1", "https://localhost/v1", "http://127.0.0.1:8000")
    assert [find_process(url) for url in urls] == [80, 443, 8000]


def test_no_log_without_a_process() -> None:
    assert find_log(None) is None


def test_the_bug_is_seen_on_a_server_that_runs_already(
    running: tuple[str, Path, int], harness: Harness
) -> None:
    url, _, _ = running
    done = harness("run", "min-tokens-stop-ids", "--server", "attach", "--url", url)
    assert done.status == 0, done.out + done.err
    # A rehearsal must not pass for a vLLM because it was attached to.
    assert done.report["evidence"] == "rehearsal"
    # An old fatal line in the file is not this server's.
    assert done.outcomes == {"reported": ["crash"], "near-miss": ["untriggered"]}
    assert done.trial["death"]["signature"] == "match"


@pytest.mark.parametrize("running", ["busy"], indirect=True)
@pytest.mark.parametrize(("others", "outcome"), [(False, "hang"), (True, "infra")])
def test_a_server_with_other_clients_is_not_reported_as_busy(
    running: tuple[str, Path, int], harness: Harness, tmp_path: Path, others: bool, outcome: str
) -> None:
    url, _, _ = running
    file = tmp_path / "spins.py"
    file.write_text(SPINS.replace("within=3", "within=1.5"), encoding="utf-8")
    done = threading.Event()

    def ask() -> None:
        while not done.wait(0.1):
            httpx.post(
                f"{url}/v1/completions",
                json={"model": "some-model", "prompt": "hello", "max_tokens": 4},
            )

    other = threading.Thread(target=ask)
    if others:
        other.start()
    try:
        ended = harness("run", str(file), "--server", "attach", "--url", url)
    finally:
        done.set()
        if others:
            other.join()
    why = ended.trial["why"]
    assert ended.trial["outcome"] == outcome, why
    assert ("other clients are using this server" in why) is others


def test_an_attached_server_keeps_its_flags_and_is_left_running(
    running: tuple[str, Path, int], harness: Harness
) -> None:
    refused = harness("run", "tq-chunked-prefill", "--url", running[0], "--arm", "eager")
    assert_refused(refused, "changes the server's flags")
    done = harness("run", "min-tokens-stop-ids", "--url", running[0], "--arm", "near-miss")
    assert done.status == 0, done.out + done.err
    assert httpx.get(f"{running[0]}/health", timeout=5).status_code == 200


def test_without_a_log_the_cause_is_not_guessed(harness: Harness) -> None:
    with booted(subprocess.PIPE) as (url, process):
        assert process.stdout is not None
        drain = threading.Thread(target=process.stdout.read, daemon=True)
        drain.start()
        done = harness("run", "min-tokens-stop-ids", "--url", url, "--arm", "reported")
    drain.join(timeout=10)
    process.stdout.close()
    trial = done.trial
    assert (trial["outcome"], trial["death"]["signature"]) == ("other-crash", None)
    assert (done.report["verdict"], done.status) == ("inconclusive", 2)
    assert "no log names the cause" in trial["why"]


@pytest.mark.parametrize(
    ("path", "message"),
    [("/version", "it is not a vLLM"), ("/health", "answers 404 to /health")],
)
def test_what_is_no_vllm_or_cannot_be_watched_is_wrong_usage(
    harness: Harness, tmp_path: Path, path: str, message: str
) -> None:
    with FakeVllm(tmp_path / "log", {path: answering(404)}) as fake:
        done = harness("run", "min-tokens-stop-ids", "--url", fake.base_url)
    assert_refused(done, message)
    assert done.folder is None


BOOT = "(APIServer pid={pid}) INFO 11-20 08:00:00 [utils.py:1] vLLM API server version 0.28.0\n"
ARGS = "(APIServer pid={pid}) INFO 11-20 08:00:00 [utils.py:1] non-default args: {{'model': 'm'}}\n"
DEATH = (
    "(EngineCore pid=9) ERROR 11-20 08:24:30 [core.py:1138] EngineCore encountered a fatal error.\n"
)
OWN = "(APIServer pid={pid}) INFO:     Application startup complete.\n"


ELSE = BOOT.format(pid=5)


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ((BOOT, OWN), 2),
        ((ARGS, DEATH, ARGS, OWN), 2),  # `vllm serve` logs no other line first
        # the first process of a container has the same pid in each of its lives
        ((BOOT, DEATH, BOOT, OWN), 2),
        ((ELSE, DEATH, BOOT, OWN), 2),
        ((DEATH, OWN), 1),
        ((ELSE, DEATH, ELSE, "ready\n"), 2),  # a server whose pid is not to be seen from here
        # a log that was rotated since the boot, or belongs to something else
        ((DEATH, "ready\n"), 0),
    ],
)
def test_lines_of_earlier_servers_are_skipped(
    tmp_path: Path, lines: tuple[str, ...], kept: int
) -> None:
    log = tmp_path / "server.log"
    log.write_text("".join(lines).format(pid=os.getpid()), encoding="utf-8")
    rest = log.read_bytes()[own_lines_begin(log, os.getpid()) :]
    assert rest.decode() == "".join(lines[len(lines) - kept :]).format(pid=os.getpid())


CONFIG = (
    "(EngineCore pid=9) INFO [core.py:133] Initializing a V1 LLM engine (v0.23.0) with config:"
    " model='m', device_config="
)


@pytest.mark.parametrize(
    ("version", "log", "evidence"),
    [
        ("0.23.0", f"{CONFIG}cuda, seed=0\n", Evidence.GPU),
        ("0.23.0", f"{CONFIG}cpu, seed=0\n", Evidence.CPU),
        ("0.23.0+cpu", "", Evidence.CPU),
        ("0.23.0", "", Evidence.UNKNOWN),
        ("0.23.0", "prompt: 'device_config=cuda'\n", Evidence.UNKNOWN),
        (
            "0.23.0",
            (
                "LAB: vllm_repro_lab replaces parts of this vLLM (mechanism"
                f" turboquant)\n{CONFIG}cpu\n"
            ),
            Evidence.LAB,
        ),
        (
            "0.23.0",
            f"REHEARSAL engine of vllm-repro, behaving as vLLM 0.23.0\n{CONFIG}cuda\n",
            Evidence.REHEARSAL,
        ),
        (None, f"{CONFIG}xpu\n", Evidence.UNKNOWN),
    ],
)
def test_an_attached_server_is_evidence_of_what_it_shows(
    version: str | None, log: str, evidence: Evidence
) -> None:
    """Evidence never follows from the GPUs that a scenario needs."""
    assert evidence_of(version, log) is evidence


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [(ServerKind.ATTACH, Outcome.UNTRIGGERED), (ServerKind.PROCESS, Outcome.CLEAN)],
)
def test_unknown_flags_are_no_evidence_of_an_attached_server(
    tmp_path: Path, kind: ServerKind, outcome: Outcome
) -> None:
    scenario = replace(find("tq-chunked-prefill"), trigger=chunked_prefill(chunks=2))
    seen = Observed(
        facts=ServerFacts(kind=kind, evidence=Evidence.GPU, argv=()),
        ready=True,
        requests=[SentRequest("long chat", 7593)],
        canary_ok=True,
    )
    conclusion = assess(scenario, scenario.reported(), seen, tmp_path / "none")
    assert conclusion.outcome is outcome
    assert ("the batch size is not known" in conclusion.why) is (kind is ServerKind.ATTACH)


@pytest.mark.anyio
async def test_a_log_that_is_truncated_is_read_on(tmp_path: Path) -> None:
    source, copy = tmp_path / "server.log", tmp_path / "copy.log"
    boot = "(APIServer pid=1) INFO 11-20 08:24:00 [a.py:1] vLLM API server version 0.28.0\n"
    source.write_text(boot, encoding="utf-8")

    async def copied(text: str) -> None:
        async with asyncio.timeout(10):
            while not copy.read_text(encoding="utf-8").endswith(text):
                await asyncio.sleep(0.02)

    server = AttachServer("http://127.0.0.1:1", log=source, copy_to=copy, evidence=Evidence.UNKNOWN)
    await server.start()
    await copied(boot)
    source.write_text("", encoding="utf-8")
    source.write_text("after\n", encoding="utf-8")
    await copied(boot + "after\n")
    await server.stop()


def test_the_first_line_names_the_release_that_runs_already() -> None:
    site = AttachSite(
        ServerOptions(url="http://127.0.0.1:1"), find("min-tokens-stop-ids"), rehearsal=True
    )
    site.version = "0.24.0"
    assert "imitates vLLM 0.24.0. " in first_line(site, "", "0.28.0")


def test_the_first_line_names_the_compiled_parts_of_another_release() -> None:
    line = first_line(LabSite(ServerOptions(), find("sco-hybrid")), "", "0.33.0")
    assert "vLLM 0.33.0 (its Python over the compiled parts of 0.32.0) on a CPU" in line
