"""Table of known bugs: both sides of each boundary in releases, flags and requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rehearsal.engine import boot_rule
from rehearsal.log import traceback
from rehearsal.rules import RULES, Asked, Effect
from rehearsal.settings import Settings, read
from tests.rehearsal.rehearsal_process import TURBOQUANT

from vllm_repro.servers.site import IMITATED

DRAFTS = ("--speculative-config", '{"method":"mtp","num_speculative_tokens":3}')
EAGER, PIECEWISE = ("--enforce-eager",), ("-cc.cudagraph_mode=piecewise",)
UNCHUNKED = (*TURBOQUANT, "--no-enable-chunked-prefill")
BRANCH = "0.20.1rc1.dev12+g363ffa145"


def offload(size: int, **extra: bool) -> tuple[str, ...]:
    given = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": size, **extra},
    }
    return (
        "--block-size=256",
        "--max-model-len=128000",
        "--max-num-batched-tokens=16384",
        "--no-disable-hybrid-kv-cache-manager",
        f"--kv-transfer-config={json.dumps(given)}",
    )


LARGE, SMALL_POOL = 1 << 37, 1 << 32
OFFLOAD = offload(LARGE)


def settings(version: str, flags: tuple[str, ...], **shape: Any) -> Settings:
    env = {"VLLM_REHEARSAL_VERSION": version, "VLLM_REHEARSAL_SHAPE": json.dumps(shape)}
    return read(["serve", "m", *flags], env)


def deaths(given: Settings, **asked: Any) -> set[str]:
    """Return the issues whose boundary a request crosses."""
    usual: dict[str, Any] = {
        "prompt": 20,
        "cached": 0,
        "max_tokens": 8,
        "min_tokens": 0,
        "stop_token_ids": (),
    }
    request = Asked(settings=given, **{**usual, **asked})
    rules = (rule for rule in RULES if rule.effect is Effect.DIES and rule.applies(given))
    return {rule.issue.partition("#")[2] for rule in rules if rule.asked(request)}


@pytest.mark.parametrize(
    ("version", "flags", "request_of", "issues"),
    [
        # 41726: a continuation of more than 128 tokens, after a chunk or after cached blocks.
        ("0.23.0", TURBOQUANT, {"prompt": 256 + 128}, set()),
        ("0.23.0", TURBOQUANT, {"prompt": 256 + 129}, {"41726"}),
        ("0.21.0", TURBOQUANT, {"prompt": 64 + 129, "cached": 64}, {"41726"}),
        ("0.21.0", TURBOQUANT, {"prompt": 64 + 128, "cached": 64}, set()),
        ("0.23.0", (*TURBOQUANT, *EAGER), {"prompt": 1000}, set()),
        ("0.23.0", (*TURBOQUANT, "--kv-cache-dtype", "fp8"), {"prompt": 1000}, set()),
        ("0.24.0", TURBOQUANT, {"prompt": 1000}, set()),
        # 44053: without chunks, only after cached blocks.
        ("0.24.0", UNCHUNKED, {"prompt": 1000}, set()),
        ("0.32.0", UNCHUNKED, {"prompt": 64 + 129, "cached": 64}, {"44053"}),
        ("0.32.0", UNCHUNKED, {"prompt": 64 + 128, "cached": 64}, set()),
        # 42808: any request.
        ("0.21.0", (*TURBOQUANT, *DRAFTS), {}, {"42808"}),
        ("0.24.0", (*TURBOQUANT, *DRAFTS), {}, set()),
        ("0.21.0", (*TURBOQUANT, *DRAFTS, *PIECEWISE), {}, set()),
        # 41700: one branch, a prompt of more than 759 tokens.
        (BRANCH, (), {"prompt": 759}, set()),
        (BRANCH, (), {"prompt": 760}, {"41700"}),
        (BRANCH, EAGER, {"prompt": 760}, set()),
        ("0.20.1", (), {"prompt": 760}, set()),
        # 42085: an answer that fills the prompt's last block, or a CPU pool smaller than the GPU's.
        ("0.21.0", OFFLOAD, {"prompt": 90_109}, {"42085"}),
        ("0.21.0", OFFLOAD, {"prompt": 90_109, "max_tokens": 3}, set()),
        ("0.21.0", OFFLOAD, {"prompt": 90_112}, set()),
        ("0.21.0", (*OFFLOAD, "--num-gpu-blocks-override=50000"), {"prompt": 90_109}, set()),
        ("0.21.0", (*OFFLOAD, "--disable-hybrid-kv-cache-manager"), {"prompt": 90_109}, set()),
        ("0.21.0", offload(LARGE, lazy_offload=True), {"prompt": 90_109}, set()),
        ("0.22.0", OFFLOAD, {"prompt": 90_109}, set()),
        ("0.23.0", offload(SMALL_POOL), {"prompt": 90_117}, {"42085"}),
        ("0.24.0", offload(SMALL_POOL), {"prompt": 90_117}, set()),
        # 54195: min_tokens and a stop token beyond the vocabulary.
        ("0.28.0", (), {"min_tokens": 1, "stop_token_ids": (999_999,)}, {"54195"}),
        ("0.28.0", (), {"min_tokens": 1, "stop_token_ids": (5,)}, set()),
        ("0.28.0", (), {"stop_token_ids": (999_999,)}, set()),
        ("0.29.0", (), {"min_tokens": 1, "stop_token_ids": (999_999,)}, set()),
    ],
)
def test_boundaries(
    version: str, flags: tuple[str, ...], request_of: dict[str, Any], issues: set[str]
) -> None:
    assert deaths(settings(version, flags, kv_cache_tokens=145_274), **request_of) == issues


@pytest.mark.parametrize(
    ("version", "flags", "interval", "exception"),
    [
        ("0.20.2", (*TURBOQUANT, *DRAFTS), 1, "RuntimeError"),
        ("0.20.2", (*TURBOQUANT, *DRAFTS, *EAGER), 1, None),
        ("0.20.2", TURBOQUANT, 1, None),
        ("0.20.2", TURBOQUANT, 4, "NotImplementedError"),
        ("0.21.0", (*TURBOQUANT, *DRAFTS), 4, None),
        ("0.25.1", TURBOQUANT, 4, "ValueError"),
        ("0.27.0", TURBOQUANT, 4, None),
    ],
)
def test_boots_that_fail(
    version: str, flags: tuple[str, ...], interval: int, exception: str | None
) -> None:
    rule = boot_rule(settings(version, flags, full_attention_interval=interval))
    assert (rule.death.exception if rule and rule.death else None) == exception


def test_the_harness_knows_which_bugs_are_in_the_table() -> None:
    of_scenarios = {rule.issue for rule in RULES} - {
        "vllm-project/vllm#50709"
    }  # it only keeps two releases from booting
    assert of_scenarios == IMITATED


def test_every_stack_can_be_printed() -> None:
    for rule in RULES:
        if rule.death:
            assert len(traceback(rule.death.frames, rule.death.last_line)) >= 4
