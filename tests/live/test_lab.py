"""Real releases in the lab: #41726 dies in vLLM's own lines, or lives (1 min a boot)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Harness
from tests.live.lab_frames import assert_of_release, output_on_release

pytestmark = pytest.mark.live

SCENARIO = "tq-chunked-prefill"


def test_the_reported_command_dies_of_the_reported_sentence(harness: Harness) -> None:
    done = harness("run", SCENARIO, "--server", "lab", "--vllm", "0.23.0", "--arm", "reported")
    assert done.status == 0, done.out + done.err
    report = done.report
    assert (report["verdict"], report["expected"], report["evidence"]) == (
        "reproduces",
        True,
        "lab",
    )
    assert done.out.startswith("LAB: vLLM 0.23.0 on a CPU, with parts of it replaced")
    arm = report["arms"][0]
    trial = arm["trials"][0]
    assert (trial["outcome"], trial["phase"], trial["trigger"]["crossed"]) == (
        "crash",
        "request",
        True,
    )
    death = trial["death"]
    assert (death["exception"], death["signature"]) == ("AssertionError", "match")
    assert re.search(
        r"turboquant_attn\.py:\d+:_continuation_prefill' requires 16\.00 MB, current size is"
        r" 1\.02 MB",
        death["message"],
    )
    # No frame of the death is the plugin's.
    assert death["frames"][-3:] == [
        "vllm/v1/attention/backends/turboquant_attn.py:_continuation_prefill",
        "vllm/v1/worker/workspace.py:get_simultaneous",
        "vllm/v1/worker/workspace.py:_ensure_workspace_size",
    ]
    assert_of_release(done, death["frames"], "0.23.0")
    assert arm["server"]["kind"] == "lab"
    assert {part["name"].rsplit(".", 1)[-1] for part in arm["server"]["replaced"]} >= {
        "_tq_full_dequant_kv",
        "graph_capture",
    }
    assert all(
        len(part["sha256"]) == 64 and part["why"] and part["effect"]
        for part in arm["server"]["replaced"]
    )


def test_the_hole_in_the_reservation_and_its_fix(harness: Harness) -> None:
    done = harness(
        "run",
        "tq-prefix-hit-unreserved",
        "--server",
        "lab",
        "--vllm",
        "0.32.0",
        "--arm",
        "reported",
        "--arm",
        "patched",
    )
    assert done.status == 0, done.out + done.err
    arms = {arm["name"]: arm for arm in done.report["arms"]}
    dead, alive = arms["reported"]["trials"][0], arms["patched"]["trials"][0]
    assert (dead["outcome"], dead["death"]["signature"], dead["trigger"]["crossed"]) == (
        "crash",
        "match",
        True,
    )
    assert (alive["outcome"], alive["trigger"]["crossed"]) == ("clean", True)
    assert arms["reported"]["server"]["patched"] == []
    (changed,) = arms["patched"]["server"]["patched"]
    assert changed["file"] == "vllm/v1/attention/backends/turboquant_attn.py"
    assert changed["sha256"] != next(
        part["sha256"]
        for part in arms["reported"]["server"]["replaced"]
        if part["file"] == changed["file"]
    )


@pytest.mark.depends("search")
def test_the_replacements_write_and_read_what_the_kernels_do(tmp_path: Path) -> None:
    """Compare with vLLM's own Triton kernels in Triton's interpreter."""
    shown = output_on_release("0.23.0", "compare_kernels.py", tmp_path)
    found = dict(
        line.split(" ", 1)
        for line in shown.splitlines()
        if line.startswith(("turboquant_", "flash_"))
    )
    assert found == {
        "turboquant_4bit_nc": "same bytes, same keys and values, same answers",
        "turboquant_k3v4_nc": "same bytes, same keys and values, same answers",
        "turboquant_3bit_nc": "same bytes, same keys and values, same answers",
        "flash_attention": "same answers",
    }
