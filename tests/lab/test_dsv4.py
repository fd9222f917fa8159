"""DeepSeek-V4 in the lab: two ranks of a release instead of the reported branch, and the patches of its arms."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vllm_repro.servers.lab
from tests.fake_package import fake_release
from vllm_repro.errors import InfraError
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.reader import read as read_scenario
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.scenario.workload import sized
from vllm_repro.servers.base import Server
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.lab import LabServer, LabSite
from vllm_repro.servers.launch import Launch
from vllm_repro.servers.multi_node import MultiNodeServer
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import Offer, choose
from vllm_repro.verdict.verdict import Standing
from vllm_repro.vocabulary import chat

DSV4 = find("dsv4-tp2")
ON_A_CPU = find("dsv4-cpu-first-request")
FLASHMLA = """
class DeepseekV4FlashMLAAttention:
    def forward_mqa(self, q, output):
        if attn_metadata is None:
            current_workspace_manager().get_simultaneous(
                ((self.PREFILL_CHUNK_SIZE, M, q.shape[-1]), torch.bfloat16),
                ((self.max_num_batched_tokens, combined_topk), torch.int32),
                ((self.max_num_batched_tokens,), torch.int32),
            )
            output.zero_()
            return

    def _forward_prefill(self, q):
        for chunk_start, chunk_end, chunk_N, chunk_M in chunk_plan:
            workspace = workspace_manager.get_simultaneous(
                ((chunk_size, chunk_M, q.shape[-1]), torch.bfloat16),
                ((self.max_num_batched_tokens, combined_topk), torch.int32),
                ((self.max_num_batched_tokens,), torch.int32),
            )
            kv, combined_indices_out, combined_lens_out = workspace
"""


def arm(name: str, scenario: Scenario = DSV4) -> Arm:
    found = scenario.arm(name)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def _processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_repro.servers.lab.cpu_flags", lambda: frozenset({"avx512_bf16"}))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LabSite:
    """Return a lab whose release is a folder with only the file that the arms patch."""
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path / "cache"))
    release = fake_release("0.32.0", tmp_path / "release")
    file = release.packages / "vllm" / "models" / "deepseek_v4" / "nvidia" / "flashmla.py"
    file.parent.mkdir(parents=True)
    file.write_text(FLASHMLA, encoding="utf-8")
    monkeypatch.setattr(vllm_repro.servers.lab, "provision", lambda *_, **__: release)
    made = LabSite(ServerOptions(), DSV4)
    made.prepare(print)
    return made


def server(site: LabSite, name: str, folder: Path) -> tuple[Launch, Server]:
    return site.server(DSV4, arm(name), 1, folder / f"{name}-1.log", "run")


def test_each_rank_reports_its_patched_files(site: LabSite, tmp_path: Path) -> None:
    launch, ranked = server(site, "branch", tmp_path)
    assert isinstance(ranked, MultiNodeServer)
    ranks = (ranked.head, *ranked.followers)
    assert [rank.log_path and rank.log_path.name for rank in ranks] == [
        "branch-1.log",
        "branch-1.rank1.log",
    ]
    for rank, options in zip(ranks, (("--node-rank", "0"), ("--node-rank", "1")), strict=True):
        assert isinstance(rank, LabServer)
        assert rank.argv[rank.argv.index("--node-rank") :][:2] == options
        assert list(rank.patched) == ["vllm/models/deepseek_v4/nvidia/flashmla.py"]
        assert rank.env["REPRO_LAB_FACTS"] == str(rank.facts)
        assert (rank.env["REPRO_LAB_MECHANISM"], rank.env["TRITON_INTERPRET"]) == ("deepseek", "1")
        assert (rank.env["GLOO_SOCKET_IFNAME"], rank.env["OMP_NUM_THREADS"]) == ("lo", "1")
    assert isinstance(ranks[1], LabServer)
    assert "--headless" in ranks[1].argv
    assert "--port" not in ranks[1].argv
    assert len({str(rank.facts) for rank in ranks if isinstance(rank, LabServer)}) == 2
    assert (
        "vLLM 0.32.0 in place of the reported 0.20.1rc1.dev12+g363ffa145, which cannot be installed"
        " here" in launch.differences
    )
    assert "REPRO_LAB_FACTS" not in launch.render()


def test_a_rank_without_the_plugin_is_an_infra_error(site: LabSite, tmp_path: Path) -> None:
    _, ranked = server(site, "reported", tmp_path)
    assert isinstance(ranked, MultiNodeServer)
    assert isinstance(ranked.head, LabServer)
    ranked.head.facts.write_text('{"replaced": [], "patched": []}', encoding="utf-8")
    with pytest.raises(InfraError, match="did not load the lab's plugin"):
        ranked.booted(None, ready=True)  # type: ignore[arg-type]  # raises before it looks at them


def test_arms_remove_only_the_reservation() -> None:
    changed = {name: arm(name).patches for name in ("unreserved", "unreserved-eager", "branch")}
    assert changed["unreserved"] == changed["unreserved-eager"] == changed["branch"][:1]
    text = FLASHMLA
    for patch in changed["branch"]:
        text = patch.apply(text)
        assert len(text.splitlines()) == len(FLASHMLA.splitlines())
    calls = [
        ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)
    ]
    assert "current_workspace_manager().get_simultaneous" not in calls
    assert calls.count("workspace_manager.get_simultaneous") == 1


def test_a_release_that_is_good_says_nothing_of_an_arm_that_changes_it() -> None:
    assert DSV4.status.standing("0.32.0") is Standing.GOOD
    for name in ("unreserved", "unreserved-together", "branch"):
        assert DSV4.status_of(arm(name)).standing("0.32.0") is Standing.BAD
        assert DSV4.status_of(arm(name)).standing("0.28.0") is Standing.UNKNOWN
    path = Path("scenarios/dsv4_tp2.py")
    assert (
        read_scenario(path, (Path(__file__).parents[2] / path).read_text(encoding="utf-8"))[1] == []
    )


def test_without_a_release_named_the_lab_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerKind.LAB.facts.release(DSV4) == DSV4.try_in_lab == "0.32.0"
    assert ServerKind.REHEARSAL.facts.release(DSV4) == DSV4.try_with
    assert ServerKind.DOCKER.facts.release(DSV4) is None
    tq = find("tq-chunked-prefill")
    assert ServerKind.LAB.facts.release(tq) == tq.try_with
    monkeypatch.setattr("vllm_repro.servers.site.gpus", lambda: ())
    monkeypatch.setattr(
        ReleaseCache, "get", lambda _, source: "here" if source.release == "0.32.0" else None
    )
    assert choose(DSV4, ServerOptions(), download=False).kind is ServerKind.LAB


def test_auto_prefers_the_lab_for_a_cpu_bug_with_a_mechanism(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the lab the release would crash for another reason: it has no Triton for CPUs."""
    monkeypatch.setattr(
        "vllm_repro.servers.docker_site.DockerSite.offer", lambda *_, **__: Offer(False)
    )
    monkeypatch.setattr("vllm_repro.servers.process.local_vllm", lambda: None)
    monkeypatch.setattr(ReleaseCache, "get", lambda _, version: f"release {version}")
    for memory in (16.0, 1024.0):
        monkeypatch.setattr("vllm_repro.servers.options.memory_gb", lambda memory=memory: memory)
        assert choose(ON_A_CPU, ServerOptions(), download=False).kind is ServerKind.LAB
        assert (
            choose(ON_A_CPU, ServerOptions(vllm=Source(release="0.32.0")), download=False).kind
            is ServerKind.LAB
        )
    monkeypatch.setattr("vllm_repro.servers.options.memory_gb", lambda: 16.0)
    assert (
        choose(ON_A_CPU, ServerOptions()).why
        == "the scenario needs CPU, 256 GB, and this machine has 16 GB"
    )


def test_answers_may_be_shorter_in_the_lab(site: LabSite, tmp_path: Path) -> None:
    launch, _ = server(site, "reported", tmp_path)
    assert (
        "answers of up to 4 tokens in place of 4000, since a CPU takes a second for each"
        in launch.differences
    )
    assert chat(prompt=1, max_tokens=sized(4000, lab=4)).max_tokens == sized(4000, lab=4)
