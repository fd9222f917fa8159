"""`vllm-repro history`: changes since the last nights, and the nightly page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_repro.cli.common import add_common, number, print_json
from vllm_repro.errors import UsageError
from vllm_repro.report.files import write_file
from vllm_repro.report.runs import read_runs
from vllm_repro.running.folders import default_out, link_to
from vllm_repro_nights.page import page
from vllm_repro_nights.summary import summarize
from vllm_repro_nights.text import as_csv, as_json, run_table, terminal

if TYPE_CHECKING:  # importing pandas takes half a second
    import pandas as pd

_EPILOG = """

A night is named after its morning and begins at 18:00 the evening before, local time (set TZ=UTC for another).
Details: docs/history.md."""


_PRINT = Path("-")
"""Prints instead of writing a file."""


def add(parser: argparse.ArgumentParser) -> None:
    add_common(
        parser,
        example="vllm-repro history --html reports/index.html",
        prints="changes, the state of each bug, and throughput, night by night",
        more=_EPILOG,
    )
    parser.add_argument("--scenario", action="append", metavar="S", help="only this scenario; may be given again")
    parser.add_argument(
        "--nights",
        type=_nights,
        default=1,
        metavar="N",
        help="compare the last N nights with those before (default: 1)",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the nightly page with a list of all runs and maps; - prints it instead",
    )
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="write all runs as a table, one line per run and arm; - prints it instead",
    )
    parser.add_argument(
        "--parquet",
        type=Path,
        metavar="FILE",
        help="write the same table as Parquet; needs the extra vllm-repro[parquet]",
    )
    parser.add_argument(
        "--out", "--reports", type=Path, metavar="DIR", help="where runs are written, as for run (default: reports)"
    )


def _nights(text: str) -> int:
    return number(text, least=1, most=10_000, what="number of nights")


def run(arguments: argparse.Namespace) -> int:
    root = arguments.out or default_out()
    if not root.is_dir():
        raise UsageError(
            f"there is no folder {root}", hint="vllm-repro run SCENARIO makes the first run; or name --out DIR"
        )
    printed = [name for name in ("html", "csv") if getattr(arguments, name) == _PRINT]
    if arguments.json + len(printed) > 1:
        raise UsageError("only one of --json, --html - and --csv - can be printed", hint="name a file for the others")
    rows, unreadable = read_runs(root)
    if not rows and (others := sorted(root.glob("*/journal.jsonl"))):
        raise UsageError(
            f"no run lies in {root} as SCENARIO/TIME-ID/: the folders in it are runs of one scenario, or copies",
            hint=f"--out names the folder of all scenarios. To read one run: vllm-repro report {others[0].parent} --format md",
        )
    for name in unreadable:
        print(f"vllm-repro: skipped, its journal holds no run: {name}", file=sys.stderr)
    named = arguments.scenario or ()
    if unknown := [name for name in named if all(row.scenario != name for row in rows)]:
        known = ", ".join(sorted({row.scenario for row in rows})) or "no run at all"
        raise UsageError(f"no run of {unknown[0]} in {root}", hint=f"it has: {known}")
    found = summarize(rows, None, nights=arguments.nights, scenarios=named)
    shown = [row for row in rows if not named or row.scenario in named]
    # Files first: printing fails if the reader of a pipe has gone.
    if arguments.html:
        maps = [map_.relative_to(root).as_posix() for map_ in sorted(root.glob("*/versions/*/versions.html"))]
        text = page(
            found, link_to(root, arguments.html), runs=shown, maps=[one for one in maps if "/latest/" not in one]
        )
        _write(arguments.html, text, "--html")
    if arguments.csv:
        _write(arguments.csv, as_csv(shown, None), "--csv")
    if arguments.parquet:
        _write(arguments.parquet, _parquet(run_table(shown, None)), "--parquet")
    if arguments.json:
        print_json(as_json(found))
    elif not printed:
        print(terminal(found))
    for name, file in (("page", arguments.html), ("table", arguments.csv), ("table", arguments.parquet)):
        if file and file != _PRINT:
            print(f"{name}: {file}", file=sys.stderr if arguments.json or printed else sys.stdout)
    return 0


def _parquet(table: pd.DataFrame) -> bytes:
    try:
        return table.to_parquet(index=False)
    except ImportError as error:
        raise UsageError(
            "Parquet needs pyarrow, which is not installed", hint="pip install pyarrow, or use --csv"
        ) from error


def _write(file: Path, content: str | bytes, option: str) -> None:
    if file == _PRINT:
        if isinstance(content, bytes):
            raise UsageError(f"{option} writes no text", hint="name a file")
        sys.stdout.write(content)
        return
    if not file.parent.is_dir():
        raise UsageError(
            f"cannot write {file}: there is no folder {file.parent}", hint="create it, or name another file"
        )
    write_file(file, content, hint=f"name another file with {option}")
