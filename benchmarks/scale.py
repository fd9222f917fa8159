"""A night of 1,000 scenarios, 30 releases and 8 types of GPU, simulated on 8 to 1,000 cards. Prints the tables of docs/scale.md.

No server is started and nothing is measured: all times and sizes are the assumptions of `Inputs`. A node fetches an image, and the weights
of a model, once, and its cards wait for them. All nodes share the store that both come from. The types of GPU are alike: one is simulated,
with its part of cards and store.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What is assumed. boots_s: the fastest and the slowest boot with requests, evenly spread; arms: boots of an item, one after the other.

    Sizes in GB; the store and the network card of a node in GB/s.
    """

    scenarios: int = 1_000
    releases: int = 30
    types: int = 8
    boots_s: tuple[float, float] = (90.0, 400.0)
    arms: int = 2
    cards_per_node: int = 8
    image_gb: float = 10.0
    models: int = 60
    model_gb: tuple[float, float] = (1.0, 60.0)
    store: float = 5.0
    node: float = 1.25


class Item(NamedTuple):
    """One scenario in one release on one type of GPU. Times in seconds."""

    scenario: int
    release: int
    took: float


class Night(NamedTuple):
    """hours: from the first start to the last end. busy, waiting: card hours of boots, and of waits for a fetch. fetched: in TB."""

    items: int
    hours: float
    busy: float
    waiting: float
    fetched: float


Group = Callable[[Item], int]
"""Of items that a card does one after the other."""


def night(items: Sequence[Item], cards: int, given: Inputs, group: Group | None) -> Night:
    """Run the items of one type on its cards: in their order, or by groups."""
    draw = random.Random(1)
    sizes = [draw.uniform(*given.model_gb) for _ in range(given.models)]
    waiting_for = _Queue(items, group)
    store = given.store / given.types
    free = [(0.0, card) for card in range(cards)]
    ready: dict[tuple[int, str, int], float] = {}
    last: dict[int, Item] = {}
    fetching: list[float] = []
    busy = waiting = fetched = end = 0.0
    while (item := waiting_for.next(last.get(free[0][1]))) is not None:
        now, card = heapq.heappop(free)
        node, start = card // given.cards_per_node, now
        for kind, number, size in (
            ("image", item.release, given.image_gb),
            ("model", item.scenario % given.models, sizes[item.scenario % given.models]),
        ):
            if (node, kind, number) not in ready:
                while fetching and fetching[0] <= now:
                    heapq.heappop(fetching)
                speed = min(given.node, store / (len(fetching) + 1))
                ready[node, kind, number] = now + size / speed
                heapq.heappush(fetching, ready[node, kind, number])
                fetched += size
            start = max(start, ready[node, kind, number])
        waiting, busy, end = waiting + start - now, busy + item.took, max(end, start + item.took)
        last[card] = item
        heapq.heappush(free, (start + item.took, card))
    return Night(len(items), end / 3600, busy / 3600, waiting / 3600, fetched / 1000)


class _Queue:
    """The items that wait: in their order, or by groups with the longest first."""

    def __init__(self, items: Sequence[Item], group: Group | None) -> None:
        self._group: Group = group or (lambda _: 0)
        self._left: dict[int, list[Item]] = defaultdict(list)
        for item in sorted(items, key=lambda one: one.took) if group else reversed(items):
            self._left[self._group(item)].append(item)

    def next(self, last: Item | None) -> Item | None:
        """Return the next item for a card that ran `last`; it changes to the group with the most items left."""
        if not self._left:
            return None
        group = self._group(last) if last else -1
        if group not in self._left:
            group = max(self._left, key=lambda one: len(self._left[one]))
        item = self._left[group].pop()
        if not self._left[group]:
            del self._left[group]
        return item


def all_items(given: Inputs) -> Iterator[Item]:
    """Yield the items of one type of GPU, scenario by scenario, as a loop over both would."""
    draw = random.Random(2)
    for scenario in range(given.scenarios):
        took = given.arms * draw.uniform(*given.boots_s)
        yield from (Item(scenario, release, took) for release in range(given.releases))


def due_tonight(items: Sequence[Item], given: Inputs, checked: float) -> list[Item]:
    """Return the items of the newest release, and this share of the others: a release that was tried does not change."""
    draw = random.Random(3)
    return [item for item in items if item.release == given.releases - 1 or draw.random() < checked]


def main() -> None:
    """Print both tables."""
    given = Inputs()
    everything = list(all_items(given))
    due = due_tonight(everything, given, 0.02)
    dummy = replace(given, model_gb=(0.0, 0.0))
    by_release, by_model = (lambda item: item.release), (lambda item: item.scenario % given.models)
    plans: tuple[tuple[str, Sequence[Item], Group | None, Inputs], ...] = (
        ("all, scenario by scenario", everything, None, given),
        ("due, scenario by scenario", due, None, given),
        ("due, by release", due, by_release, given),
        ("due, by model", due, by_model, given),
        ("due, by release, dummy weights", due, by_release, dummy),
    )
    print("| plan | cards | runs | hours | card hours | of them waiting | TB fetched |\n|---|---|---|---|---|---|---|")
    for name, items, group, inputs in plans:
        for cards in (8, 64, 256, 1_000):
            found = night(items, cards // given.types, inputs, group)
            hours = found.busy + found.waiting
            print(
                f"| {name} | {cards:,} | {found.items * given.types:,} | {found.hours:,.1f} | {hours * given.types:,.0f} | "
                f"{100 * found.waiting / hours:.0f} % | {found.fetched * given.types:,.1f} |"
            )
    print("\n| store, GB/s | by release, h | by model, h | by release, dummy weights, h |\n|---|---|---|---|")
    for store in (1.0, 5.0, 25.0):
        row = [night(due, 125, replace(inputs, store=store), group).hours for _, _, group, inputs in plans[2:]]
        print(f"| {store:g} | {' | '.join(f'{hours:.1f}' for hours in row)} |")


if __name__ == "__main__":
    main()
