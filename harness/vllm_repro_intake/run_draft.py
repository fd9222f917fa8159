"""`vllm-repro draft`: a draft issue comment from a run, and the command that sends it.

The draft has what the scenarios know today. The command sends nothing itself.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from msgspec.structs import replace

from vllm_repro.cli.common import add_common
from vllm_repro.errors import UsageError
from vllm_repro.features import load
from vllm_repro.report.build import build_foreign
from vllm_repro.report.files import write_file
from vllm_repro.report.model import RunReport, issue_url
from vllm_repro.report.script import no_script, script_of_run
from vllm_repro.scenario.catalogue import all_scenarios, to_stderr
from vllm_repro.scenario.scenario import Lab, Scenario
from vllm_repro.trigger.trigger import UNSTATED
from vllm_repro.verdict.verdict import Verdict
from vllm_repro_intake.issue_draft import MOST, Draft, draft, duplicates

_DRAFT = "issue.md"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm-repro draft`."""
    add_common(parser, example="vllm-repro draft reports/tq-chunked-prefill/latest")
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its journal.jsonl")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help=f"write to FILE (default: {_DRAFT} in the folder)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `vllm-repro draft`: write issue.md, print the command that sends it, and return 0.

    If it is nothing for upstream, print the reason in place of the command. Raises `UsageError` if
    no boot tested vLLM, or the scenario states no issue, or no trigger and the bug was not seen.
    """
    report = build_foreign(Path(arguments.run))
    if not any(trial.outcome.facts.tested for arm in report.arms for trial in arm.trials):
        raise UsageError(
            f"there is nothing to report upstream: no boot tested vLLM ({report.because})",
            hint="vllm-repro doctor lists what this machine can run",
        )
    made = make_draft(report)
    if (report.trigger == UNSTATED and not report.bug_seen) or "#" not in made.issue:
        what = "issue" if "#" not in made.issue else "trigger, and no boot showed the bug"
        raise UsageError(
            f"there is nothing to report upstream: the scenario does not state its {what}",
            hint="vllm-repro check FILE lists what it does not state; then run it again",
        )
    path, length = arguments.output or report.folder / _DRAFT, f"{len(made.body):,}"
    write_file(path, made.body, hint="-o FILE writes it elsewhere")
    for warning in _warnings(report, made):
        print(f"vllm-repro: {warning}", file=sys.stderr)
    # Print no command if there is a reason: it would be pasted before the warnings are read.
    if reason := _not_to_send(report, made):
        print(f"{path}: {length} characters, to look at. No command: {reason}.")
        return 0
    new = f"a new issue for {made.issue.partition('#')[0]}"
    kind = new if made.title else f"a comment on {made.issue}"
    print(
        f"{path}: {kind}, {length} of {MOST:,} characters. Nothing is sent; once you have read it:"
    )
    print(made.command(path))
    return 0


def _not_to_send(report: RunReport, made: Draft) -> str:
    """Return why the draft is nothing for upstream; empty if it may be sent."""
    if report.rehearsal:
        return "a REHEARSAL says nothing about vLLM"
    if made.title and not report.bug_seen:
        return "the bug was not seen in this run"
    if made.fixed_in and report.verdict is not Verdict.REGRESSED:
        return f"the bug is declared fixed in {made.fixed_in}"
    return ""


def _warnings(report: RunReport, made: Draft) -> list[str]:
    """Return what the sender must know before sending it: reasons against, a log to attach."""
    logs = [
        log
        for log in dict.fromkeys(trial.log for _, trial in report.failures)
        if (report.folder / log).is_file()
    ]
    warnings = {
        f"no room for {', '.join(made.left_out)}: see report.md, repro.py and, for the unit test,"
        f" vllm-repro show {report.scenario} --as pytest": made.left_out,
        f"the draft has no log; attach {', '.join(logs[:3])} once you have read it": logs,
        "a REHEARSAL says nothing about vLLM, and is nothing for upstream": report.rehearsal,
        f"the run decided nothing: {report.because}": report.verdict is Verdict.INCONCLUSIVE,
        "the run was interrupted": report.interrupted or report.journal_cut,
    }
    return [f"may be the same as {issue_url(issue)}" for issue in made.duplicates] + [
        warning for warning, holds in warnings.items() if holds
    ]


def text(run: Path) -> str:
    """Return the draft's text of the run in a folder. Raises `UsageError` without a run."""
    return make_draft(build_foreign(run)).body


def make_draft(report: RunReport) -> Draft:
    """Return the draft for upstream, with the diffs that the run's folder has.

    Issue, status and duplicates are those that the scenarios have today, not those of the run.
    """
    scenarios = all_scenarios(warn=to_stderr)
    reported = next((scenario for scenario in scenarios if scenario.id == report.scenario), None)
    diffs = {
        name: path.read_text(encoding="utf-8")
        for name, path in {
            arm.name: report.folder / f"{arm.name}.diff" for arm in report.arms if arm.patches
        }.items()
        if path.is_file()
    }
    if reported is None:
        return draft(report, duplicates(report, scenarios), diffs=diffs)
    # The bug may have been reported, or fixed, since the run.
    today = replace(
        report,
        issue=reported.issue,
        filed=reported.filed,
        status=reported.status,
        related=reported.related,
    )
    # A scenario file starts with a paragraph on what happens and one on why.
    text = report.redactor.text
    return draft(
        today,
        duplicates(today, scenarios),
        flags=text(reported.reported().render()),
        why=text("".join(reported.about.split("\n\n")[1:2])),
        small=text(_in_place_of_model(reported.lab)) if reported.lab else "",
        gpus=bool(reported.needs.gpus),
        test=_unit_test(reported),
        script=text(script_of_run(today, reported, brief=True) or ""),
        no_script=no_script(reported),
        diffs=diffs,
        reasons={
            arm.name: text("; ".join(dict.fromkeys(p.why for p in arm.patches if p.why)))
            for arm in reported.arms
        },
    )


def _in_place_of_model(lab: Lab) -> str:
    """Return what the lab ran in place of the reported model, and why that shows the bug."""
    return f"{'No' if lab.mechanism == 'scheduler' else 'A small'} model ran: {lab.why}"


def _unit_test(scenario: Scenario) -> str:
    """Return the pytest file that `show --as pytest` prints for a scenario; empty without one."""
    with contextlib.suppress(KeyError, UsageError):
        return str(load("show_forms", "pytest")(scenario, None)).rstrip()
    return ""
