from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Harness
from tests.report_examples import EXAMPLES, REHEARSAL
from vllm_repro import frames
from vllm_repro.errors import UsageError

REPORTS = EXAMPLES[0].parent


def test_the_trials_of_a_run() -> None:
    found = frames.trials(REHEARSAL)
    died = found[found["exception"].notna()].iloc[0]
    assert (died["arm"], died["outcome"], died["phase"], died["crossed"]) == ("reported", "crash", "request", True)
    assert died["exception"] == "AssertionError"
    assert "Workspace is locked" in died["message"]
    assert (died["sent"], died["ok"], died["failed"]) == (died["ok"] + died["failed"], died["ok"], 1)
    assert found["boot_s"].dtype == float
    assert found["output_tok_s"].isna().all(), "no throughput is claimed of a rehearsal"
    assert (found["log"].str.startswith("logs/")).all()


def test_the_requests_and_the_runs_of_a_folder(harness: Harness, tmp_path: Path) -> None:
    done = harness("run", "min-tokens-stop-ids", "--server", "rehearsal", "--arm", "reported")
    assert done.folder is not None
    asked = frames.requests(done.folder)
    assert list(asked["status"]) == [200, 500]
    assert list(asked["ok"]) == [True, False]
    assert asked["completion_tokens"].iloc[0] == 4
    assert (asked["duration_s"] > 0).all()
    assert asked["sent"].dt.tz is not None
    (run,) = frames.runs(tmp_path / "reports").to_dict("records")
    assert (run["scenario"], run["name"], run["result"], run["crashed"], run["boots"]) == (
        "min-tokens-stop-ids",
        "reported",
        "reproduces",
        1,
        1,
    )
    (tmp_path / "reports" / "x" / "y").mkdir(parents=True)
    (tmp_path / "reports" / "x" / "y" / "journal.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.warns(UserWarning, match="skipped, its journal holds no run: x/y"):
        assert len(frames.runs(tmp_path / "reports")) == 1


def test_the_releases_of_a_map() -> None:
    found = frames.versions(REPORTS / "versions" / "sco-hybrid").set_index("version")
    assert list(found[found["fate"] == "dies"].index) == ["0.20.2", "0.21.0"]
    assert found["boot_s"].loc["0.21.0"] == pytest.approx(23.7, abs=0.1)
    assert (found["k"].loc["0.21.0"], found["n"].loc["0.21.0"]) == (1, 1)
    map_of_two = frames.versions(REPORTS / "versions" / "tq-mtp-wrong-tokens")
    assert list(map_of_two["arm"].iloc[:2]) == ["reported", "cudagraph-none"]


@pytest.mark.parametrize("read", [frames.trials, frames.requests, frames.versions])
def test_a_folder_without_it_is_wrong_usage(read: object, tmp_path: Path) -> None:
    assert callable(read)
    with pytest.raises(UsageError, match=str(tmp_path)):
        read(tmp_path)


def test_a_table_of_all_runs_as_parquet(harness: Harness, tmp_path: Path) -> None:
    harness("run", "min-tokens-stop-ids", "--server", "rehearsal", "--arm", "reported")
    file = tmp_path / "runs.parquet"
    done = harness("history", "--parquet", str(file))
    assert (done.status, f"table: {file}" in done.out) == (0, True), done.err
    import pandas as pd  # here, because each worker would wait for it

    kept = pd.read_parquet(file)
    pd.testing.assert_frame_equal(kept, frames.runs(tmp_path / "reports"), check_dtype=False, check_column_type=False)
    assert kept["ttft_s"].dtype == float


def test_parquet_without_its_library_names_it(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness("run", "min-tokens-stop-ids", "--server", "rehearsal", "--arm", "near-miss")

    def missing(*_: object, **__: object) -> bytes:
        raise ImportError("Unable to find a usable engine")

    monkeypatch.setattr("pandas.DataFrame.to_parquet", missing)
    done = harness("history", "--parquet", str(tmp_path / "x"))
    assert done.status == 64
    assert "needs pyarrow, which is not installed\n  next: pip install pyarrow" in done.err
    assert not (tmp_path / "x").exists()
    monkeypatch.undo()
    assert "writes no text" in harness("history", "--parquet", "-").err
