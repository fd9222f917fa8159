"""Mutation test of the pure core with mutmut: change one thing at a time, and see whether a test notices.

    make mutants                                     # all of MODULES; writes a section of docs/reliability.md
    python -m benchmarks.mutants verdict/verdict.py  # prints the section for one module

mutants.toml has a judgement for each mutant that survives; the exit status is 1 if one has none.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.faults import PAGE, measured_at, write_sections

ROOT = Path(__file__).resolve().parent.parent
MODULES = (
    *("verdict/verdict.py", "verdict/outcome.py", "verdict/release_result.py"),
    *("verdict/statistics.py", "verdict/throughput.py", "trigger/conditions.py", "trigger/trigger.py"),
    *("diagnosis/judgement.py", "diagnosis/root_cause.py", "diagnosis/life_signs.py"),
)
MUTMUT = str(Path(sys.executable).with_name("mutmut"))
# The two files left out test how lines are read, and take longer than all others.
CONFIG = """
[tool.mutmut]
source_paths = ["src"]
process_isolation = "forkserver"  # a fork of the process that ran the tests has their cached results
only_mutate = {modules}
also_copy = ["fixtures", "scenarios", "reports", "docs", "constraints.txt", "README.md", "Makefile"]
pytest_add_cli_args = ["-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not docker and not live and not browser",
    "--ignore=tests/diagnosis/test_log_prefix.py", "--ignore=tests/diagnosis/test_log_text.py"]
pytest_add_cli_args_test_selection = {tests}
"""


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A mutant that no test kills. change: the changed lines as one, with `[-removed-]{+added+}`."""

    module: str
    function: str
    change: str

    def __str__(self) -> str:
        return f"{self.module} {self.function}: {self.change}"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The reason why mutants may survive. equivalent: they behave like the code. listed: the page shows each."""

    why: str
    mutants: frozenset[str]
    equivalent: bool = False
    listed: bool = True


def folder_of(module: str) -> str:
    return module.partition("/")[0]


def lay_out(folder: Path, modules: Sequence[str]) -> None:
    """Copy the tracked files into `folder`, with `harness/` as `src/` because mutmut wants that, and configure mutmut."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        target = folder / ("src" + name.removeprefix("harness") if name.startswith("harness/") else name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    for path in (folder / "src/vllm_repro" / module for module in modules):
        path.write_text(undecorated(path.read_text(encoding="utf-8")), encoding="utf-8")
    project = folder / "pyproject.toml"
    config = CONFIG.format(
        modules=[f"src/vllm_repro/{module}" for module in modules], tests=[f"tests/{folder_of(modules[0])}"]
    ).replace("'", '"')
    project.write_text(project.read_text(encoding="utf-8").replace('"harness"', '"src"') + config, encoding="utf-8")


def undecorated(source: str) -> str:
    """Write `@property def chunk` as `def get_chunk` and `chunk = property(get_chunk)`: mutmut leaves a decorated function alone."""
    lines = source.splitlines()
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.decorator_list]
    for node in sorted(found, key=lambda node: -node.lineno):
        decorator = ast.unparse(node.decorator_list[0])
        if decorator != "classmethod":
            lines.insert(node.end_lineno or 0, f"{' ' * node.col_offset}{node.name} = {decorator}(get_{node.name})")
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(f"def {node.name}(", f"def get_{node.name}(", 1)
            del lines[node.lineno - 2]
    return "\n".join(lines) + "\n"


def mutmut(folder: Path, *words: str) -> str:
    return subprocess.run([MUTMUT, *words], cwd=folder, capture_output=True, check=True, text=True).stdout


def mutate(folder: Path, modules: Sequence[str], jobs: int) -> tuple[Counter[str], list[Survivor]]:
    """Run mutmut on modules of one folder. Return the number of mutants by module, and the survivors."""
    lay_out(folder, modules)
    with (folder / "log").open("wb") as log:
        run = [MUTMUT, "run", "--max-children", str(jobs)]
        status = subprocess.run(run, cwd=folder, stdout=log, stderr=log, check=False).returncode
    if status:
        raise SystemExit((folder / "log").read_text(encoding="utf-8", errors="replace")[-2000:])
    return results(folder, jobs)


def results(folder: Path, jobs: int) -> tuple[Counter[str], list[Survivor]]:
    lines = [line.strip().split(": ", 1) for line in mutmut(folder, "results", "--all", "true").splitlines()]
    counts = Counter(module_of(name) for name, _ in lines)
    lived = [name for name, result in lines if result not in ("killed", "timeout")]
    with ThreadPoolExecutor(jobs) as pool:
        shown = pool.map(lambda name: mutmut(folder, "show", name), lived)
        return counts, [survivor(name, diff) for name, diff in zip(lived, shown, strict=True)]


def module_of(mutant: str) -> str:
    return mutant.rpartition(".")[0].removeprefix("vllm_repro.").replace(".", "/") + ".py"


def survivor(mutant: str, diff: str) -> Survivor:
    sides = (_side(diff, "-"), _side(diff, "+"))
    begins = _alike(*sides)
    ends = _alike(*(side[begins:][::-1] for side in sides))
    before, after = (side[begins : len(side) - ends] for side in sides)
    marked = (f"[-{before}-]" if before else "") + (f"{{+{after}+}}" if after else "")
    change = sides[0][:begins] + marked + sides[0][len(sides[0]) - ends :]
    function = re.sub(r"^x_|^xǁ|__mutmut_\d+$", "", mutant.rpartition(".")[2]).replace("ǁ", ".")
    return Survivor(module=module_of(mutant), function=function, change=change)


def _alike(one: str, other: str) -> int:
    """Return the length of the beginning that two lines share, up to the last whole word."""
    pairs = zip(one, other, strict=False)
    length = next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))
    while length and one[length - 1].isalnum():
        length -= 1
    return length


def _side(diff: str, sign: str) -> str:
    lines = [line for line in diff.splitlines() if line.startswith(sign) and not line.startswith(sign * 3)]
    return " ".join(line[1:].strip() for line in lines)


def judgements() -> list[Judgement]:
    read = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [Judgement(**{**one, "mutants": frozenset(one["mutants"])}) for one in read["judgement"]]


def section(counts: Counter[str], survivors: Sequence[Survivor], judged: Sequence[Judgement]) -> Iterator[str]:
    """Yield the lines of the section: the score of each module, and the survivors by judgement."""
    same = frozenset[str]().union(*(one.mutants for one in judged if one.equivalent))
    equivalent = Counter(one.module for one in survivors if str(one) in same)
    lived = Counter(one.module for one in survivors if str(one) not in same)
    yield "`make mutants` changes the pure core in one place at a time with [mutmut](https://mutmut.readthedocs.io), runs the tests"
    yield "of the module's folder, and writes this section. The score is the share of mutants that a test kills, without equivalent ones."
    yield f"mutmut changes no tables outside of functions. Measured on {measured_at()}.\n"
    yield "| module | mutants | killed | equivalent | survived | score |\n|---|---|---|---|---|---|"
    for module in counts:
        yield _row(f"`{module}`", counts[module], equivalent[module], lived[module])
    yield _row("all", counts.total(), equivalent.total(), lived.total())
    for one in judged:
        mine = [each for each in survivors if str(each) in one.mutants]
        if mine:
            yield f"\n{len(mine)} {'equivalent' if one.equivalent else 'survived'}: {one.why}"
            yield from (["", *map(_item, mine)] if one.listed else [])
    if unjudged := without_judgement(survivors, judged):
        yield "\nNot judged:\n"
        yield from map(_item, unjudged)


def without_judgement(survivors: Sequence[Survivor], judged: Sequence[Judgement]) -> list[Survivor]:
    return [each for each in survivors if not any(str(each) in one.mutants for one in judged)]


def _row(name: str, count: int, equivalent: int, lived: int) -> str:
    killed = count - equivalent - lived
    return f"| {name} | {count} | {killed} | {equivalent} | {lived} | {killed / (count - equivalent):.1%} |"


def _item(one: Survivor) -> str:
    return f"- `{one.module}`, `{one.function}`: `` {one.change} ``"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=MODULES, help="below harness/vllm_repro")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args()
    counts, survivors = Counter[str](), list[Survivor]()
    for _, modules in groupby(asked.modules, folder_of):
        with tempfile.TemporaryDirectory(prefix="mutants-") as name:
            count, lived = mutate(Path(name), list(modules), asked.jobs)
        counts += count
        survivors += lived
    judged = judgements()
    text = "\n".join(section(counts, survivors, judged))
    if asked.write:
        write_sections({"Mutants": text})
    else:
        print(text)
    raise SystemExit(bool(without_judgement(survivors, judged)))


if __name__ == "__main__":
    main()
