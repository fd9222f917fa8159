"""The store equals what the journals contain, also with concurrent writers, and never fails a run."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Harness
from tests.history.simulated import Weeks
from tests.report.test_measurements import measured
from tests.report_examples import EXAMPLES, LIVED
from vllm_repro.errors import InfraError
from vllm_repro.history.rows import Build, build_of, row_of, setup_of
from vllm_repro.history.store import STORE, Store, remember
from vllm_repro.journal.journal import Journal, being_written
from vllm_repro.report.build import build
from vllm_repro.report.json_report import report_dict
from vllm_repro.report.model import ServerReport

RUN = ("run", "tq-chunked-prefill", "--server", "rehearsal", "--arm", "reported")


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """Copy the examples, each into the folder of a run."""
    for number, example in enumerate(EXAMPLES):
        scenario = build(example).scenario
        folder = tmp_path / "reports" / scenario / f"202611{number + 10}T000000Z-{number:06}"
        folder.mkdir(parents=True)
        shutil.copy(example / "journal.jsonl", folder)
    return tmp_path / "reports"


def dump(root: Path) -> list[str]:
    connection = sqlite3.connect(root / STORE)
    try:
        return sorted(connection.iterdump())
    finally:
        connection.close()


def test_what_is_read_is_what_was_added(tmp_path: Path) -> None:
    rows = list(Weeks(3, nights=5).rows())
    store = Store(tmp_path)
    store.add(rows[:20])
    store.add(rows[10:])  # again, as a run that was gone on with
    assert store.rows() == sorted(rows, key=lambda row: (row.started_at, row.id))


def test_a_store_made_anew_is_equal(reports: Path) -> None:
    store = Store(reports)
    assert store.catch_up().added == len(EXAMPLES)
    before = dump(reports)
    assert len(store.rows()) == len(EXAMPLES)
    assert store.rebuild().added == len(EXAMPLES)
    assert dump(reports) == before
    (reports / STORE).unlink()
    store.rebuild()
    assert dump(reports) == before
    assert store.catch_up().added == 0


def test_rows_say_what_the_reports_say(reports: Path) -> None:
    Store(reports).catch_up()
    for row in Store(reports).rows():
        report = report_dict(build(reports / row.id))
        assert (row.verdict, row.expected is True, row.evidence) == (
            report["verdict"],
            report["expected"],
            report["evidence"],
        )
        assert [(arm.name, arm.crashed, arm.boots) for arm in row.arms] == [
            (arm["name"], arm["k"], arm["n"]) for arm in report["arms"]
        ]
        assert all(arm.figures == () for arm in row.arms), "no example is of a GPU"
        assert len(row.host) == 8
        for arm, given in zip(row.arms, report["arms"], strict=True):
            matched = [trial["death"] and trial["death"]["signature"] == "match" for trial in given["trials"]]
            assert arm.signature.startswith("match: ") is any(matched)


def test_a_run_is_in_the_history_when_it_ends_and_its_journal_gives_the_same(harness: Harness, tmp_path: Path) -> None:
    assert harness(*RUN).status == 0
    root = tmp_path / "reports"
    (row,) = Store(root).rows()
    assert (row.verdict, row.evidence, row.died is not None) == ("reproduces", "rehearsal", True)
    before = dump(root)
    Store(root).rebuild()
    assert dump(root) == before
    done = harness("history", "--json")
    given = json.loads(done.out)
    assert given["rehearsal"] is True
    assert [one["life"] for one in given["scenarios"]] == ["reproduces"]
    shown = harness("history").out
    assert shown.startswith("REHEARSAL")
    # A harness that was killed left a folder and no row.
    journal = root / row.id / "journal.jsonl"
    cut = root / row.scenario / "20260101T000000Z-abcdef"
    cut.mkdir()
    (cut / "journal.jsonl").write_bytes(journal.read_bytes()[: journal.stat().st_size // 2])
    assert "added to the history: 1 run\n" in harness("history").err
    assert [one.cut for one in Store(root).rows()].count(True) == 1


def test_two_runs_at_once_lose_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.history.simulated import Weeks; from vllm_repro.history.store import Store\n"
        "for row in Weeks(int(sys.argv[2]), nights=3).rows(): Store(Path(sys.argv[1])).add([row])\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(seed)], env=environ) for seed in range(4)
    ]
    assert [writer.wait() for writer in writers] == [0] * 4
    expected = {row.id: row for seed in range(4) for row in Weeks(seed, nights=3).rows()}
    assert {row.id: row for row in Store(tmp_path).rows()} == expected


def locked(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    return connection


def test_a_locked_store_is_said_and_caught_up_with(reports: Path) -> None:
    store = Store(reports, timeout=0.01)
    store.catch_up()
    holder = locked(reports / STORE)
    with pytest.raises(InfraError, match="in use by another program") as refused:
        store.rows()
    assert "--rebuild" in refused.value.hint
    holder.close()
    assert len(store.rows()) == len(EXAMPLES)


@pytest.mark.parametrize("damage", ["bytes", "older", "newer", "other", "word", "folder"])
def test_no_state_of_the_store_makes_a_run_fail(reports: Path, damage: str) -> None:
    store = Store(reports)
    store.catch_up()
    path = reports / STORE
    if damage == "bytes":
        path.write_bytes(b"no database at all" * 500)
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "other":
        path.unlink()
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE mine (x)")
        connection.close()
    else:
        connection = sqlite3.connect(path)
        given = {
            "older": "PRAGMA user_version = 1",
            "newer": "PRAGMA user_version = 9",
            "word": """UPDATE runs SET row = '{"verdict": "great"}'""",
        }
        connection.execute(given[damage])
        connection.commit()
        connection.close()
    (first, *_) = EXAMPLES
    output_text = remember(build(first), reports)
    if damage != "word":
        assert "the run is not in the history" in output_text
        assert "vllm-repro history --rebuild" in output_text
    else:
        with pytest.raises(InfraError, match="cannot be used: "):
            store.rows()
    assert store.rebuild().added == len(EXAMPLES)
    assert len(store.rows()) == len(EXAMPLES)
    assert (reports / f"{STORE}.old").exists(), "what was there is kept"


def test_runs_without_a_folder_are_kept_aside(reports: Path) -> None:
    store = Store(reports)
    store.catch_up()
    shutil.rmtree(reports / "tq-chunked-prefill")
    gone = store.catch_up().gone
    assert gone > 0
    assert len(store.rows()) == len(EXAMPLES), "they are history"
    assert store.rebuild().gone == gone
    assert len(store.rows()) == len(EXAMPLES) - gone
    (reports / STORE).unlink()
    (reports / f"{STORE}.old").rename(reports / STORE)
    assert len(store.rows()) == len(EXAMPLES)


def test_a_run_that_goes_on_is_left_alone(reports: Path) -> None:
    folder = reports / "tq-chunked-prefill" / "20270101T000000Z-ffffff"
    folder.mkdir()
    shutil.copy(next(one for one in EXAMPLES if one.name.startswith(folder.parent.name)) / "journal.jsonl", folder)
    with Journal(folder / "journal.jsonl") as journal:
        assert being_written(journal.path)
        assert Store(reports).catch_up().added == len(EXAMPLES)
    assert not being_written(journal.path)
    assert Store(reports).catch_up().added == 1


def test_a_journal_that_holds_no_run_is_named(reports: Path) -> None:
    folder = reports / "tq-chunked-prefill" / "20270101T000000Z-ffffff"
    folder.mkdir()
    (folder / "journal.jsonl").write_text('{"t": 1, "event": "run-started"}\n{', encoding="utf-8")
    assert Store(reports).catch_up().unreadable == ("tq-chunked-prefill/20270101T000000Z-ffffff",)


@pytest.mark.parametrize(("evidence", "claimed"), [("gpu", True), ("cpu", False), ("lab", False), ("rehearsal", False)])
def test_only_a_gpus_figures_are_kept(tmp_path: Path, evidence: str, claimed: bool) -> None:
    row = row_of(measured(evidence).report(tmp_path))
    figures = {arm.name: arm.figures for arm in row.arms}
    if not claimed:
        assert set(figures.values()) == {()}
        return
    (speed, *_) = figures["reported"]
    assert (speed.quantity, speed.n, speed.point.concurrency) == ("output_tok_s", 10, 4)
    assert speed.low < speed.median < speed.high
    assert figures["graphs-off"] == ()


@pytest.mark.parametrize(
    ("version", "build"),
    [
        ("0.24.0", Build.RELEASE),
        ("0.24.0+cu130", Build.RELEASE),
        ("0.24.0.post1", Build.RELEASE),
        ("0.24.1rc1.dev12+gabc1234", Build.NIGHTLY),
        ("0.24.1rc2", Build.NIGHTLY),
        (None, Build.UNKNOWN),
        ("main", Build.UNKNOWN),
    ],
)
def test_nightly_or_release(version: str | None, build: Build) -> None:
    assert build_of(version) is build


def test_a_rehearsal_without_the_bug_says_nothing_by_living() -> None:
    quiet = build(LIVED)
    assert row_of(quiet).quiet == 1
    assert row_of(replace(quiet, imitated=False)).quiet == 0


def test_a_setup_is_its_flags_and_model_and_not_this_run() -> None:
    image = ServerReport(kind="docker", image="vllm/vllm-openai:v0.23.0")
    first = "docker run -p 127.0.0.1:45421:8000 vllm/vllm-openai:v0.23.0 Qwen/Qwen3-8B --max-num-seqs 2 --port 8000"
    later = "docker run -p 127.0.0.1:999:8000 vllm/vllm-openai:v0.24.0 Qwen/Qwen3-8B --max-num-seqs 2 --port 8001"
    assert setup_of(first, image) == setup_of(later, replace(image, image="vllm/vllm-openai:v0.24.0"))
    assert setup_of(first, image) != setup_of(first.replace("seqs 2", "seqs 3"), image)
    assert setup_of(first, image) != setup_of(first.replace("8B", "4B"), image)
    assert setup_of("/a/releases/0.23.0/bin/vllm serve /m/x --f", ServerReport()) == setup_of(
        "/b/0.24.0/bin/vllm serve /n/x --f", ServerReport()
    )
