"""A draft has each stated fact of a text, or quotes it in a GAP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.golden_files import missing
from tests.intake.texts import ISSUES, checked, drafted

REPORTS = sorted((ISSUES.parent / "reports").glob("*.md"))
FACT = re.compile(
    r"(?P<name>(?<!\S)--(?!lora-m|data)[a-z][\w-]+|\b[A-Z]+_[A-Z0-9_]+(?==)|(?<=\")\w+(?=\": )"
    r"|\b[a-z]\w*(?==[\d\[{])|(?<=:8000/)\w+(?=[ '?\"]))|(?<![\w./:#-])"
    r"(?P<number>[1-9]\d*(?:[.,' ]\d{3})*(?!\d))(?!\.\d)"
    r"|(?<![\w./:-])v?(?P<release>0\.\d+\.\d+)"
)


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_reports(path: Path) -> None:
    text, _, expected = path.read_text(encoding="utf-8").partition("=====\n")
    made = drafted(text)
    checked(made)
    file = made.text[made.text.index("scenario = ") :]
    code = "\n".join(line for line in file.split("\n") if not line.lstrip().startswith("#"))
    lines = {kind: re.findall(rf"(?m)^\{kind} (.+)$", expected) for kind in "+?-"}
    assert (missing(code, *lines["+"]), missing(file, *lines["?"])) == ([], [])
    assert [part for part in lines["-"] if part in code] == []


def renewed(match: re.Match[str]) -> str:
    """Return a fact of the same kind that stands nowhere in the texts."""
    if match["name"]:
        return f"{match[0]}zq"
    if match["release"] or len(match[0]) > 2:
        return re.sub(r"\d+$", lambda last: "7" * max(2, len(last[0])), match[0])
    return f"{match[0]}77"


def plain(text: str) -> str:
    return re.sub(r"(?<=\d)[.,' ](?=\d{3})", "", text).replace("_", "-")


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("part", range(4))
def test_each_fact_is_in_the_draft_or_in_a_gap(path: Path, part: int) -> None:
    """Change facts of a text, a quarter at a time, to others that stand nowhere else."""
    text, _, _ = path.read_text(encoding="utf-8").partition("=====\n")
    changed, new = text, []
    for match in list(FACT.finditer(text))[part::4][::-1]:
        new.append(renewed(match))
        changed = f"{changed[: match.start()]}{new[-1]}{changed[match.end() :]}"
    made = plain(drafted(changed).text)
    assert [fact for fact in new if plain(fact.removeprefix("v")) not in made] == []
