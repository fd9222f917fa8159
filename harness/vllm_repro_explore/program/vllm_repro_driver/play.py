"""Player of a workload on EngineCore: each step's answers are compared with the reference."""

from __future__ import annotations

import linecache
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from vllm.v1.core.sched import interface
from vllm.v1.engine import EngineCoreRequestType

from .config import NoBoot, pools_of, tiers_of
from .engine_core import FAULTY, Matcher, Refused, boot, event_block_of, request_of, sampling
from .executor import ModelRunnerError, Traits, key_of
from .invariants import Broken, at_rest, books, tier_books
from .reference import IMAGES, PLACEHOLDER, TEXT, ended, image, pick, states

_HAS_PAUSES = hasattr(interface, "PauseState")

_PATIENCE = 400
"""Steps without progress before a request counts as stuck. A transfer takes at most a few tens."""
_DRAIN = 80
_PROGRAM = str(Path(__file__).parent)


def play(case: Mapping[str, Any]) -> dict[str, Any]:
    """Play a case on vLLM's EngineCore and return its result as a JSON object.

    Keys: steps, vllm_us, broken: [{invariant, detail, step}], counts of events, and death: {...} if
    the engine died or made no progress. With case["trace"] also trace and answers.

    case["worker"]: "runner" for the release's own model runner, "both" to compare the two. An
    exception of this program is raised at boot, and later the death {"kind": "harness"}. Return
    {invalid: why} if vLLM refuses the flags.
    """
    if case.get("worker") == "both":
        return _play_both(case)
    try:
        engine = boot(case)
    except NoBoot as error:
        return {"invalid": str(error)[:300]}
    except Exception as error:
        if _ours(error):
            raise
        return {"steps": 0, "broken": [], "death": {"kind": "death", **_at_fault(error)}}
    player = _Player(engine, case)
    ending: dict[str, Any] = {}
    try:
        player.play()
    except _Stuck as error:
        how, detail, states = error.args
        ending["death"] = {"kind": how, "detail": detail, "states": states}
    except ModelRunnerError as error:
        ending["death"] = {
            "kind": "death",
            "exception": "RuntimeError",
            "message": str(error),
            **error.place,
        }
    except Exception as error:  # it would have ended EngineCore, or is a fault of this program
        ending["death"] = {"kind": "harness" if _ours(error) else "death", **_at_fault(error)}
    engine.structured_output_manager.clear_backend()
    engine.scheduler.shutdown()
    more = {"trace": player.executor.trace, "answers": player.answers} if case.get("trace") else {}
    return {
        "steps": player.steps,
        "vllm_us": player.cpu_us - player.executor.cpu_us,
        "broken": list(player.broken.values()),
        **player.executor.seen,
        **player.seen,
        **ending,
        **more,
    }


def _play_both(case: Mapping[str, Any]) -> dict[str, Any]:
    """Play a case over the fake and the real model runner; a difference is a violation.

    Return the result over the fake one, with the keys answers, shown and dies that are compared, or
    {invalid: why} if the real one cannot play the case.
    """
    ours, theirs = (play({**case, "worker": worker, "trace": True}) for worker in ("", "runner"))
    if "invalid" in theirs:
        return theirs
    pairs = enumerate(zip_longest(ours.pop("trace", ()), theirs.get("trace", ())))
    unlike = next(
        (
            f"step {step}: {our_row}, the runner {their_row}"
            for step, (our_row, their_row) in pairs
            if our_row != their_row
        ),
        "",
    )
    for result in ours, theirs:  # a runner does not say which blocks and states it reads
        names = (broken["invariant"] for broken in result["broken"])
        result["shown"] = [
            name.partition(" ")[0] for name in names if not name.startswith(("reads-", "writes-"))
        ]
        death = result.get("death", {})
        result["dies"] = [death.get(name) for name in ("kind", "exception", "message", "function")]
    if not unlike and any(
        ours.get(name) != theirs.get(name) for name in ("answers", "shown", "dies")
    ):
        unlike = f"{ours}, the runner {theirs}"
    if unlike:
        ours["broken"].append({"invariant": "unlike-the-model-runner", "detail": unlike, "step": 0})
    return ours


class _Stuck(Exception):
    """The engine makes no progress for 400 steps.

    Arguments: kind ("stuck"; "restless" if it goes on stepping without a request), detail, and the
    states of the requests as text.
    """


@dataclass
class _Sent:
    """A request that was sent, and its answer so far."""

    ask: Mapping[str, Any]
    # of a streaming session that of its turn, as `answer`
    prompt: list[int]
    sampling: Any
    answer: list[int] = field(default_factory=list)
    # vLLM's finish reason; empty while it runs, and for a streaming session
    end: str = ""
    aborted: bool = False
    # what a streaming session was fed
    parts: list[list[int]] = field(default_factory=list)
    # those that ended
    turns: int = 0


class _Player:
    """Player of one case: it sends requests, steps the engine and checks the answers."""

    def __init__(self, engine: Any, case: Mapping[str, Any]) -> None:
        self._engine, self._case = engine, case
        self._scheduler, self.executor = engine.scheduler, engine.model_executor
        # _moved: the last step with progress
        self._moved = self.steps = 0
        # the first violation of each invariant
        self.broken: dict[str, dict[str, Any]] = {}
        self._managers = tuple(self._scheduler.kv_cache_manager.coordinator.single_type_managers)
        self._sent: dict[str, _Sent] = {}
        self._farthest: dict[str, int] = {}
        self._pending: list[tuple[str, Future[Any]]] = []  # pauses that wait for an idle engine
        self.seen: Counter[str] = Counter()
        # CPU time of the engine's steps, with that of the executor
        self.cpu_us = 0.0

    @property
    def answers(self) -> dict[str, list[int]]:
        """Return each request's answer, by its name; of a session its unfinished turn."""
        return {name: sent.answer for name, sent in self._sent.items()}

    def play(self) -> None:
        """Play all waves, wait until nothing is left, and note requests without an answer.

        Raises `_Stuck` if nothing progresses, and what vLLM raises.
        """
        operations = [event for at, what in self._case["ops"] for event in _operation(at, what)]
        for wave in self._case["waves"]:
            self._play_wave([*operations, *_events(wave)])
            operations = []
        self._rest()
        for name, sent in self._sent.items():
            if sent.ask["segments"] or sent.end:
                continue
            if sent.aborted:
                self._note(self._judge(name, sent, ""))
            else:
                self._note([("never-answered", name)])

    def _play_wave(self, events: list[tuple[int, int, str, Any]]) -> None:
        """Do each event at its step, and step the engine until it is idle and no event is left.

        events: as of `_events` and `_operation`; the list is emptied. Steps count from 0; an idle
        engine skips to the next event.
        """
        events.sort(key=lambda event: event[:2])
        clock = 0
        self._moved = self.steps
        while events or self._engine.has_work():
            while events and events[0][0] <= clock:
                if self._waits(events[0][3]):
                    _postpone(events, events[0][3])
                    continue
                _, _, what, ask = events.pop(0)
                self._moved = self.steps
                self._event(what, ask)
            if self._engine.has_work():
                self._step()
                clock += 1
            else:
                self._idle()
                clock = max(clock, events[0][0]) if events else clock
            self._check_progress()

    def _waits(self, ask: Any) -> bool:
        """Return True if the engine works and a request continues an answer that has not ended."""
        if not ask or ask["follows"] < 0 or not self._engine.has_work():
            return False
        before = self._sent.get(f"r{ask['follows']}")
        return before is None or not (before.end or before.aborted)

    def _event(self, what: str, ask: Any) -> None:
        """Do an event: add, feed or abort a request, or reset, pause, resume or wake the engine.

        what: name of the event. ask: its request; None for an event of the engine.
        """
        name = f"r{ask['number']}" if ask else ""
        sent = self._sent.get(name)
        match what:
            case "add":
                self._add(name, ask)
            case "feed" if sent and not sent.end and not sent.aborted:
                self._feed(name, sent)
            case "abort" if sent and not sent.aborted:
                sent.aborted = True
                self.seen["aborted"] += 1
                # EngineCoreProc puts an abort into both: one is read within a step, the other
                # before the next.
                if ask["mid"] and self._engine.has_work():
                    self._engine.aborts_queue.put_nowait([name])
                    self._step()
                self._engine.abort_requests([name])
            case "reset" | "reset-running" | "reset-connector":
                self.seen["resets"] += 1
                # of running requests, and of the connector's cache
                flags = {"reset-running": [True], "reset-connector": [True, True]}
                self._call("reset_prefix_cache", *flags.get(what, []))
            case "resume":
                if self.executor.is_sleeping:
                    self.executor.asleep = "resumed while it sleeps"
                self._call("resume_scheduler")
            case "wake":
                if any(call == "sleep" for call, _ in self._pending):
                    self.executor.asleep = "woken before it sleeps"
                self._call("wake_up")
            case _ if what.startswith("pause-"):
                self._pause(*what.split("-")[1:-1])

    def _pause(self, mode: str, then: str = "") -> None:
        """Pause the engine as the API server does, and `then` clear its caches or let it sleep.

        mode: of the pause. then: "clear", "sleep", or empty.
        """
        self.seen["pauses"] += 1
        if then and (sender := getattr(self._engine, "image_cache", None)):
            sender.clear_cache()
        if then == "sleep":
            self._call("sleep", 1, mode)
        else:
            name = (
                "pause_generation"
                if hasattr(self._engine, "pause_generation")
                else "pause_scheduler"
            )
            self._call(name, mode, then == "clear")

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a method of the engine as the API server does.

        An exception, now or when a pause ends, counts as a refused call. A pause that is not
        complete yet is kept in `_pending`.
        """
        try:
            called = getattr(self._engine, name)(*arguments)
            if isinstance(called, Future):
                self._pending.append((name, called))
        except Exception as error:
            self._refused(error)
        self._take_queued()

    def _refused(self, error: BaseException) -> None:
        """Count a call that the engine refused; raise the error if it is this program's own."""
        if _ours(error):
            raise error
        self.seen["refused calls"] += 1

    def _idle(self) -> None:
        """Do what an idle EngineCoreProc does: end the pauses that wait for it."""
        self._engine._notify_idle_state_callbacks()
        ended, self._pending = (
            self._pending,
            [pause for pause in self._pending if not pause[1].done()],
        )
        for _, call in ended:
            if call.done() and (error := call.exception()):
                self._refused(error)

    def _add(self, name: str, ask: Mapping[str, Any]) -> None:
        """Send a new request, and tell the executor what vLLM sends no worker, such as the salt.

        Count a refused one; note a violation if vLLM should accept it.
        """
        before = self._sent.get(f"r{ask['follows']}")
        prompt = _prompt(
            self._case["seed"], ask, [*before.prompt, *before.answer] if before else []
        )
        try:
            params = sampling(self._engine, ask)
            request = request_of(self._engine, name, prompt, params, ask, bool(ask["segments"]))
        except Refused as error:
            self.seen["refused requests"] += 1
            what, unexpected = error.args
            if unexpected:
                self._note([("unexpected-error", f"{name} is refused: {what}")])
            return
        for offset, length, number in ask["images"]:
            prompt[offset : offset + length] = image(number, length)
        self.executor.traits[name] = Traits(
            salt=ask["salt"],
            eos=0 if ask["grammar"] else ask["eos"],
            prompt=prompt,
            least=ask["least"],
            grammar=Matcher(self._engine, params) if ask["grammar"] else None,
        )
        self.executor.remote[name] = prompt, key_of(ask["salt"], ask["lora"]), ask["fails"]
        self._sent[name] = _Sent(ask, prompt, params)
        self._send(request)

    def _send(self, request: tuple[Any, int]) -> None:
        """Hand a request to EngineCore, and process the outputs that it gives without a step."""
        self._engine._handle_client_request(EngineCoreRequestType.ADD, request)
        self._take_queued()

    def _feed(self, name: str, sent: _Sent) -> None:
        """Send the next part of a streaming session; the last one ends it."""
        rng = random.Random(f"{self._case['seed']}/{name}/{len(sent.parts) + 1}")
        block = self._case["block"]
        tokens = rng.choices(TEXT, k=rng.choice((1, 3, block, 2 * block)))
        sent.parts.append(tokens)
        params = sampling(self._engine, sent.ask)
        self.seen["fed"] += 1
        more = len(sent.parts) < len(sent.ask["segments"])
        ask = {**sent.ask, "images": ()}
        self._send(request_of(self._engine, name, tokens, params, ask, more))

    def _step(self) -> None:
        """Let the engine take a step, then check its outputs and its block accounting."""
        self.steps += 1
        self.executor.paused = _paused(self._scheduler)
        began = time.thread_time_ns()
        outputs, executed = self._engine.step_fn()
        self._engine.post_step(executed)
        self.cpu_us += (time.thread_time_ns() - began) / 1000
        for group in (outputs or {}).values():
            self._take(group)
        for request in self._scheduler.running:
            # A request that is preempted and computed again makes no progress until it is beyond
            # where it was.
            if request.num_computed_tokens > self._farthest.get(request.request_id, 0):
                self._farthest[request.request_id] = request.num_computed_tokens
                self._moved = self.steps
        self._note(self.executor.notes)
        self.executor.notes.clear()
        running = len(self._scheduler.running)
        counted = self._scheduler.get_num_unfinished_requests()
        if counted < running and not _paused(self._scheduler):
            self._note([("wrong-counts", f"{running} requests run, and {counted} are unfinished")])
        pools = pools_of(self._scheduler)
        self._note(books(pools, self._managers))
        self._note(self._engine.kv_index.check_connector())
        if self._case["events"]:
            self._note(self._engine.kv_index.check(pools["gpu"], event_block_of))

    def _take_queued(self) -> None:
        """Process the outputs that EngineCoreProc has queued outside of its steps."""
        while not self._engine.output_queue.empty():
            self._take(self._engine.output_queue.get_nowait()[1])

    def _take(self, group: Any) -> None:
        """Process each request's output in an EngineCoreOutputs."""
        for output in group.outputs:
            self._take_output(output)
        if stats := group.scheduler_stats:
            skipped = getattr(stats, "num_skipped_waiting_reqs", 0)
            shown = stats.num_running_reqs, stats.num_waiting_reqs + skipped
            running = len(self._scheduler.running)
            left = self._scheduler.requests.values()
            waiting = sum(not request.is_finished() for request in left) - running
            if shown != (running, waiting):
                self._note([("wrong-counts", f"{shown} run and wait, not {running, waiting}")])

    def _take_output(self, output: Any) -> None:
        """Add an output's tokens to its request's answer, and judge an answer that ends."""
        name = output.request_id
        sent = self._sent.get(name)
        if sent is None:
            self._note([("output-of-nobody", name)])
            return
        if output.new_token_ids or output.finish_reason is not None:
            self._moved = self.steps
        if sent.end:
            self._note([("output-after-end", name)])
        sent.answer.extend(output.new_token_ids)
        if output.finish_reason is not None:
            end = str(output.finish_reason).lower()
            sent.aborted |= "abort" in end
            if getattr(getattr(output, "error", None), "retryable", False):
                sent.end = end  # 0.33.0 takes no new request while it is paused
                self.seen["refused requests"] += 1
            elif sent.ask["segments"]:
                self._end_turn(name, sent, end)
            else:
                sent.end = end
                self._note(self._judge(name, sent, end))

    def _end_turn(self, name: str, sent: _Sent, end: str) -> None:
        """Judge the answer of a session's turn, unless it was aborted, and begin the next turn.

        The next turn continues the prompt and the answer but for its last token.
        """
        if "abort" in end:
            return
        if sent.turns > len(sent.parts):
            self._note(
                [
                    (
                        "output-after-end",
                        (
                            f"{name}: turn {sent.turns + 1} of {len(sent.parts) + 1} that were sent"
                            " ends"
                        ),
                    )
                ]
            )
            return
        if sent.turns:
            sent.prompt = [*sent.prompt, *sent.parts[sent.turns - 1]]
        sent.turns += 1
        self._note(self._judge(name, sent, end))
        sent.prompt, sent.answer = [*sent.prompt, *sent.answer[:-1]], []

    def _judge(self, name: str, sent: _Sent, end: str) -> Iterator[Broken]:
        """Yield violations of an answer against the reference, its length and its end.

        Count an answer that ends with an error. That of a prefill for another server is not judged.
        """
        ask, answer = sent.ask, sent.answer
        if "error" in end:
            self.seen["errors"] += 1
            # Blocks that came from a store in a step may be shared by then, and fail with it.
            may_fail = ask["fails"] or self._case["connector"].endswith("StoreConnector")
            lost = may_fail and self._case["load_failures"] == "fail"
            if not lost and ask["grammar"] not in FAULTY:
                yield (
                    self._named("unexpected-error", name),
                    f"{name} ends with an error, grammar {ask['grammar'] or 'none'}",
                )
            return
        if ask["remote"]:  # the decode server answers
            return
        length = min(ask["answer"], self._case["max_len"] - len(sent.prompt))
        if len(answer) > length or ("length" in end and len(answer) != length):
            yield "wrong-length", f"{name}: {len(answer)} of {length} tokens"
        if not answer:
            return
        key = key_of(ask["salt"], ask["lora"])
        values = states(sent.prompt + answer[:-1], key, self.executor.windows)[
            len(sent.prompt) - 1 :
        ]
        grammar = Matcher(self._engine, sent.sampling) if ask["grammar"] else None
        for place, token in enumerate(answer):
            row = grammar.row(answer[:place]) if grammar else None
            if place < ask["least"]:
                row = self.executor.endless
            right = pick(values[place], row, 0 if ask["grammar"] else ask["eos"])
            if token != right:
                where = f"token {place} of the answer to {len(sent.prompt)} tokens"
                yield (
                    self._named("wrong-token", name),
                    f"{name}: {where} is {token}, the reference {right}",
                )
                return
        due = ended(answer, ask["least"], stops=ask["stops"], repeats=ask["eos"] < 0)
        if ("stop" in end or "repetition" in end) and due != len(answer):
            yield "wrong-end", f"{name}: stops at {answer[-1]}"
        elif 0 < due < len(answer):
            yield "wrong-end", f"{name}: goes on after token {due}, which ends it"

    def _named(self, invariant: str, name: str) -> str:
        """Return the invariant with the rule by which this request, or another, lost a state.

        Another request may have cached the state that this one reads. Without a lost state, return
        the invariant alone.
        """
        lost = self.executor.lost
        return f"{invariant} ({lost.get(name) or next(iter(lost.values()))})" if lost else invariant

    def _note(self, violations: Iterable[Broken]) -> None:
        """Record the first violation of each invariant."""
        for invariant, detail in violations:
            violation = {"invariant": invariant, "detail": detail, "step": self.steps}
            self.broken.setdefault(invariant, violation)

    def _check_progress(self) -> None:
        """Raise `_Stuck` after 400 steps without progress; "restless" if no request is left."""
        if self.steps - self._moved <= _PATIENCE:
            return
        requests = list(self._scheduler.requests.values())
        if not requests:
            raise _Stuck("restless", f"no request is left after {self.steps} steps", "")
        each = [
            f"{request.request_id} {request.status.name}"
            f" {request.num_computed_tokens} of {request.num_tokens}"
            for request in requests
        ]
        raise _Stuck(
            "stuck",
            "; ".join(each[:8]),
            ", ".join(sorted({request.status.name for request in requests})),
        )

    def _rest(self) -> None:
        """Step until the scheduler knows that no transfer is left; then check the held blocks.

        Check nothing if transfers are left after 80 steps.
        """
        half, quiet = self.executor.half, 0
        for _ in range(_DRAIN):
            quiet = 0 if self._engine.has_work() or (half and half.busy) else quiet + 1
            if quiet > 4 or (quiet and not half):
                break
            self.steps += 1
            if self._engine.has_work():
                self._engine.step_fn()
                continue
            output = self._scheduler.schedule()
            self._scheduler.update_from_output(output, self.executor.execute_model(output))
        else:
            return
        self._note(at_rest(pools_of(self._scheduler), self._managers))
        for tier in tiers_of(self._scheduler):
            self._note(tier_books(tier))
        # what is still known of requests that ended; the worker is told in the next step
        kept = {"request-leak": self._scheduler.requests, "worker-leak": self.executor.known}
        self._note(
            (kind, f"known at rest: {', '.join(list(names)[:4])}")
            for kind, names in kept.items()
            if names
        )


def _operation(at: int, what: str) -> Iterator[tuple[int, int, str, None]]:
    """Yield (step, order in the step, event, None) of a reset or pause; also of a pause's end.

    Yield nothing for a pause if the release has none.
    """
    if what.startswith("pause-"):
        if not _HAS_PAUSES:  # older releases have no pause
            return
        yield at + int(what.rsplit("-", 1)[1]), 4, "wake" if "-sleep" in what else "resume", None
    yield at, 3, what, None


def _events(wave: list[Mapping[str, Any]]) -> Iterator[tuple[int, int, str, Any]]:
    """Yield (step, order in the step, event, request) for each event of a wave's requests.

    These are arrivals, further parts of streaming sessions, and aborts.
    """
    for ask in wave:
        yield ask["after"], 0, "add", ask
        for later in ask["segments"]:
            yield ask["after"] + later, 1, "feed", ask
        if ask["abort"] >= 0:
            yield ask["after"] + ask["abort"], 2, "abort", ask


def _paused(scheduler: Any) -> bool:
    """Return True if nothing may be scheduled until the engine is resumed."""
    return getattr(getattr(scheduler, "_pause_state", None), "name", "") == "PAUSED_ALL"


def _postpone(events: list[tuple[int, int, str, Any]], ask: Mapping[str, Any]) -> None:
    """Move all events of a request one step later."""
    events[:] = [(at + (whose is ask), order, what, whose) for at, order, what, whose in events]
    events.sort(key=lambda event: event[:2])


def _prompt(seed: int, ask: Mapping[str, Any], before: list[int]) -> list[int]:
    """Return the prompt's tokens; requests of a family share their first ones.

    before: prompt and answer that it begins with, as a chat does; empty for none.
    """
    family, rest = (
        random.Random(f"{seed}/family{ask['family']}"),
        random.Random(f"{seed}/request{ask['number']}"),
    )
    shared = min(ask["shared"], ask["prompt"])
    tokens = family.choices(TEXT, k=shared) + rest.choices(TEXT, k=ask["prompt"] - shared)
    if 0 < ask["switch"] < shared:
        other = random.Random(f"{seed}/family{1 - ask['family']}")
        tokens[ask["switch"] : shared] = other.choices(TEXT, k=shared)[ask["switch"] :]
    spoken = before[: len(tokens)]
    # an image that this request does not have is text
    tokens[: len(spoken)] = [token if token < IMAGES else PLACEHOLDER for token in spoken]
    for offset, length, _ in ask["images"]:
        tokens[offset : offset + length] = [PLACEHOLDER] * length
    return tokens


def _ours(error: BaseException) -> bool:
    """Return True if this program raised the exception."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_PROGRAM)


def _at_fault(error: Exception) -> dict[str, Any]:
    """Return an exception as the JSON object `death`, with the place where it was raised.

    Keys: exception (its class), message; file, function, line and source of the last frame in vLLM;
    frames (functions of the last 8 frames in vLLM). If no frame is in vLLM, all frames count, and
    file is a name without its folder.
    """
    frames = traceback.extract_tb(error.__traceback__)
    in_vllm = [
        frame
        for frame in frames
        if "/vllm/" in frame.filename and not frame.filename.startswith(_PROGRAM)
    ] or list(frames)
    last = in_vllm[-1]
    _, inside, below = last.filename.rpartition("/vllm/")
    return {
        "exception": type(error).__name__,
        "message": str(error)[:300],
        "file": f"vllm/{below}" if inside else Path(below).name,
        "function": last.name,
        "line": last.lineno,
        "source": linecache.getline(last.filename, last.lineno or 0).strip(),
        "frames": [frame.name for frame in in_vllm][-8:],
    }
