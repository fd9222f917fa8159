"""How often the history calls what is true of simulated nights, and how often what is not.

    python -m benchmarks.nights [--seeds 100] [--page FILE]

Every number is drawn from a seed (`tests/history/simulated.py`); nothing here was measured on a GPU. `--page` writes the nightly page of
the first seed instead, with a notice that says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC
from pathlib import Path

from tests.history.scored import Score, score
from tests.history.simulated import NOTICE, Weeks

from vllm_repro.history.account import account
from vllm_repro.history.page import page

NOTHING = Weeks(0, loss=None, slow=None, fix=None)
CASES = {
    "a loss of 8 %, a slow host, a fix, a flaky bug": Weeks(0),
    "the same, noise of 3 % from night to night": Weeks(0, noise=0.03),
    "the same, a loss of 4 %": Weeks(0, loss_by=0.04),
    "nothing but the flaky bug": NOTHING,
    "the same, noise of 3 %": replace(NOTHING, noise=0.03),
    "a slow host for two weeks, and the flaky bug": replace(NOTHING, slow=(35, 49)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    if arguments.page:
        rows = list(Weeks(0).rows())
        arguments.page.write_text(page(account(rows, UTC, nights=28), "reports", NOTICE), encoding="utf-8")
        return
    heads = ("ten weeks with", "n", "all right", "loss called", "nights until then", "fix called", "host named")
    print(f"| {' | '.join([*heads, 'false calls', 'false fixes', 'false hosts'])} |")
    print("|---" * (len(heads) + 3) + "|")
    for name, weeks in CASES.items():
        print(_row(name, weeks, [score(replace(weeks, seed=seed)) for seed in range(arguments.seeds)]), flush=True)


def _row(name: str, weeks: Weeks, scores: Sequence[Score]) -> str:
    n = len(scores)
    delays = sorted(one.delay + 1 for one in scores if one.delay is not None)

    def called(true: object, found: int) -> str:
        return f"{found} of {n}" if true is not None else "-"

    cells = (
        name,
        str(n),
        str(sum(one.right for one in scores)),
        called(weeks.loss, sum(one.loss is not None for one in scores)),
        f"median {delays[len(delays) // 2]}, at most {delays[-1]}" if delays else "-",
        called(weeks.fix, sum(one.fix is not None for one in scores)),
        called(weeks.slow, sum(one.suspect is not None for one in scores)),
        *(str(sum(len(those) for those in lists)) for lists in zip(*(_false(one) for one in scores), strict=True)),
    )
    return f"| {' | '.join(cells)} |"


def _false(one: Score) -> tuple[Sequence[object], Sequence[object], Sequence[object]]:
    return one.false_calls, one.false_fixes, one.false_suspects


if __name__ == "__main__":
    main()
