from __future__ import annotations

import pytest

from vllm_repro.diagnosis.diagnosis import Phase, diagnose

BOOT = "(APIServer pid=1) INFO 11-20 08:24:30 [a.py:1] vLLM API server version 0.32.0"
READY = "(APIServer pid=1) INFO:     Application startup complete."
STOP_ASKED = "(EngineCore pid=2) INFO 11-20 08:24:31 [core.py:1] [shutdown] EngineCore: trigger received signal"
DEAD = "(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
GONE = "(APIServer pid=1) ERROR 11-20 08:24:32 [a.py:1] Engine core proc EngineCore_DP0 died unexpectedly."
SHUTDOWN = "(APIServer pid=1) INFO:     Shutting down"


@pytest.mark.parametrize(
    ("lines", "died", "why"),
    [
        ([BOOT, READY], False, "alive as far as this log goes"),
        ([BOOT, READY, STOP_ASKED, DEAD, SHUTDOWN], False, "An ordered shutdown"),
        ([STOP_ASKED, DEAD, SHUTDOWN], False, "An ordered shutdown"),
        ([BOOT, READY, STOP_ASKED], None, "the API server logs nothing of it"),
        ([BOOT, READY, STOP_ASKED, GONE], None, "and not the API server"),
        ([BOOT, READY, DEAD, STOP_ASKED, SHUTDOWN], True, "EngineCore was gone before anybody asked"),
    ],
)
def test_a_request_to_stop_makes_an_ordered_shutdown_if_it_came_first(
    lines: list[str], died: bool | None, why: str
) -> None:
    diagnosis = diagnose("\n".join(lines))
    assert (diagnosis.died, why in diagnosis.why) == (died, True), diagnosis.why
    assert diagnosis.phase is (Phase.SHUTDOWN if SHUTDOWN in lines and died is False else Phase.IDLE)
