"""The runs of a folder: from their reports, and from the journals of runs without a report."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.conftest import Harness
from tests.core.report.test_measurements import measured
from tests.report_examples import EXAMPLES, LIVED, REHEARSAL
from vllm_repro.journal.journal import Journal
from vllm_repro.report.build import build
from vllm_repro.report.json_report import report_dict
from vllm_repro.report.model import RunReport
from vllm_repro.report.runs import run_of
from vllm_repro_nights.runs import read_runs

RUN = ("run", "tq-chunked-prefill", "--server", "rehearsal", "--arm", "reported")
TQ = "tq-chunked-prefill/20270101T000000Z-ffffff"
SOURCE = REHEARSAL / "journal.jsonl"


@pytest.fixture(autouse=True)
def cache_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_repro_nights.runs.cache_root", lambda: tmp_path / "cache")


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """Copy the examples, each into the folder of a run."""
    for number, example in enumerate(EXAMPLES):
        folder = (
            tmp_path
            / "reports"
            / build(example).scenario
            / f"202611{number + 10}T000000Z-{number:06}"
        )
        folder.mkdir(parents=True)
        for name in ("journal.jsonl", "report.json"):
            shutil.copyfile(example / name, folder / name)
    return tmp_path / "reports"


def test_a_report_gives_the_same_as_its_journal(reports: Path) -> None:
    """Do not use a report that is missing, old, edited, or of another version."""
    runs, unreadable = read_runs(reports)
    assert (len(runs), unreadable) == (len(EXAMPLES), [])
    for run, spoil in zip(
        runs, ("missing", "older", "other", "no time", "no evidence") * 3, strict=False
    ):
        report = reports / run.id / "report.json"
        if spoil == "missing":
            report.unlink()
            continue
        if spoil.startswith("no "):
            fields = {"started_at": ""} if spoil == "no time" else {"evidence": "x"}
            report.write_text(
                json.dumps(json.loads(report.read_text()) | fields | {"verdict": "quiet"})
            )
            continue
        report.write_text(
            report.read_text().replace('"host"', '"hosted_by"').replace('"reproduces"', '"quiet"')
        )
        if spoil == "older":
            os.utime(report, (1, 1))
    assert read_runs(reports) == (runs, [])


def test_a_journal_without_a_report_is_rendered_once(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a folder that cannot be written, until its journal or the code changes."""
    folders = [journal.parent for journal in sorted(reports.glob("*/*/journal.jsonl"))]
    for folder in folders:
        (folder / "report.json").unlink()
        folder.chmod(0o555)
    built: list[Path] = []

    def counted(folder: Path) -> RunReport:
        built.append(folder)
        return build(folder)

    monkeypatch.setattr("vllm_repro_nights.runs.build", counted)
    first = read_runs(reports)
    assert sorted(built) == folders
    assert read_runs(reports) == first
    assert len(built) == len(folders)
    journal = folders[0] / "journal.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"t": 1')
    assert [
        run.journal_cut for run in read_runs(reports)[0] if run.id.endswith(folders[0].name)
    ] == [True]
    assert built[len(folders) :] == [folders[0]]
    monkeypatch.setattr("vllm_repro.__version__", "9")
    read_runs(reports)
    assert len(built) == 2 * len(folders) + 1


def test_a_cache_that_cannot_be_written_or_read_is_no_error(reports: Path, tmp_path: Path) -> None:
    (reports / TQ).mkdir()
    shutil.copyfile(SOURCE, reports / TQ / "journal.jsonl")
    cache = tmp_path / "cache" / "history"
    first = read_runs(reports)
    (kept,) = cache.iterdir()
    kept.write_text('{"x": [1')
    assert read_runs(reports) == first
    shutil.rmtree(cache)
    cache.write_text("a file")
    assert read_runs(reports) == first


def test_only_so_many_folders_of_reports_are_kept(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / str(number) / TQ).mkdir(parents=True)
        shutil.copyfile(SOURCE, tmp_path / str(number) / TQ / "journal.jsonl")
        read_runs(tmp_path / str(number))
    assert len(list((tmp_path / "cache" / "history").iterdir())) == 16


def test_a_run_is_read_when_it_ends_and_when_it_is_killed(harness: Harness, tmp_path: Path) -> None:
    assert harness(*RUN).status == 0
    root = tmp_path / "reports"
    (run,), _ = read_runs(root)
    assert (run.verdict, run.evidence, run.died is not None) == ("reproduces", "rehearsal", True)
    journal = root / run.id / "journal.jsonl"
    cut = root / run.scenario / "20260101T000000Z-abcdef"
    cut.mkdir()
    (cut / "journal.jsonl").write_bytes(journal.read_bytes()[: journal.stat().st_size // 2])
    assert [one.journal_cut for one in read_runs(root)[0]] == [True, False]


def test_only_finished_runs_in_their_own_folders_count(reports: Path) -> None:
    """Leave out a run that is being written, a link and a copy; name a journal without a run."""
    folder = reports / TQ
    folder.mkdir()
    shutil.copyfile(SOURCE, folder / "journal.jsonl")
    (folder.parent / "latest").symlink_to(folder.name)
    shutil.copytree(folder, reports / "a copy" / "run")
    with Journal(folder / "journal.jsonl"):
        assert len(read_runs(reports)[0]) == len(EXAMPLES)
    assert len(read_runs(reports)[0]) == len(EXAMPLES) + 1
    (folder / "journal.jsonl").write_text('{"t": 1, "event": "run-started"}\n{', encoding="utf-8")
    assert read_runs(reports)[1] == [TQ]


def test_a_report_with_rates_is_read_from_its_journal(tmp_path: Path) -> None:
    folder = tmp_path / "tq-chunked-prefill" / "run"
    folder.mkdir(parents=True)
    data = report_dict(measured("gpu").report(folder))
    point = data["arms"][0]["trials"][0]["throughput"]["points"][0]
    for rate, concurrencies in ((0.0, {9}), (0.5, {4})):
        point |= {"concurrency": 9, "rate": rate, "arrivals": "poisson"}
        (folder / "report.json").write_text(json.dumps(data), encoding="utf-8")
        (run,), _ = read_runs(tmp_path)
        shown = run.arms[0].trials[0].throughput
        assert shown is not None
        assert {one.concurrency for one in shown.points} == concurrencies


def test_a_rehearsal_without_the_bug_says_nothing_by_living() -> None:
    quiet = build(LIVED)
    assert run_of(quiet).quiet == 1
    assert run_of(replace(quiet, imitated=False)).quiet == 0
