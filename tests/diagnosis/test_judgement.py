"""A reviewed table of diagnoses: each sign of death after each part of a boot."""

from __future__ import annotations

import html
from collections.abc import Iterator
from itertools import product

from tests.diagnosis.logs import inner
from tests.golden_files import assert_golden
from vllm_repro_diagnosis.diagnosis import diagnose

API, CORE, WORKER = (
    "({} pid={}) {{}} 11-20 08:24:30 [a.py:1] ".format(*one)
    for one in (("APIServer", 1), ("EngineCore", 2), ("Worker", 3))
)
STATS = "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: {} tokens/s, Running: 2 reqs, Waiting: 0 reqs"
CORE_PY, RUNNER_PY = "vllm/v1/engine/core.py", "vllm/v1/worker/gpu_model_runner.py"
QUOTED = "Workspace is locked but allocation requires 16.00 MB"


def trace(prefix: str, headline: str, exception: str, *frames: str) -> str:
    """Return a traceback in which each line has the prefix. frames: `file function`."""
    lines = ["Traceback (most recent call last):"]
    for file, function in (frame.split() for frame in frames):
        lines += [f'  File "/x/site-packages/{file}", line 1, in {function}', "    call()"]
    return "\n".join(prefix + line for line in [*filter(None, [headline]), *lines, exception])


STEP = (f"{CORE_PY} run_busy_loop", f"{CORE_PY} step", f"{RUNNER_PY} execute_model")
BOOT = (f"{CORE_PY} run_engine_core", f"{RUNNER_PY} load_model")
RAW, SERVER = "(APIServer pid=1) ", "vllm/entrypoints/openai/api_server.py run_server"
LINKS = {
    "from": "The above exception was the direct cause of the following exception:",
    "during": "During handling of the above exception, another exception occurred:",
}
ERROR, WORKER_ERROR = CORE.format("ERROR"), WORKER.format("ERROR")
LINES = {
    "boot": API.format("INFO") + "vLLM API server version 0.32.0",
    "core": CORE.format("INFO") + "Initializing a V1 LLM engine",
    "ready": "(APIServer pid=1) INFO:     Application startup complete.",
    "200": 'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK',
    "500": 'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error',
    "503": 'INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 503 Service Unavailable',
    "stop": API.format("INFO") + "[shutdown] API server: shutdown triggered",
    "stopping": API.format("INFO") + "[shutdown] API server: waiting",
    "core-stop": CORE.format("INFO") + "[shutdown] EngineCore: trigger received signal",
    "worker-stop": WORKER.format("INFO") + "WorkerProc was terminated",
    "down": "(APIServer pid=1) INFO:     Shutting down",
    "draining": "(APIServer pid=1) INFO:     Waiting for connections to close. (CTRL+C to force quit)",
    "closed": "(APIServer pid=1) INFO:     Application shutdown complete.",
    "gone": API.format("ERROR") + "Engine core proc EngineCore_DP0 died unexpectedly.",
    "dead": "(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    "waited": trace(
        API.format("ERROR"),
        "",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        "vllm/v1/engine/async_llm.py generate",
    ),
    "fatal": ERROR + "EngineCore encountered a fatal error.",
    "failed": ERROR + "EngineCore failed to start.",
    "failed-4": "(APIServer pid=1) RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore_DP0': -4}",
    "worker-died": ERROR + "Worker proc VllmWorker-1 died unexpectedly, shutting down executor.",
    "worker-7": ERROR + "Worker VllmWorker-1 pid 3 died, exit code: -7",
    "worker-2": ERROR + "Worker VllmWorker-1 pid 3 died, exit code: -2",
    "worker-99": ERROR + "Worker VllmWorker-1 pid 3 died, exit code: -99",
    "dump": ERROR + "Dumping scheduler output for model execution: SchedulerOutput()",
    "native": "Fatal Python error: Segmentation fault",
    "shell": "Killed",
    "oom": "[1.0] Out of memory: Killed process 2 (VLLM::EngineCor) total-vm:1kB",
    "oom-other": "[1.0] Out of memory: Killed process 77 (python3) total-vm:1kB",
    "orphan": WORKER.format("INFO") + "Parent process exited, terminating worker",
    "usage": "vllm: error: unrecognized arguments: --x",
    "still": API.format("INFO") + STATS.format("0.0"),
    "moving": API.format("INFO") + STATS.format("55.0"),
    "wait": CORE.format("INFO") + "No available shared memory broadcast block found in 60 seconds.",
    "prose": "I do not know why.\nIt was there in the morning.",
    "said": "EngineCore encountered a fatal error.",
    "asks": "Why does it say: EngineCore failed to start",
    "names": "Then: EngineCore encountered an issue. See stack trace (above).",
    "step": trace(ERROR, "", "IndexError: index 5 is out of bounds", *STEP),
    "fatal-step": trace(
        ERROR,
        "EngineCore encountered a fatal error.",
        "IndexError: index 5 is out of bounds",
        *STEP,
    ),
    "worker-step": trace(
        WORKER_ERROR,
        "WorkerProc hit an exception.",
        f"AssertionError: {QUOTED}\nso it fails",
        "vllm/v1/executor/multiproc_executor.py worker_busy_loop",
        STEP[-1],
    ),
    "wrapper": trace(
        ERROR,
        "EngineCore encountered a fatal error.",
        f"RuntimeError: Worker failed with error '{QUOTED}', please check the stack trace above",
        *STEP[:2],
    ),
    "boot-error": trace(ERROR, "EngineCore failed to start.", "ValueError: no such weights", *BOOT),
    "boot-exit": trace(ERROR, "EngineCore failed to start.", "SystemExit: 1", *BOOT),
    "boot-eof": trace(ERROR, "EngineCore failed to start.", "EOFError", *BOOT),
    "warm-up": trace(ERROR, "", "ValueError: no blocks", *BOOT[:1], f"{RUNNER_PY} profile_run"),
    "program": trace(RAW, "", "OSError: port in use", SERVER),
    "program-logged": trace(API.format("ERROR"), "", "OSError: port in use", SERVER),
    **{
        f"program-{name}": "\n".join(
            [
                trace(RAW, "", "KeyError: 'x'", "vllm/utils.py get"),
                *(RAW, RAW + link, RAW),
                trace(RAW, "", "OSError: port in use", SERVER),
            ]
        )
        for name, link in LINKS.items()
    },
    "interrupt": trace(RAW, "", "KeyboardInterrupt", SERVER),
    "peer": trace(
        WORKER_ERROR,
        "",
        "RuntimeError: Connection closed by peer",
        "vllm/v1/executor/multiproc_executor.py worker_busy_loop",
        STEP[-1],
        "torch/distributed/c10d.py all_reduce",
    ),
    "rank": trace(
        WORKER_ERROR,
        "",
        "ValueError: " + "long " * 40,
        "vllm/v1/executor/multiproc_executor.py worker_busy_loop",
    ),
    "utility": trace(ERROR, "", "IndexError: no such request", f"{CORE_PY} get"),
    "old-worker": trace(ERROR, "", "IndexError: no such request", "vllm/worker/worker.py get"),
    "bare": trace("", "", "IndexError: index 5 is out of bounds", *STEP),
    "bare-program": trace("", "", "OSError: port in use", SERVER),
    "bare-other": trace("", "", "KeyError: 'x'", "vllm/utils.py get"),
    "bare-dead": trace(
        "",
        "",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        "vllm/v1/engine/async_llm.py generate",
    ),
    "assertion": trace(ERROR, "", "AssertionError", *STEP),
    "sentence": trace(ERROR, "", "ValueError: There is no block X.", *STEP),
    "unread": html.escape(trace(ERROR, "", "ValueError: no blocks", *STEP)),
    "old-cut": "\n".join(trace(ERROR.partition(") ")[2], "", "", *STEP).splitlines()[:-3]),
    "cut": "\n".join(trace(ERROR, "", "", *STEP).splitlines()[:-3]),
    "usage-old": "api_server.py: error: unrecognized arguments: --x",
    "still-all": API.format("INFO")
    + STATS.format("0.0").replace("Engine 000", "8 Engines Aggregated"),
    "handler": trace(
        API.format("ERROR"),
        "AsyncLLM output_handler failed.",
        "OverflowError: out of range",
        "vllm/v1/engine/async_llm.py output_handler",
    ),
    "worker-cut": "\n".join(
        trace(WORKER_ERROR, "WorkerProc hit an exception.", "", *STEP).splitlines()[:-3]
    ),
}
BEGINNINGS = ("", "boot core", "boot core ready 200")
ENDS = tuple(LINES)[4:]
SOME_TRACES = ("native", "oom", "orphan", "still", "step", "fatal-step", "wrapper", "peer", "cut")
PASTES = (
    "",
    "failed",
    "said",
    "said bare-other",
    "asks",
    "asks bare-other",
    "names",
    "bare",
    "bare bare-dead",
    "bare-program",
    "bare-other",
    "bare-dead",
    "native",
    "native bare",
    "bare-other names",
    "dead",
    "gone",
    "usage",
    "interrupt",
    "stop dead bare-other",
    "shell",
)
OTHERS = (
    *(
        "boot core ready 200 still still stop",
        "boot core ready 200 still stop",
        "boot core ready 200 wait wait",
        "boot core wait wait ready",
        "boot core ready 200 still-all still-all",
        "boot core ready 200 wait wait moving",
    ),
    *(
        "boot core ready 200 wait wait 200",
        "boot core ready 200 still 200",
        "boot core ready 200 moving",
        "boot core ready 200 wait wait stop down",
    ),
    *(
        "boot core ready 200 stop draining",
        "boot core ready 200 stop draining closed",
        "boot core ready 200 503 200",
        "boot core ready 200 503 down",
    ),
    *(
        "boot core ready 503 dead down",
        "boot core ready 503 down dead",
        "boot core ready 503 down worker-died",
        "boot core ready fatal worker-stop",
        "stopping down",
        "200 stopping down",
        "500 stop down",
        "200 stop down",
        "200 stop 500 down",
        "ready stop down",
        "core-stop down",
    ),
    *(
        "boot core ready worker-step fatal worker-died",
        "boot core ready worker-step wrapper dead down",
        "boot core ready peer rank fatal",
        "boot core ready peer worker-died",
    ),
    *(
        "boot core ready worker-died peer",
        "boot core ready worker-died step",
        "boot core ready worker-stop worker-died",
        "boot core ready worker-died worker-stop",
    ),
    *(
        "boot core ready 200 step 200 200 gone",
        "boot core ready 200 step 200 200 200 gone",
        "boot core ready 200 cut 200 200 200",
        "boot core ready 200 cut 200 200",
    ),
    *(
        "boot core ready native gone",
        "boot ready gone",
        "boot core cut gone",
        "boot-eof gone",
        "boot ready gone core",
        "boot core ready utility gone",
        "boot core ready 200 handler 500 down",
        "boot core ready 200 handler gone down",
        "boot core ready 200 fatal-step handler down",
        "boot core ready utility native",
        "boot core ready old-worker gone",
        "boot core ready 500 gone",
        "boot core ready 200 dump gone",
    ),
    *(
        "boot core worker-step failed",
        "boot core failed boot-error",
        "boot core boot-exit failed",
        "boot core program interrupt",
        "boot boot core ready 200 stop down boot core",
    ),
    *(
        "boot core ready core-stop gone stop",
        "boot core ready core-stop stop gone",
        "boot core ready oom stop",
        "boot core ready step oom",
    ),
)
TOLD = (
    "boot core ready",
    "boot core ready stop down",
    "boot core ready stop draining",
    "boot core ready gone",
    "stopping down",
    "boot core ready core-stop",
    "boot core ready orphan",
)


def row(names: str, we_terminated: bool | None = None) -> str:
    found = diagnose("\n".join(LINES[name] for name in names.split()), we_terminated=we_terminated)
    asked = "" if we_terminated is None else f" (we terminated: {we_terminated})"
    died = {True: "died", False: "lives", None: "undecided"}[found.died]
    facts = [
        died,
        found.phase,
        found.exception,
        inner(found),
        "worker lost" * found.lost_worker,
        "open" * found.open_end,
    ]
    return f"{names}{asked}\n    {', '.join(filter(None, facts))}: {found.why}"


def rows() -> Iterator[str]:
    for beginning, end in product(BEGINNINGS, ENDS):
        yield row(f"{beginning} {end}".strip())
    for stop, end in product(("stop", "core-stop"), ENDS[: ENDS.index("native")] + SOME_TRACES):
        yield row(f"boot core ready {stop} {end}")
        yield row(f"boot core ready {end} {stop}")
    yield from map(row, OTHERS)
    for paste in PASTES:
        yield row(f"prose {paste} prose")
    for names, told in product(TOLD, (True, False)):
        yield row(names, told)


def test_the_table_of_diagnoses() -> None:
    assert_golden("diagnoses.txt", "\n".join(rows()) + "\n")
