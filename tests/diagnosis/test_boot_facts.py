from __future__ import annotations

import pytest

from tests.diagnosis.logs import pasted, recording
from vllm_repro_diagnosis.boot_facts import (
    BootFacts,
    Observed,
    ScheduledChunk,
    SharedStep,
    boot_facts,
    observed,
    scheduler_dump,
    shared_steps,
)
from vllm_repro_diagnosis.log_text import read_lines


def facts_of(text: str) -> BootFacts:
    return boot_facts(read_lines(text))


def dump_of(text: str) -> tuple[ScheduledChunk, ...]:
    return scheduler_dump(read_lines(text))


@pytest.mark.parametrize("version", ["0.20.2", "0.32.0"])
def test_a_real_boot(version: str) -> None:
    facts = facts_of(recording(f"v{version}-boot"))
    assert (facts.vllm_version, facts.kv_cache_tokens) == (version, 2_097_152)
    assert (facts.enforce_eager, facts.chunked_prefill, facts.ready) == (True, True, True)
    assert facts.max_num_batched_tokens == 512
    assert (facts.cudagraph_mode, facts.graphs_captured) == ("NONE", False)
    assert facts.args["load_format"] == "dummy"


def test_what_a_platform_turned_off_is_off() -> None:
    """The API server logs before its platform does; EngineCore's own list comes after."""
    listed = "Initializing a V1 LLM engine (v0.32.0) with config: model='m', enable_prefix_caching=False, enable_chunked_prefill=False, x=1"
    facts = facts_of(f"Chunked prefill is enabled with max_num_batched_tokens=4096.\n{listed}\n")
    assert (facts.chunked_prefill, facts.prefix_caching) == (False, False)
    assert facts_of(recording("v0.32.0-boot")).prefix_caching is True


def test_a_headless_rank_names_its_version_too() -> None:
    facts = facts_of(recording("v0.32.0-two-ranks-worker1-killed-rank1"))
    assert (facts.vllm_version, facts.ready) == ("0.32.0", False)


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
        ("GPU + host KV cache size: 145,274 tokens", "kv_cache_tokens", 145_274),
        ("Graph capturing finished in 3 secs, took 0.21 GiB", "graphs_captured", True),
        (
            "Chunked prefill is enabled with max_num_batched_tokens=4096.",
            "max_num_batched_tokens",
            4096,
        ),
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
    assert (
        getattr(facts_of(f"(EngineCore pid=1) INFO 11-20 08:24:30 [a.py:1] {line}"), field) == value
    )


def test_the_dump_of_a_real_death() -> None:
    assert dump_of(recording("v0.32.0-fault-workspace-mp-inflight")) == tuple(
        ScheduledChunk(tokens, 1) for tokens in (111, 110, 109, 108)
    )
    assert dump_of(pasted("tq-chunked-prefill")) == (ScheduledChunk(4096, 3497),)


def test_new_requests_and_a_dump_over_several_lines() -> None:
    text = """Dumping scheduler output for model execution: SchedulerOutput(
scheduled_new_reqs=[NewRequestData(req_id=cmpl-a,prompt_token_ids_len=700,mm_features=[],block_ids=([1],),
num_computed_tokens=256,lora_request=None)],
scheduled_cached_reqs=CachedRequestData(req_ids=['cmpl-b'],resumed_req_ids={'cmpl-b'},new_block_ids=[None],num_computed_tokens=[10],num_output_tokens=[1]),
num_scheduled_tokens={cmpl-a: 444, cmpl-b: 1}, total_num_scheduled_tokens=445, finished_req_ids=[])
"""
    assert dump_of(text) == (
        ScheduledChunk(10, 1, resumed=True),
        ScheduledChunk(256, 444, new=True),
    )


def test_no_dump() -> None:
    assert dump_of(recording("v0.32.0-boot")) == ()
    assert dump_of("SchedulerOutput( and nothing more") == ()


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


STEP = """\
(EngineCore pid=7) INFO 11-21 20:22:35 [core.py:450] Iteration(4): {} context requests, {} context tokens, 1 generation requests, \
1 generation tokens, iteration elapsed time: 3.05 ms
(APIServer pid=5) INFO 11-21 20:22:35 [loggers.py:197] Engine 000: Iteration(5): 0 context requests, 0 context tokens, \
1 generation requests, 1 generation tokens, iteration elapsed time: 3.05 ms, CPU KV cache usage: 0.1%
"""


def test_steps_with_several_prompts_are_read_in_both_wordings() -> None:
    assert shared_steps(read_lines(LOG)) is None
    assert shared_steps(read_lines(STEP.format(1, 512))) == ()
    assert shared_steps(read_lines(STEP.format(2, 1031) + STEP.format(3, 40))) == (
        SharedStep(2, 1031),
        SharedStep(3, 40),
    )
    newer = (
        STEP.format(0, 0)
        .replace("0 context requests, 0 context", "2 context requests, 9 context")
        .splitlines()[1]
    )
    assert shared_steps(read_lines(newer)) == (SharedStep(2, 9),)
    assert len(shared_steps(read_lines(STEP.format(2, 9) * 10_050)) or ()) == 10_000


@pytest.mark.parametrize("text", ["{{'model': 'a'}}", "{[1]: 2}", "{'a': " * 400 + "}" * 400])
def test_arguments_that_are_no_dictionary_are_no_facts(text: str) -> None:
    assert (
        boot_facts(read_lines(f"INFO 01-01 00:00:00 [a.py:1] non-default args: {text}")).args == {}
    )
