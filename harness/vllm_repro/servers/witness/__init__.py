"""Evidence that a server ran the patched source: log lines from a plugin in each of its processes.

A hash of the file on disk is not enough: another vLLM may come first on the path, or Python may run
an old compiled file. The plugin logs which patched files its process found, and which it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_repro.errors import InfraError
from vllm_repro_diagnosis.boot_facts import observed
from vllm_repro_diagnosis.log_text import read_lines

PLUGIN = Path(__file__).resolve().parent / "plugin"
"""Folder for PYTHONPATH, with the plugin and its entry point."""


@dataclass(frozen=True, kw_only=True)
class Patched:
    """A file of vLLM's source that an arm's patch changed, as the server found it."""

    # path below site-packages
    file: str
    # as the server found it
    sha256: str
    # changed functions that the lab replaces, so they did not run
    untried: tuple[str, ...] = ()


def witness_env(files: Iterable[str], *path: str) -> dict[str, str]:
    """Return the environment variables that make a server log its patched `files`.

    path: all entries for PYTHONPATH, in order; the plugin's folder must be one of them.
    """
    return {"PYTHONPATH": ":".join(filter(None, path)), "REPRO_PATCHED": ":".join(sorted(files))}


def witnessed(log: str, changed: Mapping[str, str], *, ready: bool) -> tuple[Patched, ...]:
    """Return the patched files that a server's processes reported in its `log`, once checked.

    changed: {file: sha256 of its patched text}. Raises `InfraError` if a process found or ran a
    different file, or if a ready server has not reported a file.
    """
    seen: dict[str, str] = {}
    for event in observed(read_lines(log)):
        if event.kind not in ("found", "imported", "stale"):
            continue
        file, digest = str(event.values["file"]), str(event.values["sha256"])
        if event.kind == "stale" or digest != changed.get(file):
            instead = (
                "an outdated compiled file"
                if event.kind == "stale"
                else f"a file with sha256 {digest[:12]}…"
            )
            raise InfraError(
                f"a process of the server uses {instead} instead of the patched {file}",
                hint=(
                    "another vLLM may come first on PYTHONPATH, or the release in the cache may be"
                    " damaged: vllm-repro doctor names its folder, remove it"
                ),
            )
        seen[file] = digest
    if ready and (missing := changed.keys() - seen.keys()):
        raise InfraError(
            f"no process of the server reported the patched {', '.join(sorted(missing))}",
            hint="unset VLLM_PLUGINS: it limits which plugins vLLM loads",
        )
    return tuple(Patched(file=file, sha256=digest) for file, digest in seen.items())
