"""Tracebacks in a text, their root cause, and the signature that it matches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.diagnosis.logs import find_raised, pasted, recording
from vllm_repro_diagnosis.canonical import shorten, squeeze
from vllm_repro_diagnosis.diagnosis import Phase, diagnose
from vllm_repro_diagnosis.root_cause import Root, find_root, unwrap
from vllm_repro_diagnosis.signature import How, Signature, compare, failed_nodes, quotes
from vllm_repro_diagnosis.tracebacks import Frame, Raised, bare_name


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("/venv/site-packages/vllm/v1/worker/workspace.py", "vllm/v1/worker/workspace.py"),
        ("/usr/local/lib/python3.12/dist-packages/torch/_ops.py", "torch/_ops.py"),
        ("/home/someone/vllm/vllm/v1/core/block_pool.py", "vllm/v1/core/block_pool.py"),
        (".../vllm/v1/worker/workspace.py", "vllm/v1/worker/workspace.py"),
        ("/python/lib/python3.11/concurrent/futures/_base.py", "concurrent/futures/_base.py"),
        ("/usr/lib/python3.12/contextlib.py", "contextlib.py"),
        ("/home/someone/secret/run.py", "run.py"),
        ("C:\\Users\\someone\\vllm\\v1\\engine\\core.py", "vllm/v1/engine/core.py"),
        ("uvloop/loop.pyx", "uvloop/loop.pyx"),
        ("/home/someone/lab/plugin/vllm_repro_lab/refusals.py", "vllm_repro_lab/refusals.py"),
    ],
)
def test_paths_begin_at_the_package(path: str, short: str) -> None:
    assert shorten(path) == short


def shown(raised: Raised) -> tuple[str, str, tuple[str, ...]]:
    return raised.exception, raised.message, raised.functions


HEAD = "Traceback (most recent call last):\n"
CHAIN = """\
Traceback (most recent call last):
  File "/a/vllm/x.py", line 1, in inner
    boom()
ValueError: first

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/a/vllm/x.py", line 2, in outer
    inner()
RuntimeError: second
"""
TWO_PROCESSES = """\
(Worker_TP0 pid=1) ERROR 11-20 08:13:11 [x.py:1] Traceback (most recent call last):
(Worker_TP1 pid=2) ERROR 11-20 08:13:11 [x.py:1] Traceback (most recent call last):
(Worker_TP0 pid=1) ERROR 11-20 08:13:11 [x.py:1]   File "/v/vllm/a.py", line 3, in left
(Worker_TP1 pid=2) ERROR 11-20 08:13:11 [x.py:1]   File "/v/vllm/a.py", line 3, in right
(Worker_TP0 pid=1) ERROR 11-20 08:13:11 [x.py:1]     go()
(Worker_TP1 pid=2) ERROR 11-20 08:13:11 [x.py:1]     go()
(Worker_TP0 pid=1) ERROR 11-20 08:13:11 [x.py:1] RuntimeError: l
(Worker_TP1 pid=2) ERROR 11-20 08:13:11 [x.py:1] RuntimeError: r
"""
TWO_LOGGERS = """\
ERROR 09-30 15:18:57 [v1/engine/core.py:720] EngineCore encountered a fatal error.
ERROR 09-30 15:18:57 [v1/engine/core.py:720] Traceback (most recent call last):
ERROR 09-30 15:18:57 [async_llm.py:480] AsyncLLM output_handler failed.
ERROR 09-30 15:18:57 [v1/engine/core.py:720]   File "/v/core.py", line 711, in run_engine_core
ERROR 09-30 15:18:57 [async_llm.py:480] Traceback (most recent call last):
ERROR 09-30 15:18:57 [v1/engine/core.py:720]     engine_core.run_busy_loop()
ERROR 09-30 15:18:57 [async_llm.py:480]   File "/v/async_llm.py", line 438, in output_handler
ERROR 09-30 15:18:57 [v1/engine/core.py:720] ValueError: the root
ERROR 09-30 15:18:57 [async_llm.py:480] vllm.v1.engine.exceptions.EngineDeadError: dead
"""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/v/vllm/a.py", line 1, in outer
  |     run()
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/v/vllm/b.py", line 2, in inner
    |     fail()
    | ValueError: inside
    +------------------------------------
"""
FRAME = HEAD + '  File "a.py", line 1, in f\n    g()\n'


@pytest.mark.parametrize(
    ("text", "exceptions"),
    [
        (CHAIN, [("RuntimeError", "second", ("outer",))]),
        (TWO_PROCESSES, [("RuntimeError", "l", ("left",)), ("RuntimeError", "r", ("right",))]),
        (
            TWO_LOGGERS,
            [
                ("ValueError", "the root", ("run_engine_core",)),
                ("vllm.v1.engine.exceptions.EngineDeadError", "dead", ("output_handler",)),
            ],
        ),
        (
            GROUP,
            [
                (
                    "ExceptionGroup",
                    "unhandled errors in a TaskGroup (1 sub-exception)",
                    ("outer",),
                ),
                ("ValueError", "inside", ("inner",)),
            ],
        ),
        # Levels, headlines and sentences are no exceptions.
        ("INFO:     Shutting down\nERROR: nothing\nsee: AssertionError\nNo. ValueError: no", []),
        (FRAME + "nanobind: leaked 4 instances!\n", []),
        # An exception without frames ends where the next one begins.
        (HEAD + "ValueError: no\nKeyError: x\n", [("ValueError", "no", ()), ("KeyError", "x", ())]),
        *(
            (f"{FRAME}{exception}: x\n", [(exception, "x", ("f",))])
            for exception in ("zmq.error.Again", "socket.timeout", "Empty", "KeyError")
        ),
    ],
)
def test_the_exceptions_in_a_text(
    text: str, exceptions: list[tuple[str, str, tuple[str, ...]]]
) -> None:
    assert [shown(raised) for raised in find_raised(text)] == exceptions


def test_a_chain_keeps_its_order_and_kind() -> None:
    log = recording("v0.20.2-fault-workspace-uni-inflight")
    (last,) = [raised for raised in find_raised(log) if "Process" in raised.headline]
    assert [link.exception for link in last.links] == ["AssertionError", "RuntimeError"]
    assert last.message.startswith("Found no NVIDIA driver")
    (explicit,) = find_raised(CHAIN)
    assert [shown(link) for link in explicit.links[:-1]] == [("ValueError", "first", ("inner",))]
    assert (last.explicit, explicit.explicit) == (False, True)


def test_a_workers_block_comes_twice_and_the_wrapper_once() -> None:
    log = recording("v0.32.0-fault-workspace-mp-inflight")
    by_process: dict[str, list[Raised]] = {}
    for raised in find_raised(log):
        by_process.setdefault(raised.process, []).append(raised)
    first, second = by_process["Worker"]
    assert shown(first) == shown(second)
    assert (first.exception, first.headline) == ("AssertionError", "WorkerProc hit an exception.")
    inner = Frame("vllm/v1/worker/workspace.py", "_ensure_workspace_size", "raise AssertionError(")
    assert (first.frames[-1], first.frames[-1].line) == (inner, 243)
    (wrapper,) = by_process["EngineCore"]
    assert wrapper.message.startswith("Worker failed with error 'Workspace is locked")


def test_messages_end_where_the_next_record_begins() -> None:
    raised = find_raised(recording("v0.32.0-killed-inflight"))
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    assert {(bare_name(each.exception), each.message) for each in raised} == {
        ("EngineDeadError", message)
    }


def test_pasted_without_header_or_indentation() -> None:
    text = pasted("sco-hybrid")
    (raised,) = find_raised(text)
    assert shown(raised)[:2] == ("AssertionError", "")
    assert raised.functions[-2:] == ("get_new_blocks", "popleft_n")
    assert raised.frames[-1].source == "assert curr_block is not None"
    (flat,) = find_raised("\n".join(line.strip() for line in text.splitlines()))
    assert shown(flat) == shown(raised)
    (with_prose,) = find_raised(pasted("sco-hybrid-with-prose"))
    assert shown(with_prose)[:2] == ("AssertionError", "")


def test_frames_that_a_web_page_put_on_one_line() -> None:
    joined, wrapped = (
        find_raised(pasted(f"tq-mtp-cudagraphs{kind}"))[0] for kind in ("-one-line", "")
    )
    assert joined.functions == wrapped.functions
    assert joined.functions[0] == "determine_available_memory"
    assert " ".join(joined.message.split()) == " ".join(wrapped.message.split())
    assert wrapped.message.count("\n") == 2
    assert joined.frames[-1].source == wrapped.frames[-1].source
    assert joined.frames[-1].source == "qsl = query_start_loc.tolist()"


def test_blank_lines_between_frames() -> None:
    lone, full = find_raised(pasted("tq-chunked-prefill"))
    assert (lone.frames, lone.message) == ((), full.message)
    assert full.headline == "EngineCore encountered a fatal error."
    inner = ("_continuation_prefill", "get_simultaneous", "_ensure_workspace_size")
    assert full.functions[-3:] == inner


def test_messages_of_several_lines() -> None:
    (wrapped,) = find_raised(pasted("dsv4-tp2"))
    assert wrapped.exception == "AssertionError"
    part = "'deepseek_v4_attention.py:1457:_forward_prefill' requires 21.80 MB,"
    assert part in wrapped.message
    assert wrapped.message.endswith("not allowed after locking.")
    (of_pydantic,) = find_raised(recording("v0.28.0-no-config"))
    assert of_pydantic.exception == "pydantic_core._pydantic_core.ValidationError"
    assert of_pydantic.functions[0] == "<module>"
    assert "Please verify the following requirements" in of_pydantic.message


FATAL = "EngineCore encountered a fatal error."
FAILED = "EngineCore failed to start."
HIT = "WorkerProc hit an exception."
QUOTED = "Workspace is locked but allocation requires 16.00 MB"
WRAPPER = "Worker failed with error '{}', please check the stack trace above"


def raised_as(
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
    return raised_as(
        "AssertionError",
        message,
        *("worker_busy_loop", "reserve"),
        process="Worker_TP0",
        headline=headline,
    )


def wrapper(message: str, headline: str = FATAL) -> Raised:
    return raised_as("RuntimeError", message, "run_busy_loop", headline=headline)


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
        ("", raised_as("AssertionError", "", process="Worker_TP0", headline=HIT), False),
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


@pytest.mark.parametrize(
    ("message", "level", "same"),
    [(TWENTY_ONE, "ERROR", True), (TWENTY_ONE[1:], "ERROR", False), (TWENTY_ONE, "WARNING", False)],
)
def test_a_wrapper_with_words_of_its_own(message: str, level: str, same: bool) -> None:
    quoting = wrapper(WRAPPER.format(f"CUDA error. {message}"))
    cause = replace(in_worker(message), level=level)
    expected = Root(
        raised=cause if same else quoting,
        wrapped=True,
        class_known=same,
        quoted=f"CUDA error. {message}",
    )
    assert find_root([quoting, cause]) == expected


def chain(*links: Raised) -> Raised:
    """Return the last exception with the ones before it as its causes."""
    last = links[0]
    for link in links[1:]:
        last = replace(link, cause=last)
    return last


CAUSE = raised_as("ValueError", "no such layer", "worker_busy_loop", process="Worker_TP0", line=9)
CUT = wrapper(f"Worker failed with error '{QUOTED}")
MEMORY = raised_as("ValueError", "No memory", "worker_main", process="Worker_TP0", line=9)
BARE = raised_as("RuntimeError", "no frames")
EXIT = raised_as("SystemExit", "1", "worker_busy_loop")
EMPTY = wrapper("Engine core initialization failed", FAILED)
GAVE_UP = raised_as("RuntimeError", "gave up", "step")
LOOK_UP = raised_as("KeyError", "x", "step")
LAST = raised_as("IndexError", "out of bounds", "run_busy_loop", line=20)
LOST_PEER = raised_as(
    "RuntimeError", "Connection closed by peer", "worker_busy_loop", process="Worker_TP1"
)
QUOTES_LOST = wrapper(WRAPPER.format(LOST_PEER.message))
# vLLM 0.24.0 and newer, with asynchronous scheduling: the step failed in the worker.
MISSED = replace(
    raised_as("KeyError", "'cmpl-1'", headline=FATAL, line=9),
    frames=(
        Frame(
            "vllm/v1/core/sched/scheduler.py",
            "update_from_output",
            "req_index = model_runner_output.req_id_to_index[req_id]",
        ),
    ),
)
DEEPER = replace(MISSED, frames=(*MISSED.frames, Frame("vllm/v1/a.py", "find")))
TORCH = replace(raised_as("ValueError", "x", process=""), frames=(Frame("torch/a.py", "f"),))
IN_VLLM = raised_as("KeyError", "x", "get", process="")
OF_API = raised_as("ValueError", "bad request", "run_server", process="APIServer")
AFTER = replace(chain(EMPTY, raised_as("ValueError", "gave up", "step")), explicit=True)


@pytest.mark.parametrize(
    ("known", "root"),
    [
        ([CUT, in_worker(QUOTED)], Root(raised=in_worker(QUOTED), wrapped=True, quoted=QUOTED)),
        ([CUT], Root(raised=CUT, wrapped=True, class_known=False, quoted=QUOTED)),
        # An empty wrapper leads to the first exception with frames.
        *(
            (
                [wrapper(message, FAILED), EXIT, raised_as("OSError", "no frames"), MEMORY],
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
        ([CAUSE, DEEPER], Root(raised=DEEPER)),
        # A wrapper of a lost peer leads to the peer's exception.
        ([QUOTES_LOST, LOST_PEER, CAUSE], Root(raised=CAUSE, wrapped=True)),
        ([QUOTES_LOST, LOST_PEER, EXIT, CAUSE], Root(raised=CAUSE, wrapped=True)),
        (
            [QUOTES_LOST, LOST_PEER],
            Root(raised=LOST_PEER, wrapped=True, quoted=LOST_PEER.message),
        ),
        ([EXIT, BARE], Root(raised=BARE)),
        # A look-up that fails before a cleanup does is the root.
        ([chain(LOOK_UP, raised_as("OSError", "", "shutdown"), GAVE_UP)], Root(raised=LOOK_UP)),
        # The last words of the engine come before earlier exceptions.
        *(
            (known, Root(raised=root))
            for headline in (FATAL, FAILED, "Engine background task failed")
            for last in [replace(LAST, headline=headline)]
            for lost in [replace(last, exception="RuntimeError", message=LOST_PEER.message)]
            for known, root in (([CAUSE, last], last), ([lost], lost), ([lost, CAUSE], CAUSE))
        ),
        ([TORCH, IN_VLLM], None),
        ([OF_API], None),
        ([replace(OF_API, source="core.py:9")], None),
        ([raised_as("EngineDeadError", "", "step")], None),
        # An empty wrapper that is not the last word is passed over.
        ([replace(EMPTY, headline=""), MEMORY], Root(raised=MEMORY)),
    ],
)
def test_the_root(known: Sequence[Raised], root: Root | None) -> None:
    assert find_root(known) == root


OF_WORKER = replace(GAVE_UP, process="Worker_TP0")


@pytest.mark.parametrize(
    ("known", "printed"),
    [
        ([CUT, chain(in_worker(QUOTED), OF_WORKER)], 1),
        ([chain(CUT, replace(GAVE_UP, headline=FATAL))], 0),
        ([EMPTY, chain(MEMORY, OF_WORKER)], 1),
        ([AFTER], 0),
    ],
)
def test_the_chain_in_which_the_root_was_printed(known: Sequence[Raised], printed: int) -> None:
    root = find_root(known)
    assert root is not None
    assert (root.printed, root.wrapped) == (known[printed], True)


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
        ("CancelledError", "", "shutdown", True),
        ("ImportError", "a.so.1: cannot open shared object file", "step", True),
    ],
)
def test_the_oldest_exception_that_is_no_look_up(
    first: str, message: str, then: str, oldest: bool
) -> None:
    link, last = raised_as(first, message, "step"), raised_as("RuntimeError", "gave up", then)
    root = find_root([chain(link, last)])
    assert root == Root(raised=link if oldest else chain(link, last))


@pytest.mark.parametrize(
    "other",
    [
        *(
            raised_as(name, "x", "worker_busy_loop", process="Worker_TP1")
            for name in ("SystemExit", "KeyboardInterrupt", "CancelledError", "BrokenPipeError")
        ),
        *(
            raised_as(name, "x", "worker_busy_loop", process="Worker_TP1")
            for name in ("EOFError", "zmq.ZMQError")
        ),
        *(
            raised_as("RuntimeError", message, "worker_busy_loop", process="Worker_TP1")
            for message in ("cancelled", "Executor failed.", "Broken pipe")
        ),
        raised_as("RuntimeError", "x", "destroy_process_group", process="Worker_TP1"),
        raised_as("RuntimeError", "no frames", process="Worker_TP1"),
        raised_as("RuntimeError", "RPC call to execute_model timed out.", "step"),
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
    first = raised_as("ValueError", "x", function, process=process, headline=headline)
    first = replace(first, native=native)
    after = replace(first, message="after", frames=IN_VLLM.frames, cause=first)
    assert [find_root([each]) is not None for each in (first, after)] == [counts, counts]


TQ = Signature(
    exception="AssertionError",
    message=(
        "Workspace is locked but allocation from '{file}:{line}:_continuation_prefill' requires "
        "{asked} MB, current size is {locked} MB."
    ),
    frames=(
        "_prefill_attention",
        "_continuation_prefill",
        "get_simultaneous",
        "_ensure_workspace_size",
    ),
    phase=Phase.REQUEST,
)
MTP = Signature(
    exception="RuntimeError",
    message="Cannot copy between CPU and CUDA tensors during CUDA graph capture",
    frames=("_prefill_attention",),
    phase=Phase.BOOT,
)
DSV4 = Signature(
    exception="AssertionError",
    message=(
        "Workspace is locked but allocation from '{file}:{line}:_forward_prefill' requires "
        "{asked} MB, current size is {locked} MB."
    ),
    frames=("_forward_prefill", "get_simultaneous", "_ensure_workspace_size"),
    phase=Phase.REQUEST,
)
SCO = Signature(
    exception="AssertionError",
    frames=("get_new_blocks", "popleft_n"),
    phase=Phase.REQUEST,
    source="assert curr_block is not None",
)
MIN_TOKENS = Signature(
    exception="IndexError",
    message="index {} is out of bounds for dimension 1 with size {}",
    frames=("apply_logits_processors", "apply"),
    phase=Phase.REQUEST,
)
ALL = {"tq": TQ, "mtp": MTP, "dsv4": DSV4, "sco": SCO, "min-tokens": MIN_TOKENS}


@pytest.mark.parametrize(
    ("text", "belongs"),
    [
        (pasted("tq-chunked-prefill"), "tq"),
        (pasted("tq-mtp-cudagraphs"), "mtp"),
        (pasted("dsv4-tp2"), "dsv4"),
        (pasted("sco-hybrid"), "sco"),
        (recording("v0.28.0-min-tokens"), "min-tokens"),
        (recording("v0.32.0-fault-workspace-mp-inflight"), None),
        (recording("v0.32.0-fault-scheduler-inflight"), None),
        (recording("v0.32.0-killed-inflight"), None),
        (recording("v0.32.0-two-ranks-worker1-killed-head"), None),
        (recording("v0.32.0-boot"), None),
    ],
)
def test_a_death_matches_only_its_signature(text: str, belongs: str | None) -> None:
    diagnosis = diagnose(text)
    hows = {name: compare(signature, diagnosis).how for name, signature in ALL.items()}
    assert hows == {name: How.MATCH if name == belongs else How.OTHER for name in ALL}


def logged(prefix: str, *lines: str) -> str:
    return "\n".join(prefix + line for line in lines)


X_PY = "/venv/site-packages/vllm/v1/worker/x.py"


def worker_block(exception: str, message: str, *functions: str) -> str:
    frames = [
        f'  File "{X_PY}", line 1, in {function}\n    call_{function}()'
        for function in ("worker_busy_loop", "execute_model", *functions)
    ]
    return logged(
        "(Worker_TP0 pid=9) ERROR 11-20 08:13:11 [multiproc_executor.py:948] ",
        *("WorkerProc hit an exception.", "Traceback (most recent call last):"),
        *"\n".join(frames).splitlines(),
        f"{exception}: {message}" if message else exception,
    )


def engine_wrapper(message: str) -> str:
    return logged(
        "(EngineCore pid=5) ERROR 11-20 08:13:11 [core.py:1197] ",
        *("EngineCore encountered a fatal error.", "Traceback (most recent call last):"),
        '  File "/venv/site-packages/vllm/v1/engine/core.py", line 1, in run_engine_core',
        "    engine_core.run_busy_loop()",
        f"RuntimeError: Worker failed with error '{message}', please check the stack trace above",
    )


LOCKED = (
    "Workspace is locked but allocation from '{}' requires 0.76 MB, current size is 0.00 MB. "
    "Workspace growth is not allowed after locking."
)
CONTINUED = LOCKED.format("turboquant_attn.py:747:_continuation_prefill")
WHOLE = worker_block("AssertionError", CONTINUED, *TQ.frames)
OTHER_CLASS = worker_block("ValueError", CONTINUED, *TQ.frames)
KEY = Signature(exception="KeyError", message="{} missing")
KEY_DEATH = worker_block("KeyError", "a missing", "last")
PASTED_TQ, PASTED_SCO = pasted("tq-chunked-prefill"), pasted("sco-hybrid")
STEPS = ("schedule", "allocate_slots", "get_new_blocks")


LIKENESSES = {
    How.MATCH: [
        (TQ, WHOLE),
        (TQ, WHOLE + "\n" + engine_wrapper(CONTINUED)),
        (TQ, engine_wrapper(CONTINUED)),
        (TQ, PASTED_TQ),
        # A match may end at any frame.
        (replace(KEY, frames=("worker_busy_loop",)), KEY_DEATH),
        (replace(KEY, frames=("execute_model",)), KEY_DEATH),
        (replace(KEY, frames=("last",)), KEY_DEATH),
        # White space, quotes and line breaks do not count.
        (DSV4, pasted("dsv4-tp2").replace("'", "\u2019").replace("requires ", "requires\n   ")),
    ],
    How.NEAR: [
        (TQ, worker_block("AssertionError", CONTINUED, "forward", "get_simultaneous")),
        (TQ, worker_block("AssertionError", "something else", *TQ.frames)),
        (TQ, OTHER_CLASS),
        (replace(TQ, phase=Phase.BOOT), PASTED_TQ),
        # The same text from another place.
        (MTP, worker_block("RuntimeError", MTP.message + " unless.", "_dummy_run", "_suppress")),
        (SCO, PASTED_SCO.replace("curr_block is not None", "self.num_free_blocks >= n")),
    ],
    How.OTHER: [
        (TQ, worker_block("ValueError", CONTINUED, "forward")),
        # Relatives of the bare assertion.
        (SCO, worker_block("ValueError", "Cannot get 5 free blocks from the pool", *STEPS)),
        (SCO, worker_block("AssertionError", "Expected 512 hit tokens, got 0", "schedule")),
        (SCO, worker_block("AssertionError", "", "schedule", "allocate_slots")),
        (SCO, "AssertionError: with words"),
        (SCO, worker_block("AssertionError", "", *SCO.frames, "inner")),
        (replace(MIN_TOKENS, not_in_message=("size 4096",)), recording("v0.28.0-min-tokens")),
        # Relatives of the workspace assertion, with and without the worker's lines.
        *(
            (TQ, block + engine_wrapper(LOCKED.format(f"{file}:{functions[0]}")))
            for file, functions in (
                ("turboquant_attn.py:879", ("_decode_attention", *TQ.frames[2:])),
                ("deepseek_v4_attention.py:1457", DSV4.frames),
                ("b12x.py:354", ("_run_compressed_mla", *TQ.frames[2:])),
            )
            for message in [LOCKED.format(f"{file}:{functions[0]}")]
            for block in ("", worker_block("AssertionError", message, *functions) + "\n")
        ),
    ],
}


@pytest.mark.parametrize(
    ("how", "signature", "text"),
    [(how, *row) for how, rows in LIKENESSES.items() for row in rows],
)
def test_how_a_death_compares(how: How, signature: Signature, text: str) -> None:
    assert compare(signature, diagnose(text)).how is how


@pytest.mark.parametrize(
    ("signature", "text", "captured"),
    [
        (TQ, PASTED_TQ, {"file": "turboquant_attn.py", "line": "720", "asked": "16.00"}),
        (TQ, PASTED_TQ, {"locked": "1.02"}),
        (DSV4, pasted("dsv4-tp2"), {"asked": "21.80", "locked": "21.62"}),
        (TQ, WHOLE, {"asked": "0.76"}),
        (TQ, engine_wrapper(CONTINUED), {"asked": "0.76"}),
        (TQ, OTHER_CLASS, {"asked": "0.76"}),
        (replace(KEY, message="{{{key}}} missing"), "KeyError: {c1a} missing", {"key": "c1a"}),
    ],
)
def test_named_holes_are_captured(
    signature: Signature, text: str, captured: dict[str, str]
) -> None:
    assert captured.items() <= compare(signature, diagnose(text)).captured.items()


@pytest.mark.parametrize(
    ("signature", "text", "why"),
    [
        (TQ, WHOLE, "class, message and frames agree"),
        (TQ, engine_wrapper(CONTINUED), "the message agrees; the frames are not known"),
        (KEY, "KeyError: c1a missing", "class and message agree"),
        (replace(KEY, message="{}"), "KeyError: c1a missing", "only the class agrees"),
        (TQ, "", "no exception of this death is known"),
        (
            replace(TQ, not_in_message=("0.76 MB",)),
            WHOLE,
            "the message holds “0.76 MB”, which excludes this bug",
        ),
        (TQ, WHOLE.replace("Workspace is", "It is"), "the message differs"),
        (
            SCO,
            worker_block("AssertionError", "words", "get_new_blocks", "popleft_n"),
            "this exception has a message and the bug's has none; it failed at `call_popleft_n()`",
        ),
        (
            replace(TQ, frames=("first", "last")),
            worker_block("ValueError", CONTINUED),
            "ValueError is not AssertionError; the frames do not go first → last",
        ),
        (
            TQ,
            WHOLE.replace("vllm/v1/worker", "mine/v1"),
            "it failed in mine/v1/x.py, outside of vLLM",
        ),
        (
            SCO,
            worker_block("AssertionError", "", *SCO.frames)
            .replace("call_popleft_n()", f"{SCO.source}")
            .replace("vllm/v1", "mine/v1"),
            "class, message and frames agree",
        ),
        (replace(TQ, phase=Phase.BOOT), WHOLE, "it died in phase request, not boot"),
        (
            SCO,
            worker_block("AssertionError", "", *SCO.frames, "inner"),
            "it failed in inner, not in popleft_n",
        ),
    ],
)
def test_why_it_matches_or_does_not(signature: Signature, text: str, why: str) -> None:
    assert compare(signature, diagnose(text)).why == why


def test_a_link_that_quotes_a_worker_is_compared_by_the_quotation() -> None:
    message = f"Worker failed with error '{CONTINUED}', please check the stack trace above"
    wrapper = raised_as("RuntimeError", message, "run_engine_core")
    last = replace(raised_as("ValueError", "gave up", "step"), cause=wrapper)
    death = replace(diagnose(WHOLE), root=Root(raised=last))
    quoting = replace(TQ, not_in_message=("please check",))
    assert [compare(each, death).how for each in (TQ, quoting)] == [How.MATCH, How.MATCH]


def test_a_message_alone_is_recognized_by_16_fixed_characters() -> None:
    for fixed, enough in (("of sixteen chars", True), ("of fifteen char", False)):
        signature = Signature(exception="ValueError", message=fixed + "{hole}")
        assert quotes(signature, f"it is\n {fixed}: 5") is enough
        assert not quotes(signature, "other")


@pytest.mark.parametrize("message", ["{a} and {a}", "open {", "close }", "{0a}"])
def test_a_wrong_template_is_refused_when_declared(message: str) -> None:
    with pytest.raises(ValueError, match="template"):
        Signature(exception="ValueError", message=message)


FORWARD_PREFILL = replace(DSV4, message="Workspace is locked", frames=("_forward_prefill",))
HEAD = "Traceback (most recent call last):\n"
PASTED = (
    f'{HEAD}  File "vllm/a.py", line 1, in _forward_prefill\nAssertionError: Workspace is locked\n'
)
LOST = "(MainProcess pid=3964) ERROR 11-20 15:00:00 [multiproc_executor.py:315] "
CLOSED = (
    f'{HEAD}  File "vllm/b.py", line 1, in all_reduce\nRuntimeError: Connection closed by peer\n'
)


@pytest.mark.parametrize(
    ("head", "other", "ranks"),
    [
        (
            CLOSED,
            LOST + "Worker proc VllmWorker-1 died unexpectedly (exit code: None), shutting down.\n",
            (1,),
        ),
        (LOST + "Worker proc VllmWorker-0 died unexpectedly (exit code: -9)\n", CLOSED, (0,)),
        (PASTED, PASTED, (0, 1)),
        (CLOSED, PASTED, (1,)),
        (PASTED, CLOSED, (0,)),
        # With two workers a node, worker 2 is the first of node 1.
        (
            CLOSED,
            LOST + "Worker proc VllmWorker-2 died unexpectedly, shutting down executor.\n",
            (1,),
        ),
        (CLOSED, "", (0,)),
        ("", "", ()),
    ],
)
def test_nodes_that_a_death_began_with(head: str, other: str, ranks: tuple[int, ...]) -> None:
    assert failed_nodes({0: diagnose(head), 1: diagnose(other)}, FORWARD_PREFILL) == ranks
    assert failed_nodes({}, FORWARD_PREFILL) == ()
