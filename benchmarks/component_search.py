"""Boots of `bisect --component` in made histories, against a search that knows the component.

`python -m benchmarks.component_search` prints the table of reports/results/bisection.md. Each first
bad version of each component is equally likely. Where each boot of a bad version dies, no search
takes fewer boots on average than two for the ends and log2 of the number of possible answers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from random import Random
from statistics import fmean
from typing import Any, TypeVar

from vllm_repro_search.bisect.component_plan import ComponentPlan
from vllm_repro_search.bisect.plan import BisectionPlan, BootResult, ChangePlan, Side

# versions of a component; share of boots that die; histories
CASES = (
    *(((12, 24), 1.0, 200), ((4, 8), 1.0, 200), ((12, 24), 0.5, 40), ((4, 8), 0.5, 40)),
    *(((64, 128), 1.0, 40), ((64, 128), 0.5, 40)),
)

Plan = TypeVar("Plan", bound=ChangePlan[Any])


def searched(plan: Plan, dies: Callable[[Any], bool]) -> Plan:
    """Return the plan after all boots that it asks for."""
    while (place := plan.next()) is not None:
        plan = plan.after(BootResult(place, Side.BAD if dies(place) else Side.GOOD))
    return plan


def compared(
    random: Random, noise: Random, versions: tuple[int, int], rate: float
) -> tuple[int, int, float, bool]:
    """Return boots, boots of a search that knows, fewest boots, and if the component is right."""
    sizes = tuple(random.randint(*versions) for _ in range(random.randint(2, 4)))
    answers = [(place, first) for place, size in enumerate(sizes) for first in range(1, size)]
    guilty, first = random.choice(answers)

    def dies(version: int) -> bool:
        return version >= first and noise.random() < rate

    done = searched(
        ComponentPlan(sizes=sizes, rate=rate), lambda combination: dies(combination[guilty])
    )
    alone = searched(BisectionPlan(size=sizes[guilty], rate=rate), dies)
    named = [component for component, _ in done.answer().left[0].firsts]
    return len(done.results), len(alone.results), 2 + log2(len(answers)), named == [guilty]


def main() -> None:
    random, noise = Random(1), Random(2)
    print("| versions | dies in | histories | boots | fewest | of a known one | ratio | right |")
    print("|---|---|---|---|---|---|---|---|")
    for versions, rate, number in CASES:
        rows = [compared(random, noise, versions, rate) for _ in range(number)]
        ours, known, fewest, right = (fmean(column) for column in zip(*rows, strict=True))
        print(
            f"| {versions[0]} to {versions[1]} | {rate:.0%} | {number} | {ours:.1f}"
            f" | {f'{fewest:.1f}' if rate == 1.0 else '-'} | {known:.1f} | {ours / known:.2f}"
            f" | {right * number:.0f} of {number} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
