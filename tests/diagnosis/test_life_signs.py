"""Signs of life and death in a log, and facts of a boot."""

from __future__ import annotations

import pytest

from tests.diagnosis.logs import pasted, recording
from vllm_repro_diagnosis.boot_facts import (
    BootFacts,
    Observation,
    ScheduledChunk,
    SharedStep,
    boot_facts,
    observed,
    scheduler_dump,
    shared_steps,
)
from vllm_repro_diagnosis.life_signs import ServerLife, SignKind
from vllm_repro_diagnosis.log_text import read_lines
from vllm_repro_diagnosis.outside import Meaning

API = "(APIServer pid=1) INFO 11-20 08:24:30 [a.py:1] "
ANSWER = 'INFO:     1.2.3.4:5 - "POST /v1/completions HTTP/1.1" 200 OK'
CORE = "(EngineCore pid=2) ERROR 11-20 08:24:30 [core.py:1] "


def life_of(*lines: str) -> ServerLife:
    life = ServerLife()
    for line in read_lines("\n".join(lines)):
        life.feed(line)
    return life


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (CORE + "EngineCore encountered a fatal error.", SignKind.FATAL),
        (CORE + "EngineCore failed to start.", SignKind.BOOT_FAILED),
        (
            "(APIServer pid=1) RuntimeError: Engine core initialization failed. See above.",
            SignKind.BOOT_FAILED,
        ),
        (
            CORE + "Worker proc VllmWorker-1 died unexpectedly, shutting down executor.",
            SignKind.WORKER_DIED,
        ),
        (CORE + "Engine core proc EngineCore_DP0 died unexpectedly.", SignKind.ENGINE_GONE),
        (CORE + "AsyncLLM output_handler failed.", SignKind.ENGINE_DEAD),
        ("Fatal Python error: Segmentation fault", SignKind.NATIVE_CRASH),
        (API + "[shutdown] API server: shutdown triggered", SignKind.STOP_ASKED),
        ("INFO:     Shutting down", SignKind.SHUTDOWN),
        ("INFO:     Shutting down ", SignKind.SHUTDOWN),
        ("Killed ", Meaning.KILLED),
        ("EngineCore encountered a fatal error. ", SignKind.FATAL),
        (
            "[rank1]:[E8 P.cpp:1] watchdog thread terminated with exception: CUDA error",
            SignKind.NATIVE_CRASH,
        ),
        (
            'INFO:     1.2.3.4:5 - "GET /health HTTP/1.1" 503 Service Unavailable',
            SignKind.HEALTH_503,
        ),
        ('INFO:     1.2.3.4:5 - "POST /v1/completions HTTP/1.1" 500 x', SignKind.SERVER_ERROR),
    ],
)
def test_signs(line: str, kind: SignKind) -> None:
    assert set(life_of(line).first) == {kind}
    assert not life_of(API + f"prompt: '{line}'").first


@pytest.mark.parametrize(
    "line",
    [
        API + "    EngineCore failed to start.",
        "(APIServer pid=1)     EngineCore failed to start.",
        API.partition(") ")[2] + "    EngineCore failed to start.",
        API + "EngineCore failed to start.",
        API.replace("INFO", "DEBUG") + "EngineCore encountered a fatal error.",
        API + "EngineCore hit an exception: x",
        API + "Worker proc VllmWorker-1 died unexpectedly",
        API + "Engine core proc EngineCore_DP0 died unexpectedly.",
        API + "AsyncLLM output_handler failed.",
        API + "Fatal Python error: Segmentation fault",
        API + "x: watchdog thread terminated with exception: x",
        "EngineCore encountered a fatal error. What is that?",
        "Shutting down",
    ],
)
def test_a_line_that_quotes_a_sign_is_none(line: str) -> None:
    assert not life_of(line).first


HEAD, LOOP = "Traceback (most recent call last):", '  File "/x/y.py", line 1, in run_busy_loop'
OTHER = LOOP.replace("run_busy_loop", "f")
INFO = CORE.replace("ERROR", "INFO")


@pytest.mark.parametrize(
    ("prefix", "lines", "cut"),
    [
        # a request log quotes it
        *((prefix, [line], prefix is CORE) for prefix in (INFO, CORE) for line in (HEAD, LOOP)),
        (CORE, [HEAD, OTHER], True),
        (API.replace("INFO", "ERROR"), [HEAD, LOOP], False),
        ("", [HEAD, LOOP], True),
        ("", [HEAD, OTHER], False),
    ],
)
def test_a_traceback_of_an_engine_is_cut(prefix: str, lines: list[str], cut: bool) -> None:
    assert (life_of(*(prefix + line for line in lines)).cut_inside is not None) is cut


BOOT = API + "vLLM API server version 0.32.0"


@pytest.mark.parametrize(
    ("before", "line", "ended"),
    [
        ("x", BOOT, False),
        (ANSWER, BOOT, True),
        (ANSWER, "x", False),
        ("INFO:     Shutting down", BOOT, True),
        (CORE + "EngineCore failed to start.", BOOT, True),
        (BOOT, BOOT, False),
        (BOOT, BOOT.replace(":30", ":31"), True),
        (BOOT, BOOT.replace(":30", ":31").partition(") ")[2], False),
    ],
)
def test_a_server_that_begins_ends_the_one_before(before: str, line: str, ended: bool) -> None:
    assert life_of(before).ended_by(next(read_lines(line))) is ended


@pytest.mark.parametrize(("words", "number"), [("shutdown triggered", 2), ("waiting", 0)])
def test_a_stop_without_its_trigger_began_before_the_log(words: str, number: int) -> None:
    assert (
        life_of("x", f"{API}[shutdown] API server: {words}").line_of(SignKind.STOP_ASKED) == number
    )


def test_prose_is_kept_up_to_a_limit() -> None:
    assert life_of("(EngineCore pid=2) x", "INFO:     x", "y").prose == ["y"]
    assert len(life_of(*["x" * 15_000] * 4).prose) == 2
    quoting = life_of("x", "EngineCore failed to start", "x")
    assert (quoting.quoted, life_of("x").quoted) == (True, False)


@pytest.mark.parametrize(
    ("lines", "is_log"),
    [
        ([""], False),
        (["\n", "\n"], False),
        (["prose", "more prose", API + "x"], False),
        (["prose", API + "x"], True),
    ],
)
def test_a_text_is_a_log_only_with_lines_of_a_server(lines: list[str], is_log: bool) -> None:
    assert life_of(*lines).is_log is is_log


def stats(
    *,
    prompt: str = "0.0",
    generated: str = "0.0",
    running: int = 0,
    waiting: int = 0,
    engine: str = "Engine 000: ",
) -> str:
    return (
        f"{API}{engine}Avg prompt throughput: {prompt} tokens/s, "
        f"Avg generation throughput: {generated} tokens/s, "
        f"Running: {running} reqs, Waiting: {waiting} reqs"
    )


WAIT = API + "No available shared memory broadcast block found in 60 seconds."


@pytest.mark.parametrize(
    ("lines", "stalls", "busy"),
    [
        ([stats()], {"000": 0}, {"000": False}),
        ([stats(running=2)], {"000": 1}, {"000": True}),
        ([stats(waiting=1)], {"000": 1}, {"000": True}),
        ([stats(running=1, waiting=1)], {"000": 1}, {"000": True}),
        ([stats(prompt="9.0", running=2)], {"000": 0}, {"000": True}),
        ([stats(running=2), stats(running=2)], {"000": 2}, {"000": True}),
        (
            [stats(running=2), stats(running=2), stats(generated="55.0", running=2)],
            {"000": 0},
            {"000": True},
        ),
        (
            [stats(running=2), stats(running=2, engine="")],
            {"000": 1, "": 1},
            {"000": True, "": True},
        ),
        ([stats(running=2), ANSWER], {}, {"000": True}),
        ([API + "[shutdown] API server: shutdown triggered", stats(running=2)], {}, {}),
    ],
)
def test_requests_without_tokens_are_a_stall_until_tokens_come(
    lines: list[str], stalls: dict[str, int], busy: dict[str, bool]
) -> None:
    life = life_of(*lines)
    assert (life.stalls, life.busy, life.ready) == (stalls, busy, True)


@pytest.mark.parametrize(
    ("lines", "waits"),
    [
        ([WAIT], 1),
        ([WAIT, WAIT], 2),
        ([WAIT, stats(running=2)], 1),
        ([WAIT, stats(generated="1.0", running=2)], 0),
        ([WAIT, stats()], 0),
        ([WAIT, ANSWER], 0),
        ([WAIT, ANSWER.replace("200", "400")], 1),
        ([WAIT, ANSWER.replace("POST /v1/completions", "GET /health")], 1),
    ],
)
def test_processes_wait_until_a_token_comes(lines: list[str], waits: int) -> None:
    assert life_of(*lines).waits == waits


@pytest.mark.parametrize(
    ("lines", "killed"),
    [
        (["Killed", stats(generated="0.5")], False),
        (["Killed", stats(generated="0.0", running=2)], True),
        (["Name:  redis-0", "Killed"], False),
        (["Name:  redis-0", "", "Killed"], True),
        (["Name:  redis-0", INFO + "x", "Killed"], True),
        (["Killed", INFO + "x", "Name:  redis-0"], True),
        (["Killed", "Name:  redis-0"], False),
    ],
)
def test_a_report_counts_without_a_later_token_or_another_name(
    lines: list[str], killed: bool
) -> None:
    assert (Meaning.KILLED in life_of(*lines).first) is killed


@pytest.mark.parametrize(("answers", "line"), [(0, 0), (2, 0), (3, 2), (4, 3)])
def test_an_engine_survived_what_three_answers_follow(answers: int, line: int) -> None:
    assert life_of(API + "x", *[ANSWER] * answers).survived_until == line


@pytest.mark.parametrize("end", ["```", "</details>", API + "x"])
def test_the_environment_is_not_the_servers(end: str) -> None:
    quoted = ["Killed", "kv_connector='X'", end, "Killed", "kv_connector='Y'"]
    life = life_of("Collecting environment information...", *quoted)
    assert (life.first[Meaning.KILLED].line, life.connector) == (5, "Y")


def test_a_traceback_in_the_environment_is_no_prose() -> None:
    trace = [HEAD, '  File "/x/y.py", line 1, in run', "ValueError: no such tool"]
    assert (life_of("System Info", *trace).prose, life_of(*trace).prose) == ([], trace)


def test_facts_that_a_life_collects() -> None:
    life = life_of(
        API + "vLLM API server version 0.32.0",
        API.replace("INFO", "WARNING") + "Worker said 'kv_connector': 'NixlConnector'",
        "(Worker pid=3) INFO 11-20 08:24:30 [w.py:1] up",
        "(EngineCore pid=2) INFO 11-20 08:24:30 [core.py:1] up",
        CORE + "down",
    )
    processes = (life.booted, life.api_pid, life.first_engine_line, life.engine_error)
    assert processes == (True, 1, 4, True)
    assert life.pids == {1: "APIServer", 2: "EngineCore", 3: "Worker"}
    facts = (life.connector, life.headless, life.ready, life.usage)
    assert facts == ("NixlConnector", False, False, None)


UNWELL = ANSWER.replace("POST /v1/completions", "GET /health").replace("200", "503")
HEADLESS = "(MainProcess pid=1) INFO 11-20 08:24:30 [a.py:1] x"


@pytest.mark.parametrize(
    ("lines", "fact", "value"),
    [
        ([CORE + "x"], "engine_error", True),
        ([INFO + "x"], "engine_error", False),
        ([CORE.replace("ERROR", "CRITICAL") + "x"], "engine_error", True),
        (["x", "y"], "of_vllm", False),
        (["(X pid=2) x", "y"], "of_vllm", True),
        (["INFO 11-20 08:24:30 [a.py:1] x", "y"], "of_vllm", True),
        ([HEADLESS], "headless", True),
        (["vllm: error: a", "vllm serve: error: b"], "usage", "vllm: error: a"),
        ([UNWELL, BOOT], "first", {}),  # another server answered
    ],
)
def test_a_fact_of_a_life(lines: list[str], fact: str, value: object) -> None:
    assert getattr(life_of(*lines), fact) == value


def facts_of(text: str) -> BootFacts:
    return boot_facts(read_lines(text))


@pytest.mark.parametrize("version", ["0.20.2", "0.32.0"])
def test_a_real_boot(version: str) -> None:
    facts = facts_of(recording(f"v{version}-boot"))
    assert (facts.vllm_version, facts.kv_cache_tokens) == (version, 2_097_152)
    assert (facts.enforce_eager, facts.chunked_prefill, facts.ready) == (True, True, True)
    assert facts.max_num_batched_tokens == 512
    assert (facts.cudagraph_mode, facts.graphs_captured) == ("NONE", False)
    assert facts.args["load_format"] == "dummy"


# The API server logs before its platform does; EngineCore's list comes after.
TURNED_OFF = (
    "Chunked prefill is enabled with max_num_batched_tokens=4096.\n"
    "Initializing a V1 LLM engine (v0.32.0) with config: model='m', "
    "enable_prefix_caching=False, enable_chunked_prefill=False, x=1\n"
)
HEADLESS_RANK = recording("v0.32.0-two-ranks-worker1-killed-rank1")


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        (TURNED_OFF, "chunked_prefill", False),
        (TURNED_OFF, "prefix_caching", False),
        (recording("v0.32.0-boot"), "prefix_caching", True),
        (HEADLESS_RANK, "vllm_version", "0.32.0"),
        (HEADLESS_RANK, "ready", False),
    ],
)
def test_a_fact_of_a_boot(text: str, field: str, value: object) -> None:
    assert getattr(facts_of(text), field) == value


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        (
            "Using TURBOQUANT attention backend out of potential backends: ['TURBOQUANT'].",
            "attention_backend",
            "TURBOQUANT",
        ),
        ("Using HND KV cache layout for CPU_ATTN backend.", "attention_backend", "CPU_ATTN"),
        ("Using Flash Attention backend on V1 engine.", "attention_backend", "Flash Attention"),
        ("GPU + host KV cache size: 145,274 tokens", "kv_cache_tokens", 145_274),
        ("Graph capturing finished in 3 secs, took 0.21 GiB", "graphs_captured", True),
        (
            "Chunked prefill is enabled with max_num_batched_tokens=4096.",
            "max_num_batched_tokens",
            4096,
        ),
        (
            "Initializing a V1 LLM engine (v0.20.2rc1.dev35+g4845aee6b) with config: x",
            "vllm_version",
            "0.20.2rc1.dev35+g4845aee6b",
        ),
        (
            "compilation_config={'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>}",
            "cudagraph_mode",
            "FULL_AND_PIECEWISE",
        ),
        ("x enforce_eager=False, y", "enforce_eager", False),
        ("Resolved architecture: Qwen3MoeForCausalLM", "experts", True),
        ("Resolved architecture: DeepseekV4ForCausalLM", "experts", True),
        ("Resolved architecture: Qwen3ForCausalLM", "experts", False),
    ],
)
def test_single_lines(line: str, field: str, value: object) -> None:
    assert (
        getattr(facts_of(f"(EngineCore pid=1) INFO 11-20 08:24:30 [a.py:1] {line}"), field) == value
    )


DUMP = """\
Dumping scheduler output for model execution: SchedulerOutput(
scheduled_new_reqs=[NewRequestData(req_id=cmpl-a,prompt_token_ids_len=700,block_ids=([1],),
num_computed_tokens=256,lora_request=None)],
scheduled_cached_reqs=CachedRequestData(req_ids=['cmpl-b'],resumed_req_ids={'cmpl-b'},
new_block_ids=[None],num_computed_tokens=[10],num_output_tokens=[1]),
num_scheduled_tokens={cmpl-a: 444, cmpl-b: 1}, total_num_scheduled_tokens=445)
"""


@pytest.mark.parametrize(
    ("text", "chunks"),
    [
        (
            recording("v0.32.0-fault-workspace-mp-inflight"),
            [ScheduledChunk(tokens, 1) for tokens in (111, 110, 109, 108)],
        ),
        (pasted("tq-chunked-prefill"), [ScheduledChunk(4096, 3497)]),
        # New requests, and a dump over several lines.
        (DUMP, [ScheduledChunk(10, 1, resumed=True), ScheduledChunk(256, 444, new=True)]),
        (recording("v0.32.0-boot"), []),
        ("SchedulerOutput( and nothing more", []),
    ],
)
def test_the_dump_of_a_death(text: str, chunks: list[ScheduledChunk]) -> None:
    assert scheduler_dump(read_lines(text)) == tuple(chunks)


CORE_INFO = "(EngineCore pid=7) INFO 11-21 20:22:35 [offload.py:9] "
OBSERVED = f"""\
{CORE_INFO}LAB observed store {{"event": 3, "blocks": 80, "distinct": 54}}
{CORE_INFO}something else
{CORE_INFO}LAB observed store {{"event": 4, "blo
{CORE_INFO}LAB observed free_list {{"counter": 106}}
"""


def test_observations_come_in_order_without_cut_lines() -> None:
    assert observed(read_lines(OBSERVED)) == (
        Observation("store", {"event": 3, "blocks": 80, "distinct": 54}),
        Observation("free_list", {"counter": 106}),
    )


STEP = (
    CORE_INFO + "Iteration(4): {} context requests, {} context tokens, 1 generation requests, "
    "1 generation tokens, iteration elapsed time: 3.05 ms\n"
)
# the wording of newer releases
NEWER = STEP.replace("Iteration", "Engine 000: Iteration").replace("ms", "ms, CPU KV cache: 0.1%")


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (OBSERVED, None),
        (STEP.format(1, 512), ()),
        (STEP.format(0, 0), ()),
        (
            STEP.format(2, 1031) + STEP.format(1, 9) + STEP.format(3, 40),
            (SharedStep(2, 1031), SharedStep(3, 40)),
        ),
        (NEWER.format(2, 9), (SharedStep(2, 9),)),
    ],
)
def test_steps_with_several_prompts(text: str, steps: tuple[SharedStep, ...] | None) -> None:
    assert shared_steps(read_lines(text)) == steps


def test_facts_of_a_day_stay_small() -> None:
    line = 'INFO x] LAB observed store {"event": 1}\n'
    assert len(observed(read_lines(line * 10_050))) == 10_000
    assert len(shared_steps(read_lines(STEP.format(2, 9) * 10_050)) or ()) == 10_000


@pytest.mark.parametrize("text", ["{{'model': 'a'}}", "{[1]: 2}", "{'a': " * 400 + "}" * 400])
def test_arguments_that_are_no_dictionary_are_no_facts(text: str) -> None:
    assert (
        boot_facts(read_lines(f"INFO 01-01 00:00:00 [a.py:1] non-default args: {text}")).args == {}
    )
