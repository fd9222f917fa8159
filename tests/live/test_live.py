"""Real vLLM releases on this CPU: the harness tells a real death from a real life.

Each test boots servers for some minutes. Waits follow the log's progress, so a slow machine is no
failure.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import Harness
from tests.live.two_ranks import growing
from tests.web import httpx
from vllm_repro.host.ports import free_port
from vllm_repro.host.processes import session_members, start
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source
from vllm_repro.releases.tiny_model_folder import cached_model
from vllm_repro.report.script import script
from vllm_repro.scenario.catalogue import find
from vllm_repro.tiny_model import TinyModel

pytestmark = pytest.mark.live

SCENARIO = "min-tokens-stop-ids"


def test_0_28_0_crashes_and_lives_with_the_fix_as_overlay(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    # other tests do not wait for it
    monkeypatch.setattr("vllm_repro.running.trial._SDK_TOTAL", 10.0)
    arms = ("--arm", "reported", "--arm", "patched")
    done = harness(
        "run", SCENARIO, "--server", "process", "--no-throughput", "--vllm", "0.28.0", *arms
    )
    assert done.status == 0, done.out + done.err
    assert "REHEARSAL" not in done.out
    report = done.report
    assert (report["verdict"], report["expected"], report["evidence"]) == (
        "reproduces",
        True,
        "cpu",
    )
    reported, fixed = report["arms"]
    trial = reported["trials"][0]
    assert trial["outcome"] == "crash"
    assert trial["trigger"]["crossed"] is True
    assert trial["phase"] == "request"
    death = trial["death"]
    assert death["signature"] == "match"
    assert death["exception"] == "IndexError"
    assert death["detected_by"]
    assert death["latency_s"] >= 0
    assert {"answer", "log", "process"} <= set(death["channels"])
    assert any("logits_processor/builtin.py:apply" in frame for frame in death["frames"])
    saw = trial["client_saw"]
    assert (saw["error"] is None, saw["attempts"][0], len(saw["attempts"])) == (False, 500, 3)
    assert reported["server"]["vllm_version"] == "0.28.0"
    assert reported["server"]["patched"] == []

    trial = fixed["trials"][0]
    assert (trial["outcome"], trial["trigger"]["crossed"], trial["death"]) == ("clean", True, None)
    (changed,) = fixed["server"]["patched"]
    assert (changed["file"], changed["imported"]) == ("vllm/sampling_params.py", True)
    log = (done.run / trial["log"]).read_text(encoding="utf-8")
    processes = set(re.findall(r"REPRO observed imported .*\"pid\": (\d+)", log))
    assert len(processes) == 3, "API server, EngineCore and worker"


_TEST_OF_A_USER = """
import psutil

def test_serves(vllm_server):
    server = vllm_server("vllm serve Qwen/Qwen3-0.6B --dtype float32"
                         " --max-model-len 2048 --enforce-eager",
                         server="process", vllm="0.28.0", weights="dummy")
    for odd in ({}, {"min_tokens": 1, "stop_token_ids": [999999]}):
        answer = server.client().completions.create(
            model=server.model, prompt="hello", max_tokens=4, extra_body=odd)
        print("tokens:", answer.usage.completion_tokens, *server.pids)
        mapped = {region.path for pid in server.pids
                  for region in psutil.Process(pid).memory_maps()}
        print("shared memory:", *(path for path in mapped if path.startswith("/dev/shm/")))
"""


def test_a_users_test_fails_with_the_root_exception(
    tmp_path: Path,
) -> None:
    """In a process of its own, as `pytest` runs it. The second request is the one that kills."""
    provision(Source(release="0.28.0"))
    (tmp_path / "test_served.py").write_text(_TEST_OF_A_USER, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--basetemp",
        str(tmp_path / "base"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(
        r"^E +vllm_repro\.EngineDied: IndexError: index 999999 is out of bounds",
        done.stdout,
        re.MULTILINE,
    )
    assert re.search(r"^E +the test saw APIConnectionError: ", done.stdout, re.MULTILINE)
    tokens, *pids = re.findall(r"^tokens: (.*)", done.stdout, re.MULTILINE)[0].split()
    assert (tokens, len(pids) >= 3) == ("4", True)
    until = time.monotonic() + 10  # a killed process stays in the table until its parent looks
    while (
        left := [pid for pid in pids if psutil.pid_exists(int(pid))]
    ) and time.monotonic() < until:
        time.sleep(0.2)
    assert left == []
    segments = re.findall(r"^shared memory: (.*)", done.stdout, re.MULTILINE)[0].split()
    assert {Path(segment).name[:4] for segment in segments} == {"psm_", "sem."}
    assert [segment for segment in segments if Path(segment).exists()] == []


@pytest.mark.by_hand
def test_token_ids_and_responses_are_evidence(harness: Harness) -> None:
    provision(Source(release="0.29.0"))
    scenario = Path(__file__).parents[1] / "data" / "declared" / "responses.py"
    done = harness(
        "run", str(scenario), "--server", "process", "--no-throughput", "--vllm", "0.29.0"
    )
    (trial,) = done.report["arms"][0]["trials"]
    assert (trial["outcome"], trial["requests"]) == (
        "clean",
        {"sent": 3, "ok": 3, "failed": 0},
    ), trial["why"]
    chunks, plain, streamed = trial["trigger"]["evidence"]
    assert chunks.startswith("ids: 1000 prompt tokens")
    assert plain == "plain carried max_output_tokens=4: answered 200"
    assert streamed == "streamed carried max_output_tokens=5: answered 200"


def test_a_flag_that_the_release_does_not_know_is_unsupported(
    harness: Harness, tmp_path: Path
) -> None:
    folder = tmp_path / "scenarios"
    folder.mkdir()
    source = (Path(__file__).parents[2] / "scenarios" / "min_tokens_stop_ids.py").read_text(
        encoding="utf-8"
    )
    changed = source.replace(
        "--enforce-eager\n", "--enforce-eager\n        --calculate-kv-scales\n"
    )
    assert changed != source
    (folder / "min_tokens_stop_ids.py").write_text(
        changed.replace('try_with="0.28.0"', 'try_with="0.27.1"'), encoding="utf-8"
    )
    done = harness(
        "run",
        str(folder / "min_tokens_stop_ids.py"),
        "--server",
        "process",
        "--vllm",
        "0.28.0",
        "--arm",
        "reported",
    )
    trial = done.report["arms"][0]["trials"][0]
    assert trial["outcome"] == "unsupported", trial
    assert "--calculate-kv-scales" in trial["why"]
    assert done.status == 2


@pytest.fixture
def running(tmp_path: Path) -> Iterator[str]:
    """Start a server by hand, unknown to the harness, with its output in a file."""
    release = provision(Source(release="0.28.0"))
    model = cached_model(TinyModel())
    port = free_port()
    words = [
        str(release.executable),
        "serve",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--load-format",
        "dummy",
    ]
    flags = (
        "--dtype float32 --max-model-len 8192 --max-num-batched-tokens 512 --max-num-seqs 8"
        " --enforce-eager"
    )
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = tmp_path / "server.log"
    started = start([*words, *flags.split()], environment, log)
    try:
        for _ in growing(lambda: log.stat().st_size, 600):
            assert started.popen.poll() is None, log.read_text(encoding="utf-8")[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                    break
        yield f"http://127.0.0.1:{port}"
    finally:
        started.end()
        assert session_members(started.id) == []


def test_attached_to_a_running_server(harness: Harness, running: str) -> None:
    done = harness("run", SCENARIO, "--server", "attach", "--url", running)
    assert done.status == 0, done.out + done.err
    arms = {arm["name"]: arm["trials"][0] for arm in done.report["arms"]}
    assert arms["near-miss"]["outcome"] == "untriggered"
    trial = arms["reported"]
    assert (trial["outcome"], trial["death"]["signature"], trial["trigger"]["crossed"]) == (
        "crash",
        "match",
        True,
    )
    assert trial["death"]["latency_s"] >= 0
    assert done.report["evidence"] == "cpu"


def _words(process: psutil.Process) -> str:
    """Return the command of a process; empty once it is gone or a zombie."""
    try:
        return " ".join(process.cmdline()) if process.is_running() else ""
    except psutil.NoSuchProcess:
        return ""


def test_a_killed_harness_leaves_a_real_server_that_clean_ends(
    harness: Harness, tmp_path: Path
) -> None:
    provision(Source(release="0.28.0"))
    environment = {**os.environ, "VLLM_REPRO_REPORTS": str(tmp_path / "reports"), "CI": "true"}
    command = [
        sys.executable,
        "-m",
        "vllm_repro",
        "run",
        SCENARIO,
        "--server",
        "process",
        "--vllm",
        "0.28.0",
    ]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        logs = (tmp_path / "reports").glob
        # Kill it once EngineCore and its worker run; they are hardest to find again.
        for _ in growing(lambda: sum(log.stat().st_size for log in logs("*/2*/logs/*.log")), 600):
            children = psutil.Process(process.pid).children(recursive=True)
            if sum("VLLM::" in _words(child) for child in children) >= 2:
                break
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    harness("clean", "--yes")  # the guard of the killed harness does the same
    until = time.monotonic() + 60
    while left := [child for child in children if _words(child)]:
        assert time.monotonic() < until, left
        time.sleep(0.2)


@pytest.mark.by_hand
@pytest.mark.parametrize(
    ("release", "status", "printed"),
    [
        ("0.28.0", 1, "The engine died: IndexError: index 999999"),
        ("0.29.0", 0, "The engine lives."),
    ],
)
def test_the_script_of_a_report_finds_the_same_alone(
    tmp_path: Path, release: str, status: int, printed: str
) -> None:
    known = find(SCENARIO)
    installed = provision(Source(release=release))
    (tmp_path / "repro.py").write_text(script(known, known.arms[0]), encoding="utf-8")
    command = [
        str(installed.python),
        "repro.py",
        "--model",
        str(cached_model(TinyModel())),
        "--load-format",
        "dummy",
    ]
    environment = {"PATH": f"{installed.executable.parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, printed in done.stdout) == (status, True), done.stdout + done.stderr
