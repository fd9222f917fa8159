"""What the prompts of a boot did, from made-up journals, and which scenarios have a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from vllm_repro.errors import UsageError
from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.workload import chat
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions
from vllm_repro_search.threshold.boots import lengths_of, probes_of
from vllm_repro_search.threshold.plan import PromptResult, PromptSent

QUIET: dict[str, Any] = {"status": 200, "error": None, "finish_reason": "length"}
DEAD: dict[str, Any] = {
    "status": 200,
    "error": "EngineCore died",
    "finish_reason": None,
    "usage": None,
}
REFUSED: dict[str, Any] = {"status": 400, "error": "too long", "finish_reason": None, "usage": None}
Q, C, S = PromptResult.QUIET, PromptResult.CRASH, PromptResult.SKIP


def boot(outcome: str, *answers: dict[str, Any] | None, trial: int = 1) -> list[Entry]:
    """Return the journal of a boot with prompts of 10, 20, 30, … tokens; None for one without an answer."""
    entries = []
    for length, answer in zip(range(10, 1000, 10), answers, strict=False):
        label = {"trial": trial, "name": f"{length} tokens"}
        entries.append(Entry(0, "request-sent", label))
        if answer is not None:
            entries.append(
                Entry(0, "answer", {"usage": {"prompt_tokens": length}, **answer, **label})
            )
    return [
        *entries,
        Entry(0, "trial-ended", {"trial": trial, "outcome": outcome, "why": "a reason"}),
    ]


def probes(*entries: Entry) -> tuple[PromptSent, ...]:
    return probes_of(Recording(entries, cut=False))[2]


@pytest.mark.parametrize(
    ("outcome", "answers", "expected"),
    [
        ("crash", [QUIET, QUIET, DEAD], [Q, Q, C]),
        ("crash", [QUIET, None], [Q, C]),
        ("crash", [DEAD], [C]),
        ("clean", [QUIET, QUIET], [Q, Q]),
        ("untriggered", [QUIET], [Q]),
        ("untriggered", [QUIET, REFUSED, QUIET], [Q, S, Q]),
        ("crash", [REFUSED, DEAD], [S, C]),
        # Two prompts without an answer: either may be the one that crashed it.
        ("crash", [QUIET, DEAD, DEAD], [Q, S, S]),
        # It died after the last answer: neither quiet nor a crash of that prompt.
        ("crash", [QUIET, QUIET], [Q, S]),
        ("crash", [QUIET, REFUSED], [Q, S]),
        ("other-crash", [QUIET, DEAD], [Q, S]),
        ("hang", [QUIET, None], [Q, S]),
        ("wrong-output", [QUIET, QUIET], [Q, S]),
        # The host spoiled the last one: it is sent again.
        ("infra", [QUIET, None], [Q]),
        ("boot-failed", [], []),
        ("clean", [{**QUIET, "usage": {"prompt_tokens": 11}}, {**QUIET, "usage": None}], [S, S]),
        ("clean", [{**QUIET, "finish_reason": None}, {**QUIET, "status": 500}], [S, S]),
        ("clean", [{**QUIET, "error": "cut off"}], [S]),
    ],
)
def test_what_each_prompt_did(
    outcome: str, answers: Sequence[dict[str, Any] | None], expected: list[PromptResult]
) -> None:
    found = probes(*boot(outcome, *answers))
    assert [one.answer for one in found] == expected
    assert [one.length for one in found] == [10, 20, 30][: len(expected)]
    assert [one.first for one in found] == [True, False, False][: len(expected)]


def test_only_the_last_trial_of_a_run_counts() -> None:
    found = probes(
        *boot("crash", None, trial=2),
        *boot("infra", QUIET, QUIET),
        *boot("crash", None, trial=2)[-1:],
    )
    assert found == (PromptSent(10, PromptResult.CRASH, first=True),)


def lengths(
    name: str, arm: str = "reported", kind: ServerKind = ServerKind.LAB
) -> tuple[int, int, int]:
    scenario = find(name)
    chosen = scenario.arm(arm)
    assert chosen is not None
    found = lengths_of(scenario, chosen, kind, ServerOptions(), "vllm-repro run")
    return found.low, found.guess, found.high


def test_the_search_begins_where_the_trigger_computes_it() -> None:
    assert lengths("tq-chunked-prefill") == (100, 4096 + 129, 2 * (4096 + 129))
    assert lengths("tq-chunked-prefill", kind=ServerKind.REHEARSAL) == (100, 4225, 8450)
    assert lengths("tq-chunked-prefill", "near-miss-129") == (
        32,
        4225,
        8450,
    ), "no prompt of the arm is shorter"
    assert lengths("dsv4-tp2") == (400, 760, 1520)


@pytest.mark.parametrize(("longest", "high"), [(9000, 9000), (500_000, 102_400 - 8)])
def test_the_longest_prompt_is_one_that_the_workload_has_and_the_model_takes(
    longest: int, high: int
) -> None:
    scenario = find("tq-chunked-prefill")
    arm = replace(scenario.arms[0], workload=(chat(prompt=100), chat(prompt=longest)))
    assert lengths_of(scenario, arm, ServerKind.LAB, ServerOptions(), "").high == high


@pytest.mark.parametrize(
    ("name", "arm", "message"),
    [
        ("min-tokens-stop-ids", "reported", "not the length of one prompt: sent_with"),
        ("sco-hybrid", "reported", "not the length of one prompt"),
        ("tq-prefix-hit-unreserved", "reported", "not the length of one prompt"),
        ("tq-mtp-cudagraphs", "reported", "no prompt crashes the arm reported"),
        ("sco-lazy-never-rests", "reported", "no prompt crashes the arm reported"),
        ("tq-chunked-prefill", "eager", "no prompt crashes the arm eager"),
        ("dsv4-cpu-first-request", "reported", "every prompt crosses the boundary"),
    ],
)
def test_other_boundaries_are_refused(name: str, arm: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        lengths(name, arm)
    assert refused.value.hint == "to see what this arm does: vllm-repro run"
