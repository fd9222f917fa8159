"""How well `gate` judges kept changes, by the answers that the tables in `benchmarks/gate` expect.

    python -m benchmarks.gate_sets planted --for 5m --jobs 2 --out planted.jsonl

The sets are `planted` faults, bugs put back (`reverts`), their `fixes`, patches that hide or `half`
mend them, `harmless` changes by hand, and `generated`: 100 harmless changes from a seed. A row is
written after each change; the same command with the same `--out` resumes.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gate.harmless import write_changes
from vllm_repro.releases.known import NEWEST, nearest_cpu_build
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source

HERE = Path(__file__).parent / "gate"
ARGUMENTS = {
    "set": ("", "planted, reverts, fixes, half, harmless or generated"),
    "--for": ("5m", "time of each gate"),
    "--jobs": ("2", "processes of each gate"),
    "--only": ("", "changes or kinds whose name contains this"),
    "--out": ("", "rows as JSON lines (default: SET.jsonl)"),
    "--seed": ("1", "of the generated changes"),
    "--together": ("1", "changes of a gate, for harmless ones: together they break nothing either"),
}
DEFAULT = {"base": NEWEST, "base_patch": "", "expected": "not breaks"}
RIGHT = {
    "breaks": ("breaks",),
    "fixes": ("fixes",),
    "not fixes": ("breaks", "no difference seen", "cannot tell"),
    "not breaks": ("fixes", "no difference seen", "cannot tell"),
}


def read_set(name: str, scratch: Path, seed: int) -> list[dict[str, Any]]:
    """Return the changes of a set: name, kind, expected answer, base, its diff, and the change."""
    if name == "generated":
        made = write_changes(scratch, provision(Source(release=NEWEST)).packages, seed, 100)
        rows = {row: {"kind": kind, "change": scratch / f"{row}.diff"} for row, kind in made}
    else:
        rows = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))
    return [DEFAULT | {"name": row, "change": f"{name}/{row}.diff"} | rows[row] for row in rows]


def joined(rows: list[dict[str, Any]], number: int, scratch: Path) -> Iterator[dict[str, Any]]:
    """Yield rows that each make `number` changes of the first one's base at once."""
    for at in range(0, len(rows), number):
        group = rows[at : at + number]
        change = scratch / f"joined-{at}.diff"
        change.write_text("".join((HERE / row["change"]).read_text() for row in group))
        name, kind = (" + ".join(row[word] for row in group) for word in ("name", "kind"))
        yield group[0] | {"name": name, "kind": kind, "change": change}


def base_of(row: dict[str, Any], scratch: Path) -> str:
    """Return the base for `--base`: a release, or a folder with its source and the base's diff."""
    if not row["base_patch"]:
        return str(row["base"])
    # the tag names the release of the compiled parts
    folder, tag = scratch / "base", f"v{nearest_cpu_build(row['base'])}"
    shutil.copytree(
        provision(Source(release=row["base"])).packages / "vllm",
        folder / "vllm",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    for words in (
        ["init", "-q"],
        [
            *("-c", "user.name=gate", "-c", "user.email=gate@localhost"),
            *("commit", "-q", "--allow-empty", "-m", tag),
        ],
        ["tag", tag],
        ["apply", str(HERE / row["base_patch"])],
    ):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    return str(folder)


def judge(row: dict[str, Any], options: dict[str, str]) -> dict[str, Any]:
    """Run `gate` for a change, and return the row of the result."""
    with tempfile.TemporaryDirectory(prefix="gate-set-") as out:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "vllm_repro", "gate", str(HERE / row["change"]), "--json"),
                *("--base", base_of(row, Path(out)), "--out", out),
                *("--for", options["for"], "--jobs", options["jobs"]),
            ],
            stdout=subprocess.PIPE,
            check=False,
        )
    found = json.loads(done.stdout or "{}")
    return {word: row[word] for word in ("name", "kind", "expected")} | {
        "answer": found.get("answer", "failed"),
        "seconds": found.get("duration_s"),
        "cases": found.get("trials"),
        "status": done.returncode,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table by kind: how many answers are as expected, and all answers."""
    lines = ["| kind | as expected | answers |", "|---|---|---|"]
    for kind in [*sorted({row["kind"] for row in rows}), "all"]:
        some = [row for row in rows if kind in ("all", row["kind"])]
        told = ", ".join(
            f"{number} {answer}"
            for answer, number in Counter(row["answer"] for row in some).most_common()
        )
        right = sum(row["answer"] in RIGHT[row["expected"]] for row in some)
        lines.append(f"| {kind} | {right} of {len(some)} | {told} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, (default, meaning) in ARGUMENTS.items():
        parser.add_argument(name, default=default, help=meaning)
    options = vars(parser.parse_args())
    out = Path(options["out"] or f"{options['set']}.jsonl")
    with tempfile.TemporaryDirectory() as scratch, out.open("a", encoding="utf-8") as file:
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        made = read_set(options["set"], Path(scratch), int(options["seed"]))
        for row in joined(made, int(options["together"]), Path(scratch)):
            if row["name"] not in {done["name"] for done in rows} and (
                options["only"] in f"{row['kind']} {row['name']}"
            ):
                rows.append(judge(row, options))
                print(json.dumps(rows[-1]), file=file, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
