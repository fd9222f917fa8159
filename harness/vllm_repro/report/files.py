"""Rendering of a run's reports, and writing them beside its journal."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable
from pathlib import Path

from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.journal.log_excerpts import PAGE_SIZES, LogExcerpts, read_excerpts
from vllm_repro.releases.disk import replace_file
from vllm_repro.releases.overlay import digests_of, patched_files
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import Source
from vllm_repro.report.html import MissingLog, html_page, log_names
from vllm_repro.report.json_report import report_dict
from vllm_repro.report.junit import junit
from vllm_repro.report.markdown import markdown
from vllm_repro.report.model import RunReport
from vllm_repro.report.script import no_script, script_of_run
from vllm_repro.report.source_changes import whole_diff
from vllm_repro.scenario.catalogue import all_scenarios, find, to_stderr
from vllm_repro.scenario.scenario import Scenario

FORMATS = {
    "md": "report.md",
    "html": "report.html",
    "json": "report.json",
    "junit": "junit.xml",
    "python": "repro.py",
}
"""File in the run's folder, by format."""

LOG_ROOM = 2 << 20
"""Bytes of all logs on a page."""


_RENDERERS: dict[str, Callable[[RunReport], str]] = {
    "md": markdown,
    "html": lambda report: html_page(report, _page_logs(report)),
    "json": lambda report: json.dumps(report_dict(report), indent=2, ensure_ascii=False) + "\n",
    "junit": junit,
}
"""By format: all that need no scenario."""


def render(report: RunReport, form: str, scenario: Scenario | None = None) -> str:
    """Return a run's report as text in one format: `md`, `html`, `json`, `junit`, `python`.

    scenario: of the run, if it is not in the catalogue. Raises `UsageError` for other formats, and
    for `python` if the scenario is unknown or can have no script.
    """
    if form in _RENDERERS:
        return _RENDERERS[form](report)
    if form != "python":
        raise UsageError(f"no format {form!r}", hint=f"one of {', '.join(FORMATS)}")
    known = scenario or find(report.scenario)
    text = script_of_run(report, known)
    if text is None:
        raise UsageError(no_script(known))
    return report.redactor.text(text)


def write_diffs(report: RunReport) -> list[Path]:
    """Write the source diff of each patched arm against the release, and return the paths.

    An arm is skipped if the release is not in the cache, or if the server's patched files are not
    those of the release with the arm's patches. Raises the errors of `write_file`.
    """
    release = None
    with contextlib.suppress(UsageError):  # the version of a commit, a folder or a nightly build
        version = report.vllm_version
        release = ReleaseCache().get(Source(release=version)) if version else None
    written = []
    for arm in report.arms if release else ():
        assert release is not None
        with contextlib.suppress(Unsupported, OSError):  # another source than the release
            after = patched_files(release.packages, arm.patches)
            if after and digests_of(after) == {
                file.file: file.sha256 for file in arm.server.patched
            }:
                before = {
                    file: (release.packages / file).read_text(encoding="utf-8") for file in after
                }
                path = report.folder / f"{arm.name}.diff"
                write_file(path, whole_diff(before, after), hint="free some space")
                written.append(path)
    return written


def _page_logs(report: RunReport) -> list[LogExcerpts | MissingLog]:
    """Return an item for each log of `log_names`, in order: its excerpts, or a `MissingLog`.

    A log is missing if it cannot be read, or if the logs before it leave no room (`LOG_ROOM`).
    """
    logs: list[LogExcerpts | MissingLog] = []
    room = LOG_ROOM
    for name, root in log_names(report).items():
        fits = room >= PAGE_SIZES.whole
        log = read_excerpts(report.folder, name, report.redactor, root) if fits else None
        room -= min(log.size, PAGE_SIZES.whole) if log else 0
        exists = not fits and (report.folder / name).is_file()
        logs.append(log or MissingLog(name, exists=exists))
    return logs


def write_reports(report: RunReport, scenario: Scenario | None = None) -> list[Path]:
    """Write a run's report in all formats and its diffs into its folder; return their paths.

    Without a known scenario there is no script, which is reported to standard error. scenario: as
    for `render`. Raises the errors of `write_file`.
    """
    catalogue = () if scenario else all_scenarios(warn=to_stderr)
    known = scenario or next((each for each in catalogue if each.id == report.scenario), None)
    if known is None:
        to_stderr(
            f"no {FORMATS['python']}: the scenario {report.scenario} is not here (--scenarios DIR"
            " adds a folder)"
        )
    forms = [form for form in FORMATS if form != "python" or (known and not no_script(known))]
    paths = {form: report.folder / FORMATS[form] for form in forms}
    for form, path in paths.items():
        hint = "vllm-repro report RUN -o FILE writes it elsewhere"
        write_file(path, render(report, form, known), hint=hint)
    return [*paths.values(), *write_diffs(report)]


def write_file(path: Path, content: str | bytes, *, hint: str) -> None:
    """Replace the file `path` atomically by one with `content`.

    If this fails, raises `InfraError` for a full disk, else `UsageError`. hint: that of the error.
    """
    try:
        replace_file(path, content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        kind = InfraError if error.errno in (errno.ENOSPC, errno.EDQUOT) else UsageError
        raise kind(f"cannot write {path}: {error.strerror}", hint=hint) from error
