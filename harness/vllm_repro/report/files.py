"""Writes a run's reports beside its journal."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_repro.errors import InfraError, UsageError
from vllm_repro.report.junit import junit
from vllm_repro.report.markdown import markdown
from vllm_repro.report.model import RunReport

__all__ = ["FORMATS", "render", "write_reports", "write_whole"]

FORMATS = {"md": "report.md", "json": "report.json", "junit": "junit.xml"}


def render(report: RunReport, form: str) -> str:
    """The text of one format: `md`, `json` or `junit`. Raises `UsageError` for others."""
    if form == "md":
        return markdown(report)
    if form == "json":
        return json.dumps(report.as_json(), indent=2, ensure_ascii=False) + "\n"
    if form == "junit":
        return junit(report)
    raise UsageError(f"no format {form!r}", hint=f"one of {', '.join(FORMATS)}")


def write_reports(report: RunReport) -> list[Path]:
    """All formats, each written whole or not at all."""
    written: list[Path] = []
    for form, name in FORMATS.items():
        path = report.folder / name
        write_whole(path, render(report, form), hint="vllm-repro report RUN -o FILE writes it elsewhere")
        written.append(path)
    return written


def write_whole(path: Path, text: str, *, hint: str) -> None:
    """Replaces `path` in one step, so that no reader finds half of it. Raises `InfraError` with `hint`."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise InfraError(f"cannot write {path}: {error.strerror}", hint=hint) from error
