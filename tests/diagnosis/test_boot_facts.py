from __future__ import annotations

from pathlib import Path

import pytest

from vllm_repro.diagnosis.boot_facts import Observed, boot_facts, observed, scheduler_dump
from vllm_repro.diagnosis.log_text import read_lines

DATA = Path(__file__).parents[1] / "data"


def recording(name: str) -> str:
    return (DATA / "recordings" / name).read_text(encoding="utf-8", errors="replace")


@pytest.mark.parametrize(
    ("name", "version", "tokens"),
    [
        ("v0.20.2-boot.log", "0.20.2", 2_097_152),
        ("v0.28.0-sigterm.log", "0.28.0", 2_097_152),
        ("v0.32.0-boot.log", "0.32.0", 2_097_152),
        ("v0.32.0-two-ranks-worker1-killed-head.log", "0.32.0", 4_194_304),
    ],
)
def test_a_real_boot(name: str, version: str, tokens: int) -> None:
    facts = boot_facts(recording(name))
    assert (facts.vllm_version, facts.kv_cache_tokens) == (version, tokens)
    assert facts.enforce_eager is True
    assert facts.chunked_prefill is True
    assert facts.max_num_batched_tokens == 512
    assert facts.cudagraph_mode == "NONE"
    assert not facts.graphs_captured
    assert facts.ready
    assert facts.args["load_format"] == "dummy"


def test_what_a_platform_turned_off_is_off() -> None:
    """The API server logs before its platform does; EngineCore's own list comes after."""
    listed = "Initializing a V1 LLM engine (v0.32.0) with config: model='m', enable_prefix_caching=False, enable_chunked_prefill=False, x=1"
    facts = boot_facts(f"Chunked prefill is enabled with max_num_batched_tokens=4096.\n{listed}\n")
    assert (facts.chunked_prefill, facts.prefix_caching) == (False, False)
    assert boot_facts(recording("v0.32.0-boot.log")).prefix_caching is True


def test_a_headless_rank_names_its_version_too() -> None:
    facts = boot_facts(recording("v0.32.0-two-ranks-worker1-killed-rank1.log"))
    assert facts.vllm_version == "0.32.0"
    assert not facts.ready


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
        ("TQ hybrid: full-attention layers [3, 7, 11]", "tq_hybrid_layers", (3, 7, 11)),
        ("TQ hybrid: full-attention layers []", "tq_hybrid_layers", ()),
        ("GPU KV cache size: 145,274 tokens", "kv_cache_tokens", 145_274),
        (
            "CPU KV cache size: 2,097,152 tokens, Maximum concurrency for 8,192 tokens per request: 256.00x",
            "kv_cache_tokens",
            2_097_152,
        ),
        ("GPU + host KV cache size: 12 tokens", "kv_cache_tokens", 12),
        ("Graph capturing finished in 3 secs, took 0.21 GiB", "graphs_captured", True),
        ("Chunked prefill is enabled with max_num_batched_tokens=4096.", "max_num_batched_tokens", 4096),
        (
            "Model Runner V2 requires Triton; using the V1 model runner instead.",
            "runner_note",
            "Model Runner V2 requires Triton; using the V1 model runner instead.",
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
    ],
)
def test_single_lines(line: str, field: str, value: object) -> None:
    assert getattr(boot_facts(f"(EngineCore pid=1) INFO 11-20 08:24:30 [a.py:1] {line}"), field) == value


def test_a_prompt_size_that_is_no_statement_of_the_server() -> None:
    assert boot_facts('(APIServer pid=1) INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK') == boot_facts(
        ""
    )


def test_the_dump_of_a_real_death() -> None:
    requests = scheduler_dump(recording("v0.32.0-fault-workspace-mp-inflight.log"))
    assert [(one.computed, one.scheduled, one.new) for one in requests] == [
        (tokens, 1, False) for tokens in (111, 110, 109, 108)
    ]


def test_the_dump_of_an_issue() -> None:
    (request,) = scheduler_dump((DATA / "pasted" / "tq-chunked-prefill.txt").read_text(encoding="utf-8"))
    assert (request.computed, request.scheduled) == (4096, 3497)


def test_new_requests_and_a_dump_over_several_lines() -> None:
    text = """Dumping scheduler output for model execution: SchedulerOutput(
scheduled_new_reqs=[NewRequestData(req_id=cmpl-a,prompt_token_ids_len=700,mm_features=[],block_ids=([1],),
num_computed_tokens=256,lora_request=None)],
scheduled_cached_reqs=CachedRequestData(req_ids=['cmpl-b'],new_block_ids=[None],num_computed_tokens=[10],num_output_tokens=[1]),
num_scheduled_tokens={cmpl-a: 444, cmpl-b: 1}, total_num_scheduled_tokens=445, finished_req_ids=[])
"""
    assert [(one.request_id, one.computed, one.scheduled, one.new) for one in scheduler_dump(text)] == [
        ("cmpl-b", 10, 1, False),
        ("cmpl-a", 256, 444, True),
    ]


def test_no_dump() -> None:
    assert scheduler_dump(recording("v0.32.0-boot.log")) == ()
    assert scheduler_dump("SchedulerOutput( and nothing more") == ()


LOG = """\
(EngineCore pid=7) INFO 11-21 20:22:35 [offload.py:9] LAB observed store {"event": 3, "blocks": 80, "distinct": 54}
(EngineCore pid=7) INFO 11-21 20:22:35 [core.py:9] something else
(EngineCore pid=7) INFO 11-21 20:22:36 [offload.py:9] LAB observed store {"event": 4, "blo
(EngineCore pid=7) INFO 11-21 20:22:37 [offload.py:9] LAB observed free_list {"counter": 106}
"""


def test_observations_come_in_order_and_a_line_that_was_cut_is_left_out() -> None:
    assert observed(read_lines(LOG)) == (
        Observed("store", {"event": 3, "blocks": 80, "distinct": 54}),
        Observed("free_list", {"counter": 106}),
    )


def test_a_day_of_observations_stays_small() -> None:
    line = 'INFO x] LAB observed store {"event": 1}\n'
    assert len(observed(read_lines(line * 10_050))) == 10_000
