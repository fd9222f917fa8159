"""What proves that a server ran vLLM's source as it was changed for it: lines that its own processes put into its log.

A hash of the file on the disk says what lies there, and not what a running engine imported: another vLLM may come first on its path, and
a compiled file may be taken in its place. So a plugin in each of vLLM's processes says which changed files that process found, and of
which it runs the code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from vllm_repro.diagnosis.boot_facts import observed
from vllm_repro.diagnosis.log_text import read_lines
from vllm_repro.errors import InfraError
from vllm_repro.servers.base import Patched

__all__ = ["PLUGIN", "witness_env", "witnessed"]

PLUGIN = Path(__file__).resolve().parent / "plugin"
"""A folder for PYTHONPATH: the plugin and its metadata, by which vLLM finds it."""


def witness_env(files: Iterable[str], *path: str) -> dict[str, str]:
    """The variables of a server in which the changed `files` are to be seen. path: PYTHONPATH with the plugin among it, in order."""
    return {"PYTHONPATH": ":".join(filter(None, path)), "REPRO_PATCHED": ":".join(sorted(files))}


def witnessed(log: str, changed: Mapping[str, str], *, ready: bool) -> tuple[Patched, ...]:
    """Which of the `changed` files, {name: sha256}, the processes found that wrote `log`.

    Raises `InfraError` where one of them found or ran anything else, and where a server is ready and none has said a word.
    """
    found: dict[str, str] = {}
    for one in observed(read_lines(log)):
        if one.kind not in ("found", "imported", "stale"):
            continue
        file, digest = str(one.values["file"]), str(one.values["sha256"])
        if one.kind == "stale" or digest != changed.get(file):
            instead = "an older compiled form of it" if one.kind == "stale" else f"one of sha256 {digest[:12]}…"
            raise InfraError(
                f"a process of the server has {instead} in place of the patched {file}",
                hint="another vLLM may lie before it on PYTHONPATH, or the cache be damaged: vllm-repro clean --envs --yes",
            )
        found[file] = digest
    if ready and (missing := changed.keys() - found.keys()):
        raise InfraError(
            f"no process of the server said that it found the patched {', '.join(sorted(missing))}",
            hint="unset VLLM_PLUGINS where it is set: it keeps vLLM from loading the plugin that looks",
        )
    return tuple(Patched(file=file, sha256=digest) for file, digest in found.items())
