"""The requests of `run --outputs`: each greedy prompt of a workload alone, and all of them at once.

Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_repro.scenario.workload import Request
from vllm_repro.verdict.output import Probe

MOST_PROMPTS = 16
"""Prompts of one workload that are sent alone."""

_LEAST_BURST = 4
"""Fewest pairs of requests in a burst: of fewer, the first may be answered before others arrive."""

_HOW = (
    "model",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "cache_salt",
)
"""Fields that do not decide a greedy answer. A repeat leaves out all but the first, `model`."""

_CHANGES_LOGITS = (
    "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
    "allowed_token_ids", "bad_words", "response_format", "structured_outputs", "tools",
)  # fmt: skip
"""Fields that choose another token than the best one.

The log probabilities that vLLM returns are those before them.
"""


@dataclass(frozen=True)
class Greedy:
    """A request of the workload, sent at temperature 0, whose answer can be repeated.

    Its `prompt` is not a text: it is a hash of the fields that decide the answer, in 16 hex digits.
    """

    name: str
    endpoint: str
    body: Mapping[str, Any]
    # hash of endpoint and all fields that decide the answer: equal for equal requests
    prompt: str

    def again(self, salt: str) -> dict[str, Any]:
        """Return the body to repeat the request: not streamed, with log probabilities.

        salt: its `cache_salt`. The request reuses only prefix-cache blocks of the same salt.
        """
        body = {name: value for name, value in self.body.items() if name not in _HOW[1:]}
        body |= {"return_token_ids": True, "cache_salt": salt}
        return body | (
            {"logprobs": True, "top_logprobs": 2} if "messages" in body else {"logprobs": 2}
        )


Repeat = tuple[Probe, Greedy, dict[str, Any]]
"""Kind of answer, request to repeat, and body."""


def greedy(request: Request, body: Mapping[str, Any]) -> Greedy | None:
    """Return the request as `Greedy` if an engine must repeat its answer; else None.

    It must if one completion or chat prompt gets one answer, and `body` has temperature 0 and no
    field that changes the choice of tokens.
    """
    single = request.one_prompt and body.get("n", 1) == 1 and not body.get("use_beam_search")
    if not single or any(name in body for name in _CHANGES_LOGITS):
        return None
    if body.get("temperature") != 0 or not request.endpoint.endswith("/completions"):
        return None
    decides = {name: value for name, value in body.items() if name not in _HOW}
    text = json.dumps([request.endpoint, decides], sort_keys=True)
    return Greedy(
        request.label, request.endpoint, body, hashlib.sha256(text.encode()).hexdigest()[:16]
    )


def alone(greedy: Greedy) -> list[Repeat]:
    """Return three repeats of a request, to send one after the other with no other in flight.

    The second and third find the prompt's blocks in the prefix cache.
    """
    return [
        (probe, greedy, greedy.again(_salt("alone", greedy)))
        for probe in (Probe.ALONE, Probe.CACHED, Probe.CACHED)
    ]


def burst(prompts: Sequence[Greedy]) -> list[Repeat]:
    """Return repeats of all prompts, to send at once after those of `alone`; at least eight.

    Each prompt comes in pairs: one misses the prefix cache, one finds the blocks that `alone` left.
    Empty without prompts.
    """
    copies = -(-_LEAST_BURST // len(prompts)) if prompts else 0
    return [
        (probe, greedy, greedy.again(_salt(salt, greedy)))
        for copy in range(copies)
        for greedy in prompts
        for probe, salt in ((Probe.BURST, f"burst {copy}"), (Probe.BURST_CACHED, "alone"))
    ]


def _salt(purpose: str, greedy: Greedy) -> str:
    """Return a `cache_salt` for a purpose and prompt; only equal salts share cached blocks."""
    return f"{purpose} {greedy.prompt}"
