from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.core.running.test_trial import FATAL, LAUNCH, SCENARIO, tokenize_prompt, tried
from tests.fake_vllm import COMPLETION, Exchange
from vllm_repro.host import machine
from vllm_repro.host.machine import GpuUse
from vllm_repro.journal.journal import Recording, read
from vllm_repro.report.answers import answer_word
from vllm_repro.running.alone import Greedy, alone, burst, greedy
from vllm_repro.running.assess import Conclusion
from vllm_repro.running.measure import SelfCheck
from vllm_repro.running.state import MeasureOptions, Trial
from vllm_repro.running.workload import WorkloadRunner
from vllm_repro.scenario.workload import Request, chat, completion, request
from vllm_repro.trigger.conditions import answered
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.output import Checks, Probe, ServedWeights
from vllm_repro.verdict.throughput import ClientCost, Load, Round

LOADS = (Load(prompt=12, output=4, concurrency=[1, 3], baseline="reported"),)
ALONE = (replace(LOADS[0], concurrency=[1]),)
ROUNDS = 2 + 5


@pytest.fixture(autouse=True)
def patient(
    monkeypatch: pytest.MonkeyPatch,
    short_waits: None,  # noqa: ARG001  # a fixture, used for its effect
) -> None:
    """Let all rounds count, and two warm up.

    Rounds of this server take milliseconds, and it runs in the client's process.
    """
    monkeypatch.setattr("vllm_repro.running.measure.STEADY", 1.0)
    monkeypatch.setattr("vllm_repro.verdict.throughput.MOST_CPU", float("inf"))
    monkeypatch.setattr("vllm_repro.verdict.throughput.MOST_OFF", float("inf"))


@dataclass
class Engine:
    """Server that streams answers and counts tokens as vLLM does.

    `wrong`: its answer to a measured request.
    """

    wrong: Callable[[Exchange, int], bool] = lambda *_: False
    asked: list[dict[str, Any]] = field(default_factory=list)
    prompt: int = 0
    output: int = 0
    counts_double: bool = False
    token: Callable[[int], int] = lambda number: number

    def completions(self, exchange: Exchange) -> None:
        body = exchange.body
        if not body.get("stream"):
            exchange.answer(200, COMPLETION)
            return
        self.asked.append(body)
        if self.wrong(exchange, len(self.asked)):
            return
        prompt, output = len(body["prompt"]), body["max_tokens"]
        self.prompt += prompt
        self.output += output * (2 if self.counts_double else 1)
        choices = [
            {"index": 0, "text": f"t{i}", "token_ids": [self.token(i)], "finish_reason": None}
            for i in range(output)
        ]
        choices[-1]["finish_reason"] = "length"
        usage = {"prompt_tokens": prompt, "completion_tokens": output}
        events = [*({"choices": [choice]} for choice in choices), {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        exchange.answer(200, text, "text/event-stream")

    def metrics(self, exchange: Exchange) -> None:
        exchange.answer(
            200,
            f"process_start_time_seconds 1000.0\nvllm:prompt_tokens_total {100 + self.prompt}\n"
            f"vllm:generation_tokens_total {100 + self.output}\n"
            f"vllm:num_preemptions_total {len(self.asked)}\nvllm:kv_cache_usage_perc 0.25\n",
            "text/plain",
        )


def concluded(folder: Path, engine: Engine, **changes: Any) -> tuple[Conclusion, Recording, Trial]:
    paths = {
        "/v1/completions": engine.completions,
        "/metrics": engine.metrics,
        "/tokenize": tokenize_prompt,
    }
    loads, output = changes.pop("throughput", ()), changes.pop("output", None)
    changes = {"measure": MeasureOptions(throughput=bool(loads)), **changes}
    scenario = replace(changes.pop("scenario", SCENARIO), throughput=loads, output=output)
    conclusion, trial = tried(folder, paths, scenario=scenario, **changes)
    return conclusion, read(folder / "journal.jsonl"), trial


def test_each_load_is_measured_in_rounds(tmp_path: Path) -> None:
    engine = Engine()
    conclusion, journal, _ = concluded(tmp_path, engine, throughput=LOADS)
    assert conclusion.outcome is Outcome.CLEAN
    assert [entry["point"]["concurrency"] for entry in journal.of("throughput-point")] == [1, 3]
    for entry in journal.of("throughput-point"):
        requests = ROUNDS * entry["point"]["concurrency"]
        assert (
            entry["usage"] == entry["counted"] == {"prompt": 12 * requests, "output": 4 * requests}
        )
    assert len(list(journal.of("throughput-round"))) == 2 * 5
    # The workload is what the trigger is about, and what the trial's requests are.
    assert conclusion.sent == 2
    assert len(conclusion.trigger.evidence) <= 2
    # Requests are greedy, salted and of a fixed length.
    assert len(engine.asked) == ROUNDS * 4
    assert len({tuple(body["prompt"]) for body in engine.asked}) == len(engine.asked)
    assert len({body["prompt"][0] for body in engine.asked}) > len(engine.asked) / 2
    for body in engine.asked:
        assert len(body["prompt"]) == 12
        assert (
            body["max_tokens"],
            body["min_tokens"],
            body["ignore_eos"],
            body["temperature"],
        ) == (4, 4, True, 0)


def test_each_phase_has_the_counts_of_the_server(
    tmp_path: Path,
) -> None:
    _, journal, _ = concluded(tmp_path, Engine(), throughput=LOADS)
    phases = list(journal.of("counters"))
    assert [phase["phase"] for phase in phases] == [
        "workload",
        *(["warm-up"] * 2 + ["rounds"] * 5) * 2,
    ]
    assert phases[0]["counted"]["generation_tokens"] == 0  # this server counts streams alone
    for phase in phases[1:]:
        streams = phase["point"]["concurrency"]
        assert (
            phase["counted"].items()
            >= {
                "prompt_tokens": 12 * streams,
                "generation_tokens": 4 * streams,
                "preemptions": streams,
                "kv_most": 0.25,
                "cache_hits": None,
                "draft_tokens": None,
            }.items()
        )
        within = [
            sent
            for sent in read(tmp_path / "requests.jsonl").of("request")
            if sent["name"] == "throughput"
            and phase["began"] <= sent["sent"] <= sent["ended"] <= phase["ended"]
        ]
        assert len(within) == streams


@pytest.mark.usefixtures("stub_gpus")
def test_the_leased_cards_are_read_beside_a_load_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_repro.running.watch._GPU_POLL", 0.01)
    readings: list[GpuUse | None] = []
    kept_one = threading.Event()

    def gpu_use(gpus: Sequence[str]) -> GpuUse | None:
        # the watch keeps a reading before it asks for the next
        if readings:
            kept_one.set()
        readings.append(machine.gpu_use(gpus))
        return readings[-1]

    monkeypatch.setattr("vllm_repro.running.watch.gpu_use", gpu_use)
    engine = Engine(wrong=lambda *_: not kept_one.wait(60))
    _, journal, _ = concluded(tmp_path, engine, gpus=("1",), throughput=LOADS)
    workload, first, *_ = journal.of("counters")
    assert (workload["phase"], workload["gpus"]) == ("workload", None)
    assert (first["gpus"]["temperature_c"], first["gpus"]["slowed"]) == (41.0, False)


@pytest.mark.parametrize(("late", "rounds"), [(3, 8), (100, 10)])
def test_a_round_in_which_the_client_was_late_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int, rounds: int
) -> None:
    calls = iter(range(1000))
    monkeypatch.setattr(Round, "late", property(lambda _: "late" if next(calls) < late else ""))
    engine = Engine()
    _, journal, _ = concluded(tmp_path, engine, throughput=(replace(LOADS[0], concurrency=[3]),))
    point = next(journal.of("throughput-point"))
    assert point["rounds"] == rounds
    assert (
        point["counted"]
        == point["usage"]
        == {
            "prompt": 36 * (2 + rounds),
            "output": 12 * (2 + rounds),
        }
    )
    assert len({tuple(body["prompt"]) for body in engine.asked}) == len(engine.asked)


@pytest.mark.parametrize(
    ("apart", "warm_ups"), [([0.3, 0.2, 0.04], 4), ([0.3] * 9, 5), ([0.04], 2)]
)
def test_a_load_warms_up_until_it_is_steady(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: list[float], warm_ups: int
) -> None:
    def unsteady(speeds: list[float]) -> float:
        return apart[len(speeds) - 2]

    monkeypatch.setattr("vllm_repro.running.measure.STEADY", 0.05)
    monkeypatch.setattr("vllm_repro.running.measure.unsteady", unsteady)
    _, journal, _ = concluded(tmp_path, Engine(), throughput=(replace(LOADS[0], concurrency=[3]),))
    for point in journal.of("throughput-point"):
        assert (point["warm_ups"], point["rounds"], point["unsteady"]) == (
            warm_ups,
            5,
            apart[warm_ups - 2],
        )
        assert (
            point["counted"]
            == point["usage"]
            == {
                "prompt": 36 * (warm_ups + 5),
                "output": 12 * (warm_ups + 5),
            }
        )
    assert [one["round"] for one in list(journal.of("counters"))[1 : warm_ups + 6]] == [
        *range(1, warm_ups + 1),
        *range(1, 6),
    ]


@pytest.mark.parametrize(("most_s", "rounds"), [(9.5, 5), (5.5, 4), (5.0, 3), (4.0, 3)])
def test_a_limit_in_time_leaves_at_least_three_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_s: float, rounds: int
) -> None:
    """Each request takes a second on the clock of the limit."""
    engine = Engine()
    clock = SimpleNamespace(
        monotonic=lambda: float(len(engine.asked)), perf_counter=perf_counter, process_time=float
    )
    monkeypatch.setattr("vllm_repro.running.measure.time", clock)
    options = MeasureOptions(throughput=True, most_s=most_s)
    _, journal, _ = concluded(tmp_path, engine, throughput=ALONE, measure=options)
    (point,) = journal.of("throughput-point")
    assert (point["warm_ups"], point["rounds"]) == (2, rounds)


def test_a_load_that_takes_too_long_is_left_out(tmp_path: Path) -> None:
    engine, options = Engine(), MeasureOptions(throughput=True, most_s=1e-6)
    conclusion, journal, _ = concluded(tmp_path, engine, throughput=LOADS, measure=options)
    (stopped,) = journal.of("measure-stopped")
    assert "too long for the 0 s of a boot; --throughput has no limit" in stopped["why"]
    assert (conclusion.outcome, len(engine.asked)) == (Outcome.CLEAN, 1)


def test_answers_are_written_when_none_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To write one takes a fraction of a millisecond, in which the others are not read."""
    in_flight: list[int] = []
    write = WorkloadRunner.record_request

    def record(runner: WorkloadRunner, name: str, *rest: Any) -> None:
        if name == "throughput":
            in_flight.append(runner.watch.in_flight)
        write(runner, name, *rest)

    monkeypatch.setattr(WorkloadRunner, "record_request", record)
    concluded(tmp_path, Engine(), throughput=(replace(LOADS[0], concurrency=[8]),))
    assert in_flight == [0] * (ROUNDS * 8)


def test_every_arm_gets_the_same_prompts(tmp_path: Path) -> None:
    def prompts(name: str) -> list[list[int]]:
        (tmp_path / name).mkdir()
        engine, arm = Engine(), replace(SCENARIO.arms[0], name=name)
        scenario = replace(SCENARIO, arms=(arm,))
        concluded(tmp_path / name, engine, scenario=scenario, throughput=ALONE, arm=arm)
        return sorted(body["prompt"] for body in engine.asked)

    assert prompts("a") == prompts("b")


@pytest.mark.parametrize(
    "changes",
    [{"measure": MeasureOptions()}, {"own_server": False}],
    ids=["unasked", "same server"],
)
def test_nothing_is_measured_unasked_or_twice_on_a_server(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    engine = Engine()
    concluded(tmp_path, engine, throughput=LOADS, **changes)
    assert engine.asked == []


def test_an_engine_that_dies_while_it_is_measured_has_died(tmp_path: Path) -> None:
    def wrong(exchange: Exchange, number: int) -> bool:
        if number == ROUNDS + 5:  # in the second round of the second load
            exchange.fake.write(FATAL)
            message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
            exchange.answer(500, {"error": {"message": message, "code": 500}})
        return number >= ROUNDS + 5

    conclusion, journal, trial = concluded(tmp_path, Engine(wrong=wrong), throughput=LOADS)
    assert conclusion.outcome is Outcome.OTHER_CRASH
    assert conclusion.during == "throughput (12 -> 4 tokens, 3 at once)"
    (stopped,) = journal.of("measure-stopped")
    assert "died" in stopped["why"]
    assert [entry["point"]["concurrency"] for entry in journal.of("throughput-point")] == [1]
    assert trial.seen.requests[-1].died


Wrong = Callable[[Exchange, int], bool]


def answers(status: int, body: object, kind: str = "application/json") -> Wrong:
    def wrong(exchange: Exchange, _: int) -> bool:
        exchange.answer(status, body, kind)
        return True

    return wrong


def refuses(status: int) -> Wrong:
    return answers(status, {"error": {"message": "no", "code": status}})


cuts = answers(200, 'data: {"choices": [{"text": "t0"}]}\n\ndata: [DONE]\n\n', "text/event-stream")


def shortens(exchange: Exchange, _: int) -> bool:
    exchange.body["max_tokens"] = 3
    return False


@pytest.mark.parametrize(
    ("wrong", "outcome", "why", "last"),
    [
        # too long for this server
        (refuses(400), Outcome.CLEAN, "a request failed: 400: no", "400"),
        (refuses(500), Outcome.WRONG_OUTPUT, "a request failed: 500: no", "500"),
        (cuts, Outcome.WRONG_OUTPUT, "an answer that is not whole", "200 (cut off)"),
        (shortens, Outcome.CLEAN, "12 -> 4 tokens: 12 -> 3", "200"),
    ],
)
def test_a_load_with_a_wrong_answer_gives_no_figure(
    tmp_path: Path, wrong: Wrong, outcome: Outcome, why: str, last: str
) -> None:
    conclusion, journal, _ = concluded(tmp_path, Engine(wrong=wrong), throughput=LOADS)
    assert conclusion.outcome is outcome
    assert ("without finish_reason" in conclusion.why) is (wrong is cuts)
    (stopped,) = journal.of("measure-stopped")
    assert why in stopped["why"]
    assert not list(journal.of("throughput-point"))
    assert [answer_word(entry) for entry in journal.of("answer")][-1] == last


def test_a_server_that_counts_otherwise_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_repro.running.measure._COUNTED_WITHIN", 0.1)
    _, journal, _ = concluded(tmp_path, Engine(counts_double=True), throughput=LOADS)
    first = next(journal.of("throughput-point"))
    assert first["counted"]["output"] == 2 * first["usage"]["output"]


@pytest.mark.parametrize(
    ("token", "weights", "outcome"),
    [
        (lambda number: number, "", Outcome.CLEAN),
        (lambda _: 7, "", Outcome.WRONG_OUTPUT),
        (lambda _: 7, "--load-format dummy", Outcome.CLEAN),
    ],
)
def test_a_repeated_token_is_wrong_with_real_weights(
    tmp_path: Path, token: Callable[[int], int], weights: str, outcome: Outcome
) -> None:
    engine = Engine(token=token)
    launch = replace(LAUNCH, command=LAUNCH.command.with_flags(weights)) if weights else LAUNCH
    conclusion, journal, _ = concluded(
        tmp_path, engine, output=Checks(longest_run=32, needle=200), launch=launch
    )
    assert conclusion.weights is (ServedWeights.DUMMY if weights else ServedWeights.REAL)
    shown = [entry["said"] for entry in journal.of("output")]
    assert shown[0]["first"] == [token(number) for number in range(64)]
    assert [len(asked["prompt"]) for asked in engine.asked[1:]] == ([] if weights else [200])
    assert [one["probe"] for one in shown[1:]] == ([] if weights else [Probe.NEEDLE])
    if outcome is Outcome.WRONG_OUTPUT:
        assert "one token 64 times in a row" in conclusion.why
    elif not weights:
        outcome = Outcome.WRONG_OUTPUT  # this engine knows no needle
        assert "was not found" in conclusion.why
    assert conclusion.outcome is outcome


@pytest.mark.parametrize(
    ("texts", "outcome"), [("aa", Outcome.CLEAN), ("ab", Outcome.WRONG_OUTPUT)]
)
def test_equal_requests_of_the_workload_are_compared(
    tmp_path: Path, texts: str, outcome: Outcome
) -> None:
    answers = iter(texts)

    def completions(exchange: Exchange) -> None:
        text = "canary" if exchange.body["max_tokens"] == 1 else next(answers)
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        exchange.answer(
            200, {"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 2}}
        )

    steps = [completion(prompt=[7, 8], max_tokens=2, name=name) for name in ("first", "again")]
    scenario = replace(
        SCENARIO, output=Checks(alike=[("first", "again")]), trigger=answered("again", 200)
    )
    arm = replace(SCENARIO.arms[0], workload=tuple(steps))
    conclusion, _ = tried(tmp_path, {"/v1/completions": completions}, scenario=scenario, arm=arm)
    assert conclusion.outcome is outcome
    said = [entry["said"] for entry in read(tmp_path / "journal.jsonl").of("output")]
    assert [(one["name"], one["first"]) for one in said] == [
        ("first", [texts[0]]),
        ("again", [texts[1]]),
    ]
    if outcome is Outcome.WRONG_OUTPUT:
        assert conclusion.why == "the equal requests 'first' and 'again' were answered differently"


def test_a_process_that_does_not_get_to_its_work_notices() -> None:
    async def checked(work: Callable[[], object], *, cut: bool = False) -> ClientCost:
        async with SelfCheck() as check:
            await asyncio.sleep(0.02)
            work()  # in the event loop, which then is late
            if not cut:  # otherwise the round ends before the loop takes its next turn
                await asyncio.sleep(0.02)
        return check.cost

    def spin() -> None:
        ends = time.process_time() + 0.2
        while time.process_time() < ends:
            pass

    assert asyncio.run(checked(lambda: time.sleep(0.2), cut=True)).late_s > 0.15
    slept, spun = asyncio.run(checked(lambda: time.sleep(0.2))), asyncio.run(checked(spin))
    for cost in (slept, spun):
        assert 0.15 < cost.late_s <= cost.slept_s
    assert slept.cpu < spun.cpu
    rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        core = min(os.sched_getaffinity(0))
        before = os.sched_getaffinity(0)
        for one in (0, *(rival.pid for rival in rivals)):
            os.sched_setaffinity(one, {core})
        shared = asyncio.run(checked(spin))
    finally:
        os.sched_setaffinity(0, before)
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert shared.queued_s > 0.2  # two thirds of the time, in which it spins for 0.2 s
    # The machine itself may be late, but not each time.
    assert min(asyncio.run(checked(lambda: None)).late_s for _ in range(20)) < 0.15


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
    again = {"logprobs": 2, "return_token_ids": True, "max_tokens": 2, "model": "tiny"}
    assert body.items() >= again.items()
    assert "stream" not in body
    talk = greedy(chat(prompt=5), {"messages": [], "temperature": 0})
    assert talk is not None
    assert talk.again("alone")["top_logprobs"] == 2


def engine(wrong: str) -> Any:
    """Answer token 2 to the requests named by `wrong`, and 1 to all others.

    wrong: "workload", "alone" or one copy of a burst.
    """

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
