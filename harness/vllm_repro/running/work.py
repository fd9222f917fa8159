"""The workload of one trial: its steps in order, prompts made to measure, answers taken down, and a canary at the end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx

from vllm_repro.client.answer import Answer
from vllm_repro.client.client import Client
from vllm_repro.client.metrics import Reading, steps_between
from vllm_repro.client.prompts import Prompt, build_chat, build_completion
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.running.idle import CpuSample, engine_cpu_seconds, is_idle, never_idle_message
from vllm_repro.running.watch import Watch
from vllm_repro.scenario.dialogue import Dialogue
from vllm_repro.scenario.sizes import resolve
from vllm_repro.scenario.workload import IDLE_AFTER, Conversation, Pause, Request, Rest, Step, Together
from vllm_repro.trigger.trigger import Asked
from vllm_repro.verdict.outcome import NEVER_IDLE

if TYPE_CHECKING:
    from vllm_repro.running.trial import Trial

__all__ = ["Work"]

_LOOK = 0.25
"""Seconds between two looks at an engine that is to come to rest."""

_USUAL_FIELDS = {"model", "prompt", "messages", "max_tokens", "stream", "stream_options", "temperature"}


@dataclass
class Work:
    """One server's work. `run` goes on until the workload is done, or the engine is dead or hung."""

    trial: Trial
    client: Client
    watch: Watch
    model: str = ""
    dialogues: dict[str, Dialogue] = field(default_factory=dict)
    shared: int = 0
    """Tokens of the shared head that an answered request has left in the prefix cache."""

    async def run(self) -> None:
        """Raises `InfraError` where the server lives and does not do what any vLLM does."""
        trial, watch = self.trial, self.watch
        try:
            self.model = await self.client.model_name()
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            if not await self._died_meanwhile():
                raise InfraError(f"the server is up, but /v1/models does not name a model: {error}") from error
            return
        for number, step in enumerate(trial.scenario.workload_of(trial.arm)):
            await self._step(number, step)
            suspicious = [sign for sign in watch.signs if not sign.decisive]
            if suspicious and not watch.ended:
                await self.canary()
            if watch.ended:
                return
        await self.finish()

    @property
    def _in_lab(self) -> bool:
        return self.trial.launch.kind.facts.in_lab

    async def finish(self) -> None:
        """The last word on whether the engine lives."""
        await self.canary()
        await self.watch.scrape()
        await self.watch.last_look()

    async def _step(self, number: int, step: Step) -> None:
        self.trial.say(f"step {number + 1}: {step}")
        match step:
            case Pause(seconds=seconds):
                await self.unless_over([asyncio.create_task(asyncio.sleep(seconds))])
            case Rest(within=within):
                await self.unless_over([asyncio.create_task(self._rest(within))])
            case Together(requests=requests):
                await self._requests(str(number), requests)
            case Conversation(turns=turns):
                for turn, request in enumerate(turns):
                    if not self.watch.ended:
                        await self._requests(f"{number}.{turn}", (request,))
            case Request():
                await self._requests(str(number), (step,))

    async def _rest(self, within: float) -> None:
        """Until the engine is at rest; after so many seconds without that it hangs."""
        samples: list[CpuSample] = []
        while not samples or samples[-1].at - samples[0].at < within:
            spent = await asyncio.to_thread(lambda: engine_cpu_seconds(self.watch.server.processes()))
            if spent is None:
                if await self._died_meanwhile():
                    return
                raise Unsupported(
                    "whether the engine comes to rest is told from the processor time of EngineCore, and no such process can be seen",
                    hint="run it on this host: --server process, docker or lab",
                )
            samples.append(CpuSample(time.monotonic(), spent))
            if is_idle(samples):
                self.trial.journal.write("rested", **self.trial.label, seconds=samples[-1].at - samples[0].at)
                return
            await asyncio.sleep(_LOOK)
        if await self._asked_by_others():
            raise InfraError(
                "somebody else asks this server too, so whether it comes to rest cannot be told",
                hint="run it while nobody else does",
            )
        self.trial.seen.doing = NEVER_IDLE
        self.watch.hang(never_idle_message(samples), samples[-1].at - samples[0].at)

    async def _asked_by_others(self) -> bool:
        """Whether a server that somebody else started has anything to do, while nothing of ours is left."""
        if self.trial.launch.kind.facts.started:
            return False
        before = await self.watch.scrape()
        await asyncio.sleep(IDLE_AFTER)
        after = await self.watch.scrape()
        if before is None or after is None:
            return False  # it does not answer, which is for the watcher to say
        return bool(after.running or after.waiting) or after.progress != before.progress

    async def _requests(self, position: str, requests: tuple[Request, ...]) -> None:
        """Requests in flight at the same time."""
        built = [(request, await self._build(f"{position}.{i}", request)) for i, request in enumerate(requests)]
        if self.watch.ended:
            return
        before = await self.watch.scrape() if len(built) == 1 else None
        tasks = [asyncio.create_task(self._send(request, prompt)) for request, prompt in built if prompt is not None]
        await self.unless_over(tasks)
        after = await self.watch.scrape() if before is not None and not self.watch.ended else None
        if before is not None and after is not None and tasks:
            self._take_counters(before, after)

    async def _build(self, position: str, request: Request) -> Prompt | None:
        """The prompt of a request; None where the server died while it was asked."""
        if isinstance(request.prompt, str):
            one = [{"role": "user", "content": request.prompt}]
            return Prompt({"messages": one} if "chat" in request.endpoint else {"prompt": request.prompt}, 0, 0)
        command = self.trial.launch.command
        tokens = resolve(request.prompt, command, in_lab=self._in_lab)
        # The trial's number is in the seed: a second boot against an attached server must not meet its own cached prompt.
        trial = f"{self.trial.seed}/{self.trial.arm.name}/{self.trial.number}"
        seed = f"{trial}/{position}"
        self.trial.say(f"making a prompt of {tokens} tokens")
        try:
            if request.conversation:
                return await self._next_turn(request, tokens, seed)
            if "chat" in request.endpoint:
                return await build_chat(self.client, self.model, tokens, seed, fields=request.fields)
            shared = resolve(request.shared, command, in_lab=self._in_lab)
            return await build_completion(
                self.client, self.model, tokens, seed, shared=shared, shared_seed=f"{trial}/shared"
            )
        except httpx.HTTPStatusError as error:
            if error.response.status_code < 500:
                refused = f"/tokenize answers {error.response.status_code}: {error.response.text[:200]}"
                raise InfraError(refused) from error
        except httpx.HTTPError:
            pass  # as a 5xx: whether that was a death is asked next
        if not await self._died_meanwhile():
            raise InfraError("/tokenize does not answer, though the server lives")
        return None

    async def _next_turn(self, request: Request, tokens: int, seed: str) -> Prompt:
        tools = request.fields.get("tools", ())
        dialogue = self.dialogues.setdefault(request.conversation, Dialogue(tools))
        prompt = await build_chat(
            self.client, self.model, tokens, seed, before=dialogue.said, message=dialogue.opening, fields=request.fields
        )
        dialogue.take(prompt.body["messages"][-1])
        return prompt

    async def _died_meanwhile(self) -> bool:
        """Whether the engine is dead or hung. That is for the watcher to say, which looks at /health ten times a second."""
        with contextlib.suppress(asyncio.TimeoutError):  # then nothing says that it died
            await asyncio.wait_for(self.watch.over(), 5.0)
        return self.watch.ended

    async def _send(self, request: Request, prompt: Prompt) -> None:
        answer_tokens = resolve(request.max_tokens, self.trial.launch.command, in_lab=self._in_lab)
        body: dict[str, Any] = {
            "model": self.model,
            **prompt.body,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "stream": request.stream,
            **request.fields,
        }
        if request.stream:
            body["stream_options"] = {"include_usage": True}
        trial = self.trial
        extra = {key: value for key, value in body.items() if key not in _USUAL_FIELDS}
        name = request.name or request.endpoint.rsplit("/v1/", maxsplit=1)[-1]
        trial.seen.sent += 1
        asked = Asked(
            name,
            prompt.tokens or None,
            "tokenize",
            fields=extra,
            repeats=self._repeats(request),
            status=None,
            answer_tokens=answer_tokens,
        )
        index = len(trial.seen.asked)
        trial.seen.asked.append(asked)
        trial.journal.write(
            "request-sent",
            **trial.label,
            name=name,
            endpoint=request.endpoint,
            prompt_tokens=prompt.tokens,
            tokenize_calls=prompt.calls,
            fields=extra,
            body=_telling(body, prompt),
        )
        self.watch.in_flight += 1
        try:
            answer = await self.client.ask(request.endpoint, body)
        finally:
            self.watch.in_flight -= 1
        sign = await self.watch.see_answer(answer)
        self._take_answer(index, asked, answer, died=sign is not None and answer.names_dead_engine)
        if answer.ok and request.conversation:
            self.dialogues[request.conversation].answered = prompt.tokens
        elif answer.ok:
            self.shared = max(self.shared, self._shared(request))

    def _repeats(self, request: Request) -> int:
        if request.conversation:
            return self.dialogues[request.conversation].answered
        return min(self._shared(request), self.shared)

    def _shared(self, request: Request) -> int:
        return resolve(request.shared, self.trial.launch.command, in_lab=self._in_lab)

    def _take_answer(self, index: int, asked: Asked, answer: Answer, *, died: bool) -> None:
        trial, usage = self.trial, answer.usage
        trial.seen.asked[index] = replace(
            asked,
            prompt_tokens=usage.prompt_tokens if usage else asked.prompt_tokens,
            counted_by="usage" if usage else "tokenize",
            cached_tokens=usage.cached_tokens if usage else None,
            answer_tokens=usage.completion_tokens if usage else asked.answer_tokens,
            status=answer.status,
            refusal=answer.error or "",
            died=died,
        )
        trial.seen.answers.append(answer)
        trial.journal.write(
            "answer",
            **trial.label,
            name=asked.name,
            status=answer.status,
            error=answer.error and answer.error[:2000],
            error_kind=answer.error_kind,
            finish_reason=answer.finish_reason,
            usage=usage,
            took_s=answer.ended - answer.sent,
        )
        trial.requests.write(
            "request",
            **trial.label,
            name=asked.name,
            sent=answer.sent,
            ended=answer.ended,
            status=answer.status,
            ok=answer.ok,
            usage=usage,
            token_times=[round(moment - answer.sent, 6) for moment in answer.token_times],
        )

    def _take_counters(self, before: Reading, after: Reading) -> None:
        """What the engine's counters say of the one request that was in flight between two scrapes."""
        seen = self.trial.seen
        steps = steps_between(before, after)
        last = seen.asked[-1]
        cached = last.cached_tokens
        if cached is None and before.cache_hits is not None and after.cache_hits is not None:
            cached = int(after.cache_hits - before.cache_hits)
            if last.prompt_tokens is not None and not 0 <= cached < last.prompt_tokens:
                cached = None  # a running server has other clients too, or was started anew
        seen.asked[-1] = replace(last, steps=steps, cached_tokens=cached)
        self.trial.journal.write("steps", **self.trial.label, name=last.name, steps=steps, cached_tokens=cached)

    async def canary(self) -> None:
        """A one-token completion: the only answer that proves that the engine still steps."""
        trial, watch = self.trial, self.watch
        trial.say("asking for one token, to see that the engine lives")
        body = {"model": self.model, "prompt": "hello", "max_tokens": 1, "temperature": 0}

        async def ask() -> None:
            watch.in_flight += 1
            try:
                answer = await self.client.ask("/v1/completions", body)
            finally:
                watch.in_flight -= 1
            trial.seen.canary_ok = answer.status == 200 and answer.error is None and not answer.empty
            trial.journal.write(
                "canary", **trial.label, status=answer.status, error=answer.error, ok=trial.seen.canary_ok
            )
            await watch.see_answer(answer, canary=True)
            if not trial.seen.canary_ok and not watch.ended:
                with contextlib.suppress(asyncio.TimeoutError):  # then the watcher asks again
                    await asyncio.wait_for(watch.dead.wait(), 3.0)

        await self.unless_over([asyncio.create_task(ask())])

    async def unless_over(self, tasks: list[asyncio.Task[None]]) -> None:
        """Awaits `tasks`; once the engine is dead or hung they get a moment to see it themselves, then they are cancelled."""
        over = asyncio.create_task(self.watch.over())
        work: asyncio.Future[list[None]] = asyncio.gather(*tasks)
        waited: list[asyncio.Future[Any]] = [over, work]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                # What the requests in flight are told is evidence too: a 500, an error event, a reset.
                await asyncio.wait(tasks, timeout=2.0 if self.watch.dead.is_set() else 0.0)
        finally:
            over.cancel()
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # by the line above
                await work


def _telling(body: dict[str, Any], prompt: Prompt) -> dict[str, Any]:
    """The body as a report shows it: a prompt that was made to a length is that length, not its text."""
    beginning = f", the first {prompt.shared:,} shared" if prompt.shared else ""
    made = dict.fromkeys(prompt.body, f"({prompt.tokens:,} tokens{beginning})") if prompt.tokens else {}
    return {key: made.get(key, value) for key, value in body.items() if key not in ("model", "stream_options")}
