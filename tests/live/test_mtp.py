"""TurboQuant with vLLM's MTP drafter under the capture guard: 0.20.2 fails as reported."""

from __future__ import annotations

import pytest

from tests.conftest import Harness
from tests.live.lab_frames import assert_of_release

pytestmark = pytest.mark.live

GUARD = "vllm_repro_lab/"


def test_the_boot_dies_in_a_capture_of_the_reported_sentence(harness: Harness) -> None:
    done = harness(
        "run", "tq-mtp-cudagraphs", "--server", "lab", "--vllm", "0.20.2", "--arm", "reported"
    )
    assert done.status == 0, done.out + done.err
    assert (done.report["verdict"], done.report["evidence"]) == ("reproduces", "lab")
    arm = done.report["arms"][0]
    trial = arm["trials"][0]
    assert (trial["outcome"], trial["trigger"]["crossed"]) == ("crash", True)
    assert trial["phase"] in ("boot", "warmup")
    death = trial["death"]
    assert (death["exception"], death["signature"]) == ("RuntimeError", "match")
    assert trial["why"].startswith("RuntimeError in _prefill_attention: ")
    assert death["message"].startswith(
        "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor"
        " is pinned."
    )
    # The guard's frames stand where a CUDA build has C++.
    functions = [frame.rpartition(":")[2] for frame in death["frames"]]
    own = [frame for frame in death["frames"] if GUARD not in frame]
    assert own[-1].endswith("turboquant_attn.py:_prefill_attention")
    assert functions[-3:] == ["__torch_function__", "check_call", "refuse"]
    assert "profile_cudagraph_memory" in functions
    assert_of_release(done, own, "0.20.2")
    replaced = {part["name"]: part for part in arm["server"]["replaced"]}
    assert {
        "torch.cuda.graphs.graph",
        "vllm.v1.worker.cpu_worker.CPUWorker.determine_available_memory",
    } <= set(replaced)
    assert not [name for name in replaced if "_prefill_attention" in name]
