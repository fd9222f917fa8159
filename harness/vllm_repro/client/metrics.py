"""What `/metrics` says, as far as the harness asks it. Pure: text in, values out.

Names are those of vLLM 0.19 to 0.32. Three traps. `vllm:iteration_tokens_total` is a histogram in spite of its name. It does not count
chunks: a step that only prefills a part of a prompt records nothing, and the step that gives the first token records the whole prompt
that was computed for it, so one observation above `max_num_batched_tokens` proves several chunks and their number proves nothing. And
every counter has a `_created` twin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Reading", "read_metrics", "steps_between"]

_STEPS = "vllm:iteration_tokens_total"


@dataclass(frozen=True)
class Reading:
    """One scrape.

    cache_hits: prompt tokens that came from the prefix cache, None where the server does not say. steps: recorded iterations by upper
    bound of tokens (cumulative, as Prometheus counts buckets).
    """

    running: float = 0.0
    waiting: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    step_count: float = 0.0
    kv_usage: float = 0.0
    cache_hits: float | None = None
    started: float | None = None
    steps: Mapping[float, float] = field(default_factory=dict)

    @property
    def progress(self) -> tuple[float, ...]:
        """Numbers that move whenever the engine does. Among chunks of one long prompt only the KV cache's usage moves.

        With no request running it says nothing: a connector that copies blocks holds them meanwhile, and may do so for ever.
        """
        return (self.step_count, self.prompt_tokens, self.generation_tokens, self.kv_usage if self.running else 0.0)


def read_metrics(text: str) -> Reading:
    """A page of `/metrics`; sums over engines. Lines that are no metrics are an error of the server, and give an empty reading."""
    totals: dict[str, float] = {}
    steps: dict[float, float] = {}
    started: float | None = None
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"{_STEPS}_bucket":
                    bound = float(sample.labels["le"])
                    steps[bound] = steps.get(bound, 0.0) + sample.value
                elif sample.name == "process_start_time_seconds":
                    started = sample.value
                else:
                    totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    except (ValueError, KeyError):
        return Reading()
    return Reading(
        totals.get("vllm:num_requests_running", 0.0),
        totals.get("vllm:num_requests_waiting", 0.0),
        totals.get("vllm:prompt_tokens_total", 0.0),
        totals.get("vllm:generation_tokens_total", 0.0),
        totals.get(f"{_STEPS}_count", 0.0),
        totals.get("vllm:kv_cache_usage_perc", 0.0),
        totals.get("vllm:prefix_cache_hits_total"),
        started,
        steps,
    )


def steps_between(before: Reading, after: Reading) -> tuple[str, ...]:
    """The iterations recorded between two scrapes, largest first, as text: `1 of 4,097 to 8,192 tokens`."""
    found: list[str] = []
    below = 0.0
    bounds = sorted(after.steps)
    for index, bound in enumerate(bounds):
        total = after.steps[bound] - before.steps.get(bound, 0.0)
        number = int(total - below)
        below = total
        if number <= 0:
            continue
        floor = int(bounds[index - 1]) + 1 if index else 0
        if bound == float("inf"):
            found.append(f"{number} of over {floor - 1:,} tokens")
        elif floor >= bound or bound == 1:
            found.append(f"{number} of {int(bound)} token" + ("s" if bound != 1 else ""))
        else:
            found.append(f"{number} of {floor:,} to {int(bound):,} tokens")
    return tuple(reversed(found))
