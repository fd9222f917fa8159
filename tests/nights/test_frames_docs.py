"""What the documentation says of frames: an example, and their columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.report_examples import EXAMPLES
from vllm_repro import frames

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
