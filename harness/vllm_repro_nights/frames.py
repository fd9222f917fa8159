"""Runs, trials, requests and version maps as pandas frames.

docs/api.md has the columns; times are in seconds. pandas is imported on demand: it takes half a
second.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_repro.conversion import decode
from vllm_repro.errors import UsageError
from vllm_repro.journal.journal import legible, read
from vllm_repro.report.build import build
from vllm_repro.report.json_report import ArmJson, report_dict
from vllm_repro.report.runs import Run
from vllm_repro.running.folders import default_out
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_nights.history import night_of, tested
from vllm_repro_nights.runs import read_runs
from vllm_repro_nights.throughput import setup_of
from vllm_repro_search.versions.record import VersionMap

if TYPE_CHECKING:
    import pandas as pd


Folder = str | os.PathLike[str]

_FIGURES = ["output_tok_s", "tpot_s", "ttft_s"]
_COLUMNS = {
    "runs": (
        "night id scenario started_at host hardware evidence server version verdict expected "
        "name result crashed boots signature setup output_tok_s tpot_s ttft_s"
    ),
    "trials": (
        "arm trial outcome phase crossed exception message signature detected_by latency_s "
        "boot_s duration_s sent ok failed output_tok_s ttft_s tpot_s client_error why log"
    ),
    "requests": (
        "arm trial name sent duration_s status ok prompt_tokens cached_tokens "
        "completion_tokens ttft_s token_times"
    ),
    "versions": (
        "version vllm_version compiled arm expected declared fate result k n boot_s "
        "verdict as_expected why run"
    ),
}


def runs(folder: Folder | None = None) -> pd.DataFrame:
    """Return one row per run and arm below a folder of reports, the oldest run first.

    folder: by default `$VLLM_REPRO_REPORTS`, else `reports`. Warns of folders whose journal holds
    no run. Figures are medians over boots, at the first load of the scenario. Raises `UsageError`
    for what is no folder of reports.
    """
    reports = Path(folder) if folder is not None else default_out()
    if not reports.is_dir() or (reports / "journal.jsonl").exists():
        what = "a run" if reports.is_dir() else "no folder"
        raise UsageError(
            f"{reports} is {what}", hint="name the folder of all reports; frames.trials reads a run"
        )
    known, unreadable = read_runs(reports)
    for name in unreadable:
        warnings.warn(f"skipped, its journal holds no run: {name}", stacklevel=2)
    return _run_frame(known)


def as_csv(known: Sequence[Run]) -> str:
    """Return runs as CSV, a row per run and arm, without the figures that no run has."""
    table = _run_frame(known)
    unknown = [name for name in _FIGURES if table[name].isna().all()]
    return str(table.drop(columns=unknown).to_csv(index=False))


def _run_frame(known: Iterable[Run]) -> pd.DataFrame:
    """Return the table of runs, a row per run and arm."""
    return _frame("runs", (_run_row(run, arm) for run in known for arm in run.arms))


def _run_row(run: Run, arm: ArmJson) -> dict[str, Any]:
    """Return the row of one arm of a run."""
    booted = [boot for boot in (*arm.trials, arm.load) if boot is not None]
    boots = [boot.throughput for boot in booted if boot.throughput is not None]
    row = {name: getattr(run, name, None) for name in _COLUMNS["runs"].split()}
    for name in _FIGURES:
        figures = [figure for boot in boots if (figure := getattr(boot, name)) is not None]
        row[name] = median(figures) if figures else None
    return row | {
        "night": night_of(run.started_at, None),
        "evidence": run.evidence if tested(run) else None,
        "server": next((arm.server.kind for arm in run.arms if arm.server.kind), ""),
        "version": run.vllm_version,
        "expected": None if run.undecided else run.expected,
        "name": arm.name,
        "result": arm.result,
        "crashed": arm.k,
        "boots": arm.n,
        "signature": death_label(arm),
        "setup": setup_of(arm),
    }


def death_label(arm: ArmJson) -> str:
    """Return `match: AssertionError in _continuation_prefill` for the first death, or "".

    Cancelled trials do not count.
    """
    counted = (trial for trial in arm.trials if trial.outcome is not Outcome.CANCELLED)
    death = next((trial.death for trial in counted if trial.death), None)
    if death is None:
        return ""
    where = f" in {death.frames[-1].rpartition(':')[2]}" if death.frames else ""
    return f"{death.signature or 'unknown'}: {death.exception or 'no exception'}{where}"


def trials(run: Folder) -> pd.DataFrame:
    """Return one row per trial of a run's folder. Raises `UsageError` if that holds no run."""
    with legible(Path(run)):
        report = report_dict(build(Path(run)))
    arms = ((arm["name"], trial) for arm in report["arms"] for trial in arm["trials"])
    return _frame("trials", (_trial_row(name, trial) for name, trial in arms))


def _trial_row(arm: str, trial: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of one trial of an arm, with its records flattened into columns.

    Of columns with the same name, the last one counts.
    """
    death, speed, saw = (trial[name] or {} for name in ("death", "throughput", "client_saw"))
    of_arm = {"arm": arm, "crossed": trial["trigger"]["crossed"], "client_error": saw.get("error")}
    return {**speed, **death, **trial["requests"], **trial, **of_arm}


def requests(run: Folder) -> pd.DataFrame:
    """Return one row per request of a run's folder, without those of `/tokenize`.

    Raises `UsageError` if the folder does not have its requests.
    """
    entries = read(Path(run) / "requests.jsonl").of("request")
    return _frame("requests", (_request_row(entry.fields) for entry in entries))


def _request_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of one request, from its entry in `requests.jsonl`."""
    import pandas as pd

    return {
        **entry,
        **(entry["usage"] or {}),
        "sent": pd.Timestamp(entry["sent"], unit="s", tz="UTC"),
        "duration_s": entry["ended"] - entry["sent"],
        "ttft_s": next(iter(entry["token_times"]), None),
    }


def versions(version_map: Folder) -> pd.DataFrame:
    """Return one row per release and arm of a version map's folder.

    Raises `UsageError` if that holds no map.
    """
    path = Path(version_map) / "versions.json"
    try:
        releases = msgspec.to_builtins(decode(path.read_bytes(), VersionMap))["rows"]
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"no version map in {version_map}: {error}", hint="name the folder of versions.json"
        ) from None
    return _frame("versions", (_release_row(row, arm) for row in releases for arm in row["arms"]))


def _release_row(row: Mapping[str, Any], arm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of one arm in one release of a version map."""
    boots = [trial["boot_s"] for trial in arm["trials"] if trial["boot_s"]]
    return {
        **row,
        **arm,
        "arm": arm["name"],
        "as_expected": None if row["undecided"] else row["expected"],
        "boot_s": median(boots) if boots else None,
    }


def _frame(kind: str, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a table with the columns of its kind: runs, trials, requests or versions.

    Other fields of `rows` are dropped, missing ones are empty.
    """
    import pandas as pd

    columns = _COLUMNS[kind].split()
    table = pd.DataFrame(list(rows), columns=columns)
    return table.astype({name: float for name in columns if name.endswith("_s")})
