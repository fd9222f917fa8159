from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.conftest import StubGpus
from tests.golden_files import assert_golden
from tests.report_examples import REHEARSAL, replace, report
from vllm_repro.report.model import RunReport, verdict_fields
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Verdict, VerdictReport
from vllm_repro_nights.night_result import (
    Light,
    Night,
    ScenarioNight,
    annotation,
    judged,
    markdown,
    suites,
)
from vllm_repro_nights.run_night import host_problems

EXAMPLE = report(REHEARSAL)


def ended(verdict: Verdict, expected: bool | None, because: str, **fields: object) -> RunReport:
    decided = VerdictReport(verdict=verdict, expected=expected, because=because)
    return replace(EXAMPLE, **verdict_fields(decided), **fields)


def ran(
    scenario: str, verdict: Verdict, expected: bool | None, because: str, run: str
) -> ScenarioNight:
    fields = {
        "scenario": scenario,
        "evidence": "gpu",
        "vllm_version": "0.33.0",
        "folder": Path(run),
    }
    return judged(ended(verdict, expected, because, **fields))


def of_outcome(outcome: Outcome) -> ScenarioNight:
    """Return an undecided scenario whose trials all had the outcome."""
    arms = tuple(
        replace(arm, trials=tuple(replace(trial, outcome=outcome) for trial in arm.trials))
        for arm in EXAMPLE.arms
    )
    return judged(ended(Verdict.INCONCLUSIVE, None, "why", arms=arms))


def without_run(scenario: str, light: Light, why: str) -> ScenarioNight:
    return ScenarioNight(scenario=scenario, light=light, why=why)


GREEN = ran("a-good", Verdict.REPRODUCES, True, "reported: died in 1 of 1 boots", "run-1")
RED = ran(
    "b-bad", Verdict.REGRESSED, False, "died | of it; this release was declared good", "run-2"
)
AMBER = ran("c-quiet", Verdict.INCONCLUSIVE, None, "nothing can be said: 1 untriggered", "run-3")
LOST = without_run("d-lost", Light.AMBER, "the image is not on this machine")
NONE = without_run(
    "e-big", Light.NONE, "the scenario needs 2 GPUs, and this machine has 1 NVIDIA GPU"
)
NOT_IMITATED = judged(ended(Verdict.INCONCLUSIVE, None, "why", imitated=False))
CUT = without_run("f-cut", Light.CUT, "not run: the night was interrupted before")
LATE = without_run("g-late", Light.LATE, "9 s of 60 s were left, and it took 70 s before")
ALL = (GREEN, RED, AMBER, LOST, NONE, CUT, LATE)


def night(*scenarios: ScenarioNight, **fields: object) -> Night:
    asked = "vllm/vllm-openai:nightly, server docker"
    made = Night(asked=asked, started_at="2026-11-20T02:17:00Z", scenarios=scenarios)
    return replace(made, **fields)


def test_the_first_vllm_in_which_the_bug_shows_is_named() -> None:
    quiet = ran("a-good", Verdict.QUIET, True, "lived", "run-0")
    later = ran("a-good", Verdict.QUIET, True, "lived", "run-9")
    results = [(GREEN, "0.24.0"), (later, "0.28.0"), (quiet, "0.23.0"), (RED, "0.24.0")]
    results += [(NONE, "0.24.0"), (CUT, "0.23.0"), (of_outcome(Outcome.UNSUPPORTED), "0.23.0")]
    several = night(
        *(dataclasses.replace(result, vllm=vllm) for result, vllm in results),
        vllms=("0.23.0", "0.24.0", "0.28.0"),
    )
    assert several.by_vllm == [
        ("scenario", "0.23.0", "0.24.0", "0.28.0", "first bad"),
        ("a-good", "quiet", "reproduces", "quiet", "0.24.0"),
        ("b-bad", "-", "regressed", "-", "0.24.0"),
        ("e-big", "-", "unsupported", "-", "-"),
        ("f-cut", "interrupted", "-", "-", "-"),
        (EXAMPLE.scenario, "unsupported", "-", "-", "-"),
    ]
    assert "(b-bad in 0.24.0)" in several.headline
    assert 'name="e-big in 0.24.0"' in suites(several)
    assert night(quiet, vllms=("0.23.0",)).by_vllm[1] == ("a-good", "-", "none")
    assert night(GREEN, RED).by_vllm == []


@pytest.mark.parametrize(
    ("scenarios", "light"),
    [
        ((), Light.AMBER),
        ((NONE,), Light.AMBER),
        ((GREEN,), Light.GREEN),
        ((GREEN, NONE), Light.GREEN),
        ((GREEN, AMBER), Light.AMBER),
        ((LOST, GREEN), Light.AMBER),
        ((CUT, GREEN), Light.AMBER),
        ((GREEN, AMBER, RED), Light.RED),
    ],
)
def test_red_outweighs_amber_which_outweighs_green(
    scenarios: tuple[ScenarioNight, ...], light: Light
) -> None:
    assert night(*scenarios).light is light
    assert night(*reversed(scenarios)).light is light
    for more in ({"trouble": ("a GPU is busy",)}, {"interrupted": "SIGTERM"}):
        assert night(*scenarios, **more).light is (Light.RED if light is Light.RED else Light.AMBER)


@pytest.mark.parametrize(
    ("scenarios", "trouble", "expected"),
    [
        ((AMBER,), (), False),
        ((GREEN, AMBER, NONE), (), False),
        ((GREEN,), ("a GPU is busy",), True),
        ((GREEN, LOST), (), True),
        ((NONE, LATE), (), True),
        ((GREEN, of_outcome(Outcome.INFRA)), (), True),
        ((of_outcome(Outcome.UNSUPPORTED),), (), True),
        ((NOT_IMITATED, NOT_IMITATED), (), True),
        ((GREEN, NOT_IMITATED), (), False),
    ],
)
def test_a_night_that_shows_nothing_had_trouble(
    scenarios: tuple[ScenarioNight, ...], trouble: tuple[str, ...], *, expected: bool
) -> None:
    assert night(*scenarios, trouble=trouble).had_trouble is expected


@pytest.mark.parametrize(
    ("scenario", "status", "marked"),
    [(GREEN, 0, ""), (RED, 1, "::error "), (AMBER, 2, "::warning "), (NONE, 2, "::warning ")],
)
def test_a_light_is_a_status_and_an_annotation(
    scenario: ScenarioNight, status: int, marked: str
) -> None:
    shown = night(replace(scenario, scenario="a\nb"))
    assert shown.light.status == status
    assert shown.headline.startswith(f"{shown.light}: ")
    assert annotation(shown).startswith(marked)
    assert bool(annotation(shown)) is bool(marked)
    assert "\n" not in annotation(shown)


def test_the_summary_of_a_night() -> None:
    assert_golden(
        "nightly-red.md", markdown(night(*ALL, changes=("REGRESSED: b-bad: it died",))), "nights"
    )
    trouble = "GPU 0 (NVIDIA H200) is busy: 70,000 MB of it are in use"
    assert_golden("nightly-trouble.md", markdown(night(trouble=(trouble,), changes=())), "nights")


@pytest.mark.parametrize(
    ("expected", "fields", "light"),
    [
        (True, {}, Light.GREEN),
        (False, {}, Light.RED),
        (None, {}, Light.AMBER),
        (None, {"imitated": False}, Light.NONE),
        (None, {"interrupted": "SIGINT"}, Light.CUT),
    ],
)
def test_the_light_of_a_run(expected: bool | None, fields: dict[str, object], light: Light) -> None:
    assert judged(ended(Verdict.INCONCLUSIVE, expected, "because", **fields)).light is light


def test_a_run_that_is_unsupported_has_no_light() -> None:
    assert of_outcome(Outcome.UNSUPPORTED).light is Light.NONE


def test_one_junit_file_for_the_night() -> None:
    root = ET.fromstring(suites(night(*ALL, trouble=("x\x00",), interrupted="SIGINT")))
    assert [suite.get("name") for suite in root] == ["nightly", "a-good", "b-bad", "c-quiet"]
    cases = {case.get("name"): case[0].tag for case in root[0]}
    assert cases.pop("e-big") == "skipped"
    assert cases == dict.fromkeys(("d-lost", "f-cut", "g-late", "preflight", "night"), "error")
    for name, tag in (
        ("tests", "testcase"),
        ("failures", "failure"),
        ("errors", "error"),
        ("skipped", "skipped"),
    ):
        assert int(root.get(name, "-1")) == len(list(root.iter(tag)))
        assert sum(int(suite.get(name, "-1")) for suite in root) == len(list(root.iter(tag)))


def test_problems_of_the_host(
    tmp_path: Path, stub_gpus: StubGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problems(kind: ServerKind = ServerKind.PROCESS, least_disk_gb: float = 0) -> list[str]:
        return list(host_problems(kind, tmp_path / "not" / "made", least_disk_gb))

    stub_gpus.say(cards=[{}, {"memory.used": 70000}])
    assert problems() == [], "runs lease the other card"
    stub_gpus.say(cards=[{"memory.used": 70000}])
    assert problems() == ["GPU 0 (stub of an H200) is busy: 70,000 MiB of it are in use"]
    stub_gpus.say(fail="no driver")
    assert problems() == ["nvidia-smi fails: no driver"]
    stub_gpus.say(cards=[])
    assert problems() == ["no NVIDIA GPU: nvidia-smi is absent, or lists none"]
    assert problems(ServerKind.REHEARSAL) == []
    assert "GB are free where runs are written" in problems(ServerKind.REHEARSAL, 10**9)[0]
    stub_gpus.say(cards=[{}])
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert "none.sock" in problems(ServerKind.DOCKER)[0]
