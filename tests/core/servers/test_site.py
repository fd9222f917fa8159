from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.host.machine import Gpu
from vllm_repro.releases.local_vllm import LocalVllm
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.attach import AttachSite
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.lab import LabSite, SchedulerSite
from vllm_repro.servers.options import ServerOptions, default_image
from vllm_repro.servers.process import ProcessServer, ProcessSite
from vllm_repro.servers.rehearsal import RehearsalSite
from vllm_repro.servers.site import Offer, Site
from vllm_repro_diagnosis.evidence import Evidence

TQ = find("tq-chunked-prefill")
STOP_IDS = find("min-tokens-stop-ids")
H100 = Gpu(name="H100", memory_gb=80.0, capability=9.0, driver="580")
PATCHED = next(arm for arm in STOP_IDS.arms if arm.patches)


def test_the_reported_image_is_that_of_one_release() -> None:
    pasted = replace(TQ, command="docker run --gpus all reporter/vllm:mine --model Qwen/Qwen3.5-9B")
    assert default_image(pasted, TQ.try_with) == "reporter/vllm:mine"
    assert default_image(pasted, "0.24.0") == "vllm/vllm-openai:v0.24.0"
    assert default_image(TQ, TQ.try_with) == "vllm/vllm-openai:v0.23.0"


@pytest.mark.parametrize(
    ("here", "message"),
    [
        (None, "no vllm is installed here"),
        (LocalVllm(Path("/x/vllm"), "0.24.0"), "the vllm that is installed here is 0.24.0"),
    ],
)
def test_a_cpu_build_is_not_run_for_a_scenario_that_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, here: LocalVllm | None, message: str
) -> None:
    """A CPU build must not be reported as evidence from a GPU."""
    monkeypatch.setattr("vllm_repro.servers.process.gpus", lambda: (H100,))
    monkeypatch.setattr("vllm_repro.servers.process.local_vllm", lambda: here)
    with pytest.raises(InfraError, match=message):
        ProcessSite(ServerOptions(vllm=Source(release="0.23.0")), TQ, lambda _: None)


def test_the_release_that_is_installed_here_is_run_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm_repro.servers.process.gpus", lambda: (H100,))
    monkeypatch.setattr(
        "vllm_repro.servers.process.local_vllm", lambda: LocalVllm(Path("/x/vllm"), "0.23.0+cu129")
    )
    here = ProcessSite(ServerOptions(vllm=Source(release="0.23.0")), TQ, lambda _: None)
    assert here.evidence is Evidence.GPU
    assert here.launch(TQ, TQ.arms[0], 8000).argv[0] == "/x/vllm"


@pytest.mark.parametrize(
    ("version", "cards", "evidence"),
    [
        ("0.28.0", (H100,), Evidence.GPU),
        ("0.28.0+cpu", (H100,), Evidence.CPU),
        ("0.28.0", (), Evidence.CPU),
    ],
)
def test_an_installed_vllm_is_evidence_of_what_it_runs_on(
    monkeypatch: pytest.MonkeyPatch, version: str, cards: tuple[Gpu, ...], evidence: Evidence
) -> None:
    monkeypatch.setattr("vllm_repro.servers.process.gpus", lambda: cards)
    monkeypatch.setattr(
        "vllm_repro.servers.process.local_vllm", lambda: LocalVllm(Path("/x/vllm"), version)
    )
    assert ProcessSite(ServerOptions(), STOP_IDS).evidence is evidence
    if cards:
        assert ProcessSite(ServerOptions(), TQ).evidence is evidence


def test_the_lab_refuses_a_processor_that_lacks_its_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deepseek, options = find("dsv4-tp2"), ServerOptions()
    monkeypatch.setattr("vllm_repro.servers.lab.cpu_flags", lambda: frozenset({"avx512f"}))
    with pytest.raises(Unsupported, match="only for processors with avx512_bf16"):
        LabSite(options, deepseek).prepare(print)
    assert LabSite.offer(deepseek, options, missing="", download=True) == Offer(
        False, "the lab needs a processor with avx512_bf16 for it"
    )
    assert LabSite.offer(TQ, options, missing="", download=True).accepted
    monkeypatch.setattr(
        "vllm_repro.servers.lab.cpu_flags", lambda: frozenset({"avx512f", "avx512_bf16"})
    )
    assert LabSite.offer(deepseek, options, missing="", download=True).accepted


def test_without_a_model_only_bugs_of_the_scheduler_run() -> None:
    options = ServerOptions(vllm=Source(release="0.21.0"))
    hybrid = find("sco-hybrid")
    site = SchedulerSite(options, hybrid)
    launch = site.launch(hybrid, hybrid.arms[0], 1)
    assert (launch.kind, launch.evidence) == (ServerKind.SCHEDULER, Evidence.SCHEDULER)
    assert (launch.env["REPRO_LAB_MECHANISM"], launch.env["REPRO_LAB_EVIDENCE"]) == (
        "scheduler",
        "SCHEDULER ONLY",
    )
    assert launch.differences[0].startswith("SCHEDULER ONLY: ")
    assert site.cannot(hybrid.arms[0]) == ""
    with pytest.raises(UsageError, match="needs a model"):
        SchedulerSite(options, TQ)
    assert not SchedulerSite.offer(hybrid, ServerOptions(), missing="", download=True).accepted


def test_without_a_model_nothing_is_timed_in_seconds() -> None:
    leaves = find("kv-abort-reported-twice")
    site = SchedulerSite(ServerOptions(), leaves)
    assert "the request 'leaves' comes or leaves after a time" in site.cannot(leaves.arms[0])


REHEARSAL = RehearsalSite(ServerOptions(), STOP_IDS)
ATTACHED = AttachSite(ServerOptions(url="http://127.0.0.1:1"), STOP_IDS, rehearsal=False)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (REHEARSAL, "a rehearsal runs no vLLM, so there is no source"),
        (ATTACHED, "that already runs cannot be changed"),
    ],
)
def test_an_arm_that_changes_the_source_says_where_it_can_run(
    tmp_path: Path, where: Site, message: str
) -> None:
    assert where.cannot(STOP_IDS.arms[0]) == ""
    launch, server = where.server(STOP_IDS, PATCHED, 1, tmp_path / "log", "run")
    assert not any("patched" in difference for difference in launch.differences), (
        "nothing was laid over anything"
    )
    with pytest.raises(Unsupported, match=message) as refused:
        asyncio.run(server.start())
    assert "docker, process or the lab" in str(refused.value)


def installed(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> ProcessSite:
    """Return the site of a `vllm` on PATH whose `sampling_params.py` contains `text`."""
    (folder / "packages" / "vllm").mkdir(parents=True)
    (folder / "packages" / "vllm" / "__init__.py").touch()
    (folder / "packages" / PATCHED.patches[0].file).write_text(text, encoding="utf-8")
    (folder / "vllm").write_text(f"#!{sys.executable}\n", encoding="utf-8")
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(folder / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(folder / "packages"))
    monkeypatch.setattr(
        "vllm_repro.servers.process.local_vllm", lambda: LocalVllm(folder / "vllm", "0.28.0")
    )
    return ProcessSite(ServerOptions(), STOP_IDS, lambda _: None)


def test_an_installed_vllm_runs_with_the_patched_file_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = installed(tmp_path, PATCHED.patches[0].was, monkeypatch)
    assert here.cannot(PATCHED) == ""
    launch, server = here.server(STOP_IDS, PATCHED, 1, tmp_path / "log", "run")
    assert isinstance(server, ProcessServer)
    assert server.patched == here.patched_source(PATCHED).digests
    first, *others = launch.env["PYTHONPATH"].split(":")
    assert (Path(first) / PATCHED.patches[0].file).read_text(encoding="utf-8") == PATCHED.patches[
        0
    ].now
    assert others[-1] == str(tmp_path / "packages"), "the caller's own path stays"
    assert launch.argv[:2] == (str(tmp_path / "vllm"), "serve")
    assert any(
        difference.startswith("patched vllm/sampling_params.py: ")
        for difference in launch.differences
    )
    plain = here.launch(STOP_IDS, STOP_IDS.arms[0], 8000)
    assert not {"PYTHONPATH", "REPRO_PATCHED"} & plain.env.keys()


def test_a_patch_that_does_not_fit_boots_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = installed(tmp_path, "VERSION = 1\n", monkeypatch)
    assert "the patch does not fit this release" in here.cannot(PATCHED)


def test_a_patch_without_a_vllm_package_is_infra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = installed(tmp_path, PATCHED.patches[0].was, monkeypatch)
    (tmp_path / "vllm").write_text("#!/bin/sh\n", encoding="utf-8")
    _, server = here.server(STOP_IDS, PATCHED, 1, tmp_path / "log", "run")
    with pytest.raises(InfraError, match="its Python does not find a package vllm"):
        asyncio.run(server.start())
