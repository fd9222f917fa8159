"""`vllm-repro history`: what changed since the last nights, and the state of each bug."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vllm_repro.cli.common import add_common, number, print_json
from vllm_repro.errors import UsageError
from vllm_repro.report.files import write_file
from vllm_repro.report.runs import Run
from vllm_repro.running.folders import default_out, link_to
from vllm_repro_nights.frames import as_csv
from vllm_repro_nights.history import NIGHTS, history
from vllm_repro_nights.history_formats import as_json, html_page, terminal
from vllm_repro_nights.runs import read_runs

_EPILOG = """

A night is named after its morning and begins at 18:00 the evening before, local time (set TZ=UTC
for another). Details: vllm_repro_nights/docs/history.md."""
_STDOUT = Path("-")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm-repro history`."""
    add_common(
        parser,
        example="vllm-repro history --html reports/index.html",
        prints="changes, the state of each bug over the last 14 nights, and throughput",
        more=_EPILOG,
        scenarios=False,
    )
    parser.add_argument(
        "--scenario", action="append", metavar="S", help="only this scenario; may be given again"
    )
    parser.add_argument(
        "--nights",
        type=lambda text: number(text, least=1, most=NIGHTS - 1, what="number of nights"),
        default=1,
        metavar="N",
        help="compare the last N nights with those before (default: 1)",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the page to FILE, - for stdout"
    )
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write a line per run and arm to FILE, - for stdout",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where runs are written (default: reports)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `vllm-repro history`: print or write the history of the runs, and return 0."""
    files = {"html": arguments.html, "csv": arguments.csv}
    if arguments.json + list(files.values()).count(_STDOUT) > 1:
        raise UsageError(
            "only one of --json, --html - and --csv - can be printed",
            hint="name a file for the others",
        )
    root = arguments.out or default_out()
    runs = _runs(root, arguments.scenario or ())
    shown = history(runs, None, last=arguments.nights, scenarios=arguments.scenario or ())
    # Files first: printing fails if the reader of a pipe has gone.
    if arguments.html:
        _write(arguments.html, html_page(shown, link_to(root, arguments.html)), "--html")
    if arguments.csv:
        table = [
            run for run in runs if not arguments.scenario or run.scenario in arguments.scenario
        ]
        _write(arguments.csv, as_csv(table), "--csv")
    if arguments.json:
        print_json(as_json(shown))
    elif not any(files.values()):
        print(terminal(shown))
    return 0


def _runs(root: Path, named: list[str] | tuple[str, ...]) -> list[Run]:
    """Return all runs below `root`, and print the folders that hold none.

    Raises `UsageError` if `root` is missing or no folder of all scenarios, or if a scenario of
    `named` has no run.
    """
    if not root.is_dir():
        raise UsageError(
            f"there is no folder {root}",
            hint="vllm-repro run SCENARIO makes the first run; or name --out DIR",
        )
    runs, unreadable = read_runs(root)
    if not runs and (others := sorted(root.glob("*/journal.jsonl"))):
        raise UsageError(
            f"no run lies in {root} as SCENARIO/TIME-ID/: the folders in it are runs of one"
            " scenario, or copies",
            hint=(
                "--out names the folder of all scenarios. To read one run: "
                f"vllm-repro report {others[0].parent} --format md"
            ),
        )
    for name in unreadable:
        print(f"vllm-repro: skipped, its journal holds no run: {name}", file=sys.stderr)
    known = {run.scenario for run in runs}
    if unknown := [name for name in named if name not in known]:
        shown = ", ".join(sorted(known)) or "no run at all"
        raise UsageError(f"no run of {unknown[0]} in {root}", hint=f"it has: {shown}")
    return runs


def _write(file: Path, content: str, option: str) -> None:
    """Write content to a file and print its name, or to the standard output if the file is `-`.

    option: named in the hint. Raises `UsageError`, or `InfraError` if the disk is full.
    """
    if file == _STDOUT:
        sys.stdout.write(content)
        return
    write_file(file, content, hint=f"name another file with {option}")
    print(f"wrote {file}", file=sys.stderr)
