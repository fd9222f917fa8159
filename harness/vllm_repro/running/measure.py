"""Measurements of an engine that survived its workload: the output check, throughput, and the soak.

A measurement never hides a death. The watch goes on; if the engine dies, the trial records what was being measured. The figures that were
taken until then stay in the journal, and no report shows them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

from vllm_repro.client.answer import Answer
from vllm_repro.client.client import HTTPError
from vllm_repro.client.load import LoadClient
from vllm_repro.client.metrics import Reading
from vllm_repro.client.prompts import Prompt, PromptError, build_completion, build_needle
from vllm_repro.running.alone import MOST_PROMPTS, Greedy, Repeat, alone, burst
from vllm_repro.running.assess import weights_of
from vllm_repro.running.death_signs import Channel
from vllm_repro.running.workload import WorkloadRunner
from vllm_repro.trigger.trigger import SentRequest
from vllm_repro.verdict.output import BEGINNING, QUESTION, Checks, Probe, probes, sample_output
from vllm_repro.verdict.soak import LOAD, SoakCount
from vllm_repro.verdict.throughput import (
    MOST_STREAMS,
    MOST_WARM_UPS,
    STEADY,
    TICK,
    WARM_UPS,
    ClientCost,
    Load,
    Point,
    Round,
    Timing,
    round_of,
    unsteady,
)
from vllm_repro_diagnosis.boot_facts import BootFacts

__all__ = ["Measurements", "SelfCheck"]

_ENDPOINT = "/v1/completions"
_PLAIN = {"temperature": 0, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
"""The sampling fields that a model's `generation_config.json` may set otherwise."""
_MOST_FAILED = 100
"""Failed answers to keep: a long soak may see many."""
_COUNTED_WITHIN = 2.0
"""Seconds in which the server's counters must include its last answer: they are written just after it."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class _StoppedError(Exception):
    """A measurement without a figure: the engine is dead or hung, or a request failed. The journal has the reason."""


class SelfCheck:
    """Background check of this process: `async with SelfCheck() as check: …`, then `check.cost`.

    A tick of two milliseconds shows how late the event loop is: an engine that spins on every core lets the client sleep through an
    answer and find all its tokens at once. The tick mostly prevents it, too: a process that the clock wakes also reads its sockets.
    clock: that of the answers.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.cost = ClientCost()
        self._clock = clock
        self._worst = self._slept = 0.0
        self._stalls: list[tuple[float, float]] = []

    async def __aenter__(self) -> Self:
        self._began, self._cpu, self._queued = self._clock(), time.process_time(), _queued_s()
        self._due = self._began + TICK
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._look()  # the last stall may end the round before its tick
        queued, cpu = _queued_s() - self._queued, time.process_time() - self._cpu
        used = cpu / (self._clock() - self._began)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # by the line above
            await self._task
        self.cost = ClientCost(
            cpu=used, late_s=self._worst, slept_s=self._slept, queued_s=queued, stalls=tuple(self._stalls)
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._look()

    def _look(self) -> None:
        now = self._clock()
        late = now - self._due
        self._worst = max(self._worst, late)
        self._slept += late if late > TICK else 0.0
        # A shorter stall is no matter at either end of the round, and they would be many.
        if late > max(TICK / 4, (now - self._began) / 1000):
            self._stalls.append((self._due, now))
        self._due = now + TICK


def _queued_s() -> float:
    """Return for how long this thread was ready to run and the kernel ran others; 0 if the kernel does not count it."""
    try:
        return int(_SCHEDSTAT.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass
class Measurements:
    """The measurements of one trial. unrecorded: names and answers of requests in flight together, until the last of them is answered."""

    runner: WorkloadRunner
    unrecorded: list[tuple[str, Answer]] = field(default_factory=list)

    async def run(self) -> None:
        """Run what was asked for, and `finish`. Do nothing if nothing was, or if the engine is dead or hung."""
        runner, trial = self.runner, self.runner.trial
        scenario, options = trial.scenario, trial.measure
        own = scenario.has_own_server(trial.arm)
        checks = scenario.output if own and scenario.output and scenario.output.asks else None
        loads = scenario.loads if own and options.throughput else ()
        if runner.watch.ended or not trial.seen.canary_ok or not (checks or loads or options.soak or runner.greedy):
            return
        if runner.greedy:
            await self._attempt("the comparison with answers alone", self._alone())
        if checks is not None:
            await self._attempt("the output check", self._probe(checks))
        streams = max(
            [LOAD.concurrency if options.soak else 0, *(point.concurrency for load in loads for point in load.points)]
        )
        if streams and not runner.watch.ended:
            connections = min(streams, MOST_STREAMS)  # a rate has more requests, and not all at once
            client = LoadClient(trial.server.base_url, connections=connections, api_key=trial.api_key)
            await self._attempt("opening connections", self._loaded(client, loads, options.soak))
        if not runner.watch.ended:
            trial.seen.measuring = ""
            await runner.finish()

    async def _loaded(self, client: LoadClient, loads: Sequence[Load], soak: float | None) -> None:
        async with client as self.runner.watch.load:
            if loads:
                await self._attempt("throughput", self._throughput(loads))
            if soak:
                await self._attempt("the soak", self._soak(soak))
        self.runner.watch.load = None

    async def _attempt(self, what: str, part: Any) -> None:
        """Run one measurement, unless the engine is dead or hung by now."""
        trial = self.runner.trial
        if self.runner.watch.ended:
            part.close()
            return
        trial.seen.measuring = what
        try:
            await part
        except _StoppedError as error:
            trial.journal.write("measure-stopped", **trial.label, doing=trial.seen.measuring, why=str(error))
        except OSError as error:
            trial.journal.write(
                "measure-stopped", **trial.label, doing=trial.seen.measuring, why=f"no connection: {error}"
            )
        except (PromptError, HTTPError) as error:
            trial.journal.write("measure-stopped", **trial.label, doing=trial.seen.measuring, why=f"no prompt: {error}")

    async def _probe(self, checks: Checks) -> None:
        trial = self.runner.trial
        asked = {"max_tokens": checks.tokens, "return_token_ids": True}
        questions = probes(checks, weights_of(trial.launch.command, trial.seen, BootFacts()))
        if Probe.BEGINNING in questions:
            asked["logprobs"] = 2
        await self._question(Probe.GREEDY, "output check", Prompt({"prompt": QUESTION}, 0, 0), asked)
        if Probe.BEGINNING in questions:
            await self._question(Probe.BEGINNING, "another beginning", Prompt({"prompt": BEGINNING}, 0, 0), asked)
        if Probe.NEEDLE in questions and checks.needle is not None:
            seed = f"{trial.seed}/needle"
            prompt, number = await build_needle(self.runner.client, self.runner.model, checks.needle, seed)
            await self._question(Probe.NEEDLE, "needle", prompt, {"max_tokens": 16}, number)

    async def _alone(self) -> None:
        """Send each greedy prompt of the workload alone, then all of them at once."""
        prompts = list(self.runner.greedy.values())[:MOST_PROMPTS]
        for one in prompts:
            for repeat in alone(one):
                await self._repeat([repeat])
        await self._repeat(burst(prompts))

    async def _repeat(self, requests: Sequence[Repeat]) -> None:
        async def send(probe: Probe, one: Greedy, body: dict[str, Any]) -> Answer:
            answer = await self._send(f"{one.name}, {probe}", one.endpoint, body)
            if answer.ok:
                said = sample_output(
                    probe, answer.tokens, answer.text, margins=answer.margins, name=one.name, prompt=one.prompt
                )
                self.runner.keep_output(said)
            return answer

        await self._all(send(*repeat) for repeat in requests)

    async def _question(
        self, probe: Probe, name: str, prompt: Prompt, fields: dict[str, Any], needle: str = ""
    ) -> None:
        (answer,) = await self._together(name, [prompt], fields)
        kept = sample_output(probe, answer.tokens, answer.text, needle=needle, margins=answer.margins)
        self.runner.keep_output(kept)

    async def _throughput(self, loads: Sequence[Load]) -> None:
        for load in loads:
            for point in load.points:
                await self._point(load, point)
        # Repeat the first point: it shows an engine or a machine that drifted meanwhile.
        await self._point(loads[0], loads[0].points[0], again=True)

    async def _point(self, load: Load, point: Point, *, again: bool = False) -> None:
        trial, rounds = self.runner.trial, load.rounds
        trial.seen.measuring = f"throughput ({point})"
        trial.notify(f"making prompts for {point}")
        # Each arm gets the same prompts. Each trial gets others: an attached server has those of the last one in its cache.
        seed = f"{trial.seed}/{trial.number}/{point}" + ("/again" if again else "")
        fields = {"max_tokens": point.output, "min_tokens": point.output, "ignore_eos": True}
        prompts: list[Prompt] = []

        async def make(rounds: int) -> None:
            for _ in range(rounds * point.concurrency):
                name = f"{seed}/{len(prompts)}"
                prompts.append(await build_completion(self.runner.client, self.runner.model, point.prompt, name))

        await make(WARM_UPS + rounds)
        before = await self.runner.begin_phase()
        used = [0, 0]
        number = 0

        async def one(phase: str, nth: int) -> tuple[Round, dict[str, Any]]:
            """Run the next round. Return its figures, and the server's latencies."""
            nonlocal number
            if len(prompts) < (number + 1) * point.concurrency:
                await make(1)
                await self.runner.begin_phase()
            batch = prompts[number * point.concurrency :][: point.concurrency]
            timings, cost = await self._round(point, batch, point.due(f"{seed}/{number}"), fields)
            number += 1
            used[0] += sum(one.prompt_tokens for one in timings)
            used[1] += sum(one.output_tokens for one in timings)
            server = await self.runner.end_phase(phase, point=point, round=nth, again=again)
            return round_of(timings, cost, load.goal), server

        speeds: list[float] = []
        while len(speeds) < WARM_UPS or (unsteady(speeds) > STEADY and len(speeds) < MOST_WARM_UPS):
            trial.notify(f"{point}: warming up")
            speeds.append((await one("warm-up", len(speeds) + 1))[0].speed(point))
        good = limited = measured = 0
        # A round in which the client was late is measured again; one that it limited spoils the whole point.
        while good < rounds and measured < (rounds if limited else 2 * rounds):
            measured += 1
            trial.notify(f"{point}: round {measured}, {rounds} are wanted")
            found, server = await one("rounds", measured)
            good += not found.late(point)
            limited += bool(found.limited)
            entry = {"point": point, "round": measured, "again": again, "figures": found, "latencies": server}
            trial.journal.write("throughput-round", **trial.label, **entry)
        counted = await self._counted(before, used)
        trial.journal.write(
            "throughput-point",
            **trial.label,
            point=point,
            again=again,
            rounds=measured,
            warm_ups=len(speeds),
            unsteady=unsteady(speeds),
            usage={"prompt": used[0], "output": used[1]},
            counted=counted and {"prompt": counted[0], "output": counted[1]},
        )

    async def _round(
        self, point: Point, prompts: Sequence[Prompt], due: Sequence[float], fields: dict[str, Any]
    ) -> tuple[list[Timing], ClientCost]:
        """Send each prompt when it is due, in seconds from now. Return the times of the answers, and what the client did."""
        client = self.runner.watch.load
        assert client is not None
        began = client.now()
        unsent: list[float] = []

        async def one(prompt: Prompt, after: float) -> Answer:
            if after:
                await asyncio.sleep(began + after - client.now())
            answer = await self._ask("throughput", prompt, fields)
            if not point.rate:
                return answer
            unsent.append(answer.sent - began - after)
            return replace(answer, sent=began + after)

        check = SelfCheck(client.now)
        answers = await self._all(map(one, prompts, due), check)
        return [_timing(answer, point) for answer in answers], replace(check.cost, unsent_s=median(unsent or [0.0]))

    async def _counted(self, before: Reading | None, used: Sequence[int]) -> tuple[int, int] | None:
        """Return (prompt, output) tokens by the server's own counters since `before`; None if it has no counters."""
        ends = time.monotonic() + _COUNTED_WITHIN
        while True:
            after = await self.runner.watch.counters.scrape()
            if before is None or after is None or not after.generation_tokens:
                return None
            counted = (
                int(after.prompt_tokens - before.prompt_tokens),
                int(after.generation_tokens - before.generation_tokens),
            )
            if counted == tuple(used) or time.monotonic() > ends:
                return counted
            await asyncio.sleep(0.05)

    async def _soak(self, seconds: float) -> None:
        trial, runner = self.runner.trial, self.runner
        trial.seen.measuring = f"the soak ({LOAD})"
        base = await build_completion(runner.client, runner.model, LOAD.prompt, f"{trial.seed}/{trial.number}/soak")
        shuffled = random.Random(f"{trial.seed}/{trial.number}/soak")
        fields = {"max_tokens": LOAD.output, "min_tokens": LOAD.output, "ignore_eos": True}
        await runner.begin_phase()
        began = time.time()
        count = SoakCount(asked=seconds, began=began)

        async def worker() -> None:
            while (past := time.time() - began) < seconds and not runner.watch.ended:
                trial.notify(f"soak: {past:.0f} of {seconds:.0f} s, {count.requests} requests, {count.errors} errors")
                ids = list(base.body["prompt"])
                shuffled.shuffle(ids)  # no two prompts alike, without a /tokenize call for each
                answer = await self._ask("soak", Prompt({"prompt": ids}, len(ids), 0), fields)
                self._record()
                tokens = answer.usage.completion_tokens if answer.usage else 0
                count.take(answer.arrivals, tokens, ok=answer.ok)
                if not answer.ok:
                    await asyncio.sleep(0.1)  # do not flood a server that refuses

        await runner.unless_over([asyncio.create_task(worker()) for _ in range(LOAD.concurrency)])
        restarts = sum(sign.channel is Channel.RESTART for sign in runner.watch.signs)
        if not runner.watch.ended:
            await runner.end_phase("soak")
        trial.journal.write("soak", **trial.label, soak=count.end(time.time(), restarts=restarts))

    async def _together(self, name: str, prompts: Sequence[Prompt], fields: dict[str, Any]) -> list[Answer]:
        """Send requests at once and return their answers. Raises `_StoppedError` if one of them failed."""
        return await self._all(self._ask(name, prompt, fields) for prompt in prompts)

    async def _all(self, requests: Iterable[Awaitable[Answer]], check: SelfCheck | None = None) -> list[Answer]:
        """Await requests at once and return their answers. Raises `_StoppedError` if one of them failed. check: of the time in between."""
        answers: list[Answer] = []

        async def one(request: Awaitable[Answer]) -> None:
            answers.append(await request)

        try:
            async with check or contextlib.nullcontext():
                await self.runner.unless_over([asyncio.create_task(one(request)) for request in requests])
        finally:
            self._record()
        bad = [answer for answer in answers if not answer.ok]
        if not self.runner.watch.ended and any(not sign.decisive for sign in self.runner.watch.signs):
            await self.runner.canary()
        if self.runner.watch.ended:
            raise _StoppedError("the engine died or hung")
        if bad:
            status = bad[0].status or "without an answer"
            raise _StoppedError(f"a request failed: {status}: {(bad[0].error or 'an answer that is not whole')[:300]}")
        return answers

    async def _ask(self, name: str, prompt: Prompt, fields: dict[str, Any]) -> Answer:
        body = {
            "model": self.runner.model,
            **prompt.body,
            **_PLAIN,
            **fields,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return await self._send(name, _ENDPOINT, body, prompt.tokens)

    async def _send(self, name: str, endpoint: str, body: Mapping[str, Any], tokens: int = 0) -> Answer:
        trial = self.runner.trial
        answer, died = await self.runner.watch.ask(endpoint, body, by=self.runner.watch.load)
        self.unrecorded.append((name, answer))
        if died:
            # The request that killed the engine counts for the trigger; one that it survived counts in the workload only.
            trial.seen.asked.append(SentRequest(name, tokens or None, "tokenize", status=answer.status, died=True))
        return answer

    def _record(self) -> None:
        """Write the answers to the journals. Not while others are awaited: a record of 100 tokens takes as long as to read 20."""
        for name, answer in self.unrecorded:
            if answer.ok:
                self.runner.record_request(name, answer, answer.arrivals)
                continue
            if len(self.runner.trial.seen.measured) < _MOST_FAILED:
                self.runner.trial.seen.measured.append(answer)
            self.runner.record_answer(name, answer, answer.arrivals)
        self.unrecorded.clear()


def _timing(answer: Answer, point: Point) -> Timing:
    """Return the times of an answer. Raises `_StoppedError` if it has other lengths than were asked for."""
    usage = answer.usage
    if usage is None or (usage.prompt_tokens, usage.completion_tokens) != (point.prompt, point.output):
        lengths = f"{usage.prompt_tokens} -> {usage.completion_tokens}" if usage else "no usage"
        raise _StoppedError(f"an answer of other lengths than {point.prompt} -> {point.output} tokens: {lengths}")
    return Timing(
        sent=answer.sent,
        ended=answer.ended,
        chunks=answer.arrivals,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        written=answer.written,
    )
