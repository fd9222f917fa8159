"""Overlays: vLLM's package with a few patched files, in a folder of its own.

The installed vLLM is not changed.

<cache>/patched/3f9a0c1d/vllm/  links to the files of the installed package, and the patched files
<cache>/patched/9d0c8e71/       only the patched files, to mount over those of an image

The eight used last are kept, and those in use: a process holds a lock on the file `complete` until
it exits.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.releases.disk import Progress, locked
from vllm_repro.scenario.patch import Patch

_KEPT = 8
"""Patched folders that are kept, besides those in use."""
_lock_files: dict[Path, int] = {}
"""Descriptors of the locked files of the folders that this process uses, by folder."""
_NO_LINKS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Overlay:
    """A copy of the vLLM package with patched files, in a folder for PYTHONPATH."""

    # For PYTHONPATH.
    folder: Path
    # sha256 of each patched file, by its path below the folder.
    digests: Mapping[str, str]


def patched_texts(patches: Sequence[Patch], text_of: Callable[[str], str | None]) -> dict[str, str]:
    """Return the new text of each file that `patches` change.

    text_of: returns the current text of a file, None if there is no such file.

    Raises `Unsupported` if a patch does not fit.
    """
    texts: dict[str, str] = {}
    for patch in patches:
        text = texts[patch.file] if patch.file in texts else text_of(patch.file)
        if text is None:
            raise Unsupported(
                f"the patch does not fit this release: it has no {patch.file}",
                hint="--vllm names a release that it was written for",
            )
        texts[patch.file] = patch.apply(text)
    return texts


def patched_files(packages: Path, patches: Sequence[Patch]) -> dict[str, str]:
    """Return the new text of each file of the vLLM in `packages` that `patches` change.

    Raises `Unsupported` if a patch does not fit.
    """
    return patched_texts(
        patches,
        lambda file: (
            (packages / file).read_text(encoding="utf-8") if (packages / file).is_file() else None
        ),
    )


def digests_of(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the sha256 of each text, by file."""
    return {file: hashlib.sha256(text.encode()).hexdigest() for file, text in texts.items()}


def make_overlay(
    root: Path, packages: Path, patches: Sequence[Patch], progress: Progress
) -> Overlay:
    """Return a patched copy of the package `vllm` in `packages`; other files are links.

    It is made in the cache at `root` on first use, and kept until this process exits. Raises
    `Unsupported` if a patch does not fit, and `InfraError` if the overlay cannot be written.
    """
    texts = patched_files(packages, patches)
    files = [
        path
        for path in (packages / "vllm").rglob("*")
        if path.suffix != ".pyc" and not path.is_dir()
    ]
    links = {str(path.relative_to(packages)): str(path) for path in sorted(files)}
    return Overlay(write_files(root, texts, progress, links), digests_of(texts))


def write_files(
    root: Path, texts: Mapping[str, str], progress: Progress, links: Mapping[str, str] = _NO_LINKS
) -> Path:
    """Return a folder in the cache at `root` with the files `texts`, and `links` for other files.

    texts, links: text, or target of a link, by path in the folder. The folder's name is a hash of
    both, because the installed vLLM may be upgraded.

    Make the folder on first use, and then remove older ones that no process uses. Lock it until
    this process exits. Raises `InfraError` if it cannot be written.
    """
    links = {name: target for name, target in links.items() if name not in texts}
    key = json.dumps([digests_of(texts), links], sort_keys=True)
    folder = root / "patched" / hashlib.sha256(key.encode()).hexdigest()[:8]
    if _lock_in_use(folder):
        return folder
    with locked(root, "patching vLLM", progress):
        if _lock_in_use(folder):  # another process made it while this one waited
            return folder
        try:
            shutil.rmtree(folder, ignore_errors=True)
            for name in (*links, *texts):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
            for name, target in links.items():
                (folder / name).symlink_to(target)
            for name, text in texts.items():
                (folder / name).write_bytes(text.encode())
            _marker(folder).touch()
            _lock_in_use(folder)
            _remove_unused(folder.parent)
        except OSError as error:
            raise InfraError(
                f"cannot make a patched vLLM: {error}", hint=f"See {folder.parent}."
            ) from error
    return folder


def _marker(folder: Path) -> Path:
    """Return the file that is written last, and marks a patched folder as complete."""
    return folder / "complete"


def _lock_in_use(folder: Path) -> bool:
    """Lock a patched folder against removal until this process exits, and mark it as just used.

    Return False if it does not exist or was removed meanwhile.
    """
    try:
        file = os.open(_marker(folder), os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    fcntl.flock(file, fcntl.LOCK_SH)
    if not os.fstat(file).st_nlink:  # removed while this process waited
        os.close(file)
        return False
    with contextlib.suppress(OSError):  # a cache that cannot be written
        os.utime(file)
    if folder in _lock_files:
        os.close(_lock_files[folder])
    _lock_files[folder] = file
    return True


def _remove_unused(parent: Path) -> None:
    """Remove all patched folders but the eight used last and those that a process has locked.

    The caller holds the cache's lock.
    """
    used = {
        path: path.stat().st_mtime_ns for path in map(_marker, parent.iterdir()) if path.exists()
    }
    for complete in sorted(used, key=lambda path: used[path], reverse=True)[_KEPT:]:
        with complete.open() as file, contextlib.suppress(BlockingIOError):  # in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            complete.unlink()
            shutil.rmtree(complete.parent, ignore_errors=True)
