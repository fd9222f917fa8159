"""A release with a few of its files changed, beside the release itself, which stays as it is.

<cache>/patched/0.24.0-3f9a0c1d/    links to every file of releases/0.24.0/, and the changed files themselves
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.patch import Patch
from vllm_repro.releases.cachefiles import becoming, locked, read_marker, write_marker
from vllm_repro.releases.pip_install import Progress
from vllm_repro.releases.provision import Provisioned

__all__ = ["Overlaid", "changed_files", "overlay"]


@dataclass(frozen=True)
class Overlaid:
    """release: to be run like any other. digests: sha256 of each changed file, by its name below the folder of packages."""

    release: Provisioned
    digests: Mapping[str, str]


def changed_files(folder: Path, patches: Sequence[Patch]) -> dict[str, str]:
    """The new text of each file that the patches change, in the release unpacked at `folder`. Raises `Unsupported`."""
    texts: dict[str, str] = {}
    for patch in patches:
        path = folder / patch.file
        if patch.file not in texts and not path.is_file():
            raise Unsupported(
                f"the patch does not fit this release: it has no {patch.file}",
                hint="--vllm names a release that it was written for",
            )
        texts[patch.file] = patch.apply(texts.get(patch.file) or path.read_text(encoding="utf-8"))
    return texts


def overlay(root: Path, release: Provisioned, patches: Sequence[Patch], progress: Progress) -> Overlaid:
    """`release`, of the cache at `root`, with the patches applied in order; made on first use, in about a second.

    Raises `Unsupported` where a patch does not fit, and `InfraError` for a disk that cannot hold it.
    """
    texts = changed_files(release.pythonpath, patches)
    digests = {file: hashlib.sha256(text.encode()).hexdigest() for file, text in texts.items()}
    name = hashlib.sha256("".join(sorted(map("=".join, digests.items()))).encode()).hexdigest()[:8]
    folder = root / "patched" / f"{release.version}-{name}"
    if read_marker(folder) is None:
        with locked(root, f"patching vLLM {release.version}", progress):
            if read_marker(folder) is None:
                _make(folder, release, texts)
    return Overlaid(replace(release, pythonpath=folder, argv_prefix=(str(folder / "bin" / "vllm"),)), digests)


def _make(folder: Path, release: Provisioned, texts: Mapping[str, str]) -> None:
    started = time.monotonic()
    try:
        with becoming(folder) as fresh:
            for path in sorted(release.pythonpath.rglob("*")):
                name = path.relative_to(release.pythonpath)
                if path.is_dir():
                    (fresh / name).mkdir()
                elif str(name) in texts:
                    (fresh / name).write_text(texts[str(name)], encoding="utf-8")
                elif name != Path("complete.json") and _source_of(name) not in texts:
                    (fresh / name).symlink_to(path)
            write_marker(fresh, version=release.version, files=sorted(texts), seconds=time.monotonic() - started)
    except OSError as error:
        raise InfraError(
            f"cannot make a patched vLLM {release.version}: {error}", hint=f"See {folder.parent}."
        ) from error


def _source_of(name: Path) -> str:
    """The module that a compiled file was made from; the name itself for any other file."""
    return str(name.parent.parent / f"{name.name.partition('.')[0]}.py") if name.suffix == ".pyc" else str(name)
