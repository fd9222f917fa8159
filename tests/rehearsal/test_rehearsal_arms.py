"""What an arm does follows from the flags that it is given: change them, and its fate is what the arithmetic says of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from vllm_repro.journal.journal import Journal
from vllm_repro.running.trial import Trial, run_trial
from vllm_repro.running.watch import Patience
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Arm
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.rehearsal import RehearsalSite
from vllm_repro.trigger.trigger import AttentionShape, TriggerFacts
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected
from vllm_repro.vocabulary import with_flags

TQ = find("tq-chunked-prefill")
AXES = {
    "--max-num-batched-tokens": (1024, 2500, 4096, 6000),
    "--block-size": (16, 64, 256, 2048),
    "--max-model-len": (16_384, 40_000),
    "--max-num-seqs": (1, 3, 16, 40),
}


def changed(arm: Arm) -> list[Arm]:
    """It with other numbers, twice. A flag for which it has a number of its own keeps that: it is what the arm is."""
    random = Random(arm.name)
    own = {word.split()[0] for edit in arm.edits for word in str(edit).split("with ")[1:]}
    flags = [[f"{name} {random.choice(AXES[name])}" for name in AXES if name not in own] for _ in range(2)]
    return [replace(arm, edits=(*arm.edits, with_flags(*one))) for one in flags]


@pytest.mark.parametrize("arm", [one for arm in TQ.arms for one in changed(arm)], ids=lambda arm: arm.name)
def test_an_arm_does_what_its_numbers_say(arm: Arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WATCHDOG_TIME_S", "0.3")  # how soon a server ends whose engine died under a stream
    scenario = replace(TQ, arms=(arm,), throughput=(), output=None)
    launch, server = RehearsalSite(ServerOptions(vllm="0.23.0"), scenario).server(
        scenario, arm, 1, tmp_path / "log", "run"
    )
    with Journal(tmp_path / "journal.jsonl") as journal, Journal(tmp_path / "requests.jsonl") as requests:
        trial = Trial(
            scenario, arm, 1, launch, server, tmp_path / "log", Patience(), 1, journal, requests, lambda _: None
        )
        outcome = asyncio.run(run_trial(trial)).outcome
    # Of the requests and the flags alone, without a word of the log or of the death.
    facts = TriggerFacts(
        tuple(trial.seen.asked),
        launch.command.number("--max-num-batched-tokens"),
        launch.command.enabled("--enable-chunked-prefill"),
        "TURBOQUANT",
        command=launch.command,
        shape=AttentionShape(TQ.model.heads, TQ.model.kv_heads, TQ.model.head_dim, TQ.model.block_size),
    )
    crossed = TQ.trigger.find(facts).crossed
    dies = crossed and arm.expected is not Expected.LIVES
    assert outcome is (Outcome.CRASH if dies else Outcome.CLEAN if crossed else Outcome.UNTRIGGERED), launch.command
