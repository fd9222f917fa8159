"""The answer of a reduction in sentences, and its command."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.golden_files import missing
from tests.search.conftest import FIELDS
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_search.minimize.record import Minimization, MinimizationBoot, Unit
from vllm_repro_search.record import markdown

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


C, Q, R = Outcome.CRASH, Outcome.CLEAN, Outcome.BOOT_FAILED
FOUND = reduction(
    (ALL, C),
    ((1, 2, 3), Q),
    ((0, 2, 3), R),
    ((0, 1, 3), C),
    ((0, 1), C),
    ((1,), Q),
    ((0,), Outcome.OTHER_CRASH),
)
NONE_LEFT = ((ALL, C), ((1, 2, 3), C), ((2, 3), C), ((3,), C), ((), C))
CASES = [
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
        reduction(((0,), C), ((), Q), units=UNITS[1:2]),
        0,
        "The crash needs 1 of 1 flag: --a 1. Without it this crash does not occur.",
    ),
    (
        reduction((ALL, Q)),
        1,
        (
            "Surprise: the reported command does not show this crash. The whole command: clean: a |"
            " reason"
        ),
    ),
    (reduction((ALL, R)), 2, "Undecided. The whole command: vLLM does not start: a | reason"),
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
        reduction((ALL, C)),
        2,
        (
            "It crashes with 2 of 2 flags and 1 of 1 variable and 1 of 1 request. The search is not"
            " finished."
        ),
    ),
]


@pytest.mark.parametrize(("found", "status", "text"), CASES, ids=range(len(CASES)))
def test_each_state_has_its_sentence_and_status(
    found: Minimization, status: int, text: str
) -> None:
    assert (found.exit_status, found.readings) == (status, (text,))
    record = found.as_dict()
    assert record["reading"] == text
    assert (record["answer"] is not None) == (status == 0)


def test_the_page_names_what_each_removal_did_and_links_to_its_run() -> None:
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
    assert "vllm serve" not in markdown(reduction((ALL, Q))), "no command is claimed to crash"


def test_a_value_for_the_lab_is_named_beside_the_command() -> None:
    units = (Unit("flag", "--n", "--n 9000", "--n 9"), Unit("flag", "--m", "--m 9000", "--m 9"))
    text = markdown(reduction(((0, 1), C), ((0,), C), units=units))
    assert (
        missing(
            text,
            "vllm serve m \\\n  --n 9000\n```",
            "The lab servers had smaller values: --n 9 for --n 9000.",
        )
        == []
    )


def test_a_boot_is_named_by_what_it_leaves_out_of_what_was_left() -> None:
    assert [FOUND.without(boot.units, FOUND.boots[:number]) for number, boot in enumerate(FOUND.boots)] == [
        "", "chat of 9 tokens", "--a 1", "--b", "C=1", "chat of 9 tokens", "--a 1",
    ]  # fmt: skip


def test_a_boot_that_the_host_spoiled_decides_nothing() -> None:
    spoiled = replace(FOUND, boots=(*reduction((ALL, Outcome.INFRA)).boots, *FOUND.boots))
    assert spoiled.readings == FOUND.readings
