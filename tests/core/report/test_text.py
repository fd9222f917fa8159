from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.github_markdown import render
from tests.golden_files import assert_golden
from tests.report_examples import DIED, EXAMPLES, LIVED, replace, report
from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.report.answers import client_views
from vllm_repro.report.model import ArmReport, RunReport, arm_fields
from vllm_repro.report.text import cell, code, fence, html, plain, printable, shorten, size
from vllm_repro.report.wording import plain_sentence
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.output import Checks, Probe, sample_output
from vllm_repro.verdict.verdict import Verdict, arm_result

NASTY = st.text(
    st.sampled_from("ab1 `~*_[]()<>!#@|\\&;:/.-+=$\n\r\t\x00\x1b\u202e\ud800" + "@u#1"), max_size=60
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=100)
@given(NASTY)
def test_a_fence_keeps_its_text(text: str) -> None:
    page = render(f"before\n\n{fence(text, 'text')}\n\nafter")
    assert (
        page.code == [printable(text).rstrip("\n") + "\n"]
        or "`" * 17 in text
        or not printable(text).strip()
    )
    assert len(page.code) == 1
    assert [words for words in page.text if words.strip()] == ["before", "after"]


@settings(max_examples=100)
@given(NASTY)
def test_plain_text_stays_text(text: str) -> None:
    page = render(plain(text))
    assert "".join(page.text).replace("\u200b", "").strip() == " ".join(printable(text).split())
    assert page.calls() == []
    assert set(page.tags) <= {"p"}


@settings(max_examples=100)
@given(NASTY)
def test_a_cell_is_one_cell(text: str) -> None:
    page = render(
        f"| a | b | c |\n|---|---|---|\n| x | {cell(text)} | {code(text, in_table=True)} |"
    )
    assert page.tags.count("td") == 3
    assert page.tags.count("tr") == 2
    assert set(page.tags) <= {"table", "thead", "tbody", "tr", "th", "td", "code"}
    assert page.calls() == []


@settings(max_examples=100)
@given(NASTY)
def test_inline_code_and_summaries_stay_text(text: str) -> None:
    inline = render(f"x {code(text)} y")
    folded = render(f"<details><summary>{html(text)}</summary>\n\nx\n\n</details>")
    assert set(inline.tags) == {"p", "code"}
    assert folded.tags == ["details", "summary", "p"]
    assert inline.calls() == folded.calls() == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "bad >=0.21.0,<0.24.0 [999999] _under_score_ a_b",
            r"bad >=0.21.0,<0.24.0 [999999] \_under_score\_ a_b",
        ),
        (
            "@user #1 owner/repo#2 GH-3",
            "@&#x200B;user #&#x200B;1 owner/repo#&#x200B;2 GH-&#x200B;3",
        ),
        ("https://github.com/a/b/issues/1", "https:&#x200B;//github.com/a/b/issues/1"),
        ("<b> a|b", r"\<b> a\|b"),
        ("1@.a", "1@&#x200B;.a"),
    ],
)
def test_escaped_text_stays_readable(text: str, expected: str) -> None:
    assert cell(text) == expected


@given(TEXT, st.integers(0, 400))
def test_a_text_is_shortened_to_bytes(text: str, limit: int) -> None:
    short = shorten(text * 10, limit)
    assert size(short) <= limit
    assert short == text * 10 or size(text * 10) > limit


def test_the_middle_is_left_out_and_counted() -> None:
    short = shorten("a" * 1_000 + "b" * 1_000, 200)
    assert short.startswith("a" * 50)
    assert short.endswith("b" * 50)
    assert "bytes left out" in short


def test_the_sentence_of_each_example() -> None:
    lines = [f"{folder.name}\n    {plain_sentence(report(folder))}." for folder in EXAMPLES]
    assert_golden("sentences.txt", "\n".join(lines) + "\n")


def with_outcomes(arm: ArmReport, *outcomes: Outcome) -> ArmReport:
    trials = tuple(
        replace(arm.trials[0], outcome=outcome, number=n) for n, outcome in enumerate(outcomes, 1)
    )
    return replace(arm, trials=trials, **arm_fields(arm_result(arm.name, arm.expected, outcomes)))


RAN, QUIET = report(DIED), report(LIVED)
FIRST, EAGER, *_ = RAN.arms
NOT_SHOWN = "was not shown to have this bug, nor to be free of it; declared"
IN_LAB = "^vLLM 0.23.0 in the lab "


def with_first(verdict: Verdict, *outcomes: Outcome) -> RunReport:
    """Return the example with other outcomes of its first arm."""
    arms = (with_outcomes(FIRST, *outcomes), *RAN.arms[1:])
    return replace(RAN, arms=arms, verdict=verdict)


def beside(eager: ArmReport) -> RunReport:
    """Return the example with another second arm."""
    result = arm_fields(arm_result("eager", eager.expected, eager.counted.outcomes))
    return replace(RAN, arms=(FIRST, replace(eager, **result)))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        # It claims only what the run saw.
        (
            with_first(Verdict.REPRODUCES, Outcome.CRASH, Outcome.CLEAN),
            f"{IN_LAB}shows this bug: it died in 1 of 2 boots; with --enforce-eager it lived in 1",
        ),
        (
            with_first(Verdict.CHANGED, Outcome.OTHER_CRASH),
            f"{IN_LAB}failed in another way than this bug; declared fixed",
        ),
        (with_first(Verdict.INCONCLUSIVE, Outcome.UNTRIGGERED), IN_LAB + NOT_SHOWN),
        (
            with_first(Verdict.QUIET, Outcome.CLEAN),
            f"{IN_LAB}crossed the boundary of this bug and did not show it; declared fixed",
        ),
        # The rehearsal does not imitate the bug.
        (with_first(Verdict.INCONCLUSIVE, Outcome.CLEAN), IN_LAB + NOT_SHOWN),
        # An arm that died or did not run avoids nothing.
        (beside(with_outcomes(EAGER, Outcome.CRASH)), "^(?!.*it lived)"),
        (beside(replace(EAGER, trials=())), "^(?!.*it lived)"),
        # The other arms alone do not show the bug gone.
        (replace(RAN, arms=RAN.arms[1:], verdict=Verdict.QUIET), "nor to be free of it"),
        # It names what ran.
        (replace(QUIET, evidence="gpu"), "^vLLM 0.24.0 crossed"),
        (replace(QUIET, evidence="cpu"), "^vLLM 0.24.0 on a CPU"),
        (replace(QUIET, evidence="lab"), "^vLLM 0.24.0 in the lab"),
        (replace(QUIET, evidence="rehearsal"), "^The rehearsal's imitation of vLLM"),
        (replace(QUIET, evidence="unknown"), "^vLLM 0.24.0 crossed"),
    ],
)
def test_the_first_sentence_of_a_report(made: RunReport, said: str) -> None:
    assert re.search(said, plain_sentence(made))


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


GOOD = answer(200, finish="stop")


@pytest.mark.parametrize(
    ("entries", "words", "failed"),
    [
        ([answer(200, finish="length")], ("200",), ()),
        ([answer(500, "EngineCore encountered an issue.")], ("500",), ("chat",)),
        ([answer(None, "ReadError")], ("none",), ("chat",)),
        ([answer(200, "EngineCore encountered an issue.")], ("200 (error event)",), ("chat",)),
        ([answer(200)], ("200 (cut off)",), ("chat",)),
        (
            [GOOD, sent(), GOOD, sent(), answer(500, "dead"), sent()],
            ("200 x 2", "500", "none"),
            ("chat",),
        ),
    ],
)
def test_results_of_requests(
    entries: list[Event], words: tuple[str, ...], failed: tuple[str, ...]
) -> None:
    view = client_views(recording(sent(), *entries))["reported", 1]
    assert (view.answers, view.failed) == (words, failed)


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


def test_an_answer_unlike_the_one_alone_is_wrong_for_a_trial_that_found_it() -> None:
    entry = output("eager", 1, 2)
    wrong = ended("eager", "wrong-output")
    assert words(entry, wrong, checks=None) == {"eager": "wrong"}
