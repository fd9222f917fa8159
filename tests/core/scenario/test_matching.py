"""Matching a death to a scenario, also when two share a signature."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vllm_repro.scenario.catalogue import all_scenarios, find
from vllm_repro.scenario.matching import matches, twins
from vllm_repro.scenario.scenario import Scenario
from vllm_repro_diagnosis.diagnosis import Diagnosis, diagnose
from vllm_repro_diagnosis.signature import How

CHUNKED, UNRESERVED, MIN_TOKENS = map(
    find, ("tq-chunked-prefill", "tq-prefix-hit-unreserved", "min-tokens-stop-ids")
)
DEATH = """\
Traceback (most recent call last):
  File "vllm/v1/attention/backends/turboquant_attn.py", line 600, in _prefill_attention
  File "vllm/v1/attention/backends/turboquant_attn.py", line 747, in _continuation_prefill
  File "vllm/v1/worker/workspace.py", line 110, in get_simultaneous
  File "vllm/v1/worker/workspace.py", line 157, in _ensure_workspace_size
AssertionError: Workspace is locked but allocation from \
'turboquant_attn.py:747:_continuation_prefill' requires \
16.00 MB, current size is 1.02 MB. Workspace growth is not allowed after locking.
"""


def dead_of(version: str | None) -> Diagnosis:
    return replace(diagnose(DEATH), vllm_version=version)


@pytest.mark.parametrize(
    ("version", "scenario"),
    [
        (None, CHUNKED),
        ("0.20.2rc1.dev35+g4845aee6b", CHUNKED),
        ("0.21.0", CHUNKED),
        ("0.23.0", CHUNKED),
        ("0.24.0", UNRESERVED),
        ("0.32.0", UNRESERVED),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_of_two_that_share_a_death_the_release_decides(
    version: str | None, scenario: object, turned: bool
) -> None:
    known = [CHUNKED, UNRESERVED, MIN_TOKENS][:: -1 if turned else 1]
    assert [(match.scenario, match.how) for match in matches(dead_of(version), known)] == [
        (scenario, How.MATCH)
    ]
    # A scenario whose twin is not known here is named all the same. No death matches nothing.
    assert [match.scenario for match in matches(dead_of(version), known[1:2])] == [UNRESERVED]
    assert matches(diagnose("INFO:     Application startup complete."), known) == []


PASTED = Path(__file__).parents[2] / "data" / "pasted"
SCO = find("sco-hybrid")


@pytest.mark.parametrize(
    ("version", "connector", "how", "against"),
    [
        ("0.21.0", "SimpleCPUOffloadConnector", How.MATCH, ""),
        ("0.21.0", None, How.MATCH, ""),
        (
            None,
            "NixlConnector",
            How.NEAR,
            "its KV connector is NixlConnector, not SimpleCPUOffloadConnector",
        ),
        ("0.28.0", None, How.NEAR, "0.28.0 is declared good"),
    ],
)
def test_what_contradicts_a_scenario_makes_it_near(
    version: str | None, connector: str | None, how: How, against: str
) -> None:
    config = f"kv_transfer_config=KVTransferConfig(kv_connector='{connector}')" if connector else ""
    found = diagnose(
        "INFO 08-21 08:30:00 [core.py:105] Initializing a V1 LLM engine"
        f" (v{version or '0'}) with config: {config}\n"
        + (PASTED / "sco-hybrid.txt").read_text(encoding="utf-8")
    )
    (match,) = matches(replace(found, vllm_version=version), [SCO])
    assert (found.connector, match.how, match.against) == (connector, how, against)


def test_what_keeps_the_engine_alive_is_told() -> None:
    (match,) = matches(dead_of("0.23.0"), [CHUNKED])
    assert match.lives_with == [
        "with --enforce-eager",
        "with --compilation-config.cudagraph_mode none",
    ]


def test_a_function_of_the_same_name_in_a_users_plugin_is_near() -> None:
    text = """\
Traceback (most recent call last):
  File "vllm/v1/worker/gpu_model_runner.py", line 1, in sample_tokens
  File "vllm/v1/worker/gpu_model_runner.py", line 2, in _sample
  File "vllm/v1/sample/sampler.py", line 3, in apply_logits_processors
  File "vllm/v1/sample/logits_processor/builtin.py", line 4, in apply
IndexError: index 191222 is out of bounds for dimension 1 with size 128256
"""
    assert [match.how for match in matches(diagnose(text), [MIN_TOKENS])] == [How.MATCH]
    own = text.replace("vllm/v1/sample/logits_processor/builtin.py", "/srv/my_bias.py")
    (match,) = matches(diagnose(own), [MIN_TOKENS])
    assert (match.how, match.against) == (How.NEAR, "it failed in my_bias.py, outside of vLLM")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            (
                "Workspace is locked but allocation from"
                " 'turboquant_attn.py:7:_continuation_prefill' requires 16 MB, current size is 1 MB"
            ),
            [CHUNKED.id],
        ),
        (
            (
                "Workspace is locked but allocation from 'b12x.py:354:_run_compressed_mla' requires"
                " 607.70 MB"
            ),
            [],
        ),
    ],
)
def test_prose_that_quotes_a_message_is_near_at_most(text: str, found: list[str]) -> None:
    got = matches(diagnose(text), all_scenarios())
    assert [(match.scenario.id, match.how, match.against) for match in got] == [
        (one, How.NEAR, "only the message agrees") for one in found
    ]


@pytest.mark.parametrize("path", sorted(PASTED.glob("*.txt")), ids=lambda path: path.stem)
def test_each_reported_death_is_its_own_scenario_and_no_other(path: Path) -> None:
    found = matches(diagnose(path.read_text(encoding="utf-8")), all_scenarios())
    (match,) = found
    assert path.stem.startswith(match.scenario.id)
    assert match.how is How.MATCH


def raised(exception: str, message: str, *functions: str) -> str:
    lines = ["EngineCore encountered a fatal error.", "Traceback (most recent call last):"]
    for function in ("run_engine_core", "schedule", *functions):
        lines += [f'  File "/v/vllm/v1/x.py", line 1, in {function}', f"    self.{function}()"]
    return "\n".join(
        f"(EngineCore pid=5) ERROR 11-20 08:13:11 [core.py:1142] {line}"
        for line in [*lines, f"{exception}: {message}"]
    )


@pytest.mark.parametrize(
    ("text", "scenario"),
    [
        # The neighbours of #42085: an ordinary shortage of blocks, and the race in the same
        # connector (#39702).
        (
            raised(
                "ValueError",
                "Cannot get 50 free blocks from the pool",
                "allocate_slots",
                "get_new_blocks",
            ),
            None,
        ),
        (
            raised("AssertionError", "Expected 512 hit tokens, got 0", "update_state_after_alloc"),
            None,
        ),
        # A copy that CUDA refuses in capture, made by somebody else's code.
        (
            raised(
                "RuntimeError",
                "Cannot copy between CPU and CUDA tensors during CUDA graph capture",
                "_suppress_token_ids",
            ),
            None,
        ),
        (
            raised(
                "AssertionError",
                "Workspace is locked but allocation from 'b12x.py:354:_run_compressed_mla' requires"
                " 607.70 MB, current size is 578.50 MB.",
                "_run_compressed_mla",
                "get_simultaneous",
                "_ensure_workspace_size",
            ),
            None,
        ),
        (
            raised(
                "AssertionError",
                "Workspace is locked but allocation from 'turboquant_attn.py:879:_decode_attention'"
                " requires 0.76 MB, current size is 0.00 MB.",
                "_decode_attention",
                "get_simultaneous",
                "_ensure_workspace_size",
            ),
            "tq-mtp-first-request",
        ),
    ],
)
def test_neighbours_are_not_taken_for_the_reported_deaths(text: str, scenario: str | None) -> None:
    diagnosis = diagnose(text)
    assert diagnosis.died
    exact = [
        match.scenario.id for match in matches(diagnosis, all_scenarios()) if match.how is How.MATCH
    ]
    assert exact == ([scenario] if scenario else [])


@pytest.mark.parametrize(
    ("scenario", "named"), [(CHUNKED, [UNRESERVED]), (UNRESERVED, [])], ids=["known", "later"]
)
def test_the_twin_of_a_scenario_is_named_beside_it(
    scenario: Scenario, named: list[Scenario]
) -> None:
    assert twins(scenario, [CHUNKED, UNRESERVED, MIN_TOKENS]) == named
