"""The record of a bisection, and the one that is kept in reports/examples."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report_examples import without_run_links
from vllm_repro.releases.sources import Source
from vllm_repro.verdict.verdict import Expected
from vllm_repro_search.bisect.plan import State
from vllm_repro_search.bisect.record import Bisection, Candidate, Step, answer, bisection_dict, markdown
from vllm_repro_search.versions.release_result import ReleaseResult


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
        candidates=tuple(Candidate(label, Source(release=label)) for label in "abcdef"),
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


@pytest.mark.parametrize("expected", [Expected.DIES, Expected.HANGS])
def test_the_table_names_how_the_bug_shows(expected: Expected) -> None:
    found = replace(bisection_of(("a", ReleaseResult.LIVES), ("f", ReleaseResult.DIES)), expected=expected)
    assert f"| 1 | a | good | lives | 1.0 s | - |\n| 2 | f | bad | {expected} | 1.0 s | - |" in markdown(found)


@pytest.mark.parametrize("find_fix", [False, True])
def test_what_is_left_is_named_from_the_oldest(find_fix: bool) -> None:
    first, last = (ReleaseResult.DIES, ReleaseResult.LIVES) if find_fix else (ReleaseResult.LIVES, ReleaseResult.DIES)
    found = bisection_of(("a", first), ("f", last), ("c", first), find_fix=find_fix)
    assert (bisection_dict(found)["left"], found.exit_status) == (["d", "e", "f"], 2)


def test_a_commit_that_no_boot_ruled_out_leaves_a_doubt() -> None:
    found = bisection_of(("a", ReleaseResult.LIVES), ("f", ReleaseResult.DIES), ("c", ReleaseResult.DIES))
    found = replace(found, untouched=("b",), confidence=0.9)
    assert answer(found) == "The first bad one is c: it hung in 1 of 1 boots; b was not booted."
    assert "Probability 90.9%, if a bad one hangs in 100% of boots (--rate 1)." in markdown(found)
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


def failing(place: str, why: str) -> Step:
    return Step(candidate=place, fate=ReleaseResult.BOOT_FAILED, why=why, run=None, duration_s=1.0)


def lives(place: str) -> Step:
    return replace(failing(place, ""), fate=ReleaseResult.LIVES)


NO_X = "ImportError in <module>: cannot import name 'x' from 'vllm.a' (/cache/{}/vllm/a.py)"
ENDS = (("a", ReleaseResult.LIVES), ("f", ReleaseResult.DIES))


def test_a_commit_that_lacks_a_name_is_booted_late_and_not_at_all_once_that_name_failed() -> None:
    found = replace(bisection_of(*ENDS), missing={"c": ["vllm.a.x"], "d": ["vllm.a.x", "vllm.b.y"], "e": ["vllm.b.y"]})
    assert found.search.choose() == 1, "b, the only one that may boot"
    found = replace(found, steps=(*found.steps, lives("b")))
    chosen = found.from_good[found.search.choose() or 0].label
    assert chosen in "cde", "nothing else is left, and whether its import is reached is not known"
    found = replace(found, steps=(*found.steps, failing("c", NO_X.format(1))))
    assert found.hopeless == {"d": "cannot import vllm.a.x"}
    assert found.from_good[found.search.choose() or 0].label == "e"
    found = replace(found, steps=(*found.steps, failing("e", "ModuleNotFoundError in f: No module named 'vllm.b.y'")))
    assert (found.search.choose(), bisection_dict(found)["left"]) == (None, ["c", "d", "e", "f"])
    assert "1 other not booted: cannot import vllm.a.x" in answer(found)
    assert "3 candidates import a name that its own tree does not define" in markdown(
        replace(found, candidates=titled(found))
    )


def test_a_name_that_an_answer_shows_not_to_be_needed_rules_nothing_out() -> None:
    found = replace(bisection_of(*ENDS), missing={"b": ["vllm.a.x"], "c": ["vllm.a.x"], "d": ["vllm.a.x"]})
    assert replace(found, steps=(*found.steps, failing("b", NO_X.format(1)), lives("d"))).hopeless == {}


def test_those_between_two_that_fail_alike_are_not_booted_unless_one_between_answers() -> None:
    found = bisection_of(*ENDS)
    alike = failing("b", NO_X.format("1/a")), failing("e", NO_X.format("22/b"))
    found = replace(found, steps=(*found.steps, *alike))
    assert list(found.hopeless) == ["c", "d"]
    assert (found.search.conclusion().state, bisection_dict(found)["left"]) == ("stuck", ["b", "c", "d", "e", "f"])
    text = answer(found)
    assert (
        f"b, e boot-failed ({NO_X.format('1/a')}); 2 others not booted: between commits that fail with ImportError in"
        in text
    )
    other = replace(found, steps=(*found.steps, failing("c", "NameError in f: name 'y' is not defined")))
    assert list(other.hopeless) == ["d"], "another failure between them is no answer"
    assert replace(found, steps=(*found.steps, lives("c"))).hopeless == {}


@pytest.mark.parametrize("why", ["it never became ready", "no log line for 300 s", "RuntimeError", ""])
def test_failures_without_an_exception_and_its_message_are_not_alike(why: str) -> None:
    found = bisection_of(*ENDS)
    assert replace(found, steps=(*found.steps, failing("b", why), failing("e", why))).hopeless == {}


def test_trouble_of_the_host_is_not_alike() -> None:
    found = bisection_of(*ENDS)
    full = [replace(failing(one, "OSError in f: No space left"), fate=ReleaseResult.INFRA) for one in "be"]
    assert replace(found, steps=(*found.steps, *full)).hopeless == {}
    otherwise = [replace(step, fate=ReleaseResult.FAILS_OTHERWISE) for step in full]
    assert list(replace(found, steps=(*found.steps, *otherwise)).hopeless) == ["c", "d"]


RAISED = {
    "vllm.a.x": "ImportError in <module>: cannot import name 'x' from 'vllm.a'",
    "vllm.b.y": "ImportError in <module>: cannot import name 'y' from 'vllm.b'",
    "TypeError": "TypeError in f: missing 1 argument",
}


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, dict[int, str], dict[int, tuple[str, ...]]]:
    """Draw a place of the change, what the commits that fail raise, and the names that commits lack, which may be harmless."""
    change = draw(st.integers(1, 29))
    reasons = draw(st.dictionaries(st.integers(1, 28), st.sampled_from(sorted(RAISED))))
    lacking: dict[int, tuple[str, ...]] = {
        place: (why,) for place, why in reasons.items() if why != "TypeError" and draw(st.booleans())
    }
    harmless = draw(st.dictionaries(st.integers(1, 28), st.just(("vllm.c.z",)), max_size=5))
    return change, reasons, harmless | lacking


@given(histories(), st.booleans())
def test_what_is_not_booted_makes_no_answer_wrong(
    case: tuple[int, dict[int, str], dict[int, tuple[str, ...]]], find_fix: bool
) -> None:
    change, reasons, lacking = case
    labels = [f"c{place}" for place in range(30)]
    found = replace(
        bisection_of(find_fix=find_fix),
        candidates=tuple(Candidate(label, Source(release=label)) for label in labels),
        missing={labels[place]: names for place, names in lacking.items()},
    )
    while (number := found.search.choose()) is not None:
        label = found.from_good[number].label
        place = labels.index(label)
        bad = (place >= change) is not find_fix
        if place in reasons:
            step = failing(label, RAISED[reasons[place]])
        else:
            step = replace(failing(label, ""), fate=ReleaseResult.DIES if bad else ReleaseResult.LIVES)
        found = replace(found, steps=(*found.steps, step))
        assert len(found.steps) <= 30, "no commit is booted twice"
    known = found.search.conclusion()
    assert labels[change] in found.changes(known)
    if not reasons:
        assert (known.state, found.changes(known)) == (State.FOUND, [labels[change]])
    assert not found.hopeless.keys() & {step.candidate for step in found.steps}


KEPT = sorted((Path(__file__).parents[2] / "reports" / "examples" / "bisect").iterdir())


LEFT = {
    "min-tokens-stop-ids": ["0.29.0"],
    "sco-hybrid": ["92397ca17c40"],
    "sco-hybrid-branches": ["b4c904394063"],
    "sco-window-loads-wait": ["ecb302e3f81d"],
    "tq-chunked-prefill": ["71672a27ecf3"],
    # The parts of the fix are the first, the third and the last one; those in front of the last do not boot.
    "tq-chunked-prefill-parts": ["3bdf4ea599db", "e5155234989a", "52d6e4f3d9e0", "179b822ce657", "f62e286e0c43"],
}


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_a_kept_record_renders_as_it_was_written(folder: Path) -> None:
    text = (folder / "bisection.json").read_text(encoding="utf-8")
    record = json.loads(text)
    known = {field.name: record[field.name] for field in fields(Bisection)}
    steps = tuple(Step(**{**step, "fate": ReleaseResult(step["fate"])}) for step in record["steps"])
    candidates = tuple(
        Candidate(**candidate | {"source": Source(release=candidate["source"])}) for candidate in record["candidates"]
    )
    enums = {"expected": Expected(record["expected"]), "untouched": tuple(record["untouched"])}
    again = Bisection(**{**known, **enums, "steps": steps, "candidates": candidates})
    assert json.loads(json.dumps(bisection_dict(again))) == record
    assert without_run_links(markdown(again)) == (folder / "bisection.md").read_text(encoding="utf-8")
    left = LEFT[folder.name]
    assert (record["left"], again.exit_status) == (left, 0 if len(left) == 1 else 2)
