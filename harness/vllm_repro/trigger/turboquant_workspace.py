"""Condition: a continued prefill needs more TurboQuant workspace than vLLM locked.

Graph capture runs decode batches and locks the workspace at their size. A continued prefill unpacks
the cached part of its prompt into two buffers there, so it needs more only if its context is long
enough. With many sequences a prompt of ten thousand tokens may fit; that the engine survives it is
no evidence. Sizes are computed to the byte and follow `turboquant_attn.py` of vLLM 0.21.0 to
0.23.0; later releases reserve room for a whole context.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm_repro.trigger.trigger import (
    Amounts,
    AttentionShape,
    Condition,
    Continuation,
    TriggerFacts,
    TriggerResult,
    continuations,
)

DECODE_THRESHOLD = 128
"""Longest continuation that is decoded token by token, without the two buffers."""

_SPLITS = 32
"""Parts of the KV cache whose outputs decoding computes apart."""


def aligned(count: int, to: int = 256) -> int:
    """Return `count` rounded up to a multiple of `to`."""
    return -(-count // to) * to


def decode_bytes(shape: AttentionShape, batch: int) -> int:
    """Return the workspace bytes of a decode batch: outputs of 32 splits, outputs, log-sum-exps.

    batch: number of sequences.
    """
    return (
        aligned(batch * shape.heads * _SPLITS * (shape.head_dim + 1) * 4)
        + aligned(batch * shape.heads * shape.head_dim * 2)
        + aligned(batch * shape.heads * 4)
    )


def continuation_bytes(shape: AttentionShape, context: int, block_size: int) -> int:
    """Return the workspace bytes that a continued prefill needs for its cached tokens.

    They hold K and V of `context` cached tokens in half precision, in whole blocks of `block_size`
    tokens.
    """
    return 2 * aligned(shape.kv_heads * aligned(context, block_size) * shape.head_dim * 2)


def capture_batch(max_num_seqs: int) -> int:
    """Return the largest decode batch with a captured graph by default, in sequences.

    Captured sizes are 1, 2, 4, then steps of 8 to 256 and of 16 to 512.
    """
    if max_num_seqs < 8:
        return max(size for size in (1, 2, 4) if size <= max_num_seqs)
    step = 8 if max_num_seqs < 256 else 16
    return min(max_num_seqs // step * step, 512)


def _workspace_outgrown(facts: TriggerFacts) -> TriggerResult:
    """Return whether a continued prefill needed more workspace than is locked, with evidence.

    The bytes needed are from the crash message, else computed. Not crossed if they are unknown.
    """
    if (reported := result_from_message(facts)) is not None:
        return reported
    long = [part for part in continuations(facts) if part.tokens > DECODE_THRESHOLD]
    if not long:
        return TriggerResult(
            False, (f"no continuation of more than {DECODE_THRESHOLD} tokens needed workspace",)
        )
    sequences = facts.number("--max-num-seqs")
    if facts.shape is None:
        return TriggerResult(
            False, ("the server has a model of another shape, so its lock cannot be computed",)
        )
    if sequences is None:
        return TriggerResult(
            False, ("--max-num-seqs is not known, so the lock cannot be computed",)
        )
    # A reservation covers all sequences, with graphs or without.
    needed = decode_bytes(facts.shape, sequences if facts.reserved else capture_batch(sequences))
    return _compare_with_lock(facts, facts.shape, max(long, key=lambda part: part.context), needed)


def _compare_with_lock(
    facts: TriggerFacts, shape: AttentionShape, part: Continuation, needed: int
) -> TriggerResult:
    """Return whether the continuation `part` outgrew the lock, with evidence.

    needed: bytes that decoding locks by the formula. A lock in the log replaces them, unless it is
    0 or the release reserves room at boot.
    """
    size = continuation_bytes(shape, part.context, facts.block_size)
    # Without a reservation, the lock in the log takes precedence over the formula.
    fits = needed if facts.reserved or not facts.locked else facts.locked
    computed, boot = f"{megabytes(fits)} MB", facts.boot
    # vLLM logs a lock only if asked to, as the lab does.
    unlocked = facts.locked is None and (
        facts.reserved or (boot.ready and not boot.graphs_captured)
    )
    logged = "nothing" if facts.locked is None else f"{megabytes(facts.locked)} MB"
    locks = (
        f"with CUDA graphs decoding would lock {computed}"
        if unlocked
        else f"decoding locks {computed}"
    )
    evidence = [f"{megabytes(size)} MB needed for {part.context} cached tokens; {locks}"]
    if facts.reserved:
        evidence.append(f"this release reserves room at boot, and locks {logged}")
    elif facts.locked is None:
        evidence.append(
            "nothing is locked without CUDA graphs" if unlocked else "the log reports no lock"
        )
    elif facts.locked:
        evidence.append(f"the log reports {logged} locked")
    else:
        evidence.append("the workspace was empty when it was locked")
    brief = locks if facts.locked is None and not unlocked else f"{logged} locked"
    bars = [(f"needed for {part.context} cached tokens", size)]
    if facts.reserved or facts.locked is None:
        bars.append(
            ("decoding would lock with CUDA graphs" if unlocked else "decoding alone locks", fits)
        )
    if facts.locked is not None:
        bars.append(("locked", facts.locked))
    return TriggerResult(
        size > fits,
        tuple(evidence),
        f"needs {megabytes(size)} MB, {brief}",
        (in_megabytes(*bars),),
    )


def result_from_message(facts: TriggerFacts) -> TriggerResult | None:
    """Return a crossed result with the sizes in the crash message; None if it names none."""
    needed, locked = facts.captured.get("asked"), facts.captured.get("locked")
    if needed is None or locked is None:
        return None
    brief = f"needs {needed} MB, {locked} MB locked"
    text = f"the crash message: {needed} MB needed, {locked} MB locked"
    return TriggerResult(True, (text,), brief, crash_amounts(facts.captured))


def crash_amounts(captured: Mapping[str, str]) -> tuple[Amounts, ...]:
    """Return the needed and locked MB that a crash message names, as one `Amounts`.

    Empty if it names none. captured: values at the placeholders of the crash signature, by name;
    `asked` and `locked` are used.
    """
    try:
        bars = ("needed", float(captured["asked"])), ("locked", float(captured["locked"]))
    except (KeyError, ValueError):
        return ()
    return (Amounts("MB", bars),)


def in_megabytes(*bars: tuple[str, int]) -> Amounts:
    """Return (name, bytes) pairs as amounts in MB of 1024 x 1024 bytes."""
    return Amounts("MB", tuple((name, round(count / 1024 / 1024, 2)) for name, count in bars))


def megabytes(count: int) -> str:
    """Return bytes as MB with two decimals, as vLLM logs them."""
    return f"{count / 1024 / 1024:.2f}"


def workspace_outgrown() -> Condition:
    """Require a continued prefill that needs more TurboQuant workspace than decoding locks.

    Evidence: the crash message, or sizes by flags, model, prompt and the lock in the log.
    """
    return Condition("workspace_outgrown()", _workspace_outgrown)
