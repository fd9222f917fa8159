"""Condition: a continued prefill needs more TurboQuant workspace than vLLM locked, computed to the byte.

Graph capture runs decode batches and locks the workspace at their size. A continued prefill unpacks the cached part of its prompt into
two buffers there, so it needs more only if its context is long enough. With many sequences a prompt of ten thousand tokens may fit, and
its survival is no evidence. Sizes follow `turboquant_attn.py` of vLLM 0.21.0 to 0.23.0; later releases reserve room for a whole context.
"""

from __future__ import annotations

from vllm_repro.trigger.trigger import (
    AttentionShape,
    Condition,
    Continuation,
    Rule,
    TriggerFacts,
    TriggerResult,
    continuations,
)

__all__ = ["capture_batch", "continuation_bytes", "decode_bytes", "workspace_outgrown"]

DECODE_THRESHOLD = 128
"""Longest continuation that is decoded token by token, without the two buffers."""

_SPLITS = 32
_ALIGNED = 256
_MB = 1024 * 1024


def _aligned(count: int, to: int = _ALIGNED) -> int:
    return -(-count // to) * to


def decode_bytes(shape: AttentionShape, batch: int) -> int:
    """Return the bytes of a decode batch: partial outputs of 32 splits, outputs, log-sum-exps."""
    partial = batch * shape.heads * _SPLITS * (shape.head_dim + 1) * 4
    return _aligned(partial) + _aligned(batch * shape.heads * shape.head_dim * 2) + _aligned(batch * shape.heads * 4)


def continuation_bytes(shape: AttentionShape, context: int, block_size: int) -> int:
    """Return the bytes of a continuation: K and V of `context` cached tokens in half precision, in whole blocks."""
    return 2 * _aligned(shape.kv_heads * _aligned(context, block_size) * shape.head_dim * 2)


def capture_batch(max_num_seqs: int) -> int:
    """Return the largest decode batch with a captured graph by default: 1, 2, 4, then steps of 8 and of 16."""
    if max_num_seqs < 8:
        return max(size for size in (1, 2, 4) if size <= max_num_seqs)
    step = 8 if max_num_seqs < 256 else 16
    return min(max_num_seqs // step * step, 512)


def _workspace_outgrown(facts: TriggerFacts) -> TriggerResult:
    said = facts.captured
    if "asked" in said and "locked" in said:
        text = f"the crash message: {said['asked']} MB needed, {said['locked']} MB locked"
        return TriggerResult(True, (text,), f"needs {said['asked']} MB, {said['locked']} MB locked")
    long = [part for part in continuations(facts) if part.tokens > DECODE_THRESHOLD]
    if not long:
        return TriggerResult(False, (f"no continuation of more than {DECODE_THRESHOLD} tokens needed workspace",))
    sequences = facts.number("--max-num-seqs")
    if facts.shape is None:
        return TriggerResult(False, ("the server has a model of another shape, so its lock cannot be computed",))
    if sequences is None:
        return TriggerResult(False, ("--max-num-seqs is not known, so the lock cannot be computed",))
    # A reservation covers all sequences, with graphs or without.
    needed = decode_bytes(facts.shape, sequences if facts.reserved else capture_batch(sequences))
    return _judged(facts, facts.shape, max(long, key=lambda part: part.context), needed)


def _judged(facts: TriggerFacts, shape: AttentionShape, part: Continuation, needed: int) -> TriggerResult:
    asked = continuation_bytes(shape, part.context, facts.block_size)
    # Without a reservation, a larger lock in the log is believed rather than the formula.
    locked = needed if facts.reserved or not facts.locked else facts.locked
    evidence = [f"{_mb(asked)} MB needed for {part.context} cached tokens; decoding locks {_mb(locked)} MB"]
    if facts.reserved:
        locks = "nothing is locked" if facts.locked is None else f"{_mb(facts.locked)} MB are locked"
        evidence.append(f"this release reserves room at boot: {locks}")
    elif facts.locked:
        evidence.append(f"the log reports {_mb(facts.locked)} MB locked")
    elif facts.locked is None:
        evidence.append("the log reports no lock")
    else:
        evidence.append("the workspace was empty when it was locked")
    return TriggerResult(asked > locked, tuple(evidence), f"needs {_mb(asked)} MB, {_mb(locked)} MB locked")


def _mb(count: int) -> str:
    return f"{count / _MB:.2f}"


def workspace_outgrown() -> Condition:
    """Require a continued prefill that needs more TurboQuant workspace than decoding locks, by flags, model and prompt."""
    return Rule("workspace_outgrown()", _workspace_outgrown)
