"""A map of several `--patch`, on a rehearsal engine that takes patches."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Harness
from tests.patched_rehearsal import DIFF, Diffs
from vllm_repro.report.build import build

TQ = ("tq-chunked-prefill", "--server", "rehearsal")


def test_a_map_has_an_arm_for_each_patch(harness: Harness, diffs: Diffs, tmp_path: Path) -> None:
    words = ("versions", *TQ, "--versions", "0.23.0,0.24.0", *diffs("fix", "hide"))
    done = harness(*words)
    assert done.status == 1
    for line in (
        "reported: dies in 0.23.0, lives in 0.24.0",
        "fix: lives in 0.23.0 and 0.24.0",
        "hide: dies in 0.23.0, lives in 0.24.0; against what is declared: 0.23.0",
    ):
        assert line in done.out
    assert done.folder is not None
    again = build(done.folder).reproduce
    assert again.startswith("vllm-repro versions")
    assert "--expect" not in again
    (folder,) = (tmp_path / "reports/tq-chunked-prefill/versions").glob("2*")
    kept = harness("versions", "--resume", str(folder))
    assert kept.err.count("  as in ") == 2
    (tmp_path / "hide.diff").write_text(DIFF.format("fix"), encoding="utf-8")
    assert "as in" not in harness("versions", "--resume", str(folder)).err, (
        "what another diff did is run again"
    )
