"""The answer of a bisection in sentences."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.search.conftest import FIELDS
from vllm_repro.verdict.verdict import Expected
from vllm_repro_search.bisect.record import Bisection, BisectionBoot, Candidate
from vllm_repro_search.record import markdown
from vllm_repro_search.versions.record import ReleaseResult

LIVES, DIES, FAILS = ReleaseResult.LIVES, ReleaseResult.DIES, ReleaseResult.BOOT_FAILED


def bisection_of(
    *fates: tuple[str, ReleaseResult], find_fix: bool = False, title: str = ""
) -> Bisection:
    """Return a bisection of the commits a to f; a boot that fails names no exception."""
    return Bisection(
        **FIELDS,
        arm="reported",
        expected=Expected.HANGS,
        find_fix=find_fix,
        candidates=tuple(
            Candidate(label, label, title, "2026-05-01" if title else "") for label in "abcdef"
        ),
        rate=1.0,
        confidence=0.95,
        boots=tuple(
            BisectionBoot(candidate=label, fate=fate, why="", run=None, duration_s=1.0)
            for label, fate in fates
        ),
    )


def reading(record: Bisection) -> str:
    (text,) = record.readings
    return text


def test_several_changes_are_a_surprise() -> None:
    record = bisection_of(("f", DIES), ("a", LIVES), ("d", LIVES), ("b", ReleaseResult.SOMETIMES))
    assert (
        reading(record)
        == "The first bad one is b: it hung in 1 of 1 boots; a lived in 1 of 1 boots. "
        "There is more than one change: d lived in 1 of 1 boots, although it is on the bad side."
    )
    assert (record.exit_status, record.as_dict()["good_again"]) == (1, ["d"])


@pytest.mark.parametrize("expected", [Expected.DIES, Expected.HANGS])
def test_the_table_names_how_the_bug_shows(expected: Expected) -> None:
    record = replace(bisection_of(("a", LIVES), ("f", DIES)), expected=expected)
    assert (
        f"| 1 | a | good | lives | 1.0 s | - |\n| 2 | f | bad | {expected} | 1.0 s | - |"
        in markdown(record)
    )


@pytest.mark.parametrize("find_fix", [False, True])
def test_what_is_left_is_named_from_the_oldest(find_fix: bool) -> None:
    first, last = (DIES, LIVES) if find_fix else (LIVES, DIES)
    record = bisection_of(("a", first), ("f", last), ("c", first), find_fix=find_fix)
    assert (record.as_dict()["left"], record.exit_status) == (["d", "e", "f"], 2)


def test_a_commit_is_named_with_its_date_and_pull_request() -> None:
    boots = (("a", LIVES), ("f", DIES), ("c", DIES))
    title = "[TQ] reserve (#44053)"
    assert "2026-05-01" not in markdown(bisection_of(*boots, title=title)), "it is undecided"
    text = markdown(bisection_of(*boots, ("b", DIES), title=title))
    (line,) = (line for line in text.splitlines() if line.startswith("- b, 2026-05-01: "))
    assert line.endswith(" <https://github.com/vllm-project/vllm/issues/44053>")


def test_candidates_that_failed_alike_stand_together() -> None:
    boots = [("a", LIVES), ("f", DIES), *((label, FAILS) for label in "bcde")]
    record = bisection_of(*boots)
    assert "Those between could not be tried: b, c, d, and 1 more boot-failed." in reading(record)
    other = replace(record.boots[3], why="NameError")
    apart = replace(record, boots=(*record.boots[:3], other, *record.boots[4:]))
    assert "b, d, e boot-failed; c boot-failed (NameError)" in reading(apart)
    assert (apart.as_dict()["state"], apart.exit_status) == ("stuck", 2)
