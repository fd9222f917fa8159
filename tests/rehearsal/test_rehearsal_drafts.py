"""TurboQuant with drafts under CUDA graphs, over the releases in which it shows differently."""

from __future__ import annotations

import pytest
from tests.rehearsal.rehearsal_process import DEAD_BODY, TINY, Start, in_order

FLAGS = (
    "--max-model-len", "4096", "--block-size", "32", "--max-num-batched-tokens", "4096", "--max-num-seqs", "1",
)  # fmt: skip
TURBOQUANT = ("--kv-cache-dtype", "turboquant_k8v4")
DRAFTS = ("--speculative-config", '{"method":"mtp","num_speculative_tokens":3}')
SEED = {**TINY, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256}
REFUSED = (
    "RuntimeError: Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
    "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
)


@pytest.mark.parametrize("version", ["0.20.0", "0.20.2", "0.20.2rc1.dev49+gabcdef012"])
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--kv-cache-dtype", "turboquant_4bit_nc"),
        ("--kv-cache-dtype", "turboquant_3bit_nc"),
        ("--speculative-config", '{"method":"mtp","num_speculative_tokens":1}'),
        ("--speculative-config", '{"method":"ngram","num_speculative_tokens":3}'),
        ("--no-enable-chunked-prefill",),
        ("--performance-mode", "interactivity", "--async-scheduling"),
        ("-cc.cudagraph_mode=FULL_DECODE_ONLY",),
    ],
)
def test_it_dies_while_graphs_are_captured(start: Start, version: str, flags: tuple[str, ...]) -> None:
    server = start(version, *FLAGS, *TURBOQUANT, *DRAFTS, *flags)
    assert server.exit_code() == 1
    in_order(
        server.log,
        "Using TURBOQUANT attention backend",
        "EngineCore failed to start.",
        "in determine_available_memory", "in profile_cudagraph_memory", "in _warmup_and_capture", "in _dummy_run",
        "in __call__", "in unified_attention_with_output", "in forward", "line 570, in _prefill_attention",
        "    qsl = query_start_loc.tolist()", REFUSED,
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): ",
    )  # fmt: skip
    assert "GPU KV cache size" not in server.log
    assert "Application startup complete" not in server.log


def test_a_worker_of_its_own_tells_it_first(start: Start) -> None:
    server = start("0.20.2", *FLAGS, *TURBOQUANT, *DRAFTS, executor="mp")
    assert server.exit_code() == 1
    wrapped = REFUSED.removeprefix("RuntimeError: ")
    in_order(
        server.log, "WorkerProc hit an exception.", REFUSED, REFUSED, "EngineCore failed to start.",
        f"RuntimeError: Worker failed with error '{wrapped}', please check the stack trace above for the root cause",
    )  # fmt: skip


@pytest.mark.parametrize("version", ["0.20.2", "0.21.0", "0.24.0"])
@pytest.mark.parametrize(
    "flags",
    [
        (*TURBOQUANT,),
        (*TURBOQUANT, *DRAFTS, "--enforce-eager"),
        (*TURBOQUANT, *DRAFTS, "--compilation-config.cudagraph_mode", "none"),
        (*DRAFTS,),
        (*DRAFTS, "--kv-cache-dtype", "fp8_e5m2"),
    ],
)
def test_who_lives_and_answers(start: Start, version: str, flags: tuple[str, ...]) -> None:
    server = start(version, *FLAGS, *flags).ready()
    answer = server.complete([300] * 100, max_tokens=24, temperature=0).json()["choices"][0]
    assert len(set(answer["text"].split())) > 5
    assert server.complete([301] * 500).status_code == 200


@pytest.mark.parametrize("version", ["0.21.0", "0.22.1", "0.23.0"])
def test_the_first_request_finds_nothing_locked(start: Start, version: str) -> None:
    server = start(version, *FLAGS, *TURBOQUANT, *DRAFTS, shape=SEED).ready()
    answer = server.complete([300] * 20)
    assert (answer.status_code, answer.text) == (500, DEAD_BODY)
    in_order(
        server.log, "in _decode_attention", "in get_simultaneous", "in _ensure_workspace_size",
        "AssertionError: Workspace is locked but allocation from 'turboquant_attn.py:879:_decode_attention' requires "
        "0.76 MB, current size is 0.00 MB. Workspace growth is not allowed after locking.",
    )  # fmt: skip


@pytest.mark.parametrize("version", ["0.24.0", "0.27.1", "0.32.0"])
def test_newer_releases_answer_with_one_token_over_and_over(start: Start, version: str) -> None:
    server = start(version, *FLAGS, *TURBOQUANT, *DRAFTS).ready()
    answer = server.complete([300] * 100, max_tokens=24, temperature=0).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    assert len(set(answer["text"].split())) == 1
    assert len(answer["text"].split()) == 24
    assert server.health() == 200


def test_the_engine_says_what_it_was_told(start: Start) -> None:
    log = start("0.23.0", *FLAGS, *DRAFTS).ready().log
    assert "speculative_config=SpeculativeConfig(method='mtp', model=None, num_spec_tokens=3)" in log
