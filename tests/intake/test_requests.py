"""Prompt sizes, their order, and tried workarounds, from the words of an issue."""

from __future__ import annotations

from typing import Any

import pytest

from tests.intake.texts import SERVE, checked, drafted
from vllm_repro.scenario.workload import requests_of


def workload(text: str) -> list[str]:
    return [str(step) for step in checked(drafted(f"{SERVE}\n\n{text}")).workload]


def named(*sizes: int) -> list[str]:
    return [f"request {at} of {size} tokens" for at, size in enumerate(sizes, 1)]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("The first request has a prompt of 20,000 tokens and succeeds. The second request (6k tokens) crashes.", (20000, 6000)),
        ("- Request S0 (≈90k tokens): succeeds\n- Request S1 (≈90k tokens): 500\n\nEach ~90k-token prompt fills the pool.", (90000, 90000)),
        ("It needs a ~1.3K-token prompt. Later: the same 1,304-token prompt again.", (1304,)),
        ("Send two requests of 3,000 tokens each.", (3000, 3000)),
        ("Prompts longer than 7593 tokens kill it.", (7594,)),
        ("Requests with more than 8k input tokens die.", (8001,)),
        ("Send 2 requests with 20k-token prompts and 1k-token outputs.", (20000, 20000)),
        ("A 9,000-token prompt dies. Lowering the prompt to 800 tokens makes it stable.", (9000,)),
        ("A prompt of 4k tokens works, one with 9,000 input tokens dies.", ()),
        ("GPU KV cache size: 145,274 tokens. Throughput 900 tokens/s. The input exceeds max_num_batched_tokens of 2048 tokens.", ()),
        ("It resumed the request with 3497 prompt tokens after the first 4096 prompt tokens were computed.", ()),
    ],
)  # fmt: skip
def test_sizes_in_prose(text: str, sizes: tuple[int, ...]) -> None:
    assert workload(text) == (named(*sizes) if sizes else ["chat/completions of 100 tokens"])


def test_requests_at_once() -> None:
    assert workload("The client sends 3 concurrent requests of 500 tokens each.") == [
        " beside ".join(named(500, 500, 500))
    ]
    bench = (
        "```\nvllm bench serve --random-input-len 700 --random-output-len 20 --max-concurrency"
        " 2\n```"
    )
    assert workload(bench) == [" beside ".join(named(700, 700))]
    steps: Any = checked(drafted(f"{SERVE}\n\n{bench}")).workload
    assert all(request.max_tokens == 20 for request in requests_of(steps))


def test_requests_as_sent() -> None:
    body = '{"model":"m","prompt":"a \\u0027b\\u0027","max_tokens":5,"logprobs":2}'
    curl = f"```\n$ time curl -s http://h:8000/v1/completions -d '{body}'\n```"
    steps: Any = checked(drafted(f"{SERVE}\n\n{curl}\n\n{curl}")).workload
    (step,) = steps
    assert step.endpoint == "/v1/completions"
    assert step.fields == {"prompt": "a 'b'", "max_tokens": 5, "logprobs": 2}
    client = (
        '```python\nclient.chat.completions.create(model=m, messages=[{"role": "user", "content":'
        ' "hi"}], max_tokens=4)\n```'
    )
    assert "messages" in workload(client)[0]


@pytest.mark.parametrize(
    "text",
    [
        "```\nvllm bench serve --random-input-len 0\n```",
        "```\nprompt_token_ids_len=0 in SchedulerOutput(\n```",
        """```\ncurl http://h/v1/completions -d '{"prompt": "<0 tokens of A>"}'\n```""",
    ],
)
def test_no_request_has_a_prompt_of_0_tokens(text: str) -> None:
    steps: Any = checked(drafted(f"{SERVE}\n\n{text}")).workload
    assert all(step.prompt or step.fields for step in steps)


def test_a_prompt_that_does_not_fit_is_left_out() -> None:
    made = drafted(f"{SERVE} --max-model-len 1000\n\nA prompt of 5000 tokens kills it.")
    assert [str(step) for step in checked(made).workload] == ["chat/completions of 100 tokens"]
    assert any("exceeds --max-model-len 1000" in guess for guess in made.guesses)


def test_the_trigger_follows_from_the_sizes() -> None:
    def trigger(text: str) -> str:
        return next(
            line.strip()
            for line in drafted(text).text.splitlines()
            if line.strip().startswith("trigger=")
        )

    assert trigger(f"{SERVE}\n\nA prompt of 5000 tokens.") == "trigger=chunked_prefill(chunks=2),"
    assert trigger(f"{SERVE}\n\nA prompt of 4096 tokens.") == "trigger=prefill_over(4095),"
    assert (
        trigger("vllm serve a/b\n\nA prompt of 50 tokens.")
        == "trigger=chunked_prefill(chunks=2) | prefill_over(49),"
    )


TRIED = [
    ("With --enforce-eager it works.", {"with --enforce-eager": "lives"}),
    ("--enforce-eager does not help.", {"with --enforce-eager": "dies"}),
    ("With --enforce-eager it works, with --max-num-seqs 8 it still crashes.",
     {"with --enforce-eager": "lives", "with --max-num-seqs 8": "dies"}),
    ("Both `--enforce-eager` or `--max-num-seqs 8` avoids it: no crash.",
     {"with --enforce-eager": "lives", "with --max-num-seqs 8": "lives"}),
    ("Tried `--enforce-eager`: same.", {"with --enforce-eager": "dies"}),
    ("Removing `--kv-cache-dtype` avoids the crash.", {"without --kv-cache-dtype": "lives"}),
    ("It is fine without speculative decoding.", {"without --speculative-config": "lives"}),
    ("- no cache (dropping `--kv-cache-dtype`) → fine", {"without --kv-cache-dtype": "lives"}),
    ("It works with --enforce-eager in 0.22.1.", {}),
    ("Disabling prefix caching resolves it.", {"with --no-enable-prefix-caching": "lives"}),
    ("| `--no-async-scheduling` | works |", {"with --no-async-scheduling": "lives"}),
    # unclear, not tried, or no change of the command
    ("With --enforce-eager it works sometimes, still crashes at night.", {}),
    ("Does it work with --enforce-eager?", {}),
    ("Please try --enforce-eager, it works for others.", {}),
    ("It works after --max-num-batched-tokens was raised.", {}),
    ("It works with --max-num-batched-tokens 4096.", {}),
    ("Raising --max-num-seqs and adding --enforce-eager works.", {}),
    ("Removing --pipeline-parallel-size works.", {}),
]  # fmt: skip


@pytest.mark.parametrize(("said", "arms"), TRIED, ids=[said for said, _ in TRIED])
def test_a_tried_workaround_with_a_clear_result_is_an_arm(said: str, arms: dict[str, str]) -> None:
    command = f'{SERVE} --kv-cache-dtype fp8 --speculative-config \'{{"method":"mtp"}}\''
    made = drafted(f"{command}\n\n{said}")
    found = checked(made).arms
    assert {" and ".join(map(str, arm.edits)): str(arm.expected) for arm in found[1:]} == arms
    assert all(said in made.text for _ in found[1:])


def test_an_unclear_result_is_quoted() -> None:
    said = "With --enforce-eager it works sometimes, still crashes at night."
    assert any(said in guess for guess in drafted(f"{SERVE}\n\n{said}").guesses)
