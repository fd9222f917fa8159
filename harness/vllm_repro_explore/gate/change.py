"""The two vLLM trees that a gate compares, from a diff, a commit, a checkout or two sources."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from vllm_repro.cli.source_option import exchanged
from vllm_repro.errors import UsageError
from vllm_repro.releases.disk import cache_root
from vllm_repro.releases.known import NEWEST
from vllm_repro.releases.overlay import write_files
from vllm_repro.releases.provision import Release, provision
from vllm_repro.releases.sources import Source, hash_of, parse_source
from vllm_repro_explore.gate.lines import Place, changed_places, meaning

if TYPE_CHECKING:
    from unidiff.patch import Hunk, Line, PatchedFile

Progress = Callable[[str], None]
_NO_CODE = "no code of the engine"
_REASONS: Sequence[tuple[str, str]] = (
    ("vllm/model_executor/", "a model or a layer; the search computes tokens without one"),
    ("vllm/models/", "a model or a layer; the search computes tokens without one"),
    ("vllm/entrypoints/", "the API server, which is not played"),
    ("vllm/v1/worker/", "the model runner, which is simulated"),
    ("vllm/v1/attention/", "attention kernels, which are simulated"),
    ("vllm/v1/sample/", "the sampler, which is simulated"),
    ("vllm/v1/spec_decode/", "the drafter, which is simulated"),
    ("vllm/compilation/", "compilation of a model; the search has none"),
    ("vllm/", "not imported by the search"),
    ("tests/", _NO_CODE),
    ("docs/", _NO_CODE),
    ("examples/", _NO_CODE),
    ("benchmarks/", _NO_CODE),
    (".", _NO_CODE),
    ("csrc/", "compiled code, and a release's own is used"),
    ("cmake/", "compiled code, and a release's own is used"),
)
_COMPILED = (".cu", ".cuh", ".cpp", ".c", ".h", ".hpp", ".cmake", ".so")


def why_unplayed(file: str) -> str:
    """Return why the search does not run a file of vLLM's repository, by its path."""
    if file.endswith(_COMPILED):
        return "compiled code, and a release's own is used"
    if file.endswith((".md", ".rst")):
        return _NO_CODE
    return next((why for start, why in _REASONS if file.startswith(start)), "no part of the engine")


@dataclass(frozen=True, kw_only=True)
class ChangedFile:
    """A Python file of vLLM's package that the change touches."""

    name: str
    # text in the base and in the changed vLLM; None if it has no such file
    before: str | None
    after: str | None


@dataclass(kw_only=True)
class Change:
    """A base and a changed vLLM, and what differs."""

    # as the user named it
    name: str
    base: Release
    changed: Release
    files: Sequence[ChangedFile]
    # other files of the change, with the reason why the search does not run them
    unplayed: Mapping[str, str] = field(default_factory=dict)
    # statements that the change touches in the base and in the changed vLLM, read from `files`
    before: list[Place] = field(default_factory=list)
    after: list[Place] = field(default_factory=list)

    def __post_init__(self) -> None:
        for file in self.files:
            old, new = changed_places(file.name, file.before or "", file.after or "")
            self.before += old
            self.after += new

    @property
    def added(self) -> set[str]:
        """Return the Python files that the base does not have."""
        return {file.name for file in self.files if file.before is None}

    @property
    def only_words(self) -> bool:
        """Return True if only comments, docstrings, or files without code differ."""
        same = all(
            file.before is not None
            and file.after is not None
            and meaning(file.before) == meaning(file.after)
            for file in self.files
        )
        return same and all(why == _NO_CODE for why in self.unplayed.values())


class UnfitError(Exception):
    """A change that does not apply or cannot be imported.

    broken: its own code is at fault. base: version of the vLLM that it is compared with.
    """

    def __init__(self, why: str, *, base: str, broken: bool = False) -> None:
        super().__init__(why)
        self.base, self.broken = base, broken


def read_change(
    text: str, base: Source | None, progress: Progress, packages: Sequence[str] | None = None
) -> Change:
    """Provision both vLLMs of the change that the command names, and return the change.

    text: a diff file, COMMIT of a checkout as FOLDER@COMMIT, a checkout with changes, or a source
    as `--vllm` has it. base: `--base`. packages: `--with`, exchanged in both. Raises `UsageError`
    for what is none of these, changes nothing or names no package, and `UnfitError` for a diff that
    does not apply or a file that is no Python.
    """
    path = Path(text).expanduser()
    if path.suffix == ".whl" or path.is_dir() or not (path.exists() or path.suffix == ".diff"):
        change = _of_sources(text, base, progress, packages)
    else:
        source = exchanged(base or Source(release=NEWEST), packages)
        change = _of_diff(path, text, source, progress)
    if not change.files and not change.unplayed:
        raise UsageError(
            f"{text} changes nothing of the vLLM that it is compared with",
            hint="--base names another vLLM",
        )
    return change


def _of_sources(
    text: str, base: Source | None, progress: Progress, packages: Sequence[str] | None
) -> Change:
    """Provision two vLLMs that `--vllm` could name, and return the change between them.

    Without `base`, `text` is compared with what `_parent_of` returns.
    """
    source = parse_source(text)
    first = provision(exchanged(base or _parent_of(source, text), packages), progress)
    second = provision(exchanged(source, packages), progress)
    names = {
        str(file.relative_to(release.packages))
        for release in (first, second)
        for file in (release.packages / "vllm").rglob("*.py")
        if file.name != "_version.py"
    }
    texts = {name: (_text(first, name), _text(second, name)) for name in sorted(names)}
    files = [
        ChangedFile(name=name, before=before, after=after)
        for name, (before, after) in texts.items()
        if before != after
    ]
    return _checked(text, first, second, files, {})


def _parent_of(source: Source, text: str) -> Source:
    """Return what a source is compared with: a commit's parent, or a checkout's HEAD.

    Raises `UsageError` if the source is no Git checkout.
    """
    commit = f"{source.commit}^" if source.commit else "HEAD"
    folder = source.folder
    parent = hash_of(folder, commit) if folder and (folder / ".git").exists() else ""
    if not parent:
        raise UsageError(
            f"{text} names one vLLM, and a gate compares two", hint="--base names the other one"
        )
    return Source(folder=folder, commit=parent)


def _of_diff(path: Path, name: str, source: Source, progress: Progress) -> Change:
    """Provision a source, apply a diff to it in an overlay, and return the change.

    Raises `UsageError` if the file is no diff, and `UnfitError` if the diff does not apply.
    """
    from unidiff.errors import UnidiffParseError  # here: only a diff needs it
    from unidiff.patch import PatchSet

    try:
        parsed = PatchSet(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, UnidiffParseError) as error:
        raise UsageError(
            f"cannot read {name} as a diff: {error}", hint="git diff > my-change.diff"
        ) from error
    if not parsed:
        raise UsageError(f"{name} is no unified diff", hint="git diff > my-change.diff")
    base = provision(source, progress)
    files, unplayed = dict[str, ChangedFile](), dict[str, str]()
    for patched in parsed:  # a series of commits may change a file several times
        if not patched.path.startswith("vllm/") or not patched.path.endswith(".py"):
            unplayed[patched.path] = why_unplayed(patched.path)
            continue
        old = patched.source_file.removeprefix("a/") if patched.is_rename else patched.path
        former = files.get(old)
        text = former.after if former else _text(base, old)
        if (text is None) is not patched.is_added_file:
            has = "has no" if text is None else "already has"
            raise UnfitError(
                f"the diff does not apply: vLLM {base.version} {has} {old}", base=base.version
            )
        after = None if patched.is_removed_file else _applied(patched, text or "", base.version)
        before = former.before if former else text
        if patched.is_rename:
            files[old] = ChangedFile(name=old, before=before, after=None)
            before = None
        files[patched.path] = ChangedFile(name=patched.path, before=before, after=after)
    every = tuple(files.values())
    changed = replace(base, packages=_overlay(base, every, progress)) if every else base
    return _checked(name, base, changed, every, unplayed)


def _overlay(base: Release, files: Sequence[ChangedFile], progress: Progress) -> Path:
    """Write the changed files into the cache, beside links to the base's other files.

    Return the folder.
    """
    texts = {file.name: file.after for file in files if file.after is not None}
    removed = {file.name for file in files if file.after is None}
    links = {
        str(path.relative_to(base.packages)): str(path)
        for path in sorted((base.packages / "vllm").rglob("*"))
        if path.suffix != ".pyc" and not path.is_dir()
    }
    kept = {name: target for name, target in links.items() if name not in removed}
    return write_files(cache_root(), texts, progress, kept)


def _text(release: Release, name: str) -> str | None:
    """Return the text of a file of a release; None if it has no such file."""
    path = release.packages / name
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _applied(patched: PatchedFile, text: str, version: str) -> str:
    """Return the text of a file with the hunks of a diff; raise `UnfitError` if one does not fit.

    As `patch` does, a hunk goes where its lines stand nearest to the line that it names.
    """
    lines, shift = text.splitlines(keepends=True), 0
    for number, hunk in enumerate(patched, 1):
        was, now = ([line.value for line in side] for side in _sides(hunk))
        at = _nearest(lines, was, max(0, hunk.source_start - 1) + shift)
        if at is None:
            raise UnfitError(
                f"the diff does not apply to vLLM {version}: hunk {number} of {patched.path},"
                f" at line {hunk.source_start}",
                base=version,
            )
        lines[at : at + len(was)] = now
        shift = at + len(now) - len(was) - max(0, hunk.source_start - 1)
    return "".join(lines)


def _sides(hunk: Hunk) -> tuple[list[Line], list[Line]]:
    """Return the lines of a hunk before and after."""
    return (
        [line for line in hunk if line.is_context or line.is_removed],
        [line for line in hunk if line.is_context or line.is_added],
    )


def _nearest(lines: Sequence[str], passage: Sequence[str], at: int) -> int | None:
    """Return the index nearest to `at` where `lines` has the lines `passage`; None if nowhere.

    Blanks at the end of a line do not count.
    """
    starts = range(len(lines) - len(passage) + 1)
    stripped, sought = [line.rstrip() for line in lines], [line.rstrip() for line in passage]
    places = [start for start in starts if stripped[start : start + len(sought)] == sought]
    return min(places, key=lambda start: abs(start - at), default=None)


def _checked(
    name: str,
    base: Release,
    changed: Release,
    files: Sequence[ChangedFile],
    unplayed: Mapping[str, str],
) -> Change:
    """Return the change; raise `UnfitError` if a changed file is no Python."""
    for file in files:
        try:
            ast.parse(file.after or "", filename=file.name)
        except SyntaxError as error:
            raise UnfitError(
                f"{file.name}:{error.lineno}: {error.msg}", base=base.version, broken=True
            ) from error
    return Change(name=name, base=base, changed=changed, files=files, unplayed=unplayed)


def module_of(file: str) -> str:
    """Return the dotted name of a module by its file, such as vllm/v1/request.py."""
    return ".".join(PurePosixPath(file.removesuffix("/__init__.py")).with_suffix("").parts)
