"""Data frames of runs, maps and journals, and what the documentation says of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest

from tests.conftest import Harness
from tests.nights.made import measured, row
from tests.report_examples import EXAMPLES, REHEARSAL
from vllm_repro import frames
from vllm_repro.errors import UsageError

REPORTS = EXAMPLES[0].parent


def test_the_trials_of_a_run() -> None:
    trials = frames.trials(REHEARSAL)
    died = trials[trials["exception"].notna()].iloc[0]
    assert (died["arm"], died["outcome"], died["phase"], died["crossed"]) == (
        "reported",
        "crash",
        "request",
        True,
    )
    assert died["exception"] == "AssertionError"
    assert "Workspace is locked" in died["message"]
    assert (died["sent"], died["failed"]) == (died["ok"] + 1, 1)
    assert trials["boot_s"].dtype == float
    assert trials["output_tok_s"].isna().all(), "no throughput is claimed of a rehearsal"
    assert (trials["log"].str.startswith("logs/")).all()


def test_the_requests_and_the_runs_of_a_folder(harness: Harness, tmp_path: Path) -> None:
    done = harness("run", "min-tokens-stop-ids", "--server", "rehearsal", "--arm", "reported")
    requests = frames.requests(done.run)
    assert (list(requests["status"]), list(requests["ok"])) == ([200, 500], [True, False])
    assert requests["completion_tokens"].iloc[0] == 4
    assert (requests["duration_s"] > 0).all()
    assert requests["sent"].dt.tz is not None
    (run,) = frames.runs(tmp_path / "reports").to_dict("records")
    names = ("scenario", "name", "result", "crashed", "boots")
    assert [run[name] for name in names] == ["min-tokens-stop-ids", "reported", "reproduces", 1, 1]
    (tmp_path / "reports" / "x" / "y").mkdir(parents=True)
    (tmp_path / "reports" / "x" / "y" / "journal.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.warns(UserWarning, match="skipped, its journal holds no run: x/y"):
        assert len(frames.runs(tmp_path / "reports")) == 1


def test_the_releases_of_a_map() -> None:
    releases = frames.versions(REPORTS / "versions" / "sco-hybrid").set_index("version")
    assert list(releases[releases["fate"] == "dies"].index) == ["0.20.2", "0.21.0"]
    assert releases["boot_s"].loc["0.21.0"] == pytest.approx(23.7, abs=0.1)
    assert (releases["k"].loc["0.21.0"], releases["n"].loc["0.21.0"]) == (1, 1)
    two_arms = frames.versions(REPORTS / "versions" / "tq-mtp-wrong-tokens")
    assert list(two_arms["arm"].iloc[:2]) == ["reported", "cudagraph-none"]


@pytest.mark.parametrize("read", [frames.trials, frames.requests, frames.versions])
def test_a_folder_without_it_is_wrong_usage(read: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(tmp_path)) as raised:
        read(tmp_path)
    assert raised.value.__cause__ is None, "its traceback would hide the message"


def test_the_table_of_runs_has_the_figures_that_exist() -> None:
    import pandas as pd

    _, speedy = measured(0, {"eager": 1200.0})
    table = pd.read_csv(StringIO(frames.as_csv([row(0, 1, 1)[1], speedy])))
    assert (list(table["crashed"]), table["output_tok_s"].iloc[1]) == ([1, 0], 1200.0)
    assert list(table["evidence"].fillna("")) == ["", "gpu"], "the first has no trial"
    assert "ttft_s" not in table
    assert frames.as_csv([]).startswith("night,id,scenario,")


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.usefixtures("short_waits")
def test_the_example_with_frames_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"```python\n(.*?)```", (DOCS / "api.md").read_text(encoding="utf-8"), re.DOTALL
    )
    at = next(at for at, block in enumerate(blocks) if "import frames" in block)
    namespace: dict[str, object] = {}
    for block in blocks[at - 1 : at + 1]:  # the block above runs a scenario
        exec(compile(block, "docs/api.md", "exec"), namespace)
    out = capsys.readouterr().out
    assert re.search(r"min-tokens-stop-ids +\S+ +reported +reproduces", out)
    assert "completion with an unknown stop token" in out


def test_the_columns_of_the_docs_are_those_of_the_frames(tmp_path: Path) -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| `frames\.(\w+)\(.*?(?=\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    assert tables == ["runs", "trials", "requests", "versions"]
    for name, rows in re.findall(
        r"^\| `frames\.(\w+)\([^\n]*\n\|---\|---\|\n(.*?)(?=\n\n|\Z)",
        text,
        re.DOTALL | re.MULTILINE,
    ):
        documented = [
            word for row in rows.splitlines() for word in re.findall(r"`(\w+)`", row.split("|")[1])
        ]
        made = {
            "runs": EXAMPLES[0].parent,
            "versions": EXAMPLES[0].parent / "versions" / "sco-hybrid",
        }
        source = made.get(name, EXAMPLES[0])
        if name == "requests":
            source = tmp_path
            (tmp_path / "requests.jsonl").touch()
        assert sorted(documented) == sorted(getattr(frames, name)(source)), name


@pytest.mark.parametrize(
    ("folder", "message"),
    [("nofolder", "no folder"), ("a/b", "no folder"), ("file", "no folder"), ("run", "a run")],
)
def test_what_is_no_folder_of_reports_is_refused(tmp_path: Path, folder: str, message: str) -> None:
    (tmp_path / "file").touch()
    shutil.copytree(REHEARSAL, tmp_path / "run")
    with pytest.raises(UsageError, match=f"{folder} is {message}"):
        frames.runs(tmp_path / folder)
