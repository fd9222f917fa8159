"""Reader for vLLM's `/metrics` page, names as in vLLM 0.19 to 0.32.

`vllm:iteration_tokens_total` is a histogram. It does not count chunks of a prompt: a step that
prefills a part records nothing, and the step with the first token records the whole computed
prompt. So one observation above `max_num_batched_tokens` proves several chunks, but their number
proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

_STEPS = "vllm:iteration_tokens_total"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_NAMES = (
    _STEPS,
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    _KV_USAGE,
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:num_preemptions_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "process_start_time_seconds",
)
_MOST_LINES = 10_000
_LARGEST = 2.0**63
"""NaN, infinity and larger values are no counts."""


@dataclass(frozen=True, kw_only=True)
class MetricsReading:
    """Values of one scrape. None: the server does not report it."""

    running: float = 0.0
    waiting: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    step_count: float = 0.0
    # shares of the KV caches in use, added up
    kv_usage: float = 0.0
    # share of the fullest KV cache in use
    kv_most: float | None = None
    # prompt tokens found in the prefix cache
    cache_hits: float | None = None
    # prompt tokens looked up in the prefix cache
    cache_queries: float | None = None
    # preemptions of running requests
    preemptions: float | None = None
    # proposed by speculative decoding
    draft_tokens: float | None = None
    # accepted by speculative decoding
    accepted_tokens: float | None = None
    started: float | None = None
    # recorded iterations by upper bound of tokens, cumulative
    steps: Mapping[float, float] = field(default_factory=dict)

    @property
    def progress(self) -> tuple[float, ...]:
        """Return numbers that change whenever the engine does.

        Between chunks of one long prompt only the KV cache usage changes.

        That usage does not count while no request runs: a connector may hold blocks for ever.
        """
        return (
            self.step_count,
            self.prompt_tokens,
            self.generation_tokens,
            self.kv_usage if self.running else 0.0,
        )


def read_metrics(text: str) -> MetricsReading:
    """Return the values of a page, summed over engines, without NaN and infinity.

    Return an empty reading if it is not a metrics page.
    """
    # here: its package starts with an HTTP server
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, float] = {}
    steps: dict[float, float] = {}
    started: float | None = None
    kv_most: float | None = None
    try:
        # The other lines of a page are many, and their parser is slow.
        lines = islice((line for line in text.split("\n") if line.startswith(_NAMES)), _MOST_LINES)
        for family in text_string_to_metric_families("\n".join(lines)):
            for sample in family.samples:
                if not abs(sample.value) < _LARGEST:
                    continue
                if sample.name.endswith("_bucket"):
                    bound = abs(float(sample.labels["le"]))
                    steps[bound] = steps.get(bound, 0.0) + sample.value
                elif sample.name == "process_start_time_seconds":
                    started = sample.value
                else:
                    if sample.name == _KV_USAGE:
                        kv_most = max(sample.value, kv_most or 0.0)
                    totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    except (ValueError, LookupError):
        return MetricsReading()
    return MetricsReading(
        running=totals.get("vllm:num_requests_running", 0.0),
        waiting=totals.get("vllm:num_requests_waiting", 0.0),
        prompt_tokens=totals.get("vllm:prompt_tokens_total", 0.0),
        generation_tokens=totals.get("vllm:generation_tokens_total", 0.0),
        step_count=totals.get(f"{_STEPS}_count", 0.0),
        kv_usage=totals.get(_KV_USAGE, 0.0),
        kv_most=kv_most,
        cache_hits=totals.get("vllm:prefix_cache_hits_total"),
        cache_queries=totals.get("vllm:prefix_cache_queries_total"),
        preemptions=totals.get("vllm:num_preemptions_total"),
        draft_tokens=totals.get("vllm:spec_decode_num_draft_tokens_total"),
        accepted_tokens=totals.get("vllm:spec_decode_num_accepted_tokens_total"),
        started=started,
        steps=steps,
    )


def steps_between(before: MetricsReading, after: MetricsReading) -> tuple[str, ...]:
    """Return the iterations between two scrapes as text, largest first.

    Example: `1 step of 4,097 to 8,192 tokens`.
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
    """Counts of the server over a time.

    The fields are those of `MetricsReading`. None: the server does not report it.
    """

    prompt_tokens: int
    generation_tokens: int
    # highest reading; the watch reads twice a second
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
    """Return the counts between two readings.

    None if the server does not count tokens, or restarted.
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
    """Return the sum of one or more parts."""

    def known(name: str) -> list[float]:
        return [value for part in parts if (value := getattr(part, name)) is not None]

    sums = {name: int(sum(values)) if (values := known(name)) else None for name in _COUNTERS}
    # as above
    return Counted(kv_most=max(known("kv_most"), default=None), **sums)  # type: ignore[arg-type]
