"""What the client got of each trial, and what the output check made of it."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.report.answered import answers, held, output_words

CHECKS = {"longest_run": 24, "distinct": 0.1, "same": 2, "needle": None, "baseline": "eager", "tokens": 64}


def recording(*entries: tuple[str, dict[str, Any]]) -> Recording:
    return Recording(
        tuple(Entry(float(at), event, fields) for at, (event, fields) in enumerate(entries)), cut=False, damaged=0
    )


def sent(arm: str = "reported") -> tuple[str, dict[str, Any]]:
    return "request-sent", {"arm": arm, "trial": 1}


def answer(status: int | None, error: str | None = None, finish: str | None = None) -> tuple[str, dict[str, Any]]:
    return "answer", {"arm": "reported", "trial": 1, "status": status, "error": error, "finish_reason": finish}


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        (answer(200, finish="length"), "200"),
        (answer(500, "EngineCore encountered an issue."), "500"),
        (answer(400, "too long"), "400"),
        (answer(None, "ReadError"), "none"),
        (answer(200, "EngineCore encountered an issue."), "200 (error event)"),
        (answer(200), "200 (cut off)"),
    ],
)
def test_each_way_in_which_a_request_ends_has_a_word(entry: tuple[str, dict[str, Any]], word: str) -> None:
    assert answers(recording(sent(), entry)) == {("reported", 1): (word,)}


def test_equal_results_in_a_row_are_one_and_a_request_without_an_answer_is_not_lost() -> None:
    good = answer(200, finish="stop")
    found = answers(recording(sent(), good, sent(), good, sent(), answer(500, "dead"), sent()))
    assert found == {("reported", 1): ("200 x 2", "500", "none")}


def ended(arm: str, outcome: str = "clean", weights: str | None = "real") -> tuple[str, dict[str, Any]]:
    return "trial-ended", {"arm": arm, "trial": 1, "outcome": outcome, "weights": weights}


def output(arm: str, *tokens: int) -> tuple[str, dict[str, Any]]:
    said = {
        "probe": "greedy",
        "length": 64,
        "sha256": "",
        "first": list(tokens),
        "longest_run": 1,
        "distinct": 1.0,
        "found": None,
    }
    return "output", {"arm": arm, "trial": 1, "said": said}


def words(*entries: tuple[str, dict[str, Any]]) -> dict[str, str]:
    run = recording(("run-started", {"output": CHECKS}), *entries)
    return {arm: word for (arm, _), word in output_words(run, held(run)).items()}


def test_an_arm_is_held_against_the_baseline() -> None:
    found = words(
        *(output("eager", 1, 2, 3), output("same", 1, 2, 9), output("other", 1, 7)),
        *(ended("eager"), ended("same"), ended("other")),
    )
    assert found == {"eager": "plausible", "same": "as eager", "other": "wrong"}


def test_without_the_baseline_an_answer_is_judged_by_itself_alone() -> None:
    assert words(output("same", 1, 2), ended("same")) == {"same": "plausible"}


def test_random_weights_are_not_judged_and_the_dead_have_no_word() -> None:
    assert words(output("eager", 1, 2), ended("eager", weights="dummy"), ended("reported", "crash")) == {
        "eager": "not judged"
    }


def test_weights_that_were_made_are_held_against_a_baseline_that_looks_back() -> None:
    def made(arm: str, probe: str, *tokens: int) -> tuple[str, dict[str, Any]]:
        event, fields = output(arm, *tokens)
        return event, {**fields, "said": {**fields["said"], "probe": probe, "margins": [2.0] * len(tokens)}}

    asked = [made("eager", "greedy", 1, 2, 3), made("same", "greedy", 1, 2, 9), made("other", "greedy", 1, 7)]
    ends = [ended(arm, weights="made") for arm in ("eager", "same", "other")]
    looked = made("eager", "beginning", 5, 2, 3)
    assert words(*asked, looked, *ends) == {"eager": "plausible", "same": "as eager", "other": "wrong"}
    assert words(*asked, *ends) == dict.fromkeys(("eager", "same", "other"), "not judged")


def test_an_answer_that_is_wrong_by_itself_says_so() -> None:
    assert words(output("eager", 1, 1), ended("eager", "wrong-output")) == {"eager": "wrong"}


def test_a_scenario_without_a_check_has_no_words() -> None:
    run = recording(("run-started", {"output": None}), output("eager", 1, 2), ended("eager"))
    assert held(run) == {}
    assert output_words(run, {}) == {}
