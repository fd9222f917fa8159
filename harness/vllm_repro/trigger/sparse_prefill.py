"""DeepSeek-V4's share of vLLM's workspace, to the byte, and the condition that a prefill outgrew it. Pure.

In the dummy run before the lock the sparse indexer asks for room by `--max-model-len` alone. A prefill asks for what it gathers: a row for
each token of a prompt, and one more for every few of them in layers that compress. Releases reserve room for that in the dummy run too. The
reported branch did not, and there a prompt longer than a computable length outgrows the lock; so do several shorter ones in one step.
Sizes are those of `flashmla.py` in vLLM 0.32.0, and of the branch's own request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from vllm_repro.trigger.trigger import Condition, Continuation, Finding, TriggerFacts, chunks_of

__all__ = [
    "Shapes",
    "Sizes",
    "indexer_bytes",
    "lone_bytes",
    "longest_that_fits",
    "prefill_bytes",
    "sparse_prefill_outgrown",
]

_ALIGNED = 256
_MB = 1024 * 1024
_HALF, _WORD = 2, 4
_CHUNK = 4
"""Prompts of the longest kind whose rows are gathered at once."""
_QUERIES = 256
"""The branch attends to so many tokens at once, and keeps their state in float32."""
_INDEXED, _INDEX_RATIO, _INDEX_SIZE, _INDEX_SCRATCH = 40, 4, 128, _MB
_TOP_K = 512
_RATIOS = {"sliding": 1, "sparse": 4, "compressed": 128}


class Shapes(StrEnum):
    """Whose shapes a prefill asks for."""

    RELEASE = "release"  # rows for the prompts there are, indices for a whole batch
    BRANCH = "branch"  # rows for four prompts however many there are, indices for the tokens there are, and states of queries


@dataclass(frozen=True)
class Sizes:
    """What the sizes depend on: flags, and the model. heads: of one rank. kinds: of the model's layers."""

    max_model_len: int
    batch: int
    heads: int
    head_dim: int = 512
    window: int = 128
    kinds: tuple[str, ...] = ("sliding", "sparse", "compressed")


def _aligned(count: int, to: int = _ALIGNED) -> int:
    return -(-count // to) * to


def indexer_bytes(max_model_len: int) -> int:
    """What the indexer of a dummy run asks for: keys and scales of 40 whole contexts, a fourth of their tokens, and its own scratch."""
    keys = _INDEXED * (max_model_len // _INDEX_RATIO)
    return _aligned(keys * _INDEX_SIZE) + _aligned(keys * _WORD) + _INDEX_SCRATCH


def prefill_bytes(shapes: Shapes, sizes: Sizes, prompts: Sequence[int], before: Sequence[int] = ()) -> int:
    """The most that prompts ask for when so many tokens of each are prefilled in one step.

    before: tokens of each that are computed already, 0 unless given. The last token alone is no prefill.
    """
    contexts = before or (0,) * len(prompts)
    pieces = [(tokens, context) for tokens, context in zip(prompts, contexts, strict=True) if tokens > 1]
    together = sum(tokens for tokens, _ in pieces)
    return max(
        (
            _asked(shapes, sizes, kind, count, rows, together)
            for kind in dict.fromkeys(sizes.kinds)
            for count, rows in _gathered(sizes, kind, pieces)
        ),
        default=0,
    )


def _gathered(sizes: Sizes, kind: str, pieces: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The prompts whose rows are gathered at once: how many, and the rows of each, in the order in which they are scheduled.

    pieces: tokens of each in this step, and before it. A layer gathers what the window still sees, and all that is compressed.
    """
    ratio = _RATIOS[kind]
    compresses = ratio > 1
    most = _CHUNK * (-(-sizes.max_model_len // ratio) * compresses + sizes.window + sizes.batch)
    count = seen = packed = 0
    for tokens, context in pieces:
        near, far = tokens + min(context, sizes.window - 1), (context + tokens) // ratio * compresses
        if count and (count + 1) * (max(seen, near) + max(packed, far)) > most:
            yield count, seen + packed
            count = seen = packed = 0
        count, seen, packed = count + 1, max(seen, near), max(packed, far)
    if count:
        yield count, seen + packed


def _asked(shapes: Shapes, sizes: Sizes, kind: str, count: int, rows: int, tokens: int) -> int:
    chosen = {"sliding": 0, "sparse": _TOP_K, "compressed": _aligned(-(-sizes.max_model_len // 128), 128)}[kind]
    width = _aligned(chosen + sizes.window, 128)
    row = sizes.head_dim * _HALF
    if shapes is Shapes.RELEASE:
        return _aligned(count * rows * row) + _aligned(sizes.batch * width * _WORD) + _aligned(sizes.batch * _WORD)
    queries = min(tokens, _QUERIES) * sizes.heads * _WORD
    states = 2 * _aligned(queries) + _aligned(queries * sizes.head_dim)
    return _aligned(_CHUNK * rows * row) + _aligned(tokens * width * _WORD) + _aligned(tokens * _WORD) + states


def longest_that_fits(shapes: Shapes, sizes: Sizes) -> int:
    """Tokens of the longest lone prompt of which no chunk asks for more than the indexer does; 0 where none is so short."""
    fits, beyond = 0, sizes.max_model_len + 1
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if lone_bytes(shapes, sizes, middle) <= indexer_bytes(sizes.max_model_len):
            fits = middle
        else:
            beyond = middle
    return fits


def lone_bytes(shapes: Shapes, sizes: Sizes, prompt: int) -> int:
    """The most that a lone prompt asks for, in the chunks that it is cut into."""
    whole, rest = divmod(prompt, sizes.batch)
    full = prefill_bytes(shapes, sizes, (sizes.batch,), ((whole - 1) * sizes.batch,)) if whole else 0
    # Of full chunks the last one has the most before it.
    return max(full, prefill_bytes(shapes, sizes, (rest,), (whole * sizes.batch,)))


@dataclass(frozen=True)
class _Outgrown(Condition):
    def find(self, facts: TriggerFacts) -> Finding:
        said = facts.captured
        if "asked" in said and "locked" in said:
            text = f"the death's own message: {said['asked']} MB asked for, {said['locked']} MB locked"
            return Finding(True, (text, *_seen_and_computed(facts)), f"asks {said['asked']} > {said['locked']} MB")
        sizes = _sizes(facts)
        if isinstance(sizes, str):
            return Finding(False, (sizes,))
        reserved = indexer_bytes(sizes.max_model_len)
        if seen := _seen_and_computed(facts):
            asked = max(one.values["bytes"] for one in facts.observed if one.kind == "prefill")
        else:
            step = max(_steps(facts), key=lambda step: _step_bytes(Shapes.BRANCH, sizes, step), default=())
            if not step:
                return Finding(False, ("no request reached the engine",), "no request")
            asked, seen = _step_bytes(Shapes.BRANCH, sizes, step), _computed(sizes, step)
        locked = (
            "the log tells of no lock"
            if facts.locked is None
            else f"the log says that {_mb(facts.locked)} MB were locked"
        )
        sign = ">" if asked > reserved else "fits"
        return Finding(
            asked > reserved,
            (*seen, f"the indexer alone locks {_mb(reserved)} MB by --max-model-len {sizes.max_model_len}", locked),
            f"asks {_mb(asked)} {sign} {_mb(reserved)} MB",
        )

    def __str__(self) -> str:
        return "sparse_prefill_outgrown()"


def _sizes(facts: TriggerFacts) -> Sizes | str:
    """What is computed with, or the sentence that says what is not known."""
    if facts.shape is None:
        return "the server has a model of another shape, so what it locks cannot be computed"
    length, ranks = facts.number("--max-model-len"), facts.number("--tensor-parallel-size") or 1
    if length is None or facts.batch is None:
        return "--max-model-len and the batch size must both be known to compute what is locked and asked for"
    shape = facts.shape
    window, kinds = shape.window or Sizes.window, shape.kinds or Sizes.kinds
    return Sizes(length, facts.batch, shape.heads // ranks, shape.head_dim, window, kinds)


def _steps(facts: TriggerFacts) -> list[tuple[Continuation, ...]]:
    """What was prefilled together: each prompt alone, as it was cut, and those of the step that the engine died in."""
    step = tuple(Continuation(part.computed or 0, part.scheduled) for part in facts.dump if part.scheduled > 1)
    found = [step] if step else []
    for asked in facts.asked:
        uncached = facts.uncached(asked)
        if uncached is not None and asked.accepted:
            context = facts.cached(asked)
            for tokens in chunks_of(uncached, facts.chunk or uncached, chunked=facts.chunked is not False):
                found.append((Continuation(context, tokens),))
                context += tokens
    return found


def _step_bytes(shapes: Shapes, sizes: Sizes, step: Sequence[Continuation]) -> int:
    return prefill_bytes(shapes, sizes, [part.tokens for part in step], [part.context for part in step])


def _seen_and_computed(facts: TriggerFacts) -> tuple[str, ...]:
    """What the lab saw a prefill ask for at most, and which shapes that is by the flags; empty outside the lab."""
    seen = max(
        (one.values for one in facts.observed if one.kind == "prefill"), key=lambda one: one["bytes"], default=None
    )
    sizes = _sizes(facts)
    if seen is None or isinstance(sizes, str):
        return ()
    prompts, new = tuple(seen["prompts"]), seen["tokens"]
    told = f"the lab saw a prefill of {_tokens(prompts)} ask for {seen['bytes']:,} bytes in a layer of ratio {seen['ratio']}"
    if sum(prompts) != new:
        told += f", {new} of them new"
        if len(prompts) > 1:
            return (told,)
    before = (sum(prompts) - new,) if len(prompts) == 1 else ()
    parts = (new,) if before else prompts
    there = replace(sizes, kinds=tuple(kind for kind in sizes.kinds if _RATIOS[kind] == seen["ratio"]))
    for shapes in Shapes:
        if there.kinds and prefill_bytes(shapes, there, parts, before) == seen["bytes"]:
            fits = longest_that_fits(shapes, sizes)
            return (
                f"{told}, as computed from the flags for the shapes of the {shapes}: a lone prompt fits up to {fits} tokens",
            )
    return (f"{told}, which is not what the flags give for any shapes that are known here",)


def _computed(sizes: Sizes, step: tuple[Continuation, ...]) -> tuple[str, ...]:
    asked, fits = _step_bytes(Shapes.BRANCH, sizes, step), longest_that_fits(Shapes.BRANCH, sizes)
    said = (
        f"a prefill of {_tokens(tuple(part.tokens for part in step))} asks for {_mb(asked)} MB with the branch's shapes"
    )
    return (f"{said}: a lone prompt fits up to {fits} tokens",)


def _tokens(prompts: tuple[int, ...]) -> str:
    return f"{' and '.join(map(str, prompts))} tokens" + (" in one step" if len(prompts) > 1 else "")


def _mb(count: int) -> str:
    return f"{count / _MB:.2f}"


def sparse_prefill_outgrown() -> Condition:
    """A prefill of DeepSeek-V4 asked for more workspace than the sparse indexer locks: as the lab saw, or by flags, model and prompt."""
    return _Outgrown()
