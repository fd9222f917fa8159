"""Rendering of a run's reports, and writing them beside its journal."""

from __future__ import annotations

import contextlib
import errno
import json
from pathlib import Path

from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.journal.log_excerpts import PAGE_SIZES, LogExcerpts, read_excerpts
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

__all__ = ["FORMATS", "render", "write_diffs", "write_file", "write_reports"]

FORMATS = {
    "md": "report.md",
    "html": "report.html",
    "json": "report.json",
    "junit": "junit.xml",
    "python": "repro.py",
}

LOG_ROOM = 2 << 20
"""Bytes of all logs on a page."""


def render(report: RunReport, form: str, scenario: Scenario | None = None) -> str:
    """Return the text of one format.

    scenario: of the run, if it is not in the catalogue. Raises `UsageError` for other formats.
    """
    if form == "md":
        return markdown(report)
    if form == "html":
        return html_page(report, _page_logs(report))
    if form == "json":
        return json.dumps(report_dict(report), indent=2, ensure_ascii=False) + "\n"
    if form == "junit":
        return junit(report)
    if form == "python":
        own = scenario or find(report.scenario)
        text = script_of_run(report, own)
        if text is None:
            raise UsageError(no_script(own))
        return report.redactor.text(text)
    raise UsageError(f"no format {form!r}", hint=f"one of {', '.join(FORMATS)}")


def write_diffs(report: RunReport) -> list[Path]:
    """Write the diff of each patched arm against the release.

    The release must be in the cache, and the server must have run exactly these files.
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
    """Return as many logs as there is room for. Each counts with the most that is read of it."""
    found: list[LogExcerpts | MissingLog] = []
    room = LOG_ROOM
    for name, root in log_names(report).items():
        if room < PAGE_SIZES.whole:
            found.append(MissingLog(name, exists=(report.folder / name).is_file()))
            continue
        log = read_excerpts(report.folder, name, report.redactor, root)
        if log is not None:
            room -= min(log.size, PAGE_SIZES.whole)
        found.append(log or MissingLog(name, exists=False))
    return found


def write_reports(report: RunReport, scenario: Scenario | None = None) -> list[Path]:
    """Write all formats and return their paths.

    The script needs a scenario that is known. scenario: as for `render`.
    """
    known = scenario or next(
        (one for one in all_scenarios(warn=to_stderr) if one.id == report.scenario), None
    )
    paths = []
    for form, name in FORMATS.items():
        if form == "python" and known is None:
            to_stderr(
                f"no {name}: the scenario {report.scenario} is not here (--scenarios DIR adds a"
                " folder)"
            )
            continue
        if form == "python" and known is not None and no_script(known):
            continue
        path = report.folder / name
        write_file(
            path,
            render(report, form, known),
            hint="vllm-repro report RUN -o FILE writes it elsewhere",
        )
        paths.append(path)
    return [*paths, *write_diffs(report)]


def write_file(path: Path, content: str | bytes, *, hint: str) -> None:
    """Replace `path` atomically.

    Raises `InfraError` if the disk is full, else `UsageError`, with `hint`.
    """
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
