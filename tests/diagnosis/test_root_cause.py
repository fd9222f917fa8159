from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_repro_diagnosis.root_cause import Root, find_root, squeeze, unwrap
from vllm_repro_diagnosis.tracebacks import Frame, Raised

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


def test_squeeze_undoes_wrapping_and_curly_quotes() -> None:
    assert squeeze(" a\n  \u2018b\u2019 \u201cc\u201d ") == "a 'b' \"c\""


def in_worker(message: str, headline: str = "WorkerProc hit an exception.") -> Raised:
    return raised("AssertionError", message, "worker_busy_loop", "reserve", process="Worker_TP0", headline=headline)


TWENTY_ONE = "Workspace is locked !"


@pytest.mark.parametrize(
    ("quoted", "own", "found"),
    [
        (QUOTED, in_worker(QUOTED), True),
        (QUOTED, in_worker(QUOTED.replace(" ", "\n ")), True),
        (QUOTED, in_worker(QUOTED + "\nand a second line"), True),
        (QUOTED + " and more", in_worker(QUOTED), True),
        (TWENTY_ONE + " and more", in_worker(TWENTY_ONE), True),
        (TWENTY_ONE[1:] + " and more", in_worker(TWENTY_ONE[1:]), False),  # too short to be sure
        ("short", in_worker("short"), True),
        (QUOTED, in_worker("Another message that is long enough"), False),
        (QUOTED, in_worker(""), False),
        ("", in_worker(""), True),  # a bare assertion
        ("", in_worker("", headline="Error getting async model runner output"), True),
        ("", in_worker("", headline=""), False),
        ("", in_worker(QUOTED), False),
        ("", raised("AssertionError", "", process="Worker_TP0", headline="WorkerProc hit an exception."), False),
    ],
)
def test_the_exception_that_a_wrapper_quotes(quoted: str, own: Raised, found: bool) -> None:
    wrapper = raised("RuntimeError", f"Worker failed with error '{quoted}', please check the stack trace", "step")
    root = find_root([replace(wrapper, headline=FATAL), own])
    assert root is not None
    assert (root.raised is own, root.class_known, root.quoted) == (found, found, quoted)
    assert root.message == (own.message if found else quoted)


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
        "Input socket thread died during startup",
    ],
)
def test_an_empty_wrapper_leads_to_the_first_exception_with_frames(message: str) -> None:
    wrapper = raised("RuntimeError", message, "run_engine_core", headline="EngineCore failed to start.")
    memory = raised("ValueError", "No available memory", "worker_main", "load_model", process="Worker_TP0", line=9)
    root = find_root([wrapper, raised("SystemExit", "1", "worker_main"), raised("OSError", "no frames"), memory])
    assert root is not None
    assert (root.raised, root.wrapped) == (memory, True)


@pytest.mark.parametrize("exception", ["KeyError", "CancelledError"])
def test_a_failed_look_up_is_not_the_root(exception: str) -> None:
    lookup = raised(exception, "", "step")
    stated = replace(lookup, exception="ValueError", message="unknown layer x", cause=lookup)
    root = find_root([stated])
    assert root is not None
    assert root.raised is stated


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


OWN = raised("ValueError", "no such layer", "worker_busy_loop", "load", process="Worker_TP0", line=9)


@pytest.mark.parametrize(
    ("first", "message", "then", "oldest"),
    [
        ("ValueError", "bad", "step", True),
        ("queue.Empty", "", "step", False),
        ("TimeoutError", "", "step", False),
        ("TimeoutError", "after 10 s", "step", True),
        ("KeyError", "x", "shutdown", True),  # an exception in the cleanup is not what the look-up meant
        ("KeyErrors", "x", "step", True),
    ],
)
def test_the_oldest_exception_of_a_chain_that_is_no_look_up(first: str, message: str, then: str, oldest: bool) -> None:
    link = raised(first, message, "step")
    last = replace(raised("RuntimeError", "gave up", then), cause=link)
    root = find_root([last])
    assert root is not None
    assert root.raised is (link if oldest else last)


def test_a_look_up_that_fails_before_a_cleanup_does_is_the_root() -> None:
    lookup = raised("KeyError", "x", "step")
    in_cleanup = replace(raised("OSError", "gone", "shutdown"), cause=lookup)
    assert find_root([replace(raised("RuntimeError", "gave up", "step"), cause=in_cleanup)]) == Root(raised=lookup)


@pytest.mark.parametrize(
    "other",
    [
        *(
            raised(name, "x", "worker_busy_loop", process="Worker_TP1")
            for name in (
                "SystemExit",
                "KeyboardInterrupt",
                "CancelledError",
                "BrokenPipeError",
                "EOFError",
                "zmq.ZMQError",
            )
        ),
        raised("RuntimeError", "cancelled", "worker_busy_loop", process="Worker_TP1"),
        raised("RuntimeError", "Executor failed.", "worker_busy_loop", process="Worker_TP1"),
        raised("RuntimeError", "x", "destroy_process_group", process="Worker_TP1"),
        raised("RuntimeError", "no frames", process="Worker_TP1"),
        raised("RuntimeError", "RPC call to execute_model timed out.", "step"),
        raised("RuntimeError", "Broken pipe", "worker_busy_loop", process="Worker_TP1"),
    ],
)
def test_what_only_follows_another_exception_is_not_the_root(other: Raised) -> None:
    for known in ([other, OWN], [OWN, other]):
        root = find_root(known)
        assert root is not None
        assert (root.raised, root.wrapped) == (OWN, False)
    alone = find_root([other])
    assert alone is not None
    assert alone.raised is other


def test_an_exception_without_frames_comes_before_one_of_termination() -> None:
    bare = raised("RuntimeError", "no frames")
    assert find_root([raised("SystemExit", "1", "worker_busy_loop"), bare]) == Root(raised=bare)


def test_the_last_words_of_the_engine_come_before_earlier_exceptions() -> None:
    for headline in (FATAL, "EngineCore failed to start.", "Engine background task failed"):
        last = raised("IndexError", "out of bounds", "run_busy_loop", headline=headline, line=20)
        root = find_root([OWN, last])
        assert root is not None
        assert root.raised is last
        lost = replace(last, exception="RuntimeError", message="Connection closed by peer")
        assert find_root([lost]) == Root(raised=lost)
        assert find_root([lost, OWN]) == Root(raised=OWN)


def test_an_output_that_engine_core_misses_leads_to_the_workers_exception() -> None:
    """vLLM 0.24.0 and newer, with asynchronous scheduling: the step failed in the worker."""
    line = Frame(
        "vllm/v1/core/sched/scheduler.py",
        "update_from_output",
        "req_index = model_runner_output.req_id_to_index[req_id]",
    )
    missed = replace(raised("KeyError", "'cmpl-1'", "run_engine_core", headline=FATAL, line=9), frames=(line,))
    own = raised("IndexError", "index out of range in self", "worker_busy_loop", "embedding", process="Worker", line=5)
    assert find_root([own, missed]) == Root(raised=own)
    assert find_root([missed]) == Root(raised=missed)


def test_a_wrapper_of_a_lost_peer_leads_to_the_peers_exception() -> None:
    lost = raised("RuntimeError", "Connection closed by peer", "worker_busy_loop", process="Worker_TP1")
    wrapper = raised(
        "RuntimeError",
        "Worker failed with error 'Connection closed by peer', please check the stack trace",
        "step",
        headline=FATAL,
    )
    assert find_root([wrapper, lost, OWN]) == Root(raised=OWN, wrapped=True)
    assert find_root([wrapper, lost]) == Root(raised=lost, wrapped=True, quoted="Connection closed by peer")


@pytest.mark.parametrize(
    ("process", "headline", "function", "native", "counts"),
    [
        ("EngineCore_DP0", "", "f", False, True),
        ("RayWorkerWrapper", "", "f", False, True),
        ("APIServer", "", "run_busy_loop", False, False),
        ("APIServer", "Process EngineCore_0:", "f", False, True),
        ("APIServer", "WorkerProc hit an exception.", "f", False, True),
        ("APIServer", "Worker says", "f", False, False),
        ("APIServer", "", "f", True, True),
        ("", "", "run_busy_loop", False, True),
        ("", "", "f", False, False),
    ],
)
def test_exceptions_that_come_from_an_engine(
    process: str, headline: str, function: str, native: bool, counts: bool
) -> None:
    one = replace(raised("ValueError", "x", function, process=process, headline=headline), native=native)
    assert (find_root([one]) is not None) is counts
    after = replace(raised("ValueError", "after", "f", process=process, headline=headline), cause=one, native=native)
    assert (find_root([after]) is not None) is counts


def test_a_paste_prefers_what_passed_through_vllm() -> None:
    other = replace(raised("ValueError", "x", process=""), frames=(Frame("torch/a.py", "f"),))
    ours = raised("KeyError", "x", "get", process="")
    root = find_root([other, ours], paste=True)
    assert root is not None
    assert root.raised is ours
    assert find_root([other], paste=True) == Root(raised=other)
    assert find_root([other, ours]) is None
    assert find_root([], paste=True) is None
