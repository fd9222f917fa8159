"""One trial: one boot of one arm and its workload, watched from launch to end, everything into the journal.

This is the edge where the effects meet. What the trial *means* is not decided here: `vllm_repro.assess` reads the facts and gives the
outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from vllm_repro.assess import Conclusion, Seen, assess
from vllm_repro.client import Answer, Client
from vllm_repro.errors import HarnessBug, InfraError, ReproError, Unsupported
from vllm_repro.journal import Journal
from vllm_repro.launch import Launch
from vllm_repro.metrics import Reading, steps_between
from vllm_repro.prompts import Prompt, build_chat, build_completion
from vllm_repro.scenario import Arm, Scenario
from vllm_repro.servers.base import Server, ServerFacts
from vllm_repro.sizes import resolve
from vllm_repro.trigger import Asked
from vllm_repro.watch import Patience, Watch
from vllm_repro.workload import Pause, Request, Step, Together

__all__ = ["Trial", "run_trial"]

T = TypeVar("T")

_USUAL_FIELDS = {"model", "prompt", "messages", "max_tokens", "stream", "stream_options", "temperature", "ignore_eos"}


@dataclass
class Trial:
    """Everything that one trial needs, and what it saw so far."""

    scenario: Scenario
    arm: Arm
    number: int
    launch: Launch
    server: Server
    log: Path
    patience: Patience
    seed: int
    journal: Journal
    requests: Journal
    say: Callable[[str], None]
    api_key: str | None = None
    seen: Seen = field(default_factory=Seen)

    @property
    def label(self) -> dict[str, Any]:
        return {"arm": self.arm.name, "trial": self.number}


async def run_trial(trial: Trial) -> Conclusion:
    """Runs it to its end and concludes. The server is gone and the journal has the conclusion when this returns or raises.

    Raises only `asyncio.CancelledError`, after the same clean-up; what goes wrong otherwise is an outcome.
    """
    began = time.time()
    trial.journal.write(
        "trial-started",
        **trial.label,
        expected=trial.arm.expected,
        command=trial.launch.render(),
        server=trial.launch.kind,
        evidence=trial.launch.evidence,
        differences=trial.launch.differences,
    )
    cancelled = False
    try:
        await _boot_and_work(trial)
    except Unsupported as error:
        trial.seen.unsupported = f"{error}" + (f" ({error.hint})" if error.hint else "")
    except HarnessBug:
        raise
    except ReproError as error:
        trial.seen.infra = f"{error}" + (f" ({error.hint})" if error.hint else "")
    except asyncio.CancelledError:
        cancelled = True
        trial.seen.cancelled = "the run was interrupted"
    finally:
        _, interrupted = await _undisturbed(trial.server.stop())
        cancelled = cancelled or interrupted
    # From here on the trial is over, and an interrupt must not take what it saw with it.
    conclusion, interrupted = await _undisturbed(
        asyncio.to_thread(assess, trial.scenario, trial.launch.command, trial.seen, trial.log)
    )
    trial.journal.write(
        "trial-ended",
        **trial.label,
        duration_s=time.time() - began,
        log=f"logs/{trial.log.name}",
        **conclusion.as_fields(),
    )
    if cancelled or interrupted:
        raise asyncio.CancelledError
    return conclusion


async def _undisturbed(work: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """Awaits `work` to its end, whoever cancels meanwhile; what it returns, and whether somebody did."""
    task = asyncio.ensure_future(work)
    interrupted = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            interrupted = True
        except Exception:
            break  # raised again below, by the task itself
    return task.result(), interrupted


async def _boot_and_work(trial: Trial) -> None:
    trial.say("starting the server")
    launched = time.monotonic()
    facts: ServerFacts = await trial.server.start()
    trial.journal.write("server-started", **trial.label, facts=facts)
    trial.seen.facts = facts
    async with (
        Client(trial.server.base_url, api_key=trial.api_key) as client,
        Watch(trial.server, trial.launch.kind, client, trial.journal, trial.patience, trial.say) as watch,
    ):
        trial.seen.signs = watch.signs
        try:
            ready = await watch.until_ready()
            booted = trial.server.booted(facts, ready=ready)
            if booted != facts:
                trial.seen.facts = booted
                trial.journal.write("server-booted", **trial.label, facts=booted)
            if ready:
                trial.seen.boot_s = time.monotonic() - launched
                trial.seen.ready = True
                trial.seen.version = await _version(client)
                trial.journal.write("ready", **trial.label, boot_s=trial.seen.boot_s, version=trial.seen.version)
                await _work(trial, client, watch)
            if watch.dead.is_set():
                trial.say("the engine died; waiting for the end of its log")
                await watch.aftermath()
        finally:
            trial.seen.hung = watch.hung
            trial.seen.exit = watch.exit
            watch.stopping()


async def _version(client: Client) -> str | None:
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        return str((await client.get("/version", timeout=30.0)).json()["version"])
    return None


async def _work(trial: Trial, client: Client, watch: Watch) -> None:
    """The workload, step by step, until it is done or the engine is dead or hung; then a canary."""
    try:
        model = await client.model_name()
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        if not await _died_meanwhile(watch):
            raise InfraError(f"the server is up, but /v1/models does not name a model: {error}") from error
        return
    for number, step in enumerate(trial.scenario.workload_of(trial.arm)):
        if watch.ended:
            return
        await _step(trial, client, watch, model, number, step)
        suspicious = [sign for sign in watch.signs if not sign.decisive]
        if suspicious and not watch.ended:
            await _canary(trial, client, watch, model)
    if not watch.ended:
        await _canary(trial, client, watch, model)
        await watch.scrape()
        await watch.last_look()


async def _step(trial: Trial, client: Client, watch: Watch, model: str, number: int, step: Step) -> None:
    if isinstance(step, Pause):
        trial.say(f"step {number + 1}: {step}")
        waiting = asyncio.create_task(asyncio.sleep(step.seconds))
        await _unless_over(watch, [waiting])
        return
    requests = step.requests if isinstance(step, Together) else (step,)
    built = [await _build(trial, client, watch, model, f"{number}.{i}", request) for i, request in enumerate(requests)]
    ready = [pair for pair in zip(requests, built, strict=True) if pair[1] is not None]
    if watch.ended:
        return
    before = await watch.scrape() if len(ready) == 1 else None
    trial.say(f"step {number + 1}: {step}")
    tasks = [
        asyncio.create_task(_send(trial, client, watch, model, request, prompt))
        for request, prompt in ready
        if prompt is not None
    ]
    await _unless_over(watch, tasks)
    after = await watch.scrape() if before is not None and not watch.ended else None
    if before is not None and after is not None and len(tasks) == 1:
        _add_steps(trial, before, after)


async def _build(
    trial: Trial, client: Client, watch: Watch, model: str, position: str, request: Request
) -> Prompt | None:
    """The prompt of a request; None where the server died while it was asked."""
    if isinstance(request.prompt, str):
        return Prompt(
            {"prompt": request.prompt} if "chat" not in request.endpoint else _one_message(request.prompt), 0, 0
        )
    tokens = resolve(request.prompt, trial.launch.command)
    # The trial's number is in the seed: a second boot against an attached server must not meet its own cached prompt.
    seed = f"{trial.seed}/{trial.arm.name}/{trial.number}/{position}"
    trial.say(f"making a prompt of {tokens} tokens")
    try:
        if "chat" in request.endpoint:
            return await build_chat(client, model, tokens, seed)
        return await build_completion(client, model, tokens, seed)
    except httpx.HTTPStatusError as error:
        if error.response.status_code < 500:
            raise InfraError(f"/tokenize answers {error.response.status_code}: {error.response.text[:200]}") from error
    except httpx.HTTPError:
        pass
    if not await _died_meanwhile(watch):
        raise InfraError("/tokenize does not answer, though the server lives")
    return None


async def _died_meanwhile(watch: Watch) -> bool:
    """Whether the engine is dead or hung. That is for the watcher to say, which looks at /health ten times a second."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(watch.over(), 5.0)
    return watch.ended


def _one_message(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _telling(body: dict[str, Any], prompt: Prompt) -> dict[str, Any]:
    """The body as a report shows it: a prompt that was made to a length is that length, not its text."""
    made = dict.fromkeys(prompt.body, f"({prompt.tokens:,} tokens)") if prompt.tokens else {}
    return {key: made.get(key, value) for key, value in body.items() if key not in ("model", "stream_options")}


async def _send(trial: Trial, client: Client, watch: Watch, model: str, request: Request, prompt: Prompt) -> None:
    body: dict[str, Any] = {
        "model": model,
        **prompt.body,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": request.stream,
        **request.fields,
    }
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    extra = {key: value for key, value in body.items() if key not in _USUAL_FIELDS}
    name = request.name or request.endpoint.rsplit("/v1/", maxsplit=1)[-1]
    trial.seen.sent += 1
    asked = Asked(name, prompt.tokens or None, "tokenize", fields=extra, status=None)
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
    watch.in_flight += 1
    try:
        answer = await client.ask(request.endpoint, body)
    finally:
        watch.in_flight -= 1
    sign = await watch.see_answer(answer)
    _take_answer(trial, index, asked, answer, died=sign is not None and answer.names_dead_engine)


def _take_answer(trial: Trial, index: int, asked: Asked, answer: Answer, *, died: bool) -> None:
    usage = answer.usage
    trial.seen.asked[index] = Asked(
        asked.name,
        usage.prompt_tokens if usage else asked.prompt_tokens,
        "usage" if usage else "tokenize",
        usage.cached_tokens if usage else None,
        fields=asked.fields,
        status=answer.status,
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


def _add_steps(trial: Trial, before: Reading, after: Reading) -> None:
    if not trial.seen.asked:
        return
    steps = steps_between(before, after)
    last = trial.seen.asked[-1]
    trial.seen.asked[-1] = Asked(
        last.name, last.prompt_tokens, last.counted_by, last.cached_tokens, steps, last.fields, last.status, last.died
    )
    trial.journal.write("steps", **trial.label, name=last.name, steps=steps)


async def _canary(trial: Trial, client: Client, watch: Watch, model: str) -> None:
    """A one-token completion: the only answer that proves that the engine still steps."""
    trial.say("asking for one token, to see that the engine lives")
    body = {"model": model, "prompt": "hello", "max_tokens": 1, "temperature": 0}

    async def ask() -> None:
        watch.in_flight += 1
        try:
            answer = await client.ask("/v1/completions", body)
        finally:
            watch.in_flight -= 1
        trial.seen.canary_ok = answer.status == 200 and answer.error is None and not answer.empty
        trial.journal.write("canary", **trial.label, status=answer.status, error=answer.error, ok=trial.seen.canary_ok)
        await watch.see_answer(answer, canary=True)
        if not trial.seen.canary_ok and not watch.ended:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(watch.dead.wait(), 3.0)

    await _unless_over(watch, [asyncio.create_task(ask())])


async def _unless_over(watch: Watch, tasks: list[asyncio.Task[None]]) -> None:
    """Awaits `tasks`; once the engine is dead or hung they get a moment to see it themselves, then they are cancelled."""
    over = asyncio.create_task(watch.over())
    work: asyncio.Future[list[None]] = asyncio.gather(*tasks)
    waited: list[asyncio.Future[Any]] = [over, work]
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            # What the requests in flight are told is evidence too: a 500, an error event, a reset.
            await asyncio.wait(tasks, timeout=2.0 if watch.dead.is_set() else 0.0)
    finally:
        over.cancel()
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
