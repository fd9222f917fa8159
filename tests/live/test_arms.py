"""Real releases on a CPU: how the engine dies of a bug, and how the arms around it end."""

from __future__ import annotations

import pytest

from tests.conftest import Harness
from tests.live.lab_frames import assert_of_release

pytestmark = pytest.mark.live

by_hand = pytest.mark.by_hand
UPDATE, FINISHED = "update_state_after_alloc", "_update_from_kv_xfer_finished"
PENALTY = "get_token_bin_counts_and_mask"
DEATHS = [
    ("async-streaming-stop", "0.29.0", "AssertionError", "_update_request_with_output"),
    ("kv-abort-reported-twice", "0.32.0", "AssertionError", FINISHED),
    ("offloading-reset-running", "0.32.0", "AssertionError", "build_connector_meta"),
    ("offloading-two-groups", "0.23.0", "AssertionError", UPDATE),
]
DEATHS_BY_HAND = [
    ("multi-connector-second-report", "0.26.0", "AssertionError", FINISHED),
    ("nixl-mamba-prompt-twice", "0.22.1", "AssertionError", "schedule"),
    ("nixl-mamba-prompt-twice", "0.28.0", "AssertionError", "schedule"),
    ("offloading-readmitted", "0.23.0", "AssertionError", UPDATE),
    ("offloading-two-groups", "0.21.0", "AssertionError", UPDATE),
    ("offloading-waiting-leaves", "0.26.0", "AssertionError", "_build_store_jobs"),
    ("offloading-window-twice", "0.21.0", "KeyError", "_remove_pending_job"),
    ("offloading-window-twice", "0.22.1", "KeyError", "_remove_pending_job"),
    ("prompt-embeds-penalty-async", "0.32.0", "RuntimeError", PENALTY),
]


@pytest.mark.parametrize(
    ("scenario", "vllm", "exception", "function"),
    [*DEATHS, *(pytest.param(*row, marks=by_hand) for row in DEATHS_BY_HAND)],
)
def test_the_engine_dies(
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
    assert_of_release(done, death["frames"], vllm)


def test_an_image_larger_than_the_cache_ends_the_boot(harness: Harness) -> None:
    words = ("--server", "process", "--vllm", "0.28.0", "--arm", "reported")
    done = harness("run", "image-larger-than-cache", *words)
    assert done.status == 0, done.out + done.err
    (trial,) = done.report["arms"][0]["trials"]
    death = trial["death"]
    assert (trial["outcome"], trial["phase"], death["signature"]) == ("crash", "boot", "match")
    assert "not reached: died at boot" in done.out


@pytest.mark.parametrize(
    ("scenario", "vllm", "outcomes"),
    [
        ("sco-hybrid", "0.21.0", {"reported": "crash", "near-miss-length": "untriggered"}),
        pytest.param(
            "multi-connector-second-report", "0.23.0", {"reported": "crash"}, marks=by_hand
        ),
        pytest.param(
            "sco-lazy-starves", "0.32.0", {"reported": "hang", "patched": "clean"}, marks=by_hand
        ),
        pytest.param(
            "sco-lazy-never-rests",
            "0.32.0",
            {"reported": "hang", "patched": "clean"},
            marks=by_hand,
        ),
    ],
)
def test_scenarios_of_the_lab_run_without_a_model(
    harness: Harness, scenario: str, vllm: str, outcomes: dict[str, str]
) -> None:
    arms = [word for arm in outcomes for word in ("--arm", arm)]
    done = harness("run", scenario, "--server", "scheduler", "--vllm", vllm, *arms)
    assert done.status == 0, done.out + done.err
    assert done.out.startswith("SCHEDULER ONLY: ")
    assert done.report["evidence"] == "scheduler"
    assert {arm["name"]: arm["trials"][0]["outcome"] for arm in done.report["arms"]} == outcomes


ENDS = [
    ("sco-hybrid", "lab", "0.21.0", "near-miss-length", "untriggered"),
    ("tq-chunked-prefill", "lab", "0.23.0", "near-miss-128", "untriggered"),
    ("cpu-drafts-top-k", "process", "0.32.0", "reported", "crash"),
    ("cpu-seed-in-two-steps", "process", "0.32.0", "reported", "crash"),
]
ENDS_BY_HAND = [
    ("cpu-drafts-top-k", "process", "0.29.0", "reported", "clean"),
    ("cpu-drafts-top-k", "process", "0.32.0", "patched", "clean"),
    ("cpu-seed-in-two-steps", "process", "0.32.0", "patched", "clean"),
    ("async-streaming-stop", "lab", "0.29.0", "backport", "clean"),
    ("async-streaming-stop", "lab", "0.29.0", "max-tokens-1", "clean"),
    ("async-streaming-stop", "lab", "0.29.0", "sync", "clean"),
    ("async-streaming-stop", "lab", "0.32.0", "reported", "clean"),
    ("image-larger-than-cache", "process", "0.28.0", "larger-cache", "clean"),
    ("image-larger-than-cache", "process", "0.29.0", "reported", "clean"),
    ("image-of-refused-request", "process", "0.32.0", "no-cache", "clean"),
    ("image-of-refused-request", "process", "0.32.0", "other-image", "clean"),
    ("image-of-refused-request", "process", "0.32.0", "reported", "wrong-output"),
    ("kv-abort-reported-twice", "lab", "0.32.0", "guard", "clean"),
    ("kv-abort-reported-twice", "lab", "0.32.0", "near-miss", "untriggered"),
    ("kv-load-rejected", "lab", "0.33.0", "patched", "clean"),
    ("kv-load-rejected", "lab", "0.33.0", "reported", "hang"),
    ("kv-load-rejected", "lab", "0.33.0", "synchronous", "clean"),
    ("kv-load-rejected-cached", "lab", "0.33.0", "reported", "wrong-output"),
    # CI also boots it in test_throughput
    ("min-tokens-stop-ids", "process", "0.29.0", "reported", "clean"),
    ("multi-connector-second-report", "lab", "0.26.0", "guard", "clean"),
    ("multi-connector-second-report", "lab", "0.26.0", "one-connector", "clean"),
    ("nixl-mamba-preempted-for-ever", "lab", "0.33.0", "patched", "clean"),
    ("nixl-mamba-preempted-for-ever", "lab", "0.33.0", "reported", "hang"),
    ("nixl-mamba-prompt-twice", "lab", "0.28.0", "one-token-more", "clean"),
    ("nixl-mamba-prompt-twice", "lab", "0.28.0", "truncated-first", "clean"),
    ("nixl-mamba-prompt-twice", "lab", "0.29.0", "reported", "clean"),
    ("offloading-readmitted", "lab", "0.23.0", "delayed", "clean"),
    ("offloading-readmitted", "lab", "0.23.0", "synchronous", "clean"),
    ("offloading-readmitted", "lab", "0.24.0", "reported", "clean"),
    ("offloading-reset-running", "lab", "0.32.0", "plain-reset", "clean"),
    ("offloading-reset-running", "lab", "0.33.0", "reported", "clean"),
    ("offloading-two-groups", "lab", "0.23.0", "more-blocks", "untriggered"),
    ("offloading-two-groups", "lab", "0.23.0", "no-prefix-caching", "clean"),
    ("offloading-two-groups", "lab", "0.24.0", "reported", "clean"),
    ("offloading-waiting-leaves", "lab", "0.26.0", "near-miss", "untriggered"),
    ("offloading-waiting-leaves", "lab", "0.26.0", "no-offloading", "clean"),
    ("offloading-waiting-leaves", "lab", "0.27.0", "reported", "clean"),
    ("offloading-window-twice", "lab", "0.22.1", "more-room", "clean"),
    ("offloading-window-twice", "lab", "0.22.1", "no-offloading", "clean"),
    ("offloading-window-twice", "lab", "0.23.0", "reported", "clean"),
    ("prompt-embeds-penalty-async", "lab", "0.32.0", "near-miss", "untriggered"),
    ("prompt-embeds-penalty-async", "lab", "0.32.0", "patched", "clean"),
    ("prompt-embeds-penalty-async", "lab", "0.32.0", "sync", "clean"),
    ("prompt-embeds-penalty-leak", "process", "0.32.0", "no-penalty", "clean, alike"),
    ("prompt-embeds-penalty-leak", "process", "0.32.0", "patched", "clean, alike"),
    ("prompt-embeds-penalty-leak", "process", "0.32.0", "reported", "wrong-output, wrong"),
    ("sco-hybrid", "lab", "0.21.0", "lazy", "clean"),
    # CI also boots it in the README's first command
    ("tq-chunked-prefill", "lab", "0.23.0", "eager", "clean"),
    # A prefix hit dies with the same message; a growing chat is another way to get one.
    ("tq-chunked-prefill", "lab", "0.23.0", "growing-chat", "crash"),
    # the shortest prompt that dies; the reported one is above
    ("tq-chunked-prefill", "lab", "0.23.0", "near-miss-129", "crash"),
    ("tq-chunked-prefill", "lab", "0.23.0", "prefix-hit", "crash"),
    # CI also boots it in test_causes
    ("tq-chunked-prefill", "lab", "0.24.0", "reported", "clean"),
]


@pytest.mark.parametrize(
    ("scenario", "server", "vllm", "arm", "end"),
    [*ENDS, *(pytest.param(*row, marks=by_hand) for row in ENDS_BY_HAND)],
)
def test_how_an_arm_ends(
    harness: Harness, scenario: str, server: str, vllm: str, arm: str, end: str
) -> None:
    """Compare the outcome and, if `end` names it, how the answers compare."""
    words = ("--server", server, "--vllm", vllm, "--arm", arm, "--no-throughput")
    done = harness("run", scenario, *words)
    (trial,) = done.report["arms"][0]["trials"]
    outcome, *output = end.split(", ")
    assert (trial["outcome"], done.status) == (outcome, 0), done.out + done.err
    assert output in ([], [trial["output"]]), trial["why"]
