from __future__ import annotations

from pathlib import Path

import pytest

from vllm_repro.client.metrics import Reading, read_metrics, steps_between

PAGES = Path(__file__).parents[1] / "data" / "metrics"


@pytest.mark.parametrize("name", ["v0.20.2-metrics.txt", "v0.32.0-metrics.txt"])
def test_pages_of_real_servers(name: str) -> None:
    reading = read_metrics((PAGES / name).read_text(encoding="utf-8"))
    assert reading.started is not None
    assert reading.prompt_tokens > 0
    assert reading.generation_tokens > 0
    assert reading.step_count > 0
    assert reading.steps[float("inf")] == reading.step_count
    assert reading.preemptions == 0.0


def test_steps_between_two_scrapes_are_counted_by_size() -> None:
    before = Reading(steps={1.0: 5, 8.0: 5, 4096.0: 5, float("inf"): 5})
    after = Reading(steps={1.0: 12, 8.0: 12, 4096.0: 14, float("inf"): 15})
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
    page = "".join(f"vllm:{name} {value}\n" for name in names) + f"process_start_time_seconds {value}\n"
    assert read_metrics(page) == Reading()
    assert steps_between(Reading(), read_metrics('vllm:iteration_tokens_total_bucket{le="-Inf"} 3')) == (
        "3 steps of over -1 tokens",
    )


def test_a_page_that_is_no_metrics_is_an_empty_reading() -> None:
    assert read_metrics("<html>proxy</html>") == Reading()
    assert read_metrics("") == Reading()
