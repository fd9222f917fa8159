"""Matrix of scenarios and vLLM releases: `catalogue.html`, `.md` and `.json` in reports/results/.

make catalogue     # write them again, from the scenarios, `upstream.json`, kept maps and kept runs
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from markupsafe import Markup
from packaging.version import Version

from vllm_repro.conversion import decode
from vllm_repro.releases.known import NEWEST
from vllm_repro.releases.sources import WITH
from vllm_repro.report.build import build
from vllm_repro.report.document import document, fragment, plain_text
from vllm_repro.report.model import issue_url
from vllm_repro.report.tables import price_sentences
from vllm_repro.resources import scenario_folder
from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro.scenario.prices import kept_prices
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.verdict.verdict import Result, from_source
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_search.versions.record import ReleaseResult, VersionMap

REPORTS = Path("reports")
TEMPLATES = Path(__file__).parent / "templates"


class UpstreamState(StrEnum):
    """State of an issue in the last copy of it that was read."""

    OPEN = "open"
    STALE = "open, marked stale"
    CLOSED = "closed"
    CLOSED_STALE = "closed as stale"
    NOT_FILED = "no report found"
    UNKNOWN = "unknown"

    @property
    def forgotten(self) -> bool:
        """Return True for an issue that is closed or marked stale."""
        return self in (UpstreamState.STALE, UpstreamState.CLOSED, UpstreamState.CLOSED_STALE)


class Upstream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of a scenario's upstream issue: a row of `upstream.json`."""

    subsystem: str
    state: UpstreamState
    # day or month of the copy of the issue
    checked: str = ""
    # pull requests and their states in it
    note: str = ""


class Sighting(
    msgspec.Struct, frozen=True, kw_only=True, rename={"fate": "outcome", "path": "run"}
):
    """Result of the first arm of a scenario in one release, in a kept run or map."""

    release: str
    evidence: Evidence
    started_at: str
    fate: ReleaseResult
    # crashes, and boots that decide
    k: int
    n: int
    # the report or map, from the folder of the reports
    path: str

    @property
    def rank(self) -> tuple[int, str]:
        """Return the rank by which one of several sightings counts: evidence, then time."""
        return -list(Evidence).index(self.evidence), self.started_at

    @property
    def look(self) -> tuple[str, str]:
        """Return the sign and the colour of the cell."""
        return _SIGNS.get(self.fate, ("?", "warn"))


class Workaround(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the command with which the engine lives."""

    arm: str
    change: str
    # measured costs, a sentence each
    prices: tuple[str, ...]


class LedgerBug(msgspec.Struct, frozen=True, kw_only=True):
    """A bug in `catalogue.json`: its issue, releases and workarounds."""

    # of its scenario
    id: str
    title: str
    # address of the issue, or of the nearest if nobody has reported the bug
    issue: str
    filed: bool
    state: UpstreamState
    # when the issue was read; empty if it was not
    checked: str
    # pull requests and their states then
    note: str
    subsystem: str
    # releases as pip specifiers
    declared_bad: str
    # first release that is declared good
    fixed_in: str | None
    releases: tuple[Sighting, ...]
    workarounds: tuple[Workaround, ...]


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `catalogue.json`."""

    # 1; another number if a key is removed or changes its meaning
    schema: int
    # newest release of vLLM when it was written
    newest: str
    bugs: tuple[LedgerBug, ...]


_SIGNS = {
    ReleaseResult.DIES: ("✗", "bad"),
    ReleaseResult.SOMETIMES: ("✗?", "bad"),
    ReleaseResult.LIVES: ("✓", "good"),
}
"""Sign and colour of a cell. Any other result is a question mark."""

_RESULTS = {
    Result.REPRODUCES: ReleaseResult.DIES,
    Result.FLAKY: ReleaseResult.SOMETIMES,
    Result.QUIET: ReleaseResult.LIVES,
}
"""Of a kept run. Any other result decides nothing and is left out."""


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A row of the matrix: a scenario, its issue, and what was seen in each release."""

    scenario: Scenario
    upstream: Upstream
    # by release
    sightings: Mapping[str, Sighting]

    @property
    def group(self) -> str:
        """Return the heading for the row: whether the newest release has the bug."""
        newest = self.sightings.get(NEWEST)
        if newest is None or newest.look[1] == "warn":
            return f"Not decided in {NEWEST}"
        if newest.look[1] == "good":
            return f"Not in {NEWEST}"
        upstream = (
            "closed or stale" if self.upstream.state.forgotten else "open, or no report found"
        )
        return f"Still in {NEWEST}, {upstream} upstream"


def upstream() -> dict[str, Upstream]:
    """Return the rows of `upstream.json` by scenario."""
    return decode((scenario_folder() / "upstream.json").read_bytes(), dict[str, Upstream])


def bugs(reports: Path = REPORTS) -> list[Bug]:
    """Return a row for each scenario, from the kept maps and runs below `reports`.

    Of several sightings in a release, the one with the strongest and then newest evidence counts.
    """
    seen: dict[str, dict[str, Sighting]] = {}
    for scenario, sighting in (*_from_maps(reports), *_from_runs(reports)):
        row = seen.setdefault(scenario, {})
        known = row.get(sighting.release)
        if known is None or sighting.rank > known.rank:
            row[sighting.release] = sighting
    rows, unknown = upstream(), Upstream("unknown", UpstreamState.UNKNOWN)
    return [
        Bug(
            scenario=scenario,
            upstream=rows.get(scenario.id, unknown),
            sightings=seen.get(scenario.id, {}),
        )
        for scenario in all_scenarios(scenario_folder())
    ]


def _from_maps(reports: Path) -> Iterator[tuple[str, Sighting]]:
    """Yield (scenario id, sighting) for each release of each kept version map.

    A release with exchanged packages is not that release.
    """
    for file in sorted(reports.glob("*/versions/**/versions.json")):
        version_map = decode(file.read_bytes(), VersionMap)
        for row in (row for row in version_map.boots if WITH not in row.version):
            yield (
                version_map.scenario,
                Sighting(
                    release=row.version,
                    evidence=Evidence(version_map.evidence or Evidence.UNKNOWN),
                    started_at=version_map.started_at,
                    fate=row.arms[0].fate,
                    k=row.arms[0].k,
                    n=row.arms[0].n,
                    path=file.with_suffix(".md").relative_to(reports).as_posix(),
                ),
            )


def _from_runs(reports: Path) -> Iterator[tuple[str, Sighting]]:
    """Yield (scenario id, sighting) for each kept run that decides something about a release.

    Leave out rehearsals, and builds from source or with exchanged packages.
    """
    for file in sorted(reports.glob("*/*/report.json")):
        run: dict[str, Any] = json.loads(file.read_bytes())
        arm = run["arms"][0]
        fate, version = _RESULTS.get(arm["result"]), run["vllm_version"]
        if run["rehearsal"] or fate is None or not version or from_source(version):
            continue
        yield (
            run["scenario"],
            Sighting(
                release=Version(version).base_version,
                evidence=Evidence(run["evidence"]),
                started_at=run["started_at"],
                fate=fate,
                k=arm["k"],
                n=arm["n"],
                path=file.with_suffix(".html").relative_to(reports).as_posix(),
            ),
        )


def _values(rows: Sequence[Bug]) -> dict[str, Any]:
    """Return the values for the templates, such as the rows by group and the releases."""
    sightings = [sighting for bug in rows for sighting in bug.sightings.values()]
    groups: dict[str, list[Bug]] = {}
    for bug in sorted(
        rows, key=lambda bug: (not bug.group.startswith("Still"), bug.group, bug.scenario.id)
    ):
        groups.setdefault(bug.group, []).append(bug)
    return {
        "groups": groups,
        "releases": sorted({sighting.release for sighting in sightings}, key=Version),
        "days": sorted(sighting.started_at[:10] for sighting in sightings),
        "issue_url": issue_url,
        "quote": quote,
    }


def markdown(rows: Sequence[Bug]) -> str:
    """Return the text of `catalogue.md`, the matrix in Markdown."""
    return plain_text("catalogue.md", TEMPLATES, **_values(rows), Markup=Markup) + "\n"


def page(rows: Sequence[Bug]) -> str:
    """Return the text of `catalogue.html`, the matrix as a web page."""
    style = (TEMPLATES / "catalogue.css").read_text(encoding="utf-8")
    return document(
        title="vLLM bugs by release",
        body=fragment("catalogue.html", TEMPLATES, **_values(rows)),
        style=style,
    )


def ledger(rows: Sequence[Bug]) -> str:
    """Return the text of `catalogue.json`, which lists the bugs for other programs."""
    bugs = tuple(
        LedgerBug(
            id=bug.scenario.id,
            title=bug.scenario.title,
            issue=issue_url(bug.scenario.issue),
            filed=bug.scenario.filed,
            state=bug.upstream.state,
            checked=bug.upstream.checked,
            note=bug.upstream.note,
            subsystem=bug.upstream.subsystem,
            declared_bad=bug.scenario.status.bad,
            fixed_in=bug.scenario.status.first_good,
            releases=tuple(
                bug.sightings[release] for release in sorted(bug.sightings, key=Version)
            ),
            workarounds=tuple(_workaround(bug.scenario, arm) for arm in bug.scenario.workarounds),
        )
        for bug in rows
    )
    text = msgspec.json.encode(Ledger(schema=1, newest=NEWEST, bugs=bugs))
    return msgspec.json.format(text, indent=1).decode() + "\n"


def _workaround(scenario: Scenario, arm: Arm) -> Workaround:
    """Return the workaround that an arm shows, with its measured costs."""
    prices = (text for text in kept_prices(scenario.id) if text.startswith(f"{arm.name} "))
    change = " and ".join(map(str, arm.edits))
    return Workaround(arm=arm.name, change=change, prices=tuple(prices))


def prices(reports: Path = REPORTS) -> str:
    """Return the text of `prices.json`: what the kept runs measured of workarounds, by scenario."""
    sentences: dict[str, list[str]] = {}
    for file in sorted(reports.glob("*/*/journal.jsonl")):
        report = build(file.parent)
        if not report.rehearsal and (measured := price_sentences(report)):
            sentences.setdefault(report.scenario, []).extend(measured)
    return json.dumps(sentences, indent=1, ensure_ascii=False) + "\n"


FILES = {"catalogue.md": markdown, "catalogue.html": page, "catalogue.json": ledger}
"""Function of each file."""

if __name__ == "__main__":
    (scenario_folder() / "prices.json").write_text(prices(), encoding="utf-8")
    folder = REPORTS / "results"
    for name, render in FILES.items():
        (folder / name).write_text(render(bugs()), encoding="utf-8")
