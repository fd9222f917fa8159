"""`vllm-repro report`: the reports of a run, rendered again from its journal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vllm_repro.cli.common import add_common
from vllm_repro.errors import UsageError
from vllm_repro.features import additions, load
from vllm_repro.report.build import build_foreign
from vllm_repro.report.files import FORMATS, render, write_reports


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vllm-repro report` to its parser."""
    add_common(parser, example="vllm-repro report reports/tq-chunked-prefill/latest --format md")
    parser.add_argument(
        "run",
        metavar="RUN",
        help="a run's folder, or its journal.jsonl; for pytest also a folder of explore",
    )
    parser.add_argument(
        "--format",
        choices=sorted([*FORMATS, *additions("report_forms")]),
        help="print this format (default: write all but the draft into the folder)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write to FILE instead of printing"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write or print the reports of a run again from its journal, and return 0."""
    if arguments.format in additions("report_forms"):
        return _print_or_write(
            load("report_forms", arguments.format)(Path(arguments.run)), arguments.output
        )
    report = build_foreign(Path(arguments.run))
    if arguments.format is None:
        if arguments.output:
            raise UsageError("-o needs one format", hint=f"--format {'|'.join(FORMATS)}")
        for path in write_reports(report):
            print(path)
        return 0
    return _print_or_write(render(report, arguments.format), arguments.output)


def _print_or_write(text: str, path: Path | None) -> int:
    """Print `text`, or write it to the file `path` if there is one; return exit status 0.

    Raises `UsageError` if the file cannot be written.
    """
    if path is None:
        sys.stdout.write(text)
        return 0
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="name another file with -o"
        ) from error
    return 0
