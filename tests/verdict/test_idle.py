"""Whether an engine comes to rest: what its processor time says, and what a trial makes of it."""

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
from vllm_repro.verdict.idle import QUIET, Sample, rested, restless, used

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


def samples(shares: list[float], every: float = 0.5) -> list[Sample]:
    """A look every so many seconds, between which so large a share of a processor was used."""
    taken = [Sample(100.0, 7.0)]
    for share in shares:
        taken.append(Sample(taken[-1].at + every, taken[-1].used + share * every))
    return taken


def test_an_engine_that_waits_is_at_rest_when_it_was_looked_at_for_long_enough() -> None:
    assert rested(samples([0.01] * 10))
    assert not rested(samples([0.01] * 9))


def test_work_before_the_last_seconds_is_forgiven() -> None:
    assert rested(samples([1.0] * 20 + [0.0] * 10))
    assert not rested(samples([1.0] * 20 + [0.0] * 9))


@given(st.lists(st.floats(0.021, 4.0), min_size=1, max_size=60))
def test_an_engine_that_works_all_the_time_never_rests_however_busy_the_machine(shares: list[float]) -> None:
    taken = samples(shares)
    assert not any(rested(taken[:end]) for end in range(1, len(taken) + 1))


@given(st.lists(st.floats(0, 2), min_size=1, max_size=60), st.integers(0, 60))
def test_once_quiet_long_enough_it_rests_whatever_was_before(shares: list[float], more: int) -> None:
    assert rested(samples([*shares, *[0.0] * (int(QUIET / 0.5) + more)]))


def test_the_sentence_has_what_was_measured() -> None:
    told = restless(samples([0.5] * 60))
    assert "in the 30 s after the last request had ended" in told
    assert "15.0 s of processor time" in told


def test_only_an_engine_core_counts(tmp_path: Path) -> None:
    assert used([os.getpid()]) is None
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
            spent = used([os.getpid(), core.pid])
            assert spent is not None
            assert spent >= 0.2
            time.sleep(0.3)
            later = used([core.pid])
            assert later is not None
            assert later - spent < 0.1
        finally:
            core.kill()


@pytest.mark.parametrize(("fault", "outcome", "status"), [("busy", "hang", 0), ("", "clean", 1)])
def test_a_trial_tells_a_busy_engine_from_one_at_rest(
    harness: Harness, tmp_path: Path, fault: str, outcome: str, status: int
) -> None:
    file = tmp_path / "spins.py"
    file.write_text(SPINS, encoding="utf-8")
    done = harness("run", str(file), "--server", "rehearsal", env={"VLLM_REHEARSAL_FAULT": fault})
    (trial,) = done.report["arms"][0]["trials"]
    assert (trial["outcome"], done.status) == (outcome, status), done.err
    assert trial["requests"] == {"sent": 1, "ok": 1, "failed": 0}
    if fault:
        assert "EngineCore never came to rest" in trial["why"]
        assert "1 of 1 never came to rest" in done.out
        assert "never at rest" in done.out


def test_requests_that_hang_are_not_what_an_arm_that_spins_shows(harness: Harness, tmp_path: Path) -> None:
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
def test_a_hang_short_of_the_boundary_may_be_any(
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


def test_a_death_while_it_is_looked_at_is_a_death(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "spins.py"
    # The death comes with the second request, which is sent when the first look is over; its own look must not hide it.
    file.write_text(SPINS.replace("rest(within=8)]", "rest(within=8), completion(prompt=9), rest(within=8)]"))
    done = harness("run", str(file), "--server", "rehearsal", env={"VLLM_REHEARSAL_FAULT": "kill:2"})
    (trial,) = done.report["arms"][0]["trials"]
    assert trial["outcome"] == "other-crash"


def test_an_arm_that_spins_must_be_looked_at(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "spins.py"
    file.write_text(SPINS.replace(", rest(within=8)]", "]"), encoding="utf-8")
    done = harness("check", str(file))
    assert done.status == 1
    assert "rest(within=30) at its end does" in done.out + done.err
    file.write_text(SPINS.replace("within=8", "within=1"), encoding="utf-8")
    assert "within=5 or more seconds" in harness("check", str(file)).out
