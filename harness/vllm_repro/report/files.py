"""A run's reports: rendered, and written beside its journal. What a draft shows of the logs is read here."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from vllm_repro.command.render import render_serve
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.journal.log_excerpts import PAGE, LogPieces, read_pieces
from vllm_repro.report.duplicates import duplicates
from vllm_repro.report.html import LOG_ROOM, UnreadLog, html_page, log_names
from vllm_repro.report.issue import Draft, draft
from vllm_repro.report.junit import junit
from vllm_repro.report.map_of_run import Mapped, mapped
from vllm_repro.report.markdown import markdown
from vllm_repro.report.model import RunReport, TrialReport
from vllm_repro.report.wording import rank_logs
from vllm_repro.scenario.catalogue import all_scenarios, to_stderr

__all__ = ["DRAFT", "FORMATS", "ON_REQUEST", "drafted", "pieces", "render", "write_reports", "write_whole"]

FORMATS = {"md": "report.md", "html": "report.html", "json": "report.json", "junit": "junit.xml"}
DRAFT = "issue.md"
ON_REQUEST = {"issue": DRAFT}
"""Not written by a run: a draft is made when somebody wants to send one."""

_MOST_LOGS = 3
_LARGEST_MAP = 1 << 20  # bytes


def render(report: RunReport, form: str) -> str:
    """The text of one format: `md`, `html`, `json`, `junit` or `issue`. Raises `UsageError` for others."""
    return "".join(pieces(report, form))


def pieces(report: RunReport, form: str) -> Iterator[str]:
    """The same text, piece by piece: `report.json` of a huge run need not be in memory as a whole."""
    if form == "issue":
        yield drafted(report).body
    elif form == "md":
        yield markdown(report)
    elif form == "html":
        yield html_page(report, _page_logs(report), _version_map(report))
    elif form == "json":
        yield from json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(report.as_json())
        yield "\n"
    elif form == "junit":
        yield junit(report)
    else:
        raise UsageError(f"no format {form!r}", hint=f"one of {', '.join({**FORMATS, **ON_REQUEST})}")


def drafted(report: RunReport) -> Draft:
    """The draft for upstream, with pieces of the logs beside the journal, and the issues that today's scenarios know."""
    scenarios = all_scenarios(warn=to_stderr)
    # Whether somebody has reported it is a matter of today, not of the day of the run.
    own = next((scenario for scenario in scenarios if scenario.id == report.scenario), None)
    today = report if own is None else replace(report, issue=own.issue, filed=own.filed)
    flags = "" if own is None else report.redactor.text(render_serve(own.reported()))
    # The head of a scenario file says what happens, then why.
    why = "" if own is None else report.redactor.text("".join(own.about.split("\n\n")[1:2]))
    return draft(today, _logs(report), duplicates(today, scenarios), flags=flags, why=why)


def _logs(report: RunReport) -> list[LogPieces]:
    """Of the trials that failed, the most telling of each arm, and of the nodes that such a death began with."""
    first: dict[str, TrialReport] = {}
    for arm, trial in report.failures:
        first.setdefault(arm.name, trial)
    found = [
        read_pieces(report.folder, name, report.redactor, trial.death.exception if trial.death else None)
        for trial in first.values()
        for name in rank_logs(trial) or [trial.log]
    ]
    return [log for log in found if log is not None][:_MOST_LOGS]


def _page_logs(report: RunReport) -> list[LogPieces | UnreadLog]:
    """As many as have room on the page. Each counts as what is read of it at most, so that a run with many huge logs ends soon too."""
    found: list[LogPieces | UnreadLog] = []
    room = LOG_ROOM
    for name, root in log_names(report).items():
        if room < PAGE.whole:
            found.append(UnreadLog(name, "not shown for want of room on this page"))
            continue
        log = read_pieces(report.folder, name, report.redactor, root, PAGE)
        if log is not None:
            room -= min(log.size, PAGE.whole)
        found.append(log or UnreadLog(name, "not beside this page when it was made"))
    return found


def _version_map(report: RunReport) -> Mapped | None:
    """The one in the run's folder, else the scenario's newest; None where there is none that can be read."""
    for where in ("versions.json", "../versions/latest/versions.json"):
        try:
            with (report.folder / where).open("rb") as file:
                raw = file.read(_LARGEST_MAP + 1)
            if len(raw) <= _LARGEST_MAP:
                return mapped(report.redactor.deep(json.loads(raw)), report.scenario, where)
        except (OSError, ValueError, RecursionError):
            continue
    return None


def write_reports(report: RunReport) -> list[Path]:
    """All formats, each written whole or not at all."""
    written: list[Path] = []
    for form, name in FORMATS.items():
        path = report.folder / name
        write_whole(path, pieces(report, form), hint="vllm-repro report RUN -o FILE writes it elsewhere")
        written.append(path)
    return written


def write_whole(path: Path, text: str | Iterable[str], *, hint: str) -> None:
    """Replaces `path` in one step, so that no reader finds half of it. Raises `InfraError` with `hint`."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.writelines((text,) if isinstance(text, str) else text)
        fresh.replace(path)
    except OSError as error:
        raise InfraError(f"cannot write {path}: {error.strerror}", hint=hint) from error
    finally:
        with contextlib.suppress(OSError):  # what went wrong before is what is raised
            fresh.unlink(missing_ok=True)  # half a file, where the disk is full
