"""Reader for vLLM's `/metrics` page, names as in vLLM 0.19 to 0.32.

`vllm:iteration_tokens_total` is a histogram. It does not count chunks of a prompt: a step that
prefills a part records nothing, and the step with the first token records the whole computed
prompt. So one observation above `max_num_batched_tokens` proves several chunks, but their number
proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

_STEPS = "vllm:iteration_tokens_total"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_SLEEP = "vllm:engine_sleep_state"
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
    _SLEEP,
    "process_start_time_seconds",
)
_MOST_LINES = 10_000
_SAMPLE = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})?[ \t]+(?P<value>\S+)")
_BOUND = re.compile(r'\ble="([^"]*)"')
_LARGEST = 2.0**63
"""NaN, infinity and larger values are no counts."""


@dataclass(frozen=True, kw_only=True)
class MetricsReading:
    """Values of one scrape of vLLM's `/metrics`, summed over engines.

    A value that the server does not report is 0 or None.
    """

    # requests
    running: float = 0.0
    waiting: float = 0.0
    # this and the next two: since the server's start
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    # observations of `vllm:iteration_tokens_total`, see the module
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
    # start of the server's process, in seconds since 1970
    started: float | None = None
    # the page has counters of vLLM
    counts: bool = False
    # engines that /sleep has put to sleep
    asleep: float = 0.0
    # recorded iterations by upper bound of tokens, cumulative
    steps: Mapping[float, float] = field(default_factory=dict)

    @property
    def progress(self) -> tuple[float, ...]:
        """Return (steps, prompt tokens, output tokens, KV cache usage); one changes with progress.

        Between chunks of one long prompt only the KV cache usage changes. It is 0 while no request
        runs: a connector may hold blocks for ever.
        """
        return (
            self.step_count,
            self.prompt_tokens,
            self.generation_tokens,
            self.kv_usage if self.running else 0.0,
        )


def read_metrics(text: str) -> MetricsReading:
    """Return the values in a `/metrics` page, summed over engines, without NaN and infinity.

    Return an empty reading if it is not a metrics page.
    """
    totals: dict[str, float] = {}
    steps: dict[float, float] = {}
    started: float | None = None
    kv_most: float | None = None
    try:
        # The other lines of a page are many.
        lines = islice((line for line in text.split("\n") if line.startswith(_NAMES)), _MOST_LINES)
        for sample in filter(None, map(_SAMPLE.match, lines)):
            name, value = sample["name"], float(sample["value"])
            if not abs(value) < _LARGEST:
                continue
            if name.endswith("_bucket"):
                if bound := _BOUND.search(sample["labels"] or ""):
                    key = abs(float(bound[1]))
                    steps[key] = steps.get(key, 0.0) + value
            elif name == "process_start_time_seconds":
                started = value
            elif name == _SLEEP:
                # one sample for each state of each engine: 1 if it is in that state
                if 'sleep_state="awake"' in (sample["labels"] or ""):
                    totals[_SLEEP] = totals.get(_SLEEP, 0.0) + (value == 0)
            else:
                if name == _KV_USAGE:
                    kv_most = max(value, kv_most or 0.0)
                totals[name] = totals.get(name, 0.0) + value
    except ValueError:
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
        counts="vllm:num_requests_running" in totals,
        asleep=totals.get(_SLEEP, 0.0),
        steps=steps,
    )
