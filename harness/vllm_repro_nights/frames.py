"""Runs, trials, requests and version maps as pandas frames. docs/api.md has the columns; times are in seconds."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_repro.conversion import decode
from vllm_repro.errors import UsageError
from vllm_repro.journal.journal import legible, read
from vllm_repro.report.build import build
from vllm_repro.report.json_report import report_dict
from vllm_repro.report.runs import read_runs
from vllm_repro.running.folders import default_out
from vllm_repro_nights.text import run_table
from vllm_repro_search.versions.json_map import VersionMapJson

if TYPE_CHECKING:  # importing pandas takes half a second
    import pandas as pd

__all__ = ["requests", "runs", "trials", "versions"]

Folder = str | os.PathLike[str]

_TRIALS = (
    *("arm", "trial", "outcome", "phase", "crossed", "exception", "message", "signature", "detected_by", "latency_s"),
    *("boot_s", "duration_s", "sent", "ok", "failed", "output_tok_s", "ttft_s", "tpot_s", "client_error", "why", "log"),
)
_REQUESTS = (
    *("arm", "trial", "name", "sent", "duration_s", "status", "ok"),
    *("prompt_tokens", "cached_tokens", "completion_tokens", "ttft_s", "token_times"),
)
_VERSIONS = (
    *("version", "vllm_version", "compiled", "arm", "expected", "declared", "fate", "result", "k", "n", "boot_s"),
    *("verdict", "as_expected", "why", "run"),
)


def runs(folder: Folder | None = None) -> pd.DataFrame:
    """Return one row per run and arm below a folder of reports, the oldest run first: the table of `history --csv`.

    folder: by default `$VLLM_REPRO_REPORTS`, else `reports`. Warns of folders whose journal holds no run.
    """
    found, unreadable = read_runs(Path(folder) if folder is not None else default_out())
    for name in unreadable:
        warnings.warn(f"skipped, its journal holds no run: {name}", stacklevel=2)
    return run_table(found, None)


def trials(run: Folder) -> pd.DataFrame:
    """Return one row per trial of a run, from its journal. run: its folder. Raises `UsageError` if that holds no run."""
    with legible(Path(run)):
        report = report_dict(build(Path(run)))
    return _frame(_TRIALS, (_trial(arm["name"], trial) for arm in report["arms"] for trial in arm["trials"]))


def _trial(arm: str, trial: Mapping[str, Any]) -> dict[str, Any]:
    death, speed, saw = (trial[name] or {} for name in ("death", "throughput", "client_saw"))
    known = {"arm": arm, "crossed": trial["trigger"]["crossed"], "client_error": saw.get("error")}
    parts = (speed, death, trial["requests"], trial, known)
    return {name: next((part[name] for part in reversed(parts) if name in part), None) for name in _TRIALS}


def requests(run: Folder) -> pd.DataFrame:
    """Return one row per request of a run, without those of `/tokenize`. run: its folder. Raises `UsageError` without its requests."""
    return _frame(_REQUESTS, (_request(entry.fields) for entry in read(Path(run) / "requests.jsonl").of("request")))


def _request(entry: Mapping[str, Any]) -> dict[str, Any]:
    import pandas as pd

    return {
        **entry,
        **(entry["usage"] or {}),
        "sent": pd.Timestamp(entry["sent"], unit="s", tz="UTC"),
        "duration_s": entry["ended"] - entry["sent"],
        "ttft_s": next(iter(entry["token_times"]), None),
    }


def versions(version_map: Folder) -> pd.DataFrame:
    """Return one row per release and arm of a version map. version_map: its folder. Raises `UsageError` if that holds no map."""
    path = Path(version_map) / "versions.json"
    try:
        found = msgspec.to_builtins(decode(path.read_bytes(), VersionMapJson))
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"no version map in {version_map}: {error}", hint="name the folder of versions.json"
        ) from error
    return _frame(
        _VERSIONS,
        (
            {
                **row,
                **arm,
                "arm": arm["name"],
                "as_expected": None if row["undecided"] else row["expected"],
                "boot_s": median(boots)
                if (boots := [one["boot_s"] for one in arm["trials"] if one["boot_s"]])
                else None,
            }
            for row in found["rows"]
            for arm in row["arms"]
        ),
    )


def _frame(columns: tuple[str, ...], rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    table = pd.DataFrame(list(rows), columns=list(columns))
    return table.astype({name: float for name in columns if name.endswith("_s")})
