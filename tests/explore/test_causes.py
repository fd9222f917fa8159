"""`vllm-repro causes` on servers, with fake runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.report_examples import replace, run_of
from vllm_repro.cli import main
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.report.model import RunReport
from vllm_repro.running.job import Job
from vllm_repro.running.resume import read_run
from vllm_repro.verdict.outcome import Outcome

CRASH, CLEAN = Outcome.CRASH, Outcome.CLEAN
Answer = Callable[[Job], RunReport]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Answer], list[Job]]:
    """Replace runs by `answer` and return the list of requested jobs."""

    def put(answer: Answer) -> list[Job]:
        asked: list[Job] = []

        def run_one(job: Job, _progress: object) -> RunReport:
            asked.append(job)
            return answer(job)

        monkeypatch.setattr("vllm_repro_explore.causes.run_one", run_one)
        monkeypatch.setenv("VLLM_REPRO_REPORTS", str(tmp_path / "reports"))
        return asked

    return put


def as_declared(job: Job) -> RunReport:
    """Crash 0.23.0 unless it is changed, and later releases only if they are changed."""
    release, changed = str(job.options.vllm), bool(job.arms[0].patches)
    dies = (release == "0.23.0") is not changed
    return run_of(
        "0.23.0" if release == "0.23.0" else "0.24.0",
        [CRASH if dies else CLEAN] * (job.trials or 0),
    )


def test_each_change_is_booted_beside_its_release(
    made_up: Callable[[Answer], list[Job]], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = made_up(as_declared)
    assert main(["causes", "tq-chunked-prefill", "--trials", "2", "--json"]) == 0
    shown = capsys.readouterr()
    assert [(str(job.options.vllm), len(job.arms[0].patches)) for job in asked] == [
        ("0.23.0", 0),
        ("0.23.0", 1),
        ("0.24.0", 0),
        ("0.24.0", 1),
        ("0.24.0", 1),
        ("0.32.0", 0),
        ("0.32.0", 1),
    ]
    assert {(job.options.server, job.trials, job.arms[0].name) for job in asked} == {
        ("lab", 2, "reported")
    }
    again = "vllm-repro causes tq-chunked-prefill --trials 2 --seed 1 --server lab"
    assert {job.reproduce for job in asked} == {again}, (
        "and not a run of the arm without the change"
    )
    loaded = json.loads(shown.out)
    assert (loaded["evidence"], loaded["reproduce"]) == ("lab", again)
    assert [row["died"] for row in loaded["rows"]] == [2, 0, 0, 2, 2, 0, 2]
    assert {(row["n"], row["listed_twice"], row["as_expected"]) for row in loaded["rows"]} == {
        (2, None, True)
    }
    assert loaded["rows"][0]["sites"] == ["AssertionError"]
    assert all(row["run"] for row in loaded["rows"])
    table = [line.split("  ")[-1].strip() for line in shown.err.splitlines() if " of 2  " in line]
    back = "brings the crash back"
    assert table == ["as released", "protects", "as released", back, back, "as released", back]
    assert "list twice" not in shown.err, "no server tells that"
    assert "0 crashes in 2 boots: the true rate is below 78% (95 % confidence)" in shown.err


def test_a_change_that_does_nothing_is_a_surprise(
    made_up: Callable[[Answer], list[Job]], capsys: pytest.CaptureFixture[str]
) -> None:
    made_up(lambda job: run_of("0.23.0", [CRASH if str(job.options.vllm) == "0.23.0" else CLEAN]))
    assert main(["causes", "tq-chunked-prefill"]) == 1
    out = capsys.readouterr().out
    assert "1 boot of each, lab servers" in out
    assert out.count("changes nothing that was seen  A SURPRISE") == 4


def test_what_could_not_be_booted_says_nothing(
    made_up: Callable[[Answer], list[Job]], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(job: Job) -> RunReport:
        if str(job.options.vllm) == "0.32.0":
            raise InfraError("no such wheel", hint="look at the index")
        return as_declared(job)

    made_up(answer)
    assert main(["causes", "tq-chunked-prefill"]) == 2
    shown = capsys.readouterr()
    assert shown.out.count("UNDECIDED") == 2
    assert "unknown: no conclusive trial with it, or without it" in shown.out
    assert "no such wheel (look at the index)" in shown.out + shown.err


def test_an_interrupted_run_ends_the_table(made_up: Callable[[Answer], list[Job]]) -> None:
    asked = made_up(lambda job: replace(as_declared(job), interrupted="SIGTERM"))
    assert main(["causes", "tq-chunked-prefill"]) == 130
    assert len(asked) == 1


def test_the_scheduler_has_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["causes", "sco-hybrid", "--server", "lab"]) == 64
    assert "leave --server out" in capsys.readouterr().err


def test_a_run_of_a_change_is_not_gone_on_with_alone(tmp_path: Path) -> None:
    line = {
        "t": 1.0,
        "event": "run-started",
        "reproduce": "vllm-repro causes tq-chunked-prefill --server lab",
    }
    (tmp_path / "journal.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match="belongs to another command") as refused:
        read_run(tmp_path)
    assert refused.value.hint == "again: vllm-repro causes tq-chunked-prefill --server lab"
