"""Answers of searches in sentences, their exit statuses and their pages."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.golden_files import missing
from tests.search.conftest import FIELDS
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected
from vllm_repro_search.bisect.boots import Bisection, BisectionBoot
from vllm_repro_search.bisect.candidates import Candidate
from vllm_repro_search.minimize.verb import Minimization, MinimizationBoot, Unit
from vllm_repro_search.record import markdown
from vllm_repro_search.threshold.plan import PromptResult, PromptSent
from vllm_repro_search.threshold.verb import Threshold, ThresholdBoot
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


UNITS = (
    Unit("request", "", "chat of 9 tokens"),
    Unit("flag", "--a", "--a 1"),
    Unit("flag", "--b", "--b"),
    Unit("variable", "C", "C=1"),
)
ALL = (0, 1, 2, 3)


def reduction(
    *boots: tuple[tuple[int, ...], Outcome], phase: str = "request", units: tuple[Unit, ...] = UNITS
) -> Minimization:
    made = [
        MinimizationBoot(
            units=kept,
            unused=(),
            outcome=outcome,
            phase=phase if outcome is Outcome.CRASH else None,
            why="a | reason",
            run=f"run-{number}",
            duration_s=1.0,
        )
        for number, (kept, outcome) in enumerate(boots, 1)
    ]
    return Minimization(
        **FIELDS,
        arm="reported",
        version="0.23.0",
        units=units,
        untried=("--dtype",),
        rest="vllm serve m",
        boots=tuple(made),
    )


CRASHES, CLEAN, BOOT_FAILED = Outcome.CRASH, Outcome.CLEAN, Outcome.BOOT_FAILED
FOUND = reduction(
    (ALL, CRASHES),
    ((1, 2, 3), CLEAN),
    ((0, 2, 3), BOOT_FAILED),
    ((0, 1, 3), CRASHES),
    ((0, 1), CRASHES),
    ((1,), CLEAN),
    ((0,), Outcome.OTHER_CRASH),
)
NONE_LEFT = (
    (ALL, CRASHES),
    ((1, 2, 3), CRASHES),
    ((2, 3), CRASHES),
    ((3,), CRASHES),
    ((), CRASHES),
)
REDUCTIONS = [
    (
        FOUND,
        0,
        (
            "The crash needs 1 of 2 flags and 0 of 1 variable and 1 of 1 request: chat of 9 tokens;"
            " --a 1. If one of these is left out, this crash does not occur."
        ),
    ),
    (
        reduction(*NONE_LEFT),
        0,
        (
            "The crash needs 0 of 2 flags and 0 of 1 variable and 0 of 1 request. "
            "The request for one token that the harness sends to every server is enough."
        ),
    ),
    (
        reduction(*NONE_LEFT, phase="warmup"),
        0,
        (
            "The crash needs 0 of 2 flags and 0 of 1 variable and 0 of 1 request. It crashes"
            " without any request, in phase warmup."
        ),
    ),
    (
        reduction(((0,), CRASHES), ((), CLEAN), units=UNITS[1:2]),
        0,
        "The crash needs 1 of 1 flag: --a 1. Without it this crash does not occur.",
    ),
    (
        reduction((ALL, CLEAN)),
        1,
        (
            "Surprise: the reported command does not show this crash. The whole command: clean: a |"
            " reason"
        ),
    ),
    (
        reduction((ALL, BOOT_FAILED)),
        2,
        "Undecided. The whole command: vLLM does not start: a | reason",
    ),
    (
        reduction((ALL, Outcome.UNSUPPORTED)),
        2,
        "Undecided. The whole command: vLLM does not start: a | reason",
    ),
    (
        reduction((ALL, Outcome.INFRA)),
        2,
        "Undecided. The whole command: it was not booted, or gave no answer.",
    ),
    (
        reduction((ALL, CRASHES)),
        2,
        (
            "It crashes with 2 of 2 flags and 1 of 1 variable and 1 of 1 request. The search is not"
            " finished."
        ),
    ),
]


def test_the_page_names_each_removal_and_links_to_its_run() -> None:
    text = markdown(FOUND)
    assert (
        missing(
            text,
            "```console\nvllm serve m \\\n  --a 1\n```",
            "Left in, because a lab server handles these itself: --dtype.",
        )
        == []
    )
    link = "[run-{0}](../tq-chunked-prefill/run-{0}/report.md)".format
    assert (
        missing(
            text,
            f"| chat of 9 tokens | clean: a \\| reason | {link(6)} |",
            f"| --a 1 | other-crash: a \\| reason | {link(7)} |",
            f"| 1 | - | crash | 1.0 s | {link(1)} |",
            f"| 3 | --a 1 | vLLM does not start: a \\| reason | 1.0 s | {link(3)} |",
        )
        == []
    )
    assert FOUND.as_dict()["removals"] == {
        "chat of 9 tokens": "clean: a | reason",
        "--a 1": "other-crash: a | reason",
    }
    assert "vllm serve" not in markdown(reduction((ALL, CLEAN))), "no command is claimed to crash"


def test_a_value_for_the_lab_is_named_beside_the_command() -> None:
    units = (Unit("flag", "--n", "--n 9000", "--n 9"), Unit("flag", "--m", "--m 9000", "--m 9"))
    text = markdown(reduction(((0, 1), CRASHES), ((0,), CRASHES), units=units))
    assert (
        missing(
            text,
            "vllm serve m \\\n  --n 9000\n```",
            "The lab servers had smaller values: --n 9 for --n 9000.",
        )
        == []
    )


def test_a_boot_is_named_by_what_it_leaves_out_of_what_was_left() -> None:
    left_out = [FOUND.without(boot.units, FOUND.boots[:at]) for at, boot in enumerate(FOUND.boots)]
    chat = "chat of 9 tokens"
    assert left_out == ["", chat, "--a 1", "--b", "C=1", chat, "--a 1"]


def test_a_boot_that_the_host_spoiled_decides_nothing() -> None:
    spoiled = replace(FOUND, boots=(*reduction((ALL, Outcome.INFRA)).boots, *FOUND.boots))
    assert spoiled.readings == FOUND.readings


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
THRESHOLDS = [
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


STATES = [*REDUCTIONS, *THRESHOLDS]


@pytest.mark.parametrize(("found", "status", "text"), STATES, ids=range(len(STATES)))
def test_each_state_has_its_sentence_and_status(
    found: Minimization | Threshold, status: int, text: str
) -> None:
    assert (found.exit_status, found.readings) == (status, (text,))
    record = found.as_dict()
    assert record["reading"] == text
    answered = (
        status == 0
        if isinstance(found, Minimization)
        else text.startswith("The shortest prompt that crashes has")
    )
    assert (record["answer"] is not None) == answered


def test_the_table_names_every_prompt_and_failed_boot() -> None:
    text = markdown(threshold_of([(1, Q), (5, C)], []))
    assert (
        missing(
            text,
            "2 prompts in 2 boots, 1 of which crashed",
            "| 1 | 1 quiet, 5 crash | crash | 1.0 s"
            " | [run-1](../tq-chunked-prefill/run-1/report.md) |",
            "| 2 | none | infra: a \\| reason | 1.0 s |",
        )
        == []
    )


def test_a_search_stopped_in_its_first_boot_has_no_table() -> None:
    text = markdown(replace(threshold_of(), stopped="SIGINT"))
    assert "Stopped by SIGINT" in text
    assert "| boot |" not in text
