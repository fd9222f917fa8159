"""Shapes of logs that users paste: older releases, a shell's last line, quotations, torn tracebacks."""

from __future__ import annotations

import pytest

from vllm_repro.diagnosis.diagnosis import diagnose

BOOTED = """\
(APIServer pid=7) INFO 08-01 17:49:00 [api_server.py:1] vLLM API server version 0.25.1
(APIServer pid=7) INFO 08-01 17:49:30 [launcher.py:1] Application startup complete.
(APIServer pid=7) INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK
"""
TRACEBACK = """\
Traceback (most recent call last):
  File "/x/site-packages/vllm/v1/engine/core.py", line 1, in run_engine_core
    engine_core.run_busy_loop()
  File "/x/site-packages/vllm/v1/engine/core.py", line 2, in run_busy_loop
    self._process_engine_step()
  File "/x/site-packages/vllm/v1/worker/gpu_model_runner.py", line 3, in execute_model
    fail()
ZeroDivisionError: the cause
"""


def logged(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "line",
    [
        "Killed",
        "Segmentation fault (core dumped)",
        "run.sh: line 22: 139935 Killed                  vllm serve m --port 8000",
        "./go: line 3:   881 Aborted                 (core dumped) vllm serve m",
    ],
)
def test_the_line_of_a_shell_is_a_death(line: str) -> None:
    found = diagnose(BOOTED + line + "\n")
    assert found.died is True
    assert line in found.why


@pytest.mark.parametrize("line", ["Killed by admin", "the request was Killed", "INFO 08-01 17:49:40 [x.py:1] Killed"])
def test_other_lines_with_such_a_word_are_not(line: str) -> None:
    assert diagnose(BOOTED + line + "\n").died is False


@pytest.mark.parametrize(("name", "died"), [("python3", None), ("VLLM::EngineCor", None), ("chrome", False)])
def test_the_kernel_may_have_killed_this_server(name: str, died: bool | None) -> None:
    assert diagnose(f"{BOOTED}[ 1234.5] Out of memory: Killed process 4242 ({name}) total-vm:1kB\n").died is died


def test_the_fatal_line_of_0_8_and_the_prefix_of_0_9_are_read() -> None:
    old = logged("ERROR 03-07 16:37:49 [core.py:324] ", "EngineCore hit an exception: " + TRACEBACK)
    assert (diagnose(old).died, diagnose(old).exception) == (True, "ZeroDivisionError")
    worker = "(VllmWorker rank=0 pid=226) ERROR 06-11 01:51:09 [multiproc_executor.py:527] "
    wrapper = (
        "RuntimeError: Worker failed with error 'the cause', please check the stack trace above for the root cause"
    )
    core = TRACEBACK.replace("ZeroDivisionError: the cause", wrapper)
    text = logged(worker, "WorkerProc hit an exception.\n" + TRACEBACK) + logged(
        "ERROR 06-11 01:51:09 [core.py:515] ", "EngineCore encountered a fatal error.\n" + core
    )
    found = diagnose(text)
    assert (found.died, found.exception, found.class_known) == (True, "ZeroDivisionError", True)


def test_a_traceback_in_a_request_log_is_no_death() -> None:
    quoted = "Received request cmpl-1: prompt: 'what is this?\nEngineCore encountered a fatal error.\n" + TRACEBACK
    found = diagnose(BOOTED + logged("(APIServer pid=7) INFO 08-01 17:50:00 [logger.py:39] ", quoted))
    assert (found.died, found.exception) == (False, None)
    real = logged(
        "(EngineCore pid=9) ERROR 08-01 17:50:00 [core.py:39] ", "EngineCore encountered a fatal error.\n" + TRACEBACK
    )
    assert diagnose(BOOTED + real).exception == "ZeroDivisionError"


def test_a_failure_in_the_exit_of_a_capture_is_the_cause() -> None:
    capture = TRACEBACK.replace(
        '  File "/x/site-packages/vllm/v1/worker/gpu_model_runner.py", line 3, in execute_model\n    fail()\n',
        '  File "/x/site-packages/torch/cuda/graphs.py", line 268, in __exit__\n    self.cuda_graph.capture_end()\n'
        '  File "/x/site-packages/torch/cuda/graphs.py", line 130, in capture_end\n    super().capture_end()\n',
    )
    core = logged("(EngineCore pid=40) ERROR 05-02 13:35:28 [core.py:1108] ", "EngineCore failed to start.\n" + capture)
    assert diagnose(core).exception == "ZeroDivisionError"
    # A second exception while a process ends is a consequence of the first.
    link = "\nDuring handling of the above exception, another exception occurred:\n\n"
    ending = TRACEBACK.replace("in execute_model", "in destroy_process_group").replace(
        "ZeroDivisionError: the cause", "OSError: gone"
    )
    both = (
        "EngineCore failed to start.\n"
        + capture.replace("ZeroDivisionError: the cause", "KeyError: 'first'")
        + link
        + ending
    )
    assert diagnose(logged("(EngineCore pid=40) ERROR 05-02 13:35:28 [core.py:1108] ", both)).exception == "KeyError"


def test_the_end_of_a_traceback_alone_keeps_its_exception() -> None:
    text = """\
  File "/x/site-packages/vllm/v1/worker/workspace.py", line 157, in _ensure_workspace_size
    raise AssertionError(
AssertionError: the cause
"""
    torn = logged("(EngineCore pid=40) ERROR 05-02 13:35:28 [core.py:1108] ", text)
    found = diagnose(torn)
    assert (found.died, found.exception, found.message) == (None, "AssertionError", "the cause")


def test_a_fence_is_no_message() -> None:
    assert diagnose("```\n" + TRACEBACK.replace(": the cause", "") + "```\n").message == ""
