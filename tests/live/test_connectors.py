"""Real releases in the lab: scheduler crashes by KV connectors, and arms that live."""

from __future__ import annotations

import pytest

from tests.conftest import Harness
from tests.live.lab_frames import strange_frames
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source

pytestmark = pytest.mark.live

by_hand = pytest.mark.by_hand


@pytest.mark.parametrize(
    ("scenario", "vllm", "function"),
    [
        ("kv-abort-reported-twice", "0.32.0", "_update_from_kv_xfer_finished"),
        ("offloading-reset-running", "0.32.0", "build_connector_meta"),
        pytest.param(
            "multi-connector-second-report",
            "0.26.0",
            "_update_from_kv_xfer_finished",
            marks=by_hand,
        ),
        pytest.param("offloading-waiting-leaves", "0.26.0", "_build_store_jobs", marks=by_hand),
    ],
)
def test_the_scheduler_dies_of_its_own_assertion(
    harness: Harness, scenario: str, vllm: str, function: str
) -> None:
    done = harness("run", scenario, "--server", "lab", "--vllm", vllm, "--arm", "reported")
    assert done.status == 0, done.out + done.err
    (trial,) = done.report["arms"][0]["trials"]
    death = trial["death"]
    assert (trial["outcome"], death["exception"], death["signature"]) == (
        "crash",
        "AssertionError",
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
        ("kv-abort-reported-twice", "0.32.0", "near-miss", "untriggered"),
        ("kv-abort-reported-twice", "0.32.0", "guard", "clean"),
        ("kv-load-rejected", "0.33.0", "reported", "hang"),
        ("kv-load-rejected", "0.33.0", "synchronous", "clean"),
        ("kv-load-rejected", "0.33.0", "patched", "clean"),
        ("multi-connector-second-report", "0.26.0", "one-connector", "clean"),
        ("multi-connector-second-report", "0.26.0", "guard", "clean"),
        ("kv-load-rejected-cached", "0.33.0", "reported", "wrong-output"),
        ("nixl-mamba-preempted-for-ever", "0.33.0", "reported", "hang"),
        ("nixl-mamba-preempted-for-ever", "0.33.0", "patched", "clean"),
        ("offloading-waiting-leaves", "0.26.0", "near-miss", "untriggered"),
        ("offloading-waiting-leaves", "0.26.0", "no-offloading", "clean"),
        ("offloading-waiting-leaves", "0.27.0", "reported", "clean"),
        ("offloading-reset-running", "0.32.0", "plain-reset", "clean"),
        ("offloading-reset-running", "0.33.0", "reported", "clean"),
    ],
)
def test_how_an_arm_ends(
    harness: Harness, scenario: str, vllm: str, arm: str, outcome: str
) -> None:
    done = harness("run", scenario, "--server", "lab", "--vllm", vllm, "--arm", arm)
    (trial,) = done.report["arms"][0]["trials"]
    assert (trial["outcome"], done.status) == (outcome, 0), done.out + done.err
