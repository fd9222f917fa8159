from __future__ import annotations

from pathlib import Path

import pytest

from vllm_repro.journal.redact import Redactor
from vllm_repro.releases.sources import source_of
from vllm_repro.running.folders import private_folders, private_sources, redactor
from vllm_repro.scenario.catalogue import all_scenarios


def test_a_cache_outside_the_home_folder_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/srv/jane/caches")
    monkeypatch.setenv("HF_HOME", "/srv/jane/models/")
    monkeypatch.delenv("VLLM_REPRO_CACHE", raising=False)
    text = "/srv/jane/caches/vllm-repro/releases/0.23.0 /srv/jane/caches/torch /srv/jane/models/hub"
    assert Redactor(private_folders()).text(text) == (
        "$VLLM_REPRO_CACHE/releases/0.23.0 $XDG_CACHE_HOME/torch $HF_HOME/hub"
    )


def test_a_checkout_outside_the_home_folder_is_not_named(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    assert f"{tmp_path}" in Redactor(private_sources()).text(f"--vllm {tmp_path}")
    source_of(f"{tmp_path}")
    assert Redactor(private_sources()).text(f"--vllm {tmp_path}/vllm") == "--vllm $VLLM_SOURCE/vllm"


@pytest.mark.parametrize("here", ["work", "work/vllm", "/"])
def test_a_checkout_beside_a_known_folder_is_not_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: str
) -> None:
    (checkout := tmp_path / "work-vllm" / "vllm").mkdir(parents=True)
    (checkout / "__init__.py").touch()
    (tmp_path / "work" / "vllm").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / here)
    source_of(f"{checkout.parent}")
    text = Redactor([*private_folders(), *private_sources()]).text(f"--vllm {checkout.parent}@abc")
    assert text == "--vllm $VLLM_SOURCE@abc"


@pytest.mark.parametrize(
    ("account", "shown"),
    [("jane", "/mnt/[user]/m"), ("root", "/mnt/root/m"), ("vllm", "/mnt/vllm/m")],  # the last is in each command
)
def test_a_folder_named_after_the_account_is_not_named(
    monkeypatch: pytest.MonkeyPatch, account: str, shown: str
) -> None:
    monkeypatch.setenv("LOGNAME", account)
    assert redactor(all_scenarios()[0]).text(f"--model /mnt/{account}/m") == f"--model {shown}"
