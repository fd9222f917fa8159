"""Player of a workload: step by step, with the invariants checked after each step."""

from __future__ import annotations

import linecache
import random
import traceback
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from .engine import Engine, NoBoot
from .invariants import Broken, at_rest, books, listed_twice

__all__ = ["Player", "Stuck", "at_fault", "ours", "play"]

_PATIENCE = 400
"""Steps without progress before a request counts as stuck. A transfer takes at most a few tens."""
_DRAIN = 40
_PROGRAM = str(Path(__file__).parent)
_VOCABULARY = range(10, 4000)


def play(case: Mapping[str, Any]) -> dict[str, Any]:
    """Play a case and return {steps, broken: [{invariant, detail, step, wave}], twice: [n], death: {...}?}.

    twice: for each wave, the most duplicate blocks in one store event. Return {invalid: why} if vLLM refuses the flags.
    Raise an exception that this program itself raised: it is no finding about vLLM.
    """
    try:
        engine = Engine(case)
    except NoBoot as error:
        return {"invalid": str(error)[:300]}
    player = _Player(engine, case)
    found: dict[str, Any] = {}
    try:
        player.play()
    except Stuck as error:
        how, detail, states = error.args
        found["death"] = {"kind": how, "detail": detail, "states": states, "wave": player.wave, "step": player.steps}
    except Exception as error:  # any exception of vLLM would have ended EngineCore
        if ours(error):
            raise
        found["death"] = {
            "kind": "death",
            **at_fault(error),
            "lost": _lost(error),
            "wave": player.wave,
            "step": player.steps,
        }
    finally:
        engine.close()
    return {"steps": player.steps, "broken": player.broken, "twice": player.twice, **player.seen, **found}


class Stuck(Exception):
    """Requests make no progress. Arguments: kind, detail, request states."""


class Player:
    """What the players of a scheduler and of EngineCore share. moved: the last step with progress. broken: see `play`."""

    def __init__(self, engine: Any, case: Mapping[str, Any]) -> None:
        self._engine, self._case = engine, case
        self._scheduler = engine.scheduler
        self._moved = self.steps = self.wave = 0
        self._known: set[str] = set()
        self.broken: list[dict[str, Any]] = []

    def _note(self, found: Iterable[Broken]) -> None:
        """Record the first violation of each invariant."""
        for invariant, detail in found:
            if invariant not in self._known:
                self._known.add(invariant)
                self.broken.append({"invariant": invariant, "detail": detail, "step": self.steps, "wave": self.wave})

    def _check_progress(self) -> None:
        """Raise `Stuck` if nothing has moved for too long."""
        if self.steps - self._moved <= _PATIENCE:
            return
        requests = list(self._scheduler.requests.values())
        if not requests:
            raise Stuck("restless", f"no request is left after {self.steps} steps", "")
        each = [f"{one.request_id} {one.status.name} {one.num_computed_tokens} of {one.num_tokens}" for one in requests]
        raise Stuck("stuck", "; ".join(each[:8]), ", ".join(sorted({one.status.name for one in requests})))


class _Player(Player):
    def __init__(self, engine: Engine, case: Mapping[str, Any]) -> None:
        super().__init__(engine, case)
        self._rng = random.Random(case["seed"])
        self._common = self._tokens(max((ask["shared"] for wave in case["waves"] for ask in wave), default=0))
        self._queue: deque[tuple[Any, Any]] = deque()
        self.twice: list[int] = []
        self._reached: dict[str, int] = {}
        self.seen = {"preempted": 0, "hits": 0, "stores": 0, "loads": 0}

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(_VOCABULARY, k=count)

    def play(self) -> None:
        for wave in self._case["waves"]:
            self.wave += 1
            self.twice.append(0)
            self._play_wave(wave)
        # An idle engine takes no step; the steps of the next request report the copies made meanwhile.
        for _ in range(_DRAIN):
            before = self.seen["stores"], self.seen["loads"]
            self._step()
            copying = before != (self.seen["stores"], self.seen["loads"])
            if not copying and not (self._engine.half and self._engine.half.busy) and not self._queue:
                self._note(at_rest(self._engine.pools, self._engine.managers))
                return

    def _play_wave(self, wave: list[Mapping[str, Any]]) -> None:
        started = self.steps
        waiting = [(ask["after"], number, ask) for number, ask in enumerate(wave, 1)]
        aborts: list[tuple[int, str]] = []
        self._moved = self.steps
        while waiting or self._queue or self._scheduler.has_requests():
            for due, number, ask in [one for one in waiting if one[0] <= self.steps - started]:
                waiting.remove((due, number, ask))
                name = f"w{self.wave}r{number}"
                own = ask["prompt"] - min(ask["shared"], ask["prompt"])
                prompt = self._common[: ask["prompt"] - own] + self._tokens(own)
                self._scheduler.add_request(self._engine.request(name, prompt, ask["answer"]))
                if ask["abort"] >= 0:
                    aborts.append((self.steps + ask["abort"], name))
            for due, name in [one for one in aborts if one[0] <= self.steps]:
                aborts.remove((due, name))
                self._scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
                self._check()
            self._step()
            self._check_progress()

    def _step(self) -> None:
        self.steps += 1
        scheduler = self._scheduler
        if not self._engine.asynchronous:
            output = scheduler.schedule()
            self._answer(output, self._execute(output))
            return
        if scheduler.has_requests() or not self._queue:
            output = scheduler.schedule()
            self._queue.append((output, self._execute(output)))
            if len(self._queue) < 2 and (output.total_num_scheduled_tokens or scheduler.has_requests()):
                return
        self._answer(*self._queue.popleft())

    def _execute(self, output: Any) -> Any:
        """Return the workers' output: a token for each request whose last known token is computed, more if drafts are accepted."""
        half, shadow = self._engine.half, self._engine.shadow
        names = list(output.num_scheduled_tokens)
        tokens: list[list[int]] = []
        if half is not None:
            half.before(output)
        shadow.copy(getattr(output, "kv_cache_block_copies", None) or ())
        for name in names:
            request = self._scheduler.requests[name]
            drafts = output.scheduled_spec_decode_tokens.get(name, ())
            count = output.num_scheduled_tokens[name]
            known = [*request.all_token_ids, *self._unanswered(name), *drafts]
            self._note(shadow.compute(name, known, request.num_computed_tokens - count, count))
            taken = self._rng.randint(0, len(drafts))
            new = [*drafts[:taken], *self._tokens(1)]
            tokens.append([] if request.is_prefill_chunk else new)
            if request.num_computed_tokens > self._reached.get(name, 0):
                self._reached[name] = request.num_computed_tokens
                self._moved = self.steps
        copied = None
        if half is not None:
            half.start()
            copied = half.after(output)
            listed = half.take_listed()
            self._note(listed_twice(listed))
            for direction, blocks in listed:
                self.seen["stores" if direction == "store" else "loads"] += 1
                if direction == "store":
                    self.twice[-1] = max(self.twice[-1], len(blocks) - len(set(blocks)))
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=copied,
        )

    def _unanswered(self, name: str) -> list[int]:
        """Return how many sampled tokens the scheduler does not know yet."""
        return [
            token
            for _, answer in self._queue
            if name in answer.req_id_to_index
            for token in answer.sampled_token_ids[answer.req_id_to_index[name]]
        ]

    def _answer(self, output: Any, answer: Any) -> None:
        self.seen["preempted"] += len(output.preempted_req_ids or ())
        self.seen["hits"] += sum(one.num_computed_tokens > 0 for one in output.scheduled_new_reqs)
        outputs = self._scheduler.update_from_output(output, answer)
        for one in outputs.values():
            if any(part.finish_reason is not None or part.new_token_ids for part in one.outputs):
                self._moved = self.steps
        if self._case["draft"] and output.total_num_scheduled_tokens:
            alive = [name for name, tokens in zip(answer.req_ids, answer.sampled_token_ids, strict=True) if tokens]
            drafts = [self._tokens(self._case["draft"]) for _ in alive]
            self._scheduler.update_draft_token_ids(DraftTokenIds(alive, drafts))
        self._check()

    def _check(self) -> None:
        self._note(books(self._engine.pools, self._engine.managers))


def ours(error: Exception) -> bool:
    """Return True if this program raised the exception."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_PROGRAM)


def _lost(error: Exception) -> tuple[int, int, int] | None:
    """Return (counted, present, requested) free blocks of a crash in the free list, from its innermost frame."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_code.co_name != "popleft_n":
        return None
    seen = frame.f_locals
    queue, wanted = seen["self"], seen["n"]
    # popleft_n also takes the tail marker before it fails.
    taken = [block for block in seen["ret"] if block is not queue.fake_free_list_tail]
    return queue.num_free_blocks + wanted, len(taken), wanted


def at_fault(error: Exception) -> dict[str, Any]:
    """Return where an exception was raised, without line numbers."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/vllm/" in frame.filename] or list(frames)
    last = own[-1]
    return {
        "exception": type(error).__name__,
        "message": str(error)[:300],
        "file": "vllm/" + last.filename.rpartition("/vllm/")[2],
        "function": last.name,
        "source": linecache.getline(last.filename, last.lineno or 0).strip(),
        "frames": [frame.name for frame in own][-8:],
    }
