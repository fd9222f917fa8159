"""The requests of `run --outputs`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.core.running.test_trial import SCENARIO, tried
from tests.fake_vllm import Exchange
from vllm_repro.journal.journal import read
from vllm_repro.running.alone import Greedy, alone, burst, greedy
from vllm_repro.running.state import MeasureOptions
from vllm_repro.scenario.workload import Request, chat, completion, request
from vllm_repro.trigger.conditions import answered
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.output import Probe

pytestmark = pytest.mark.usefixtures("short_waits")

SENT = {
    "model": "tiny",
    "prompt": [7, 8],
    "max_tokens": 2,
    "temperature": 0,
    "stream": True,
    "stream_options": {},
}


@pytest.mark.parametrize(
    ("sent", "changes", "repeatable"),
    [
        (completion(prompt=[7, 8]), {}, True),
        (chat(prompt=5), {"prompt": None, "messages": []}, True),
        (completion(prompt=[7, 8]), {"temperature": 1}, False),
        (completion(prompt=[7, 8]), {"n": 2}, False),
        (completion(prompt=[7, 8]), {"logit_bias": {"7": 1}}, False),
        (request(path="/v1/embeddings", body={"input": [7]}), {}, False),
        (request(path="/v1/completions", body={"prompt": ["a", "b"], "temperature": 0}), {}, False),
    ],
)
def test_requests_whose_answer_an_engine_must_repeat(
    sent: Request, changes: dict[str, Any], repeatable: bool
) -> None:
    assert (greedy(sent, SENT | changes) is not None) is repeatable


def found(**changes: Any) -> Greedy:
    one = greedy(completion(prompt=[7, 8], name="one"), SENT | changes)
    assert one is not None
    return one


def test_the_prompt_is_what_decides_the_answer() -> None:
    assert found().prompt == found(stream=False, cache_salt="x", return_token_ids=True).prompt
    assert (
        len(
            {
                found(**change).prompt
                for change in ({}, {"max_tokens": 3}, {"prompt": [7, 9]}, {"seed": 1})
            }
        )
        == 4
    )


def test_a_burst_sends_prompts_with_and_without_cached_blocks() -> None:
    one, other = found(), found(prompt=[7, 9])
    salts = [(probe, sent.prompt, body["cache_salt"]) for probe, sent, body in burst([one, other])]
    cold = [
        (Probe.BURST, each.prompt, f"burst {copy} {each.prompt}")
        for copy in range(2)
        for each in (one, other)
    ]
    assert sorted(salts) == sorted(
        cold
        + [(Probe.BURST_CACHED, each.prompt, f"alone {each.prompt}") for each in (one, other)] * 2
    )
    assert [(probe, body["cache_salt"]) for probe, _, body in alone(one)] == [
        (probe, f"alone {one.prompt}") for probe in (Probe.ALONE, Probe.CACHED, Probe.CACHED)
    ]
    assert (len(burst([one])), burst([])) == (8, [])
    body = one.again("alone")
    assert {name: body[name] for name in ("logprobs", "return_token_ids", "max_tokens", "model")} == {
        "logprobs": 2, "return_token_ids": True, "max_tokens": 2, "model": "tiny",
    }  # fmt: skip
    assert "stream" not in body
    talk = greedy(chat(prompt=5), {"messages": [], "temperature": 0})
    assert talk is not None
    assert talk.again("alone")["top_logprobs"] == 2


def engine(wrong: str) -> Any:
    """Answer token 1, or 2 to the requests named: those of the workload, of a burst, or all of one prompt."""

    def completions(exchange: Exchange) -> None:
        body = exchange.body
        salt = body.get("cache_salt", "")
        where = salt.rpartition(" ")[0] or "workload"
        other = bool(wrong) and wrong == where and body["prompt"] == [7, 8]
        choice: dict[str, Any] = {
            "index": 0,
            "text": "x",
            "finish_reason": "length",
            "token_ids": [2 if other else 1],
        }
        if body.get("logprobs"):
            choice["logprobs"] = {"top_logprobs": [{"a": -0.1, "b": -3.0}]}
        exchange.answer(
            200, {"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}
        )

    return completions


@pytest.mark.parametrize(
    ("wrong", "outcome", "why"),
    [
        ("", Outcome.CLEAN, ""),
        (
            "workload",
            Outcome.WRONG_OUTPUT,
            "first was answered differently in the workload and alone",
        ),
        (
            "burst 1",
            Outcome.WRONG_OUTPUT,
            "first was answered differently beside others and alone after 0 tokens: token 2",
        ),
        ("alone", Outcome.WRONG_OUTPUT, "first was answered differently in the workload and alone"),
    ],
)
def test_each_greedy_prompt_is_sent_alone_and_with_the_others(
    tmp_path: Path, wrong: str, outcome: Outcome, why: str
) -> None:
    steps = (
        completion(prompt=[7, 8], max_tokens=1, name="first"),
        completion(prompt=[7, 9], max_tokens=1, name="other"),
    )
    scenario = replace(SCENARIO, trigger=answered("other", 200))
    conclusion, _ = tried(
        tmp_path,
        {"/v1/completions": engine(wrong)},
        scenario=scenario,
        arm=replace(SCENARIO.arms[0], workload=steps),
        measure=MeasureOptions(outputs=True),
    )
    assert (conclusion.outcome, why in conclusion.why) == (outcome, True), conclusion.why
    said = [entry["said"] for entry in read(tmp_path / "journal.jsonl").of("output")]
    probes = [one["probe"] for one in said]
    assert {probe: probes.count(probe) for probe in probes} == {
        Probe.WORKLOAD: 2, Probe.ALONE: 2, Probe.CACHED: 4, Probe.BURST: 4, Probe.BURST_CACHED: 4,
    }  # fmt: skip
    assert (json.dumps(said[2]["margins"]), conclusion.sent) == ("[2.9]", 2)


def test_nothing_is_repeated_unasked(tmp_path: Path) -> None:
    tried(tmp_path, {"/v1/completions": engine("")}, scenario=SCENARIO)
    assert not list(read(tmp_path / "journal.jsonl").of("output"))
