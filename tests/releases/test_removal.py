"""Emptying the cache: all of ours, nothing of others, and nothing under a running server."""

from __future__ import annotations

import pytest

from tests.releases.fake_installer import silent
from vllm_repro.errors import InfraError
from vllm_repro.releases.provision import ReleaseCache


def test_removing_everything(cache: ReleaseCache) -> None:
    assert cache.remove_all(silent) == 0
    assert not cache.root.exists()
    cache.provision("0.28.0", silent)
    (cache.root / "models" / "tiny").mkdir(parents=True)
    (cache.root / "models" / "tiny" / "config.json").write_text("{}")
    size = cache.size()
    assert size >= sum(release.size for release in cache.cached()) > 0
    assert cache.remove_all(silent) == size
    assert not cache.root.exists()
    assert cache.provision("0.28.0", silent).version == "0.28.0"


def test_nothing_is_removed_under_a_running_server(cache: ReleaseCache, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = cache.provision("0.28.0", silent)
    monkeypatch.setattr(
        "vllm_repro.releases.provision.processes_using", lambda root: [4711] if root == cache.root else []
    )
    with pytest.raises(InfraError, match=r"running \(pid 4711\)"):
        cache.remove_all(silent)
    assert cache.get("0.28.0") == ready


def test_only_our_own_files_are_removed(cache: ReleaseCache) -> None:
    cache.provision("0.28.0", silent)
    (cache.root / "notes.txt").write_text("somebody's")
    assert cache.remove_all(silent) > 0
    assert [path.name for path in cache.root.iterdir()] == ["notes.txt"]
