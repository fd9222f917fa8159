"""Shapes of logs that users paste: older releases, a shell's last line, quotations, torn tracebacks."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from tests.diagnosis.recordings import recording
from vllm_repro_diagnosis.diagnosis import Phase, diagnose
from vllm_repro_diagnosis.log_text import read_lines

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
    assert found.root is not None
    assert (found.died, found.exception, found.root.class_known) == (True, "ZeroDivisionError", True)


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


# ── the order of lines, and other programs ────────────────────────────────────────────────────────────────

OF_COLLECT_ENV = """\
Collecting environment information...
Traceback (most recent call last):
  File "/root/collect_env.py", line 855, in <module>
    main()
  File "/x/pynvml.py", line 1042, in _nvmlCheckReturn
    raise NVMLError(ret)
pynvml.NVMLError_Unknown: Unknown Error
"""
OF_A_CLIENT = """\
Traceback (most recent call last):
  File "/x/site-packages/openai/_base_client.py", line 1, in request
    raise
openai.APIConnectionError: Connection error.
"""
FATAL = "(EngineCore pid=9) ERROR 08-01 17:50:0{} [core.py:39] "


@pytest.mark.parametrize("other", [OF_COLLECT_ENV, OF_COLLECT_ENV.split("\n", 1)[1], OF_A_CLIENT])
def test_a_traceback_of_another_program_is_not_the_servers(other: str) -> None:
    for text in (other, BOOTED + other, other + BOOTED):
        found = diagnose(text)
        assert (found.died is True, found.exception) == (False, None), found.why
    assert diagnose(other + "\n" + TRACEBACK).exception == "ZeroDivisionError"


def test_a_traceback_through_vllm_is_preferred_in_a_pasted_text() -> None:
    server = TRACEBACK.replace("v1/engine/core.py", "entrypoints/a.py").replace(
        "v1/worker/gpu_model_runner", "entrypoints/b"
    )
    server = server.replace("run_engine_core", "f").replace("run_busy_loop", "g").replace("execute_model", "h")
    server = server.replace("_process_engine_step", "i")
    mine = "Traceback (most recent call last):\n  File \"/srv/mine.py\", line 1, in <module>\nKeyError: 'mine'\n"
    assert diagnose(mine + "\n" + server).exception == "ZeroDivisionError"
    assert diagnose(mine).exception == "KeyError"
    fetching = server.replace("/x/site-packages/vllm/entrypoints/b.py", "/x/site-packages/aiohttp/client.py")
    assert diagnose(fetching).exception == "ZeroDivisionError"


def test_the_environment_before_a_log_is_no_part_of_it() -> None:
    environment = "Collecting environment information...\n" + "PyTorch version: 2.9.1\n" * 40 + "```\n"
    dead = "(APIServer pid=7) ERROR 08-01 17:50:00 [async_llm.py:704] AsyncLLM output_handler failed.\n"
    engine = "(EngineCore pid=9) INFO 08-01 17:49:20 [core.py:39] Initializing a V1 LLM engine (v0.25.1)\n"
    assert "printed nothing" in diagnose(environment + BOOTED + engine + dead).why
    assert diagnose(environment.replace("PyTorch version", "vLLM Version")).vllm_version == "2.9.1"


def in_csv(text: str) -> str:
    quoted = (line.replace('"', '""') for line in text.splitlines())
    return "Date,Line\n" + "".join(f'2026-08-01T17:50:00Z,"{line}"\n' for line in quoted)


SLOW_DEATH = BOOTED + "".join(
    logged(FATAL.format(second), text)
    for second, text in enumerate(["x", "y", "EngineCore encountered a fatal error.\n" + TRACEBACK])
)


def test_a_table_of_a_log_store_is_read() -> None:
    found = diagnose(in_csv(SLOW_DEATH).replace("\n", "\0\n"))
    assert (found.died, found.exception, found.message) == (True, "ZeroDivisionError", "the cause")


@pytest.mark.parametrize("newest_first", [SLOW_DEATH, BOOTED + logged(FATAL.format(5), "slow"), BOOTED])
def test_no_cause_is_named_if_the_lines_are_in_a_wrong_order(newest_first: str) -> None:
    more = "".join(f"(APIServer pid=7) INFO 08-01 17:49:{second} [x.py:1] x\n" for second in range(31, 36))
    lines = (BOOTED + more + newest_first.removeprefix(BOOTED)).splitlines()
    found = diagnose("\n".join(reversed(lines)))
    assert (found.died, found.exception) == (True if "fatal" in newest_first else None, None)
    assert "the oldest to the newest" in found.why


def test_two_logs_after_each_other_are_in_order() -> None:
    assert diagnose(SLOW_DEATH + BOOTED.replace("pid=7", "pid=8")).exception == "ZeroDivisionError"
    late, early = BOOTED.splitlines()[1::-1]
    assert "oldest" not in diagnose(f"{late}\n{early}").why


def each(text: str, form: str) -> str:
    """Return the text with each line in `form`, as a collector wraps it: {json} stands for it as a string."""
    return "".join(form.format(json=json.dumps(line)) + "\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "form",
    [
        '{{"id": "x", "attributes": {{"message": {json}}}}}',
        '{{"_index": "x", "_source": {{"message": {json}}}}}',
        '{{"severity": "ERROR", "body": {json}}}',
        '[{{"textPayload": {json}}}]',
    ],
)
def test_records_of_collectors_are_read(form: str) -> None:
    found = diagnose(each(SLOW_DEATH, form))
    assert (found.died, found.exception, found.message) == (True, "ZeroDivisionError", "the cause")


def test_records_of_pythons_logging_keep_their_level_and_traceback() -> None:
    fatal = {"levelname": "ERROR", "message": "EngineCore encountered a fatal error.", "exc_info": TRACEBACK}
    records = [{"levelname": "INFO", "message": "vLLM API server version 0.25.1"}, fatal]
    found = diagnose("".join(json.dumps(record) + "\n" for record in records))
    assert (found.died, found.exception, found.message) == (True, "ZeroDivisionError", "the cause")


def test_json_over_several_lines_is_read() -> None:
    text = "[\n" + each(SLOW_DEATH, '  {{\n    "textPayload": {json},\n    "insertId": "x"\n  }},') + "]\n"
    assert diagnose(text).exception == "ZeroDivisionError"


def test_text_with_commas_is_no_table() -> None:
    assert [line.text for line in read_lines("1, a b\n2, c d\nx, e f\n")] == ["1, a b", "2, c d", "x, e f"]
    never_closed = in_csv(SLOW_DEATH) + '9,"' + "x" * 2_000_000 + "\nlast\n"
    assert diagnose(never_closed).exception == "ZeroDivisionError"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_read_with_and_without_a_mark(encoding: str, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(SLOW_DEATH.replace("the cause", "the “cause”").encode(encoding))
    with log.open("rb") as file:
        assert diagnose(read_lines(file)).message == "the “cause”"
    assert diagnose(log.read_bytes()).message == "the “cause”"


ALIVE = BOOTED.replace("pid=7", "pid=17")
GATEWAY = 'Traceback (most recent call last):\n  File "/app/poll.py", line 3, in poll\nConnectionError: x\nKilled\n'


def of(container: str, text: str) -> str:
    return logged(f"{container} | ", text)


def test_another_container_in_the_log_is_no_server() -> None:
    assert diagnose(of("vllm-1", BOOTED) + of("gateway-1", GATEWAY)).died is False
    assert diagnose(of("vllm-1", SLOW_DEATH) + of("gateway-1", GATEWAY)).exception == "ZeroDivisionError"


@pytest.mark.parametrize("dead", [SLOW_DEATH, TRACEBACK])
def test_a_living_container_hides_no_death_of_another(dead: str) -> None:
    answers = ALIVE.splitlines()[-1] + "\n"
    for text in (of("a-1", dead) + of("b-1", ALIVE + answers * 5), of("b-1", ALIVE) + of("a-1", dead)):
        assert (diagnose(text).died, diagnose(text).exception) == (True, "ZeroDivisionError")


def test_a_reversed_log_of_one_second_is_in_a_wrong_order() -> None:
    lines = (BOOTED + logged("(EngineCore pid=9) ERROR 08-01 17:49:30 [core.py:39] ", TRACEBACK)).splitlines()
    found = diagnose("\n".join(reversed(lines)))
    assert (found.died, found.exception) == (None, None)
    assert "the oldest to the newest" in found.why


def test_a_reversed_shutdown_is_no_death() -> None:
    lines = recording("v0.20.2-sigterm-group").splitlines()
    assert diagnose("\n".join(reversed(lines))).died is None


def test_the_end_of_a_shutdown_alone_is_no_death() -> None:
    for lines in (60, 100):
        tail = recording("v0.20.2-sigint-group").splitlines()[-lines:]
        assert diagnose("\n".join(tail)).died is None


def test_an_unreadable_traceback_is_no_sign_of_life() -> None:
    escaped = html.escape(BOOTED + logged("(EngineCore pid=9) ERROR 08-01 17:50:00 [core.py:39] ", TRACEBACK))
    found = diagnose(escaped)
    assert found.died is None
    assert "no frames that can be read" in found.why
    assert diagnose(escaped + BOOTED.splitlines(keepends=True)[-1] * 3).died is False


def test_the_servers_release_counts_and_not_the_environments() -> None:
    environment = "Collecting environment information...\nvLLM Version: 0.20.2\n```\n"
    assert diagnose(environment + BOOTED).vllm_version == "0.25.1"


@pytest.mark.parametrize("line", ["Killed", "!!!!!!! Segfault encountered !!!!!!!"])
def test_an_indented_block_shows_the_same_death(line: str) -> None:
    assert diagnose(logged("    ", BOOTED + line)).died is True


def test_what_a_stopped_server_prints_is_no_death_in_a_pasted_text() -> None:
    text = recording("v0.20.2-sigterm-group")
    assert diagnose("".join(f"2026-11-20 stderr:\n{line}\n" for line in text.splitlines())).died is not True


# ── the earliest failure, of whatever kind ────────────────────────────────────────────────────────────────

WATCHDOG = (
    "[rank1]:[E801 17:49:40.1 ProcessGroupNCCL.cpp:1895] [PG ID 2 Rank 1] Process group watchdog thread terminated with "
    "exception: CUDA error: an illegal memory access was encountered\n"
)
TERMINATE = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: misaligned address\n"
TIMED_OUT = logged(
    FATAL.format(0),
    "EngineCore encountered a fatal error.\n"
    + TRACEBACK.replace("ZeroDivisionError: the cause", "TimeoutError: RPC call to execute_model timed out."),
)
LOST = "(EngineCore pid=9) ERROR 08-01 17:49:50 [m.py:1] Worker proc VllmWorker-1 died unexpectedly (exit code: {}), shutting down.\n"
CANCELLED = TIMED_OUT.replace("TimeoutError: RPC call to execute_model timed out.", "RuntimeError: cancelled")


@pytest.mark.parametrize(
    ("before", "exception", "message"),
    [
        ("", "TimeoutError", "RPC call to execute_model timed out."),
        (WATCHDOG, "c10::DistBackendError", "CUDA error: an illegal memory access was encountered"),
        (TERMINATE, "c10::Error", "CUDA error: misaligned address"),
        (LOST.format(-4), None, None),
        (TERMINATE * 2, "c10::Error", "CUDA error: misaligned address"),
        (
            logged("(Worker_TP1 pid=5) ERROR 08-01 17:49:50 [m.py:2] ", "WorkerProc hit an exception.\n" + TRACEBACK),
            "ZeroDivisionError",
            "the cause",
        ),
    ],
)
def test_a_timeout_is_a_consequence_of_an_earlier_failure(
    before: str, exception: str | None, message: str | None
) -> None:
    found = diagnose(BOOTED + before + TIMED_OUT)
    assert (found.died, found.exception, found.message) == (True, exception, message)
    assert found.lost_worker is (exception is None)


def test_an_exception_of_the_engine_explains_why_the_api_server_misses_it() -> None:
    raised = TRACEBACK.replace("execute_model", "get_simultaneous").replace("_process_engine_step", "x")
    dead = "(APIServer pid=7) ERROR 08-01 17:50:00 [async_llm.py:704] AsyncLLM output_handler failed.\n"
    found = diagnose(BOOTED + logged(FATAL.format(0), raised) + dead)
    assert (found.died, found.phase, found.exception) == (True, Phase.REQUEST, "ZeroDivisionError")
    survived = diagnose(BOOTED + logged(FATAL.format(0), raised) + DONE * 3 + dead)
    assert (survived.died, survived.exception) == (True, None)


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        ("-4", "SIGILL: an illegal instruction. On a CPU with AMX"),
        ("-9", "SIGKILL"),
        ("1", "code: 1"),
        ("None", "None"),
    ],
)
def test_the_exit_code_of_a_worker_is_the_cause(code: str, meaning: str) -> None:
    found = diagnose(BOOTED + LOST.format(code) + CANCELLED)
    assert (found.died, found.exception, meaning in found.why) == (True, None, True), found.why
    assert diagnose(BOOTED + LOST.format(code) + SLOW_DEATH.removeprefix(BOOTED)).exception == "ZeroDivisionError"
    failed = (
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -4}"
    )
    assert "SIGILL" in diagnose(BOOTED.splitlines()[0] + "\n(APIServer pid=7) " + failed + "\n").why


# ── the first engine, to 0.10 ─────────────────────────────────────────────────────────────────────────────

OLD_BOOT = """\
INFO 09-03 19:10:35 api_server.py:459] vLLM API server version 0.6.1
INFO 09-03 19:10:36 llm_engine.py:184] Initializing an LLM engine (v0.6.1) with config: model='m'
INFO:     Application startup complete.
"""
OLD_STEP = """\
Traceback (most recent call last):
  File "/x/site-packages/vllm/engine/async_llm_engine.py", line 42, in _log_task_completion
    return_value = task.result()
  File "/x/site-packages/vllm/engine/async_llm_engine.py", line 529, in run_engine_loop
    await asyncio.wait_for()
  File "/x/site-packages/vllm/worker/model_runner.py", line 1, in execute_model
    fail()
ZeroDivisionError: the cause
"""
OF_THE_SERVER = """
The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/x/site-packages/vllm/engine/async_llm_engine.py", line 52, in _log_task_completion
    raise AsyncEngineDeadError(
vllm.engine.async_llm_engine.AsyncEngineDeadError: Task finished unexpectedly. This should never happen!
"""
IN_PROCESS = logged("ERROR 09-03 19:12:00 async_llm_engine.py:63] ", "Engine background task failed\n" + OLD_STEP)
AS_REPR = logged("ERROR 09-03 19:12:00 engine.py:157] ", "ZeroDivisionError('the cause')\n" + OLD_STEP)
GONE = logged("ERROR 09-03 19:12:00 client.py:282] ", "RuntimeError('Engine process (pid 76) died.')\nNoneType: None")
NOT_STARTED = "RuntimeError: Engine process failed to start. See stack trace for the root cause.\n"
WORKER_KILLED = (
    "ERROR 09-03 19:12:00 multiproc_worker_utils.py:120] Worker VllmWorkerProcess pid 35 died, exit code: {}\n"
)
TOO_LATE = "ERROR 09-03 19:12:00 async_llm_engine.py:663] Engine iteration timed out. This should never happen!\n"
DEAD = "CRITICAL 09-03 19:12:01 launcher.py:99] MQLLMEngine is already dead, terminating server process\n"


@pytest.mark.parametrize(
    ("text", "died", "exception"),
    [
        (OLD_BOOT + IN_PROCESS, True, "ZeroDivisionError"),
        (OLD_BOOT + AS_REPR, True, "ZeroDivisionError"),
        (OLD_BOOT + OLD_STEP + OF_THE_SERVER, True, "ZeroDivisionError"),
        (OLD_BOOT + GONE, True, None),
        (OLD_BOOT + TOO_LATE, True, None),
        (OLD_BOOT + DEAD, True, None),
        (OLD_BOOT + WORKER_KILLED.format(-9), True, None),
        (OLD_BOOT + WORKER_KILLED.format(-15), False, None),
        (OLD_STEP, True, "ZeroDivisionError"),
        (OLD_STEP + OF_THE_SERVER, True, "ZeroDivisionError"),
        ("It crashed:\n\n\n\n" + GONE + DEAD, True, None),
        (
            OLD_BOOT.rpartition("INFO: ")[0] + AS_REPR.replace("run_engine_loop", "run_mp_engine") + NOT_STARTED,
            True,
            "ZeroDivisionError",
        ),
    ],
)
def test_deaths_of_the_first_engine(text: str, died: bool, exception: str | None) -> None:
    found = diagnose(text)
    assert (found.died, found.exception) == (died, exception), found.why
    if text.startswith(OLD_BOOT):
        assert found.vllm_version == "0.6.1"


DONE = 'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK\n'


@pytest.mark.parametrize("function", ["create_server_socket", "run_server", "from_engine_args"])
def test_a_pasted_traceback_of_a_server_that_did_not_start(function: str) -> None:
    lines = ['  File "/x/bin/vllm", line 10, in <module>', f'  File "/x/vllm/entrypoints/a.py", line 1, in {function}']
    text = "\n".join(["Traceback (most recent call last):", *lines, "OSError: [Errno 98] Address already in use"])
    assert (diagnose(text).died, diagnose(text).phase) == (True, Phase.BOOT)
    assert diagnose(text.replace(function, "validate")).died is None
