"""TurboQuant's workspace: sizes against those that real releases printed, and when a prompt proves something."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.command.parse import parse
from vllm_repro.diagnosis.boot_facts import ScheduledChunk
from vllm_repro.evidence import Evidence
from vllm_repro.running.assess import assess
from vllm_repro.running.state import Observed
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.base import ServerFacts
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.trigger.trigger import Asked, AttentionShape, TriggerFacts
from vllm_repro.trigger.turboquant_workspace import capture_batch, continuation_bytes, decode_bytes, workspace_outgrown
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.output import ServedWeights

SEED = AttentionShape(16, 4, 256, 2048)
TINY = AttentionShape(4, 2, 32)
OUTGROWN = workspace_outgrown()
TQ = find("tq-chunked-prefill")


def facts(
    tokens: int, *, flags: str = "--max-num-seqs 2 --block-size 128", batch: int = 4096, **more: object
) -> TriggerFacts:
    command = parse(f"vllm serve m {flags}")
    asked = (Asked("long chat", tokens, cached_tokens=more.pop("cached", None)),)  # type: ignore[arg-type]  # an int or None
    return TriggerFacts(asked, batch, True, command=command, shape=SEED, **more)  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize(
    ("shape", "batch", "locked"),
    [
        (SEED, 2, 1_069_312),  # 0.21.0 to 0.23.0 in the lab: 1.02 MB, the issue's number
        (TINY, 2, 34_560),
        (TINY, 8, 137_472),
        (AttentionShape(1, 1, 32), 2, 8_960),
        (AttentionShape(24, 4, 256), 4, 3_207_680),  # #43357's 3.06 MB
    ],
)
def test_what_decoding_locks_is_what_releases_locked(shape: AttentionShape, batch: int, locked: int) -> None:
    assert decode_bytes(shape, batch) == locked


def test_what_a_continuation_asks_is_what_the_issue_says() -> None:
    assert continuation_bytes(SEED, 4096, 128) == 16 * 1024 * 1024
    assert continuation_bytes(TINY, 256, 32) == 65_536
    assert continuation_bytes(TINY, 257, 32) == continuation_bytes(TINY, 288, 32)


@pytest.mark.parametrize(
    ("sequences", "batch"),
    [(1, 1), (2, 2), (3, 2), (7, 4), (8, 8), (15, 8), (255, 248), (256, 256), (271, 256), (300, 288), (1024, 512)],
)
def test_graphs_are_captured_for_the_largest_usual_batch(sequences: int, batch: int) -> None:
    assert capture_batch(sequences) == batch


@given(st.integers(1, 1024))
def test_no_batch_is_larger_than_what_may_run(sequences: int) -> None:
    assert 1 <= capture_batch(sequences) <= sequences


def test_the_reported_prompt_outgrows_it() -> None:
    found = OUTGROWN.find(facts(7593, locked=1_069_312))
    assert found.crossed
    assert found.evidence == (
        "16.00 MB needed for 4096 cached tokens; decoding locks 1.02 MB",
        "the log reports 1.02 MB locked",
    )
    assert found.brief == "needs 16.00 MB, 1.02 MB locked"


def test_a_short_remainder_asks_for_nothing() -> None:
    assert not OUTGROWN.find(facts(4096 + 128)).crossed
    assert OUTGROWN.find(facts(4096 + 129)).crossed


def test_many_sequences_hide_a_prompt_of_twelve_thousand_tokens() -> None:
    found = OUTGROWN.find(facts(12_000, flags="--max-num-seqs 256 --block-size 128"))
    assert not found.crossed
    assert found.brief == "needs 32.00 MB, 130.52 MB locked"


@given(st.integers(1, 200), st.integers(129, 4096))
def test_the_bound_lies_where_the_two_sizes_meet(blocks: int, tokens: int) -> None:
    context = blocks * 128
    found = OUTGROWN.find(facts(context + tokens, cached=context, flags="--max-num-seqs 8 --block-size 128"))
    assert found.crossed is (continuation_bytes(SEED, context, 128) > decode_bytes(SEED, 8))


def test_a_reservation_does_not_undo_the_proof_and_is_named() -> None:
    found = OUTGROWN.find(facts(7593, locked=400 * 1024 * 1024, reserved=True))
    assert found.crossed
    assert "this release reserves room at boot: 400.00 MB are locked" in found.evidence


def test_what_is_reserved_is_for_all_sequences_and_not_for_a_captured_batch() -> None:
    flags = "--max-num-seqs 15 --block-size 128"
    assert (
        OUTGROWN.find(facts(7593, flags=flags, locked=1, reserved=True))
        .evidence[0]
        .endswith(f"decoding locks {decode_bytes(SEED, 15) / 2**20:.2f} MB")
    )
    assert (
        OUTGROWN.find(facts(7593, flags=flags))
        .evidence[0]
        .endswith(f"decoding locks {decode_bytes(SEED, 8) / 2**20:.2f} MB")
    )


def test_a_log_that_tells_of_a_larger_lock_is_believed_before_the_formula() -> None:
    assert not OUTGROWN.find(facts(7593, locked=20 * 1024 * 1024)).crossed
    assert not OUTGROWN.find(facts(7593, locked=16 * 1024 * 1024)).crossed, "what just fits is not outgrown"
    assert OUTGROWN.find(facts(7593, locked=16 * 1024 * 1024 - 1)).crossed


def test_without_graphs_nothing_is_locked_and_the_prompt_counts_all_the_same() -> None:
    found = OUTGROWN.find(facts(7593))
    assert found.crossed
    assert "the log reports no lock" in found.evidence


def test_the_message_of_the_death_has_the_last_word() -> None:
    said = {"asked": "16.00", "locked": "1.02"}
    found = OUTGROWN.find(TriggerFacts(captured=said))
    assert (found.crossed, found.brief) == (True, "needs 16.00 MB, 1.02 MB locked")


def test_the_step_that_died_counts() -> None:
    dump = (ScheduledChunk(4096, 3497),)
    assert OUTGROWN.find(TriggerFacts(dump=dump, shape=SEED, args={"max_num_seqs": 2, "block_size": 128})).crossed
    assert not OUTGROWN.find(TriggerFacts(dump=dump, shape=SEED)).crossed  # nobody knows how many sequences


@pytest.mark.parametrize(
    ("served", "known"),
    [
        ("Qwen/Qwen3.5-9B", True),
        ("/models/qwen3.5-9b/", True),
        ("/home/yk/AI/Models/models/qwen3.5-9b-nvfp4-ptq", True),  # the reported one
        ("Qwen/Qwen3-0.6B", False),
    ],
)
@pytest.mark.parametrize("kind", [ServerKind.ATTACH, ServerKind.DOCKER])
def test_the_sizes_of_another_model_are_not_taken_for_its_own(
    tmp_path: Path, kind: ServerKind, served: str, known: bool
) -> None:
    """Eight sequences of 16 heads lock 4 MB, and 4096 cached tokens ask for 16: of a model with one KV head they ask for 2."""
    log = tmp_path / "log"
    args = {"model": served, "max_num_seqs": 8, "max_num_batched_tokens": 4096}
    log.write_text(
        "INFO 11-21 20:22:35 [cuda.py:1] Using TURBOQUANT attention backend out of potential backends: ['TURBOQUANT'].\n"
        "INFO 11-21 20:22:35 [scheduler.py:1] Chunked prefill is enabled with max_num_batched_tokens=4096.\n"
        f"INFO 11-21 20:22:35 [api_utils.py:1] non-default args: {args}\n",
        encoding="utf-8",
    )
    asked = [Asked("long", 7593, cached_tokens=0)]
    seen = Observed(ServerFacts(kind=kind, evidence=Evidence.GPU, argv=()), ready=True, asked=asked, canary_ok=True)
    conclusion = assess(TQ, TQ.reported(), seen, log)
    assert conclusion.outcome is (Outcome.CLEAN if known else Outcome.UNTRIGGERED)
    assert ("a model of another shape" in conclusion.why) is not known


@pytest.mark.parametrize("made", [True, False])
def test_the_sizes_of_a_stand_in_are_its_own(tmp_path: Path, made: bool) -> None:
    """What it asks for is computed from the model that was made, whatever its folder is called, and its weights are random."""
    log = tmp_path / "log"
    args = {"model": "/models/tiny", "max_num_seqs": 1, "max_num_batched_tokens": 4096}
    log.write_text(
        "INFO 11-21 20:22:35 [cuda.py:1] Using TURBOQUANT attention backend out of potential backends: ['TURBOQUANT'].\n"
        "INFO 11-21 20:22:35 [scheduler.py:1] Chunked prefill is enabled with max_num_batched_tokens=4096.\n"
        f"INFO 11-21 20:22:35 [api_utils.py:1] non-default args: {args}\n",
        encoding="utf-8",
    )
    seen = Observed(
        ServerFacts(kind=ServerKind.DOCKER, evidence=Evidence.GPU, argv=()),
        ready=True,
        asked=[Asked("long", 7593)],
        canary_ok=True,
    )
    seen.tiny_model = TQ.tiny_model if made else None
    conclusion = assess(TQ, TQ.command_with_dummy(TQ.arms[0]).with_flags("--load-format dummy"), seen, log)
    assert conclusion.outcome is (Outcome.CLEAN if made else Outcome.UNTRIGGERED)
    assert conclusion.weights is ServedWeights.DUMMY
    assert (
        any(
            "16.00 MB needed for 4096 cached tokens; decoding locks 0.51 MB" in text
            for text in conclusion.trigger.evidence
        )
        is made
    )


def test_a_prompt_is_not_cut_where_the_platform_turned_that_off(tmp_path: Path) -> None:
    """The CPU platform does so for MLA models, whatever the command line says."""
    log = tmp_path / "log"
    asked = [Asked("long", 7593, cached_tokens=0)]
    seen = Observed(
        ServerFacts(kind=ServerKind.PROCESS, evidence=Evidence.CPU, argv=()), ready=True, asked=asked, canary_ok=True
    )
    lines = (
        "Using TURBOQUANT attention backend out of potential backends: ['TURBOQUANT'].\n"
        "Chunked prefill is enabled with max_num_batched_tokens=4096.\n"
        "Initializing a V1 LLM engine (v0.24.0) with config: enable_prefix_caching=True, enable_chunked_prefill={}, x=1\n"
    )
    for on, outcome in ((True, Outcome.CLEAN), (False, Outcome.UNTRIGGERED)):
        log.write_text(lines.format(on), encoding="utf-8")
        assert assess(TQ, TQ.reported(), seen, log).outcome is outcome
