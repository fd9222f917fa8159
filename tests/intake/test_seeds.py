"""Drafts of the four reported issues, field by field against the scenarios that were written by hand.

The texts in `tests/data/issues` have the forms in which issues are read: a scraped page, GitHub's
form, a mail, Markdown.
"""

from __future__ import annotations

import pytest

from tests.intake.texts import ISSUES, checked, drafted
from vllm_repro.resources import scenario_folder
from vllm_repro.scenario.reader import load_file
from vllm_repro.scenario.scenario import Scenario
from vllm_repro_diagnosis.diagnosis import Phase, diagnose
from vllm_repro_diagnosis.signature import How, compare

SEEDS = {
    "41726.txt": "tq_chunked_prefill",
    "40807.md": "tq_mtp_cudagraphs",
    "41700.txt": "dsv4_tp2",
    "42085.md": "sco_hybrid",
}
SILENT = {"dsv4_tp2": ("get_simultaneous", "_ensure_workspace_size")}
"""Functions of a signature that the issue does not show: its traceback is the message alone."""


@pytest.fixture(params=SEEDS)
def pair(request: pytest.FixtureRequest) -> tuple[str, Scenario, Scenario]:
    """Return the text, its draft and the scenario written by hand."""
    text = (ISSUES / request.param).read_text(encoding="utf-8")
    by_hand = [load_file(path) for path in sorted(scenario_folder().glob("*.py"))]
    name = SEEDS[request.param]
    hand = next(one for one in by_hand if one.id == name.replace("_", "-"))
    return text, checked(drafted(text, models=[one.model for one in by_hand])), hand


def test_flags_and_environment_are_those_of_the_scenario(
    pair: tuple[str, Scenario, Scenario],
) -> None:
    _, made, hand = pair
    ours, theirs = made.reported(), hand.reported()
    assert ours.flags == theirs.flags
    assert (ours.env, ours.container) == (theirs.env, theirs.container)
    assert ours.model == (theirs.model or "").replace("/home/yk/", "/home/[user]/")


def test_the_signature_is_that_of_the_scenario(pair: tuple[str, Scenario, Scenario]) -> None:
    text, made, hand = pair
    ours, theirs = made.signature, hand.signature
    assert ours is not None
    assert theirs is not None
    assert (ours.exception, ours.source) == (theirs.exception, theirs.source)
    assert {Phase.BOOT if one.phase is Phase.WARMUP else one.phase for one in (ours, theirs)} == {
        theirs.phase
    }
    wanted = [
        name for name in theirs.frames if name not in SILENT.get(hand.id.replace("-", "_"), ())
    ]
    assert wanted[-len(ours.frames) :] == [name for name in ours.frames if name in wanted]
    assert compare(ours, diagnose(text)).how is How.MATCH
    assert compare(theirs, diagnose(text)).how is How.MATCH


def test_the_other_fields(pair: tuple[str, Scenario, Scenario]) -> None:
    _, made, hand = pair
    stated = {
        "tq-chunked-prefill": (["request 1 of 7593 tokens"], "0.20.2rc1.dev35+g4845aee6b", 1),
        "tq-mtp-cudagraphs": (["chat/completions of 100 tokens"], "0.19.2rc1.dev21+g893611813", 1),
        "dsv4-tp2": (["request 1 of 1304 tokens"], "0.20.1rc1.dev12+g363ffa145", 2),
        "sco-hybrid": ([f"request {n} of 90000 tokens" for n in (1, 2)], "0.20.2rc1.dev73", 2),
    }
    workload, release, gpus = stated[hand.id]
    assert [str(step) for step in made.workload] == workload
    assert (made.try_with, made.needs.gpus, made.needs.nodes) == (release, gpus, hand.needs.nodes)
    # that text names no number
    assert made.issue == ("vllm-project/vllm#0" if hand.id == "sco-hybrid" else hand.issue)
    arms = {arm.name: arm for arm in made.arms}
    for name, theirs in (
        ("enforce-eager", "eager"),
        ("compilation-config-cudagraph-mode-none", "cudagraph-none"),
    ):
        if name in arms and (same := hand.arm(theirs)):
            assert made.command_of(arms[name]).flags == hand.command_of(same).flags


def test_arms_are_what_the_reporter_tried() -> None:
    def arms(name: str) -> dict[str, str]:
        made = checked(drafted((ISSUES / name).read_text(encoding="utf-8")))
        return {" ".join(map(str, arm.edits)): str(arm.expected) for arm in made.arms[1:]}

    assert arms("41700.txt") == {"with --enforce-eager": "lives"}
    assert arms("40807.md") == {
        "with --performance-mode interactivity --async-scheduling --attention-config.flash_attn_version 2": (
            "dies"
        ),
        "with --compilation-config.cudagraph_mode none": "lives",
    }
