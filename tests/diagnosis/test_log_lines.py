from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_repro.diagnosis.diagnosis import diagnose
from vllm_repro.diagnosis.log_lines import MAX_LINE, physical_lines
from vllm_repro.diagnosis.log_text import read_lines

RECORDINGS = Path(__file__).parents[1] / "data" / "recordings"
NAMES = ["v0.32.0-boot", "v0.32.0-fault-workspace-mp-inflight", "v0.20.2-fault-workspace-uni-inflight"]
NAMES += ["v0.32.0-killed-inflight", "v0.32.0-killed-idle", "v0.32.0-boot-killed", "v0.28.0-min-tokens"]


def recording(name: str) -> str:
    return (RECORDINGS / f"{name}.log").read_text(encoding="utf-8", errors="replace")


def records(key: str) -> Callable[[str], str]:
    return lambda text: "\n".join(json.dumps({"time": "x", key: line}) for line in text.splitlines())


def coloured_journal(text: str) -> str:
    """journald gives what has a byte that cannot be printed as numbers."""
    return "\n".join(json.dumps({"MESSAGE": list(f"\x1b[1m{line}".encode())}) for line in text.splitlines())


def google(text: str) -> str:
    entries = [{"textPayload": f"{line}\n", "severity": "ERROR", "labels": {"a": "b"}} for line in text.splitlines()]
    return json.dumps(entries, indent=2)


def broken_at(width: int) -> Callable[[str], str]:
    return lambda text: "\n".join(
        line[at : at + width] for line in text.splitlines() for at in range(0, max(1, len(line)), width)
    )


WAYS: dict[str, Callable[[str], str]] = {
    "Docker": records("log"),
    "Loki": records("line"),
    "CloudWatch": records("message"),
    "journald": records("MESSAGE"),
    "a JSON logger": records("msg"),
    "Google Cloud, a record a line": records("textPayload"),
    "Google Cloud": google,
    "journald in colour": coloured_journal,
    "carriage returns": lambda text: text.replace("\n", "\r"),
    "a terminal of 80": broken_at(80),
    "a terminal of 132": broken_at(132),
    "written out": lambda text: text.replace("\n", "\\n"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_the_way_that_a_log_went_changes_nothing(name: str, way: str) -> None:
    text = recording(name)
    expected, found = diagnose(text), diagnose(WAYS[way](text))
    assert (found.died, found.phase, found.exception, found.frames, found.vllm_version, found.why) == (
        expected.died,
        expected.phase,
        expected.exception,
        expected.frames,
        expected.vllm_version,
        expected.why,
    )


@pytest.mark.parametrize("name", [path.stem for path in RECORDINGS.glob("*.log")])
def test_a_log_that_nothing_happened_to_stays_as_it_is(name: str) -> None:
    text = recording(name)
    assert list(physical_lines(text)) == text.removesuffix("\n").split("\n")


def test_lines_cut_at_a_width_are_not_joined() -> None:
    cut = "\n".join(line[:120] for line in recording("v0.32.0-boot").splitlines())
    assert list(physical_lines(cut)) == cut.split("\n")


def test_what_is_no_record_stays_whole() -> None:
    for text in ('{"log": broken', '{"error": {"message": "x"}}', '{"log": 3}', "{}", '{"a": [1]}'):
        assert list(physical_lines(text)) == [text]


def test_lines_without_an_end_that_quote_a_log_stay_whole() -> None:
    stamped = "(Worker pid=2) ERROR 11-20 08:24:30 [w.py:1] x"
    quoted = "\\n".join([stamped] * 9)
    prompt = f"(APIServer pid=1) INFO 11-20 08:24:30 [a.py:1] prompt: '{quoted}'"
    lines = [stamped, stamped, stamped, prompt]
    assert list(physical_lines("\n".join(lines))) == lines


class Endless(io.RawIOBase):
    """Bytes without an end of line, of which nobody may ask for all at once."""

    def __init__(self, size: int) -> None:
        self.left = size

    def readline(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert 0 < size <= MAX_LINE
        taken = min(size, self.left)
        self.left -= taken
        return b"x" * taken


def test_a_line_that_does_not_end_is_not_read_into_the_memory() -> None:
    file = Endless(20 * MAX_LINE + 5)
    assert [len(line.raw) for line in read_lines(file)] == [MAX_LINE]
    assert file.left == 0
