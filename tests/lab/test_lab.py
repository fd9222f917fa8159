"""The server kind `lab`: launches, facts, model shapes and patches, and when `auto` chooses it."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import vllm_repro.servers.lab
from tests.core.running.test_trial import concluded, journaled, tokenize
from tests.fake_package import fake_release
from tests.fake_vllm import COMPLETES, FakeVllm
from tests.golden_files import missing
from tests.scenario_texts import arm_of, broken, problems, text_of
from vllm_repro.command.parse import parse
from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.releases.provision import Release, ReleaseCache
from vllm_repro.releases.sources import Source
from vllm_repro.running.assess import assess
from vllm_repro.running.state import Observed
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Arm, Capture, Scenario
from vllm_repro.scenario.workload import Size, sized
from vllm_repro.servers.base import Replaced, Server, ServerFacts
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.lab import (
    LabServer,
    LabSite,
    lab_model,
    plugin_folder,
    read_replaced,
    untried,
)
from vllm_repro.servers.lab_launch import graph_mode, lab_launch
from vllm_repro.servers.launch import Launch
from vllm_repro.servers.multi_node import MultiNodeServer
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import Offer, ServerChoice, choose, open_site
from vllm_repro.trigger.trigger import SentRequest
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected, Standing
from vllm_repro.vocabulary import chat, with_flags
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_lab.record import Part

TQ = find("tq-chunked-prefill")
PART = Replaced(
    name="vllm.a.b", file="vllm/a.py", sha256="0" * 64, why="there is no | GPU", effect="none"
)


def launch_of(
    arm: str = "reported", scenario: Scenario = TQ, version: str = "0.23.0", **more: Any
) -> Launch:
    release: dict[str, Any] = {"vllm": ("/r/bin/vllm",), "version": version, **more}
    folder, model = plugin_folder(), Path("/m/tiny")
    return lab_launch(
        scenario, arm_of(scenario, arm), plugin=folder, model=model, port=8001, **release
    )


def server(tmp_path: Path) -> LabServer:
    log, kind, evidence = tmp_path / "reported-1.log", ServerKind.LAB, Evidence.LAB
    return LabServer(("true",), port=1, log=log, env={}, kind=kind, evidence=evidence, untried={})


def test_each_change_of_the_command_has_its_reason() -> None:
    launch = launch_of("reported")
    assert TQ.lab is not None
    reasons = (f"{change}: {change.why}" for change in TQ.lab.changes)
    assert missing(launch.differences, *reasons) == []
    assert launch.argv[:3] == ("/r/bin/vllm", "serve", "/m/tiny")
    assert (launch.kind, launch.evidence) == (ServerKind.LAB, Evidence.LAB)
    assert launch.env["PYTHONPATH"] == str(plugin_folder())


SCO = find("sco-hybrid")
PROMPTS = "prompts of {} tokens in place of {}, sized for the tiny model"
TRANSFER = (
    '--kv-transfer-config \'{"kv_connector":"SimpleCPUOffloadConnector","kv_role":"kv_both",'
    '"kv_connector_extra_config":{"cpu_bytes_to_use":%s}}\''
)


@pytest.mark.parametrize(
    ("scenario", "arm", "present", "absent"),
    [
        (
            TQ,
            "reported",
            (
                "--kv-cache-dtype turboquant_4bit_nc",
                "--tool-call-parser qwen3_coder",
                "--max-num-seqs 2",
            ),
            ("--gpu-memory-utilization", "REPRO_LAB_GRAPHS", "REPRO_LAB_CAPTURE", "prompts"),
        ),
        # an arm overrides the lab's changes
        (TQ, "bigger-chunk", ("--max-num-batched-tokens 8192",), ()),
        (TQ, "eager", ("--enforce-eager",), ()),
        (TQ, "graphs-off", ("REPRO_LAB_GRAPHS NONE",), ()),
        (
            SCO,
            "reported",
            (
                "--no-disable-hybrid-kv-cache-manager",
                "--enable-prefix-caching",
                "--block-size 32",
                "--num-gpu-blocks-override 330",
                "--max-num-batched-tokens 2048",
                TRANSFER % 268435456,
                "REPRO_LAB_MECHANISM offload",
                PROMPTS.format(5693, 90109),
            ),
            (),
        ),
        (SCO, "near-miss-length", (PROMPTS.format(5664, 90112),), ()),
        (SCO, "hybrid-off", ("--disable-hybrid-kv-cache-manager",), ()),
        (SCO, "lazy", (TRANSFER % '268435456,"lazy_offload":true',), ()),
        (SCO, "small-cpu-pool", (TRANSFER % (160 * 8192),), ()),
        (SCO, "sco-off", (), ("--kv-transfer-config",)),
        (
            SCO,
            "bigger-pool",
            (
                "--num-gpu-blocks-override 1000",
                (
                    "with --num-gpu-blocks-override 1000 in place of --num-gpu-blocks-override"
                    " 50000, sized for the tiny model's pool"
                ),
            ),
            (),
        ),
    ],
)
def test_flags_variables_and_differences_of_an_arm(
    scenario: Scenario, arm: str, present: Sequence[str], absent: Sequence[str]
) -> None:
    launch = launch_of(arm, scenario, "0.23.0" if scenario is TQ else "0.21.0")
    flags = [line.strip(" \\") for line in launch.command.render().splitlines()]
    lines = [*flags, *launch.differences, *(f"{name} {launch.env[name]}" for name in launch.env)]
    assert [lines.count(line) for line in present] == [1] * len(present)
    assert missing([line.split()[0] for line in lines], *absent) == [*absent]


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ("", ""),
        ("-cc.cudagraph_mode=none", "NONE"),
        ("""--compilation-config '{"cudagraph_mode": "NONE", "mode": 0}'""", "NONE"),
        ("--compilation-config '{}'", ""),
        ("--compilation-config 3", ""),
        ("-O0", "NONE"),
        ("-O3", ""),
        ("-O0 -cc.cudagraph_mode=full", "FULL"),
    ],
)
def test_graphs_are_turned_off_in_several_ways(flags: str, mode: str) -> None:
    """If the lab missed one, it would lock the workspace and crash an engine that should live."""
    assert graph_mode(parse(f"vllm serve m {flags}")) == mode


@pytest.mark.parametrize("capture", ["guard", "record"])
def test_the_guard_captures_full_graphs(capture: Capture) -> None:
    lab = replace(TQ.lab, capture=capture)  # type: ignore[type-var]  # it has one
    launches = [launch_of(arm, lab=lab) for arm in ("reported", "graphs-off", "eager")]
    modes = [launch.command.get("--compilation-config.cudagraph_mode") for launch in launches]
    assert modes == ["FULL_DECODE_ONLY", "none", None]
    assert launches[0].env["REPRO_LAB_CAPTURE"] == capture
    assert any(
        text.startswith("with --compilation-config.cudagraph_mode FULL")
        for text in launches[0].differences
    )


def test_weights_that_were_made_are_loaded() -> None:
    launch = launch_of(scenario=find("tq-mtp-wrong-tokens"), version="0.24.0")
    assert not launch.command.has("--load-format")
    assert any(
        "by which each token depends on all before it" in text for text in launch.differences
    )


def test_a_scenario_without_a_lab_names_other_servers() -> None:
    other = find("min-tokens-stop-ids")
    for start in (partial(LabSite, ServerOptions()), partial(launch_of, "reported")):
        with pytest.raises(UsageError, match="cannot run in the lab: it has no lab="):
            start(other)


def test_the_lab_refuses_other_weights() -> None:
    for options in (ServerOptions(model="/m"), ServerOptions(weights="real")):
        with pytest.raises(UsageError, match="always serves a tiny model"):
            LabSite(options, TQ)


def test_weights_are_made_if_the_scenario_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))
    for weights, dummy in (("made", False), ("dummy", True)):
        lab = replace(  # type: ignore[type-var]  # it has one
            TQ.lab, heads=2, kv_heads=1, head_dim=16, vocab_size=265, weights=weights
        )
        small = replace(TQ, lab=lab)
        launch = LabSite(ServerOptions(), small).launch(small, small.arms[0], 1)
        assert launch.command.has("--load-format") is dummy
        assert launch.weights.startswith("dummy" if dummy else "made")
        assert (Path(launch.command.model or "") / "model.safetensors").exists() is not dummy
    with pytest.raises(UsageError, match="not for deepseek_v4"):
        LabSite(
            ServerOptions(),
            replace(
                DSV4,
                lab=replace(DSV4.lab, weights="made"),  # type: ignore[type-var]  # it has one
            ),
        )


def test_piecewise_graphs_are_refused() -> None:
    site = LabSite(ServerOptions(), TQ)
    piecewise = with_flags("--compilation-config.cudagraph_mode PIECEWISE")
    assert "asks for PIECEWISE" in site.why_not(Arm("piecewise", Expected.DIES, (piecewise,)))


def test_show_lists_what_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))
    text = LabSite(ServerOptions(), TQ).text(TQ.arms[0], 8000)
    assert (
        missing(
            text,
            "REPRO_LAB_MECHANISM=turboquant",
            "# vllm.v1.worker.cpu_worker.CPUWorker.init_device\n#   why: ",
        )
        == []
    )


def test_facts_are_read_from_the_plugins_file(tmp_path: Path) -> None:
    path = tmp_path / "reported-1.lab.json"
    assert read_replaced(path) == ()
    path.write_text(json.dumps({"mechanism": "m", "replaced": [vars(PART)]}), encoding="utf-8")
    assert read_replaced(path) == (PART,)
    facts = ServerFacts(kind=ServerKind.LAB, evidence=Evidence.LAB, argv=())
    assert server(tmp_path).booted(facts, ready=True).replaced == (PART,)
    path.write_text(
        json.dumps({"replaced": [], "unsupported": ["vllm.a", "vllm.b(c)"]}), encoding="utf-8"
    )
    with pytest.raises(Unsupported, match=r"it has no vllm\.a, vllm\.b\(c\)"):
        server(tmp_path).booted(facts, ready=False)


def test_a_ready_server_without_the_plugin_is_an_infra_error(tmp_path: Path) -> None:
    facts = ServerFacts(kind=ServerKind.LAB, evidence=Evidence.LAB, argv=())
    # it crashed earlier: its log has the reason
    assert server(tmp_path).booted(facts, ready=False) == facts
    with pytest.raises(InfraError, match="did not load the lab's plugin"):
        server(tmp_path).booted(facts, ready=True)


def test_a_release_that_the_lab_cannot_run_is_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeVllm, "booted", Mock(side_effect=Unsupported("it has no vllm.a")))
    conclusion = concluded(tmp_path, {})
    assert (conclusion.outcome, conclusion.why) == (Outcome.UNSUPPORTED, "it has no vllm.a")


def test_replaced_names_are_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ServerFacts(
        kind=ServerKind.LAB, evidence=Evidence.LAB, argv=("vllm",), replaced=(PART,)
    )
    monkeypatch.setattr(FakeVllm, "booted", Mock(return_value=facts))
    concluded(tmp_path, {})
    (entry,) = journaled(tmp_path, "server-booted")
    assert entry["facts"]["replaced"] == [vars(PART)]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with no GPU, no Docker, no vllm and nothing in the cache."""

    def no_engine() -> None:
        raise InfraError("no engine")

    monkeypatch.setattr("vllm_repro.servers.site.gpus", lambda: ())
    monkeypatch.setattr("vllm_repro.servers.process.local_vllm", lambda: None)
    monkeypatch.setattr("vllm_repro.servers.docker_site.connect", no_engine)
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("bare")
def test_auto_picks_the_lab_where_there_is_no_gpu() -> None:
    choice = choose(TQ, ServerOptions())
    assert choice.kind is ServerKind.LAB
    assert "no NVIDIA GPU" in choice.why
    assert choose(TQ, ServerOptions(model="/m")).kind is ServerKind.REHEARSAL
    assert choose(find("min-tokens-stop-ids"), ServerOptions()).kind is ServerKind.REHEARSAL


@pytest.mark.usefixtures("bare")
def test_auto_without_download_uses_cached_releases_only(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose(TQ, ServerOptions(), download=False)
    assert choice.kind is ServerKind.REHEARSAL
    assert "--scenario-server lab installs vLLM 0.23.0" in choice.why
    monkeypatch.setattr(ReleaseCache, "get", lambda _, version: f"release {version}")
    assert choose(TQ, ServerOptions(), download=False).kind is ServerKind.LAB


@pytest.mark.usefixtures("bare")
def test_auto_falls_back_to_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object, **__: object) -> Release:
        raise InfraError("no wheel of vLLM 0.23.0 can be had")

    monkeypatch.setattr(vllm_repro.servers.lab, "provision", no_network)
    given: list[tuple[ServerKind, str]] = []
    site = open_site(
        TQ,
        ServerOptions(),
        ServerChoice(ServerKind.LAB, "picked"),
        print,
        chosen=lambda site, why: given.append((site.kind, why)),
    )
    assert (site.kind, site.evidence) == (ServerKind.REHEARSAL, Evidence.REHEARSAL)
    assert given == [
        (ServerKind.LAB, "picked"),
        (ServerKind.REHEARSAL, "the lab cannot be set up: no wheel of vLLM 0.23.0 can be had"),
    ]
    with pytest.raises(InfraError):  # an explicit --server lab never falls back
        open_site(TQ, ServerOptions(server="lab"), ServerChoice(ServerKind.LAB, ""), print)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'mechanism="turboquant"',
            'mechanism="turboquent"',
            "the lab has no mechanism 'turboquent'; did you mean 'turboquant'?",
        ),
        (
            ', why="on a CPU this is a share of the host\'s memory"',
            "",
            "lab: `without --gpu-memory-utilization` has no why=: add the reason for the report",
        ),
        (
            'without("--language-model-only"',
            'without("--language-only"',
            "does not carry --language-only",
        ),
    ],
)
def test_check_finds_mistakes_in_lab(old: str, new: str, message: str) -> None:
    texts = [text for _, text in broken(old, new)]
    assert texts
    assert all(message in text for text in texts)


def test_each_model_shape_has_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))
    assert SCO.lab is not None
    assert TQ.lab is not None
    folder = lab_model(SCO.lab, SCO.model)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["layer_types"] == ["full_attention", "sliding_attention"]
    assert (config["sliding_window"], config["num_attention_heads"], config["head_dim"]) == (
        128,
        4,
        32,
    )
    others = {
        lab_model(lab, SCO.model)
        for lab in (replace(SCO.lab, window=64), replace(SCO.lab, layers=["sliding"]))
    }
    assert len({folder, *others}) == 3


@pytest.mark.parametrize(("kind", "tokens"), [(ServerKind.LAB, 5693), (ServerKind.PROCESS, 90_109)])
def test_a_trial_sends_the_lab_its_own_sizes(tmp_path: Path, kind: ServerKind, tokens: int) -> None:
    paths = {"/tokenize": tokenize, "/v1/chat/completions": COMPLETES}
    launch = Launch(kind=kind, evidence=Evidence.LAB, command=SCO.command_of(SCO.arms[0]))
    concluded(tmp_path, paths, scenario=SCO, arm=SCO.arms[0], launch=launch)
    sent = journaled(tmp_path, "request-sent")
    assert [entry["prompt_tokens"] for entry in sent] == [tokens, tokens]


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [(ServerKind.LAB, Outcome.CLEAN), (ServerKind.PROCESS, Outcome.UNTRIGGERED)],
)
def test_the_boundary_is_computed_for_the_model_that_is_served(
    tmp_path: Path, kind: ServerKind, outcome: Outcome
) -> None:
    asked = [SentRequest("prompt A", 5693, cached_tokens=0, answer_tokens=8)]
    facts = ServerFacts(kind=kind, evidence=Evidence.LAB, argv=())
    seen = Observed(facts, ready=True, requests=asked, canary_ok=True)
    command = launch_of("reported", SCO, "0.21.0").command
    assert assess(SCO, command, seen, tmp_path / "no log").outcome is outcome


def test_near_misses_differ_from_the_report_by_one_thing() -> None:
    lengths, answers = (
        {getattr(step, field) for step in arm_of(SCO, name).workload or ()}
        for name, field in (("near-miss-length", "prompt"), ("near-miss-answer", "max_tokens"))
    )
    (length,) = lengths
    assert isinstance(length, Size)
    assert length.lab is not None
    assert (length.plus % 256, length.lab % 32) == (0, 0)
    assert answers == {3}


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


def ranked_server(site: LabSite, name: str, folder: Path) -> tuple[Launch, Server]:
    return site.server(DSV4, arm_of(DSV4, name), 1, folder / f"{name}-1.log", "run")


def test_each_rank_reports_its_patched_files(site: LabSite, tmp_path: Path) -> None:
    launch, ranked = ranked_server(site, "branch", tmp_path)
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
    _, ranked = ranked_server(site, "reported", tmp_path)
    assert isinstance(ranked, MultiNodeServer)
    assert isinstance(ranked.head, LabServer)
    ranked.head.facts.write_text('{"replaced": [], "patched": []}', encoding="utf-8")
    with pytest.raises(InfraError, match="did not load the lab's plugin"):
        ranked.booted(None, ready=True)  # type: ignore[arg-type]  # raises before it looks at them


def test_arms_remove_only_the_reservation() -> None:
    changed = {
        name: arm_of(DSV4, name).patches for name in ("unreserved", "unreserved-eager", "branch")
    }
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


def test_a_good_release_decides_nothing_for_a_patched_arm() -> None:
    assert DSV4.status.standing("0.32.0") is Standing.GOOD
    for name in ("unreserved", "unreserved-together", "branch"):
        assert DSV4.status_of(arm_of(DSV4, name)).standing("0.32.0") is Standing.BAD
        assert DSV4.status_of(arm_of(DSV4, name)).standing("0.28.0") is Standing.UNKNOWN
    assert problems(text_of("dsv4_tp2.py"), "dsv4_tp2.py") == []


def test_without_a_release_named_the_lab_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerKind.LAB.facts.release(DSV4) == DSV4.lab_release == "0.32.0"
    assert ServerKind.REHEARSAL.facts.release(DSV4) == DSV4.try_with
    assert ServerKind.DOCKER.facts.release(DSV4) is None
    assert ServerKind.LAB.facts.release(TQ) == TQ.try_with
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
    for memory in (1024.0, 16.0):
        monkeypatch.setattr("vllm_repro.servers.options.memory_gb", lambda memory=memory: memory)
        for options in (ServerOptions(), ServerOptions(vllm=Source(release="0.32.0"))):
            assert choose(ON_A_CPU, options, download=False).kind is ServerKind.LAB
    assert (
        choose(ON_A_CPU, ServerOptions()).why
        == "the scenario needs CPU, 256 GB, and this machine has 16 GB"
    )


def test_answers_may_be_shorter_in_the_lab(site: LabSite, tmp_path: Path) -> None:
    launch, _ = ranked_server(site, "reported", tmp_path)
    assert (
        "answers of up to 4 tokens in place of 4000, since a CPU takes a second for each"
        in launch.differences
    )
    assert chat(prompt=1, max_tokens=sized(4000, lab=4)).max_tokens == sized(4000, lab=4)


PARTS = (
    Part("vllm.a", "kernel", "w", "e"),
    Part("vllm.a", "Copy.init"),
    Part("vllm.a", "Copy.wait"),
    Part("vllm.a", "wrapped", "w", "e", runs=True),
)
SOURCE = """
@jit
def kernel():
    return 1
class Copy:
    def init(self):
        return 1
    async def wait(self):
        return 3
    def other(self):
        return 1
def wrapped():
    return 1
"""


@pytest.mark.parametrize(
    ("was", "now", "names"),
    [
        ("def kernel():\n    return 1", "def kernel():\n    return 2", ("kernel",)),
        ("@jit\n", "", ("kernel",)),
        ("def init(self):\n        return 1", "def init(self):\n        return 2", ("Copy.init",)),
        ("def other(self):\n        return 1", "def other(self):\n        return 2", ()),
        ("def wrapped():\n    return 1", "def wrapped():\n    return 2", ()),
        ("def kernel():\n", "def kernel():  # a comment\n", ()),
        ("@jit\n", "@jit\n@jit(\n", ("kernel", "Copy.init", "Copy.wait")),
        ("return 3", "return 4", ("Copy.wait",)),
    ],
)
def test_only_what_differs_and_does_not_run(was: str, now: str, names: tuple[str, ...]) -> None:
    assert SOURCE.count(was) == 1
    assert untried(PARTS, "vllm/a.py", SOURCE, SOURCE.replace(was, now)) == names


def test_another_file_has_no_parts() -> None:
    assert untried(PARTS, "vllm/b.py", SOURCE, SOURCE.replace("1", "2")) == ()
