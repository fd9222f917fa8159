"""Interrupted runs that are resumed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.commands import journals, signalled, started, until
from tests.conftest import Harness
from tests.report_examples import REHEARSAL
from vllm_repro.errors import UsageError
from vllm_repro.journal.journal import Entry, Journal, Recording, read
from vllm_repro.report.build import build
from vllm_repro.running.resume import unfinished_run
from vllm_repro.running.trial_order import MOST, Trials, undecided_arms
from vllm_repro.scenario.scenario import Arm
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import ArmResult, Expected, Record, arm_result, comparisons

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


def remaining(done: Trials, trials: int) -> list[str]:
    """Return the arms in the order of their trials, each of which crashes."""
    tried = []

    def undecided() -> list[str]:
        return [arm.name for arm in ARMS if len(done.outcomes[arm.name]) < trials]

    for arm in done.in_turn(ARMS, undecided):
        done.outcomes[arm.name].append(Outcome.CRASH)
        tried.append(arm.name)
    return tried


@given(st.integers(1, 6), st.integers(0, 12))
def test_what_was_done_and_what_is_left_are_the_whole_plan(trials: int, done: int) -> None:
    whole = remaining(Trials(), trials)
    assert "".join(whole) == ("abba" * trials)[: 2 * trials], "neither arm is always the first"
    entries = [
        entry for place, arm in enumerate(whole[:done]) for entry in boot(arm, 1 + place // 2)
    ]
    assert (
        remaining(unfinished_run(recording(*entries), Path("run")).trials, trials) == whole[done:]
    )


def test_an_interrupted_boot_is_repeated_with_a_new_number() -> None:
    for cut in (boot("b", 1, None), boot("b", 1, "cancelled")):
        left = unfinished_run(recording(*boot("a", 1), *cut), Path("run"))
        assert dict(left.trials.outcomes) == {"a": [Outcome.CRASH]}
        assert dict(left.trials.last) == {"a": 1, "b": 1}
        assert remaining(left.trials, 2) == ["b", "b", "a"]
        assert left.words == ("run", "a-bug", "--server", "rehearsal", "--trials", "3")


def test_a_hang_of_a_spinning_arm_is_no_bug_after_resume() -> None:
    left = unfinished_run(recording(*boot("c", 1, "hang"), *boot("c", 2, "clean")), Path("run"))
    assert dict(left.trials.strange) == {"c": 1}


def test_a_finished_run_is_not_resumed() -> None:
    finished, interrupted = (
        recording(*boot("a", 1), ("run-ended", {"interrupted": signal}), cut=False)
        for signal in (None, "SIGINT")
    )
    with pytest.raises(UsageError, match="is finished"):
        unfinished_run(finished, Path("run"))
    unfinished_run(interrupted, Path("run"))


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
    journal, logs = done.run / "journal.jsonl", done.run / "logs"
    lines = journal.read_bytes().splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if b'"trial-started"' in line]
    journal.write_bytes(b"".join(lines[: starts[1]]))
    died = (logs / "reported-1.log").read_bytes()
    (logs / "eager-1.log").write_bytes(died)
    assert harness("run", "--resume", str(done.run)).status == 0
    (trial,) = build(done.run).arms[1].trials
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
    # The folder names its scenario; the command may name it, too.
    named = () if number is signal.SIGINT else ("tq-chunked-prefill",)
    done = harness("run", *named, "--resume", str(folder))
    assert (done.status, done.folder) == (0, folder), done.out + done.err
    report = done.report
    ended = {"verdict": "reproduces", "interrupted": None, "journal_cut": False}
    assert report.items() >= ended.items()
    counts = [(arm["name"], arm["k"], arm["n"]) for arm in report["arms"]]
    assert counts == [("reported", 2, 2), ("eager", 0, 2)]
    numbers = {arm["name"]: [trial["trial"] for trial in arm["trials"]] for arm in report["arms"]}
    assert numbers == {
        "reported": [1, 2],
        "eager": [1, 2, 3] if number is signal.SIGINT else [2, 3],
    }
    assert len(list((folder / "logs").glob("eager-*.log"))) == 3
    assert harness("run", "tq-chunked-prefill", "--resume", str(folder)).status == 64


CRASH, CLEAN, UNTRIGGERED = Outcome.CRASH, Outcome.CLEAN, Outcome.UNTRIGGERED
REPORTED, EAGER, NEAR = (
    Arm("reported", Expected.DIES),
    Arm("eager", Expected.LIVES),
    Arm("near", Expected.UNTRIGGERED),
)


def boots(
    arms: list[Arm], does: Callable[[str, int], Outcome], record: Record | None = None
) -> dict[str, int]:
    """Return how often each arm is booted. Boot n of an arm ends as `does` returns."""
    done = Trials()

    def results() -> list[ArmResult]:
        return [arm_result(arm.name, arm.expected, done.outcomes[arm.name]) for arm in arms]

    for arm in done.in_turn(arms, lambda: undecided_arms(results(), record, "0.24.0")):
        done.last[arm.name] += 1
        done.finish(arm.name, arm.expected, does(arm.name, done.last[arm.name]), "", crossed=True)
    return {arm.name: done.last[arm.name] for arm in arms}


@pytest.mark.parametrize(
    ("arms", "outcomes", "record", "expected"),
    [
        ([REPORTED], [CRASH], None, [1]),
        ([REPORTED, EAGER, NEAR], [CRASH, CLEAN, UNTRIGGERED], None, [5, 4, 1]),
        ([REPORTED, EAGER], [CRASH, CRASH], None, [1, 1]),
        ([REPORTED, EAGER], [CRASH, UNTRIGGERED], None, [1, 1]),
        ([REPORTED, EAGER], [CLEAN, CLEAN], None, [4, 1]),
        ([REPORTED], [CLEAN], Record(crashed=5, boots=5, run="r", version="0.23.0"), [4]),
        ([REPORTED], [CLEAN], Record(crashed=3, boots=5, run="r", version="0.23.0"), [15]),
        # Fifty-nine boots would be needed, so none is added.
        ([REPORTED], [CLEAN], Record(crashed=1, boots=1, run="r", version="0.23.0"), [1]),
        ([REPORTED], [Outcome.INFRA], None, [2]),
        ([REPORTED], [Outcome.OTHER_CRASH], None, [1]),
        ([REPORTED, EAGER], [Outcome.HANG, CLEAN], None, [1, 1]),
    ],
)
def test_boots_until_it_is_decided(
    arms: list[Arm], outcomes: list[Outcome], record: Record | None, expected: list[int]
) -> None:
    fixed = {arm.name: outcome for arm, outcome in zip(arms, outcomes, strict=True)}
    assert list(boots(arms, lambda name, _: fixed[name], record).values()) == expected


@pytest.mark.parametrize(
    ("record", "needed"),
    [
        (
            Record(crashed=3, boots=3, run="r", version="0.24.0"),
            7,
        ),  # of the release that is patched: what its own deaths ask for
        # of another release: it decides nothing
        (Record(crashed=3, boots=3, run="r", version="0.23.0"), 4),
        (Record(crashed=3, boots=3, run="r", version="0.24.0", arm="near"), 4),
        (None, 4),
    ],
)
def test_a_patch_boots_as_often_as_deaths_of_its_release_ask(
    record: Record | None, needed: int
) -> None:
    boots = 0
    while undecided_arms(
        [arm_result("reported", Expected.DIES, [CLEAN] * boots)], record, "0.24.0+cpu", patched=True
    ):
        boots += 1
    assert boots == needed


def test_one_infra_boot_is_repeated_and_does_not_count() -> None:
    arms = [REPORTED, EAGER]
    done = Trials()
    for booted in done.in_turn(
        arms, lambda: [arm.name for arm in arms if len(done.outcomes[arm.name]) < 2]
    ):
        done.last[booted.name] += 1
        spoiled = booted is EAGER and done.last[booted.name] == 1
        done.finish(
            booted.name,
            booted.expected,
            Outcome.INFRA if spoiled else Outcome.CLEAN,
            "",
            crossed=True,
        )
    assert (done.last, done.outcomes["eager"]) == ({"reported": 2, "eager": 3}, [Outcome.CLEAN] * 2)


def test_a_bug_in_four_of_five_boots_needs_more_quiet_boots() -> None:
    def does(name: str, number: int) -> Outcome:
        return CRASH if name == "reported" and number != 5 else CLEAN

    assert boots([REPORTED, EAGER], does) == {"reported": 5, "eager": 8}


@pytest.mark.parametrize("arms", [[("reported", 1)], [("reported", 1), ("eager", 0)]])
def test_a_hang_that_is_not_the_bug_is_no_reason_to_boot_again(arms: list[tuple[str, int]]) -> None:
    expected = {"reported": Expected.SPINS, "eager": Expected.LIVES}
    outcomes = {"reported": Outcome.HANG, "eager": CLEAN}
    assert not undecided_arms(
        [arm_result(name, expected[name], [outcomes[name]], strange=odd) for name, odd in arms]
    )


@given(
    st.lists(st.sampled_from([CRASH, CLEAN, CLEAN, UNTRIGGERED]), min_size=60, max_size=60),
    st.booleans(),
)
@settings(max_examples=60)
def test_it_always_ends(outcomes: list[Outcome], compared: bool) -> None:
    arms = [REPORTED, EAGER] if compared else [REPORTED]
    offset = {"reported": 0, "eager": 30}
    found = boots(arms, lambda name, number: outcomes[offset[name] + number - 1])
    assert all(1 <= number <= MOST for number in found.values())


def test_what_quiet_arms_show_beside_a_dying_one() -> None:
    def result(arm: Arm, *outcomes: Outcome) -> ArmResult:
        return arm_result(arm.name, arm.expected, outcomes)

    (sentence,) = comparisons([result(REPORTED, *[CRASH] * 5), result(EAGER, *[CLEAN] * 4)])
    assert sentence.startswith("eager: died in 0 of 4 boots, against 5 of 5 of reported")
    assert "in less than 5 % of cases (Fisher's exact test: p = 0.0079)" in sentence
    (sentence,) = comparisons([result(REPORTED, CRASH), result(EAGER, CLEAN)])
    assert "too few boots to say that it helps" in sentence
    assert comparisons([result(REPORTED, CLEAN), result(EAGER, CLEAN)]) == ()
    assert (
        comparisons([result(REPORTED, CRASH), result(EAGER, CRASH), result(NEAR, UNTRIGGERED)])
        == ()
    )
