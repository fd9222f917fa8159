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
from vllm_repro_diagnosis.log_text import read_lines


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


def test_what_a_platform_turned_off_is_off() -> None:
    """The API server logs before its platform does; EngineCore's list comes after."""
    facts = facts_of(
        "Chunked prefill is enabled with max_num_batched_tokens=4096.\n"
        "Initializing a V1 LLM engine (v0.32.0) with config: model='m', "
        "enable_prefix_caching=False, enable_chunked_prefill=False, x=1\n"
    )
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


CORE = "(EngineCore pid=7) INFO 11-21 20:22:35 [offload.py:9] "
OBSERVED = f"""\
{CORE}LAB observed store {{"event": 3, "blocks": 80, "distinct": 54}}
{CORE}something else
{CORE}LAB observed store {{"event": 4, "blo
{CORE}LAB observed free_list {{"counter": 106}}
"""


def test_observations_come_in_order_without_cut_lines() -> None:
    assert observed(read_lines(OBSERVED)) == (
        Observation("store", {"event": 3, "blocks": 80, "distinct": 54}),
        Observation("free_list", {"counter": 106}),
    )


STEP = (
    CORE + "Iteration(4): {} context requests, {} context tokens, 1 generation requests, "
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
