"""Whole runs on the rehearsal engine with loads and output checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Done, Harness
from vllm_repro.journal.journal import read
from vllm_repro.scenario.catalogue import scenario_files

LOADS = """    throughput=[
        throughput(prompt=32, output=8, concurrency=[1, 2], baseline="eager"),
        throughput(prompt=5000, output=4, baseline="eager"),
    ],
"""


def scenario(folder: Path, declared: str) -> str:
    """Return tq-chunked-prefill with throughput and output checks."""
    source = next(path for path in scenario_files() if path.name == "tq_chunked_prefill.py")
    text = source.read_text(encoding="utf-8")
    text = text.replace("    chat,\n", "    chat,\n    checks,\n", 1)
    text = re.sub(r"    throughput=throughput\(.*\),\n", declared, text)
    path = folder / source.name
    path.write_text(text, encoding="utf-8")
    return str(path)


def run(harness: Harness, path: str, version: str, arms: str, *words: str, fault: str = "") -> Done:
    named = [word for arm in arms.split() for word in ("--arm", arm)]
    env = {"VLLM_REHEARSAL_FAULT": fault} if fault else {}
    return harness("run", path, "--server", "rehearsal", "--vllm", version, *named, *words, env=env)


def test_arms_that_live_are_measured_and_nothing_is_claimed(
    harness: Harness, tmp_path: Path
) -> None:
    arms = "reported eager bigger-chunk near-miss-128"
    done = run(harness, scenario(tmp_path, LOADS), "0.23.0", arms, "--throughput")
    assert done.status == 0, done.out + done.err
    report = done.report
    assert report["throughput"] is None
    assert "REHEARSAL" in report["throughput_withheld"]
    assert done.folder is not None
    journal = read(done.folder / "journal.jsonl")
    # The one that died has no figure; the near miss has the server of the one that died, and would
    # only die of the longer load.
    points = list(journal.of("throughput-point"))
    assert {entry["arm"] for entry in points} == {"eager", "bigger-chunk"}
    assert all(entry["usage"] == entry["counted"] for entry in points)
    # Each load has a figure with the mark, or the reason why not: a busy machine is late by a
    # hundredth of 15 ms.
    lines = [line for line in done.out.splitlines() if "at once" in line]
    shown = [line for line in lines if ", trial " not in line]
    assert len(shown) + sum("at once is left out: " in line for line in lines) == 6
    assert all("(REHEARSAL)" in line for line in shown)
    assert "--throughput" in report["reproduce"]


def test_an_engine_that_dies_while_measured_gives_no_figure(
    harness: Harness, tmp_path: Path
) -> None:
    done = run(
        harness, scenario(tmp_path, LOADS), "0.24.0", "reported", "--throughput", fault="other:20"
    )
    trial = done.report["arms"][0]["trials"][0]
    assert trial["outcome"] == "other-crash"
    assert trial["during"].startswith("throughput (32 -> 8 tokens, 2 at once)")
    assert trial["throughput"] is None
    assert "reported (REHEARSAL)" not in done.out
    assert "was not measured: the engine died or hung" in done.out
    assert done.folder is not None
    assert "after the workload, in throughput" in (done.folder / "report.md").read_text(
        encoding="utf-8"
    )


def test_an_arm_that_says_something_else_than_the_baseline(
    harness: Harness, tmp_path: Path
) -> None:
    """Spoil the fourth request of each arm: it is an output check only in the reported arm."""
    path = scenario(tmp_path, '    output=checks(same=16, baseline="bigger-chunk"),\n')
    done = run(harness, path, "0.24.0", "reported bigger-chunk", fault="garbage:4")
    reported, other = (arm["trials"][0] for arm in done.report["arms"])
    assert (reported["outcome"], other["outcome"]) == ("wrong-output", "untriggered")
    assert "differs from that of bigger-chunk after" in reported["why"]
    assert done.report["verdict"] == "changed"


def test_boots_end_when_they_decide_nothing_more(harness: Harness) -> None:
    arms = ("--vllm", "0.24.0", "--arm", "reported", "--arm", "eager")
    done = harness("run", "tq-chunked-prefill", "--server", "rehearsal", "--trials", "auto", *arms)
    assert done.status == 0, done.out + done.err
    assert "--trials auto" in done.report["reproduce"]
    assert {arm["name"]: len(arm["trials"]) for arm in done.report["arms"]} == {
        "reported": 4,
        "eager": 1,
    }


@pytest.mark.parametrize(
    ("words", "declared", "message"),
    [
        (("--throughput",), "", "declares no load to measure"),
        (("--throughput", "--arm", "near-miss-128"), LOADS, "the server is that of an earlier arm"),
        (("--trials", "some"), "", "is no number of boots from 1 to 200"),
    ],
)
def test_wishes_that_cannot_be_fulfilled(
    harness: Harness, tmp_path: Path, words: tuple[str, ...], declared: str, message: str
) -> None:
    path = scenario(tmp_path, declared) if declared else "min-tokens-stop-ids"
    done = harness("run", path, "--server", "rehearsal", *words)
    assert (done.status, done.folder) == (64, None)
    assert message in done.err
