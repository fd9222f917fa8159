"""`vllm-repro draft`: a draft issue comment from a run, and the command that sends it.

It sends nothing itself.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vllm_repro.cli.common import add_common
from vllm_repro.report.build import build_foreign
from vllm_repro.report.files import write_file
from vllm_repro.report.model import RunReport
from vllm_repro.verdict.verdict import Verdict
from vllm_repro_intake.issue_draft import MOST, Draft
from vllm_repro_intake.run_draft import DRAFT, make_draft


def add(parser: argparse.ArgumentParser) -> None:
    add_common(parser, example="vllm-repro draft reports/tq-chunked-prefill/latest")
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its journal.jsonl")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help=f"write to FILE (default: {DRAFT} in the folder)",
    )


def run(arguments: argparse.Namespace) -> int:
    report = build_foreign(Path(arguments.run))
    made = make_draft(report)
    path = arguments.output or report.folder / DRAFT
    write_file(path, made.body, hint="-o FILE writes it elsewhere")
    for warning in _warnings(report, made):
        print(f"vllm-repro: {warning}", file=sys.stderr)
    if report.rehearsal:
        # Print no command: it would be pasted before the warnings are read.
        print(
            f"{path}: {len(made.body):,} characters, to look at. No command: a REHEARSAL says"
            " nothing about vLLM."
        )
        return 0
    if made.title and not report.bug_seen:
        print(
            f"{path}: {len(made.body):,} characters, to look at. No command: the bug was not seen"
            " in this run."
        )
        return 0
    if made.fixed_in and report.verdict is not Verdict.REGRESSED:
        print(
            f"{path}: {len(made.body):,} characters, to look at. No command: the bug is declared"
            f" fixed in {made.fixed_in}."
        )
        return 0
    kind = (
        f"a new issue for {made.issue.partition('#')[0]}"
        if made.title
        else f"a comment on {made.issue}"
    )
    print(
        f"{path}: {kind}, {len(made.body):,} of {MOST:,} characters. Nothing is sent; once you have"
        " read it:"
    )
    print(made.command(path))
    return 0


def _warnings(report: RunReport, made: Draft) -> list[str]:
    """Return the reasons against sending it as it is."""
    found = [f"may be the same as {url}" for url in made.duplicate_urls]
    if made.left_out:
        found.append(f"no room for {', '.join(made.left_out)}; report.md has it")
    logs = dict.fromkeys(
        trial.log for _, trial in report.failures if (report.folder / trial.log).is_file()
    )
    if logs:
        found.append(
            f"the draft has no log; attach {', '.join(list(logs)[:3])} once you have read it"
        )
    if report.rehearsal:
        found.append("a REHEARSAL says nothing about vLLM, and is nothing for upstream")
    if report.verdict is Verdict.INCONCLUSIVE:
        found.append(f"the run decided nothing: {report.because}")
    if report.interrupted or report.journal_cut:
        found.append("the run was interrupted")
    return found
