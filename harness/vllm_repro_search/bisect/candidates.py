"""Candidates of a bisection: releases, or commits of a checkout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from vllm_repro.errors import UsageError
from vllm_repro.releases.sources import RUN, WITH, Source, git, hash_of, version_of
from vllm_repro.releases.versions import release_version


@dataclass(frozen=True)
class Candidate:
    """One release or commit of vLLM that a bisection may boot."""

    label: str
    # what `--vllm` takes
    source: str
    # of a commit
    title: str = ""
    # of the author, as in 2026-05-01
    date: str = ""

    @property
    def vllm(self) -> Source:
        """Return the source to boot: a commit of a checkout or a release, perhaps with packages."""
        base, *packages = self.source.split(WITH)
        checkout, _, commit = base.rpartition("@")
        vllm = Source(folder=Path(checkout), commit=commit) if checkout else Source(release=base)
        return Source(base=vllm, packages=tuple(packages)) if packages else vllm


def refuse_wrong_order(bad: str, good: str, *, find_fix: bool, owner: str = "--") -> None:
    """Raise `UsageError` if the ends of a bisection are equal, or the newer one is the wrong one.

    owner: stands before `bad` and `good` in the message.
    """
    if Version(bad) == Version(good):
        raise UsageError(f"{owner}bad and {owner}good are both {bad}", hint="name two releases")
    if (Version(bad) < Version(good)) is not find_fix:
        hint = (
            "leave --find-fix out"
            if find_fix
            else "add --find-fix to look for the first fixed release"
        )
        age = "newer" if find_fix else "older"
        raise UsageError(f"{owner}bad {bad} is {age} than {owner}good {good}", hint=hint)


def commits_between(checkout: Path, old: str, new: str) -> tuple[list[Candidate], int]:
    """Return the commits from `old` to `new` that change the server, and the number of the others.

    The oldest comes first. old, new: each a release or a commit. Only `vllm/` and its requirements
    are run, so a commit that changes neither behaves like its parent. vLLM's release tags are on
    branches of their own. If `old` is not an ancestor of `new`, the list begins at their merge
    base. Raises `UsageError` if the checkout lacks one of them.
    """
    first, last = (_end(checkout, name) for name in (old, new))
    base = git(checkout, "merge-base", first, last).decode().strip()
    fields, span = "--format=%H %as %s", f"{base}..{last}"
    printed = git(checkout, "log", "-1", fields, base)
    printed += git(checkout, "log", "--reverse", "--first-parent", fields, span, "--", *RUN)
    words = [line.split(" ", 2) for line in printed.decode(errors="replace").splitlines()]
    commits = [
        Candidate(commit[:12], f"{checkout}@{commit}", title, date) for commit, date, title in words
    ]
    total = int(git(checkout, "rev-list", "--count", "--first-parent", span))
    return commits, total + 1 - len(commits)


def _end(checkout: Path, name: str) -> str:
    """Return the hash of an end of the search. name: a release or a commit.

    Raises `UsageError` if the checkout has no such commit or release tag.
    """
    tags = [f"v{release_version(name)}"] if version_of(name) is not None else []
    for text in (*tags, name):
        if commit := hash_of(checkout, text):
            return commit
    raise UsageError(
        f"{checkout} is no git checkout with a commit {name}", hint="git fetch --tags there first"
    )
