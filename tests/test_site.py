from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vllm_repro import site
from vllm_repro.catalogue import find
from vllm_repro.choice import Options, default_image
from vllm_repro.errors import InfraError
from vllm_repro.machine import Gpu
from vllm_repro.releases.localvllm import LocalVllm
from vllm_repro.servers.base import Evidence
from vllm_repro.site import ProcessSite

TQ = find("tq-chunked-prefill")


def test_the_reported_image_is_that_of_one_release() -> None:
    pasted = replace(TQ, command="docker run --gpus all reporter/vllm:mine --model Qwen/Qwen3.5-9B")
    assert default_image(pasted, TQ.try_with) == "reporter/vllm:mine"
    assert default_image(pasted, "0.24.0") == "vllm/vllm-openai:v0.24.0"
    assert default_image(TQ, TQ.try_with) == "vllm/vllm-openai:v0.23.0"


@pytest.mark.parametrize(
    ("here", "says"),
    [
        (None, "no vllm is installed here"),
        (LocalVllm(Path("/x/vllm"), "0.24.0"), "the vllm that is installed here is 0.24.0"),
    ],
)
def test_a_cpu_build_is_not_run_for_a_scenario_that_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, here: LocalVllm | None, says: str
) -> None:
    """It would be reported as evidence from a GPU."""
    monkeypatch.setattr(site, "gpus", lambda: (Gpu("H100", 80.0, 9.0, "580"),))
    monkeypatch.setattr(site, "local_vllm", lambda: here)
    with pytest.raises(InfraError, match=says):
        ProcessSite(Options(vllm="0.23.0"), TQ, lambda _: None)


def test_the_release_that_is_installed_here_is_run_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "gpus", lambda: (Gpu("H100", 80.0, 9.0, "580"),))
    monkeypatch.setattr(site, "local_vllm", lambda: LocalVllm(Path("/x/vllm"), "0.23.0+cu129"))
    here = ProcessSite(Options(vllm="0.23.0"), TQ, lambda _: None)
    assert here.evidence is Evidence.GPU
    assert here.launch(TQ, TQ.arms[0], 8000).argv[0] == "/x/vllm"
