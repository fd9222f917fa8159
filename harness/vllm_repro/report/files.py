"""A run's reports: rendered, and written beside its journal. What a draft shows of the logs is read here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from vllm_repro.catalogue import all_scenarios, to_stderr
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.logpieces import LogPieces, read_pieces
from vllm_repro.report.duplicates import duplicates
from vllm_repro.report.issue import Draft, draft
from vllm_repro.report.junit import junit
from vllm_repro.report.markdown import markdown
from vllm_repro.report.model import RunReport
from vllm_repro.report.wording import rank_logs

__all__ = ["DRAFT", "FORMATS", "ON_REQUEST", "drafted", "pieces", "render", "write_reports", "write_whole"]

FORMATS = {"md": "report.md", "json": "report.json", "junit": "junit.xml"}
DRAFT = "issue.md"
ON_REQUEST = {"issue": DRAFT}
"""Not written by a run: a draft is made when somebody wants to send one."""

_MOST_LOGS = 3


def render(report: RunReport, form: str) -> str:
    """The text of one format: `md`, `json`, `junit` or `issue`. Raises `UsageError` for others."""
    return "".join(pieces(report, form))


def pieces(report: RunReport, form: str) -> Iterator[str]:
    """The same text, piece by piece: `report.json` of a huge run need not be in memory as a whole."""
    if form == "issue":
        yield drafted(report).body
    elif form == "md":
        yield markdown(report)
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
    return draft(today, _logs(report), duplicates(today, scenarios))


def _logs(report: RunReport) -> list[LogPieces]:
    """Of the first trials that died, one an arm, and of the nodes that such a death began with."""
    first = {arm.name: trial for arm, trial in reversed(report.deaths)}
    found = [
        read_pieces(report.folder, name, report.redactor, trial.death.exception if trial.death else None)
        for trial in reversed(first.values())
        for name in rank_logs(trial) or [trial.log]
    ]
    return [log for log in found if log is not None][:_MOST_LOGS]


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
