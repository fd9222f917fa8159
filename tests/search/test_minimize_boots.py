"""What may be removed from the arms of real scenarios, and the arms without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_repro.errors import UsageError
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.scenario.workload import (
    Conversation,
    Request,
    Together,
    chat,
    conversation,
    flag,
    pause,
    together,
)
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions
from vllm_repro_search.minimize.boots import Reducible, reducible

MTP = find("tq-mtp-cudagraphs")
WORKLOAD = (
    chat(name="a", prompt=flag("--max-num-batched-tokens") + 1),
    pause(1),
    together(chat(name="b", prompt=10), chat(name="c", prompt=10), chat(name="d", prompt=10)),
    conversation(first=10, adds=[10, 10], name="e"),
)


def parts_of(
    scenario: Scenario,
    kind: ServerKind = ServerKind.LAB,
    arm: str = "reported",
    weights: str | None = None,
) -> Reducible:
    chosen = scenario.arm(arm)
    assert chosen is not None
    return reducible(scenario, chosen, kind, ServerOptions(weights=weights))


def names(parts: Reducible, *, kind: str = "flag") -> list[str]:
    return [unit.text.split()[0] for unit in parts.units if unit.kind == kind]


def with_workload() -> tuple[Scenario, Reducible]:
    scenario = replace(MTP, workload=WORKLOAD)
    return scenario, parts_of(scenario)


def test_flags_that_the_lab_needs_stay_and_those_that_it_sets_or_removes_are_not_tried() -> None:
    parts = parts_of(MTP)
    assert [unit.text for unit in parts.units] == [
        "short chat of 100 tokens",
        "longer chat of 1000 tokens",
        "--tensor-parallel-size 1",
        "--max-model-len 125000",
        "--max-num-batched-tokens 4128",
        "--max-num-seqs 1",
        "--kv-cache-dtype turboquant_k8v4",
        "--enable-chunked-prefill",
        "--enable-prefix-caching",
        "--disable-custom-all-reduce",
        "--trust-remote-code",
        """--speculative-config '{"method":"mtp","num_speculative_tokens":3}'""",
    ]
    assert parts.untried == ("--quantization", "--dtype", "--gpu-memory-utilization")
    bare = parts.with_units(())
    lab = MTP.command_in_lab(bare)
    assert [f.name for f in lab.flags] == [
        "--model",
        "--dtype",
        "--block-size",
        "--compilation-config.mode",
    ]
    assert [f.name for f in MTP.command_of(bare).flags] == [
        "--model",
        "--quantization",
        "--dtype",
        "--gpu-memory-utilization",
    ]
    assert bare.workload == ()


def test_a_dummy_model_keeps_its_own_edits_and_other_servers_try_every_flag() -> None:
    dummy = parts_of(MTP, ServerKind.PROCESS, weights="dummy")
    assert dummy.untried == ("--quantization",)
    assert "--dtype" in names(dummy)
    whole = parts_of(MTP, ServerKind.REHEARSAL)
    assert whole.untried == ()
    assert {"--quantization", "--gpu-memory-utilization"} <= set(names(whole))


def test_all_units_together_are_the_arm_itself() -> None:
    parts = parts_of(MTP)
    arm = parts.with_units(range(len(parts.units)))
    assert (MTP.command_in_lab(arm), arm.workload) == (
        MTP.command_in_lab(MTP.arms[0]),
        tuple(MTP.workload),
    )
    assert arm.edits == ()


def test_a_value_for_the_lab_is_not_the_one_to_paste() -> None:
    parts = parts_of(MTP, arm="no-chunked-prefill")
    values = {unit.name: (unit.text, unit.booted) for unit in parts.units if unit.kind == "flag"}
    assert values["--max-model-len"] == ("--max-model-len 125000", "--max-model-len 4128")
    assert values["--max-num-seqs"] == ("--max-num-seqs 1", "")
    assert (
        MTP.command_in_lab(parts.with_units(range(len(parts.units)))).get("--max-model-len")
        == "4128"
    )
    own = parts_of(MTP, ServerKind.DOCKER, arm="no-chunked-prefill")
    assert {unit.booted for unit in own.units} == {""}


def test_an_edit_of_the_arm_is_a_unit_too() -> None:
    parts = parts_of(MTP, arm="no-chunked-prefill")
    assert {"--no-enable-chunked-prefill", "--max-model-len"} <= set(names(parts))
    place = [unit.text for unit in parts.units].index("--no-enable-chunked-prefill")
    kept = [number for number in range(len(parts.units)) if number != place]
    arm = parts.with_units(kept)
    assert not MTP.command_in_lab(arm).has("--no-enable-chunked-prefill")
    assert f"{arm.edits[-1]}" == "without --no-enable-chunked-prefill"


def test_variables_are_units_unless_they_are_secret_or_the_server_does_not_get_them() -> None:
    scenario = replace(
        MTP,
        command=(
            "VLLM_USE_X=1 HF_TOKEN=hf_x docker run -e VLLM_Y=2 vllm/vllm-openai:v0.20.2 --model a/b"
            " -tp 1"
        ),
    )
    docker = parts_of(scenario, ServerKind.DOCKER)
    assert names(docker, kind="variable") == ["VLLM_Y=2", "VLLM_USE_X=1"]
    assert docker.untried == ("HF_TOKEN",)
    bare = scenario.command_of(docker.with_units(()))
    assert bare.container is not None
    assert (bare.container.env, [name for name, _ in bare.env]) == ((), ["HF_TOKEN"])
    process = parts_of(scenario, ServerKind.PROCESS)
    assert (names(process, kind="variable"), process.untried) == (
        ["VLLM_USE_X=1"],
        ("VLLM_Y", "HF_TOKEN"),
    )


def test_requests_go_one_by_one_and_keep_the_size_that_a_removed_flag_gave_them() -> None:
    scenario, parts = with_workload()
    assert [unit.kind for unit in parts.units].count("request") == 7
    assert [unit.kind for unit in parts.units].count("pause") == 1
    some = parts.with_units((0, 2, 4, 6, 7))
    assert some.workload is not None
    first, two, talk = some.workload
    assert isinstance(first, Request)
    assert first.prompt == 4129
    assert not scenario.command_in_lab(some).has("--max-num-batched-tokens")
    assert isinstance(two, Together)
    assert [request.name for request in two.requests] == ["b", "d"]
    assert isinstance(talk, Conversation)
    assert [turn.name for turn in talk.turns] == ["e 2", "e 3"]
    alone = parts.with_units((3, 5)).workload
    assert alone is not None
    assert isinstance(alone[0], Request)
    assert isinstance(alone[1], Conversation), "the messages of a conversation are made differently"


@pytest.mark.parametrize(
    ("kept", "sent", "unsent"),
    [
        (range(9), 0, (0, 1, 2, 3, 4, 5, 6, 7)),
        (range(9), 1, (2, 3, 4, 5, 6, 7)),
        (range(9), 2, (3, 4, 5, 6, 7)),
        (range(9), 4, (5, 6, 7)),
        (range(9), 5, (6, 7)),
        (range(9), 7, ()),
        ((1, 2, 8), 1, ()),
        ((1, 2, 8), 0, (2,)),  # it may have needed the pause
        ((8,), 0, ()),
    ],
)
def test_what_was_not_sent_is_not_needed(
    kept: range | tuple[int, ...], sent: int, unsent: tuple[int, ...]
) -> None:
    assert with_workload()[1].unsent(tuple(kept), sent) == unsent


@pytest.mark.parametrize(
    ("name", "arm"), [("tq-mtp-cudagraphs", "eager"), ("tq-mtp-wrong-tokens", "reported")]
)
def test_an_arm_that_does_not_crash_is_refused(name: str, arm: str) -> None:
    with pytest.raises(UsageError, match="is not declared to crash with a signature") as refused:
        parts_of(find(name), arm=arm)
    assert refused.value.hint == f"vllm-repro run {name} --arm {arm} shows what this arm does"
