"""Mutation test of the pure core with mutmut: change one thing at a time, and see whether a test notices.

    make mutants                                            # verdict/ and trigger/
    python benchmarks/mutants.py verdict/verdict.py         # one module

Prints a table and the diff of each mutant that survived. mutmut wants the sources in `src/`, so the tracked files are copied first.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/vllm_repro"
MUTMUT = str(Path(sys.executable).with_name("mutmut"))
CONFIG = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = {modules}
also_copy = ["fixtures", "scenarios", "reports", "docs", "constraints.txt", "README.md", "Makefile"]
pytest_add_cli_args = ["-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not docker and not live and not browser"]
pytest_add_cli_args_test_selection = {tests}
"""


def lay_out(folder: Path, modules: Sequence[str]) -> None:
    """Copy the tracked files into `folder`, with `harness/` as `src/`, and configure mutmut."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        target = folder / ("src" + name.removeprefix("harness") if name.startswith("harness/") else name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    project = folder / "pyproject.toml"
    tests = sorted({f"tests/{module.partition('/')[0]}" for module in modules})
    config = CONFIG.format(modules=[f"{PACKAGE}/{module}" for module in modules], tests=tests).replace("'", '"')
    project.write_text(project.read_text(encoding="utf-8").replace('"harness"', '"src"') + config, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=["verdict/*.py", "trigger/*.py"], help="below harness/vllm_repro")
    parser.add_argument("--jobs", default="2")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        lay_out(folder, asked.modules)
        with (folder / "log").open("wb") as log:
            run = subprocess.run(
                [MUTMUT, "run", "--max-children", asked.jobs], cwd=folder, stdout=log, stderr=log, check=False
            )
        if run.returncode:
            raise SystemExit((folder / "log").read_text(encoding="utf-8", errors="replace")[-2000:])
        listed = subprocess.run(
            [MUTMUT, "results", "--all", "true"], cwd=folder, capture_output=True, check=True, text=True
        ).stdout
        found = dict(line.strip().split(": ", 1) for line in listed.splitlines() if ": " in line)
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for mutant, result in found.items():
            counts[mutant.rpartition(".")[0]][result] += 1
        print("| module | mutants | killed | survived |\n|---|---|---|---|")
        for module, count in sorted(counts.items()):
            total, lived = count.total(), count["survived"] + count["no tests"]
            print(f"| `{module}` | {total} | {total - lived} ({1 - lived / total:.0%}) | {lived} |")
        for mutant in (one for one, result in found.items() if result in ("survived", "no tests")):
            diff = subprocess.run(
                [MUTMUT, "show", mutant], cwd=folder, capture_output=True, check=True, text=True
            ).stdout
            changed = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("---", "+++")]
            print("", mutant, *changed, sep="\n")


if __name__ == "__main__":
    main()
