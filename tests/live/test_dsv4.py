"""DeepSeek-V4 on two real ranks in the lab: both die of #41700 with the issue's numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Harness
from tests.live.lab_frames import assert_of_release, output_on_release
from vllm_repro.host.machine import cpu_flags
from vllm_repro.host.processes import session_members
from vllm_repro.trigger.sparse_prefill import Shapes, Sizes, prefill_bytes
from vllm_repro_diagnosis.boot_facts import observed
from vllm_repro_diagnosis.log_text import read_lines

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        "avx512_bf16" not in cpu_flags(),
        reason="vLLM's CPU build has its DeepSeek-V4 kernels only for processors with AVX512-BF16",
    ),
]

RELEASE = "0.32.0"

DEATH = "_forward_prefill' requires 21.80 MB, current size is 21.62 MB"


def test_the_branchs_shapes_crash_both_ranks_as_reported(harness: Harness) -> None:
    done = harness("run", "dsv4-tp2", "--server", "lab", "--vllm", RELEASE, "--arm", "branch")
    assert done.status == 0, done.out + done.err
    assert done.out.startswith(f"LAB: vLLM {RELEASE} on a CPU, with parts of it")
    report = done.report
    assert (report["verdict"], report["expected"], report["evidence"]) == (
        "reproduces",
        True,
        "lab",
    )
    arm = report["arms"][0]
    assert [one["imported"] for one in arm["server"]["patched"]] == [True]
    trial = arm["trials"][0]
    death = trial["death"]
    assert (trial["outcome"], death["signature"], death["ranks"]) == ("crash", "match", [0, 1])
    assert DEATH in death["message"]
    assert_of_release(done, death["frames"], RELEASE)

    logs = [done.run / name for name in (trial["log"], *trial["rank_logs"])]
    assert len(logs) == 2
    first_layer = Sizes(16384, 8192, 64 // 2, kinds=("sliding",))
    for log in logs:
        assert DEATH in log.read_text(encoding="utf-8")
        with log.open("rb") as lines:
            asked = [one.values for one in observed(read_lines(lines)) if one.kind == "prefill"]
        assert asked[-1]["bytes"] == prefill_bytes(Shapes.BRANCH, first_layer, asked[-1]["prompts"])
        assert asked[-1]["prompts"] == [1304]

    (stayed,) = trial["outlasted"]
    assert (stayed["rank"], stayed["silent"]) == (1, True)
    if done.kept:
        return  # its processes were those of another machine
    journal = (done.run / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    facts = next(
        entry["facts"] for entry in map(json.loads, journal) if entry["event"] == "server-started"
    )
    assert [session_members(node["pid"]) for node in (facts, *facts["ranks"])] == [[], []]


@pytest.mark.depends("search")
def test_the_replacements_do_what_the_kernels_do(tmp_path: Path) -> None:
    """Compare with vLLM's own kernels: Triton's in its interpreter, and the CPU's."""
    shown = output_on_release(RELEASE, "compare_deepseek_kernels.py", tmp_path)
    gathered, combined, answers = shown.splitlines()[-3:]
    assert gathered.startswith("0 of ")
    assert combined == "0 of 61440 indices differ"
    assert answers.startswith("0 of 1638400 answers differ")
