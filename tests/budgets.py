"""Statements of each package, and the budget that a change must keep.

`python -m tests.budgets` prints the table and fails above a budget. Docstrings do not count.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

BUDGETS = {
    "harness/vllm_repro": 13_000,
    "harness": 29_836,
    "tests": 19_737,
    "benchmarks": 1_425,
}
"""Most statements by folder. `harness` aims at 23,000 and `tests` at 17,500.

Both grew for live servers, reports from outside and native crashes in diagnosis, for what intake
reads or quotes, for the ledger of bugs, for `gate`, for the search as a folder of vLLM's
tests, and for exchanged packages.
Then for the front end in the search, for logs and reports from outside again, for the faults that
`gate` missed, and for data-parallel ranks in the search.
Tests also grew for mutants that survived, and `benchmarks` for the changes that measure `gate` and
for made histories of components. That of the core stays."""


def statements(source: str) -> int:
    """Return the number of statements in a module's text, without strings that stand alone."""
    return sum(
        isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(ast.parse(source))
    )


def _is_text(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Expr):
        return False
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def table(root: Path = ROOT) -> Counter[str]:
    """Return the statements by folder: of each budget and of each package of the harness."""
    counts: Counter[str] = Counter()
    for folder in ("harness", "tests", "benchmarks"):
        for path in (root / folder).rglob("*.py"):
            number = statements(path.read_text(encoding="utf-8"))
            counts[folder] += number
            if folder == "harness":
                counts[f"{folder}/{path.relative_to(root / folder).parts[0]}"] += number
    return counts


def too_many(counts: Counter[str]) -> Iterator[str]:
    """Yield a sentence for each budget that is exceeded."""
    for folder, most in BUDGETS.items():
        if counts[folder] > most:
            yield (
                f"{folder}: {counts[folder]:,} statements, {counts[folder] - most:,} above its"
                " budget"
            )


def main() -> int:
    counts = table()
    print(f"{'package':30} {'statements':>10} {'budget':>8}")
    for folder, number in sorted(counts.items()):
        most = BUDGETS.get(folder)
        print(f"{folder:30} {number:10,} {f'{most:,}' if most else '':>8}")
    above = list(too_many(counts))
    for sentence in above:
        print(sentence, file=sys.stderr)
    if above:
        print(
            "  next: delete or merge code; docs/architecture.md names the budgets", file=sys.stderr
        )
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
