"""`python -m tests.rows`: what a new scenario needs besides its file, found in a second."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROWS = {
    "scenarios/upstream.json": (r'^  "([\w-]+)": ', "add the state of its issue"),
    "docker-compose.yml": (r"^  ([\w-]+):$", "make compose"),
    "reports/results/catalogue.json": (r'^   "id": "([\w-]+)"', "make catalogue"),
}
"""By file: its rows, and how to add one."""


def missing(root: Path) -> Iterator[str]:
    """Yield a sentence for each row that a file lacks, or has of no scenario."""
    files = (path.stem for path in (root / "scenarios").glob("[!_]*.py"))
    ids = {stem.replace("_", "-") for stem in files if stem != "conftest"}
    for name, (row, remedy) in ROWS.items():
        rows = set(re.findall(row, (root / name).read_text(encoding="utf-8"), re.MULTILINE))
        for scenario in sorted(ids ^ rows):
            what = "no row for" if scenario in ids else "a row for what is no scenario,"
            yield f"{name}: {what} {scenario}: {remedy}"
    if f"They are {len(ids)} in all" not in (root / "README.md").read_text(encoding="utf-8"):
        yield f"README.md: its number of scenarios is not {len(ids)}: correct it"


if __name__ == "__main__":
    sentences = list(missing(Path(__file__).parents[1]))
    print(*sentences, sep="\n", end="\n" if sentences else "", file=sys.stderr)
    sys.exit(bool(sentences))
