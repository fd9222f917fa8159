"""TurboQuant's share of vLLM's workspace, to the byte, and the condition that it was outgrown. Pure.

Graph capture runs decode batches and locks the workspace at what they took. A continued prefill unpacks all that is cached of its prompt
into two buffers there, so it outgrows the lock only where the context is long enough for that: with many sequences to decode for, a
prompt of ten thousand tokens may fit, and its survival proves nothing. Sizes are those of `turboquant_attn.py` in vLLM 0.21.0 to
0.23.0; later releases reserve the room for a whole context before they lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_repro.trigger.trigger import AttentionShape, Condition, Continuation, Finding, TriggerFacts, continuations

__all__ = ["capture_batch", "continuation_bytes", "decode_bytes", "workspace_outgrown"]

DECODE_THRESHOLD = 128
"""A continuation of at most so many tokens is decoded, token by token, and needs no buffers."""

_SPLITS = 32
_ALIGNED = 256
_MB = 1024 * 1024


def _aligned(count: int, to: int = _ALIGNED) -> int:
    return -(-count // to) * to


def decode_bytes(shape: AttentionShape, batch: int) -> int:
    """Bytes that a decode batch takes: partial outputs of 32 splits, outputs, log-sum-exps."""
    partial = batch * shape.heads * _SPLITS * (shape.head_dim + 1) * 4
    return _aligned(partial) + _aligned(batch * shape.heads * shape.head_dim * 2) + _aligned(batch * shape.heads * 4)


def continuation_bytes(shape: AttentionShape, context: int, block_size: int) -> int:
    """Bytes that a continuation takes: K and V of `context` cached tokens in half precision, in whole blocks."""
    return 2 * _aligned(shape.kv_heads * _aligned(context, block_size) * shape.head_dim * 2)


def capture_batch(max_num_seqs: int) -> int:
    """The largest decode batch that graphs are captured for by default: 1, 2, 4, and then steps of 8 and of 16."""
    if max_num_seqs < 8:
        return max(size for size in (1, 2, 4) if size <= max_num_seqs)
    step = 8 if max_num_seqs < 256 else 16
    return min(max_num_seqs // step * step, 512)


@dataclass(frozen=True)
class _Outgrown(Condition):
    def find(self, facts: TriggerFacts) -> Finding:
        said = facts.captured
        if "asked" in said and "locked" in said:
            text = f"the death's own message: {said['asked']} MB asked for, {said['locked']} MB locked"
            return Finding(True, (text,), f"asks {said['asked']} > {said['locked']} MB")
        long = [part for part in continuations(facts) if part.tokens > DECODE_THRESHOLD]
        if not long:
            return Finding(False, (f"no continuation of more than {DECODE_THRESHOLD} tokens asked for workspace",))
        sequences = facts.number("--max-num-seqs")
        if facts.shape is None:
            return Finding(False, ("the server has a model of another shape, so what it locks cannot be computed",))
        if sequences is None:
            return Finding(False, ("--max-num-seqs is not known, so what decoding locks cannot be computed",))
        # What is reserved for decoding is for all sequences, graphs or not.
        needed = decode_bytes(facts.shape, sequences if facts.reserved else capture_batch(sequences))
        return _judged(facts, facts.shape, max(long, key=lambda part: part.context), needed)

    def __str__(self) -> str:
        return "workspace_outgrown()"


def _judged(facts: TriggerFacts, shape: AttentionShape, part: Continuation, needed: int) -> Finding:
    asked = continuation_bytes(shape, part.context, facts.block_size)
    # What decoding took is what an unfixed release locks. A log that tells of more, without a reservation, is believed.
    locked = needed if facts.reserved or not facts.locked else facts.locked
    evidence = [f"{_mb(asked)} MB for {part.context} cached tokens, against {_mb(locked)} MB that decoding locks"]
    if facts.reserved:
        locks = "nothing is locked" if facts.locked is None else f"{_mb(facts.locked)} MB are locked"
        evidence.append(f"this release reserves room at boot: {locks}")
    elif facts.locked:
        evidence.append(f"the log says that {_mb(facts.locked)} MB were locked")
    elif facts.locked is None:
        evidence.append("the log tells of no lock")
    else:
        evidence.append("nothing was in the workspace when it was locked")
    sign = ">" if asked > locked else "fits"
    return Finding(asked > locked, tuple(evidence), f"asks {_mb(asked)} {sign} {_mb(locked)} MB")


def _mb(count: int) -> str:
    return f"{count / _MB:.2f}"


def workspace_outgrown() -> Condition:
    """A continued prefill asked TurboQuant for more workspace than decoding locks, computed from flags, model and prompt."""
    return _Outgrown()
