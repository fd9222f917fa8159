from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from vllm_repro_diagnosis.root_cause import Root, find_root, squeeze, unwrap
from vllm_repro_diagnosis.tracebacks import Frame, Raised

FATAL = "EngineCore encountered a fatal error."
FAILED = "EngineCore failed to start."
HIT = "WorkerProc hit an exception."
QUOTED = "Workspace is locked but allocation requires 16.00 MB"
WRAPPER = "Worker failed with error '{}', please check the stack trace above"


def raised(
    exception: str,
    message: str,
    *functions: str,
    process: str = "EngineCore",
    headline: str = "",
    line: int = 1,
) -> Raised:
    return Raised(
        exception=exception,
        message=message,
        frames=tuple(Frame("vllm/v1/a.py", function) for function in functions),
        process=process,
        headline=headline,
        first_line=line,
    )


def in_worker(message: str, headline: str = HIT) -> Raised:
    return raised(
        "AssertionError",
        message,
        *("worker_busy_loop", "reserve"),
        process="Worker_TP0",
        headline=headline,
    )


def wrapper(message: str, headline: str = FATAL) -> Raised:
    return raised("RuntimeError", message, "run_busy_loop", headline=headline)


@pytest.mark.parametrize(
    ("message", "quoted"),
    [
        (WRAPPER.format(QUOTED), QUOTED),
        (f"Worker failed with error '{QUOTED}',\nplease  check the stack trace", QUOTED),
        (f"Worker failed with error '{QUOTED} ", QUOTED),  # cut off
        ("no wrapper", None),
    ],
)
def test_unwrap(message: str, quoted: str | None) -> None:
    assert unwrap(message) == quoted


def test_squeeze_undoes_wrapping_and_curly_quotes() -> None:
    assert squeeze(" a\n  \u2018b\u2019 \u201cc\u201d ") == "a 'b' \"c\""


TWENTY_ONE = "Workspace is locked !"


@pytest.mark.parametrize(
    ("quoted", "cause", "same"),
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
        ("", raised("AssertionError", "", process="Worker_TP0", headline=HIT), False),
    ],
)
def test_the_exception_that_a_wrapper_quotes(quoted: str, cause: Raised, same: bool) -> None:
    quoting = wrapper(WRAPPER.format(quoted))
    root = find_root([quoting, cause])
    assert root == Root(
        raised=cause if same else quoting, wrapped=True, class_known=same, quoted=quoted
    )
    assert root.message == (cause.message if same else quoted)
    assert root.frames == (cause.frames if same else ())


def chain(*links: Raised) -> Raised:
    """Return the last exception with the ones before it as its causes."""
    last = links[0]
    for link in links[1:]:
        last = replace(link, cause=last)
    return last


CAUSE = raised("ValueError", "no such layer", "worker_busy_loop", process="Worker_TP0", line=9)
CUT = wrapper(f"Worker failed with error '{QUOTED}")
MEMORY = raised("ValueError", "No memory", "worker_main", process="Worker_TP0", line=9)
BARE = raised("RuntimeError", "no frames")
EXIT = raised("SystemExit", "1", "worker_busy_loop")
EMPTY = wrapper("Engine core initialization failed", FAILED)
GAVE_UP = raised("RuntimeError", "gave up", "step")
LOOK_UP = raised("KeyError", "x", "step")
LAST = raised("IndexError", "out of bounds", "run_busy_loop", line=20)
LOST = raised("RuntimeError", "Connection closed by peer", "worker_busy_loop", process="Worker_TP1")
QUOTES_LOST = wrapper(WRAPPER.format(LOST.message))
# vLLM 0.24.0 and newer, with asynchronous scheduling: the step failed in the worker.
MISSED = replace(
    raised("KeyError", "'cmpl-1'", headline=FATAL, line=9),
    frames=(
        Frame(
            "vllm/v1/core/sched/scheduler.py",
            "update_from_output",
            "req_index = model_runner_output.req_id_to_index[req_id]",
        ),
    ),
)
TORCH = replace(raised("ValueError", "x", process=""), frames=(Frame("torch/a.py", "f"),))
IN_VLLM = raised("KeyError", "x", "get", process="")
OF_API = raised("ValueError", "bad request", "run_server", process="APIServer")
AFTER = replace(chain(EMPTY, raised("ValueError", "gave up", "step")), explicit=True)


@pytest.mark.parametrize(
    ("known", "root"),
    [
        ([CUT, in_worker(QUOTED)], Root(raised=in_worker(QUOTED), wrapped=True, quoted=QUOTED)),
        ([CUT], Root(raised=CUT, wrapped=True, class_known=False, quoted=QUOTED)),
        # An empty wrapper leads to the first exception with frames.
        *(
            (
                [wrapper(message, FAILED), EXIT, raised("OSError", "no frames"), MEMORY],
                Root(raised=MEMORY, wrapped=True),
            )
            for message in (
                "Engine core initialization failed. See root cause above.",
                "WorkerProc initialization failed due to an exception",
                "Input socket thread died during startup",
            )
        ),
        ([AFTER], Root(raised=EMPTY, wrapped=True)),
        # An output that EngineCore misses leads to the worker's exception.
        ([CAUSE, MISSED], Root(raised=CAUSE)),
        ([MISSED], Root(raised=MISSED)),
        # A wrapper of a lost peer leads to the peer's exception.
        ([QUOTES_LOST, LOST, CAUSE], Root(raised=CAUSE, wrapped=True)),
        ([QUOTES_LOST, LOST], Root(raised=LOST, wrapped=True, quoted=LOST.message)),
        ([EXIT, BARE], Root(raised=BARE)),
        # A look-up that fails before a cleanup does is the root.
        ([chain(LOOK_UP, raised("OSError", "", "shutdown"), GAVE_UP)], Root(raised=LOOK_UP)),
        # The last words of the engine come before earlier exceptions.
        *(
            (known, Root(raised=root))
            for headline in (FATAL, FAILED, "Engine background task failed")
            for last in [replace(LAST, headline=headline)]
            for lost in [replace(last, exception="RuntimeError", message=LOST.message)]
            for known, root in (([CAUSE, last], last), ([lost], lost), ([lost, CAUSE], CAUSE))
        ),
        ([TORCH, IN_VLLM], None),
        ([OF_API], None),
        ([raised("EngineDeadError", "", "step")], None),
        # An empty wrapper that is not the last word is passed over.
        ([replace(EMPTY, headline=""), MEMORY], Root(raised=MEMORY)),
    ],
)
def test_the_root(known: Sequence[Raised], root: Root | None) -> None:
    assert find_root(known) == root


@pytest.mark.parametrize(
    ("known", "root"),
    [([TORCH, IN_VLLM], IN_VLLM), ([TORCH], TORCH), ([OF_API], OF_API), ([], None)],
)
def test_the_root_in_a_paste(known: Sequence[Raised], root: Raised | None) -> None:
    assert find_root(known, paste=True) == (root and Root(raised=root))


@pytest.mark.parametrize(
    ("first", "message", "then", "oldest"),
    [
        ("ValueError", "bad", "step", True),
        ("queue.Empty", "", "step", False),
        ("CancelledError", "", "step", False),
        ("KeyError", "x", "step", False),
        ("TimeoutError", "", "step", False),
        ("TimeoutError", "after 10 s", "step", True),
        ("KeyError", "x", "shutdown", True),  # a cleanup does not state what the look-up meant
        ("KeyErrors", "x", "step", True),
    ],
)
def test_the_oldest_exception_that_is_no_look_up(
    first: str, message: str, then: str, oldest: bool
) -> None:
    link, last = raised(first, message, "step"), raised("RuntimeError", "gave up", then)
    root = find_root([chain(link, last)])
    assert root == Root(raised=link if oldest else chain(link, last))


@pytest.mark.parametrize(
    "other",
    [
        *(
            raised(name, "x", "worker_busy_loop", process="Worker_TP1")
            for name in ("SystemExit", "KeyboardInterrupt", "CancelledError", "BrokenPipeError")
        ),
        *(
            raised(name, "x", "worker_busy_loop", process="Worker_TP1")
            for name in ("EOFError", "zmq.ZMQError")
        ),
        *(
            raised("RuntimeError", message, "worker_busy_loop", process="Worker_TP1")
            for message in ("cancelled", "Executor failed.", "Broken pipe")
        ),
        raised("RuntimeError", "x", "destroy_process_group", process="Worker_TP1"),
        raised("RuntimeError", "no frames", process="Worker_TP1"),
        raised("RuntimeError", "RPC call to execute_model timed out.", "step"),
    ],
)
def test_a_consequence_is_the_root_only_alone(other: Raised) -> None:
    assert find_root([other, CAUSE]) == find_root([CAUSE, other]) == Root(raised=CAUSE)
    alone = find_root([other])
    assert alone is not None
    assert alone.raised is other


@pytest.mark.parametrize(
    ("process", "headline", "function", "native", "counts"),
    [
        ("EngineCore_DP0", "", "f", False, True),
        ("RayWorkerWrapper", "", "f", False, True),
        ("APIServer", "", "run_busy_loop", False, False),
        ("APIServer", "Process EngineCore_0:", "f", False, True),
        ("APIServer", HIT, "f", False, True),
        ("APIServer", "Worker says", "f", False, False),
        ("APIServer", "", "f", True, True),
        ("", "", "run_busy_loop", False, True),
        ("", "", "f", False, False),
    ],
)
def test_exceptions_that_come_from_an_engine(
    process: str, headline: str, function: str, native: bool, counts: bool
) -> None:
    first = raised("ValueError", "x", function, process=process, headline=headline)
    first = replace(first, native=native)
    after = replace(first, message="after", frames=IN_VLLM.frames, cause=first)
    assert [find_root([each]) is not None for each in (first, after)] == [counts, counts]
