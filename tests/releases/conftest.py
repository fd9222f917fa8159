"""A cache of releases whose installer is a fake."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.releases.fake_installer import RELEASES, FakeInstaller
from vllm_repro.releases.provision import ReleaseCache


@pytest.fixture
def installer() -> FakeInstaller:
    return FakeInstaller(dict(RELEASES))


@pytest.fixture
def cache(tmp_path: Path, installer: FakeInstaller) -> ReleaseCache:
    return ReleaseCache(tmp_path / "cache", installer=installer, free_bytes=lambda _: 10**12)
