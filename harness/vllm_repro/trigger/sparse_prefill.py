"""Condition: a prefill of DeepSeek-V4 needs more workspace than vLLM locked, computed to the byte.

In the dummy run before the lock, the sparse indexer requests room by `--max-model-len` alone. A
prefill requests a row for each token of a prompt, and further rows in layers that compress.
Releases reserve that room in the dummy run too. The reported branch did not: a prompt over a
certain length needs more than is locked, and so do several shorter ones in one step. Sizes
follow `flashmla.py` of vLLM 0.32.0, and the branch's own requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from vllm_repro.trigger.trigger import Condition, Continuation, TriggerFacts, TriggerResult
from vllm_repro.trigger.turboquant_workspace import (
    aligned,
    in_megabytes,
    megabytes,
    result_from_message,
)

_HALF, _WORD = 2, 4
"""Bytes of a 16-bit and of a 32-bit value."""
_CHUNK = 4
"""Longest prompts whose rows are gathered at once."""
_QUERIES = 256
"""Tokens whose attention state the branch keeps in float32 at once."""
_INDEXED, _INDEX_RATIO, _INDEX_SIZE, _INDEX_SCRATCH = 40, 4, 128, 1024 * 1024
_TOP_K = 512
_RATIOS = {"sliding": 1, "sparse": 4, "compressed": 128}


class Shapes(StrEnum):
    """Code whose workspace requests are computed: that of releases, or of the reported branch."""

    RELEASE = "release"  # rows for the given prompts, indices for a whole batch
    # rows for four prompts always, indices for the given tokens, and query states
    BRANCH = "branch"


@dataclass(frozen=True)
class Sizes:
    """Flags and model values that decide how much workspace a prefill needs."""

    max_model_len: int
    # `max_num_batched_tokens`.
    batch: int
    # Attention heads of one rank.
    heads: int
    head_dim: int = 512
    # Tokens that a sliding window covers.
    window: int = 128
    # Kinds of the model's layers.
    kinds: tuple[str, ...] = ("sliding", "sparse", "compressed")


def indexer_bytes(max_model_len: int) -> int:
    """Return the workspace bytes that the sparse indexer requests in the dummy run.

    They hold compressed keys and scales of 40 whole contexts, and scratch.
    """
    keys = _INDEXED * (max_model_len // _INDEX_RATIO)
    return aligned(keys * _INDEX_SIZE) + aligned(keys * _WORD) + _INDEX_SCRATCH


def prefill_bytes(
    shapes: Shapes, sizes: Sizes, prompts: Sequence[int], before: Sequence[int] = ()
) -> int:
    """Return the most workspace bytes that a layer requests in one step; 0 without a prefill.

    prompts: new tokens of each prompt; a prompt with one is no prefill. before: tokens of each
    prompt that are computed already, 0 by default.
    """
    contexts = before or (0,) * len(prompts)
    pieces = [
        (tokens, context) for tokens, context in zip(prompts, contexts, strict=True) if tokens > 1
    ]
    together = sum(tokens for tokens, _ in pieces)
    return max(
        (
            _requested_bytes(shapes, sizes, kind, count, rows, together)
            for kind in dict.fromkeys(sizes.kinds)
            for count, rows in _gathered(sizes, kind, pieces)
        ),
        default=0,
    )


def _gathered(
    sizes: Sizes, kind: str, pieces: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield (prompts, rows) for each group of prompts whose KV rows a layer gathers at once.

    prompts: their number. rows: the KV rows reserved for each of them, which are the most
    uncompressed rows that any of them has, plus the most compressed ones. A group ends before the
    prompt with which it would exceed the room for `_CHUNK` prompts of the greatest length. kind: of
    the layer. pieces: (tokens in this step, tokens before it) of each prompt, in order.
    """
    ratio = _RATIOS[kind]
    compresses = ratio > 1
    most = _CHUNK * (-(-sizes.max_model_len // ratio) * compresses + sizes.window + sizes.batch)
    count = seen = packed = 0
    for tokens, context in pieces:
        near, far = (
            tokens + min(context, sizes.window - 1),
            (context + tokens) // ratio * compresses,
        )
        if count and (count + 1) * (max(seen, near) + max(packed, far)) > most:
            yield count, seen + packed
            count = seen = packed = 0
        count, seen, packed = count + 1, max(seen, near), max(packed, far)
    if count:
        yield count, seen + packed


def _requested_bytes(
    shapes: Shapes, sizes: Sizes, kind: str, count: int, rows: int, tokens: int
) -> int:
    """Return the workspace bytes that a layer requests for `count` prompts of `rows` KV rows each.

    tokens: new tokens of all prompts of the step.
    """
    chosen = {
        "sliding": 0,
        "sparse": _TOP_K,
        "compressed": aligned(-(-sizes.max_model_len // 128), 128),
    }[kind]
    width = aligned(chosen + sizes.window, 128)
    row = sizes.head_dim * _HALF
    if shapes is Shapes.RELEASE:
        return (
            aligned(count * rows * row)
            + aligned(sizes.batch * width * _WORD)
            + aligned(sizes.batch * _WORD)
        )
    queries = min(tokens, _QUERIES) * sizes.heads * _WORD
    states = 2 * aligned(queries) + aligned(queries * sizes.head_dim)
    return (
        aligned(_CHUNK * rows * row)
        + aligned(tokens * width * _WORD)
        + aligned(tokens * _WORD)
        + states
    )


def longest_that_fits(shapes: Shapes, sizes: Sizes) -> int:
    """Return the tokens of the longest lone prompt that fits the locked workspace, or 0.

    A prompt fits if it needs no more bytes than the indexer requested.
    """
    lengths, reserved = range(1, sizes.max_model_len + 1), indexer_bytes(sizes.max_model_len)
    return bisect_right(lengths, reserved, key=lambda prompt: lone_bytes(shapes, sizes, prompt))


def lone_bytes(shapes: Shapes, sizes: Sizes, prompt: int) -> int:
    """Return the most workspace bytes that any chunk of a lone prompt requests.

    prompt: its tokens.
    """
    whole, rest = divmod(prompt, sizes.batch)
    full = (
        prefill_bytes(shapes, sizes, (sizes.batch,), ((whole - 1) * sizes.batch,)) if whole else 0
    )
    # The last full chunk has the most tokens before it.
    return max(full, prefill_bytes(shapes, sizes, (rest,), (whole * sizes.batch,)))


def _sparse_prefill_outgrown(facts: TriggerFacts) -> TriggerResult:
    """Return whether a prefill needed more workspace than the indexer locks, with evidence.

    The bytes needed are from the crash message, else from the lab's log, else computed with the
    shapes of the reported branch.
    """
    if (reported := result_from_message(facts)) is not None:
        return replace(reported, evidence=reported.evidence + _seen_and_computed(facts))
    sizes = _sizes(facts)
    if isinstance(sizes, str):
        return TriggerResult(False, (sizes,))
    reserved = indexer_bytes(sizes.max_model_len)
    if seen := _seen_and_computed(facts):
        needed = max(event.values["bytes"] for event in facts.observed if event.kind == "prefill")
    else:
        step = max(
            _steps(facts), key=lambda step: _step_bytes(Shapes.BRANCH, sizes, step), default=()
        )
        if not step:
            return TriggerResult(False, ("no request reached the engine",), "no request")
        needed, seen = _step_bytes(Shapes.BRANCH, sizes, step), _computed_evidence(sizes, step)
    locked = (
        "the log reports no lock"
        if facts.locked is None
        else f"the log reports {megabytes(facts.locked)} MB locked"
    )
    bars = [("needed by the prefill", needed), ("the indexer locks", reserved)]
    if facts.locked is not None:
        bars.append(("locked by the log", facts.locked))
    return TriggerResult(
        needed > reserved,
        (
            *seen,
            (
                f"the indexer alone locks {megabytes(reserved)} MB by --max-model-len"
                f" {sizes.max_model_len}"
            ),
            locked,
        ),
        f"needs {megabytes(needed)} MB, {megabytes(reserved)} MB locked",
        (in_megabytes(*bars),),
    )


def _sizes(facts: TriggerFacts) -> Sizes | str:
    """Return the values to compute with, or a message naming what is missing."""
    if facts.shape is None:
        return "the server has a model of another shape, so its lock cannot be computed"
    length, ranks = facts.number("--max-model-len"), facts.number("--tensor-parallel-size") or 1
    if length is None or facts.batch is None:
        return "--max-model-len or the batch size is not known, so the lock cannot be computed"
    shape = facts.shape
    window, kinds = shape.window or Sizes.window, shape.kinds or Sizes.kinds
    return Sizes(length, facts.batch, shape.heads // ranks, shape.head_dim, window, kinds)


def _steps(facts: TriggerFacts) -> list[tuple[Continuation, ...]]:
    """Return the steps to compute: the crashed one, then each chunk of each prompt by itself.

    Empty if no request reached the engine.
    """
    step = tuple(
        Continuation(part.computed or 0, part.scheduled)
        for part in facts.dump
        if part.scheduled > 1
    )
    alone: list[tuple[Continuation, ...]] = [
        (part,) for request in facts.requests for part in facts.pieces(request)
    ]
    return [step, *alone] if step else alone


def _step_bytes(shapes: Shapes, sizes: Sizes, step: Sequence[Continuation]) -> int:
    """Return the most workspace bytes that a step with these chunks requests."""
    return prefill_bytes(
        shapes, sizes, [part.tokens for part in step], [part.context for part in step]
    )


def _seen_and_computed(facts: TriggerFacts) -> tuple[str, ...]:
    """Return one sentence on the largest workspace request that the lab logged.

    If it can be computed, add whether the flags give the same size. Empty outside the lab, or if
    sizes are unknown.
    """
    seen = max(
        (event.values for event in facts.observed if event.kind == "prefill"),
        key=lambda values: values["bytes"],
        default=None,
    )
    sizes = _sizes(facts)
    if seen is None or isinstance(sizes, str):
        return ()
    prompts, new = tuple(seen["prompts"]), seen["tokens"]
    text = (
        f"seen: a prefill of {_tokens(prompts)} requested {seen['bytes']:,} bytes in a layer of"
        f" ratio {seen['ratio']}"
    )
    if sum(prompts) != new:
        text += f", {new} of them new"
        if len(prompts) > 1:
            return (text,)
    before = (sum(prompts) - new,) if len(prompts) == 1 else ()
    parts = (new,) if before else prompts
    there = replace(
        sizes, kinds=tuple(kind for kind in sizes.kinds if _RATIOS[kind] == seen["ratio"])
    )
    for shapes in Shapes:
        if there.kinds and prefill_bytes(shapes, there, parts, before) == seen["bytes"]:
            fits = longest_that_fits(shapes, sizes)
            return (
                (
                    f"{text}, as computed from the flags for the shapes of the {shapes}: a lone"
                    f" prompt fits up to {fits} tokens"
                ),
            )
    return (f"{text}; the flags give another size for all known shapes",)


def _computed_evidence(sizes: Sizes, step: tuple[Continuation, ...]) -> tuple[str, ...]:
    """Return one sentence on the bytes that a step needs and on the longest fitting prompt."""
    needed, fits = _step_bytes(Shapes.BRANCH, sizes, step), longest_that_fits(Shapes.BRANCH, sizes)
    text = (
        f"a prefill of {_tokens(tuple(part.tokens for part in step))} needs {megabytes(needed)} MB"
        " with the branch's shapes"
    )
    return (f"{text}: a lone prompt fits up to {fits} tokens",)


def _tokens(prompts: tuple[int, ...]) -> str:
    """Return prompt lengths as text, such as `5 and 7 tokens in one step`."""
    return f"{' and '.join(map(str, prompts))} tokens" + (
        " in one step" if len(prompts) > 1 else ""
    )


def sparse_prefill_outgrown() -> Condition:
    """Require a prefill of DeepSeek-V4 that needs more workspace than the sparse indexer locks.

    Evidence: the crash message, workspace requests that the lab logged, or a computation.
    """
    return Condition("sparse_prefill_outgrown()", _sparse_prefill_outgrown)
