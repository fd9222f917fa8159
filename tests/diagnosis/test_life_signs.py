from __future__ import annotations

import pytest

from vllm_repro.diagnosis.life_signs import ServerLife, SignKind
from vllm_repro.diagnosis.log_text import read_lines

API = "(APIServer pid=1) INFO 11-20 08:24:30 [a.py:1] "
CORE = "(EngineCore pid=2) ERROR 11-20 08:24:30 [core.py:1] "


def life_of(*lines: str) -> ServerLife:
    life = ServerLife()
    for line in read_lines("\n".join(lines)):
        life.feed(line)
    return life


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (CORE + "EngineCore encountered a fatal error.", SignKind.FATAL),
        (CORE + "EngineCore failed to start.", SignKind.BOOT_FAILED),
        (
            "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
            SignKind.BOOT_FAILED,
        ),
        (CORE + "Worker proc VllmWorker-1 died unexpectedly, shutting down executor.", SignKind.WORKER_DIED),
        (API + "Engine core proc EngineCore_DP0 died unexpectedly.", SignKind.ENGINE_GONE),
        (API + "AsyncLLM output_handler failed.", SignKind.ENGINE_DEAD),
        ("Fatal Python error: Segmentation fault", SignKind.NATIVE_CRASH),
        (API + "[shutdown] API server: shutdown triggered", SignKind.STOP_ASKED),
        ("INFO:     Shutting down", SignKind.SHUTDOWN),
        ('INFO:     1.2.3.4:5 - "GET /health HTTP/1.1" 503 Service Unavailable', SignKind.HEALTH_503),
        ('INFO:     1.2.3.4:5 - "POST /v1/completions HTTP/1.1" 500 x', SignKind.SERVER_ERROR),
    ],
)
def test_signs(line: str, kind: SignKind) -> None:
    assert set(life_of(line).first) == {kind}
    assert not life_of(API + f"prompt: '{line}'").first


def test_a_text_is_a_log_only_with_lines_of_a_server() -> None:
    assert not life_of("").is_log
    assert not life_of("\n", "\n").is_log
    assert not life_of("prose", "more prose", API + "x").is_log
    assert life_of("prose", API + "x").is_log


def test_requests_without_tokens_are_a_stall_until_tokens_come() -> None:
    line = (
        API
        + "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: {} tokens/s, Running: 2 reqs, Waiting: 0 reqs"
    )
    assert life_of(line.format("0.0")).stalls == {"000": 1}
    assert life_of(line.format("0.0"), line.format("55.0")).stalls == {"000": 0}
    assert life_of(API + "[shutdown] API server: shutdown triggered", line.format("0.0")).stalls == {}
