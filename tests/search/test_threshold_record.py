"""The answer of a search of the shortest prompt that crashes, in sentences."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.golden_files import missing
from tests.search.conftest import FIELDS
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_search.record import markdown
from vllm_repro_search.threshold.plan import PromptResult, PromptSent
from vllm_repro_search.threshold.record import Threshold, ThresholdBoot

Q, C, S = PromptResult.QUIET, PromptResult.CRASH, PromptResult.SKIP


def threshold_of(
    *boots: list[tuple[int, PromptResult]], high: int = 20, guess: int = 10
) -> Threshold:
    made = [
        ThresholdBoot(
            probes=tuple(
                PromptSent(length, what, first=place == 0)
                for place, (length, what) in enumerate(boot)
            ),
            outcome=(
                Outcome.CRASH
                if boot and boot[-1][1] is C
                else Outcome.UNTRIGGERED
                if boot
                else Outcome.INFRA
            ),
            why="a | reason",
            run=f"run-{number}",
            duration_s=1.0,
        )
        for number, boot in enumerate(boots, 1)
    ]
    return Threshold(
        **FIELDS, arm="reported", version="0.23.0", low=1, high=high, guess=guess, boots=tuple(made)
    )


BELOW = [(1, Q), (5, Q), (9, Q)]
CASES = [
    (
        threshold_of([*BELOW, (10, C)], [(10, C)], [(15, C)], [(20, C)]),
        0,
        (
            "The shortest prompt that crashes has 10 tokens (as the trigger computes); 9 do not"
            " crash. It crashes alone on a fresh server, too. Longer ones crash: 15, 20."
        ),
    ),
    (
        threshold_of([*BELOW, (10, Q), (11, C)], [(11, C)], [(15, S)], [(20, S)]),
        0,
        (
            "The shortest prompt that crashes has 11 tokens (the trigger computes 10); 10 do not"
            " crash. It crashes alone on a fresh server, too. Prompts without an answer: 15, 20."
        ),
    ),
    (
        threshold_of([*BELOW, (10, C)], [(10, S)], [(15, C)], [(20, C)]),
        0,
        (
            "The shortest prompt that crashes has 10 tokens (as the trigger computes); 9 do not"
            " crash. Other prompts came before it; alone it gave no answer. Longer ones crash:"
            " 15, 20."
        ),
    ),
    (
        threshold_of([(10, Q), (11, Q), (13, Q), (17, Q), (20, Q)]),
        0,
        "None of 5 lengths from 10 to 20 tokens crashes it. The trigger computes 10.",
    ),
    (
        threshold_of([(1, C)], [(11, C)], [(20, C)]),
        0,
        "The shortest prompt that was sent crashes: 1 tokens. The trigger computes 10.",
    ),
    (
        threshold_of([*BELOW, (10, C)], [(10, Q)]),
        1,
        (
            "No threshold: a prompt of 10 tokens crashed, and 10 did not. It is not a matter of"
            " length alone."
        ),
    ),
    (
        threshold_of([*BELOW, (10, C)]),
        2,
        "A prompt of 10 tokens crashed, 9 did not. The checks are not finished.",
    ),
    (
        threshold_of([(1, Q), (5, Q), (9, S), (10, C)], []),
        2,
        (
            "Undecided: the shortest prompt that crashes has above 5, at most 10 tokens. Prompts"
            " without an answer: 9."
        ),
    ),
    (threshold_of(), 2, "Undecided: no boot has finished."),
    (threshold_of([]), 2, "Undecided: no prompt gave an answer."),
    (
        threshold_of([(1, S)], [(5, C)]),
        2,
        (
            "Undecided: 5 tokens crash, and no shorter prompt was answered. Prompts without an"
            " answer: 1."
        ),
    ),
    (
        threshold_of([(1, Q), (5, Q), (9, Q), (10, S)], [(20, Q)]),
        2,
        (
            "Undecided: no prompt that was answered crashed it, up to 20 tokens. Prompts without an"
            " answer: 10."
        ),
    ),
]


@pytest.mark.parametrize(("found", "status", "text"), CASES, ids=range(len(CASES)))
def test_each_state_has_its_sentence_and_status(found: Threshold, status: int, text: str) -> None:
    assert (found.exit_status, found.readings) == (status, (text,))
    record = found.as_dict()
    assert record["reading"] == text
    assert (record["answer"] is not None) == ("The shortest prompt that crashes has" in text[:36])


def test_the_table_names_every_prompt_and_the_reason_of_a_boot_without_an_answer() -> None:
    text = markdown(threshold_of([(1, Q), (5, C)], []))
    assert (
        missing(
            text,
            "2 prompts in 2 boots, 1 of which crashed",
            "| 1 | 1 quiet, 5 crash | crash | 1.0 s | [run-1](../tq-chunked-prefill/run-1/report.md) |",
            "| 2 | none | infra: a \\| reason | 1.0 s |",
        )
        == []
    )


def test_a_search_stopped_in_its_first_boot_has_no_table() -> None:
    text = markdown(replace(threshold_of(), stopped="SIGINT"))
    assert "Stopped by SIGINT" in text
    assert "| boot |" not in text
