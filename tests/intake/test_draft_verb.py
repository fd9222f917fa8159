from __future__ import annotations

import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Harness
from tests.golden_files import assert_refused, missing
from tests.report_examples import DIED, EXAMPLES, REHEARSAL
from vllm_repro.scenario.catalogue import all_scenarios


def run_of(example: Path, folder: Path) -> Path:
    run = folder / "run"
    run.mkdir()
    shutil.copy(example / "journal.jsonl", run)
    return run


def test_a_draft_is_a_file_and_a_command_and_nothing_more(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(DIED, tmp_path)
    (run / "logs").mkdir()
    (run / "logs" / "reported-1.log").write_text(
        "INFO\nERROR boom for HF_TOKEN=abcdef\nend\n", encoding="utf-8"
    )
    (tmp_path / "bin").mkdir()
    gh = tmp_path / "bin" / "gh"
    gh.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n", encoding="utf-8")
    gh.chmod(0o755)
    env = {"PATH": f"{gh.parent}:/usr/bin:/bin"}
    fixed = harness("draft", str(run), env=env)
    assert (fixed.status, "gh issue" in fixed.out) == (0, False)
    assert "No command: the bug is declared fixed in >=0.24.0" in fixed.out
    unfixed = [replace(one, status=replace(one.status, good="")) for one in all_scenarios()]
    monkeypatch.setattr("vllm_repro_intake.run_draft.all_scenarios", lambda **_: unfixed)
    done = harness("draft", str(run), env=env)
    assert done.status == 0, done.err
    (command,) = [line for line in done.out.splitlines() if line.startswith("gh ")]
    assert shlex.split(command)[:3] == ["gh", "issue", "comment"]
    assert Path(shlex.split(command)[-1]) == run / "issue.md"
    body = (run / "issue.md").read_text(encoding="utf-8")
    assert "ERROR boom" not in body
    assert (
        missing(
            done.err,
            "the draft has no log; attach logs/reported-1.log",
            "no room for how the command differs from the reported one",
        )
        == []
    )
    assert done.err.count("may be the same as https://github.com/") == 3
    assert not (tmp_path / "called").exists()
    printed = harness("report", str(run), "--format", "issue")
    assert printed.out == body


def test_a_rehearsal_is_not_for_upstream(harness: Harness, tmp_path: Path) -> None:
    done = harness("draft", str(run_of(REHEARSAL, tmp_path)), "-o", str(tmp_path / "there.md"))
    assert done.status == 0
    assert "a REHEARSAL says nothing about vLLM" in done.err
    assert "gh issue" not in done.out + done.err
    assert "(REHEARSAL)" in (tmp_path / "there.md").read_text(encoding="utf-8").splitlines()[0]


def test_a_bug_that_the_run_did_not_see_is_no_new_issue(harness: Harness, tmp_path: Path) -> None:
    run = run_of(
        next(folder for folder in EXAMPLES if folder.name == "sco-window-loads-wait-lab-0.32.0"),
        tmp_path,
    )
    assert "gh issue create" in harness("draft", str(run)).out
    cause = "vLLM subtracts the length of the request's block"
    assert cause in (run / "issue.md").read_text(encoding="utf-8")
    journal = run / "journal.jsonl"
    short = journal.read_text(encoding="utf-8").replace('"crossed": true', '"crossed": false')
    journal.write_text(short, encoding="utf-8")
    done = harness("draft", str(run))
    assert (done.status, "gh issue" in done.out) == (0, False)
    assert "the bug was not seen in this run" in done.out
    assert "the run decided nothing" in done.err
    assert cause not in (run / "issue.md").read_text(encoding="utf-8"), (
        "it would explain what nobody saw"
    )


def test_a_journal_of_a_newer_release_is_wrong_usage(harness: Harness, tmp_path: Path) -> None:
    journal = run_of(REHEARSAL, tmp_path) / "journal.jsonl"
    journal.write_text(
        journal.read_text(encoding="utf-8").replace('"schema": 1', '"schema": 99'), encoding="utf-8"
    )
    assert_refused(
        harness("draft", str(journal.parent)), "has schema 99, and this release reads schema 1"
    )


def test_a_folder_of_several_runs_is_named(harness: Harness) -> None:
    assert_refused(
        harness("draft", str(REHEARSAL.parent / "bisect" / "tq-chunked-prefill")),
        "is a bisection, not a run",
    )


def test_a_draft_that_cannot_be_written_is_named(harness: Harness) -> None:
    assert_refused(
        harness("draft", str(REHEARSAL), "-o", "/proc/nowrite/x"), "cannot write /proc/nowrite/x"
    )


def test_where_there_is_no_run(harness: Harness, tmp_path: Path) -> None:
    assert harness("draft", str(tmp_path)).status == 64
