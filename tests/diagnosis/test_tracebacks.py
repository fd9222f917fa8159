from __future__ import annotations

import pytest

from tests.diagnosis.logs import find_raised, pasted, recording
from vllm_repro_diagnosis.tracebacks import Frame, Raised, bare_name, shorten


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
    ("text", "found"),
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
        *(
            (f"{FRAME}{exception}: x\n", [(exception, "x", ("f",))])
            for exception in ("zmq.error.Again", "socket.timeout", "Empty", "KeyError")
        ),
    ],
)
def test_the_exceptions_in_a_text(text: str, found: list[tuple[str, str, tuple[str, ...]]]) -> None:
    assert [shown(raised) for raised in find_raised(text)] == found


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
