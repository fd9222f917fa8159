from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_repro.diagnosis.root_cause import find_root, unwrap
from vllm_repro.diagnosis.tracebacks import Frame, Raised

FATAL = "EngineCore encountered a fatal error."
QUOTED = "Workspace is locked but allocation requires 16.00 MB"


def raised(
    exception: str, message: str, *functions: str, process: str = "EngineCore", headline: str = "", line: int = 1
) -> Raised:
    frames = tuple(Frame("vllm/v1/a.py", function) for function in functions)
    return Raised(
        exception=exception, message=message, frames=frames, process=process, headline=headline, first_line=line
    )


WORKER = raised("AssertionError", QUOTED, "worker_busy_loop", "reserve", process="Worker_TP0")


@pytest.mark.parametrize(
    ("message", "quoted"),
    [
        (f"Worker failed with error '{QUOTED}', please check the stack trace above", QUOTED),
        (f"Worker failed with error '{QUOTED}',\nplease  check the stack trace", QUOTED),
        (f"Worker failed with error '{QUOTED} ", QUOTED),  # cut off
        ("no wrapper", None),
    ],
)
def test_unwrap(message: str, quoted: str | None) -> None:
    assert unwrap(message) == quoted


@pytest.mark.parametrize("end", ["', please check the stack trace above", ""])
def test_a_wrapper_leads_to_the_exception_that_it_quotes(end: str) -> None:
    wrapper = raised(
        "RuntimeError",
        f"Worker failed with error '{QUOTED}{end}",
        "run_busy_loop",
        headline="EngineCore encountered a fatal error.",
    )
    root = find_root([wrapper, WORKER])
    assert root is not None
    assert (root.raised, root.wrapped, root.class_known) == (WORKER, True, True)
    alone = find_root([wrapper])
    assert alone is not None
    assert (alone.message, alone.frames, alone.class_known) == (QUOTED, (), False)


@pytest.mark.parametrize(
    "message",
    [
        "Engine core initialization failed. See root cause above.",
        "WorkerProc initialization failed due to an exception",
    ],
)
def test_an_empty_wrapper_leads_to_the_first_exception_with_frames(message: str) -> None:
    wrapper = raised("RuntimeError", message, "run_engine_core", headline="EngineCore failed to start.")
    memory = raised("ValueError", "No available memory", "worker_main", "load_model", process="Worker_TP0", line=9)
    root = find_root([wrapper, memory])
    assert root is not None
    assert (root.raised, root.wrapped) == (memory, True)


@pytest.mark.parametrize("exception", ["KeyError", "CancelledError"])
def test_a_failed_look_up_is_not_the_root(exception: str) -> None:
    lookup = raised(exception, "", "step")
    stated = replace(lookup, exception="ValueError", message="unknown layer x", cause=lookup)
    root = find_root([stated])
    assert root is not None
    assert root.raised is stated


def test_a_lost_peer_is_not_the_root_if_the_peer_has_one() -> None:
    lost = raised("RuntimeError", "Connection closed by peer", "worker_busy_loop", "all_reduce", process="Worker_TP0")
    own = raised("IndexError", "index 5 is out of bounds", "worker_busy_loop", "apply", process="Worker_TP1", line=9)
    root = find_root([lost, own])
    assert root is not None
    assert root.raised is own


def test_exceptions_of_the_api_server_count_in_a_paste_only() -> None:
    api = raised("ValueError", "bad request", "run_server", process="APIServer")
    assert find_root([api]) is None
    assert find_root([api], paste=True) is not None
    assert find_root([raised("EngineDeadError", "", "step")]) is None


def test_empty_wrappers_are_passed_over() -> None:
    wrapper = raised("RuntimeError", "Engine core initialization failed", "run_engine_core")
    memory = raised("ValueError", "No available memory", "worker_main", process="Worker_TP0", line=9)
    root = find_root([wrapper, memory])
    assert root is not None
    assert (root.raised, root.wrapped) == (memory, False)
    lost = raised("RuntimeError", "Connection closed by peer", "worker_busy_loop", process="Worker_TP1")
    root = find_root([lost, wrapper, memory])
    assert root is not None
    assert root.raised is memory


def test_an_exception_caused_by_an_empty_wrapper_is_not_the_root() -> None:
    wrapper = raised(
        "RuntimeError", "Engine core initialization failed", "run_engine_core", headline="EngineCore failed to start."
    )
    after = replace(wrapper, exception="ValueError", message="gave up", headline="", cause=wrapper, explicit=True)
    root = find_root([wrapper, after])
    assert root is not None
    assert (root.raised, root.wrapped) == (wrapper, True)
