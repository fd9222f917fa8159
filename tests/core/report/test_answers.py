from __future__ import annotations

from typing import Any

import pytest

from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.report.answers import client_views
from vllm_repro.verdict.output import Checks, Probe, sample_output

CHECKS = {
    "longest_run": 24,
    "distinct": 0.1,
    "same": 2,
    "needle": None,
    "baseline": "eager",
    "tokens": 64,
}

Event = tuple[str, dict[str, Any]]


def recording(*entries: Event) -> Recording:
    return Recording(
        tuple(Entry(float(at), event, fields) for at, (event, fields) in enumerate(entries)),
        cut=False,
        damaged=0,
    )


def sent(arm: str = "reported") -> Event:
    return "request-sent", {"arm": arm, "trial": 1, "name": "chat"}


def answer(status: int | None, error: str | None = None, finish: str | None = None) -> Event:
    return "answer", {
        "arm": "reported",
        "trial": 1,
        "name": "chat",
        "status": status,
        "error": error,
        "finish_reason": finish,
    }


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        (answer(200, finish="length"), "200"),
        (answer(500, "EngineCore encountered an issue."), "500"),
        (answer(None, "ReadError"), "none"),
        (answer(200, "EngineCore encountered an issue."), "200 (error event)"),
        (answer(200), "200 (cut off)"),
    ],
)
def test_results_of_requests(entry: Event, word: str) -> None:
    assert client_views(recording(sent(), entry))["reported", 1].answers == (word,)


def test_equal_results_are_folded() -> None:
    good = answer(200, finish="stop")
    found = client_views(recording(sent(), good, sent(), good, sent(), answer(500, "dead"), sent()))
    assert found["reported", 1].answers == ("200 x 2", "500", "none")
    assert found["reported", 1].failed == ("chat",)
    assert client_views(recording(sent(), good))["reported", 1].failed == ()


def ended(arm: str, outcome: str = "clean", weights: str | None = "real") -> Event:
    return "trial-ended", {"arm": arm, "trial": 1, "outcome": outcome, "weights": weights}


def output(arm: str, *tokens: int, probe: str = "greedy", margins: tuple[float, ...] = ()) -> Event:
    shown = {
        "probe": probe,
        "length": 64,
        "sha256": "",
        "first": list(tokens),
        "longest_run": 1,
        "distinct": 1.0,
        "found": None,
        "margins": list(margins),
    }
    return "output", {"arm": arm, "trial": 1, "said": shown}


def words(*entries: Event, checks: dict[str, Any] | None = CHECKS) -> dict[str, str]:
    run = recording(("run-started", {"output": checks}), *entries)
    return {arm: view.output for (arm, _), view in client_views(run).items() if view.output}


def test_arms_are_compared_with_the_baseline() -> None:
    found = words(
        *(output("eager", 1, 2, 3), output("same", 1, 2, 9), output("other", 1, 7)),
        *(ended("eager"), ended("same"), ended("other")),
    )
    assert found == {"eager": "plausible", "same": "as eager", "other": "wrong"}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([output("same", 1, 2), ended("same")], {"same": "plausible"}),  # no baseline
        (
            [output("eager", 1, 2), ended("eager", weights="dummy"), ended("reported", "crash")],
            {"eager": "not judged"},
        ),
        ([output("eager", 1, 1), ended("eager", "wrong-output")], {"eager": "wrong"}),
    ],
)
def test_outputs_without_a_comparison(entries: list[Event], expected: dict[str, str]) -> None:
    assert words(*entries) == expected


def test_made_weights_need_a_baseline_that_reads_its_prompt() -> None:
    greedy = {"eager": (1, 2, 3), "same": (1, 2, 9), "other": (1, 7)}
    asked = [output(arm, *tokens, margins=(2.0,) * len(tokens)) for arm, tokens in greedy.items()]
    ends = [ended(arm, weights="made") for arm in greedy]
    other_beginning = output("eager", 5, 2, 3, probe="beginning")
    assert words(*asked, other_beginning, *ends) == {
        "eager": "plausible",
        "same": "as eager",
        "other": "wrong",
    }
    assert words(*asked, *ends) == dict.fromkeys(greedy, "not judged")


def test_equal_requests_of_a_workload_are_alike_or_not_judged() -> None:
    checks = vars(Checks(alike=[("first", "again")]))
    first, again = (
        (
            "output",
            {
                "arm": "reported",
                "trial": 1,
                "said": vars(sample_output(Probe.WORKLOAD, ["a"], "a", name=name)),
            },
        )
        for name in ("first", "again")
    )
    end = ended("reported", weights="dummy")
    assert words(first, again, end, checks=checks) == {"reported": "alike"}
    assert words(first, end, checks=checks) == {"reported": "not judged"}


def test_without_a_check_there_are_no_words() -> None:
    assert words(output("eager", 1, 2), ended("eager"), checks=None) == {}


@pytest.mark.parametrize(
    ("other", "margin", "weights", "word"),
    [
        (1, 2.0, "made", "as alone"),
        (9, 2.0, "made", "wrong"),
        (9, 0.1, "made", "not judged"),
        (1, 2.0, "dummy", "not judged"),
    ],
)
def test_answers_compared_with_those_alone_have_a_word(
    other: int, margin: float, weights: str, word: str
) -> None:
    alone = (
        sample_output(probe, [1], "", margins=(margin,), prompt="p")
        for probe in (Probe.ALONE, Probe.CACHED)
    )
    samples = (*alone, sample_output(Probe.BURST, [other], "", prompt="p"))
    entries = [("output", {"arm": "eager", "trial": 1, "said": vars(one)}) for one in samples]
    assert words(*entries, ended("eager", weights=weights), checks=None) == {"eager": word}
