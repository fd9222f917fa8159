from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro_explore.template import template


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            (
                "allocation from 'turboquant_attn.py:720:_continuation_prefill' requires 16.00 MB,"
                " current size is 1.02 MB"
            ),
            (
                "allocation from 'turboquant_attn.py:757:_continuation_prefill' requires 2.00 MB,"
                " current size is 0.26 MB"
            ),
        ),
        (
            "'deepseek_v4_attention.py:1454:_forward_prefill' requires 24.89 MB",
            "'deepseek_v4_attention.py:1457:_forward_prefill' requires 21.80 MB",
        ),
        (
            "Tried to allocate 88 MiB, 42 MiB is free",
            "Tried to allocate 2.00 GiB, 1,024 MiB is free",
        ),
        ("peer [127.0.0.1]:63194 at 0x7f3fa0d40c08", "peer [10.0.0.2]:80 at 0x1"),
        ("cannot open /home/a/vllm/vllm/envs.py", "cannot open /opt/site-packages/vllm/envs.py"),
    ],
)
def test_two_prints_of_one_bug_have_one_template(one: str, other: str) -> None:
    assert template(one) == template(other)


def test_identifiers_survive_the_masking() -> None:
    masked = template(
        "'deepseek_v4_attention.py:1457:_forward_prefill' fp8_e5m2 v1/worker gpu_model_runner"
        " 21.80 MB"
    )
    assert (
        masked == "'deepseek_v4_attention.py:{line}:_forward_prefill' fp8_e5m2 v1/worker"
        " gpu_model_runner {n}"
    )
    assert template("modular_kernel.py:1096") != template("other_kernel.py:1096")


@given(st.text(max_size=200))
@settings(max_examples=100)
def test_masking_twice_is_masking_once(text: str) -> None:
    assert template(template(text)) == template(text)
