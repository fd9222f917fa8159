"""`vllm-repro history` as a command."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.conftest import Harness
from tests.golden_files import missing
from tests.nights.test_history import fortnight
from tests.report_examples import EXAMPLES

UTC = {"TZ": "UTC"}


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """Write the runs of some nights into the reports folder."""
    root = tmp_path / "reports"
    for _, run in fortnight():
        folder = root / run.id
        folder.mkdir(parents=True)
        (folder / "journal.jsonl").touch()
        (folder / "report.json").write_bytes(msgspec.json.encode(run))
    return root


@pytest.mark.usefixtures("reports")
def test_the_last_nights_are_compared_with_those_before(harness: Harness) -> None:
    done = harness("history", "--json", "--nights", "4", env=UTC)
    assert [change["scenario"] for change in json.loads(done.out)["changes"]] == [
        "tq-chunked-prefill"
    ]
    done = harness("history", "--scenario", "sco-hybrid", env=UTC)
    assert "since the night of 2026-09-15:\n  nothing changed" in done.out
    assert "tq-prefix-hit" not in done.out


def test_a_file_is_written_and_no_table_printed(harness: Harness, reports: Path) -> None:
    page, table = reports / "nights.html", reports / "runs.csv"
    done = harness(
        "history", "--html", str(page), "--csv", str(table), "--scenario", "sco-hybrid", env=UTC
    )
    assert (done.status, done.out) == (0, "")
    assert done.err == f"wrote {page}\nwrote {table}\n"
    assert "What changed since the night of 15 September" in page.read_text(encoding="utf-8")
    assert len(table.read_text(encoding="utf-8").splitlines()) == 1 + 16


@pytest.mark.usefixtures("reports")
@pytest.mark.parametrize(
    ("option", "first", "last"),
    [("--csv", "night,id,scenario,", "2026-09-16,"), ("--html", "<!doctype html>", "</html>")],
)
def test_a_dash_prints_it_and_nothing_else(
    harness: Harness, option: str, first: str, last: str
) -> None:
    done = harness("history", option, "-", env=UTC)
    assert (done.status, done.err) == (0, "")
    lines = done.out.lower().splitlines()
    assert lines[0].startswith(first)
    assert lines[-1].startswith(last)


def test_a_folder_of_copies_is_named_as_that(harness: Harness) -> None:
    done = harness("history", "--out", str(EXAMPLES[0].parent))
    assert (done.status, done.out) == (64, "")
    assert (
        missing(
            done.err,
            "the folders in it are runs of one scenario, or copies",
            f"vllm-repro report {sorted(EXAMPLES)[0]} --format md",
        )
        == []
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--scenario", "tq-prefix"), "it has: dsv4-tp2, sco-hybrid"),
        (("--nights", "14"), "is no number of nights from 1 to 13"),
        (("--out", "/nowhere/at/all"), "there is no folder"),
        (("--html", "/nowhere/at/all.html"), "name another file with --html"),
        (("--csv", "/proc/nowrite"), "name another file with --csv"),
        (("--html", "-", "--csv", "-"), "only one of --json, --html - and --csv - can be printed"),
    ],
)
@pytest.mark.usefixtures("reports")
def test_wrong_usage_names_the_remedy(
    harness: Harness, words: tuple[str, ...], message: str
) -> None:
    done = harness("history", *words)
    assert (done.status, message in done.err) == (64, True), done.err
    assert "Traceback" not in done.err
