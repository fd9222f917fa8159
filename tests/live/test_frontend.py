"""Search of the front end on real releases, and what `gate` says of changes of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path

import pytest

from tests.conftest import Harness
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source

pytestmark = [pytest.mark.live, pytest.mark.depends("search")]

SEVERAL = "several tokens in a delta"


def test_reported_failures_of_parsers_are_found_again(harness: Harness, tmp_path: Path) -> None:
    """vllm-project/vllm#48020 and #55195; the parsers of Hermes and Qwen pass."""
    names = "deepseek_v31,deepseek_r1,hermes,qwen3_coder"
    words = ("--frontend", names, "--seeds", "300", "--vllm", "0.33.0", "--out", str(tmp_path))
    done = harness("explore", *words, "--json")
    search = json.loads(done.out)
    found = {(hit["name"], hit["split"], hit["wrong"]): hit for hit in search["findings"]}
    lost = found[("tool deepseek_v31", SEVERAL, "tool calls")]
    assert ("reasoning deepseek_r1", SEVERAL, "reasoning") in found
    assert done.status == 1
    assert search["parsers"]["tool hermes"]["failed"] == 0
    assert search["parsers"]["tool qwen3_coder"]["failed"] == 0
    assert len(Path(lost["script"]).read_text(encoding="utf-8").splitlines()) <= 30
    python = provision(Source(release="0.33.0")).python
    out = subprocess.run([python, lost["script"]], capture_output=True, text=True, check=True)
    whole, *deltas = (
        line for line in out.stdout.splitlines() if "tool_calls" in line or "w" in line
    )
    assert "FunctionCall(" in whole
    assert "DeltaToolCall(" not in "".join(deltas)


@pytest.mark.parametrize(
    ("release", "wrong"), [("0.28.0", {"tokens", "logprobs", "left"}), ("0.33.0", {"left"})]
)
def test_failures_of_the_output_processor_are_found_again(
    harness: Harness, tmp_path: Path, release: str, wrong: set[str]
) -> None:
    """Tokens after a stop string, logprobs twice at an abort; vllm-project/vllm#51629 is open."""
    words = ("--frontend", "output", "--seeds", "400", "--vllm", release, "--out", str(tmp_path))
    done = harness("explore", *words, "--json")
    assert done.status == 1
    assert {hit["wrong"] for hit in json.loads(done.out)["findings"]} == wrong


def test_ranks_that_wait_for_ever_are_found(harness: Harness, tmp_path: Path) -> None:
    """vllm-project/vllm#55229 is the resume without a pause."""
    words = ("--frontend", "ranks", "--seeds", "400", "--vllm", "0.33.0", "--out", str(tmp_path))
    done = harness("explore", *words, "--json")
    found = {(hit["split"], hit["wrong"]) for hit in json.loads(done.out)["findings"]}
    waits = "a rank waits for another for ever"
    assert {("a resume without a pause", waits), ("two pauses at once", waits)} <= found
    assert ("an open session in a pause", "a paused engine computes") in found
    assert not {("requests and aborts", waits), ("a pause, then a resume", waits)} & found


@pytest.fixture
def diff_of(tmp_path: Path) -> Callable[[str, str, str], str]:
    """Return a function that writes a diff of 0.33.0: a file, a text in it, and the new text."""
    packages = provision(Source(release="0.33.0")).packages

    def write(name: str, old: str, new: str) -> str:
        before = (packages / name).read_text(encoding="utf-8")
        assert old in before
        after = before.replace(old, new)
        lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
        path = tmp_path / "change.diff"
        text = "".join(unified_diff(lines[0], lines[1], f"a/{name}", f"b/{name}"))
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


MENDED = """start token in delta, no end
                delta_text = delta_text.replace(self.start_token, "", 1)
                # no end"""
HERMES = "vllm/tool_parsers/hermes_tool_parser.py"


@pytest.mark.parametrize(
    ("change", "answer", "words"),
    [
        (
            (HERMES, "len(current_text) - overlap_length", "len(current_text)"),
            *("breaks", "tool hermes, one token in a delta, tags in several tokens"),
        ),
        (
            (HERMES, "# Extract any content before tool calls.", "pass"),
            *("no difference seen", "answers of the front end"),
        ),
        (
            ("vllm/reasoning/basic_parsers.py", "start token in delta, no end", MENDED),
            *("fixes", f"reasoning deepseek_r1, {SEVERAL}: reasoning"),
        ),
    ],
    ids=["breaks", "no difference", "fixes"],
)
def test_the_gate_plays_the_front_end(
    harness: Harness,
    tmp_path: Path,
    diff_of: Callable[[str, str, str], str],
    change: tuple[str, str, str],
    answer: str,
    words: str,
) -> None:
    done = harness("gate", diff_of(*change), "--base", "0.33.0", "--out", str(tmp_path), "--json")
    result = json.loads(done.out)
    assert result["answer"] == answer, result["why"]
    assert words in result["why"]
    assert result["functions"][0]["runs_after"]
