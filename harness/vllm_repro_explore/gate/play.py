"""Play of cases on both trees, and proof of what fails newly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from vllm_repro.errors import InfraError, Unsupported
from vllm_repro_diagnosis.boot_facts import imported
from vllm_repro_diagnosis.log_text import read_lines
from vllm_repro_explore.case import Case
from vllm_repro_explore.driver import Driver, driver_model
from vllm_repro_explore.finding import Finding, PlayResult
from vllm_repro_explore.gate.change import Change, UnfitError
from vllm_repro_explore.gate.choose import Chooser
from vllm_repro_explore.gate.judge import Drawn, Key, Score, key_of, worst_of
from vllm_repro_explore.gate.lines import Place
from vllm_repro_explore.gate.vary import vary
from vllm_repro_explore.search import Found
from vllm_repro_explore.shrink import shrink

Play = Callable[[Case], PlayResult]
_CASE_S = 40.0
_HANG_S, _TIMES = 10.0, 20
"""A case hangs after `_HANG_S` seconds plus `_TIMES` times the base's time, at most `_CASE_S`."""
_NEIGHBOURS = 40
"""Cases near a new failure that the base must pass before it counts as new."""
_SHRINK = 150
"""Most cases to shrink a new failure."""
_SHRINK_S = 60.0
"""Seconds after which shrinking ends: each case that hangs takes its whole limit."""


@dataclass(frozen=True, kw_only=True)
class Player:
    """The two processes of one thread, one for each tree; a call plays a case on both."""

    base: Driver
    changed: Driver

    def __call__(
        self, case: Case, *, only_if_base_passes: bool = False
    ) -> tuple[PlayResult, PlayResult | None]:
        """Play a case on the base, then with the change, and return both results.

        The second is None, and not played, if the base refuses to start, and with
        `only_if_base_passes` also if the base fails.
        """
        began = time.monotonic()
        before = self.base.play(case)
        if before.invalid or (only_if_base_passes and before.findings):
            return before, None
        self.changed.case_s = min(_CASE_S, _HANG_S + _TIMES * (time.monotonic() - began))
        return before, self.changed.play(case)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A new failure: its smallest case, and what changed code ran in it."""

    failure: Found
    drawn: Drawn
    # changed statements that ran in the smallest case; if none did, those of the base
    ran: Sequence[Place]
    # cases near it that the base passed
    neighbours: int


@contextmanager
def players(change: Change, folder: Path, jobs: int) -> Iterator[list[Player]]:
    """Yield a player for each of `jobs` threads, and stop their processes at the end.

    folder: has the files of `write_probes`, and gets the logs.
    """
    with ExitStack() as stack:

        def driver(name: str, number: int) -> Driver:
            """Return a driver of the tree "base" or "changed"; `stack` closes it."""
            release = change.base if name == "base" else change.changed
            log = folder / f"{name}{number or ''}.log"
            made = Driver(
                release,
                driver_model(),
                log,
                case_s=_CASE_S,
                patched=[file.name for file in change.files],
                probes=folder / f"{name}-statements.json",
            )
            return stack.enter_context(made)

        yield [
            Player(base=driver("base", number), changed=driver("changed", number))
            for number in range(jobs)
        ]


def write_probes(change: Change, folder: Path) -> None:
    """Write the statements to count in each tree into `folder`."""
    for name, places in (("base", change.before), ("changed", change.after)):
        path = folder / f"{name}-statements.json"
        path.write_text(json.dumps(probe_lines(places)), encoding="utf-8")


def probe_lines(places: Sequence[Place]) -> dict[str, list[tuple[int, int]]]:
    """Return for each file (line, index in `places`) of its statements, as the probe reads them."""
    files: dict[str, list[tuple[int, int]]] = {}
    for number, place in enumerate(places):
        files.setdefault(place.file, []).append((place.line, number))
    return files


def imported_files(log: Path) -> set[str]:
    """Return the changed files that the process of a log imported; empty if there is no log yet."""
    return set(imported(read_lines(log.read_bytes()))) if log.exists() else set()


def play_first_case(player: Player, case: Case, base: str) -> None:
    """Play a case on the changed tree; raise `UnfitError` if its vLLM cannot be imported.

    Raises `Unsupported` or `InfraError` if the base cannot either. base: version of the base.
    """
    try:
        player.changed.play(case)
    except (Unsupported, InfraError) as error:
        player.base.play(case)
        why = str(error).partition("cannot be explored: ")[2] or str(error)
        lacks = "ModuleNotFoundError" in why and "'vllm" not in why
        raise UnfitError(
            f"the changed vLLM cannot be imported: {why}", base=base, broken=not lacks
        ) from error


@dataclass(kw_only=True)
class Gating:
    """State of a gate that the threads of its players share."""

    change: Change
    chooser: Chooser
    # monotonic seconds
    until: float
    progress: Callable[[Score], None]
    # go on after a new failure
    whole: bool = False
    # changed files that the processes have imported
    imported: Callable[[], set[str]]
    score: Score = field(default_factory=Score)
    proofs: dict[Key, Proof] = field(default_factory=dict)
    # failures of the changed tree that the base has, too, in cases near them
    shared: set[Key] = field(default_factory=set)
    over: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: set[Key] = set()

    def run(self, players: Sequence[Player]) -> None:
        """Play until the time is over, a new failure is proven, or no changed file is imported.

        players: one for each thread. `score` and `proofs` then hold the result. An exception
        of a thread stops the others and is raised.
        """
        pool = ThreadPoolExecutor(len(players))
        try:
            pending = {pool.submit(self._work, player) for player in players}
            while pending:
                # An endless wait would not see a signal that another thread receives.
                ended, pending = wait(pending, 1.0, return_when=FIRST_COMPLETED)
                for thread in ended:
                    thread.result()
        finally:
            self.over = True
            pool.shutdown()

    def _go_on(self) -> bool:
        """Return True until the time is over, or a new failure is proven (unless `whole`).

        After the first rounds, also stop if no changed file was imported.
        """
        if self.over or time.monotonic() > self.until:
            return False
        if self.proofs and not self.whole:
            return False
        return self.chooser.first_rounds or bool(self.score.reached or self.imported())

    def _work(self, player: Player) -> None:
        """Play cases in one thread, and prove what fails newly."""
        try:
            while self._go_on():
                with self._lock:
                    drawn = self.chooser.choose()
                began = time.monotonic()
                before, after = player(drawn.case)
                if after is None:
                    with self._lock:
                        self.score.invalid += 1
                    continue
                with self._lock:
                    new = self.score.count(drawn, before, after)
                    hot = self._is_news(drawn, new, before, after)
                    reached = self._in_functions(before, after)
                    self.chooser.note(drawn, reached, time.monotonic() - began, hot=hot)
                    self.progress(self.score)
                if new is not None:
                    self._look_into(player, drawn, new)
        except BaseException:
            self.over = True
            raise

    def _is_news(
        self, drawn: Drawn, new: Finding | None, before: PlayResult, after: PlayResult
    ) -> bool:
        """Return True if cases near this one may prove something new or fixed."""
        if new is not None:
            return key_of(new, drawn.case) not in self.score.in_base
        if before.worst is None or after.worst is not None:
            return False
        pairs = self.score.pairs[key_of(before.worst, drawn.case)]
        return not (pairs.stays or pairs.new)

    def _in_functions(self, before: PlayResult, after: PlayResult) -> dict[int, int]:
        """Return the runs of each changed statement inside a function, by its number.

        Statements of the base have numbers below 0. Those that run at import are left out: they run
        in any case.
        """
        places = self.change.after, self.change.before
        return {
            number: count
            for number, count in after.reached.items()
            if not places[0][number].at_import
        } | {
            -1 - number: count
            for number, count in before.reached.items()
            if not places[1][number].at_import
        }

    def _look_into(self, player: Player, drawn: Drawn, new: Finding) -> None:
        """Prove a new failure and add it to `proofs`.

        Skip one that is proven, or in another thread's hands, or known and not more frequent.
        """
        key = key_of(new, drawn.case)
        with self._lock:
            pairs = self.score.pairs[key]
            if key in self.score.in_base and not pairs.worse:
                return
            if key in self._busy or key in self.proofs or (key in self.shared and not pairs.worse):
                return
            self._busy.add(key)
        try:
            proof = self._prove(player, drawn, new)
            with self._lock:
                if proof is not None:
                    self.proofs[key] = proof
        finally:
            with self._lock:
                self._busy.discard(key)

    def _prove(self, player: Player, drawn: Drawn, new: Finding) -> Proof | None:
        """Shrink the case of a new failure, and return the proof.

        Return None if the base fails so in a case near it, or if the case does not repeat.
        """
        last: PlayResult | None = None
        in_base: list[int] = []
        until = time.monotonic() + _SHRINK_S

        def fails(case: Case) -> bool:
            """Return True if the base passes a case and `new` is the worst finding of the change.

            Keep the changed tree's result and the base's statements that ran. False once over, or
            after `_SHRINK_S`.
            """
            nonlocal last
            if self.over or time.monotonic() > until:
                return False
            before, after = player(case, only_if_base_passes=True)
            if after is None or worst_of(after) != new:
                return False
            last, in_base[:] = after, before.reached
            return True

        if not fails(drawn.case):
            return None
        key, rng = key_of(new, drawn.case), Random(drawn.seed)
        often = self.score.pairs[key].worse
        clean = 0 if often else self._neighbours(player, drawn.case, key, rng)
        if clean is None:
            return None
        shrunk = shrink(drawn.case, fails, _SHRINK)
        near = 0 if often else self._neighbours(player, shrunk.case, key, rng)
        if near is None or last is None:
            return None
        player.changed.case_s = _CASE_S  # it imports vLLM's workers first
        runner = player.changed.play(shrunk.case, worker="runner")
        worst = worst_of(last) or new
        failure = Found(
            finding=worst,
            seed=drawn.seed,
            case=drawn.case,
            shrunk=shrunk.case,
            tried=shrunk.tried,
            others=tuple(finding for finding in last.findings if finding != worst),
            times=self.score.pairs[key].new,
            runner=runner,
        )
        change = self.change
        ran = [change.after[number] for number in sorted(last.reached)]
        ran = [place for place in ran if not place.at_import] or ran
        ran = ran or [change.before[number] for number in sorted(in_base)]
        return Proof(failure=failure, drawn=drawn, ran=ran, neighbours=clean + near)

    def _neighbours(self, player: Player, case: Case, key: Key, rng: Random) -> int | None:
        """Play 40 cases near one on the base; return how many did not fail with `key`.

        Return None if one of them did: `key` is then in `shared` and in the base's findings.

        A failure that another order of valid choices only moves to other cases is not new.
        """
        passed = 0
        for _ in range(_NEIGHBOURS):
            near = vary(case, rng)
            result = player.base.play(near)
            if any(key_of(finding, near) == key for finding in result.findings):
                with self._lock:
                    self.shared.add(key)
                    self.score.in_base.add(key)
                return None
            passed += not result.invalid
        return passed


def with_times(proof: Proof, times: int) -> Proof:
    """Return the proof with `failure.times`, the number of cases that show it, set to `times`."""
    return replace(proof, failure=replace(proof.failure, times=times))
