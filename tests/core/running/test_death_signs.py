from __future__ import annotations

import pytest

from vllm_repro.running.death_signs import log_sign


@pytest.mark.parametrize(
    ("line", "decisive"),
    [
        (
            (
                "(EngineCore pid=1) ERROR 11-20 08:24:30 [core.py:1138] EngineCore encountered a"
                " fatal error."
            ),
            True,
        ),
        ("ERROR 11-20 08:24:30 [core.py:1038] EngineCore failed to start.", True),
        (
            (
                "(Worker_TP1 pid=7) ERROR 11-20 08:24:30 [multiproc_executor.py:949] WorkerProc hit"
                " an exception."
            ),
            True,
        ),
        (
            (
                "RuntimeError: Engine core initialization failed. See root cause above. Failed core"
                " proc(s): {}"
            ),
            True,
        ),
        (
            (
                "ERROR 11-20 08:24:30 [core_client.py:642] Engine core proc EngineCore died"
                " unexpectedly, shutting down client."
            ),
            True,
        ),
        (
            (
                "WARNING 11-20 08:24:30 [core_client.py:817] [shutdown] MPClient: engine core"
                " exited unexpectedly; starting"
            ),
            True,
        ),
        (
            (
                "ERROR 11-20 08:24:30 [multiproc_executor.py:315] Worker proc VllmWorker-0 died"
                " unexpectedly (exit code: None)"
            ),
            True,
        ),
        (
            (
                "ERROR 03-01 10:00:00 core.py:291] EngineCore hit an exception: Traceback (most"
                " recent call last):"
            ),
            True,
        ),
        (
            (
                "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause"
                " above."
            ),
            True,
        ),
        ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", False),
    ],
)
def test_each_log_line_of_a_death_is_a_sign(line: str, decisive: bool) -> None:
    found = log_sign(line)
    assert found is not None
    assert found[1] is decisive


@pytest.mark.parametrize(
    "line",
    [
        "",
        "INFO: 400 Bad Request",
        "Traceback (most recent call last):",
        "ERROR 11-20 x",
        (
            "(APIServer pid=7) INFO 11-20 08:24:30 [logger.py:39] Received request: prompt: 'why"
            " EngineCore failed to start'"
        ),
        (
            "(APIServer pid=7) INFO 11-20 08:24:30 [logger.py:39] EngineCore encountered a fatal"
            " error."
        ),
        "EngineCore encountered a fatal error.",
        (
            "(APIServer pid=7) ERROR 11-20 08:24:30 [serving.py:9] bad prompt: EngineCore"
            " encountered a fatal error."
        ),
        (
            "UserWarning: resource_tracker: process died unexpectedly, relaunching.  Some resources"
            " might leak."
        ),
    ],
)
def test_other_lines_are_not(line: str) -> None:
    assert log_sign(line) is None
