from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Done, Harness
from vllm_repro.client.answer import Answer
from vllm_repro.running.assess import Conclusion, assess
from vllm_repro.running.death_signs import Channel, DeathSign
from vllm_repro.running.idle import CpuSample, engine_cpu_seconds, is_idle, never_idle_message
from vllm_repro.running.state import Observed
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.workload import IDLE_AFTER
from vllm_repro.servers.base import Exit, ServerFacts
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.verdict.outcome import Outcome, is_unexplained
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_diagnosis.signature import How

SCENARIO = find("min-tokens-stop-ids")
FACTS = ServerFacts(kind=ServerKind.PROCESS, evidence=Evidence.CPU, argv=())


def concluded(folder: Path, log: str = "", **observed: Any) -> Conclusion:
    """Return the conclusion from the text of a log, if it is not empty, and other observations."""
    if log:
        (folder / "log").write_text(log, encoding="utf-8")
    seen = Observed(**{"facts": FACTS, "ready": True, "canary_ok": True, **observed})
    return assess(SCENARIO, SCENARIO.reported(), seen, folder / "log")


def sign(channel: Channel, *, at: float, since: float, decisive: bool = True) -> DeathSign:
    return DeathSign(channel, "detail", at, since, decisive)


@pytest.mark.parametrize(
    ("observed", "outcome", "why"),
    [
        ({}, Outcome.UNTRIGGERED, "the boundary was not crossed"),
        ({"canary_ok": False}, Outcome.WRONG_OUTPUT, "canary"),
        ({"hung": "nothing moved"}, Outcome.HANG, "nothing moved"),
        ({"ready": False}, Outcome.BOOT_FAILED, "it never became ready"),
        ({"infra": "no space"}, Outcome.INFRA, "no space"),
        ({"unsupported": "no GPU"}, Outcome.UNSUPPORTED, "no GPU"),
        ({"cancelled": "the run was interrupted"}, Outcome.CANCELLED, "interrupted"),
        (
            {"exit": Exit(code=None, detail="gone", at=1.0, lost=True)},
            Outcome.INFRA,
            "the container engine was lost",
        ),
        (
            {"exit": Exit(code=137, detail="killed", at=1.0, oom_killed=True)},
            Outcome.INFRA,
            "out of memory",
        ),
    ],
)
def test_each_observation_has_its_outcome(
    tmp_path: Path, observed: dict[str, Any], outcome: Outcome, why: str
) -> None:
    conclusion = concluded(tmp_path, **observed)
    assert (conclusion.outcome, why in conclusion.why) == (outcome, True), conclusion.why


def test_a_death_has_the_time_of_its_first_evidence(
    tmp_path: Path,
) -> None:
    signs = [
        sign(Channel.HEALTH, at=12.0, since=12.0),
        sign(Channel.LOG, at=11.5, since=11.0),
        sign(Channel.COUNTERS, at=10.0, since=9.0, decisive=False),
    ]
    death = concluded(tmp_path, signs=signs).death
    assert death
    assert (death.detected_by, death.latency_s) == (Channel.LOG, 0.5)
    assert death.channels == (Channel.LOG, Channel.HEALTH)


def test_signs_that_do_not_decide_are_no_death(tmp_path: Path) -> None:
    answer = sign(Channel.ANSWER, at=1.0, since=1.0, decisive=False)
    assert concluded(tmp_path, signs=[answer]).death is None


DIED = sign(Channel.LOG, at=2.0, since=2.0)
ATTACHED = ServerFacts(kind=ServerKind.ATTACH, evidence=Evidence.UNKNOWN, argv=())
PAGE, CUT = (
    Answer(sent=1.0, ended=2.0, status=500, error="<html>Sign in</html>", error_kind="body"),
    Answer(
        sent=1.0, ended=2.0, status=200, error="ConnectionError: closed", error_kind="transport"
    ),
)
RESET, GATEWAY, BROKEN = (
    Answer(sent=1.0, ended=2.0, error="ReadError", error_kind="transport"),
    Answer(sent=1.0, ended=2.0, status=502, error="bad gateway", error_kind="body"),
    Answer(sent=1.0, ended=2.0, status=500, error="Internal server error", error_kind="body"),
)


@pytest.mark.parametrize(
    ("facts", "answer", "outcome"),
    [
        (ATTACHED, RESET, Outcome.INFRA),
        (ATTACHED, GATEWAY, Outcome.INFRA),
        (ATTACHED, PAGE, Outcome.INFRA),
        (ATTACHED, CUT, Outcome.INFRA),
        (ATTACHED, BROKEN, Outcome.WRONG_OUTPUT),
        (FACTS, CUT, Outcome.WRONG_OUTPUT),
        (FACTS, RESET, Outcome.WRONG_OUTPUT),
        (FACTS, GATEWAY, Outcome.WRONG_OUTPUT),
    ],
)
def test_what_a_gateway_answers_is_no_answer_of_the_engine(
    tmp_path: Path, facts: ServerFacts, answer: Answer, outcome: Outcome
) -> None:
    assert concluded(tmp_path, facts=facts, answers=[answer]).outcome is outcome
    # A death explains the same answers, whoever started the server.
    dead = concluded(tmp_path, facts=facts, answers=[answer], signs=[DIED])
    assert dead.outcome is Outcome.OTHER_CRASH


ALIVE = (
    "(APIServer pid=1) INFO 11-20 08:24:00 [api.py:1] vLLM API server version 0.28.0\n"
    "(APIServer pid=1) INFO:     Application startup complete.\n"
)
DEATH = (
    "(EngineCore pid=9) ERROR 11-20 08:24:30 [core.py:1138] EngineCore encountered a fatal"
    " error.\n(EngineCore pid=9) ERROR 11-20 08:24:30 [core.py:1138] Traceback (most recent call"
    " last):\n(EngineCore pid=9) ERROR 11-20 08:24:30 [core.py:1138]   File"
    ' "/v/vllm/v1/engine/core.py", line 1, in run_busy_loop\n(EngineCore pid=9) ERROR 11-20'
    " 08:24:30 [core.py:1138] ValueError: something else\n"
)


@pytest.mark.parametrize(
    ("refuted", "outcome"), [(0, Outcome.OTHER_CRASH), (1, Outcome.UNTRIGGERED)]
)
def test_run_and_diagnose_agree_on_a_death_in_the_full_log(
    tmp_path: Path, refuted: int, outcome: Outcome
) -> None:
    """The engine may die after the last look.

    A line after which it gave a token was a quotation.
    """
    conclusion = concluded(tmp_path, DEATH, refuted_lines=refuted)
    assert conclusion.outcome is outcome
    assert (conclusion.death.exception if conclusion.death else None) == (
        None if refuted else "ValueError"
    )


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("", "the process is gone, ended by signal 11; no log names the cause"),
        (ALIVE, "the process is gone, ended by signal 11; no log names the cause"),
        (
            ALIVE + "Aborted (core dumped)\n",
            "It crashed, as another program reports: Aborted",
        ),
    ],
)
def test_a_death_that_the_log_lacks_is_reported_by_its_sign(
    tmp_path: Path, log: str, why: str
) -> None:
    (tmp_path / "log").touch()
    gone = DeathSign(Channel.PROCESS, "the process is gone, ended by signal 11", 2.0, 2.0)
    conclusion = concluded(tmp_path, log, canary_ok=None, signs=[gone])
    assert (conclusion.outcome, conclusion.why[: len(why)]) == (Outcome.OTHER_CRASH, why)


def test_the_exit_code_of_a_lost_worker_is_the_cause(tmp_path: Path) -> None:
    lost = (
        "(EngineCore pid=9) ERROR 11-20 08:24:29 [multiproc_executor.py:315] "
        "Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting down executor.\n"
    )
    cancelled = DEATH.replace("ValueError: something else", "RuntimeError: cancelled")
    conclusion = concluded(tmp_path, lost + cancelled, signs=[DIED])
    assert conclusion.outcome is Outcome.OTHER_CRASH
    assert "SIGILL" in conclusion.why
    assert conclusion.death
    assert (conclusion.death.exception, conclusion.death.signature) == (None, How.OTHER)


def test_a_death_whose_message_alone_differs_is_near(tmp_path: Path) -> None:
    functions = ("run_busy_loop", *(SCENARIO.signature.frames if SCENARIO.signature else ()))
    stamp = "(EngineCore pid=9) ERROR 11-20 08:24:30 [core.py:1138] "
    lines = ["EngineCore encountered a fatal error.", "Traceback (most recent call last):"]
    lines += [f'  File "/v/vllm/v1/worker/x.py", line 1, in {function}' for function in functions]
    log = "".join(f"{stamp}{line}\n" for line in [*lines, "IndexError: reworded"])
    conclusion = concluded(tmp_path, log, signs=[DIED])
    death = conclusion.death
    assert death
    assert (death.signature, death.differs) == (How.NEAR, "the message differs")
    assert is_unexplained(conclusion.outcome, death)
    assert death.lines == (1,) * len(functions) == (1,) * len(death.frames)


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
