from __future__ import annotations

from pathlib import Path

import pytest

from vllm_repro.journal.redact import Redactor
from vllm_repro.releases.sources import Source
from vllm_repro.running.folders import private_folders, private_sources, redactor
from vllm_repro.scenario.catalogue import all_scenarios


def test_a_cache_outside_the_home_folder_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/srv/jane/caches")
    monkeypatch.setenv("HF_HOME", "/srv/jane/models/")
    monkeypatch.delenv("VLLM_REPRO_CACHE", raising=False)
    text = "/srv/jane/caches/vllm-repro/releases/0.23.0 /srv/jane/caches/torch /srv/jane/models/hub"
    assert (
        Redactor(private_folders()).text(text)
        == "$VLLM_REPRO_CACHE/releases/0.23.0 $XDG_CACHE_HOME/torch $HF_HOME/hub"
    )


@pytest.mark.parametrize(
    ("source", "text", "shown"),
    [
        (
            Source(folder=Path("/data/vllm"), commit="0a1b2c"),
            "--vllm /data/vllm@0a1b2c",
            "--vllm $VLLM_SOURCE@0a1b2c",
        ),
        (Source(folder=Path("/data/vllm")), "/data/vllm/vllm/core.py", "$VLLM_SOURCE/vllm/core.py"),
        (
            Source(wheel=Path("/data/vllm-0.33.0.whl")),
            "--vllm /data/vllm-0.33.0.whl",
            "--vllm $VLLM_SOURCE/vllm-0.33.0.whl",
        ),
        (Source(release="0.33.0"), "--vllm 0.33.0", "--vllm 0.33.0"),
        (None, "/data/vllm", "/data/vllm"),
    ],
)
def test_the_folder_of_a_source_is_not_named(source: Source | None, text: str, shown: str) -> None:
    assert Redactor(private_sources([source])).text(text) == shown


@pytest.mark.parametrize("here", ["work", "work/vllm", "/"])
def test_a_checkout_beside_a_known_folder_is_not_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: str
) -> None:
    (tmp_path / "work" / "vllm").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / here)
    source = Source(folder=tmp_path / "work-vllm", commit="abc")
    assert (
        Redactor([*private_folders(), *private_sources([source])]).text(f"{source}")
        == "$VLLM_SOURCE@abc"
    )


@pytest.mark.parametrize(
    ("account", "shown"),
    # the last is in each command
    [("jane", "/mnt/[user]/m"), ("root", "/mnt/root/m"), ("vllm", "/mnt/vllm/m")],
)
def test_a_folder_named_after_the_account_is_not_named(
    monkeypatch: pytest.MonkeyPatch, account: str, shown: str
) -> None:
    monkeypatch.setenv("LOGNAME", account)
    assert redactor(all_scenarios()[0]).text(f"--model /mnt/{account}/m") == f"--model {shown}"
