"""The workload of one trial: steps with exact prompt lengths, and a canary at the end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from vllm_repro.client.answer import Answer, Usage
from vllm_repro.client.client import Client, HTTPError, HTTPStatusError
from vllm_repro.client.metrics import counted_between, steps_between
from vllm_repro.client.prompts import Prompt, build_chat, build_completion
from vllm_repro.conversion import decode
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.host.machine import worst_use
from vllm_repro.releases.disk import replace_file
from vllm_repro.running.alone import Greedy, greedy
from vllm_repro.running.idle import CpuSample, engine_cpu_seconds, is_idle, never_idle_message
from vllm_repro.running.state import Trial
from vllm_repro.running.watch import Watch, gave_a_token
from vllm_repro.scenario.workload import (
    IDLE_AFTER,
    Conversation,
    Pause,
    Request,
    Rest,
    Size,
    Step,
    Together,
    requests_of,
    resolve,
)
from vllm_repro.trigger.trigger import SentRequest
from vllm_repro.verdict.outcome import NEVER_IDLE
from vllm_repro.verdict.output import Probe, common_prefix, sample_output
from vllm_repro_diagnosis.metrics import MetricsReading

_IDLE_POLL = 0.25
"""Seconds between two samples of an engine that should go idle."""

_SIGN_AFTER_CANARY = 3.0
"""Seconds for another sign of death after a failed canary."""

_SIGN_AFTER_FAILURE = 5.0
"""Seconds for a sign of death after a request failed that any living vLLM answers."""


@dataclass
class WorkloadRunner:
    """Sender of a trial's workload to one server, step by step.

    `run` returns when the workload is done, or the engine is dead or hung.
    """

    trial: Trial
    client: Client
    watch: Watch
    model: str = ""
    turns: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Messages of each conversation so far."""
    cached: Counter[str] = field(default_factory=Counter)
    """Most tokens in an answered prompt of each conversation."""
    answered: list[Sequence[int]] = field(default_factory=list)
    """Token ids of the other answered prompts, if known."""
    greedy: dict[str, Greedy] = field(default_factory=dict)
    """Answered requests to repeat alone, by their prompts."""
    known: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Body fields that each endpoint reads, by the server's schema."""
    phase: tuple[float, MetricsReading] | None = None
    """When the current phase began, in seconds since the epoch, and the server's counters then.

    None if there is no phase or `/metrics` did not answer."""

    async def run(self) -> None:
        """Run every step of the workload, then check that the engine still lives.

        Also check it after a step that left a sign of death. Set `model` first.

        Raises `InfraError` if the server lives but does not behave like vLLM, and `Unsupported` if
        it cannot be seen whether the engine goes idle.
        """
        trial, watch = self.trial, self.watch
        if not await self.find_model():
            return
        if watch.counters.reading is not None:  # read when the server was ready
            self.phase, watch.counters.kv_most = (time.time(), watch.counters.reading), None
        if any(needed.fields for needed in (trial.arm.trigger or trial.scenario.trigger).wanted):
            self.known = await self._known_fields()
        for number, step in enumerate(trial.scenario.workload_of(trial.arm)):
            await self._step(number, step)
            if not watch.ended and any(not sign.decisive for sign in watch.signs):
                await self.canary()
            if watch.ended:
                return
        await self.end_phase("workload")
        await self.finish()

    async def _known_fields(self) -> Mapping[str, frozenset[str]]:
        """Return the body fields that each endpoint reads, from the cache or the server.

        vLLM needs a second to write its schema. The schema does not change, so cache it beside a
        cached release. Empty if the server shows no schema.
        """
        endpoints = {
            request.endpoint
            for request in requests_of(self.trial.scenario.workload_of(self.trial.arm))
        }
        release = self.trial.launch.release
        kept = release.fields_file if release and not self.trial.arm.patches else None
        if kept is not None and kept.is_file():
            known = decode(kept.read_bytes(), dict[str, frozenset[str]])
            if endpoints <= known.keys():
                return known
        known = await self.client.known_fields()
        if kept is not None and endpoints <= known.keys():
            # the cache cannot be written to: the next run asks again
            with contextlib.suppress(OSError):
                replace_file(kept, msgspec.json.encode(known))
        return known

    async def find_model(self) -> bool:
        """Ask the server for its model's name and set `model`.

        Return False if the engine is dead or hung; raise `InfraError` if the server lives and names
        none.
        """
        try:
            self.model = await self.client.model_name()
        except (HTTPError, ValueError, LookupError, TypeError) as error:
            if not await self._died():
                raise InfraError(
                    f"the server is up, but /v1/models does not name a model: {error}"
                ) from error
            return False
        return True

    async def begin_phase(self) -> None:
        """Read the server's counters; `end_phase` records what they count from now on.

        Drop the earlier readings of the GPUs and of the KV cache's highest use.
        """
        reading = await self.watch.counters.scrape()
        self.phase, self.watch.counters.kv_most = (time.time(), reading) if reading else None, None
        self.watch.gpu_uses = []

    async def end_phase(self, name: str, **fields: object) -> None:
        """Write to the journal what the server counted in the phase, and begin the next one.

        Write nothing if `/metrics` did not answer at its begin or end. name, fields: the phase in
        the journal.
        """
        phase = self.phase
        after, kv_most = await self.watch.counters.scrape(), self.watch.counters.kv_most
        self.phase, self.watch.counters.kv_most = (time.time(), after) if after else None, None
        gpus, self.watch.gpu_uses = worst_use(self.watch.gpu_uses), []
        counted = counted_between(phase[1], after, kv_most) if phase and after else None
        if phase and counted:
            label = {**self.trial.label, "phase": name, **fields}
            self.trial.journal.write(
                "counters", **label, began=phase[0], ended=time.time(), counted=counted, gpus=gpus
            )

    async def finish(self) -> None:
        """Check that the engine still lives: send a canary, then wait briefly for a late crash.

        Set `seen.canary_ok`, read the counters, and note signs of death.
        """
        await self.canary()
        await self.watch.counters.scrape()
        await self.watch.last_look()

    async def _step(self, number: int, step: Step) -> None:
        """Run one step: pause, wait for an idle engine, or send requests."""
        self.trial.notify(f"step {number + 1}: {step}")
        match step:
            case Pause(seconds=seconds):
                await self.unless_over([asyncio.create_task(asyncio.sleep(seconds))])
            case Rest(within=within):
                await self.unless_over([asyncio.create_task(self._wait_for_idle(within))])
            case Together(requests=requests):
                await self._requests(str(number), requests)
            case Conversation(turns=turns):
                for turn, request in enumerate(turns):
                    if not self.watch.ended:
                        await self._requests(f"{number}.{turn}", (request,))
            case Request():
                await self._requests(str(number), (step,))

    async def _wait_for_idle(self, within: float) -> None:
        """Wait until the engine is idle; record a hang if it is not after `within` seconds.

        Raises `Unsupported` if no EngineCore process can be seen, and `InfraError` if other clients
        use the server.
        """
        samples: list[CpuSample] = []
        while not samples or samples[-1].at - samples[0].at < within:
            spent = await asyncio.to_thread(
                lambda: engine_cpu_seconds(self.watch.server.processes())
            )
            if spent is None:
                if await self._died():
                    return
                raise Unsupported(
                    "cannot tell whether the engine goes idle: no EngineCore process of it can be"
                    " seen",
                    hint="run it on this host: --server process, docker or lab",
                )
            samples.append(CpuSample(time.monotonic(), spent))
            if is_idle(samples, IDLE_AFTER):
                self.trial.journal.write(
                    "rested", **self.trial.label, seconds=samples[-1].at - samples[0].at
                )
                return
            await asyncio.sleep(_IDLE_POLL)
        if await self._has_other_clients():
            raise InfraError(
                "other clients are using this server; cannot tell whether it goes idle",
                hint="run it while nobody else does",
            )
        self.trial.seen.measuring = NEVER_IDLE
        await self.watch.hang(never_idle_message(samples), samples[-1].at - samples[0].at)

    async def _has_other_clients(self) -> bool:
        """Return True if an attached server has requests while the harness sends none.

        Compare its counters over `IDLE_AFTER` seconds. Return False if they cannot be read.
        """
        if self.trial.launch.kind.facts.started:
            return False
        before = await self.watch.counters.scrape()
        await asyncio.sleep(IDLE_AFTER)
        after = await self.watch.counters.scrape()
        if before is None or after is None:
            return False  # no answer: the watch decides what that means
        return bool(after.running or after.waiting) or after.progress != before.progress

    async def _requests(self, position: str, requests: tuple[Request, ...]) -> None:
        """Build the prompts, then send the requests at once and await their answers.

        For a single request also record what the counters show. position: seeds the prompts; the
        number of the step, and of the turn.
        """
        built = [
            (request, await self._build(f"{position}.{i}", request))
            for i, request in enumerate(requests)
        ]
        if self.watch.ended:
            return
        before = await self.watch.counters.scrape() if len(built) == 1 else None
        tasks = [
            asyncio.create_task(self._send(request, prompt))
            for request, prompt in built
            if prompt is not None
        ]
        await self.unless_over(tasks)
        after = (
            await self.watch.counters.scrape()
            if before is not None and not self.watch.ended
            else None
        )
        if before is not None and after is not None and tasks:
            self._record_counters(before, after)

    async def _build(self, position: str, request: Request) -> Prompt | None:
        """Return the prompt of a request; None if the server died meanwhile.

        position: seeds a generated prompt. Raises `InfraError` if `/tokenize` does not answer, or
        refuses it, though the server lives.
        """
        if request.prompt is None:
            return Prompt({}, len(request.ids), 0)
        if isinstance(request.prompt, tuple):
            return Prompt({"prompt": request.ids}, len(request.ids), 0)
        if isinstance(request.prompt, str):
            messages = [{"role": "user", "content": request.prompt}]
            return Prompt(
                {"messages": messages}
                if "chat" in request.endpoint
                else {"prompt": request.prompt},
                0,
                0,
            )
        tokens = self._resolve(request.prompt)
        # With the trial's number: a second boot against an attached server must not hit its own
        # cached prompt.
        trial = f"{self.trial.seed}/{self.trial.arm.name}/{self.trial.number}"
        seed = f"{trial}/{position}"
        self.trial.notify(f"making a prompt of {tokens} tokens")
        try:
            if request.conversation:
                return await self._next_turn(request, tokens, seed)
            if "chat" in request.endpoint:
                return await build_chat(
                    self.client, self.model, tokens, seed, fields=request.fields
                )
            shared = self._resolve(request.shared)
            return await build_completion(
                self.client, self.model, tokens, seed, shared=shared, shared_seed=f"{trial}/shared"
            )
        except HTTPStatusError as error:
            if error.response.status_code < 500:
                refused = (
                    f"/tokenize answers {error.response.status_code}: {error.response.text[:200]}"
                )
                raise InfraError(refused) from error
        except HTTPError:
            pass  # handled like a 5xx, below
        if not await self._died():
            raise InfraError("/tokenize does not answer, though the server lives")
        return None

    async def _next_turn(self, request: Request, tokens: int, seed: str) -> Prompt:
        """Return the next prompt of a conversation.

        Add it and a fixed reply to the messages that the following prompt begins with.
        """
        turns = self.turns.setdefault(request.conversation, [])
        tools, turn = request.fields.get("tools", ()), len(turns) // 2
        message = (
            {"role": "tool", "tool_call_id": f"call_{turn}"} if tools and turn else {"role": "user"}
        )
        prompt = await build_chat(
            self.client,
            self.model,
            tokens,
            seed,
            before=turns,
            message=message,
            fields=request.fields,
        )
        reply: dict[str, Any] = {"role": "assistant", "content": "I have read this. Please go on."}
        if tools:
            call = {"name": tools[0]["function"]["name"], "arguments": "{}"}
            reply["tool_calls"] = [{"id": f"call_{turn + 1}", "type": "function", "function": call}]
        turns += [prompt.body["messages"][-1], reply]
        return prompt

    async def _died(self) -> bool:
        """Return True if the engine is dead or hung, or False after five seconds without a sign.

        The wait lets the watch, which polls /health, detect it.
        """
        with contextlib.suppress(asyncio.TimeoutError):  # no sign of death
            await asyncio.wait_for(self.watch.over(), _SIGN_AFTER_FAILURE)
        return self.watch.ended

    async def _send(self, request: Request, prompt: Prompt) -> None:
        """Wait `request.starts_after` seconds, send a request of the workload, record its answer.

        Write it to the journal, and keep in `seen` what the trigger and the output check need. If
        its client leaves early, there is no answer.
        """
        trial, name, answer_tokens = self.trial, request.label, self._resolve(request.max_tokens)
        body: dict[str, Any] = {"model": self.model, **prompt.body}
        if request.prompt is not None:
            body |= {"max_tokens": answer_tokens, "temperature": 0, "stream": request.stream}
            body |= {"stream_options": {"include_usage": True}} if request.stream else {}
        body |= request.fields
        ids = request.ids or body.get("prompt", ())
        ids = ids if isinstance(ids, list | tuple) and not request.conversation else ()
        await asyncio.sleep(request.starts_after)
        repeats = max((common_prefix(ids, earlier) for earlier in self.answered), default=0)
        trial.seen.sent += 1
        sent = SentRequest(
            name,
            prompt.tokens or None,
            "tokenize" if prompt.calls else "ids",
            fields=request.fields,
            known=self.known.get(request.endpoint),
            may_fail=request.may_fail,
            repeats=(
                min(prompt.tokens, self.cached[request.conversation])
                if request.conversation
                else repeats
            ),
            status=None,
            answer_tokens=answer_tokens or None,
            span=(time.time(), None),
        )
        repeated = greedy(request, body) if trial.measure.outputs else None
        body |= {"return_token_ids": True} if repeated else {}
        index = len(trial.seen.requests)
        trial.seen.requests.append(sent)
        trial.journal.write(
            "request-sent",
            **trial.label,
            name=name,
            endpoint=request.endpoint,
            prompt_tokens=prompt.tokens,
            tokenize_calls=prompt.calls,
            fields=request.fields,
            body=_shortened(body, prompt, request.fields),
        )
        asking = asyncio.create_task(self.watch.ask(request.endpoint, body))
        if request.leaves_after is not None and await self._leave_early(
            asking, index, request.leaves_after
        ):
            return
        answer, died = await asking
        self._note_answer(
            index, sent, answer, answer.usage if request.one_prompt else None, died=died
        )
        if answer.ok:
            self._note_output(name, answer, repeated)
        if answer.ok and request.conversation:
            self.cached[request.conversation] = max(
                self.cached[request.conversation], prompt.tokens
            )
        elif answer.ok:
            self.answered.append(ids)

    async def _leave_early(self, asking: asyncio.Task[Any], index: int, seconds: float) -> bool:
        """Close a request's connection after so many seconds, and record that; return True.

        Return False, and leave the request alone, if it was answered or the engine died first.
        asking: the request in flight. index: of the request in `seen.requests`.
        """
        try:
            await asyncio.wait([asking], timeout=seconds)
            reading = None if asking.done() else await self.watch.counters.scrape()
            if asking.done() or self.watch.ended:  # answered, or in flight at a death
                return False
        except asyncio.CancelledError:
            asking.cancel()
            raise
        asking.cancel()
        await asyncio.wait([asking])
        waiting = None if reading is None else int(reading.waiting)
        seen = self.trial.seen
        seen.sent -= 1  # it neither failed nor was answered
        seen.requests[index] = replace(seen.requests[index], left=True, waiting=waiting)
        self.trial.journal.write(
            "client-left",
            **self.trial.label,
            name=seen.requests[index].name,
            after_s=seconds,
            waiting=waiting,
        )
        return True

    def _resolve(self, size: int | Size) -> int:
        """Return a prompt or answer size in tokens, by the server's flags if it names one.

        Raises `ScenarioError` if the command does not have the flag.
        """
        in_lab = self.trial.launch.kind.facts.in_lab
        return resolve(size, self.trial.launch.command, in_lab=in_lab)

    def _note_answer(
        self, index: int, sent: SentRequest, answer: Answer, usage: Usage | None, *, died: bool
    ) -> None:
        """Record the answer to the request at `index` of `seen.requests`.

        Keep it out of `seen.answers` if the scenario allows its status. usage: the server's token
        counts; None to keep those of the harness.
        """
        trial = self.trial
        trial.seen.requests[index] = replace(
            sent,
            prompt_tokens=usage.prompt_tokens if usage else sent.prompt_tokens,
            counted_by="usage" if usage else sent.counted_by,
            cached_tokens=usage.cached_tokens if usage else None,
            answer_tokens=usage.completion_tokens if usage else sent.answer_tokens,
            status=answer.status,
            refusal=answer.error or "",
            died=died,
            span=(answer.sent, answer.ended),
        )
        if died or answer.status not in sent.may_fail:
            trial.seen.answers.append(answer)
        self.record_answer(sent.name, answer, answer.token_times)

    def _note_output(self, name: str, answer: Answer, repeated: Greedy | None) -> None:
        """Keep the answer to request `name` if the output check or a repetition compares it.

        repeated: the request, if it is sent again alone after the workload; added to `greedy`.
        """
        checks = self.trial.scenario.output
        if repeated is not None:
            self.greedy.setdefault(repeated.prompt, repeated)
        elif checks is None or name not in checks.compared:
            return
        prompt = repeated.prompt if repeated else ""
        self.keep_output(Probe.WORKLOAD, answer, name=name, prompt=prompt)

    def keep_output(self, probe: Probe, answer: Answer, **more: str) -> None:
        """Keep a sample of an answer for the output checks, and write that to the journal.

        more: `name`, `prompt` and `needle` as for `sample_output`.
        """
        kept = sample_output(probe, answer.tokens, answer.text, margins=answer.margins, **more)
        self.trial.seen.output.append(kept)
        self.trial.journal.write("output", **self.trial.label, said=kept)

    def record_answer(self, name: str, answer: Answer, times: Iterable[float]) -> None:
        """Write an answer to the journal and `requests.jsonl`. times: as in `record_request`."""
        self.trial.journal.write(
            "answer",
            **self.trial.label,
            name=name,
            status=answer.status,
            error=answer.error and answer.error[:2000],
            error_kind=answer.error_kind,
            finish_reason=answer.finish_reason,
            usage=answer.usage,
            took_s=answer.ended - answer.sent,
        )
        self.record_request(name, answer, times)

    def record_request(self, name: str, answer: Answer, times: Iterable[float]) -> None:
        """Write a request's times to `requests.jsonl`. times: of its tokens, in epoch seconds.

        The file has them in seconds since the request was sent.
        """
        self.trial.requests.write(
            "request",
            **self.trial.label,
            name=name,
            sent=answer.sent,
            ended=answer.ended,
            status=answer.status,
            ok=answer.ok,
            usage=answer.usage,
            token_times=[round(moment - answer.sent, 6) for moment in times],
        )

    def _record_counters(self, before: MetricsReading, after: MetricsReading) -> None:
        """Record the steps and cached tokens of the one request between two scrapes."""
        seen = self.trial.seen
        steps = steps_between(before, after)
        last = seen.requests[-1]
        cached = last.cached_tokens
        if cached is None and before.cache_hits is not None and after.cache_hits is not None:
            cached = int(after.cache_hits - before.cache_hits)
            if last.prompt_tokens is not None and not 0 <= cached < last.prompt_tokens:
                cached = None  # an attached server has other clients too, or was restarted
        seen.requests[-1] = replace(last, steps=steps, cached_tokens=cached)
        self.trial.journal.write(
            "steps", **self.trial.label, name=last.name, steps=steps, cached_tokens=cached
        )

    async def canary(self) -> None:
        """Request one token, to check that the engine is alive; set `seen.canary_ok`.

        It is None if the server refuses the request with a 4xx. Without a token wait up to three
        seconds for another sign of death.
        """
        trial, watch = self.trial, self.watch
        trial.notify("asking for one token, to see that the engine lives")

        async def ask() -> None:
            answer = await watch.ask_for_a_token(self.model)
            # which proves neither life nor death
            refused = answer.status is not None and 400 <= answer.status < 500
            trial.seen.canary_ok = None if refused else gave_a_token(answer)
            trial.journal.write(
                "canary",
                **trial.label,
                status=answer.status,
                error=answer.error,
                ok=trial.seen.canary_ok,
            )
            if not trial.seen.canary_ok and not trial.launch.kind.facts.started:
                trial.seen.measured.append(answer)  # a gateway may have answered
            if not trial.seen.canary_ok and not watch.ended:
                with contextlib.suppress(asyncio.TimeoutError):  # no other sign of death came
                    await asyncio.wait_for(watch.dead.wait(), _SIGN_AFTER_CANARY)

        await self.unless_over([asyncio.create_task(ask())])

    async def unless_over(self, tasks: list[asyncio.Task[None]]) -> None:
        """Await `tasks`, but no longer than until the engine is dead or hung.

        Then cancel those that are not finished; if it is dead, wait two seconds for them first.
        Raise what a task raises.
        """
        over = asyncio.create_task(self.watch.over())
        work: asyncio.Future[list[None]] = asyncio.gather(*tasks)
        waited: list[asyncio.Future[Any]] = [over, work]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                # The answers to requests in flight are evidence too, such as a 500 or an error
                # event.
                await asyncio.wait(tasks, timeout=2.0 if self.watch.dead.is_set() else 0.0)
        finally:
            over.cancel()
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # by the line above
                await work


def _shortened(body: dict[str, Any], prompt: Prompt, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body for a report: with the length of a generated prompt in place of its text.

    Fields that the harness adds are left out.
    """
    beginning = f", the first {prompt.shared:,} shared" if prompt.shared else ""
    made = (
        dict.fromkeys(prompt.body, f"({prompt.tokens:,} tokens{beginning})") if prompt.calls else {}
    )
    added = {"model", "stream_options"} - set(stated)
    return {key: made.get(key, value) for key, value in body.items() if key not in added}
