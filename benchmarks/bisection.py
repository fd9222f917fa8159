"""Boots that a bisection needs, and how often its answer is right.

    python benchmarks/bisection.py            # ten minutes
    python benchmarks/bisection.py --quick    # one minute

Nothing is booted: each history has one change at a random place, a bad candidate dies with the stated rate, and skips are random, alone or
in runs. Compared with `git bisect` (one boot each), and with one that boots each candidate until it dies or is good with enough boots.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, log, log2
from random import Random
from statistics import mean

from vllm_repro_search.bisect.plan import Answer, Search, State, information

CONFIDENCE = 0.95
SIZES, RATES, SKIPS = (8, 64, 512, 4096), (1.0, 0.9, 0.7, 0.5, 0.3), (0.0, 0.1, 0.3)
RUN = 8
"""Mean length of a run of skips."""

Boot = Callable[[int], Answer]


@dataclass(frozen=True, kw_only=True)
class History:
    """One made history: its change point and what cannot be booted."""

    size: int
    change: int
    skipped: frozenset[int]
    rate: float
    random: Random

    def boot(self, candidate: int) -> Answer:
        if candidate in self.skipped:
            return Answer.SKIP
        return Answer.BAD if candidate >= self.change and self.random.random() < self.rate else Answer.GOOD

    @property
    def knowable(self) -> bool:
        """Return True if the candidates on both sides of the change boot."""
        return not {self.change - 1, self.change} & self.skipped


def histories(size: int, rate: float, skip: float, *, runs: bool, count: int) -> Iterator[History]:
    random = Random(f"{size} {rate} {skip} {runs}")
    for _ in range(count):
        skipped: set[int] = set()
        while len(skipped) < skip * (size - 2) - 0.5:
            start, length = random.randint(1, size - 2), ceil(random.expovariate(1 / RUN)) if runs else 1
            skipped.update(range(start, min(start + length, size - 1)))
        yield History(
            size=size, change=random.randint(1, size - 1), skipped=frozenset(skipped), rate=rate, random=random
        )


def ours(history: History) -> tuple[int, tuple[int, ...]]:
    """Return the boots, and the change points left."""
    search = Search(size=history.size, rate=history.rate, confidence=CONFIDENCE)
    while (candidate := search.choose()) is not None:
        search = search.after(candidate, history.boot(candidate))
    known = search.conclusion()
    return len(search.probes), known.left if known.state in (State.FOUND, State.STUCK) else ()


def plain(history: History, repeats: int) -> tuple[int, tuple[int, ...]]:
    """Like `ours`, with a bisection that takes `repeats` clean boots for good. It moves to the nearest candidate that boots."""
    boots, good, bad = 0, 0, history.size - 1
    for end in (bad, good):
        for _ in range(repeats):
            boots += 1
            if history.boot(end) is Answer.BAD:
                break
    tried: set[int] = set()
    while free := [one for one in range(good + 1, bad) if one not in tried]:
        candidate = min(free, key=lambda one: abs(one - (good + bad) // 2))
        for _ in range(repeats):
            boots += 1
            answer = history.boot(candidate)
            if answer is not Answer.GOOD:
                break
        if answer is Answer.SKIP:
            tried.add(candidate)
        elif answer is Answer.BAD:
            bad = candidate
        else:
            good = candidate
    return boots, tuple(range(good + 1, bad + 1))


def repeats_for(size: int, rate: float) -> int:
    """Return the clean boots of each candidate with which all of a path are right with the confidence."""
    if rate == 1:
        return 1
    steps = ceil(log2(size)) / 2  # half of them are good
    return ceil(log(1 - CONFIDENCE ** (1 / steps)) / log(1 - rate))


def bound(size: int, rate: float) -> float:
    """Return the least boots on average, by information: to know one of size - 1 change points with the confidence."""
    miss = 1 - CONFIDENCE
    unknown = CONFIDENCE * log2(size - 1) + CONFIDENCE * log2(CONFIDENCE) + miss * log2(miss)  # Fano
    return max(0.0, unknown) / max(information(step / 200, rate) for step in range(1, 201))


def row(size: int, rate: float, skip: float, *, runs: bool, count: int) -> str:
    count = max(50, count * 64 // max(64, size))
    cells = [f"{size:,}", f"{rate:.1f}", f"{skip:.0%}{' in runs' if runs else ''}", f"{count}"]
    made = list(histories(size, rate, skip, runs=runs, count=count))
    cells.append(f"{bound(size, rate) + 2:.1f}")
    for way in (ours, lambda one: plain(one, 1), lambda one: plain(one, repeats_for(size, rate))):
        found = [(history, *way(history)) for history in made]
        right = mean(history.change in left for history, _, left in found)
        spread = sorted(boots for _, boots, _ in found)
        cells.append(f"{mean(spread):.1f} ({spread[len(spread) * 95 // 100]})")
        cells.append(f"{right:.1%}" if right < 1 else "all")
        if way is ours:
            exact = [len(left) == 1 for history, _, left in found if history.knowable]
            cells.append(f"{mean(exact):.0%}" if exact else "-")
    return f"| {' | '.join(cells)} |"


def side_by_side(size: int, room: int) -> str:
    """Return a row: mean rounds and boots of `bisect --on` over all places of the change, without flakes and skips."""
    rounds = boots = 0
    for first_bad in range(1, size):
        search = Search(size=size)
        while chosen := search.ahead(room):
            rounds, boots = rounds + 1, boots + len(chosen)
            for candidate in chosen:
                search = search.after(candidate, Answer.BAD if candidate >= first_bad else Answer.GOOD)
    return f"| {size} | {room} | {rounds / (size - 1):.1f} | {boots / (size - 1):.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the histories, and no list longer than 512")
    quick = parser.parse_args().quick
    count = 40 if quick else 400
    heads: tuple[str, ...] = (
        "candidates",
        "dies in",
        "skips",
        "histories",
        "bound",
        "bisect: boots",
        "right",
        "exact if it can be",
    )
    heads += ("git's: boots", "right", "git's with repeats: boots", "right")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for size, rate, skip in product(SIZES[: -1 if quick else None], RATES, SKIPS):
        for runs in (False, True) if skip and size > RUN else (False,):
            print(row(size, rate, skip, runs=runs, count=count), flush=True)
    print("\n| candidates | boots at once | rounds | boots |\n|---|---|---|---|")
    for size, room in product((8, 64, 512), (1, 3, 7)):
        print(side_by_side(size, room), flush=True)


if __name__ == "__main__":
    main()
