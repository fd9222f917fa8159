from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import StubGpus
from tests.golden_files import assert_golden
from tests.report_examples import REHEARSAL, report
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Verdict, VerdictReport
from vllm_repro_nights.night import Light, Night, Slot, annotation, light_of, markdown, suites
from vllm_repro_nights.run_night import host_problems

ASKED = "vllm/vllm-openai:nightly, server docker"

_GPU = replace(report(REHEARSAL), evidence="gpu", version="0.33.0")


def ran(scenario: str, light: Light, why: str, verdict: Verdict, seconds: float, run: str) -> Slot:
    because = VerdictReport(verdict=verdict, expected=True, because=why)
    made = replace(_GPU, scenario=scenario, verdict=because, duration_s=seconds, folder=Path(run))
    return Slot(scenario=scenario, light=light, why=why, report=made)


SLOTS = (
    ran("a-good", Light.GREEN, "reported: died in 1 of 1 boots", Verdict.REPRODUCES, 61.2, "run-1"),
    ran("b-bad", Light.RED, "died | of it; this release was declared good", Verdict.REGRESSED, 99, "run-2"),
    ran("c-quiet", Light.AMBER, "nothing can be said: 1 untriggered", Verdict.INCONCLUSIVE, 40, "run-3"),
    Slot(scenario="d-lost", light=Light.AMBER, why="the image is not on this machine"),
    Slot(
        scenario="e-big",
        light=Light.NONE,
        why="the scenario needs 2 GPUs, 96 GB each, and this machine has 1 NVIDIA GPU",
    ),
)


def night(*slots: Slot, **fields: object) -> Night:
    return replace(Night(asked=ASKED, started_at="2026-11-20T02:17:00Z", slots=slots), **fields)  # type: ignore[arg-type]  # fields of a Night


GREEN, RED, AMBER, LOST, NONE = SLOTS


@pytest.mark.parametrize(
    ("slots", "light"),
    [
        ((), Light.AMBER),
        ((NONE,), Light.AMBER),
        ((GREEN,), Light.GREEN),
        ((GREEN, NONE), Light.GREEN),
        ((GREEN, AMBER), Light.AMBER),
        ((LOST, GREEN), Light.AMBER),
        ((GREEN, AMBER, RED), Light.RED),
        ((RED, GREEN), Light.RED),
    ],
)
def test_red_outweighs_amber_which_outweighs_green(slots: tuple[Slot, ...], light: Light) -> None:
    assert night(*slots).light is light
    assert night(*reversed(slots)).light is light
    for more in ({"trouble": ("a GPU is busy",)}, {"interrupted": "SIGTERM"}):
        assert night(*slots, **more).light is (Light.RED if light is Light.RED else Light.AMBER)


def test_kinds_of_evidence_have_tables_of_their_own_and_what_changed_is_said() -> None:
    lab, cpu = (
        replace(GREEN, scenario=kind, report=replace(GREEN.report or _GPU, evidence=kind)) for kind in ("lab", "cpu")
    )
    late = Slot(scenario="f-late", light=Light.LATE, why="9 s of 60 were left; it took 70 s")
    found = night(lab, cpu, late, changes=("REGRESSED: lab (LAB): it died again",))
    assert found.light is Light.AMBER
    text = markdown(found)
    titles = re.findall(r"^## (.*)", text, flags=re.MULTILINE)
    assert titles == ["What changed since the night before", "LAB", "vLLM on a CPU", "Not reached in time"]
    assert "- REGRESSED: lab (LAB): it died again" in text
    assert [name in text.partition("## LAB")[2].partition("##")[0] for name in ("| lab |", "| cpu |")] == [True, False]
    assert "## What changed since the night before\n\nNothing." in markdown(night(GREEN, changes=()))
    assert "changed" not in markdown(night(GREEN))


@pytest.mark.parametrize(
    ("slot", "status", "marked"),
    [(GREEN, 0, ""), (RED, 1, "::error "), (AMBER, 2, "::warning "), (NONE, 2, "::warning ")],
)
def test_a_light_is_an_exit_status_and_a_mark_of_one_line(slot: Slot, status: int, marked: str) -> None:
    found = night(replace(slot, scenario="a\nb"))
    assert found.light.status == status
    assert found.headline.startswith(f"{found.light}: ")
    assert annotation(found).startswith(marked)
    assert bool(annotation(found)) is bool(marked)
    assert "\n" not in annotation(found)


def test_what_a_night_says() -> None:
    assert_golden("nightly-red.md", markdown(night(*SLOTS)), "nights")
    busy = night(trouble=("GPU 0 (NVIDIA H200) is busy: 70,000 MB of it are in use",))
    assert_golden("nightly-trouble.md", markdown(busy), "nights")


def test_the_light_of_a_run() -> None:
    example = report(REHEARSAL)
    for expected, light in ((True, Light.GREEN), (False, Light.RED), (None, Light.AMBER)):
        verdict = VerdictReport(verdict=Verdict.INCONCLUSIVE, expected=expected, because="because")
        assert light_of(replace(example, verdict=verdict)) is light
        refused = tuple(
            replace(arm, trials=tuple(replace(one, outcome=Outcome.UNSUPPORTED) for one in arm.trials))
            for arm in example.arms
        )
        assert light_of(replace(example, verdict=verdict, arms=refused)) is Light.NONE
    undecided = VerdictReport(verdict=Verdict.INCONCLUSIVE, expected=None, because="because")
    assert light_of(replace(example, verdict=undecided, imitated=False)) is Light.NONE


def test_one_junit_file_for_the_night() -> None:
    root = ET.fromstring(suites(night(*SLOTS, trouble=("x\x00",))))
    assert [suite.get("name") for suite in root] == ["nightly", "a-good", "b-bad", "c-quiet"]
    assert {case.get("name"): [one.tag for one in case] for case in root[0]} == {
        "d-lost": ["error"],
        "e-big": ["skipped"],
        "preflight": ["error"],
    }
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert int(root.get(name, "-1")) == len(list(root.iter(tag)))
        assert sum(int(suite.get(name, "-1")) for suite in root) == len(list(root.iter(tag)))


def test_busy_gpus_are_trouble_of_the_host(tmp_path: Path, stub_gpus: StubGpus) -> None:
    stub_gpus.say(cards=[{}, {"memory.used": 70000}])
    assert not list(host_problems(ServerKind.PROCESS, tmp_path, 0)), "runs lease the other card"
    stub_gpus.say(cards=[{"memory.used": 70000}])
    (shown,) = host_problems(ServerKind.PROCESS, tmp_path, 0)
    assert shown == "GPU 0 (stub of an H200) is busy: 70,000 MiB of it are in use"
    stub_gpus.say(fail="no driver")
    assert list(host_problems(ServerKind.PROCESS, tmp_path, 0)) == ["nvidia-smi fails: no driver"]
    stub_gpus.say(cards=[])
    (shown,) = host_problems(ServerKind.PROCESS, tmp_path, 0)
    assert shown == "no NVIDIA GPU: nvidia-smi is absent, or lists none"


def test_a_full_disk_is_trouble_of_the_host(tmp_path: Path) -> None:
    (shown,) = host_problems(ServerKind.REHEARSAL, tmp_path / "not" / "made", 10**9)
    assert "GB are free where runs are written" in shown
    assert not list(host_problems(ServerKind.REHEARSAL, tmp_path, 0))


@pytest.mark.usefixtures("stub_gpus")
def test_no_container_engine_is_trouble_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    (shown,) = host_problems(ServerKind.DOCKER, tmp_path, 0)
    assert "none.sock" in shown
