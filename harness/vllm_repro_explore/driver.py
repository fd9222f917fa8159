"""Process that plays cases on a release's interpreter, forked from one that imported torch."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import IO

from vllm_repro.releases.disk import cache_root
from vllm_repro.releases.provision import Release
from vllm_repro.releases.tiny_model_folder import cached_model
from vllm_repro.servers.lab import plugin_folder
from vllm_repro.servers.witness import PLUGIN, witness_env
from vllm_repro.tiny_model import TinyModel
from vllm_repro_explore.case_process import CASE_S, ENVIRONMENT, CaseProcess
from vllm_repro_explore.forks import Forked, fork

PROGRAM = Path(__file__).resolve().parent / "program"
_POSITIONS = 1_048_576


class Driver(CaseProcess):
    """Process that plays cases on one release. A context manager.

    - model: folder whose config vLLM reads unless a case has Mamba layers
    - errors: log file of the process
    - case_s: seconds after which a case counts as hung
    - patched: files whose import `errors` reports
    - probes: JSON file of the statements to count, see `program/vllm_repro_driver/probe.py`
    """

    def __init__(
        self,
        release: Release,
        model: Path,
        errors: Path,
        *,
        case_s: float = CASE_S,
        patched: Collection[str] = (),
        probes: Path | None = None,
    ) -> None:
        super().__init__(self._fork, errors, case_s=case_s, vllm=f"vLLM {release.version}")
        self._probes = probes
        self._release, self._model, self._patched = release, model, patched

    def _fork(self, errors: IO[bytes]) -> Forked:
        """Fork the process. errors: log for its standard error."""
        python, environment = self._release.python, self.environment()
        return fork(python, "vllm_repro_driver", env=environment, errors=errors)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the process."""
        kept = {"PATH", "HOME", "TMPDIR", "LANG"} & os.environ.keys()
        path = map(str, (PROGRAM, PLUGIN, plugin_folder(), self._release.packages))
        return {
            **{name: os.environ[name] for name in kept},
            **ENVIRONMENT,
            **witness_env(self._patched, *path),
            **({"REPRO_PROBE": str(self._probes)} if self._probes else {}),
            "PYTHONSAFEPATH": "1",
            "NUMBA_CACHE_DIR": str(cache_root() / "numba"),
            "REPRO_DRIVER_MODEL": str(self._model),
            "REPRO_DRIVER_MAMBA_MODEL": str(mamba_model()),
        }


def driver_model() -> Path:
    """Return a model folder that every release treats as a hybrid model; make it on first use.

    The layers in its config do not count: each case names its own.
    """
    return cached_model(
        TinyModel(family="gemma3", kinds=("full", "sliding"), window=128, max_position=_POSITIONS)
    )


def mamba_model() -> Path:
    """Return the model folder of cases with Mamba layers; make it on first use."""
    return cached_model(
        TinyModel(family="granite_hybrid", kinds=("mamba", "full"), max_position=_POSITIONS)
    )
