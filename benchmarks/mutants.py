"""Mutation test of the pure core with mutmut: make one change, and see whether a test fails.

    make mutants                                     # all of MODULES
    python -m benchmarks.mutants vllm_repro/verdict/verdict.py  # prints the section for one module
    python -m benchmarks.mutants --sample 300    # so many of each module, always the same

`make mutants` writes a section of reports/results/reliability.md.

A run that is interrupted (Ctrl-C) continues where it was, if neither the code nor a test has
changed since. mutants.toml has a judgement for each mutant that survives; the exit status is 1 if
one has none.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from random import Random

from mutmut.mutation.file_mutation import mutate_file_contents

from benchmarks.faults import PAGE, measured_at, write_sections
from benchmarks.mutant_tests import RESULTS

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".mutants"
PACKAGES = Path("harness")
MODULES = (
    *sorted(
        f"vllm_repro/verdict/{path.name}"
        for path in (ROOT / PACKAGES / "vllm_repro/verdict").glob("[a-z]*.py")
    ),
    *(
        f"vllm_repro/trigger/{name}.py"
        for name in ("boundary", "conditions", "trigger", "turboquant_workspace")
    ),
    *(
        f"vllm_repro_diagnosis/{name}.py"
        for name in ("judgement", "life_signs", "root_cause", "signature")
    ),
    *(f"vllm_repro_search/{name}/plan.py" for name in ("bisect", "minimize", "threshold")),
    "vllm_repro_search/versions/record.py",
)
TESTS = {
    "vllm_repro/verdict": ["tests/core/verdict"],
    "vllm_repro/trigger": ["tests/core/trigger"],
    # these import the package without mutmut
    "vllm_repro_diagnosis": ["tests/diagnosis", "-k", "not test_the_package"],
    "vllm_repro_search": [
        "tests/search",
        "-k",
        "plan or version_map or threshold or minimize or search_records",
    ],
}
"""Arguments of pytest for the modules of a folder."""
# Hypothesis' plugin of pytest writes a patch for each failure, which takes a second; pytest's own
# tracebacks take a tenth.
PYTEST = shlex.split(
    "-m pytest -q --tb=native -p benchmarks.mutant_tests -p no:hypothesispytest -p no:xdist -p"
    " no:cacheprovider -m 'not docker and not live and not browser'"
)


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A mutant that no test kills.

    change: the changed lines as one, with `[-removed-]{+added+}`.
    """

    module: str
    function: str
    change: str

    def __str__(self) -> str:
        return f"{self.module} {self.function}: {self.change}"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The reason why mutants may survive.

    equivalent: they behave like the code. listed: the page shows each.
    """

    why: str
    mutants: frozenset[str]
    equivalent: bool = False
    listed: bool = True


def lay_out(module: str) -> Path:
    """Return a folder with the tracked files and the mutants of a module.

    Reuse the folder of an earlier run if the files are the same.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    files = [name for name in listed.split("\0") if (ROOT / name).is_file()]
    digest = hashlib.sha256()
    tests = tests_of(module)[0]
    for file in files:
        if not file.startswith(("docs/", "benchmarks/")) and (
            "/test_" not in file or file.startswith(tests)
        ):
            digest.update(file.encode() + (ROOT / file).read_bytes())
    name = module.replace("/", "-").removesuffix(".py")
    folder = WORK / f"{name}-{digest.hexdigest()[:12]}"
    if folder.exists():
        return folder
    for old in WORK.glob(f"{name}-*"):
        shutil.rmtree(old)
    new = WORK / f"{name}-new"
    for file in files:
        target = new / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, target)
    path = new / PACKAGES / module
    mutated = mutate_file_contents(str(path), undecorated(path.read_text(encoding="utf-8")))
    path.write_text(mutated.code, encoding="utf-8")
    (new / "names").write_text("\n".join(mutated.mutant_names), encoding="utf-8")
    return new.rename(folder)


def tests_of(module: str) -> list[str]:
    return next(tests for folder, tests in TESTS.items() if module.startswith(folder + "/"))


def undecorated(source: str) -> str:
    """Write `@property def chunk` as `def get_chunk` and `chunk = property(get_chunk)`.

    Mutmut does not change decorated functions. A cache goes: it may hold
    results from before there was a mutant.
    """
    lines = source.splitlines()
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    ]
    for node in sorted(found, key=lambda node: -node.lineno):
        decorator = ast.unparse(node.decorator_list[0])
        if decorator != "classmethod":
            if "cache" not in decorator:
                lines.insert(
                    node.end_lineno or 0,
                    f"{' ' * node.col_offset}{node.name} = {decorator}(get_{node.name})",
                )
                lines[node.lineno - 1] = lines[node.lineno - 1].replace(
                    f"def {node.name}(", f"def get_{node.name}(", 1
                )
            del lines[node.lineno - 2]
    return "\n".join(lines) + "\n"


def mutate(module: str, jobs: int, sample: int) -> tuple[int, list[Survivor]]:
    """Test the mutants of a module that have no result yet.

    sample: most mutants to test. Return the number of those tested, and the survivors.
    """
    folder = lay_out(module)
    dotted = f"{module.removesuffix('.py').replace('/', '.')}."
    names = (folder / "names").read_text(encoding="utf-8").split()
    chosen = {*Random(0).sample(names, min(sample, len(names)))}
    names = [dotted + name for name in names if name in chosen]
    (folder / RESULTS).touch()
    missing = [name for name in names if name not in results(folder)]
    environment = {**os.environ, "PYTHONPATH": str(folder / PACKAGES)}
    runs = []
    for job in range(min(jobs, len(missing))):
        (folder / f"mutants-{job}").write_text("\n".join(missing[job::jobs]), encoding="utf-8")
        argv = [sys.executable, *PYTEST, f"--mutants=mutants-{job}", *tests_of(module)]
        with (folder / f"log-{job}").open("wb") as log:
            runs.append(subprocess.Popen(argv, cwd=folder, env=environment, stdout=log, stderr=log))
    try:
        for run in runs:
            run.wait()
    except KeyboardInterrupt:
        raise SystemExit("Interrupted. The same command continues.") from None
    tested = results(folder)
    if not tested.keys() >= set(names):
        raise SystemExit((folder / "log-0").read_text(encoding="utf-8", errors="replace")[-2000:])
    lived = [name.removeprefix(dotted) for name in names if tested[name] == "lived"]
    return len(names), list(
        survivors_of(module, (folder / PACKAGES / module).read_text(encoding="utf-8"), lived)
    )


def results(folder: Path) -> dict[str, str]:
    return dict(
        line.split() for line in (folder / RESULTS).read_text(encoding="utf-8").splitlines()
    )


def survivors_of(module: str, mutated: str, names: Sequence[str]) -> Iterator[Survivor]:
    """Compare each mutant with its original, which mutmut writes beside it."""
    lines = mutated.splitlines()
    functions = {
        node.name: lines[node.lineno : node.end_lineno]
        for node in ast.walk(ast.parse(mutated))
        if isinstance(node, ast.FunctionDef)
    }
    for name in names:
        original = functions[name.rpartition("_")[0] + "_orig"]
        yield survivor(
            module, name, list(unified_diff(original, functions[name], lineterm="", n=0))[2:]
        )


def survivor(module: str, mutant: str, diff: Sequence[str]) -> Survivor:
    sides = (_side(diff, "-"), _side(diff, "+"))
    begins = _alike(*sides)
    ends = _alike(*(side[begins:][::-1] for side in sides))
    before, after = (side[begins : len(side) - ends] for side in sides)
    marked = (f"[-{before}-]" if before else "") + (f"{{+{after}+}}" if after else "")
    change = sides[0][:begins] + marked + sides[0][len(sides[0]) - ends :]
    function = re.sub(r"^x_|^xǁ|__mutmut_\d+$", "", mutant).replace("ǁ", ".")
    return Survivor(module=module, function=function, change=change)


def _alike(one: str, other: str) -> int:
    """Return the length of the beginning that two lines share, up to the last whole word."""
    pairs = zip(one, other, strict=False)
    length = next(
        (at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other))
    )
    while length and one[length - 1].isalnum():
        length -= 1
    return length


def _side(diff: Sequence[str], sign: str) -> str:
    return " ".join(line[1:].strip() for line in diff if line.startswith(sign))


def judgements() -> list[Judgement]:
    read = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [Judgement(**{**one, "mutants": frozenset(one["mutants"])}) for one in read["judgement"]]


def section(
    counts: Counter[str], survivors: Sequence[Survivor], judged: Sequence[Judgement]
) -> Iterator[str]:
    """Yield the lines of the section: the score of each module, and the survivors by judgement."""
    same = frozenset[str]().union(*(one.mutants for one in judged if one.equivalent))
    equivalent = Counter(one.module for one in survivors if str(one) in same)
    lived = Counter(one.module for one in survivors if str(one) not in same)
    yield (
        "`make mutants` changes the pure core in one place at a time with"
        " [mutmut](https://mutmut.readthedocs.io), runs the tests"
    )
    yield (
        "of its folder that call the changed function, and writes this section. The score is the"
        " share of mutants that a test kills,"
    )
    yield (
        "without equivalent ones. mutmut changes no tables outside of functions. Measured on"
        f" {measured_at('tests')}.\n"
    )
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
    return (
        f"| {name} | {count} | {killed} | {equivalent} | {lived} |"
        f" {killed / (count - equivalent):.1%} |"
    )


def _item(one: Survivor) -> str:
    return f"- `{one.module}`, `{one.function}`: `` {one.change} ``"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", default=MODULES, help="below harness")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sample", type=int, default=10_000, help="most mutants of a module")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args()
    counts, survivors = Counter[str](), list[Survivor]()
    for module in asked.modules:
        counts[module], lived = mutate(module, asked.jobs, asked.sample)
        survivors += lived
        print(f"{module}: {counts[module]} mutants, {len(lived)} survived", file=sys.stderr)
    judged = judgements()
    text = "\n".join(section(counts, survivors, judged))
    if asked.write:
        write_sections({"Mutants": text})
    else:
        print(text)
    raise SystemExit(bool(without_judgement(survivors, judged)))


if __name__ == "__main__":
    main()
