from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from vllm_repro.errors import Unsupported
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.options import ServerOptions
from vllm_repro_nights import run_night as nightly


def test_a_run_is_estimated_by_the_last_one_in_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(job: Any, _: object) -> NoReturn:
        raise Unsupported(f"{job.options.vllm} was started")

    scenario = find("min-tokens-stop-ids")
    runs = [
        SimpleNamespace(scenario=scenario.id, vllm_version=version, started_at=str(took), duration_s=float(took))
        for version, took in (("0.32.0", 900), ("0.33.0", 1))
    ]
    monkeypatch.setattr(nightly, "read_runs", lambda _: (runs, []))
    monkeypatch.setattr(nightly, "run_one", ran)
    jobs: list[Any] = [
        SimpleNamespace(
            elsewhere=None, scenario=scenario, options=ServerOptions(server="process", vllm=Source(release=version))
        )
        for version in ("0.32.0", "0.33.0", "0.29.0")
    ]
    found = [slot.why for slot in nightly._slots(jobs, Path(), 100.0)]
    *started, late = found
    assert started == ["0.33.0 was started", "0.29.0 was started"], "a release without a run takes its scenario's last"
    assert late.endswith("were left; it took 900 s")
