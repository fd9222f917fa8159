from __future__ import annotations

from pathlib import Path

import pytest

from vllm_repro.client.metrics import Counted, counted_between, steps_between, total
from vllm_repro_diagnosis.metrics import MetricsReading, read_metrics

PAGES = Path(__file__).parents[2] / "data" / "metrics"


@pytest.mark.parametrize("name", ["v0.20.2-metrics.txt", "v0.32.0-metrics.txt"])
def test_pages_of_real_servers(name: str) -> None:
    reading = read_metrics((PAGES / name).read_text(encoding="utf-8"))
    assert reading.started
    assert min(reading.prompt_tokens, reading.generation_tokens, reading.step_count) > 0
    assert (reading.steps[float("inf")], reading.preemptions) == (reading.step_count, 0.0)
    cache = (reading.cache_hits, reading.cache_queries, reading.kv_most)
    assert cache == (0.0, reading.prompt_tokens, 0.0)
    assert (reading.draft_tokens, reading.accepted_tokens) == (None, None)  # served without drafts


def test_steps_between_two_scrapes_are_counted_by_size() -> None:
    before = MetricsReading(steps={1.0: 5, 8.0: 5, 4096.0: 5, float("inf"): 5})
    after = MetricsReading(steps={1.0: 12, 8.0: 12, 4096.0: 14, float("inf"): 15})
    assert steps_between(before, after) == (
        "1 step of over 4,096 tokens",
        "2 steps of 9 to 4,096 tokens",
        "7 steps of 1 token",
    )
    assert steps_between(after, after) == ()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e300"])
def test_a_value_that_is_no_count_is_left_out(value: str) -> None:
    names = (
        "num_requests_running",
        "prompt_tokens_total",
        'iteration_tokens_total_bucket{le="8.0"}',
        "prefix_cache_hits_total",
    )
    page = (
        "".join(f"vllm:{name} {value}\n" for name in names)
        + f"process_start_time_seconds {value}\n"
    )
    assert read_metrics(page) == MetricsReading()
    assert steps_between(
        MetricsReading(), read_metrics('vllm:iteration_tokens_total_bucket{le="-Inf"} 3')
    ) == ("3 steps of over -1 tokens",)


def test_a_page_that_is_no_metrics_is_an_empty_reading() -> None:
    assert (read_metrics("<html>proxy</html>"), read_metrics("")) == (
        MetricsReading(),
        MetricsReading(),
    )


PAGE = """process_start_time_seconds 1000.0
vllm:kv_cache_usage_perc{{engine="0"}} 0.2
vllm:kv_cache_usage_perc{{engine="1"}} 0.6
vllm:prompt_tokens_total {prompt}
vllm:generation_tokens_total {output}
vllm:prefix_cache_hits_total 5.0
vllm:prefix_cache_queries_total {prompt}
vllm:num_preemptions_total 2.0
"""
DRAFTS = """vllm:spec_decode_num_draft_tokens_total 30.0
vllm:spec_decode_num_accepted_tokens_total 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 12.0
"""


def test_what_a_server_counts_in_a_phase() -> None:
    before = read_metrics(PAGE.format(prompt=10, output=20))
    after = read_metrics(PAGE.format(prompt=17, output=50) + DRAFTS)
    found = counted_between(before, after, after.kv_most)
    assert found == Counted(
        prompt_tokens=7,
        generation_tokens=30,
        kv_most=0.6,
        cache_hits=0,
        cache_queries=7,
        preemptions=0,
        draft_tokens=30,
        accepted_tokens=12,
    )
    assert after.kv_usage == pytest.approx(0.8)
    other = Counted(prompt_tokens=1, generation_tokens=2, kv_most=0.7, preemptions=3)
    assert total([found, other]) == Counted(
        prompt_tokens=8,
        generation_tokens=32,
        kv_most=0.7,
        cache_hits=0,
        cache_queries=7,
        preemptions=3,
        draft_tokens=30,
        accepted_tokens=12,
    )


def test_no_counts_are_shown_without_counters_or_on_restart() -> None:
    page = read_metrics(PAGE.format(prompt=10, output=20))
    assert counted_between(page, MetricsReading(started=1000.0), None) is None
    assert counted_between(MetricsReading(started=999.0), page, None) is None
