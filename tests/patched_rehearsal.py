"""A rehearsal engine that takes patches.

`fix` makes it an engine of 0.24.0, `misfit` fits no release.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_repro.errors import Unsupported
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.launch import Launch
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.overlay import PatchedSource
from vllm_repro.servers.rehearsal import RehearsalSite

DIFF = "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-a\n+{}\n"

Diffs = Callable[..., list[str]]


@pytest.fixture
def diffs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Diffs:
    """Return a function that writes a diff for each name and returns the options for them."""
    launch = RehearsalSite.launch

    def launched(
        site: RehearsalSite, scenario: Scenario, arm: Arm, port: int, **_: object
    ) -> Launch:
        if any(patch.now == "fix\n" for patch in arm.patches):
            site = RehearsalSite(ServerOptions(vllm=Source(release="0.24.0")), scenario)
        return launch(site, scenario, arm, port)

    def source(_: RehearsalSite, arm: Arm) -> PatchedSource:
        if any(patch.now == "misfit\n" for patch in arm.patches):
            raise Unsupported("the patch does not fit this release")
        return PatchedSource()

    monkeypatch.setattr(RehearsalSite, "unchangeable", "")
    monkeypatch.setattr(RehearsalSite, "launch", launched)
    monkeypatch.setattr(RehearsalSite, "patched_source", source)
    monkeypatch.setattr("vllm_repro.cli.options.refuse_unused_options", lambda *_: None)

    def write(*names: str) -> list[str]:
        for name in names:
            (tmp_path / f"{name}.diff").write_text(
                DIFF.format(name.partition("-")[0]), encoding="utf-8"
            )
        return [word for name in names for word in ("--patch", str(tmp_path / f"{name}.diff"))]

    return write
