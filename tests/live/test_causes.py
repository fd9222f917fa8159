"""Source changes of a real release: which one brings #41726 back into 0.24.0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Harness

pytestmark = [pytest.mark.live, pytest.mark.depends("both")]


def test_a_reservation_that_is_taken_out_lets_the_release_die(
    harness: Harness, tmp_path: Path
) -> None:
    head, _, taken_out, *_, last = scenario("tq_chunked_prefill").split("            cause(\n")
    assert '"0.24.0"' in taken_out
    file = tmp_path / "tq_chunked_prefill.py"
    file.write_text(
        f"{head}            cause(\n{taken_out}{last[last.index('        ],') :]}", encoding="utf-8"
    )
    done = harness("causes", str(file), "--json")
    assert done.status == 0, done.err
    rows = json.loads(done.out)["rows"]
    assert [(row["change"], row["died"], row["n"], row["sites"]) for row in rows] == [
        ("as released", 0, 1, []),
        ("that reservation taken out", 1, 1, ["AssertionError"]),
    ]
    assert "brings the crash back" in done.err


def scenario(name: str) -> str:
    return (Path(__file__).parents[2] / "scenarios" / f"{name}.py").read_text(encoding="utf-8")
