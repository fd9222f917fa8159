"""Case of a test of vLLM's scheduler alone, from a scenario's server and workload. Pure.

It has more than a case of the search: clients that come and leave after seconds, transfers of KV
blocks, parts of streaming sessions, and resets of the prefix cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from vllm_repro.command.command import ServeCommand
from vllm_repro.errors import UsageError
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.scenario.workload import Pause, Request, Rest, Size, requests_of, resolve
from vllm_repro_explore.case import Case, Setup
from vllm_repro_explore.scenario_setup import server_of, transfer_of

_MORE_FLAGS = ("--speculative-config", "--mamba-cache-mode", "--hf-overrides")
_FIELDS = (
    "ignore_eos",
    "kv_transfer_params",
    "logprobs",
    "max_tokens",
    "priority",
    "return_token_ids",
)
"""Body fields of a completion that the test needs, or that change no decision of the scheduler."""
_KINDS = {"full_attention": "full", "sliding_attention": "sliding", "linear_attention": "mamba"}
"""Layer kinds of the search for those of a model's `layer_types`."""


def scheduler_case(scenario: Scenario, arm: Arm) -> dict[str, Any]:
    """Return an arm's server and workload as `Case.as_json` does, with what only the test plays.

    Raises `UsageError` if the scheduler alone does not run the server or a request.
    """
    command = scenario.command_in_lab(arm)
    waves = [
        [_played(scenario, request, command) for request in requests_of((step,))]
        for step in scenario.workload_of(arm)
        if not isinstance(step, Pause | Rest)  # each wave follows the answers to the one before
    ]
    transfer, setup = transfer_of(command), _server(scenario, command)
    return Case.numbered(setup, (), 1).as_json() | {
        "waves": waves,
        "transfer": transfer,
        "seconds": True,  # not steps
        "mamba_mode": command.get("--mamba-cache-mode") or "align",
        # wrong answers, not a crash or a hang, are the bug
        "content": scenario.output is not None,
    }


def _server(scenario: Scenario, command: ServeCommand) -> Setup:
    """Return the server flags of a test. Raises `UsageError` if it cannot have such a server."""
    if scenario.lab is None:
        raise UsageError(f"{scenario.id} has no lab settings, which give the scheduler its server")
    setup = server_of(scenario, scenario.lab, command, _MORE_FLAGS)
    overrides = json.loads(command.get("--hf-overrides") or "{}")
    if others := sorted(overrides.keys() - {"layer_types"}):
        raise UsageError(
            f"{scenario.id} overrides {', '.join(others)} of its model, which the test does not"
        )
    types = overrides.get("layer_types", ())
    drafts = json.loads(command.get("--speculative-config") or "{}")
    setup = replace(
        setup,
        layers=tuple(_KINDS.get(name, name) for name in types) or setup.layers,
        draft=int(drafts.get("num_speculative_tokens", 0)),
    )
    if unknown := sorted({*setup.layers} - {*_KINDS.values()}):
        layers = ", ".join(unknown)
        raise UsageError(
            f"{scenario.id} has {layers} layers, whose blocks the test does not make up"
        )
    if drafts and drafts.get("method") != "ngram":
        raise UsageError(
            f"{scenario.id} has drafts of a model, and the test makes up n-grams alone"
        )
    if scenario.output is not None and (setup.asynchronous or drafts):
        raise UsageError(
            f"{scenario.id} shows wrong answers, and the test reads blocks only without drafts and"
            " asynchronous scheduling"
        )
    return setup


def _played(scenario: Scenario, request: Request, command: ServeCommand) -> dict[str, Any]:
    """Return a request as keyword arguments of the test; what it lacks has its default."""
    url, fields = urlsplit(request.endpoint), request.fields
    times = {"after": request.starts_after, "abort": request.leaves_after}
    played: dict[str, Any] = {name: seconds for name, seconds in times.items() if seconds}
    if url.path == "/reset_prefix_cache":
        return played | {"reset": {name: word == "true" for name, word in parse_qsl(url.query)}}
    if url.path == "/segments":
        (second, first), *parts = _parts(fields["segments"])
        begins = {"after": played.get("after", 0) + second} if second else {}
        size = {"prompt": first, "answer": fields["max_tokens"], "parts": parts}
        stop = fields.get("stop_token_ids", ())  # a bias makes it each token of the answer
        return played | begins | size | ({"stop": stop[0]} if stop else {})
    if unread := sorted(fields.keys() - {*_FIELDS}):
        raise UsageError(
            f"{scenario.id} sends {', '.join(unread)}, which the scheduler alone does not read"
        )
    if not isinstance(request.prompt, int | Size):
        raise UsageError(f"{scenario.id} does not state the length of the prompt {request.label!r}")
    sizes = (request.prompt, request.max_tokens, request.shared)
    prompt, answer, shared = (resolve(size, command, in_lab=True) for size in sizes)
    more = {"priority": "priority", "transfer": "kv_transfer_params"}
    return (
        {"prompt": prompt, "answer": answer, "shared": shared}
        | played
        | {name: fields[field] for name, field in more.items() if field in fields}
    )


def _parts(segments: Sequence[Any]) -> Iterator[tuple[float, int]]:
    """Yield (second, tokens) of each part of a session; no tokens end it."""
    waits = [0 if isinstance(segment, Sequence) else segment for segment in segments]
    for second, segment in zip(accumulate(waits), segments, strict=True):
        if isinstance(segment, Sequence):
            yield second, len(segment)
    yield sum(waits), 0
