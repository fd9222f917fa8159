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

from tests.conftest import Harness
from vllm_repro.running.idle import CpuSample, engine_cpu_seconds, is_idle, never_idle_message
from vllm_repro.scenario.workload import IDLE_AFTER

SPINS = """'''An engine that works on.'''

from vllm_repro.vocabulary import Model, Needs, Scenario, Status, arm, completion, lives, rest, sent_with, spins

scenario = Scenario(
    id="spins",
    issue="vllm-project/vllm#54195",
    title="an engine that never comes to rest",
    command="vllm serve tiny --max-model-len 512",
    model=Model("tiny", heads=2, kv_heads=2, head_dim=32, layers=1, vocab_size=4096, why="any will do"),
    needs=Needs(memory_gb=1),
    status=Status(bad=">=0.20.0"),
    try_with="0.32.0",
    workload=[completion(prompt=20, max_tokens=2, ignore_eos=True), rest(within=8)],
    trigger=sent_with("ignore_eos"),
    arms=[arm("reported", spins)],
)
"""


def samples(shares: list[float], every: float = 0.5) -> list[CpuSample]:
    """Return samples `every` seconds apart; each of `shares` is the part of one processor used in between."""
    taken = [CpuSample(100.0, 7.0)]
    for share in shares:
        taken.append(CpuSample(taken[-1].at + every, taken[-1].used + share * every))
    return taken


def test_idle_needs_seconds_without_work() -> None:
    assert is_idle(samples([0.01] * 10))
    assert not is_idle(samples([0.01] * 9))


def test_earlier_work_does_not_count() -> None:
    assert is_idle(samples([1.0] * 20 + [0.0] * 10))
    assert not is_idle(samples([1.0] * 20 + [0.0] * 9))


@given(st.lists(st.floats(0.021, 4.0), min_size=1, max_size=60))
def test_steady_work_is_never_idle(shares: list[float]) -> None:
    taken = samples(shares)
    assert not any(is_idle(taken[:end]) for end in range(1, len(taken) + 1))


@given(st.lists(st.floats(0, 2), min_size=1, max_size=60), st.integers(0, 60))
def test_idle_after_enough_quiet_whatever_came_before(shares: list[float], more: int) -> None:
    assert is_idle(samples([*shares, *[0.0] * (int(IDLE_AFTER / 0.5) + more)]))


def test_message_has_the_measured_times() -> None:
    told = never_idle_message(samples([0.5] * 60))
    assert "in the 30 s after the last request" in told
    assert "15.0 s of processor time" in told


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
            assert core.stdout is not None
            assert core.stdout.readline() == "up\n"
            assert core.stdout.readline() == "idle\n"
            spent = engine_cpu_seconds([os.getpid(), core.pid])
            assert spent is not None
            assert spent >= 0.2
            time.sleep(0.3)
            later = engine_cpu_seconds([core.pid])
            assert later is not None
            assert later - spent < 0.1
        finally:
            core.kill()


@pytest.mark.parametrize(("fault", "outcome", "status"), [("busy", "hang", 0), ("", "clean", 1)])
def test_trial_reports_a_hang_if_the_engine_keeps_working(
    harness: Harness, tmp_path: Path, fault: str, outcome: str, status: int
) -> None:
    file = tmp_path / "spins.py"
    file.write_text(SPINS, encoding="utf-8")
    done = harness("run", str(file), "--server", "rehearsal", env={"VLLM_REHEARSAL_FAULT": fault})
    (trial,) = done.report["arms"][0]["trials"]
    assert (trial["outcome"], done.status) == (outcome, status), done.err
    assert trial["requests"] == {"sent": 1, "ok": 1, "failed": 0}
    if fault:
        assert "EngineCore never became idle" in trial["why"]
        assert "never became idle" in done.out


def test_a_hang_of_the_other_kind_is_not_this_bug(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "spins.py"
    file.write_text(SPINS, encoding="utf-8")
    fault = {"VLLM_REHEARSAL_FAULT": "hang"}
    done = harness("run", str(file), "--server", "rehearsal", "--answer-stall", "3", env=fault)
    (found,) = done.report["arms"]
    assert (found["trials"][0]["outcome"], found["k"], done.report["verdict"]) == ("hang", 0, "changed")
    # And the other way round: an arm whose requests were to hang, and whose engine answers them and works on.
    hanging = tmp_path / "hangs.py"
    hanging.write_text(SPINS.replace("spins", "hangs"), encoding="utf-8")
    done = harness("run", str(hanging), "--server", "rehearsal", env={"VLLM_REHEARSAL_FAULT": "busy"})
    (found,) = done.report["arms"]
    assert (found["trials"][0]["outcome"], found["k"], done.report["verdict"]) == ("hang", 0, "changed")


@pytest.mark.parametrize(("kind", "fault"), [("spins", "busy"), ("hangs", "hang")])
@pytest.mark.parametrize("crossed", [True, False])
def test_a_hang_short_of_the_boundary_is_unproved(
    harness: Harness, tmp_path: Path, kind: str, fault: str, crossed: bool
) -> None:
    file = tmp_path / f"{kind}.py"
    text = SPINS if crossed else SPINS.replace("sent_with", "attention_backend")
    file.write_text(text.replace("spins", kind), encoding="utf-8")
    fault_of = {"VLLM_REHEARSAL_FAULT": fault}
    done = harness("run", str(file), "--server", "rehearsal", "--answer-stall", "3", env=fault_of)
    (found,) = done.report["arms"]
    assert (found["trials"][0]["outcome"], found["k"]) == ("hang", int(crossed))
    assert found["trials"][0]["trigger"]["crossed"] is crossed
    assert done.report["verdict"] == ("reproduces" if crossed else "inconclusive")
    assert ("reported: nothing can be said: 1 hang, 1 short of the boundary" in done.out) is not crossed
    assert done.status == (0 if crossed else 2)


def test_a_death_while_waiting_for_idle_is_a_death(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "spins.py"
    # The death comes with the second request, which is sent when the first look is over; its own look must not hide it.
    file.write_text(SPINS.replace("rest(within=8)]", "rest(within=8), completion(prompt=9), rest(within=8)]"))
    done = harness("run", str(file), "--server", "rehearsal", env={"VLLM_REHEARSAL_FAULT": "kill:2"})
    (trial,) = done.report["arms"][0]["trials"]
    assert trial["outcome"] == "other-crash"


def test_check_asks_for_rest_in_a_spinning_arm(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "spins.py"
    file.write_text(SPINS.replace(", rest(within=8)]", "]"), encoding="utf-8")
    done = harness("check", str(file))
    assert done.status == 1
    assert "add rest(within=30) at its end" in done.out + done.err
    file.write_text(SPINS.replace("within=8", "within=1"), encoding="utf-8")
    assert "within=5 or more seconds" in harness("check", str(file)).out
