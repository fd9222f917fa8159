"""Real releases in the lab: #42085 in vLLM's scheduler; an engine that never goes idle."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Harness
from tests.live.lab_frames import assert_of_release
from tests.search.test_made_history import MAKE
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source

pytestmark = pytest.mark.live

SCENARIO = "sco-hybrid"


def test_the_second_long_prompt_walks_off_the_free_list(harness: Harness) -> None:
    done = harness("run", SCENARIO, "--server", "lab", "--vllm", "0.21.0", "--arm", "reported")
    assert done.status == 0, done.out + done.err
    report = done.report
    assert (report["verdict"], report["expected"], report["evidence"]) == (
        "reproduces",
        True,
        "lab",
    )
    trial = report["arms"][0]["trials"][0]
    assert (trial["outcome"], trial["phase"], trial["trigger"]["crossed"]) == (
        "crash",
        "request",
        True,
    )
    assert trial["requests"] == {"sent": 2, "ok": 1, "failed": 1}
    death = trial["death"]
    assert (death["exception"], death["message"], death["signature"]) == (
        "AssertionError",
        "",
        "match",
    )
    # No frame of the death is the plugin's.
    assert death["frames"][-3:] == [
        "vllm/v1/core/single_type_kv_cache_manager.py:allocate_new_blocks",
        "vllm/v1/core/block_pool.py:get_new_blocks",
        "vllm/v1/core/kv_cache_utils.py:popleft_n",
    ]
    assert_of_release(done, death["frames"], "0.21.0")
    # Computed from the request, and observed at the connector and the free list.
    computed, listed, short = trial["trigger"]["evidence"]
    assert computed.endswith(
        "the eager connector lists 26 blocks twice in one store event to 0.21.0"
    )
    assert "lists 80 blocks, 54 distinct" in listed
    assert short == "seen: 50 blocks are asked for, the counter says 106 and the free list has 34"
    replaced = [part["name"].rsplit(".", 1)[-1] for part in report["arms"][0]["server"]["replaced"]]
    assert replaced == ["DmaCopyBackend", "torch", "is_pin_memory_available", "get_num_free_blocks"]


def test_the_fixed_release_lives_with_the_boundary_crossed(harness: Harness) -> None:
    done = harness("run", SCENARIO, "--server", "lab", "--vllm", "0.24.0", "--arm", "reported")
    assert done.status == 0, done.out + done.err
    trial = done.report["arms"][0]["trials"][0]
    assert (trial["outcome"], trial["trigger"]["crossed"], trial["death"]) == ("clean", True, None)
    assert trial["trigger"]["evidence"][1].endswith("none lists a block twice")


@pytest.mark.by_hand  # about eight boots
def test_the_commit_of_the_fix_is_found_in_a_made_checkout(
    harness: Harness, tmp_path: Path
) -> None:
    for release in ("0.23.0", "0.24.0"):
        cached = provision(Source(release=release)).packages.parents[3]
    words = ["--old", "0.23.0", "--new", "0.24.0", "--apart", "vllm/v1/core/block_pool.py"]
    words += ["--text", "blocks_without_hash.append", "--releases", str(cached)]
    made = subprocess.run(
        [sys.executable, MAKE, tmp_path / "vllm", *words],
        check=True,
        capture_output=True,
        text=True,
    )
    (wanted,) = (one["commit"] for one in json.loads(made.stdout) if one["kind"] == "wanted")
    options = [
        "--server",
        "lab",
        "--arm",
        "small-cpu-pool",
        "--repo",
        str(tmp_path / "vllm"),
        "--find-fix",
        "--json",
    ]
    done = harness("bisect", SCENARIO, "--bad", "0.23.0", "--good", "0.24.0", *options)
    assert done.status == 0, done.out + done.err
    assert json.loads(done.out)["answer"] == wanted[:12]


def test_an_engine_that_answers_everything_never_comes_to_rest(harness: Harness) -> None:
    for _ in range(3):  # 1 of 9 boots on busy machines went idle
        done = harness(
            "run",
            "sco-lazy-never-rests",
            "--server",
            "lab",
            "--vllm",
            "0.32.0",
            "--arm",
            "reported",
        )
        (trial,) = done.report["arms"][0]["trials"]
        if trial["outcome"] != "clean":
            break
    assert done.status == 0, done.out + done.err
    assert (trial["outcome"], trial["death"], trial["during"]) == ("hang", None, "coming to rest")
    assert trial["requests"] == {"sent": 3, "ok": 3, "failed": 0}
    filled, seen = trial["trigger"]["evidence"]
    assert filled.endswith("the GPU's cache has 30, and the connector has room for 15")
    # Three requests store 36 blocks.
    events, blocks = (int(word) for word in re.findall(r"\d+", seen))
    assert min(events, blocks) > 100
