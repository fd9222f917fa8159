"""`vllm-repro history` as a command."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.conftest import Harness
from tests.nights.simulated import FIXED, FLAKY, LOSSY, Weeks
from tests.report_examples import EXAMPLES

UTC = {"TZ": "UTC"}


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """Write simulated weeks into the reports folder."""
    root = tmp_path / "reports"
    root.mkdir()
    for run in Weeks(0).rows():
        folder = root / run.id
        folder.mkdir(parents=True)
        (folder / "journal.jsonl").touch()
        (folder / "report.json").write_bytes(msgspec.json.encode(run))
    return root


def test_the_loss_and_the_fix_and_nothing_else_is_called(harness: Harness, reports: Path) -> None:
    page = reports / "nights.html"
    done = harness("history", "--json", "--nights", "40", "--html", str(page), env=UTC)
    assert done.status == 0, done.err
    given = json.loads(done.out)
    assert [(news["kind"], news["scenario"]) for news in given["news"]] == [("fix", FIXED), ("slower", LOSSY)]
    assert all(news["call"] for news in given["news"])
    assert [one["scenario"] for one in given["scenarios"] if one["flaky"]] == [FLAKY]
    assert f"page: {page}" in done.err
    assert "What changed since the night of 30 September" in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("reports")
def test_one_night_without_news_is_a_line(harness: Harness, tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    done = harness("history", "--scenario", "tq-prefix-hit", "--csv", str(table), env=UTC)
    lines = table.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 70 * 2 * 3  # nights, hosts, arms
    assert f"table: {table}" in done.out
    assert "since the night of 2026-11-08:\n  nothing changed" in done.out
    assert "min-tokens-stop-ids" not in done.out


@pytest.mark.usefixtures("reports")
@pytest.mark.parametrize(
    ("option", "first", "last"),
    [("--csv", "night,id,scenario,", "2026-11-09,"), ("--html", "<!doctype html>", "</html>")],
)
def test_a_dash_prints_it_and_nothing_else(harness: Harness, option: str, first: str, last: str) -> None:
    done = harness("history", "--scenario", FIXED, option, "-", env=UTC)
    assert (done.status, done.err) == (0, "")
    lines = done.out.lower().splitlines()
    assert lines[0].startswith(first)
    assert lines[-1].startswith(last)


def test_a_folder_of_copies_is_named_as_that(harness: Harness) -> None:
    done = harness("history", "--out", str(EXAMPLES[0].parent))
    assert (done.status, done.out) == (64, "")
    assert "the folders in it are runs of one scenario, or copies" in done.err
    assert f"vllm-repro report {sorted(EXAMPLES)[0]} --format md" in done.err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--scenario", "tq-prefix"), 64, "it has: min-tokens-stop-ids"),
        (("--nights", "0"), 64, "is no number of nights"),
        (("--out", "/nowhere/at/all"), 64, "there is no folder"),
        (("--html", "/nowhere/at/all.html"), 64, "there is no folder"),
        (("--csv", "/proc/nowrite"), 64, "name another file with --csv"),
        (("--html", "-", "--csv", "-"), 64, "only one of --json, --html - and --csv - can be printed"),
    ],
)
@pytest.mark.usefixtures("reports")
def test_what_cannot_be_told_is_said(harness: Harness, words: tuple[str, ...], status: int, message: str) -> None:
    done = harness("history", *words)
    assert (done.status, message in done.err) == (status, True), done.err
    assert "Traceback" not in done.err
