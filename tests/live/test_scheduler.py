"""Real releases in the lab without a model: bugs of requests that share a step."""

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
        ("offloading-two-groups", "0.23.0", "AssertionError", "update_state_after_alloc"),
        pytest.param(
            "offloading-two-groups",
            "0.21.0",
            "AssertionError",
            "update_state_after_alloc",
            marks=by_hand,
        ),
        pytest.param(
            "offloading-window-twice", "0.21.0", "KeyError", "_remove_pending_job", marks=by_hand
        ),
        pytest.param(
            "offloading-window-twice", "0.22.1", "KeyError", "_remove_pending_job", marks=by_hand
        ),
        pytest.param(
            "offloading-readmitted",
            "0.23.0",
            "AssertionError",
            "update_state_after_alloc",
            marks=by_hand,
        ),
        pytest.param(
            "nixl-mamba-prompt-twice", "0.22.1", "AssertionError", "schedule", marks=by_hand
        ),
        pytest.param(
            "nixl-mamba-prompt-twice", "0.28.0", "AssertionError", "schedule", marks=by_hand
        ),
    ],
)
def test_the_scheduler_dies(
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


@by_hand
@pytest.mark.parametrize(
    ("scenario", "vllm", "arm", "outcome"),
    [
        ("offloading-two-groups", "0.23.0", "no-prefix-caching", "clean"),
        ("offloading-two-groups", "0.23.0", "more-blocks", "untriggered"),
        ("offloading-two-groups", "0.24.0", "reported", "clean"),
        ("offloading-window-twice", "0.22.1", "more-room", "clean"),
        ("offloading-window-twice", "0.22.1", "no-offloading", "clean"),
        ("offloading-window-twice", "0.23.0", "reported", "clean"),
        ("offloading-readmitted", "0.23.0", "synchronous", "clean"),
        ("offloading-readmitted", "0.23.0", "delayed", "clean"),
        ("offloading-readmitted", "0.24.0", "reported", "clean"),
        ("nixl-mamba-prompt-twice", "0.28.0", "one-token-more", "clean"),
        ("nixl-mamba-prompt-twice", "0.28.0", "truncated-first", "clean"),
        ("nixl-mamba-prompt-twice", "0.29.0", "reported", "clean"),
    ],
)
def test_what_lives(harness: Harness, scenario: str, vllm: str, arm: str, outcome: str) -> None:
    done = harness("run", scenario, "--server", "lab", "--vllm", vllm, "--arm", arm)
    (trial,) = done.report["arms"][0]["trials"]
    assert (trial["outcome"], done.status) == (outcome, 0), done.out + done.err
