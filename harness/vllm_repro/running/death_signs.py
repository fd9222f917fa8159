"""Signs of death, one record per channel. Pure.

No channel is reliable alone: the process exits with status 0, a stream of a dying engine ends with
200 and `[DONE]`, `/health` stays 200 while the engine hangs, and an ordered shutdown logs
`EngineDeadError`. So each channel reports its sign and whether that sign alone is decisive. The
first decisive sign ends the workload; all are kept with their time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from vllm_repro.client.answer import Answer
from vllm_repro_diagnosis.log_text import read_lines


class Channel(StrEnum):
    """Place where the death of an engine shows, such as its process or its log."""

    PROCESS = "process"  # the server's process exited
    CONTAINER = "container"  # its container exited
    ENGINE_PROCESS = "engine-process"  # EngineCore or a worker exited, the API server did not
    OOM_KILL = "oom-kill"
    LOG = "log"
    HEALTH = "health"
    ANSWER = "answer"  # a plain request in flight
    STREAM = "stream"  # a streamed one: an error event, or an end without finish_reason
    EMPTY = "empty-answer"  # a success without a token
    CANARY = "canary"  # the harness's one-token completion
    COUNTERS = "counters"  # requests run, but the step counter stands still
    # a further node of the server: its log, or its exit while the first node waits for it
    RANK = "rank"
    RESTART = "restart"  # the process behind the port is another one


@dataclass(frozen=True)
class DeathSign:
    """One sign that the engine died: where and when it was seen, and if it alone proves that."""

    channel: Channel
    detail: str
    # when the harness saw it, in epoch seconds
    at: float
    # earliest time of the evidence itself, in epoch seconds
    since: float
    decisive: bool = True


LOG_SIGNS: tuple[tuple[str, bool], ...] = (
    ("EngineCore encountered a fatal error", True),
    ("EngineCore hit an exception", True),  # 0.7 and 0.8
    ("WorkerProc hit an exception", True),
    ("EngineCore failed to start", True),
    ("RuntimeError: Engine core initialization failed", True),
    ("died unexpectedly", True),
    ("engine core exited unexpectedly", True),
    # A healthy server logs this too, after a SIGTERM: it needs a second sign.
    ("vllm.v1.engine.exceptions.EngineDeadError", False),
)
"""Texts that report the engine's death, and whether each is decisive.

Not Traceback or ERROR: 0.20.2 logs both for an ordinary 400.
"""

# processes that a message may name before such a text
_SUBJECT = r"(?:\[shutdown\] )?(?:MPClient: |Worker proc \S+ |Engine core proc \S+ )?"


def log_sign(line: str) -> tuple[str, bool] | None:
    """Return the (text, decisive) of `LOG_SIGNS` that a log line reports; None without one.

    The text counts only at the start of a message that vLLM logs as an error or a warning. Prompts
    in a request log quote such texts, and Python's resource tracker, whose messages do not mean a
    crash, prints "process died unexpectedly".
    """
    sign = next((sign for sign in LOG_SIGNS if sign[0] in line), None)
    if sign is None:
        return None
    record = next(read_lines(line), None)
    if record is None or record.level in ("DEBUG", "INFO"):
        return None
    # Only the exception at the end of a boot is printed without a level and a source.
    genuine = bool(record.source) or sign[0].startswith(("RuntimeError", "vllm."))
    return sign if genuine and re.match(_SUBJECT + re.escape(sign[0]), record.text) else None


def sign_of_answer(answer: Answer, *, canary: bool = False) -> DeathSign | None:
    """Return the sign of death in an answer; None if it shows none, such as a 4xx.

    It is decisive only if the answer names a dead engine. A bare 500, a reset or an early end of a
    stream may be one bad request: the caller sends a canary to find out. canary: the answer is that
    of a canary; this only sets the channel.
    """
    channel = Channel.CANARY if canary else (Channel.STREAM if answer.streamed else Channel.ANSWER)
    decisive = answer.names_dead_engine
    if decisive:
        where = (
            "an error event in a 200 stream"
            if answer.error_kind == "event"
            else f"HTTP {answer.status}"
        )
        detail = f"{where}: {answer.error}"
    elif answer.status is None or answer.error_kind == "transport":
        detail = f"no whole answer: {answer.error}"
    elif answer.error_kind == "event":
        detail = f"an error event in a stream: {answer.error}"
    elif answer.status >= 500:
        detail = f"HTTP {answer.status}: {answer.error}"
    elif answer.empty:
        channel = channel if canary else Channel.EMPTY
        detail = "a 200 without a token"
    elif answer.status == 200 and answer.finish_reason is None:
        detail = "an answer that ended without finish_reason"
    else:
        return None
    return DeathSign(channel, detail, answer.ended, answer.ended, decisive)
