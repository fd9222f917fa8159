"""The version map as Markdown and as the terminal's table. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from statistics import median

from vllm_repro.evidence import facts_of
from vllm_repro.report.escape import cell, fence
from vllm_repro.report.model import banner, issue_url
from vllm_repro.report.version_map import ArmRow, Row, VersionMap, readings
from vllm_repro.report.wording import columns, seconds, simulated
from vllm_repro.verdict.statistics import excluded_rate
from vllm_repro.verdict.verdict import Expected, Standing

__all__ = ["markdown", "terminal"]

_LIMITS: tuple[int, ...] = (16, 12, 24, 32, 16, 20, 16, 8, 12, 24)
_ARM = 2
"""The column of that name, see `_head`."""


def markdown(version_map: VersionMap) -> str:
    """The whole of `versions.md`, which lies in `<scenario>/versions/<id>/`; runs are linked from there."""
    of = version_map
    parts = [f"# {of.scenario}: version map{simulated(of.evidence or '')}"]
    if notice := banner(of.evidence or "", None):
        parts.append(f"> **{notice}**")
    if of.interrupted:
        parts.append(f"> **Interrupted by {of.interrupted}: what follows is what was seen until then.**")
    elif of.pending:
        parts.append(f"> **Not finished: {len(of.rows)} of {len(of.versions)} releases were tried.**")
    parts.append(f"{of.title} ([{of.issue}]({issue_url(of.issue)})).")
    first, *others = readings(of)
    if others:
        parts.append("\n".join(f"- **{text}.**" for text in (first, *others)))
    else:
        parts.append(f"**{first[0].upper()}{first[1:]}.**")
    parts.append(f"Declared: {of.status}. {_agreement(of)}")
    parts.append(_table(of))
    if notes := [f"- {row.version}: {cell(row.why)}" for row in of.rows if row.why]:
        parts.append("\n".join(notes))
    parts.append(_meaning(of))
    parts.append(
        f"Server: {of.server}, evidence: {of.evidence or 'none'}. vllm-repro {of.harness_version}, started {of.started_at}, "
        f"took {of.duration_s:.0f} s."
    )
    parts += ["## Again", fence(of.reproduce, "console")]
    return "\n\n".join(parts) + "\n"


def terminal(version_map: VersionMap, path: str) -> str:
    """The end of `vllm-repro versions`; `path` is where `versions.md` lies."""
    of = version_map
    kind = facts_of(of.evidence).subject
    rows = [_head(of), *_rows(of)]
    limits = _LIMITS
    if not of.names_arms:
        rows = [(*row[:_ARM], *row[_ARM + 1 :]) for row in rows]
        limits = (*_LIMITS[:_ARM], *_LIMITS[_ARM + 1 :])
    lines = [
        f"{of.scenario}   {of.issue}   version map, {kind}",
        "",
        *columns(rows, limits),
        "",
    ]
    lines += [f"{row.version}: {row.why}" for row in of.rows if row.why]
    lines += [
        *(f"{'reading:  ' if number == 0 else ' ' * 10}{text}" for number, text in enumerate(readings(of))),
        f"declared: {of.status}. {_agreement(of)}",
        f"map:      {path}",
        f"again:    {of.reproduce}",
    ]
    if of.interrupted:
        lines.append(f"interrupted by {of.interrupted}; nothing is left running")
        lines.append(f"go on:    vllm-repro versions --resume {shlex.quote(str(PurePath(path).parent))}")
    return "\n".join(lines)


def _agreement(of: VersionMap) -> str:
    if of.expected:
        return "Every release is as declared."
    text = f"A SURPRISE in {', '.join(of.surprises)}." if of.surprises else "No release contradicts that."
    undecided = [*of.undecided, *of.pending]
    return text + (f" Undecided: {', '.join(undecided)}." if undecided else "")


def _expected(of: VersionMap) -> list[Expected]:
    """What the arms are declared to do, each once; a death where there is no row yet."""
    return list(dict.fromkeys(arm.result.expected for row in of.rows for arm in row.arms)) or [Expected.DIES]


def _head(of: VersionMap) -> tuple[str, ...]:
    did = " or ".join(dict.fromkeys(expected.did for expected in _expected(of)))
    return ("release", "declared", "arm", "outcome", did, "boundary", "signature", "boot", "as declared", "run")


def _table(of: VersionMap) -> str:
    lines = [f"| {' | '.join(_head(of))} |", "|---" * len(_head(of)) + "|"]
    for row in _rows(of):
        *cells, run = row
        link = f"[{run}](../../{run}/report.md)" if run != "-" else run
        lines.append(f"| {' | '.join(map(cell, cells))} | {link} |")
    return "\n".join(lines)


def _rows(of: VersionMap) -> Iterator[tuple[str, ...]]:
    """One row a release and arm, under `_head`."""
    for row in of.rows:
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
    for version in of.pending:
        yield (version, "-", "", "not tried", *["-"] * (len(_LIMITS) - 4))


def _outcome(arm: ArmRow) -> str:
    """`crash`, or `2 crash, 1 clean`, or what kept the release from being tried."""
    count = Counter(trial.outcome for trial in arm.trials)
    if not count:
        return arm.fate
    return ", ".join(f"{number} {outcome}" if len(arm.trials) > 1 else outcome for outcome, number in count.items())


def _boundary(arm: ArmRow) -> str:
    ran = [trial for trial in arm.trials if trial.trigger.crossed or trial.outcome.facts.ran]
    crossed = sum(trial.trigger.crossed for trial in ran)
    if 0 < crossed < len(ran):
        return f"{crossed} of {len(ran)} crossed"
    return "-" if not ran else "crossed" if crossed else "not crossed"


def _signature(arm: ArmRow) -> str:
    """How the deaths compare with the scenario's signature; `unknown` where no log names a cause."""
    deaths = [trial.death for trial in arm.trials if trial.death and trial.outcome.facts.tested]
    found = dict.fromkeys(death.signature or "unknown" for death in deaths)
    return ", ".join(found) or "-"


def _boot(arm: ArmRow) -> str:
    """The median over the boots that became ready."""
    boots = [trial.boot_s for trial in arm.trials if trial.boot_s is not None]
    return seconds(median(boots) if boots else None)


def _as_declared(row: Row, arm: ArmRow) -> str:
    declared = "-" if arm.declared is Standing.UNKNOWN else "yes"
    return {True: declared, False: "SURPRISE", None: "undecided"}[row.as_declared(arm)]


def _meaning(of: VersionMap) -> str:
    boots = "one boot" if of.trials == 1 else f"{of.trials} boots"
    events = " or ".join(dict.fromkeys(expected.event for expected in _expected(of)))
    return (
        f"A release lives here where each of its boots crossed the boundary and lived: {boots}, which excludes {events} in more "
        f"than {excluded_rate(of.trials):.0%} of boots. A range spans the releases that were tried, and no other."
    )
