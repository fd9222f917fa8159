"""Fixtures that several modules share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.schemas import check_files, hold_all

hold_all()


@dataclass(frozen=True)
class Done:
    """A finished `vllm-repro`: exit status, both outputs, and the newest report where it wrote one."""

    status: int
    out: str
    err: str
    folder: Path | None

    @property
    def report(self) -> dict[str, Any]:
        assert self.folder is not None, self.err
        loaded: dict[str, Any] = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
        return loaded


Harness = Callable[..., Done]


@pytest.fixture(autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of started processes in a folder of the test, so that tests do not sweep each other's."""
    state = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    return state


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """Runs the command as people do, in a process of its own."""

    def call(*words: str, env: Mapping[str, str] | None = None, stdin: str | None = None) -> Done:
        out = tmp_path / "reports"
        done = subprocess.run(
            [sys.executable, "-m", "vllm_repro", *words],
            env={**os.environ, "VLLM_REPRO_REPORTS": str(out), "CI": "true", **(env or {})},
            capture_output=True,
            text=True,
            input=stdin,
            timeout=1800,
            check=False,
        )
        check_files(out)
        latest = sorted(out.glob("*/latest")) if out.exists() else []
        return Done(done.returncode, done.stdout, done.stderr, latest[0].resolve() if latest else None)

    return call
