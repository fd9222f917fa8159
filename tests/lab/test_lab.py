"""The server kind `lab`: its launch, its facts, and when `auto` chooses it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import vllm_repro.servers.lab
from tests.core.running.test_trial import trial_on
from tests.fake_vllm import FakeVllm
from tests.golden_files import missing
from vllm_repro.command.parse import parse
from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.journal.journal import read
from vllm_repro.releases.provision import Release, ReleaseCache
from vllm_repro.running.trial import run_trial
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.reader import read as read_scenario
from vllm_repro.scenario.scenario import Arm, Capture
from vllm_repro.servers.base import Replaced, ServerFacts
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.lab import LabServer, LabSite, plugin_folder, read_replaced
from vllm_repro.servers.lab_launch import graph_mode, lab_launch
from vllm_repro.servers.launch import Launch
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import ServerChoice, choose, open_site
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected
from vllm_repro.vocabulary import with_flags
from vllm_repro_diagnosis.evidence import Evidence

TQ = find("tq-chunked-prefill")
PART = Replaced(
    name="vllm.a.b", file="vllm/a.py", sha256="0" * 64, why="there is no | GPU", effect="none"
)


def launch_of(arm: str) -> Launch:
    chosen = TQ.arm(arm)
    assert chosen is not None
    vllm, version = ("/r/bin/vllm",), TQ.try_with
    return lab_launch(
        TQ,
        chosen,
        vllm=vllm,
        version=version,
        plugin=plugin_folder(),
        model=Path("/m/tiny"),
        port=8001,
    )


def server(tmp_path: Path) -> LabServer:
    log, kind, evidence = tmp_path / "reported-1.log", ServerKind.LAB, Evidence.LAB
    return LabServer(("true",), port=1, log=log, env={}, kind=kind, evidence=evidence, untried={})


def test_every_change_of_the_reported_command_is_listed_with_its_reason() -> None:
    launch = launch_of("reported")
    assert TQ.lab is not None
    for change in TQ.lab.changes:
        assert f"{change}: {change.why}" in launch.differences
    assert launch.argv[:3] == ("/r/bin/vllm", "serve", "/m/tiny")
    assert launch.command.number("--max-num-seqs") == 2
    assert launch.command.get("--kv-cache-dtype") == "turboquant_4bit_nc"
    assert launch.command.get("--tool-call-parser") == "qwen3_coder"
    assert not launch.command.has("--gpu-memory-utilization")
    assert (launch.kind, launch.evidence) == (ServerKind.LAB, Evidence.LAB)
    assert launch.env["PYTHONPATH"] == str(plugin_folder())


def test_the_plugin_is_told_when_graphs_are_turned_off() -> None:
    assert launch_of("graphs-off").env["REPRO_LAB_GRAPHS"] == "NONE"
    assert "REPRO_LAB_GRAPHS" not in launch_of("reported").env


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

    def launched(arm: str) -> Launch:
        chosen = TQ.arm(arm)
        assert chosen is not None
        release: dict[str, Any] = {"vllm": ("vllm",), "version": "0.23.0"}
        return lab_launch(
            TQ, chosen, **release, plugin=plugin_folder(), model=Path("/m"), port=1, lab=lab
        )

    launch = launched("reported")
    assert launch.env["REPRO_LAB_CAPTURE"] == capture
    assert launch.command.get("--compilation-config.cudagraph_mode") == "FULL_DECODE_ONLY"
    assert any(
        text.startswith("with --compilation-config.cudagraph_mode FULL")
        for text in launch.differences
    )
    assert launched("graphs-off").command.get("--compilation-config.cudagraph_mode") == "none"
    assert not launched("eager").command.has("--compilation-config.cudagraph_mode")
    assert "REPRO_LAB_CAPTURE" not in launch_of("reported").env


def test_weights_that_were_made_are_loaded() -> None:
    wrong = find("tq-mtp-wrong-tokens")
    launch = lab_launch(
        wrong,
        wrong.arms[0],
        vllm=("v",),
        version="0.24.0",
        plugin=plugin_folder(),
        model=Path("/m"),
        port=1,
    )
    assert not launch.command.has("--load-format")
    assert any(
        "by which each token depends on all before it" in text for text in launch.differences
    )


def test_an_arm_overrides_the_lab_changes() -> None:
    assert launch_of("bigger-chunk").command.number("--max-num-batched-tokens") == 8192
    assert launch_of("eager").command.has("--enforce-eager")


def test_a_scenario_without_a_lab_names_other_servers() -> None:
    other = find("min-tokens-stop-ids")
    with pytest.raises(UsageError, match="cannot run in the lab: it has no lab="):
        LabSite(ServerOptions(), other)
    with pytest.raises(UsageError, match="cannot run in the lab: it has no lab="):
        lab_launch(
            other,
            other.arms[0],
            vllm=("v",),
            version="0.28.0",
            plugin=plugin_folder(),
            model=Path("/m"),
            port=1,
        )


def test_the_lab_refuses_other_weights() -> None:
    for options in (ServerOptions(model="/m"), ServerOptions(weights="real")):
        with pytest.raises(UsageError, match="always serves a tiny model"):
            LabSite(options, TQ)


def test_weights_are_made_if_the_scenario_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))
    for weights, dummy in (("made", False), ("dummy", True)):
        # it has one
        lab = replace(TQ.lab, heads=2, kv_heads=1, head_dim=16, vocab_size=265, weights=weights)  # type: ignore[type-var]
        small = replace(TQ, lab=lab)
        launch = LabSite(ServerOptions(), small).launch(small, small.arms[0], 1)
        assert launch.command.has("--load-format") is dummy
        assert launch.weights.startswith("dummy" if dummy else "made")
        assert (Path(launch.command.model or "") / "model.safetensors").exists() is not dummy
    other = find("dsv4-tp2")
    with pytest.raises(UsageError, match="not for deepseek_v4"):
        LabSite(ServerOptions(), replace(other, lab=replace(other.lab, weights="made")))  # type: ignore[type-var]


def test_piecewise_graphs_are_refused() -> None:
    site = LabSite(ServerOptions(), TQ)
    piecewise = with_flags("--compilation-config.cudagraph_mode PIECEWISE")
    assert "asks for PIECEWISE" in site.cannot(Arm("piecewise", Expected.DIES, (piecewise,)))


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
    booted = Mock(side_effect=Unsupported("it has no vllm.a"))
    with FakeVllm(tmp_path / "log", {}) as fake:
        monkeypatch.setattr(fake, "booted", booted)
        trial = trial_on(fake, tmp_path)
        with trial.journal, trial.requests:
            conclusion = asyncio.run(run_trial(trial))
    assert (conclusion.outcome, conclusion.why) == (Outcome.UNSUPPORTED, "it has no vllm.a")


def test_replaced_names_are_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeVllm(tmp_path / "log", {}) as fake:
        started = asyncio.run(fake.start())
        monkeypatch.setattr(fake, "booted", Mock(return_value=replace(started, replaced=(PART,))))
        trial = trial_on(fake, tmp_path)
        with trial.journal, trial.requests:
            asyncio.run(run_trial(trial))
    entry = read(tmp_path / "journal.jsonl").first("server-booted")
    assert entry is not None
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


def test_check_finds_mistakes_in_lab() -> None:
    path = Path("scenarios/tq_chunked_prefill.py")
    text = (Path(__file__).parents[2] / path).read_text(encoding="utf-8")

    def problems(old: str, new: str) -> list[str]:
        assert old in text
        return [problem.text for problem in read_scenario(path, text.replace(old, new, 1))[1]]

    assert problems('mechanism="turboquant"', 'mechanism="turboquent"') == [
        "the lab has no mechanism 'turboquent'; did you mean 'turboquant'?"
    ]
    why = ', why="on a CPU this is a share of the host\'s memory"'
    assert problems(why, "") == [
        "lab: `without --gpu-memory-utilization` has no why=: add the reason for the report"
    ]
    found = problems('without("--language-model-only"', 'without("--language-only"')
    assert found
    assert all("does not carry --language-only" in text for text in found)
