"""The record of a bisection, and the one that is kept in reports/examples."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.report_examples import without_run_links
from vllm_repro.report.bisection import Bisection, Candidate, Step, answer, bisection_dict, markdown
from vllm_repro.verdict.release_result import ReleaseResult
from vllm_repro.verdict.verdict import Expected


def bisection_of(*fates: tuple[str, ReleaseResult], find_fix: bool = False) -> Bisection:
    return Bisection(
        scenario="tq-chunked-prefill",
        issue="vllm-project/vllm#41726",
        title="a title",
        status={},
        arm="reported",
        expected=Expected.HANGS,
        server="lab",
        evidence="lab",
        find_fix=find_fix,
        candidates=tuple(Candidate(label, label) for label in "abcdef"),
        rate=1.0,
        confidence=0.95,
        harness_version="0",
        started_at="2026-11-23T00:00:00Z",
        duration_s=1.0,
        reproduce="vllm-repro bisect",
        steps=tuple(Step(candidate=one, fate=fate, why="", run=None, duration_s=1.0) for one, fate in fates),
    )


def test_several_changes_are_a_surprise_and_said() -> None:
    lives, dies = ReleaseResult.LIVES, ReleaseResult.DIES
    found = bisection_of(("f", dies), ("a", lives), ("d", lives), ("b", ReleaseResult.SOMETIMES))
    assert answer(found) == (
        "The first bad one is b: it hung in 1 of 1 boots; a lived in 1 of 1 boots. "
        "There is more than one change: d lived in 1 of 1 boots, although it is on the bad side."
    )
    assert (found.exit_status, bisection_dict(found)["good_again"]) == (1, ["d"])


@pytest.mark.parametrize("find_fix", [False, True])
def test_what_is_left_is_named_from_the_oldest(find_fix: bool) -> None:
    first, last = (ReleaseResult.DIES, ReleaseResult.LIVES) if find_fix else (ReleaseResult.LIVES, ReleaseResult.DIES)
    found = bisection_of(("a", first), ("f", last), ("c", first), find_fix=find_fix)
    assert (bisection_dict(found)["left"], found.exit_status) == (["d", "e", "f"], 2)


def test_a_commit_that_no_boot_ruled_out_leaves_a_doubt() -> None:
    found = bisection_of(("a", ReleaseResult.LIVES), ("f", ReleaseResult.DIES), ("c", ReleaseResult.DIES))
    found = replace(found, untouched=("b",), confidence=0.9)
    assert answer(found) == "The first bad one is c: it hung in 1 of 1 boots; b was not booted."
    assert "Probability 90.9%, if a bad one dies in 100% of boots (--rate 1)." in markdown(found)
    assert "1 candidate changes no file that" in markdown(replace(found, candidates=titled(found)))
    assert bisection_dict(replace(found, confidence=0.95))["left"] == ["b", "c"]


def titled(found: Bisection) -> tuple[Candidate, ...]:
    return tuple(Candidate(one.label, one.source, "[TQ] reserve (#44053)", "2026-05-01") for one in found.candidates)


def test_a_commit_is_named_with_its_date_and_pull_request() -> None:
    found = bisection_of(("a", ReleaseResult.LIVES), ("f", ReleaseResult.DIES), ("c", ReleaseResult.DIES))
    found = replace(found, candidates=titled(found))
    assert "2026-05-01" not in markdown(found), "it is undecided"
    text = markdown(replace(found, steps=(*found.steps, replace(found.steps[-1], candidate="b"))))
    (line,) = (line for line in text.splitlines() if line.startswith("- b, 2026-05-01: "))
    assert line.endswith(" <https://github.com/vllm-project/vllm/issues/44053>")


KEPT = sorted((Path(__file__).parents[2] / "reports" / "examples" / "bisect").iterdir())


ANSWERS = {"min-tokens-stop-ids": "0.29.0", "tq-chunked-prefill": "71672a27ecf3"}


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_a_kept_record_renders_as_it_was_written(folder: Path) -> None:
    text = (folder / "bisection.json").read_text(encoding="utf-8")
    record = json.loads(text)
    known = {field.name: record[field.name] for field in fields(Bisection)}
    steps = tuple(Step(**{**step, "fate": ReleaseResult(step["fate"])}) for step in record["steps"])
    candidates = tuple(Candidate(**candidate) for candidate in record["candidates"])
    enums = {"expected": Expected(record["expected"]), "untouched": tuple(record["untouched"])}
    again = Bisection(**{**known, **enums, "steps": steps, "candidates": candidates})
    assert json.loads(json.dumps(bisection_dict(again))) == record
    assert without_run_links(markdown(again)) == (folder / "bisection.md").read_text(encoding="utf-8")
    assert (record["answer"], again.exit_status) == (ANSWERS[folder.name], 0)
