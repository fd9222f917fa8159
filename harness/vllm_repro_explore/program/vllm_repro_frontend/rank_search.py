"""Search for an order of messages after which data-parallel engines hang, or compute in a pause."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from random import Random
from typing import Any

from .ranks import World, prepare
from .smallest import smallest

_PLAIN = "requests and aborts"
_AWAITED = "a pause, then a resume"
_TWO_PAUSES = "two pauses at once"
_RESUME_ALONE = "a resume without a pause"
_SESSION = "an open session in a pause"
_KINDS = (_PLAIN, _AWAITED, _TWO_PAUSES, _RESUME_ALONE, _SESSION)
_CLIENTS = 2
_ORDERS = 6
"""Other orders of messages that are tried for a simpler case."""
Act = tuple[Any, ...]
"""Turns that a client leaves to others before, what it does, and the values for that."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Acts of the clients, and a seed for the order in which their messages arrive."""

    kind: str
    ranks: int
    # steps from a collective on the ranks' state to the next
    every: int
    seed: int
    # by client
    acts: tuple[tuple[Act, ...], ...]


def draw(rng: Random) -> Case:
    """Return a random case."""
    kind, acts = rng.choice(_KINDS), []
    for client in range(_CLIENTS):
        own: list[tuple[Any, ...]] = []
        for _ in range(rng.randrange(1, 4)):
            own.append(("add", rng.randrange(3), rng.randrange(1, 6)))
            own += [("abort",)] * (rng.random() < 0.3)
        session: list[tuple[Any, ...]] = [("chunk", 2)] * (kind == _SESSION and client == 0)
        if kind != _PLAIN and (client == 0 or kind == _TWO_PAUSES):
            at, end = sorted(rng.choices(range(len(own) + 1), k=2))
            modes = "abort", "wait", "keep"
            pause = ("pause", rng.choice(modes), rng.random() < 0.5)
            stop = pause if rng.random() < 0.7 else ("sleep", 1, rng.choice(modes))
            own[end:end] = [*session, ("resume",)]
            own[at:at] = [] if kind == _RESUME_ALONE else [*session, stop]
        acts.append(tuple((rng.choice((0, 0, 3, 30)), *act) for act in own))
    return Case(
        kind=kind,
        ranks=rng.choice((2, 2, 3)),
        every=rng.choice((3, 4, 16)),
        seed=rng.randrange(1_000_000),
        acts=tuple(acts),
    )


class _Play:
    """A world and the clients of a case, each of which does one thing after the other."""

    def __init__(self, case: Case) -> None:
        self.world = World(case.ranks, _CLIENTS, case.every, case.seed)
        self._case = case
        self._added: dict[str, int] = {}
        self._aborted: set[str] = set()
        self._done = 0
        # control calls without an answer of all ranks
        self._open: set[int] = set()
        self._paused = self._asleep = False
        # steps with requests when the pause was complete
        self._mark: int | None = None
        for client in range(_CLIENTS):
            self.world.start(f"client {client}", partial(self._client, client))
        self.world.start("the last client", self._end)

    def _client(self, client: int) -> None:
        for number, (turns, act, *values) in enumerate(self._case.acts[client]):
            for _ in range(turns):
                self.world.wait(None, "does nothing")
            self._act(client, f"{client}.{number}", act, values)
        self._done += 1

    def _act(self, client: int, name: str, act: str, values: list[Any]) -> None:
        world = self.world
        if act == "add":
            self._added[name] = values[0] % world.count
            world.add(client, self._added[name], name, values[1])
        elif act == "abort":
            name = next(each for each in reversed(self._added) if each.startswith(f"{client}."))
            self._aborted.add(name)
            world.abort(client, self._added[name], name)
        elif act == "chunk":
            if "session" not in world.finished:  # as a client looks before each chunk
                self._added["session"] = 0
                world.add(client, 0, "session", values[0], more=True)
        elif act == "resume":
            self._resume(client, alone=self._case.kind == _RESUME_ALONE)
        else:
            self._paused, self._asleep = True, self._asleep or act == "sleep"
            self._call(client, {"pause": "pause_generation"}.get(act, act), *values)
            if self._mark is None:
                self._mark = world.forwards.total()

    def _resume(self, client: int, *, alone: bool) -> None:
        """Resume, or wake up, once all pauses are answered; only after a pause unless `alone`."""
        self.world.wait(lambda: not self._open, "waits for the answers to pauses")
        if not self._paused and not alone:
            return
        if self._mark not in (None, self.world.forwards.total()):
            self.world.errors.append("a paused engine computes")
        asleep, self._paused, self._asleep, self._mark = self._asleep, False, False, None
        self._call(client, *(("wake_up", None) if asleep else ("resume_scheduler",)))

    def _call(self, client: int, method: str, *values: Any) -> None:
        world = self.world
        call = world.call(client, method, *values)
        self._open.add(call)
        world.wait(lambda: world.answered(call), f"waits for the answers to {method}")
        self._open.remove(call)
        for rank in range(world.count):
            if why := world.replies[call, rank]:
                told = why.rpartition(" method failed: ")[2].partition(". ")[0]
                world.errors.append(f"{method} fails: {told}")

    def _end(self) -> None:
        """Resume and close the session after the clients; wait until all requests have ended."""
        world = self.world
        world.wait(lambda: self._done == _CLIENTS, "waits for the clients")
        self._resume(0, alone=False)
        if "session" in self._added and "session" not in world.finished:
            world.add(0, 0, "session", 1)
        named = self._added.keys() - self._aborted
        world.wait(lambda: named <= world.finished, "waits for requests to end")


def problems_of(case: Case) -> tuple[list[str], list[str]]:
    """Return what goes wrong in a case, and the messages."""
    play = _Play(case)
    return play.world.run(), play.world.log


def wrong(case: Case) -> str:
    """Return the kind of what goes wrong first; empty if nothing does."""
    problems, _ = problems_of(case)
    first = next((each for each in problems if " waits " not in each), "")
    if not first and problems:
        ranks = [each for each in problems if each.startswith("rank")]
        first = "a rank waits for another for ever" if ranks else problems[0]
    return re.sub(r"\d+(\.\d+)?", "N", first)[:160]


class RankSearch:
    """Search with messages between ranks. Its attributes are those of `ParserSearch`."""

    modules = frozenset(f"vllm.v1.engine.{name}" for name in ("coordinator", "core"))

    def __init__(self) -> None:
        """Prepare vLLM. Raises what it raises, if it has other engines."""
        prepare()
        self.counts = {"answers": 0, "judged": 0, "failed": 0}
        self.outcomes: dict[int, dict[str, str] | None] = {}

    def play(self, seed: int) -> Iterator[dict[str, Any]]:
        """Draw a case, and yield what goes wrong in it."""
        case = draw(Random(seed))
        self.counts["answers"] += 1
        self.counts["judged"] += 1
        if differs := wrong(case):
            self.counts["failed"] += 1
            self.outcomes[seed] = {"0": f"{case.kind}: {differs}"}
            yield {"split": case.kind, "wrong": differs, "case": case}

    def shrink(self, finding: dict[str, Any]) -> dict[str, Any]:
        """Return the finding with the smallest case that fails in the same way."""
        differs = finding["wrong"]
        case = smallest(finding["case"], _simpler, lambda candidate: wrong(candidate) == differs)
        problems, log = problems_of(case)
        return finding | {
            "case": asdict(case),
            "log": log,
            "answer": _told(case),
            "whole": "all calls are answered, all requests end, and a paused engine does nothing",
            "streamed": "; ".join(problems),
        }


def _told(case: Case) -> list[str]:
    """Return what each client does, a line for each act."""
    return [
        f"client {client}: {act} {' '.join(map(str, values))}".rstrip()
        for client, acts in enumerate(case.acts)
        for _, act, *values in acts
    ]


def _simpler(case: Case) -> Iterator[Case]:
    """Yield cases with less in them, each in several orders of messages."""
    for simpler in _with_less(case):
        yield simpler
        yield from (replace(simpler, seed=seed) for seed in range(_ORDERS))


def _with_less(case: Case) -> Iterator[Case]:
    if case.ranks > 2:
        yield replace(case, ranks=2)
    for client, own in enumerate(case.acts):
        for at, (turns, *act) in enumerate(own):
            fewer = [own[:at] + own[at + 1 :]]
            fewer += [(*own[:at], (0, *act), *own[at + 1 :])] if turns else []
            for each in fewer:
                acts = list(case.acts)
                acts[client] = each
                yield replace(case, acts=tuple(acts))
