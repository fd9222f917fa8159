from __future__ import annotations

import pytest

from vllm_repro.redact import Redactor

REDACTOR = Redactor([("/home/me/work/checkout", "."), ("/home/me", "~")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf_abcdefghijklmnop", "hf_[redacted]"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer [redacted]"),
        ("vllm serve m --api-key sekrit --port 1", "vllm serve m --api-key [redacted] --port 1"),
        ("--hf-token sekrit", "--hf-token [redacted]"),
        ("/home/mercury/x is not /home/me", "/home/[user]/x is not ~"),
        ("--api-key=sekrit", "--api-key=[redacted]"),
        ("HF_TOKEN=abc VLLM_API_KEY=x y", "HF_TOKEN=[redacted] VLLM_API_KEY=[redacted] y"),
        ("http://user:pass@proxy:3128", "http://user:[redacted]@proxy:3128"),
        ("/home/me/work/checkout/.venv/bin/python", "./.venv/bin/python"),
        ("/home/me/.cache/x", "~/.cache/x"),
        ("/home/somebody/AI/Models", "/home/[user]/AI/Models"),
        ("turboquant_attn.py:747 stays", "turboquant_attn.py:747 stays"),
    ],
)
def test_secrets_and_private_paths_go(text: str, expected: str) -> None:
    assert REDACTOR.text(text) == expected


def test_a_key_that_is_a_word_of_its_own() -> None:
    argv = ["vllm", "serve", "m", "--api-key", "sekrit", "--hf-token", "other", "--port", "1"]
    assert REDACTOR.deep(argv) == [*argv[:4], "[redacted]", "--hf-token", "[redacted]", "--port", "1"]


def test_everything_in_a_structure() -> None:
    assert REDACTOR.deep({"a": ["/home/me/x", 1, None], "b": ("hf_abcdefghijkl",)}) == {
        "a": ["~/x", 1, None],
        "b": ["hf_[redacted]"],
    }
