from __future__ import annotations

import pytest

from tests.diagnosis.recordings import find_raised, pasted, recording
from vllm_repro_diagnosis.tracebacks import Frame, bare_name, shorten


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


def test_a_workers_block_is_found_twice_and_the_wrapper_once() -> None:
    raised = find_raised(recording("v0.32.0-fault-workspace-mp-inflight"))
    worker = [one for one in raised if one.process == "Worker"]
    assert len(worker) == 2
    assert (worker[0].message, worker[0].functions) == (worker[1].message, worker[1].functions)
    assert worker[0].headline == "WorkerProc hit an exception."
    assert worker[0].exception == "AssertionError"
    assert worker[0].frames[-1] == Frame(
        "vllm/v1/worker/workspace.py", "_ensure_workspace_size", "raise AssertionError("
    )
    assert worker[0].frames[-1].line == 243
    (wrapper,) = [one for one in raised if one.process == "EngineCore"]
    assert wrapper.message.startswith("Worker failed with error 'Workspace is locked")


def test_messages_end_where_the_next_record_begins() -> None:
    raised = find_raised(recording("v0.32.0-killed-inflight"))
    assert {one.message for one in raised} == {
        "EngineCore encountered an issue. See stack trace (above) for the root cause."
    }
    assert {bare_name(one.exception) for one in raised} == {"EngineDeadError"}


def test_a_chain_keeps_its_order_and_kind() -> None:
    (last,) = [
        one for one in find_raised(recording("v0.20.2-fault-workspace-uni-inflight")) if "Process" in one.headline
    ]
    assert [link.exception for link in last.links] == ["AssertionError", "RuntimeError"]
    assert last.message.startswith("Found no NVIDIA driver")
    assert not last.explicit


def test_an_explicit_cause() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/a/vllm/x.py", line 1, in inner\n    boom()\nValueError: first\n\n'
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/a/vllm/x.py", line 2, in outer\n    inner()\nRuntimeError: second\n'
    )
    (raised,) = find_raised(text)
    assert raised.explicit
    assert raised.cause is not None
    assert (raised.cause.exception, raised.cause.message, raised.functions) == ("ValueError", "first", ("outer",))


def test_pasted_without_header_or_indentation() -> None:
    (raised,) = find_raised(pasted("sco-hybrid"))
    assert (raised.exception, raised.message) == ("AssertionError", "")
    assert raised.functions[-2:] == ("get_new_blocks", "popleft_n")
    assert raised.frames[-1].source == "assert curr_block is not None"
    (with_prose,) = find_raised(pasted("sco-hybrid-with-prose"))
    assert (with_prose.exception, with_prose.message) == ("AssertionError", "")
    flat = "\n".join(line.strip() for line in pasted("sco-hybrid").splitlines())
    (again,) = find_raised(flat)
    assert (again.exception, again.message, again.functions) == (raised.exception, raised.message, raised.functions)


def test_frames_that_a_web_page_put_on_one_line() -> None:
    one_line, wrapped = (find_raised(pasted(f"tq-mtp-cudagraphs{kind}"))[0] for kind in ("-one-line", ""))
    assert one_line.functions == wrapped.functions
    assert one_line.functions[0] == "determine_available_memory"
    assert " ".join(one_line.message.split()) == " ".join(wrapped.message.split())
    assert wrapped.message.count("\n") == 2
    assert wrapped.frames[-1].source == one_line.frames[-1].source == "qsl = query_start_loc.tolist()"


def test_the_seed_with_blank_lines_between_frames() -> None:
    lone, full = find_raised(pasted("tq-chunked-prefill"))
    assert lone.frames == ()
    assert full.headline == "EngineCore encountered a fatal error."
    assert full.functions[-3:] == ("_continuation_prefill", "get_simultaneous", "_ensure_workspace_size")
    assert full.message == lone.message


def test_a_lone_last_line_that_was_wrapped() -> None:
    (raised,) = find_raised(pasted("dsv4-tp2"))
    assert raised.exception == "AssertionError"
    assert "'deepseek_v4_attention.py:1457:_forward_prefill' requires 21.80 MB," in raised.message
    assert raised.message.endswith("not allowed after locking.")


def test_two_processes_line_by_line() -> None:
    def block(process: str, function: str, message: str) -> list[str]:
        prefix = f"({process}) ERROR 11-20 08:13:11 [x.py:1] "
        lines = ["Traceback (most recent call last):", f'  File "/v/vllm/a.py", line 3, in {function}', "    go()"]
        return [prefix + line for line in [*lines, f"RuntimeError: {message}"]]

    mixed = [
        line
        for pair in zip(block("Worker_TP0 pid=1", "left", "l"), block("Worker_TP1 pid=2", "right", "r"), strict=True)
        for line in pair
    ]
    assert [(one.functions, one.message) for one in find_raised("\n".join(mixed))] == [
        (("left",), "l"),
        (("right",), "r"),
    ]


def test_old_logs_without_process_prefix_are_kept_apart_by_their_logger() -> None:
    text = """\
ERROR 09-30 15:18:57 [v1/engine/core.py:720] EngineCore encountered a fatal error.
ERROR 09-30 15:18:57 [v1/engine/core.py:720] Traceback (most recent call last):
ERROR 09-30 15:18:57 [v1/engine/async_llm.py:480] AsyncLLM output_handler failed.
ERROR 09-30 15:18:57 [v1/engine/core.py:720]   File "/v/vllm/v1/engine/core.py", line 711, in run_engine_core
ERROR 09-30 15:18:57 [v1/engine/async_llm.py:480] Traceback (most recent call last):
ERROR 09-30 15:18:57 [v1/engine/core.py:720]     engine_core.run_busy_loop()
ERROR 09-30 15:18:57 [v1/engine/async_llm.py:480]   File "/v/vllm/v1/engine/async_llm.py", line 438, in output_handler
ERROR 09-30 15:18:57 [v1/engine/core.py:720] ValueError: the root
ERROR 09-30 15:18:57 [v1/engine/async_llm.py:480] vllm.v1.engine.exceptions.EngineDeadError: dead
"""
    assert [(one.exception, one.functions) for one in find_raised(text)] == [
        ("ValueError", ("run_engine_core",)),
        ("vllm.v1.engine.exceptions.EngineDeadError", ("output_handler",)),
    ]


def test_an_exception_group_is_read_through_its_margin() -> None:
    text = """\
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
    assert [(one.exception, one.message.split(" (")[0], one.functions) for one in find_raised(text)] == [
        ("ExceptionGroup", "unhandled errors in a TaskGroup", ("outer",)),
        ("ValueError", "inside", ("inner",)),
    ]


def test_a_message_of_many_lines_from_the_interpreter() -> None:
    (raised,) = find_raised(recording("v0.28.0-no-config"))
    assert raised.exception == "pydantic_core._pydantic_core.ValidationError"
    assert raised.functions[0] == "<module>"
    assert "Please verify the following requirements" in raised.message


def test_levels_and_headlines_do_not_become_exceptions() -> None:
    assert find_raised("INFO:     Shutting down\nERROR: nothing\nsee: AssertionError\nA sentence. ValueError: no") == ()


def test_a_small_word_before_a_colon_is_no_exception() -> None:
    head = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
    assert find_raised(head + "nanobind: leaked 4 instances!\n") == ()
    for exception in ("zmq.error.Again", "socket.timeout", "Empty", "KeyError"):
        assert [one.exception for one in find_raised(f"{head}{exception}: x\n")] == [exception]
