"""Draft for upstream from a run, with what the scenarios know today."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from vllm_repro.report.build import build_foreign
from vllm_repro.report.model import RunReport
from vllm_repro.report.script import no_script, script_of_run
from vllm_repro.scenario.catalogue import all_scenarios, to_stderr
from vllm_repro_intake.issue_draft import Draft, draft, duplicates

__all__ = ["DRAFT", "make_draft", "text"]

DRAFT = "issue.md"


def text(run: Path) -> str:
    """Return the draft of the run in a folder. Raises `UsageError` if there is none."""
    return make_draft(build_foreign(run)).body


def make_draft(report: RunReport) -> Draft:
    """Return the draft for upstream, with the issues that the scenarios know today, and the diffs that lie in the folder."""
    scenarios = all_scenarios(warn=to_stderr)
    own = next((scenario for scenario in scenarios if scenario.id == report.scenario), None)
    paths = {arm.name: report.folder / f"{arm.name}.diff" for arm in report.arms if arm.patches}
    diffs = {
        name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()
    }
    if own is None:
        return draft(report, duplicates(report, scenarios), diffs=diffs)
    # The bug may have been reported, or fixed, since the run.
    today = replace(report, issue=own.issue, filed=own.filed, status=own.status)
    # A scenario file starts with a paragraph on what happens and one on why.
    text = report.redactor.text
    return draft(
        today,
        duplicates(today, scenarios),
        flags=text(own.reported().render()),
        why=text("".join(own.about.split("\n\n")[1:2])),
        small=text(own.lab.why) if own.lab else "",
        gpus=bool(own.needs.gpus),
        script=text(script_of_run(today, own, brief=True) or ""),
        no_script=no_script(own),
        diffs=diffs,
    )
