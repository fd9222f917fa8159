"""Runs of hundreds of boots: what people read stays short and says how much more there is, and memory grows by little a boot."""

from __future__ import annotations

import tracemalloc
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from benchmarks.rendering import make_journal, make_logs

from vllm_repro.report.build import build
from vllm_repro.report.files import pieces, render
from vllm_repro.report.wording import few, telling
from vllm_repro.running.terminal import summary
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.statistics import lower_bound
from vllm_repro.verdict.verdict import counted

ARMS = 8


def made(folder: Path, trials: int) -> Path:
    folder.mkdir()
    make_journal(folder, trials)
    return folder


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made(tmp_path_factory.mktemp("huge") / "run", 50 * ARMS)
    make_logs(folder, 3)
    return folder


@pytest.mark.parametrize(("form", "most"), [("md", 40_000), ("issue", 65_536), ("junit", 40_000)])
def test_what_people_read_stays_short_and_says_what_more_there_is(huge: Path, form: str, most: int) -> None:
    text = render(build(huge), form)
    assert len(text) < most
    assert {"md": "47 more: crash, the boundary crossed in 47", "issue": " x 50", "junit": "47 more: crash"}[
        form
    ] in text


def test_the_terminal_stays_short(huge: Path) -> None:
    assert len(summary(build(huge)).splitlines()) < 60


def test_the_json_is_complete(huge: Path) -> None:
    report = build(huge)
    arms = report.as_json()["arms"]
    assert [len(arm["trials"]) for arm in arms] == [50] * ARMS
    assert {trial["log"] for trial in arms[0]["trials"]} == {f"logs/reported-{number}.log" for number in range(1, 51)}
    assert "".join(pieces(report, "json")) == render(report, "json")


def test_a_case_each_and_a_message_that_a_reader_can_show(huge: Path) -> None:
    root = ET.fromstring(render(build(huge), "junit"))
    assert len(list(root.iter("testcase"))) == ARMS
    assert all(len(one.get("message", "")) < 1_100 for one in root.iter() if one.tag in ("failure", "error", "skipped"))


def test_memory_grows_by_little_a_boot(tmp_path: Path) -> None:
    def peak(trials: int) -> int:
        folder = made(tmp_path / str(trials), trials)
        build(folder)  # what is made once stays out of the count
        tracemalloc.start()
        try:
            report = build(folder)
            for form in ("md", "junit"):
                render(report, form)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    # A boot's lines in the journal are 8 kB, and would be 60 kB as objects.
    assert (peak(30 * ARMS) - peak(10 * ARMS)) / (20 * ARMS) < 40_000


def test_the_bound_of_thousands_of_boots() -> None:
    """Their binomial coefficients are more than a float holds."""
    assert lower_bound(5_000, 10_000) == pytest.approx(0.4918, abs=1e-4)
    assert lower_bound(10_000, 10_000) == pytest.approx(0.05 ** (1 / 10_000))
    for crashed in (1, 500, 1_000):  # on either side of the change of method
        assert lower_bound(crashed, 1_000) == pytest.approx(lower_bound(crashed, 1_001), abs=2e-3)


def test_few_and_telling(huge: Path) -> None:
    assert few(["a", "b", "c"], 2) == ["a", "b", "and 1 more"]
    assert few(["a", "b"], 2) == ["a", "b"]
    arm = build(huge).arms[0]
    shown, rest = telling(arm.trials)
    assert [trial.number for trial in shown] == [1, 2, 3]
    assert rest == ["47 more: crash, the boundary crossed in 47"]
    assert counted([Outcome.CRASH, Outcome.CLEAN, Outcome.CRASH]) == "crash x 2, clean"
