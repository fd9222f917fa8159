"""Requests that a trial sends: their prompts, bodies and counts."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.core.running.test_trial import ARM, LAUNCH, concluded, journaled, tried
from tests.fake_vllm import COMPLETION, METRICS, Exchange, answering, keeping
from vllm_repro.scenario.workload import chat, completion, conversation, request, sized, together
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.trigger.conditions import answered, left_waiting
from vllm_repro.verdict.outcome import Outcome

pytestmark = pytest.mark.usefixtures("short_waits")


def tokenize(exchange: Exchange) -> None:
    """Count the words of a chat, 7 for each tool and 5 for each option of its template."""
    body = exchange.body
    words = sum(len(str(message["content"]).split()) for message in body["messages"])
    extra = 7 * len(body.get("tools", ())) + 5 * len(body.get("chat_template_kwargs", ()))
    exchange.answer(200, {"count": words + extra})


def test_a_chat_is_counted_with_its_tools_and_template(tmp_path: Path) -> None:
    """Without them a prompt would cross a boundary that it should not reach."""
    sent: list[dict[str, Any]] = []
    request = chat(
        prompt=60,
        stream=False,
        tools=[{"type": "function"}],
        chat_template_kwargs={"enable_thinking": True},
    )
    paths = {"/tokenize": tokenize, "/v1/chat/completions": keeping(sent)}
    tried(tmp_path, paths, arm=replace(ARM, workload=(request,)))
    assert len(sent[0]["messages"][0]["content"].split()) == 60 - 7 - 5


def test_a_conversation_grows_by_replies_and_results_of_its_tool(tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    turns = conversation(first=50, adds=[30, 30], tools=[tool], stream=False)
    paths = {"/tokenize": tokenize, "/v1/chat/completions": keeping(sent)}
    _, trial = tried(tmp_path, paths, arm=replace(ARM, workload=(turns,)))
    roles = [message["role"] for message in sent[2]["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]
    calls = [said["tool_calls"][0] for said in sent[2]["messages"] if said["role"] == "assistant"]
    results = [said["tool_call_id"] for said in sent[2]["messages"] if said["role"] == "tool"]
    assert [call["id"] for call in calls] == results == ["call_1", "call_2"]
    assert calls[0]["function"] == {"name": "look", "arguments": "{}"}
    assert sent[2]["messages"][:3] == sent[1]["messages"]
    assert [asked.repeats for asked in trial.seen.requests] == [0, 50, 80]


@pytest.mark.parametrize(("kind", "repeats"), [(ServerKind.LAB, 32), (ServerKind.PROCESS, 96)])
def test_a_shared_head_has_the_size_that_was_sent(
    tmp_path: Path, kind: ServerKind, repeats: int
) -> None:
    def tokenize(exchange: Exchange) -> None:
        words = [hash(word) for word in exchange.body["prompt"].split()]
        exchange.answer(200, {"count": len(words), "tokens": words})

    request = completion(prompt=128, shared=sized(96, lab=32))
    arm = replace(ARM, workload=(request, request))
    _, trial = tried(tmp_path, {"/tokenize": tokenize}, arm=arm, launch=replace(LAUNCH, kind=kind))
    assert [asked.repeats for asked in trial.seen.requests] == [0, repeats]
    sent = {entry["body"]["prompt"] for entry in journaled(tmp_path, "request-sent")}
    assert sent == {f"(128 tokens, the first {repeats} shared)"}


def test_a_prompt_of_ids_is_sent_as_it_is_and_counted_exactly(tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    uncounted = answering(200, {"choices": COMPLETION["choices"]})
    stated: dict[str, Any] = {
        "temperature": 0.5,
        "seed": 0,
        "stop": [],
        "suffix": "",
        "echo": False,
    }
    first, second = (
        completion(prompt=[7] * 64),
        completion(prompt=[*[7] * 48, 8], name="second", **stated),
    )
    paths = {"/v1/completions": keeping(sent, uncounted), "/tokenize": answering(500)}
    _, trial = tried(tmp_path, paths, arm=replace(ARM, workload=(first, second)))
    assert sent[1].items() >= {**stated, "prompt": [*[7] * 48, 8]}.items()
    asked = trial.seen.requests
    counts = [(request.prompt_tokens, request.counted_by, request.repeats) for request in asked]
    assert counts == [(64, "ids", 0), (49, "ids", 48)]
    # What the scenario states can be the evidence of a trigger.
    assert asked[1].fields == {**stated, "stop": ()}
    bodies = {entry["name"]: entry["body"] for entry in journaled(tmp_path, "request-sent")}
    assert bodies["second"]["prompt"] == [*[7] * 48, 8]


EMBEDDED = {
    "object": "list",
    "data": [{"embedding": [0.5]}],
    "usage": {"prompt_tokens": 3, "total_tokens": 3},
}


def test_a_server_without_completions_can_be_asked(tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []
    paths = dict.fromkeys(("/v1/embeddings", "/pooling"), keeping(sent, answering(200, EMBEDDED)))
    paths["/v1/completions"] = answering(404, {"detail": "Not Found"})
    body = {"input": [1, 2, 3], "dimensions": 0}
    workload = (
        request(path="/v1/embeddings", body=body, name="one"),
        request(
            path="/v1/embeddings", body={"model": "adapter", "input": [[1], [2, 3]]}, name="two"
        ),
    )
    conclusion, trial = tried(
        tmp_path, paths, arm=replace(ARM, workload=workload, trigger=answered("one", 200))
    )
    assert (conclusion.outcome, conclusion.sent, conclusion.ok) == (Outcome.CLEAN, 2, 2)
    assert (sent[0], sent[1]["model"]) == ({"model": "tiny", **body}, "adapter")
    assert sent[2]["input"] == "hello", "the canary"
    # Two prompts are no prompt of their sum.
    assert [asked.prompt_tokens for asked in trial.seen.requests] == [3, None]
    bodies = [body, {"model": "adapter", "input": [[1], [2, 3]]}]
    assert [entry["body"] for entry in journaled(tmp_path, "request-sent")] == bodies


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, Outcome.UNTRIGGERED), (400, Outcome.CLEAN), (500, Outcome.WRONG_OUTPUT)],
)
def test_the_failure_of_any_request_counts(tmp_path: Path, status: int, outcome: Outcome) -> None:
    paths = {"/score": answering(status, {} if status == 200 else {"error": "no"})}
    scored = request(path="/score", body={"text_1": "a", "text_2": "b"}, name="score")
    arm = replace(ARM, workload=(scored,), trigger=answered("score", 400))
    assert concluded(tmp_path, paths, arm=arm).outcome is outcome


@pytest.mark.parametrize(("hits", "cached"), [(96, 96), (0, 0), (128, None), (5000, None)])
def test_hits_of_other_clients_are_not_those_of_a_request(
    tmp_path: Path, hits: int, cached: int | None
) -> None:
    answered: list[dict[str, Any]] = []
    counts = {**COMPLETION, "usage": {"prompt_tokens": 128, "completion_tokens": 1}}

    def metrics(exchange: Exchange) -> None:
        counted = hits * bool(answered)
        exchange.answer(200, f"{METRICS}vllm:prefix_cache_hits_total {counted}\n", "text/plain")

    paths = {"/v1/completions": keeping(answered, answering(200, counts)), "/metrics": metrics}
    _, trial = tried(tmp_path, paths, arm=replace(ARM, workload=(completion(prompt="hello"),)))
    assert trial.seen.requests[0].cached_tokens == cached


def test_a_count_below_nothing_is_no_count(tmp_path: Path) -> None:
    usage = {
        "prompt_tokens": 128,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": -1},
    }
    paths = {"/v1/completions": answering(200, {**COMPLETION, "usage": usage})}
    assert tried(tmp_path, paths)[1].seen.requests[0].cached_tokens is None


@pytest.mark.parametrize(
    ("takes", "waiting", "outcome"),
    [(0.6, 1, Outcome.CLEAN), (0.6, 0, Outcome.UNTRIGGERED), (0.0, 1, Outcome.UNTRIGGERED)],
)
def test_a_client_may_leave_before_its_answer(
    tmp_path: Path, takes: float, waiting: int, outcome: Outcome
) -> None:
    """It is no server failure, and a trigger only if the server counted a waiting request then."""
    came: list[dict[str, Any]] = []

    def completions(exchange: Exchange) -> None:
        time.sleep(takes * (exchange.body["prompt"] == "short"))
        exchange.answer(200, COMPLETION)

    counted = f"{METRICS}vllm:num_requests_waiting {waiting}\n"
    paths = {
        "/v1/completions": keeping(came, completions),
        "/metrics": answering(200, counted, "text/plain"),
    }
    leaving = completion(name="leaves", prompt="short", starts_after=0.2, leaves_after=0.3)
    workload = (together(leaving, completion(name="busy", prompt="long")),)
    conclusion, _ = tried(
        tmp_path, paths, arm=replace(ARM, workload=workload, trigger=left_waiting("leaves"))
    )
    assert (conclusion.outcome, conclusion.sent - conclusion.ok) == (outcome, 0)
    assert [body["prompt"] for body in came[:2]] == ["long", "short"]
    left = [entry["waiting"] for entry in journaled(tmp_path, "client-left")]
    assert left == ([waiting] if takes else [])
