"""TurboQuant's workspace: sizes compared with those that releases print, and the trigger."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_repro.command.parse import parse
from vllm_repro.running.assess import assess
from vllm_repro.running.state import Observed
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.base import ServerFacts
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.trigger.trigger import (
    Amounts,
    AttentionShape,
    SentRequest,
    TriggerFacts,
    TriggerResult,
)
from vllm_repro.trigger.turboquant_workspace import (
    capture_batch,
    continuation_bytes,
    crash_amounts,
    decode_bytes,
    result_from_message,
    workspace_outgrown,
)
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.output import ServedWeights
from vllm_repro_diagnosis.boot_facts import BootFacts, ScheduledChunk
from vllm_repro_diagnosis.evidence import Evidence

SEED = AttentionShape(16, 4, 256, 2048)
TINY = AttentionShape(4, 2, 32)
OUTGROWN = workspace_outgrown()
TQ = find("tq-chunked-prefill")


def facts(
    tokens: int,
    *,
    flags: str = "--max-num-seqs 2 --block-size 128",
    batch: int = 4096,
    **more: Any,
) -> TriggerFacts:
    command = parse(f"vllm serve m {flags}")
    request = SentRequest("long chat", tokens, cached_tokens=more.pop("cached", None))
    return TriggerFacts(
        requests=(request,), batch=batch, chunked=True, command=command, shape=SEED, **more
    )


@pytest.mark.parametrize(
    ("shape", "batch", "locked"),
    [
        (SEED, 2, 1_069_312),  # 0.21.0 to 0.23.0 in the lab: 1.02 MB, the issue's number
        (TINY, 8, 137_472),
        (AttentionShape(24, 4, 256), 4, 3_207_680),  # #43357's 3.06 MB
    ],
)
def test_what_decoding_locks_is_what_releases_locked(
    shape: AttentionShape, batch: int, locked: int
) -> None:
    assert decode_bytes(shape, batch) == locked


@pytest.mark.parametrize(
    ("shape", "context", "block", "needed"),
    [
        (SEED, 4096, 128, 16 << 20),
        (TINY, 256, 32, 65_536),
        (TINY, 257, 32, continuation_bytes(TINY, 288, 32)),
    ],
)
def test_what_a_continuation_asks_is_what_the_issue_says(
    shape: AttentionShape, context: int, block: int, needed: int
) -> None:
    assert continuation_bytes(shape, context, block) == needed


@pytest.mark.parametrize(
    ("sequences", "batch"),
    [(1, 1), (3, 2), (7, 4), (8, 8), (255, 248), (271, 256), (300, 288), (1024, 512)],
)
def test_graphs_are_captured_for_the_largest_usual_batch(sequences: int, batch: int) -> None:
    assert capture_batch(sequences) == batch


NOT_LOCKED = BootFacts(ready=True)
CAPTURED = BootFacts(ready=True, graphs_captured=True)
FIFTEEN = "--max-num-seqs 15 --block-size 128"
DUMP = (ScheduledChunk(4096, 3497),)
MESSAGE = TriggerFacts(captured={"asked": "16.00", "locked": "1.02"})


@pytest.mark.parametrize(
    ("found", "crossed", "brief"),
    [
        (facts(7593, locked=1_069_312), True, "needs 16.00 MB, 1.02 MB locked"),
        # Many sequences hide a prompt of twelve thousand tokens.
        (
            facts(12_000, flags="--max-num-seqs 256 --block-size 128"),
            False,
            "needs 32.00 MB, decoding locks 130.52 MB",
        ),
        # A reservation does not undo the evidence.
        (
            facts(7593, locked=400 << 20, reserved=True),
            True,
            "needs 16.00 MB, 400.00 MB locked",
        ),
        # Without CUDA graphs vLLM locks nothing; the size it would lock still decides.
        (facts(7593, boot=NOT_LOCKED), True, "needs 16.00 MB, nothing locked"),
        (facts(7593, boot=NOT_LOCKED, reserved=True), True, "needs 16.00 MB, nothing locked"),
        # A log without the debug line shows no size.
        (facts(7593, boot=CAPTURED), True, "needs 16.00 MB, decoding locks 1.02 MB"),
        (facts(7593, locked=0), True, "needs 16.00 MB, 0.00 MB locked"),
        # A larger lock of the log decides before the formula; what just fits is not outgrown.
        (facts(7593, locked=16 << 20), False, "needs 16.00 MB, 16.00 MB locked"),
        (facts(7593, locked=(16 << 20) - 1), True, "needs 16.00 MB, 16.00 MB locked"),
        # The message of the crash is evidence enough.
        (MESSAGE, True, "needs 16.00 MB, 1.02 MB locked"),
        # The step that died counts, if the number of sequences is known.
        (
            TriggerFacts(dump=DUMP, shape=SEED, args={"max_num_seqs": 2, "block_size": 128}),
            True,
            "needs 16.00 MB, decoding locks 1.02 MB",
        ),
        (TriggerFacts(dump=DUMP, shape=SEED), False, ""),
    ],
)
def test_the_brief_of_the_trigger(found: TriggerFacts, crossed: bool, brief: str) -> None:
    assert (OUTGROWN.find(found).crossed, OUTGROWN.find(found).brief) == (crossed, brief)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (
            replace(facts(7593), shape=None),
            "the server has a model of another shape, so its lock cannot be computed",
        ),
        (
            facts(7593, flags=""),
            "--max-num-seqs is not known, so the lock cannot be computed",
        ),
    ],
)
def test_no_lock_is_computed_without_its_sizes(found: TriggerFacts, why: str) -> None:
    assert OUTGROWN.find(found) == TriggerResult(False, (why,))


@pytest.mark.parametrize(
    ("found", "evidence"),
    [
        (
            facts(7593, locked=1_069_312),
            (
                "^16.00 MB needed for 4096 cached tokens; decoding locks 1.02 MB;"
                " the log reports 1.02 MB locked$"
            ),
        ),
        (facts(7593, boot=CAPTURED), "; the log reports no lock$"),
        (facts(7593, locked=0), "; the workspace was empty when it was locked$"),
        (
            facts(7593, locked=400 << 20, reserved=True),
            "; this release reserves room at boot, and locks 400.00 MB(;|$)",
        ),
        # A lock is claimed only if there is one.
        (
            facts(7593, boot=NOT_LOCKED),
            "^(?!.*decoding locks).*; nothing is locked without CUDA graphs(;|$)",
        ),
        (
            facts(7593, boot=NOT_LOCKED, reserved=True),
            "^(?!.*(decoding locks|nothing is locked without CUDA graphs))",
        ),
    ],
)
def test_the_evidence_of_the_lock(found: TriggerFacts, evidence: str) -> None:
    assert re.search(evidence, "; ".join(OUTGROWN.find(found).evidence))


@pytest.mark.parametrize(
    ("more", "bars"),
    [
        ({"locked": 1_069_312}, {"locked": 1.02}),
        ({"locked": 0}, {"locked": 0.0}),
        ({}, {"decoding alone locks": 1.02}),
        ({"boot": BootFacts(ready=True)}, {"decoding would lock with CUDA graphs": 1.02}),
        ({"reserved": True, "locked": 400 << 20}, {"decoding alone locks": 1.02, "locked": 400.0}),
    ],
)
def test_the_amounts_are_those_of_the_evidence(
    more: dict[str, Any], bars: dict[str, float]
) -> None:
    (amounts,) = OUTGROWN.find(facts(7593, **more)).amounts
    assert (amounts.unit, dict(amounts.bars)) == (
        "MB",
        {"needed for 4096 cached tokens": 16.0, **bars},
    )


def test_a_message_without_sizes_has_no_amounts() -> None:
    assert crash_amounts({}) == crash_amounts({"asked": "many", "locked": "1"}) == ()


@pytest.mark.parametrize(("sequences", "more"), [(15, {"locked": 1, "reserved": True}), (8, {})])
def test_a_lock_covers_the_captured_batch(sequences: int, more: dict[str, Any]) -> None:
    """A reservation covers all sequences."""
    text, *_ = OUTGROWN.find(facts(7593, flags=FIFTEEN, **more)).evidence
    assert text.endswith(f"decoding locks {decode_bytes(SEED, sequences) / 2**20:.2f} MB")


def test_a_message_without_both_sizes_is_none() -> None:
    assert result_from_message(TriggerFacts(captured={"asked": "16.00"})) is None
    result = result_from_message(TriggerFacts(captured={"asked": "16.00", "locked": "1.02"}))
    assert result == TriggerResult(
        True,
        ("the crash message: 16.00 MB needed, 1.02 MB locked",),
        "needs 16.00 MB, 1.02 MB locked",
        (Amounts("MB", (("needed", 16.0), ("locked", 1.02))),),
    )
    assert str(workspace_outgrown()) == "workspace_outgrown()"


def log_of(folder: Path, args: dict[str, object]) -> Path:
    log = folder / "log"
    log.write_text(
        "INFO 11-21 20:22:35 [cuda.py:1] Using TURBOQUANT attention backend out of potential"
        " backends: ['TURBOQUANT'].\nINFO 11-21 20:22:35 [scheduler.py:1] Chunked prefill is"
        " enabled with max_num_batched_tokens=4096.\nINFO 11-21 20:22:35 [api_utils.py:1]"
        f" non-default args: {args}\n",
        encoding="utf-8",
    )
    return log


def lived(kind: ServerKind, evidence: Evidence, cached: int | None = 0) -> Observed:
    """Return a server that answered the reported prompt and the canary."""
    return Observed(
        ServerFacts(kind=kind, evidence=evidence, argv=()),
        ready=True,
        requests=[SentRequest("long", 7593, cached_tokens=cached)],
        canary_ok=True,
    )


@pytest.mark.parametrize(
    ("served", "known"),
    [
        ("/models/qwen3.5-9b/", True),
        ("/home/yk/AI/Models/models/qwen3.5-9b-nvfp4-ptq", True),  # the reported one
        ("Qwen/Qwen3-0.6B", False),
    ],
)
def test_the_sizes_of_another_model_are_not_taken_for_its_own(
    tmp_path: Path, served: str, known: bool
) -> None:
    """Eight sequences of 16 heads lock 4 MB; 4096 cached tokens need 16 MB, with one KV head 2."""
    log = log_of(tmp_path, {"model": served, "max_num_seqs": 8, "max_num_batched_tokens": 4096})
    conclusion = assess(TQ, TQ.reported(), lived(ServerKind.ATTACH, Evidence.GPU), log)
    assert conclusion.outcome is (Outcome.CLEAN if known else Outcome.UNTRIGGERED)
    assert ("a model of another shape" in conclusion.why) is not known


@pytest.mark.parametrize("made", [True, False])
def test_the_sizes_of_a_tiny_model_are_its_own(tmp_path: Path, made: bool) -> None:
    """They are computed from the model that was made, whatever its folder is called."""
    log = log_of(
        tmp_path, {"model": "/models/tiny", "max_num_seqs": 1, "max_num_batched_tokens": 4096}
    )
    seen = lived(ServerKind.DOCKER, Evidence.GPU, cached=None)
    seen.tiny_model = TQ.tiny_model if made else None
    conclusion = assess(
        TQ, TQ.command_with_dummy(TQ.arms[0]).with_flags("--load-format dummy"), seen, log
    )
    assert conclusion.outcome is (Outcome.CLEAN if made else Outcome.UNTRIGGERED)
    assert conclusion.weights is ServedWeights.DUMMY
    needed = "16.00 MB needed for 4096 cached tokens; decoding locks 0.51 MB"
    assert any(needed in text for text in conclusion.trigger.evidence) is made


def test_a_prompt_is_not_cut_where_the_platform_turned_that_off(tmp_path: Path) -> None:
    """The CPU platform does so for MLA models, whatever the command line says."""
    log = tmp_path / "log"
    seen = lived(ServerKind.PROCESS, Evidence.CPU)
    lines = (
        "Using TURBOQUANT attention backend out of potential backends: ['TURBOQUANT'].\nChunked"
        " prefill is enabled with max_num_batched_tokens=4096.\nInitializing a V1 LLM engine"
        " (v0.24.0) with config: enable_prefix_caching=True, enable_chunked_prefill={}, x=1\n"
    )
    for on, outcome in ((True, Outcome.CLEAN), (False, Outcome.UNTRIGGERED)):
        log.write_text(lines.format(on), encoding="utf-8")
        assert assess(TQ, TQ.reported(), seen, log).outcome is outcome
