from __future__ import annotations

import re

import pytest

from tests.diagnosis.recordings import DATA, REAL, inner, pasted, recording, seen, until
from vllm_repro_diagnosis.diagnosis import Phase, diagnose


def test_every_recording_has_its_line_in_the_table() -> None:
    assert {path.stem for path in (DATA / "recordings").glob("*.log")} == set(REAL)


@pytest.mark.parametrize("name", REAL)
def test_a_real_server(name: str) -> None:
    diagnosis = diagnose(recording(name))
    assert seen(diagnosis) == REAL[name], diagnosis.why
    assert diagnosis.why.endswith((".", ")"))
    if name != "v0.28.0-unknown-flag":
        assert diagnosis.vllm_version == name.split("-")[0].removeprefix("v")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tq-chunked-prefill", (True, Phase.REQUEST, "AssertionError", "_ensure_workspace_size")),
        ("tq-mtp-cudagraphs", (True, Phase.WARMUP, "RuntimeError", "_prefill_attention")),
        ("tq-mtp-cudagraphs-one-line", (True, Phase.WARMUP, "RuntimeError", "_prefill_attention")),
        ("sco-hybrid", (True, Phase.REQUEST, "AssertionError", "popleft_n")),
        ("sco-hybrid-with-prose", (True, Phase.REQUEST, "AssertionError", "popleft_n")),
        ("dsv4-tp2", (None, None, "AssertionError", None)),
    ],
)
def test_a_pasted_traceback(name: str, expected: tuple[bool | None, Phase | None, str | None, str | None]) -> None:
    assert seen(diagnose(pasted(name))) == expected


# ── what the wrappers hide ────────────────────────────────────────────────────────────────────────────────


def test_without_the_workers_lines_the_class_is_unknown_and_said_so() -> None:
    whole = diagnose(recording("v0.32.0-fault-workspace-mp-inflight"))
    assert whole.root is not None
    assert (whole.root.wrapped, whole.root.class_known) == (True, True)
    lines = recording("v0.32.0-fault-workspace-mp-inflight").splitlines()
    diagnosis = diagnose("\n".join(line for line in lines if "(Worker pid=" not in line))
    assert diagnosis.died is True
    assert diagnosis.root is not None
    assert (diagnosis.exception, diagnosis.root.wrapped, diagnosis.root.class_known) == ("RuntimeError", True, False)
    assert (diagnosis.message, diagnosis.frames) == (whole.message, ())
    assert "class is not in this log" in diagnosis.why


def test_the_first_exception_wins_over_the_one_in_the_cleanup() -> None:
    text = recording("v0.20.2-fault-workspace-uni-inflight")
    raw_end = text[text.index("(EngineCore pid=20488) Process EngineCore:") :]
    diagnosis = diagnose(raw_end)
    assert diagnosis.exception == "AssertionError"
    assert diagnosis.died is True


def test_only_a_log_that_holds_the_engines_lines_can_show_its_silence() -> None:
    silence, cut = "it printed nothing", "what it printed is not in this part of the log"
    assert silence in diagnose(recording("v0.32.0-killed-inflight")).why
    death = recording("v0.32.0-fault-workspace-mp-inflight")
    lines = death.splitlines()
    for part in (lines[-64:], [line for line in lines if "(EngineCore" not in line and "(Worker" not in line]):
        diagnosis = diagnose("\n".join(part))
        assert diagnosis.died is True
        assert cut in diagnosis.why
    torn = death.replace("EngineCore encountered a fatal error.", "EngineCore enc").replace("Error: W", "Err")
    assert silence not in diagnose(torn).why


def test_a_rank_that_lost_its_peer_is_not_the_root_when_the_peer_spoke() -> None:
    text = recording("v0.32.0-two-ranks-worker1-killed-head")
    own = recording("v0.28.0-min-tokens")
    block = "\n".join(line for line in own.splitlines() if "[multiproc_executor.py:1047]" in line)
    diagnosis = diagnose(text + "\n" + block.replace("Worker pid=", "Worker_TP1 pid="))
    assert (diagnosis.exception, inner(diagnosis)) == ("IndexError", "apply")


def test_ranks_that_repeat_the_traceback_are_one_death() -> None:
    text = recording("v0.28.0-min-tokens")
    block = [line for line in text.splitlines() if "[multiproc_executor.py:1047]" in line]
    again = "\n".join(line.replace("Worker pid=5822", "Worker_TP1 pid=5823") for line in block)
    assert seen(diagnose(again + "\n" + text)) == REAL["v0.28.0-min-tokens"]


# ── what is no death ──────────────────────────────────────────────────────────────────────────────────────


def test_refused_requests_with_whole_tracebacks_are_no_death() -> None:
    for name, end in (
        ("v0.20.2-boot", "(EngineCore pid=12461) INFO 11-20 08:20:16"),
        ("v0.29.0-sigterm", "[shutdown] API"),
    ):
        text = until(name, end)
        assert "Traceback" in text
        diagnosis = diagnose(text)
        assert (diagnosis.died, diagnosis.phase, diagnosis.exception) == (False, Phase.IDLE, None)
        assert "Nothing in this log shows that the engine died" in diagnosis.why


UNWELL = 'INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 503 Service Unavailable\n'
STOP = "(APIServer pid=9627) INFO 11-20 08:05:58 [launcher.py:254]"


@pytest.mark.parametrize("well", ["GET /health", "POST /v1/chat/completions"])
def test_an_unhealthy_answer_is_taken_back_by_a_later_good_one(well: str) -> None:
    alive = until("v0.32.0-boot", STOP)
    again = f'INFO:     127.0.0.1:1 - "{well} HTTP/1.1" 200 OK\n'
    assert diagnose(alive + UNWELL + again).died is False
    assert diagnose(UNWELL + alive).died is False
    whole = recording("v0.32.0-boot")
    assert seen(diagnose(alive + UNWELL + again + whole[len(alive) :])) == REAL["v0.32.0-boot"]


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("v0.32.0-fault-workspace-mp-inflight", "WorkerProc hit an exception.", "] AssertionError: Workspace"),
        ("v0.28.0-min-tokens", "WorkerProc hit an exception.", "] IndexError: "),
    ],
)
def test_a_log_that_ends_inside_the_engines_traceback_cannot_tell(name: str, first: str, last: str) -> None:
    lines = recording(name).splitlines()
    begin = next(at for at, line in enumerate(lines) if first in line)
    end = next(at for at, line in enumerate(lines) if last in line)
    assert diagnose("\n".join(lines[:begin])).died is False
    for at in range(begin + 1, end + 1):
        diagnosis = diagnose("\n".join(lines[:at]))
        assert diagnosis.died is None, at
        assert "ends inside a traceback that Worker prints" in diagnosis.why
    assert diagnose("\n".join(lines[: end + 1])).died is True
    answered = ['INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK'] * 3
    assert diagnose("\n".join([*lines[:end], *answered])).died is False, "its last line was lost, and it went on"


def test_a_refused_request_or_a_prompt_that_quotes_a_death_is_no_death() -> None:
    text = until("v0.32.0-boot", STOP)
    text += 'INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error\n'
    assert diagnose(text).died is False
    words = "prompt: 'what is EngineDeadError: EngineCore encountered a fatal error.'"
    assert diagnose(text + f"(APIServer pid=9627) INFO 11-20 08:05:58 [logger.py:1] {words}\n").died is False


def test_a_failed_utility_call_is_no_death() -> None:
    text = until("v0.32.0-boot", STOP)
    stamp = "(EngineCore pid=9998) ERROR 11-20 08:05:58 [core.py:1750] "
    record = [
        "Invocation of add_lora method failed",
        "Traceback (most recent call last):",
        '  File "/venv/site-packages/vllm/v1/engine/core.py", line 1748, in _invoke_utility_method',
        "    result = method()",
        '  File "/venv/site-packages/vllm/v1/worker/gpu_worker.py", line 9, in add_lora',
        "    load_model()",
        "ValueError: no such adapter",
    ]
    assert diagnose(text + "\n".join(stamp + line for line in record)).died is False


def test_progress_after_a_still_moment_is_no_hang() -> None:
    text = until("v0.32.0-hang", "(APIServer pid=7902) INFO 11-21 01:09:56 [launcher.py:254]")
    assert diagnose(text).died is None
    moving = re.sub(r"0\.0 tokens/s, Running: 2", "55.0 tokens/s, Running: 2", text.splitlines()[-1])
    diagnosis = diagnose(text + moving + "\n")
    assert (diagnosis.died, diagnosis.phase) == (False, Phase.REQUEST)


def test_neither_log_nor_exception() -> None:
    for text in ("", "\n\n", "hello\nworld", "a traceback would be nice"):
        assert diagnose(text).died is None


@pytest.mark.parametrize(
    "text",
    [
        "What does EngineDeadError mean?",
        "EngineDeadError: what does it mean?",
        "EngineCore encountered a fatal error. What is that?",
        'class EngineDeadError(Exception):\n    """Raised when the EngineCore dies. Unrecoverable."""\n',
        "-        raise EngineDeadError()\n+        pass\n",
    ],
)
def test_a_text_that_only_names_a_death_shows_none(text: str) -> None:
    assert diagnose(text).died is None


MESSENGER = (
    "Traceback (most recent call last):\n"
    '  File "/venv/site-packages/vllm/v1/engine/async_llm.py", line 849, in output_handler\n'
    "    outputs = await engine_core.get_output_async()\n"
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.\n"
)


@pytest.mark.parametrize("text", [MESSENGER, MESSENGER.splitlines()[-1], "    " + MESSENGER.replace("\n", "\n    ")])
def test_a_pasted_traceback_that_ends_in_the_messenger_is_a_death(text: str) -> None:
    assert diagnose("It stopped answering, and then this:\n\n" + text).died is True


@pytest.mark.parametrize(
    ("name", "prose"),
    [("v0.32.0-killed-idle", True), ("v0.28.0-min-tokens", False), ("v0.32.0-boot", True)],
)
def test_what_no_server_logged_is_kept_unless_an_exception_is(name: str, prose: bool) -> None:
    found = diagnose(f"{recording(name)}\nfirst\nkv_connector='X'\n")
    assert (found.prose.endswith("\nfirst\nkv_connector='X'"), bool(found.prose), found.connector) == (
        prose,
        prose,
        "X",
    )
    assert diagnose("first\n" + pasted("tq-chunked-prefill")).prose.startswith("first\n")


def test_a_refused_command_line_is_told_apart() -> None:
    diagnosis = diagnose(recording("v0.28.0-unknown-flag"))
    assert diagnosis.usage == "vllm: error: unrecognized arguments: --disable-log-requests"


def test_an_issue_with_a_few_log_lines_and_a_bare_traceback_is_a_paste() -> None:
    head = recording("v0.32.0-boot").splitlines()[:12]
    prose = [f"Sentence {number} of what the reporter thinks about it." for number in range(20)]
    text = "\n".join([*prose, *head, "", *pasted("sco-hybrid").splitlines()])
    assert seen(diagnose(text)) == (True, Phase.REQUEST, "AssertionError", "popleft_n")


# ── what the caller knows ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [name for name, (died, *_) in REAL.items() if died])
def test_a_death_stays_one_whoever_ended_the_rest(name: str) -> None:
    for we_terminated in (True, False):
        assert seen(diagnose(recording(name), we_terminated=we_terminated)) == REAL[name]


def test_a_container_that_restarts_is_judged_by_the_life_that_ended() -> None:
    clean, death = recording("v0.32.0-boot"), recording("v0.32.0-killed-worker")
    assert diagnose(clean + "\n" + death).died is True
    both = diagnose(recording("v0.28.0-min-tokens") + "\n" + clean)
    assert (both.died, both.exception) == (True, "IndexError")
    assert diagnose(clean + "\n" + clean).died is False


def renumbered(text: str, by: int) -> str:
    """Return the log with other process ids and times."""
    text = re.sub(r"pid=(\d+)", lambda found: f"pid={int(found[1]) + by}", text)
    return re.sub(r" (\d\d:\d\d):\d\d \[", rf" \1:{by % 60:02d} [", text)


def test_a_life_that_ended_without_a_word_is_said() -> None:
    alive = until("v0.32.0-boot", STOP)
    boot = until("v0.32.0-boot", "(APIServer pid=9627) INFO 11-20 08:03:18 [launcher.py:186]")
    for lives in (2, 3):
        for one in (alive, boot):
            diagnosis = diagnose("".join(renumbered(one, 50 * number) for number in range(lives)))
            assert diagnosis.died is None
            assert f"{lives} lives of a server, and number 1 ended without a reason" in diagnosis.why
    in_a_container = diagnose(alive + re.sub(r" 08:(\d\d:\d\d \[)", r" 09:\1", alive))
    assert "number 1 ended without a reason" in in_a_container.why
    stopped = recording("v0.32.0-boot")
    assert diagnose(stopped + renumbered(alive, 50)).died is False
    assert "number 2 ended" in diagnose(stopped + renumbered(alive, 50) + renumbered(alive, 90)).why


def test_two_servers_in_one_log_and_lines_written_twice_are_no_restart() -> None:
    alive = until("v0.32.0-boot", STOP).splitlines()
    other = renumbered("\n".join(alive), 50).splitlines()
    mixed = [line for pair in zip(alive, other, strict=True) for line in pair]
    assert diagnose("\n".join(mixed)).died is False
    assert diagnose("\n".join(line for line in alive for _ in range(2))).died is False


@pytest.mark.parametrize("head", ["[123.4] ", "Nov 20 08:24:30 host kernel: Memory cgroup "])
def test_the_kernels_word_that_it_killed_a_process_of_this_server_is_a_death(head: str) -> None:
    alive = until("v0.32.0-boot", STOP)
    words = "{}Out of memory: Killed process {} ({}) total-vm:1kB\n"
    diagnosis = diagnose(alive + words.format(head, 9998, "VLLM::EngineCor"))
    assert (diagnosis.died, diagnosis.phase) == (True, Phase.IDLE)
    assert "because memory ran out" in diagnosis.why
    assert diagnose(alive + words.format(head, 4, "VLLM::EngineCor")).died is None
    assert diagnose(alive + words.format(head, 4, "firefox")).died is False


ARGS = "(APIServer pid=1) INFO 11-25 10:00:00 [utils.py:233] non-default args: {'model': 'Qwen/Qwen3-32B', 'tensor_parallel_size': 2}\n"
DEEP_EP = """\
(Worker_TP0 pid=3) WARNING 11-25 10:00:20 [import_utils.py:409] Module deep_ep was found but failed to import
(Worker_TP0 pid=3) WARNING 11-25 10:00:20 [import_utils.py:409] Traceback (most recent call last):
(Worker_TP0 pid=3) WARNING 11-25 10:00:20 [import_utils.py:409]   File "/p/vllm/utils/import_utils.py", line 407, in _has_module
(Worker_TP0 pid=3) WARNING 11-25 10:00:20 [import_utils.py:409]     importlib.import_module(module_name)
(Worker_TP0 pid=3) WARNING 11-25 10:00:20 [import_utils.py:409] ImportError: libnvshmem_host.so.3: cannot open shared object file
"""
FAILED_START = """\
(Worker_TP1 pid=4) ERROR 11-25 10:00:40 [multiproc_executor.py:898] WorkerProc failed to start.
(Worker_TP1 pid=4) ERROR 11-25 10:00:40 [multiproc_executor.py:898] Traceback (most recent call last):
(Worker_TP1 pid=4) ERROR 11-25 10:00:40 [multiproc_executor.py:898]   File "/p/vllm/v1/worker/gpu_worker.py", line 400, in load_model
(Worker_TP1 pid=4) ERROR 11-25 10:00:40 [multiproc_executor.py:898]     self.model_runner.load_model()
(Worker_TP1 pid=4) ERROR 11-25 10:00:40 [multiproc_executor.py:898] torch.OutOfMemoryError: CUDA out of memory.
(EngineCore pid=2) ERROR 11-25 10:00:41 [core.py:1231] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-25 10:00:41 [core.py:1231] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-25 10:00:41 [core.py:1231]   File "/p/vllm/v1/engine/core.py", line 1080, in run_engine_core
(EngineCore pid=2) ERROR 11-25 10:00:41 [core.py:1231]     engine_core = EngineCoreProc(*args)
(EngineCore pid=2) ERROR 11-25 10:00:41 [core.py:1231] Exception: WorkerProc initialization failed due to an exception in a \
background process. See stack trace for root cause.
"""


@pytest.mark.parametrize("before", ["", DEEP_EP])
def test_a_traceback_that_was_logged_as_a_warning_is_no_root(before: str) -> None:
    found = diagnose(ARGS + before + FAILED_START)
    assert found.why.startswith("The engine did not come up: OutOfMemoryError in load_model")


@pytest.mark.parametrize(
    ("args", "connector"),
    [
        (ARGS, ""),
        (ARGS.replace("}", ", 'kv_transfer_config': KVTransferConfig(kv_connector='NixlConnector')}"), "NixlConnector"),
        (ARGS.replace("}", ""), None),  # a cut line
    ],
)
def test_complete_arguments_show_that_there_is_no_connector(args: str, connector: str | None) -> None:
    assert diagnose(args + FAILED_START).connector == connector
