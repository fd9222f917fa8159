"""Folders of runs, and the names of this machine that reports must not contain."""

from __future__ import annotations

import getpass
import os
import secrets
import shlex
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from vllm_repro.errors import UsageError
from vllm_repro.journal.redact import Redactor, known_secrets
from vllm_repro.releases.disk import cache_root
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.catalogue import named_folders
from vllm_repro.scenario.scenario import Scenario


def default_out() -> Path:
    """Return the folder of all runs: `$VLLM_REPRO_REPORTS`, or `./reports` if that is not set."""
    return Path(os.environ.get("VLLM_REPRO_REPORTS", "reports"))


def with_out(command: str, out: Path) -> str:
    """Return a report's command with `--out` added and the folders of `--scenarios` filled in.

    Leave `--out` away if `out` is the default. Reports show the command without both: a folder
    exists on one machine only.
    """
    for folder in named_folders():
        command = command.replace(_SCENARIOS, shlex.quote(str(folder.absolute())), 1)
    return command if out == default_out() else f"{command} --out {shlex.quote(str(out))}"


def run_folder(out: Path, scenario: str, name: str = "") -> Path:
    """Make and return the run's folder `out/scenario/<UTC>-<6 hex>/`, with a folder `logs` in it.

    Point the link `out/scenario/latest` at it. Only this user can open it: logs are not redacted.
    name: its name in place of `<UTC>-<6 hex>`, if another machine chose it.

    Raises `UsageError` if the folder exists or cannot be made.
    """
    folder = stamped_folder(out, Path(scenario), inside="logs", name=name)
    folder.chmod(0o700)
    return folder


def stamped_folder(out: Path, below: Path, inside: str = "", name: str = "") -> Path:
    """Make and return the folder `out/below/<UTC>-<6 hex>/`; point `out/below/latest` at it.

    inside: name of a folder to make in it. name: its own name in place of `<UTC>-<6 hex>`.

    Raises `UsageError` if the folder exists or cannot be made.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = out / below / (name or f"{stamp}-{secrets.token_hex(3)}")
    try:
        (folder / inside).mkdir(parents=True)
        fresh = folder.parent / f".latest-{secrets.token_hex(4)}"
        fresh.symlink_to(folder.name)
        fresh.replace(folder.parent / "latest")  # atomic: a reader never finds the link missing
    except OSError as error:
        raise UsageError(
            f"cannot write to {out}: {error.strerror}", hint="name another folder with --out"
        ) from error
    return folder


def link_to(root: Path, page: Path) -> str:
    """Return the relative link from the HTML page `page` to the folder of all runs, `root`."""
    return Path(os.path.relpath(root.resolve(), page.resolve().parent)).as_posix()


_SCENARIOS = "$VLLM_REPRO_SCENARIOS"
_FOLDER_VARIABLES = ("TMPDIR", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HOME", "VLLM_REPRO_REPORTS")


def private_folders() -> list[tuple[str, str]]:
    """Return (folder, word that replaces it in reports) for each folder to redact, longest first.

    Raises `UsageError` if the working folder has been removed.
    """
    try:
        here = str(Path.cwd())
    except FileNotFoundError as error:
        raise UsageError(
            "the working folder is gone", hint="change into one that is there: cd ~"
        ) from error
    folders = [(here, "."), (str(Path.home()), "$HOME"), (str(cache_root()), "$VLLM_REPRO_CACHE")]
    folders += [
        (value.rstrip("/"), f"${name}")
        for name in _FOLDER_VARIABLES
        if (value := os.environ.get(name))
    ]
    named = (str(folder.absolute()) for folder in named_folders())
    folders += [(folder, _SCENARIOS) for folder in named if not _within(folder, folders)]
    return sorted(folders, key=lambda pair: -len(pair[0]))


def private_sources(sources: Iterable[Source | None]) -> list[tuple[str, str]]:
    """Return (folder, word that replaces it in reports) for each folder of a checkout or wheel.

    Also for those of exchanged packages; longest first. Leave out what `private_folders` covers
    already. Do not redact records that `--resume` reads: it needs the real folders. sources: vLLMs;
    None and releases are skipped.
    """
    known, folders = private_folders(), set[str]()
    for source in filter(None, sources):
        base = source.base or source
        for path in (base.wheel or base.folder or Path(), *map(Path, source.packages)):
            if path.is_absolute():
                folders.add(f"{path.parent if path.suffix == '.whl' else path}")
    return [
        (folder, "$VLLM_SOURCE")
        for folder in sorted(folders, key=lambda folder: (-len(folder), folder))
        if not _within(folder, known)
    ]


def _within(path: str, folders: Sequence[tuple[str, str]]) -> bool:
    """Return True if `path` lies in one of `folders`, so that it is redacted already.

    `/` does not count: the redactor leaves it as it is.
    """
    return any(len(folder) > 1 and Path(path).is_relative_to(folder) for folder, _ in folders)


def private_hosts(scenario: Scenario) -> list[str]:
    """Return this host's names to redact, short and full; not those in the scenario's text."""
    return _names_to_redact(
        {socket.gethostname(), socket.gethostname().partition(".")[0]}, scenario
    )


def private_users(scenario: Scenario) -> list[str]:
    """Return this account's name to redact.

    Empty if it is `root`, stands in the scenario's text, or does not exist.
    """
    try:
        return _names_to_redact({getpass.getuser()}, scenario)
    except (KeyError, OSError):  # an account without a name, as in a container
        return []


def _names_to_redact(names: set[str], scenario: Scenario) -> list[str]:
    """Return the names that the scenario's text does not contain, longest first.

    The text has its id, title, command and model, `root` and `localhost`. To redact a name such as
    `vllm` would spoil it.
    """
    public = (
        f"{scenario.id} {scenario.title} {scenario.command} {scenario.model.name} localhost root"
    )
    return sorted((name for name in names if name and name not in public), key=len, reverse=True)


def redactor(scenario: Scenario) -> Redactor:
    """Return a redactor for the secrets, folders, host and user names of this machine.

    It keeps names in the scenario's text. Raises `UsageError` as `private_folders` does.
    """
    return Redactor(
        private_folders(),
        private_hosts(scenario),
        known_secrets(os.environ),
        private_users(scenario),
    )
