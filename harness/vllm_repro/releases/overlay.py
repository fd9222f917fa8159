"""A vLLM with a few of its files changed, beside the vLLM itself, which stays as it is.

<cache>/patched/0.24.0-3f9a0c1d/          links to every file of releases/0.24.0/, and the changed files themselves
<cache>/patched/installed-77ab01c2/       the same of the package of a vllm that is installed here
<cache>/patched/image-9d0c8e71/           the changed files of an image alone: they are mounted over the image's own
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.releases.cachefiles import becoming, locked, read_marker, write_marker
from vllm_repro.releases.pip_install import Progress
from vllm_repro.releases.provision import Provisioned
from vllm_repro.scenario.patch import Patch

__all__ = ["Overlaid", "changed_files", "changed_texts", "keep_changed", "overlay", "overlay_package"]


@dataclass(frozen=True)
class Overlaid:
    """release: to be run like any other. digests: sha256 of each changed file, by its name below the folder of packages."""

    release: Provisioned
    digests: Mapping[str, str]


def changed_texts(patches: Sequence[Patch], text_of: Callable[[str], str | None]) -> dict[str, str]:
    """The new text of each file that the patches change, in order; `text_of` gives what it is now, None for no such file.

    Raises `Unsupported` where a patch does not fit.
    """
    texts: dict[str, str] = {}
    for patch in patches:
        text = texts.get(patch.file) or text_of(patch.file)
        if text is None:
            raise Unsupported(
                f"the patch does not fit this release: it has no {patch.file}",
                hint="--vllm names a release that it was written for",
            )
        texts[patch.file] = patch.apply(text)
    return texts


def changed_files(folder: Path, patches: Sequence[Patch]) -> dict[str, str]:
    """`changed_texts` of the vLLM whose package lies in `folder`."""

    def text_of(file: str) -> str | None:
        path = folder / file
        return path.read_text(encoding="utf-8") if path.is_file() else None

    return changed_texts(patches, text_of)


def digests_of(texts: Mapping[str, str]) -> dict[str, str]:
    """sha256 of each file."""
    return {file: hashlib.sha256(text.encode()).hexdigest() for file, text in texts.items()}


def overlay(root: Path, release: Provisioned, patches: Sequence[Patch], progress: Progress) -> Overlaid:
    """`release`, of the cache at `root`, with the patches applied in order; made on first use, in about a second.

    Raises `Unsupported` where a patch does not fit, and `InfraError` for a disk that cannot hold it.
    """
    texts = changed_files(release.pythonpath, patches)
    folder = _once(
        root, release.version, texts, "", progress, lambda: release.pythonpath.rglob("*"), release.pythonpath
    )
    made = replace(release, pythonpath=folder, argv_prefix=(str(folder / "bin" / "vllm"),))
    return Overlaid(made, digests_of(texts))


def overlay_package(
    root: Path, packages: Path, patches: Sequence[Patch], progress: Progress
) -> tuple[Path, Mapping[str, str]]:
    """A folder for PYTHONPATH that holds the package `vllm` of the folder `packages`, with the patches, and the changed files' hashes.

    Raises as `overlay`.
    """
    texts = changed_files(packages, patches)
    below = sorted(path for path in (packages / "vllm", *(packages / "vllm").rglob("*")) if path.suffix != ".pyc")
    # What is installed may be another vLLM tomorrow. The links follow what a file holds, and the name here which files there are.
    listing = "\n".join(map(str, below))
    return _once(root, "installed", texts, listing, progress, lambda: below, packages), digests_of(texts)


def keep_changed(root: Path, texts: Mapping[str, str], progress: Progress) -> Path:
    """A folder of the changed files alone. Raises `InfraError` for a disk that cannot hold them."""
    return _once(root, "image", texts, "", progress, lambda: (), root)


def _once(
    root: Path,
    name: str,
    texts: Mapping[str, str],
    of: str,
    progress: Progress,
    entries: Callable[[], Iterable[Path]],
    source: Path,
) -> Path:
    """The folder of these `texts`, among links to the `entries` below `source`; made where it is not there."""
    key = "".join((*sorted(map("=".join, digests_of(texts).items())), of))
    folder = root / "patched" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    if read_marker(folder) is None:
        with locked(root, f"patching vLLM {name}", progress):
            if read_marker(folder) is None:
                _make(folder, source, entries(), texts)
    return folder


def _make(folder: Path, source: Path, entries: Iterable[Path], texts: Mapping[str, str]) -> None:
    started = time.monotonic()
    try:
        with becoming(folder) as fresh:
            for path in sorted(entries):
                name = path.relative_to(source)
                if path.is_dir():
                    (fresh / name).mkdir()
                elif name != Path("complete.json") and _source_of(name) not in texts:
                    (fresh / name).symlink_to(path)
            for file, text in texts.items():
                (fresh / file).parent.mkdir(parents=True, exist_ok=True)
                (fresh / file).write_bytes(text.encode())
            write_marker(fresh, files=sorted(texts), seconds=time.monotonic() - started)
    except OSError as error:
        raise InfraError(f"cannot make a patched vLLM: {error}", hint=f"See {folder.parent}.") from error


def _source_of(name: Path) -> str:
    """The module that a compiled file was made from; the name itself for any other file."""
    return str(name.parent.parent / f"{name.name.partition('.')[0]}.py") if name.suffix == ".pyc" else str(name)
