"""Rendering of a run's reports, and writing them beside its journal."""

from __future__ import annotations

import contextlib
import errno
import json
from dataclasses import replace
from pathlib import Path

from vllm_repro.errors import InfraError, UsageError
from vllm_repro.journal.log_excerpts import PAGE_SIZES, LogExcerpts, read_excerpts
from vllm_repro.report.html import MissingLog, html_page, log_names
from vllm_repro.report.issue import Draft, draft, duplicates
from vllm_repro.report.json_report import report_dict
from vllm_repro.report.junit import junit
from vllm_repro.report.markdown import markdown
from vllm_repro.report.model import RunReport, TrialReport
from vllm_repro.report.script import script_of_run
from vllm_repro.report.wording import rank_logs
from vllm_repro.scenario.catalogue import all_scenarios, find, to_stderr
from vllm_repro.scenario.scenario import Scenario

__all__ = ["DRAFT", "FORMATS", "ON_REQUEST", "make_draft", "render", "write_file", "write_reports"]

FORMATS = {"md": "report.md", "html": "report.html", "json": "report.json", "junit": "junit.xml", "python": "repro.py"}
DRAFT = "issue.md"
ON_REQUEST = {"issue": DRAFT}
"""Formats that a run does not write."""

LOG_ROOM = 2 << 20
"""Bytes of all logs on a page."""

_MOST_LOGS = 3


def render(report: RunReport, form: str, scenario: Scenario | None = None) -> str:
    """Return the text of one format. scenario: of the run, if it is not in the catalogue. Raises `UsageError` for other formats."""
    if form == "issue":
        return make_draft(report).body
    if form == "md":
        return markdown(report)
    if form == "html":
        return html_page(report, _page_logs(report))
    if form == "json":
        return json.dumps(report_dict(report), indent=2, ensure_ascii=False) + "\n"
    if form == "junit":
        return junit(report)
    if form == "python":
        text = script_of_run(report, scenario or find(report.scenario))
        if text is None:
            raise UsageError("every arm of this scenario changes vLLM's source, which a script does not")
        return report.redactor.text(text)
    raise UsageError(f"no format {form!r}", hint=f"one of {', '.join({**FORMATS, **ON_REQUEST})}")


def make_draft(report: RunReport) -> Draft:
    """Return the draft for upstream, with pieces of the logs and the issues that the scenarios know today."""
    scenarios = all_scenarios(warn=to_stderr)
    own = next((scenario for scenario in scenarios if scenario.id == report.scenario), None)
    if own is None:
        return draft(report, _draft_logs(report), duplicates(report, scenarios))
    # The bug may have been reported since the run.
    today = replace(report, issue=own.issue, filed=own.filed)
    # A scenario file starts with a paragraph on what happens and one on why.
    why = "".join(own.about.split("\n\n")[1:2])
    return draft(
        today,
        _draft_logs(report),
        duplicates(today, scenarios),
        flags=report.redactor.text(own.reported().render()),
        why=report.redactor.text(why),
    )


def _draft_logs(report: RunReport) -> list[LogExcerpts]:
    """Return pieces of the logs of each arm's most important failure, from the ranks on which a death began."""
    first: dict[str, TrialReport] = {}
    for arm, trial in report.failures:
        first.setdefault(arm.name, trial)
    found = [
        read_excerpts(report.folder, name, report.redactor, trial.death.exception if trial.death else None)
        for trial in first.values()
        for name in rank_logs(trial) or [trial.log]
    ]
    return [log for log in found if log is not None][:_MOST_LOGS]


def _page_logs(report: RunReport) -> list[LogExcerpts | MissingLog]:
    """Return as many logs as there is room for. Each counts with the most that is read of it."""
    found: list[LogExcerpts | MissingLog] = []
    room = LOG_ROOM
    for name, root in log_names(report).items():
        if room < PAGE_SIZES.whole:
            found.append(MissingLog(name, exists=(report.folder / name).is_file()))
            continue
        log = read_excerpts(report.folder, name, report.redactor, root, PAGE_SIZES)
        if log is not None:
            room -= min(log.size, PAGE_SIZES.whole)
        found.append(log or MissingLog(name, exists=False))
    return found


def write_reports(report: RunReport, scenario: Scenario | None = None) -> list[Path]:
    """Write all formats and return their paths. The script needs a scenario that is known. scenario: as for `render`."""
    known = scenario or next((one for one in all_scenarios(warn=to_stderr) if one.id == report.scenario), None)
    paths = []
    for form, name in FORMATS.items():
        if form == "python" and known is None:
            to_stderr(f"no {name}: the scenario {report.scenario} is not here (--scenarios DIR adds a folder)")
            continue
        if form == "python" and known is not None and all(arm.patches for arm in known.arms):
            continue  # a script does not change vLLM's source
        path = report.folder / name
        write_file(path, render(report, form, known), hint="vllm-repro report RUN -o FILE writes it elsewhere")
        paths.append(path)
    return paths


def write_file(path: Path, content: str | bytes, *, hint: str) -> None:
    """Replace `path` atomically. Raises `InfraError` if the disk is full, else `UsageError`, with `hint`."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        if isinstance(content, bytes):
            fresh.write_bytes(content)
        else:
            fresh.write_text(content, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        kind = InfraError if error.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
        raise kind(f"cannot write {path}: {error.strerror}", hint=hint) from error
    finally:
        with contextlib.suppress(OSError):  # half a file, if the disk is full
            fresh.unlink(missing_ok=True)
