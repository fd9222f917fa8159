"""Idle detection, and trials of engines that never become idle."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Done, Harness
from vllm_repro.running.idle import CpuSample, engine_cpu_seconds, is_idle, never_idle_message
from vllm_repro.scenario.workload import IDLE_AFTER

SPINS = """'''An engine that works on.'''

from vllm_repro.vocabulary import (
    Model, Needs, Scenario, Status, arm, completion, lives, rest, sent_with, spins
)

scenario = Scenario(
    id="spins",
    issue="vllm-project/vllm#54195",
    title="an engine that never comes to rest",
    command="vllm serve tiny --max-model-len 512",
    model=Model(
        "tiny", heads=2, kv_heads=2, head_dim=32, layers=1, vocab_size=4096, why="any will do"
    ),
    needs=Needs(memory_gb=1),
    status=Status(bad=">=0.20.0"),
    try_with="0.32.0",
    workload=[completion(prompt=20, max_tokens=2, ignore_eos=True), rest(within=3)],
    trigger=sent_with("ignore_eos"),
    arms=[arm("reported", spins)],
)
"""


def samples(shares: list[float], every: float = 0.5) -> list[CpuSample]:
    """Return samples `every` seconds apart; `shares` are the parts of one processor in use."""
    taken = [CpuSample(100.0, 7.0)]
    for share in shares:
        taken.append(CpuSample(taken[-1].at + every, taken[-1].used + share * every))
    return taken


def test_idle_needs_seconds_without_work() -> None:
    assert is_idle(samples([0.01] * 10), IDLE_AFTER)
    assert not is_idle(samples([0.01] * 9), IDLE_AFTER)


@given(st.lists(st.floats(0.021, 4.0), min_size=1, max_size=60))
def test_steady_work_is_never_idle(shares: list[float]) -> None:
    taken = samples(shares)
    assert not any(is_idle(taken[:end], IDLE_AFTER) for end in range(1, len(taken) + 1))


@given(st.lists(st.floats(0, 2), min_size=1, max_size=60), st.integers(0, 60))
def test_idle_after_enough_quiet_whatever_came_before(shares: list[float], more: int) -> None:
    assert is_idle(samples([*shares, *[0.0] * (int(IDLE_AFTER / 0.5) + more)]), IDLE_AFTER)


def test_message_has_the_measured_times() -> None:
    listed = never_idle_message(samples([0.5] * 60))
    assert "in the 30 s after the last request" in listed
    assert "15.0 s of processor time" in listed


def test_only_engine_core_processes_count(tmp_path: Path) -> None:
    assert engine_cpu_seconds([os.getpid()]) is None
    named = tmp_path / "core.py"
    named.write_text(
        "from pathlib import Path\nimport time\n"
        "Path('/proc/self/comm').write_text('VLLM::EngineCor')\nprint('up', flush=True)\n"
        "ends = time.process_time() + 0.2\nwhile time.process_time() < ends: pass\n"
        "print('idle', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(named)], stdout=subprocess.PIPE, text=True) as core:
        try:
            assert core.stdout
            assert (core.stdout.readline(), core.stdout.readline()) == ("up\n", "idle\n")
            spent = engine_cpu_seconds([os.getpid(), core.pid])
            assert spent
            assert spent >= 0.2
            time.sleep(0.3)
            assert (engine_cpu_seconds([core.pid]) or 0) - spent < 0.1
        finally:
            core.kill()


def run(harness: Harness, folder: Path, text: str, fault: str) -> Done:
    file = folder / f"{'hangs' if 'hangs' in text else 'spins'}.py"
    text = text.replace("within=3", "within=1.5") if fault == "busy" else text
    file.write_text(text, encoding="utf-8")
    words = ("--server", "rehearsal", "--answer-stall", "2")
    return harness("run", str(file), *words, env={"VLLM_REHEARSAL_FAULT": fault})


@pytest.mark.parametrize(
    ("kind", "fault", "outcome", "k", "verdict", "status"),
    [
        ("spins", "busy", "hang", 1, "reproduces", 0),
        ("hangs", "hang", "hang", 1, "reproduces", 0),
        ("spins", "", "clean", 0, "quiet", 1),
        ("spins", "hang", "hang", 0, "changed", 1),  # the other kind of hang is not this bug
        ("hangs", "busy", "hang", 0, "changed", 1),
    ],
)
def test_hung_requests_and_an_engine_that_never_idles_differ(
    harness: Harness,
    tmp_path: Path,
    kind: str,
    fault: str,
    outcome: str,
    k: int,
    verdict: str,
    status: int,
) -> None:
    done = run(harness, tmp_path, SPINS.replace("spins", kind), fault)
    trial, (arm,) = done.trial, done.report["arms"]
    assert (trial["outcome"], arm["k"]) == (outcome, k), done.err
    assert (done.report["verdict"], done.status) == (verdict, status)
    assert trial["requests"]["sent"] == 1
    assert ("EngineCore never became idle" in trial["why"]) is (fault == "busy")


def test_a_hang_short_of_the_boundary_is_unproved(harness: Harness, tmp_path: Path) -> None:
    done = run(harness, tmp_path, SPINS.replace("sent_with", "attention_backend"), "busy")
    assert (done.trial["outcome"], done.trial["trigger"]["crossed"]) == ("hang", False)
    assert (done.report["verdict"], done.status) == ("inconclusive", 2)
    assert "reported: nothing can be said: 1 hang, 1 short of the boundary" in done.out


def test_a_death_while_waiting_for_idle_is_a_death(harness: Harness, tmp_path: Path) -> None:
    # The death comes with the second request, which is sent when the first look is over; its own
    # look must not hide it.
    text = SPINS.replace("rest(within=3)]", "rest(within=3), completion(prompt=9), rest(within=3)]")
    assert run(harness, tmp_path, text, "kill:2").trial["outcome"] == "other-crash"


def test_check_asks_for_rest_in_a_spinning_arm(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "spins.py"
    file.write_text(SPINS.replace(", rest(within=3)]", "]"), encoding="utf-8")
    done = harness("check", str(file))
    assert done.status == 1
    assert "add rest(within=30) at its end" in done.out + done.err
    file.write_text(SPINS.replace("within=3", "within=1"), encoding="utf-8")
    assert "rest() takes within=1.5 or more seconds" in harness("check", str(file)).out
