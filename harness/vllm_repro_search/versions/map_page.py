"""The version map as an HTML page in one file: what `versions.md` has, and the releases in one row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from vllm_repro.report.document import document, fragment
from vllm_repro.report.model import issue_url
from vllm_repro.report.version_strip import Seen, version_strip
from vllm_repro.verdict.outcome import Tone
from vllm_repro_diagnosis.evidence import banner, simulated
from vllm_repro_search.versions.release_result import ReleaseResult
from vllm_repro_search.versions.version_map import (
    ReleaseRow,
    VersionMap,
    agreement,
    map_heads,
    map_rows,
    meaning,
    readings,
)

__all__ = ["TONES", "map_page"]

TONES: Mapping[ReleaseResult, Tone] = {
    ReleaseResult.LIVES: "good",
    ReleaseResult.DIES: "bad",
    ReleaseResult.SOMETIMES: "bad",
    ReleaseResult.FAILS_OTHERWISE: "bad",
}
"""Of a result; any other is amber."""


def map_page(version_map: VersionMap) -> str:
    """Return `versions.html`, which lies in `<scenario>/versions/<id>/` and links to the pages of runs from there."""
    mark = simulated(version_map.evidence or "")
    body = fragment(
        "map.html",
        Path(__file__).parent / "templates",
        map=version_map,
        mark=mark,
        banner=banner(version_map.evidence or "", None),
        issue_url=issue_url(version_map.issue),
        readings=readings(version_map),
        agreement=agreement(version_map),
        strip=version_strip(version_map.status, {row.version: _seen(row) for row in version_map.rows if row.arms}),
        heads=map_heads(version_map),
        rows=list(map_rows(version_map)),
        run_link=lambda run: f"../../{quote(run, safe='')}/report.html",
        meaning=meaning(version_map),
    )
    return document(title=f"{version_map.scenario}: version map{mark}", body=body)


def _seen(row: ReleaseRow) -> Seen:
    """Return the result of the first arm."""
    arm = row.arms[0]
    return f"{arm.name}: {arm.fate}", TONES.get(arm.fate, "warn")
