"""Environment of a Python tree over the compiled parts of an installed release.

It holds the tree, and the packages that the tree needs and the release lacks, or that are
exchanged. Everything else, including torch, is imported from the release.
"""

from __future__ import annotations

import csv
import filecmp
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.releases.disk import Progress
from vllm_repro.releases.installer import Installer
from vllm_repro.releases.sources import Tree

# Requirements that are left out on a CPU: those of vLLM's wheel for GPUs, and others for GPUs.
_GPU_ONLY = re.compile(
    r"apache-tvm-ffi|cuda-.*|cufile-python|cupy-cuda.*|fastsafetensors|flashinfer-.*"
    r"|humming-kernels|instanttensor|nixl-cu\d+|nvidia-.*|nvtx|pynvvideocodec|quack-kernels|tilelang"
    r"|tokenspeed-mla|torch|torchaudio|torchcodec|torchvision|triton"
)
_SAFE_PATH = "import os; os.environ['PYTHONSAFEPATH'] = '1'\n"

# A `#!` line must be short and its path without blanks, so a shell starts the interpreter.
_SCRIPT = """#!/bin/sh
'''exec' {python} "$0" "$@"
' '''
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":  # a spawned worker runs this file again
    sys.exit(main())
"""


def install_over(
    folder: Path,
    base_packages: Path,
    tree: Tree,
    version: str,
    installer: Installer,
    progress: Progress,
) -> Path:
    """Install a vLLM source `tree` over a release's compiled parts; return its site-packages.

    folder: an empty environment, which is filled. base_packages: site-packages of the release, on
    the same disk. Raises `InfraError` if a package that the tree needs cannot be installed.
    """
    python = folder / "bin" / "python"
    packages = next(folder.glob("lib/python*/site-packages"))
    names, copied = _copy_tree(tree, packages, base_packages)
    for library in (base_packages / "vllm").rglob("*.so"):
        names.append(str(library.relative_to(base_packages)))
        _link(library, packages / names[-1])
    # It may be a link to the base's file.
    (packages / "vllm" / "_version.py").unlink(missing_ok=True)
    (packages / "vllm" / "_version.py").write_text(
        f"__version__ = version = {version!r}\n__version_tuple__ = version_tuple = (0, 0,"
        " version)\n",
        encoding="utf-8",
    )
    (packages / "vllm_repro_base.pth").write_text(
        f"import site; site.addsitedir({str(base_packages)!r})\n", encoding="utf-8"
    )
    (folder / "bin" / "vllm").write_text(
        _SCRIPT.format(python=shlex.quote(str(python))), encoding="utf-8"
    )
    (folder / "bin" / "vllm").chmod(0o755)
    metadata = make_runnable(packages, version, tree.requires)
    with (metadata / "RECORD").open("w", newline="", encoding="utf-8") as record:
        csv.writer(record).writerows([name, "", ""] for name in names)
    _install_lacking(tree.requires, python, [packages, base_packages], installer, progress)
    if tree.packages:
        installer.install(python, tree.packages, progress, "--no-deps")
        _install_lacking(
            [line for new in distributions(path=[str(packages)]) for line in new.requires or ()],
            python,
            [packages, *_sys_path(python)],  # also of the release below, if the base is a layer
            installer,
            progress,
            absent=True,
        )
        _refuse_unfit(python, packages)
    # If bytecode is not written, each process of the server compiles the changed files again.
    subprocess.run(
        [f"{python}", "-m", "compileall", "-q", "-i", "-"],
        input="\n".join(str(path) for path in copied if path.suffix == ".py"),
        text=True,
        check=False,
        capture_output=True,
    )
    return packages


def make_runnable(packages: Path, version: str, requires: Sequence[str] = ()) -> Path:
    """Write the metadata from which vLLM takes its version and the CPU platform; return its folder.

    Also keep vLLM's `python -m` children from importing a checkout in the working directory.
    packages: site-packages with vLLM. requires: its requirements.
    """
    # vLLM looks for the distribution "vllm", and "cpu" in its version selects the CPU platform.
    public, _, local = version.partition("+")
    version = f"{public}+{local}.cpu" if local else f"{public}+cpu"
    metadata = packages / f"vllm-{version}.dist-info"
    metadata.mkdir(exist_ok=True)
    lines = [
        "Metadata-Version: 2.1",
        "Name: vllm",
        f"Version: {version}",
        *(f"Requires-Dist: {requirement}" for requirement in requires),
    ]
    (metadata / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (packages / "vllm_repro_safe_path.pth").write_text(_SAFE_PATH, encoding="utf-8")
    return metadata


def _copy_tree(tree: Tree, packages: Path, base_packages: Path) -> tuple[list[str], list[Path]]:
    """Put `vllm/` of `tree` into `packages`; return (names of all files, paths of the copied).

    Files that the base release has as well are linked to it, with their bytecode; the others are
    copied. Compiled parts are left out.
    """
    names, copied = list(tree.same), []
    for name in tree.same:
        _link_source(base_packages, packages, name)
    for parent, folders, files in os.walk(tree.folder / "vllm"):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        below = Path(parent).relative_to(tree.folder)
        (packages / below).mkdir(parents=True, exist_ok=True)
        for file in sorted(files):
            if file.endswith((".so", ".pyc")):
                continue
            name = f"{below}/{file}"
            source, target, same = tree.folder / name, packages / name, base_packages / name
            if same.is_file() and filecmp.cmp(source, same, shallow=False):
                _link_source(base_packages, packages, name)
            else:
                shutil.copyfile(source, target)  # with a new date, so that no old bytecode fits
                copied.append(target)
            names.append(name)
    return names, copied


def _link_source(base_packages: Path, packages: Path, name: str) -> None:
    """Link a file of the base release, and its bytecode if there is any, into `packages`."""
    _link(base_packages / name, packages / name)
    folder, _, file = name.rpartition("/")
    compiled = f"{folder}/__pycache__/{file.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc"
    if (base_packages / compiled).is_file():
        _link(base_packages / compiled, packages / compiled)


def _link(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, with its folders, and replace what is there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    os.link(source, target)


def _install_lacking(
    requires: Sequence[str],
    python: Path,
    path: Sequence[Path],
    installer: Installer,
    progress: Progress,
    *,
    absent: bool = False,
) -> None:
    """Install requirements that `path` lacks or has in another version, with their dependencies.

    path: site-packages that count as installed; new packages go to the first, that of `python`. An
    installed version that does not fit is kept if the index has no better one. absent: keep every
    installed version. Raises `InfraError` if a missing package cannot be installed.
    """
    needed, tried = [Requirement(line) for line in requires], set[str]()
    while needed:
        installed: dict[str, str] = {}
        for package in distributions(path=[str(folder) for folder in path]):
            installed.setdefault(canonicalize_name(package.name), package.version)
        lacking = [
            need
            for need in needed
            if _applies(need)
            and not _satisfied(need, installed)
            and not (absent and canonicalize_name(need.name) in installed)
        ]
        names = {canonicalize_name(need.name) for need in lacking} - tried
        tried |= names
        for need in (need for need in lacking if canonicalize_name(need.name) in names):
            has = installed.get(canonicalize_name(need.name))
            progress(f"{need} is needed" + (f", and the release has {has}" if has else ""))
            try:
                installer.install(python, [str(need)], progress, "--no-deps")
            except InfraError:
                if has is None:
                    raise
                progress(f"  the index has no such {need.name}: {has} is used")
        added = [
            package
            for package in distributions(path=[str(path[0])])
            if canonicalize_name(package.name) in names
        ]
        needed = [Requirement(line) for package in added for line in package.requires or ()]


def _sys_path(python: Path) -> list[Path]:
    """Return the folders from which `python` imports."""
    return [
        Path(line)
        for line in subprocess.run(
            [f"{python}", "-Ic", "import sys; print(*sys.path, sep='\\n')"],
            text=True,
            check=True,
            capture_output=True,
        ).stdout.splitlines()
    ]


def _refuse_unfit(python: Path, packages: Path) -> None:
    """Raise `Unsupported` if a package in `packages` needs what is not installed for `python`."""
    versions: dict[str, str] = {
        canonicalize_name(package.name): package.version
        # the first on the path is imported
        for package in reversed([*distributions(path=[*map(str, _sys_path(python))])])
    }
    unmet = [
        f"{package.name} {package.version} requires {need}, and"
        f" {versions.get(canonicalize_name(need.name), 'none')} is installed"
        for package in distributions(path=[f"{packages}"])
        for need in map(Requirement, package.requires or ())
        if _applies(need) and not _satisfied(need, versions)
    ]
    if unmet:
        raise Unsupported(
            "; ".join(unmet), hint="name another version, or what it needs with a further --with"
        )


def _applies(need: Requirement) -> bool:
    """Return True if a requirement holds on this platform and is not only for GPUs."""
    name = canonicalize_name(need.name)
    return not _GPU_ONLY.fullmatch(name) and (
        need.marker is None or need.marker.evaluate({"extra": ""})
    )


def _satisfied(need: Requirement, installed: dict[str, str]) -> bool:
    """Return True if `installed`, {package: version}, meets a requirement."""
    version = installed.get(canonicalize_name(need.name))
    return version is not None and need.specifier.contains(version, prereleases=True)
