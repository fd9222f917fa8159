"""Interrupted runs that are resumed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import journals, signalled, started, until
from tests.conftest import Harness
from tests.report_examples import REHEARSAL
from vllm_repro.errors import UsageError
from vllm_repro.journal.journal import Entry, Journal, Recording, read
from vllm_repro.report.build import build
from vllm_repro.running.boots import Boots
from vllm_repro.running.resume import unfinished_run
from vllm_repro.scenario.scenario import Arm
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected

ARMS = [Arm("a", Expected.DIES), Arm("b", Expected.LIVES)]
SPINS = Arm("c", Expected.SPINS)
HEADER = {
    "reproduce": "vllm-repro run a-bug --server rehearsal --trials 3",
    "scenario": "a-bug",
    "machine": {"cpus": 2},
    "arms": [{"name": arm.name, "expected": arm.expected} for arm in (*ARMS, SPINS)],
}


def recording(*entries: tuple[str, dict[str, Any]], cut: bool = True) -> Recording:
    whole = (("run-started", HEADER), *entries)
    return Recording(
        tuple(Entry(float(t), event, fields) for t, (event, fields) in enumerate(whole)), cut=cut
    )


def boot(arm: str, number: int, outcome: str | None = "crash") -> list[tuple[str, dict[str, Any]]]:
    started = ("trial-started", {"arm": arm, "trial": number})
    ended = {
        "arm": arm,
        "trial": number,
        "outcome": outcome,
        "during": "",
        "trigger": {"crossed": True},
    }
    return [started] if outcome is None else [started, ("trial-ended", ended)]


def remaining(boots: Boots, trials: int) -> list[str]:
    """Return the arms in the order of their boots, each of which crashes."""
    found = []
    for arm in boots.in_turn(
        ARMS, lambda: [one.name for one in ARMS if len(boots.outcomes[one.name]) < trials]
    ):
        boots.outcomes[arm.name].append(Outcome.CRASH)
        found.append(arm.name)
    return found


@given(st.integers(1, 6), st.integers(0, 12))
def test_what_was_done_and_what_is_left_are_the_whole_plan(trials: int, done: int) -> None:
    whole = remaining(Boots(), trials)
    assert "".join(whole) == ("abba" * trials)[: 2 * trials], "neither arm is always the first"
    entries = [
        entry for place, arm in enumerate(whole[:done]) for entry in boot(arm, 1 + place // 2)
    ]
    assert remaining(unfinished_run(recording(*entries), Path("run")).boots, trials) == whole[done:]


def test_an_interrupted_boot_is_repeated_with_a_new_number() -> None:
    for cut in (boot("b", 1, None), boot("b", 1, "cancelled")):
        left = unfinished_run(recording(*boot("a", 1), *cut), Path("run"))
        assert dict(left.boots.outcomes) == {"a": [Outcome.CRASH]}
        assert dict(left.boots.last) == {"a": 1, "b": 1}
        assert remaining(left.boots, 2) == ["b", "b", "a"]
        assert left.words == ("run", "a-bug", "--server", "rehearsal", "--trials", "3")


def test_a_hang_of_a_spinning_arm_is_no_bug_after_resume() -> None:
    assert dict(
        unfinished_run(
            recording(*boot("c", 1, "hang"), *boot("c", 2, "clean")), Path("run")
        ).boots.strange
    ) == {"c": 1}


def test_a_run_that_came_to_its_end_is_not_gone_on_with() -> None:
    with pytest.raises(UsageError, match="is finished"):
        unfinished_run(
            recording(*boot("a", 1), ("run-ended", {"interrupted": None}), cut=False), Path("run")
        )
    unfinished_run(
        recording(*boot("a", 1), ("run-ended", {"interrupted": "SIGINT"}), cut=False), Path("run")
    )


@pytest.mark.parametrize("name", ["scenario", "machine"])
def test_resume_refuses_another_scenario_or_machine(name: str) -> None:
    left = unfinished_run(recording(), Path("run"))
    left.refuse_changed(HEADER)
    with pytest.raises(UsageError, match=f"its {name} has changed"):
        left.refuse_changed({**HEADER, name: "another"})


def test_the_command_of_a_refusal_can_be_pasted(harness: Harness, tmp_path: Path) -> None:
    folder = tmp_path / "a run; cut"
    folder.mkdir()
    lines = (REHEARSAL / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "journal.jsonl").write_bytes(b"".join(lines[:-1]))
    for words, message in (
        (["--seed", "2"], "--seed would change them"),
        (["sco-hybrid"], "belongs to tq-chunked-prefill"),
    ):
        refused = harness("run", *words, "--resume", str(folder))
        assert (refused.status, message in refused.err) == (64, True)
        assert f"next: vllm-repro run --resume '{folder}'\n" in refused.err


def test_a_journal_has_one_writer_and_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"t": 1, "event": "run-started"}\n{"t": 2, "ev', encoding="utf-8")
    with Journal(path) as journal:
        with pytest.raises(UsageError, match="another run is writing"):
            Journal(path)
        journal.write("run-ended", interrupted=None)
    found = read(path)
    assert ([entry.event for entry in found.entries], found.damaged) == (
        ["run-started", "run-ended"],
        1,
    )


WORDS = (
    "tq-chunked-prefill",
    "--server",
    "rehearsal",
    "--arm",
    "reported",
    "--arm",
    "eager",
    "--trials",
    "2",
)


def test_the_log_of_a_lost_boot_is_not_reused(
    harness: Harness,
) -> None:
    done = harness("run", *WORDS[:-1], "1")
    assert done.folder is not None
    journal, logs = done.folder / "journal.jsonl", done.folder / "logs"
    lines = journal.read_bytes().splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if b'"trial-started"' in line]
    journal.write_bytes(b"".join(lines[: starts[1]]))
    died = (logs / "reported-1.log").read_bytes()
    (logs / "eager-1.log").write_bytes(died)
    assert harness("run", "--resume", str(done.folder)).status == 0
    (trial,) = build(done.folder).arms[1].trials
    assert (trial.number, trial.outcome) == (2, Outcome.CLEAN)
    assert (logs / "eager-1.log").read_bytes() == died


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_resumes_to_a_whole_report(
    tmp_path: Path, harness: Harness, number: signal.Signals
) -> None:
    out = tmp_path / "reports"
    process = started(out, "run", *WORDS, VLLM_REHEARSAL_FAULT="slow-boot:0.5")
    until(lambda: "".join(journals(out)).count("server-started") == 2)
    _, folder = signalled(process, number, out)
    # The folder says which scenario it is of; who names it as well is right, too.
    named = () if number is signal.SIGINT else ("tq-chunked-prefill",)
    done = harness("run", *named, "--resume", str(folder))
    assert (done.status, done.folder) == (0, folder), done.out + done.err
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert (report["verdict"], report["interrupted"], report["journal_cut"]) == (
        "reproduces",
        None,
        False,
    )
    assert [(arm["name"], arm["k"], arm["n"]) for arm in report["arms"]] == [
        ("reported", 2, 2),
        ("eager", 0, 2),
    ]
    numbers = {arm["name"]: [trial["trial"] for trial in arm["trials"]] for arm in report["arms"]}
    assert numbers == {
        "reported": [1, 2],
        "eager": [1, 2, 3] if number is signal.SIGINT else [2, 3],
    }
    assert len(list((folder / "logs").glob("eager-*.log"))) == 3
    assert harness("run", "tq-chunked-prefill", "--resume", str(folder)).status == 64
