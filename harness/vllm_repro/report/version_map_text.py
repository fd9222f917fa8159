"""The version map as Markdown, and as the table of the terminal."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from statistics import median

from vllm_repro.evidence import facts_of
from vllm_repro.report.format import columns, seconds
from vllm_repro.report.model import banner, issue_url
from vllm_repro.report.text import cell, fence
from vllm_repro.report.version_map import ReleaseArm, ReleaseRow, VersionMap, readings
from vllm_repro.report.wording import simulated
from vllm_repro.verdict.statistics import excluded_rate
from vllm_repro.verdict.verdict import Expected, Standing

__all__ = ["markdown", "terminal"]

_WIDTHS: tuple[int, ...] = (16, 12, 24, 32, 16, 20, 16, 8, 12, 24)
_ARM = 2
"""The column of that name, see `_heads`."""


def markdown(version_map: VersionMap) -> str:
    """Return `versions.md`, which lies in `<scenario>/versions/<id>/` and links to runs from there."""
    parts = [f"# {version_map.scenario}: version map{simulated(version_map.evidence or '')}"]
    if notice := banner(version_map.evidence or "", None):
        parts.append(f"> **{notice}**")
    if version_map.interrupted:
        parts.append(f"> **Interrupted by {version_map.interrupted}: this is what was seen until then.**")
    elif version_map.pending:
        tried, asked = len(version_map.rows), len(version_map.versions)
        parts.append(f"> **Not finished: {tried} of {asked} releases were tried.**")
    parts.append(f"{version_map.title} ([{version_map.issue}]({issue_url(version_map.issue)})).")
    first, *others = readings(version_map)
    if others:
        parts.append("\n".join(f"- **{text}.**" for text in (first, *others)))
    else:
        parts.append(f"**{first[0].upper()}{first[1:]}.**")
    parts.append(f"Declared: {version_map.status}. {_agreement(version_map)}")
    parts.append(_table(version_map))
    if notes := [f"- {row.version}: {cell(row.why)}" for row in version_map.rows if row.why]:
        parts.append("\n".join(notes))
    parts.append(_meaning(version_map))
    parts.append(
        f"Server: {version_map.server}, evidence: {version_map.evidence or 'none'}. vllm-repro {version_map.harness_version}, "
        f"started {version_map.started_at}, took {version_map.duration_s:.0f} s."
    )
    parts += ["## Again", fence(version_map.reproduce, "console")]
    return "\n\n".join(parts) + "\n"


def terminal(version_map: VersionMap, path: str) -> str:
    """Return the last lines of `vllm-repro versions`. path: of `versions.md`."""
    rows, widths = [_heads(version_map), *_rows(version_map)], _WIDTHS
    if not version_map.names_arms:
        rows = [(*row[:_ARM], *row[_ARM + 1 :]) for row in rows]
        widths = (*_WIDTHS[:_ARM], *_WIDTHS[_ARM + 1 :])
    lines = [
        f"{version_map.scenario}   {version_map.issue}   version map, {facts_of(version_map.evidence).subject}",
        "",
        *columns(rows, widths),
        "",
        *(f"{row.version}: {row.why}" for row in version_map.rows if row.why),
        *(f"{' ' * 10 if number else 'reading:  '}{text}" for number, text in enumerate(readings(version_map))),
        f"declared: {version_map.status}. {_agreement(version_map)}",
        f"map:      {path}",
        f"again:    {version_map.reproduce}",
    ]
    if version_map.interrupted:
        lines.append(f"interrupted by {version_map.interrupted}; nothing is left running")
        lines.append(f"resume:   vllm-repro versions --resume {shlex.quote(str(PurePath(path).parent))}")
    return "\n".join(lines)


def _agreement(version_map: VersionMap) -> str:
    if version_map.expected:
        return "Every release is as declared."
    surprises = ", ".join(version_map.surprises)
    text = f"A SURPRISE in {surprises}." if surprises else "No release contradicts that."
    undecided = [*version_map.undecided, *version_map.pending]
    return text + (f" Undecided: {', '.join(undecided)}." if undecided else "")


def _expected(version_map: VersionMap) -> list[Expected]:
    """Return what the arms are declared to do, each once; a crash if there is no row yet."""
    found = dict.fromkeys(arm.result.expected for row in version_map.rows for arm in row.arms)
    return list(found) or [Expected.DIES]


def _heads(version_map: VersionMap) -> tuple[str, ...]:
    did = " or ".join(dict.fromkeys(expected.did for expected in _expected(version_map)))
    return ("release", "declared", "arm", "outcome", did, "boundary", "signature", "boot", "as declared", "run")


def _table(version_map: VersionMap) -> str:
    heads = _heads(version_map)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in _rows(version_map):
        *cells, run = row
        link = f"[{run}](../../{run}/report.md)" if run != "-" else run
        lines.append(f"| {' | '.join(map(cell, cells))} | {link} |")
    return "\n".join(lines)


def _rows(version_map: VersionMap) -> Iterator[tuple[str, ...]]:
    """Yield a row per release and arm, under `_heads`."""
    for row in version_map.rows:
        for arm in row.arms:
            yield (
                row.version,
                "-" if arm.declared is Standing.UNKNOWN else arm.declared,
                arm.name,
                _outcome(arm),
                f"{arm.result.crashed} of {arm.result.conclusive}" if arm.result.conclusive else "-",
                _boundary(arm),
                _signature(arm),
                _boot(arm),
                _as_declared(row, arm),
                row.run or "-",
            )
    for version in version_map.pending:
        yield (version, "-", "", "not tried", *["-"] * (len(_WIDTHS) - 4))


def _outcome(arm: ReleaseArm) -> str:
    """Return `crash`, or `2 crash, 1 clean`, or why the release was not tried."""
    count = Counter(trial.outcome for trial in arm.trials)
    if not count:
        return arm.fate
    return ", ".join(f"{number} {outcome}" if len(arm.trials) > 1 else outcome for outcome, number in count.items())


def _boundary(arm: ReleaseArm) -> str:
    ran = [trial for trial in arm.trials if trial.trigger.crossed or trial.outcome.facts.ran]
    crossed = sum(trial.trigger.crossed for trial in ran)
    if 0 < crossed < len(ran):
        return f"{crossed} of {len(ran)} crossed"
    return "-" if not ran else "crossed" if crossed else "not crossed"


def _signature(arm: ReleaseArm) -> str:
    """Return how the deaths compare with the scenario's signature; `unknown` if no log names a cause."""
    deaths = [trial.death for trial in arm.trials if trial.death and trial.outcome.facts.tested]
    return ", ".join(dict.fromkeys(death.signature or "unknown" for death in deaths)) or "-"


def _boot(arm: ReleaseArm) -> str:
    """Return the median time to readiness."""
    boots = [trial.boot_s for trial in arm.trials if trial.boot_s is not None]
    return seconds(median(boots) if boots else None)


def _as_declared(row: ReleaseRow, arm: ReleaseArm) -> str:
    declared = "-" if arm.declared is Standing.UNKNOWN else "yes"
    return {True: declared, False: "SURPRISE", None: "undecided"}[row.as_declared(arm)]


def _meaning(version_map: VersionMap) -> str:
    boots = "one boot" if version_map.trials == 1 else f"{version_map.trials} boots"
    events = " or ".join(dict.fromkeys(expected.event for expected in _expected(version_map)))
    return (
        f"A release lives if each of its boots crossed the boundary and lived: {boots}, which excludes {events} in more "
        f"than {excluded_rate(version_map.trials):.0%} of boots. A range spans only releases that were tried."
    )
