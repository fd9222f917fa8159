from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_repro.client.answer import Answer
from vllm_repro.running.assess import Conclusion, assess
from vllm_repro.running.death_signs import Channel, DeathSign
from vllm_repro.running.state import Observed
from vllm_repro.scenario.catalogue import find
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
            "It was killed, as another program reports: Aborted",
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
