from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.scenario_texts import arm_of
from vllm_repro.command.container import ContainerSpec
from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.host.machine import Gpu
from vllm_repro.releases.local_vllm import LocalVllm
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.servers.attach import AttachSite
from vllm_repro.servers.kinds import KINDS, ServerKind
from vllm_repro.servers.lab import LabSite, SchedulerSite
from vllm_repro.servers.launch import (
    CONTAINER_MODEL,
    FIRST_RUNNER,
    Launch,
    ServedModel,
    container_launch,
    process_launch,
)
from vllm_repro.servers.options import (
    ServerOptions,
    default_image,
    lacking,
    needs_of,
    tiny_model_of,
    weights_for,
)
from vllm_repro.servers.process import ProcessServer, ProcessSite
from vllm_repro.servers.rehearsal import RehearsalSite
from vllm_repro.servers.site import Offer, Site, choose, site_class
from vllm_repro.tiny_model import TinyModel
from vllm_repro_diagnosis.evidence import EVIDENCE, Evidence

TQ, SCO, DSV4 = find("tq-chunked-prefill"), find("sco-hybrid"), find("dsv4-tp2")
STOP_IDS = find("min-tokens-stop-ids")
H100 = Gpu(name="H100", memory_gb=80.0, capability=9.0, driver="580")
PATCHED = next(arm for arm in STOP_IDS.arms if arm.patches)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the GPUs and the installed vLLM of this machine."""

    def set_machine(*cards: Gpu, vllm: str | None) -> None:
        installed = LocalVllm(Path("/x/vllm"), vllm) if vllm else None
        for module in ("process", "site"):
            monkeypatch.setattr(f"vllm_repro.servers.{module}.gpus", lambda: cards)
        monkeypatch.setattr("vllm_repro.servers.process.local_vllm", lambda: installed)

    return set_machine


def test_the_reported_image_is_that_of_one_release() -> None:
    pasted = replace(TQ, command="docker run --gpus all reporter/vllm:mine --model Qwen/Qwen3.5-9B")
    assert default_image(pasted, TQ.try_with) == "reporter/vllm:mine"
    assert default_image(pasted, "0.24.0") == "vllm/vllm-openai:v0.24.0"
    assert default_image(TQ, TQ.try_with) == "vllm/vllm-openai:v0.23.0"


@pytest.mark.parametrize(
    ("vllm", "message"),
    [
        (None, "no vllm is installed here"),
        ("0.24.0", "the vllm that is installed here is 0.24.0"),
    ],
)
def test_a_cpu_build_is_not_run_for_a_scenario_that_needs_a_gpu(
    here: Callable[..., None], vllm: str | None, message: str
) -> None:
    """A CPU build must not be reported as evidence from a GPU."""
    here(H100, vllm=vllm)
    with pytest.raises(InfraError, match=message):
        ProcessSite(ServerOptions(vllm=Source(release="0.23.0")), TQ, lambda _: None)


def test_the_release_that_is_installed_here_is_run_on_the_gpu(here: Callable[..., None]) -> None:
    here(H100, vllm="0.23.0+cu129")
    site = ProcessSite(ServerOptions(vllm=Source(release="0.23.0")), TQ, lambda _: None)
    assert site.evidence is Evidence.GPU
    assert site.launch(TQ, TQ.arms[0], 8000).argv[0] == "/x/vllm"


@pytest.mark.parametrize(
    ("version", "cards", "evidence"),
    [
        ("0.28.0", (H100,), Evidence.GPU),
        ("0.28.0+cpu", (H100,), Evidence.CPU),
        ("0.28.0", (), Evidence.CPU),
    ],
)
def test_an_installed_vllm_is_evidence_of_what_it_runs_on(
    here: Callable[..., None], version: str, cards: tuple[Gpu, ...], evidence: Evidence
) -> None:
    here(*cards, vllm=version)
    assert ProcessSite(ServerOptions(), STOP_IDS).evidence is evidence
    if cards:
        assert ProcessSite(ServerOptions(), TQ).evidence is evidence


def test_the_lab_refuses_a_processor_that_lacks_its_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ServerOptions()
    monkeypatch.setattr("vllm_repro.servers.lab.cpu_flags", lambda: frozenset({"avx512f"}))
    with pytest.raises(Unsupported, match="only for processors with avx512_bf16"):
        LabSite(options, DSV4).prepare(print)
    assert LabSite.offer(DSV4, options, missing="", download=True) == Offer(
        False, "the lab needs a processor with avx512_bf16 for it"
    )
    assert LabSite.offer(TQ, options, missing="", download=True).accepted
    monkeypatch.setattr(
        "vllm_repro.servers.lab.cpu_flags", lambda: frozenset({"avx512f", "avx512_bf16"})
    )
    assert LabSite.offer(DSV4, options, missing="", download=True).accepted


def test_without_a_model_only_bugs_of_the_scheduler_run() -> None:
    options = ServerOptions(vllm=Source(release="0.21.0"))
    site = SchedulerSite(options, SCO)
    launch = site.launch(SCO, SCO.arms[0], 1)
    assert (launch.kind, launch.evidence) == (ServerKind.SCHEDULER, Evidence.SCHEDULER)
    lab = {"REPRO_LAB_MECHANISM": "scheduler", "REPRO_LAB_EVIDENCE": "SCHEDULER ONLY"}
    assert launch.env.items() >= lab.items()
    assert launch.differences[0].startswith("SCHEDULER ONLY: ")
    assert site.why_not(SCO.arms[0]) == ""
    with pytest.raises(UsageError, match="needs a model"):
        SchedulerSite(options, TQ)
    assert not SchedulerSite.offer(SCO, ServerOptions(), missing="", download=True).accepted


def test_without_a_model_nothing_is_timed_in_seconds() -> None:
    leaves = find("kv-abort-reported-twice")
    why = SchedulerSite(ServerOptions(), leaves).why_not(leaves.arms[0])
    assert "the request 'leaves' comes or leaves after a time" in why


REHEARSAL = RehearsalSite(ServerOptions(), STOP_IDS)
ATTACHED = AttachSite(ServerOptions(url="http://127.0.0.1:1"), STOP_IDS, rehearsal=False)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (REHEARSAL, "a rehearsal runs no vLLM, so there is no source"),
        (ATTACHED, "that already runs cannot be changed"),
    ],
)
def test_an_arm_with_a_patch_reports_where_it_can_run(
    tmp_path: Path, where: Site, message: str
) -> None:
    assert where.why_not(STOP_IDS.arms[0]) == ""
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
    assert here.why_not(PATCHED) == ""
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
    why = installed(tmp_path, "VERSION = 1\n", monkeypatch).why_not(PATCHED)
    assert "the patch does not fit this release" in why


def test_a_patch_without_a_vllm_package_is_infra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = installed(tmp_path, PATCHED.patches[0].was, monkeypatch)
    (tmp_path / "vllm").write_text("#!/bin/sh\n", encoding="utf-8")
    _, server = here.server(STOP_IDS, PATCHED, 1, tmp_path / "log", "run")
    with pytest.raises(InfraError, match="its Python does not find a package vllm"):
        asyncio.run(server.start())


ON_GPUS = [
    TQ,
    SCO,
    DSV4,
    *map(find, ("tq-mtp-cudagraphs", "tq-mtp-first-request", "tq-prefix-hit-unreserved")),
]
DUMMY = ServerOptions(weights="dummy")
SMALL = Gpu(name="RTX 4060", memory_gb=8.0, capability=8.9, driver="580")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))


@pytest.mark.parametrize("scenario", ON_GPUS, ids=lambda scenario: scenario.id)
def test_dummy_weights_have_the_reported_attention(scenario: Scenario) -> None:
    weights, model, reported = weights_for(scenario, DUMMY), scenario.model, scenario.reported()
    assert weights.dummy
    config = json.loads(Path(f"{weights.path}/config.json").read_text(encoding="utf-8"))
    shape = {
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position,
    }
    assert config.items() >= shape.items()
    assert model.max_position >= (reported.number("--max-model-len") or 0)
    drafts = "mtp" in (reported.get("--speculative-config") or "")
    assert config.get("num_nextn_predict_layers", 0) == drafts
    assert config["num_hidden_layers"] <= 4


def test_a_tiny_model_serves_some_unless_real_weights_are_asked() -> None:
    assert tiny_model_of(STOP_IDS, ServerOptions()) == tiny_model_of(STOP_IDS, DUMMY)
    assert tiny_model_of(STOP_IDS, DUMMY) == TinyModel(
        heads=16, kv_heads=8, head_dim=128, hidden=256, vocab=151936, max_position=40960
    )
    assert tiny_model_of(STOP_IDS, ServerOptions(weights="real")) is None
    assert tiny_model_of(TQ, ServerOptions()) is None
    model = replace(STOP_IDS.model, architecture="LlamaForCausalLM", layers=1)
    llama = replace(STOP_IDS, model=model).tiny_model
    assert (llama.family, llama.layers) == ("llama", 1) if llama else False


def test_a_model_that_is_named_is_served_with_random_weights(tmp_path: Path) -> None:
    named = ServerOptions(model=str(tmp_path / "own"), weights="dummy")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text("{}", encoding="utf-8")
    assert weights_for(TQ, named) == ServedModel(name="own", path=tmp_path / "own", dummy=True)
    assert weights_for(TQ, ServerOptions(model="org/own", weights="dummy")) == ServedModel(
        name="org/own", dummy=True
    )
    assert weights_for(replace(TQ, dummy=None), DUMMY) == ServedModel(
        name="Qwen/Qwen3.5-9B", dummy=True
    )


def test_the_served_weights_are_reported_in_words(tmp_path: Path) -> None:
    assert (
        str(weights_for(TQ, DUMMY))
        == "dummy: 1 layer, 16 heads, 4 KV heads of 256, run by vLLM's qwen3"
    )
    assert str(weights_for(TQ, ServerOptions())) == "real, of Qwen/Qwen3.5-9B"
    assert str(ServedModel(name="own", path=tmp_path, dummy=True)) == "dummy, in the shape of own"


@pytest.mark.parametrize(
    ("scenario", "options", "cards", "lacks"),
    [
        (TQ, ServerOptions(), [SMALL], r".*RTX 4060 has 8 GB"),
        (TQ, DUMMY, [SMALL], "$"),
        (TQ, ServerOptions(model="org/own", weights="dummy"), [SMALL], ".*8 GB"),
        (replace(TQ, dummy=None), DUMMY, [SMALL], ".*8 GB"),
        # Any card of the machine may be leased.
        (TQ, ServerOptions(), [SMALL, replace(SMALL, memory_gb=80.0)], "$"),
        (DSV4, DUMMY, [SMALL], ".*2 GPUs"),
        (DSV4, DUMMY, [SMALL, SMALL], r".*capability 8\.9"),
    ],
)
def test_a_small_gpu_is_enough_for_a_tiny_model_only(
    scenario: Scenario, options: ServerOptions, cards: list[Gpu], lacks: str
) -> None:
    assert re.match(lacks, lacking(needs_of(scenario, options), tuple(cards)))


def test_a_small_gpu_gets_a_hint_of_what_runs_on_it(
    here: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    here(SMALL, vllm="0.23.0")
    monkeypatch.setattr(
        "vllm_repro.servers.docker_site.DockerSite.offer", lambda *_, **__: Offer(False)
    )
    assert choose(TQ, ServerOptions()).why.endswith("has 8 GB; --weights dummy runs on it")
    assert choose(TQ, DUMMY).kind is ServerKind.PROCESS
    assert "--weights dummy" not in choose(DSV4, ServerOptions()).why


def test_a_process_on_a_small_gpu_is_not_refused(here: Callable[..., None]) -> None:
    here(SMALL, vllm="0.23.0")
    assert ProcessSite(DUMMY, TQ, lambda _: None).why_not(TQ.arms[0]) == ""
    assert "8 GB" in ProcessSite(ServerOptions(), TQ, lambda _: None).why_not(TQ.arms[0])


DOCS = Path(__file__).parents[3] / "docs" / "architecture.md"


def test_every_kind_and_every_evidence_has_its_facts() -> None:
    assert (list(KINDS), list(EVIDENCE)) == (list(ServerKind), list(Evidence))


@pytest.mark.parametrize("kind", ServerKind)
def test_each_kind_names_a_site_and_options_that_exist(kind: ServerKind) -> None:
    site = site_class(kind)
    assert issubclass(site, Site)
    assert site.kind is kind
    assert getattr(site, "evidence", None) is kind.facts.evidence
    assert kind.facts.options <= {field.name for field in fields(ServerOptions)}


def test_the_docs_list_each_kind_with_its_summary() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for kind in ServerKind:
        assert f"| `{kind}` | {kind.facts.summary} |" in text


FOLDER = Path("/m/made")
ON_GPU: dict[str, Any] = {"port": 1, "evidence": Evidence.GPU}


def made(scenario: Scenario) -> ServedModel:
    return ServedModel(name="made", path=FOLDER, dummy=True, tiny_model=scenario.tiny_model)


def container_of(launch: Launch) -> ContainerSpec:
    assert launch.container is not None
    return launch.container


def launch(scenario: Scenario, name: str = "reported") -> Launch:
    arm = arm_of(scenario, name)
    return process_launch(scenario, arm, vllm=("vllm",), env={}, weights=made(scenario), **ON_GPU)


def cpu_bytes(found: Launch) -> int:
    config = json.loads(found.command.get("--kv-transfer-config") or "")
    return int(config["kv_connector_extra_config"]["cpu_bytes_to_use"])


def test_flags_that_a_tiny_model_drops_are_differences() -> None:
    mtp = find("tq-mtp-cudagraphs")
    found = launch(mtp)
    assert mtp.dummy is not None
    kept = replace(
        mtp.reported().without("--quantization").with_model(str(FOLDER)), env=(FIRST_RUNNER,)
    )
    assert found.command.without("--load-format", "--host", "--port") == kept
    assert found.differences[:4] == (
        (
            f"model: dummy weights in the shape {mtp.tiny_model}, in place of the reported one"
            f" ({mtp.dummy.why})"
        ),
        (
            "without --quantization: vLLM refuses the quantization of the reported weights for a"
            " model without them"
        ),
        (
            "VLLM_USE_V2_MODEL_RUNNER=0: from 0.22 on vLLM chooses the model runner by"
            " architecture, and the reported model has the first"
        ),
        "--load-format dummy: random weights, since this death does not depend on them",
    )
    assert (
        found.weights
        == "dummy: 1 layer and 1 that drafts, 24 heads, 4 KV heads of 256, run by vLLM's mimo"
    )
    assert found.tiny_model == mtp.tiny_model


@pytest.mark.parametrize(
    "name", ["tq-prefix-hit-unreserved", "sco-lazy-starves", "min-tokens-stop-ids"]
)
def test_a_tiny_model_of_the_same_architecture_keeps_flags(name: str) -> None:
    found = launch(find(name))
    assert found.command.env == find(name).reported().env
    assert not any("MODEL_RUNNER" in text for text in found.differences)
    changed = launch(TQ, "bigger-chunk").command.without("--load-format", "--host", "--port")
    command = TQ.command_of(arm_of(TQ, "bigger-chunk")).with_model(str(FOLDER))
    assert replace(changed, env=()) == command


def test_a_reported_key_is_no_part_of_a_command() -> None:
    found = launch(replace(TQ, command=f"{TQ.command} --api-key sk-of-somebody"))
    assert found.command == launch(TQ).command
    assert "sk-of-somebody" not in found.render()
    assert any("VLLM_API_KEY" in text for text in found.differences)


def test_an_arm_may_size_its_flags_for_the_tiny_model() -> None:
    assert cpu_bytes(launch(SCO)) == 137438953472 // 11
    assert cpu_bytes(launch(SCO, "small-cpu-pool")) == 7516192768 // 11
    assert any(
        " in place of --kv-transfer-config " in text
        for text in launch(SCO, "small-cpu-pool").differences
    )
    reported = SCO.command_of(arm_of(SCO, "small-cpu-pool")).get("--kv-transfer-config")
    assert '"cpu_bytes_to_use":7516192768' in (reported or "")


@pytest.mark.parametrize(
    ("gpus", "request_"),
    [((), "all"), (("2",), "device=2"), (("nvidia.com/gpu=2",), "device=nvidia.com/gpu=2")],
)
def test_the_leased_gpus_replace_the_reported_request(gpus: tuple[str, ...], request_: str) -> None:
    command = "docker run --gpus all reporter/vllm:mine --model Qwen/Qwen3.5-9B"
    reported = replace(TQ, command=command)
    served: dict[str, Any] = {"weights": ServedModel(name="m"), **ON_GPU}
    found = container_launch(reported, reported.arms[0], image="i", gpus=gpus, **served)
    assert container_of(found).gpus == request_


def test_a_process_gets_its_leased_gpus() -> None:
    served = {"weights": ServedModel(name="m"), **ON_GPU}
    found = process_launch(TQ, TQ.arms[0], vllm=("vllm",), env={}, gpus=("2", "3"), **served)
    visible = {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert found.env.items() >= visible.items()


def test_a_container_gets_the_folder_and_no_hub() -> None:
    image = "vllm/vllm-openai:v0.23.0"
    found = container_launch(TQ, TQ.arms[0], image=image, weights=made(TQ), **ON_GPU)
    assert [mount.target for mount in container_of(found).mounts] == [CONTAINER_MODEL]
    assert (found.env["HF_HUB_OFFLINE"], found.command.model) == ("1", CONTAINER_MODEL)
    assert found.weights.startswith("dummy: 1 layer, ")
