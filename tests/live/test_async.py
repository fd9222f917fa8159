"""Real releases on a CPU: bugs of asynchronous scheduling, and wrong answers to embeddings."""

from __future__ import annotations

import pytest

from tests.conftest import Harness
from tests.live.lab_frames import strange_frames
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source

pytestmark = pytest.mark.live

by_hand = pytest.mark.by_hand


@pytest.mark.parametrize(
    ("scenario", "vllm", "exception", "function"),
    [
        ("async-streaming-stop", "0.29.0", "AssertionError", "_update_request_with_output"),
        pytest.param(
            *(
                "prompt-embeds-penalty-async",
                "0.32.0",
                "RuntimeError",
                "get_token_bin_counts_and_mask",
            ),
            marks=by_hand,
        ),
    ],
)
def test_asynchronous_scheduling_crashes_the_engine(
    harness: Harness, scenario: str, vllm: str, exception: str, function: str
) -> None:
    done = harness("run", scenario, "--server", "lab", "--vllm", vllm, "--arm", "reported")
    assert done.status == 0, done.out + done.err
    (trial,) = done.report["arms"][0]["trials"]
    death = trial["death"]
    assert (trial["outcome"], death["exception"], death["signature"]) == (
        "crash",
        exception,
        "match",
    )
    assert death["frames"][-1].endswith(f":{function}")
    assert (
        done.kept or strange_frames(death["frames"], provision(Source(release=vllm)).packages) == []
    )


@by_hand
@pytest.mark.parametrize(
    ("scenario", "vllm", "arm", "outcome"),
    [
        ("async-streaming-stop", "0.29.0", "sync", "clean"),
        ("async-streaming-stop", "0.29.0", "max-tokens-1", "clean"),
        ("async-streaming-stop", "0.29.0", "backport", "clean"),
        ("async-streaming-stop", "0.32.0", "reported", "clean"),
        ("prompt-embeds-penalty-async", "0.32.0", "sync", "clean"),
        ("prompt-embeds-penalty-async", "0.32.0", "near-miss", "untriggered"),
        ("prompt-embeds-penalty-async", "0.32.0", "patched", "clean"),
    ],
)
def test_what_lives(harness: Harness, scenario: str, vllm: str, arm: str, outcome: str) -> None:
    done = harness("run", scenario, "--server", "lab", "--vllm", vllm, "--arm", arm)
    (trial,) = done.report["arms"][0]["trials"]
    assert (trial["outcome"], done.status) == (outcome, 0), done.out + done.err


@by_hand
@pytest.mark.parametrize(
    ("arm", "outcome", "output"),
    [
        ("reported", "wrong-output", "wrong"),
        ("no-penalty", "clean", "alike"),
        ("patched", "clean", "alike"),
    ],
)
def test_a_penalty_reads_the_tokens_of_another_client(
    harness: Harness, arm: str, outcome: str, output: str
) -> None:
    done = harness(
        "run",
        "prompt-embeds-penalty-leak",
        "--server",
        "process",
        "--no-throughput",
        "--vllm",
        "0.32.0",
        "--arm",
        arm,
    )
    (trial,) = done.report["arms"][0]["trials"]
    assert (trial["outcome"], trial["output"], done.status) == (outcome, output, 0), (
        done.out + done.err
    )
