"""Counts between two readings of `/metrics`, for reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_repro_diagnosis.metrics import MetricsReading


def steps_between(before: MetricsReading, after: MetricsReading) -> tuple[str, ...]:
    """Return the engine steps between two `/metrics` readings as text, largest first.

    Example: `1 step of 4,097 to 8,192 tokens`. Empty if the server counts no steps.
    """
    lines: list[str] = []
    below = 0.0
    bounds = sorted(after.steps)
    for index, bound in enumerate(bounds):
        total = after.steps[bound] - before.steps.get(bound, 0.0)
        number = int(total - below)
        below = total
        if number <= 0:
            continue
        steps = f"{number} step{'s' if number > 1 else ''} of"
        floor = int(bounds[index - 1]) + 1 if index else 0
        if bound == float("inf"):
            lines.append(f"{steps} over {floor - 1:,} tokens")
        elif floor >= bound or bound == 1:
            lines.append(f"{steps} {int(bound)} token" + ("s" if bound != 1 else ""))
        else:
            lines.append(f"{steps} {floor:,} to {int(bound):,} tokens")
    return tuple(reversed(lines))


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Counts between two readings of `/metrics`: tokens, cache hits, preemptions, drafts.

    The fields are those of `MetricsReading`. None: the server does not report it.
    """

    prompt_tokens: int
    generation_tokens: int
    # highest share of a KV cache in use, 0 to 1, of the readings twice a second
    kv_most: float | None = None
    cache_hits: int | None = None
    cache_queries: int | None = None
    preemptions: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None


_COUNTERS = (
    *("prompt_tokens", "generation_tokens", "cache_hits", "cache_queries"),
    *("preemptions", "draft_tokens", "accepted_tokens"),
)


def counted_between(
    before: MetricsReading, after: MetricsReading, kv_most: float | None
) -> Counted | None:
    """Return the server's counts between two readings of its `/metrics`.

    kv_most: for that field. Return None if the server restarted, or has no count of generated
    tokens above 0.
    """
    if not after.generation_tokens or after.started != before.started:
        return None
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in _COUNTERS}
    # A counter with labels, such as that of drafts, may appear with its first value.
    counts = {
        name: None if now is None else int(now - (was or 0.0)) for name, (was, now) in pairs.items()
    }
    return Counted(kv_most=kv_most, **counts)  # type: ignore[arg-type]  # the tokens are never None


def total(parts: Sequence[Counted]) -> Counted:
    """Return the sum of counts over several times, with the highest of their `kv_most`.

    A field that is None in all of them stays None.
    """

    def known(name: str) -> list[float]:
        return [value for part in parts if (value := getattr(part, name)) is not None]

    sums = {name: int(sum(values)) if (values := known(name)) else None for name in _COUNTERS}
    return Counted(
        kv_most=max(known("kv_most"), default=None),
        **sums,  # type: ignore[arg-type]  # the tokens are never None: each part has them
    )
