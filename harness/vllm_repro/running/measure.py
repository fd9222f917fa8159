"""Measurements of an engine that survived its workload: the output check, and throughput.

A measurement never hides a death. The watch continues; if the engine dies, the trial records the
measurement in progress. Earlier figures stay in the journal, and no report shows them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from vllm_repro.client.answer import Answer
from vllm_repro.client.client import HTTPError
from vllm_repro.client.load import LoadClient
from vllm_repro.client.prompts import Prompt, PromptError, build_completion, build_needle
from vllm_repro.running.alone import MOST_PROMPTS, Greedy, Repeat, alone, burst
from vllm_repro.running.assess import weights_of
from vllm_repro.running.workload import WorkloadRunner
from vllm_repro.trigger.trigger import SentRequest
from vllm_repro.verdict.output import BEGINNING, QUESTION, Checks, Probe, probes
from vllm_repro.verdict.throughput import (
    LEAST_ROUNDS,
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
from vllm_repro_diagnosis.metrics import MetricsReading

_ENDPOINT = "/v1/completions"
_PLAIN = {
    "temperature": 0,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
}
"""Sampling fields of each request, which a model's `generation_config.json` may set otherwise."""
_COUNTED_WITHIN = 2.0
"""Seconds after the last answer in which the server's counters must include it."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""The kernel's counts for this thread; the second is the nanoseconds that it waited for a core."""


class _StoppedError(Exception):
    """A measurement without a figure: the engine is dead or hung, or a request failed.

    The journal has the reason.
    """


class SelfCheck:
    """Check that the load client itself is not the limit: `async with …`, then read `check.cost`.

    A tick of two milliseconds shows how late the event loop is: an engine that spins on every core
    lets the client sleep through an answer and find all its tokens at once. The tick mostly
    prevents it, too: a process that the clock wakes also reads its sockets.
    """

    def __init__(self) -> None:
        self.cost = ClientCost()
        self._worst = self._slept = 0.0

    async def __aenter__(self) -> Self:
        self._began, self._cpu, self._queued = time.perf_counter(), time.process_time(), _queued_s()
        self._due = self._began + TICK
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._record_delay()  # the last stall may end the round before its tick
        queued, cpu = _queued_s() - self._queued, time.process_time() - self._cpu
        used = cpu / (time.perf_counter() - self._began)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # by the line above
            await self._task
        self.cost = ClientCost(cpu=used, late_s=self._worst, slept_s=self._slept, queued_s=queued)

    async def _tick(self) -> None:
        """Record the delay of the event loop every two milliseconds."""
        while True:
            await asyncio.sleep(TICK)
            self._record_delay()

    def _record_delay(self) -> None:
        """Record by how much this call comes late: the delay of the event loop."""
        now = time.perf_counter()
        late = now - self._due
        self._worst = max(self._worst, late)
        self._slept += late if late > TICK else 0.0
        self._due = now + TICK


def _queued_s() -> float:
    """Return the seconds that this thread waited for a core; 0 if the kernel counts none."""
    try:
        return int(_SCHEDSTAT.read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass
class TrialMeasurer:
    """Measurer of a trial after its workload: output checks and throughput, for the journal."""

    runner: WorkloadRunner
    # names and answers of requests in flight together, until the last of them is answered
    unrecorded: list[tuple[str, Answer]] = field(default_factory=list)

    async def run(self) -> None:
        """Run the output checks and the loads, then check that the engine lives.

        Do nothing if there is nothing to measure, the engine is dead or hung, or the last canary
        got no token. If an earlier arm has the same server, only repeat the greedy prompts.
        """
        runner, trial = self.runner, self.runner.trial
        scenario = trial.scenario
        output = scenario.output if trial.own_server else None
        checks = output if output and output.asks else None
        loads = scenario.loads if trial.own_server and trial.measure.applies(trial.number) else ()
        if runner.watch.ended or not trial.seen.canary_ok or not (checks or loads or runner.greedy):
            return
        if runner.greedy:
            await self._attempt("the comparison with answers alone", self._repeat_greedy())
        if checks is not None:
            await self._attempt("the output check", self._ask_questions(checks))
        await self._finish(loads)

    async def load(self) -> None:
        """Measure the loads only, then check that the engine lives.

        Do nothing if the engine is dead or hung, or the last canary got no token.
        """
        if not self.runner.watch.ended and self.runner.trial.seen.canary_ok:
            await self._finish(self.runner.trial.scenario.loads)

    async def _finish(self, loads: Sequence[Load]) -> None:
        """Measure the throughput of the loads, if any; then check that the engine lives.

        Clear `seen.measuring` before that check, so that a later death is not one of a measurement.
        """
        runner = self.runner
        if loads:
            await self._attempt("throughput", self._measure_loads(loads))
            runner.watch.load = None
        if not runner.watch.ended:
            runner.trial.seen.measuring = ""
            await runner.finish()

    async def _attempt(self, what: str, part: Coroutine[Any, Any, None]) -> None:
        """Run one measurement, unless the engine is dead or hung by now; set `seen.measuring`.

        If it stops early, write the reason to the journal and return. what: its name for reports.
        """
        trial = self.runner.trial
        if self.runner.watch.ended:
            part.close()
            return
        trial.seen.measuring = what
        try:
            await part
        except _StoppedError as error:
            why = str(error)
        except OSError as error:
            why = f"no connection: {error}"
        except (PromptError, HTTPError) as error:
            why = f"no prompt: {error}"
        else:
            return
        trial.journal.write("measure-stopped", **trial.label, doing=trial.seen.measuring, why=why)

    async def _ask_questions(self, checks: Checks) -> None:
        """Ask the questions of the output check and keep the answers."""
        trial = self.runner.trial
        fields = {"max_tokens": checks.tokens, "return_token_ids": True}
        questions = probes(checks, weights_of(trial.launch.command, trial.seen, BootFacts()))
        if Probe.BEGINNING in questions:
            fields["logprobs"] = 2
        await self._question(
            Probe.GREEDY, "output check", Prompt({"prompt": QUESTION}, 0, 0), fields
        )
        if Probe.BEGINNING in questions:
            await self._question(
                Probe.BEGINNING, "another beginning", Prompt({"prompt": BEGINNING}, 0, 0), fields
            )
        if Probe.NEEDLE in questions and checks.needle is not None:
            seed = f"{trial.seed}/needle"
            prompt, number = await build_needle(
                self.runner.client, self.runner.model, checks.needle, seed
            )
            await self._question(Probe.NEEDLE, "needle", prompt, {"max_tokens": 16}, number)

    async def _repeat_greedy(self) -> None:
        """Send each greedy prompt of the workload alone, then all of them at once.

        Only the first 16 prompts.
        """
        prompts = list(self.runner.greedy.values())[:MOST_PROMPTS]
        for greedy in prompts:
            for repeat in alone(greedy):
                await self._repeat([repeat])
        await self._repeat(burst(prompts))

    async def _repeat(self, requests: Sequence[Repeat]) -> None:
        """Repeat requests at once, and keep their answers for the output check.

        Raises `_StoppedError` if one of them failed.
        """

        async def send(probe: Probe, greedy: Greedy, body: dict[str, Any]) -> Answer:
            answer = await self._send(f"{greedy.name}, {probe}", greedy.endpoint, body)
            if answer.ok:
                self.runner.keep_output(probe, answer, name=greedy.name, prompt=greedy.prompt)
            return answer

        await self._await_all(send(*repeat) for repeat in requests)

    async def _question(
        self, probe: Probe, name: str, prompt: Prompt, fields: dict[str, Any], needle: str = ""
    ) -> None:
        """Ask one question of the output check and keep the answer.

        needle: the text that the answer should hold. Raises `_StoppedError` if it failed.
        """
        (answer,) = await self._await_all([self._ask(name, prompt, fields)])
        self.runner.keep_output(probe, answer, needle=needle)

    async def _measure_loads(self, loads: Sequence[Load]) -> None:
        """Measure all points of the loads in turn, within the trial's time limit.

        While it runs, requests go by `watch.load`; the caller sets that to None.
        """
        trial = self.runner.trial
        ends = time.monotonic() + (trial.measure.most_s or math.inf)
        async with LoadClient(
            trial.server.base_url, api_key=trial.api_key
        ) as self.runner.watch.load:
            points = [(point, load.rounds) for load in loads for point in load.points]
            for number, (point, rounds) in enumerate(points):
                # an even share of the time that is left
                share = (ends - time.monotonic()) / (len(points) - number)
                await self._measure_point(point, rounds, time.monotonic() + share, ends)

    async def _measure_point(self, point: Point, rounds: int, due: float, ends: float) -> None:
        """Measure one point of a load: warm up, then measure until `rounds` rounds count.

        A round in which the client was late does not count and is measured again, up to twice
        `rounds` in all. Write each round after the warm-up, and the point, to the journal. due,
        ends: times of the monotonic clock. Rounds beyond the fewest that give a figure begin only
        if they should be over by `due`.

        Raises `_StoppedError` if the fewest rounds would not be over by `ends`, or a request
        failed.
        """
        trial = self.runner.trial
        trial.seen.measuring = f"throughput ({point})"
        before = await self.runner.watch.counters.scrape()
        speeds: list[float] = []
        round_s = 0.0

        def fits(number: int, by: float = due) -> bool:
            return time.monotonic() + number * round_s <= by

        while len(speeds) < WARM_UPS or (
            unsteady(speeds) > STEADY and len(speeds) < MOST_WARM_UPS and fits(1 + rounds)
        ):
            trial.notify(f"{point}: warming up")
            warm_up = await self._run_round(point, "warm-up", len(speeds) + 1)
            speeds.append(warm_up.output_tok_s)
            # the first round may compile kernels, so the second one tells more
            round_s = warm_up.wall_s if len(speeds) > 1 else warm_up.wall_s / 2
            if not fits(WARM_UPS - len(speeds) + LEAST_ROUNDS, ends):
                raise _StoppedError(
                    f"a round takes {warm_up.wall_s:.1f} s, too long for the"
                    f" {trial.measure.most_s:.0f} s of a boot; --throughput has no limit"
                )
        good = limited = measured = 0
        # A late round is measured again. A round that the client limited invalidates the point.
        while (
            good < rounds
            and measured < (rounds if limited else 2 * rounds)
            and (good < LEAST_ROUNDS or fits(1))
        ):
            measured += 1
            trial.notify(f"{point}: round {measured}, {rounds} are needed")
            figures = await self._run_round(point, "rounds", measured)
            good += not figures.late
            limited += bool(figures.limited)
            trial.journal.write(
                "throughput-round", **trial.label, point=point, round=measured, figures=figures
            )
        requests = (len(speeds) + measured) * point.concurrency
        usage = {"prompt": requests * point.prompt, "output": requests * point.output}
        trial.journal.write(
            "throughput-point",
            **trial.label,
            point=point,
            rounds=measured,
            warm_ups=len(speeds),
            unsteady=unsteady(speeds),
            usage=usage,
            counted=await self._counted_tokens(before, usage),
        )

    async def _run_round(self, point: Point, phase: str, number: int) -> Round:
        """Send the requests of one round of a load at once and return its figures.

        Write the server's counters of the round to the journal, as `phase`. Raises `_StoppedError`
        if a request failed or an answer has other lengths.
        """
        runner, client = self.runner, self.runner.watch.load
        assert client is not None
        # Each arm gets the same prompts. Each trial gets others: an attached server may have cached
        # them.
        seed = f"{runner.trial.seed}/{runner.trial.number}/{point}/{phase}/{number}"
        fields = {"max_tokens": point.output, "min_tokens": point.output, "ignore_eos": True}
        prompts = [
            await build_completion(runner.client, runner.model, point.prompt, f"{seed}/{nth}")
            for nth in range(point.concurrency)
        ]
        await client.open(point.concurrency)
        await runner.begin_phase()
        check = SelfCheck()
        answers = await self._await_all(
            (self._ask("throughput", prompt, fields) for prompt in prompts), check
        )
        await runner.end_phase(phase, point=point, round=number)
        return round_of([_timing(answer, point) for answer in answers], check.cost)

    async def _counted_tokens(
        self, before: MetricsReading | None, usage: Mapping[str, int]
    ) -> dict[str, int] | None:
        """Return the tokens that the server's counters show since `before`; None without counters.

        Keys of the result and of `usage`: `prompt`, `output`. Wait up to two seconds until both are
        equal. usage: the tokens that were sent and received.
        """
        ends = time.monotonic() + _COUNTED_WITHIN
        while True:
            after = await self.runner.watch.counters.scrape()
            if before is None or after is None or not after.generation_tokens:
                return None
            counted = {
                "prompt": int(after.prompt_tokens - before.prompt_tokens),
                "output": int(after.generation_tokens - before.generation_tokens),
            }
            if counted == usage or time.monotonic() > ends:
                return counted
            await asyncio.sleep(0.05)

    async def _await_all(
        self, requests: Iterable[Awaitable[Answer]], check: SelfCheck | None = None
    ) -> list[Answer]:
        """Await requests at once and return their answers, in the order in which they came.

        Then write them to the journals. check: measures the client's own delay meanwhile.

        Raises `_StoppedError` if one of them failed, or the engine died or hung.
        """
        answers: list[Answer] = []

        async def add_answer(request: Awaitable[Answer]) -> None:
            answers.append(await request)

        try:
            async with check or contextlib.nullcontext():
                await self.runner.unless_over(
                    [asyncio.create_task(add_answer(request)) for request in requests]
                )
        finally:
            self._write_unrecorded()
        bad = [answer for answer in answers if not answer.ok]
        if not self.runner.watch.ended and any(
            not sign.decisive for sign in self.runner.watch.signs
        ):
            await self.runner.canary()
        if self.runner.watch.ended:
            raise _StoppedError("the engine died or hung")
        if bad:
            status = bad[0].status or "without an answer"
            raise _StoppedError(
                f"a request failed: {status}:"
                f" {(bad[0].error or 'an answer that is not whole')[:300]}"
            )
        return answers

    async def _ask(self, name: str, prompt: Prompt, fields: dict[str, Any]) -> Answer:
        """Send a streamed, greedy completion request and return its answer."""
        body = {
            "model": self.runner.model,
            **prompt.body,
            **_PLAIN,
            **fields,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return await self._send(name, _ENDPOINT, body, prompt.tokens)

    async def _send(
        self, name: str, endpoint: str, body: Mapping[str, Any], tokens: int = 0
    ) -> Answer:
        """Send a request, by the load's client if one is open; add its answer to `unrecorded`.

        One that crashed the engine counts for the trigger. tokens: of its prompt; 0 if unknown.
        """
        trial = self.runner.trial
        answer, died = await self.runner.watch.ask(endpoint, body, by=self.runner.watch.load)
        self.unrecorded.append((name, answer))
        if died:
            # The request that crashed the engine counts for the trigger. Requests that it survived
            # count only if the workload sent them.
            trial.seen.requests.append(
                SentRequest(name, tokens or None, "tokenize", status=answer.status, died=True)
            )
        return answer

    def _write_unrecorded(self) -> None:
        """Write the answers that came since the last call to the journals.

        Those that are not ok go to `seen.measured` too. Do not call it while answers are awaited: a
        record of 100 tokens takes as long as to read 20.
        """
        for name, answer in self.unrecorded:
            if answer.ok:
                self.runner.record_request(name, answer, answer.arrivals)
                continue
            self.runner.trial.seen.measured.append(answer)
            self.runner.record_answer(name, answer, answer.arrivals)
        self.unrecorded.clear()


def _timing(answer: Answer, point: Point) -> Timing:
    """Return the times of an answer to a request of a load, for its figures.

    Raises `_StoppedError` if its lengths differ from those of `point`.
    """
    usage = answer.usage
    if usage is None or (usage.prompt_tokens, usage.completion_tokens) != (
        point.prompt,
        point.output,
    ):
        lengths = f"{usage.prompt_tokens} -> {usage.completion_tokens}" if usage else "no usage"
        raise _StoppedError(
            f"an answer of other lengths than {point.prompt} -> {point.output} tokens: {lengths}"
        )
    return Timing(
        sent=answer.sent,
        ended=answer.ended,
        chunks=answer.arrivals,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        written=answer.written,
    )
