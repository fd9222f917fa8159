"""A vLLM general plugin: replaces the CUDA parts of a release, and nothing else, so that its own Python runs on a CPU.

vLLM loads it in each of its processes. It does nothing unless REPRO_LAB_MECHANISM names a mechanism (vLLM warns of names of its own
form, VLLM_…, that it does not know). It runs on vLLM's interpreter, with the
standard library, torch and vllm; nothing of the harness is there.

    REPRO_LAB_MECHANISM  for example "turboquant"
    REPRO_LAB_FACTS      where to write what is replaced, or what this release lacks
    REPRO_LAB_CAPTURE    "guard" or "record": what is done about graphs beside the mechanism
    REPRO_LAB_GRAPHS     the CUDA graph mode that the command line asks for: the CPU platform wipes it from vLLM's configuration
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from .parts import GRAPHS, MECHANISMS, Mechanism
from .record import Part, survey, write_once

__all__ = ["register"]

_done = False


def register() -> None:
    """The entry point. Ends the process with a sentence where this release lacks a name that would be replaced or used."""
    global _done
    name = os.environ.get("REPRO_LAB_MECHANISM")
    if not name or _done:
        return
    _done = True
    mechanism = MECHANISMS.get(name)
    if mechanism is None:
        sys.exit(f"the lab has no mechanism {name!r}; it has {', '.join(MECHANISMS)}")
    graphs = os.environ.get("REPRO_LAB_CAPTURE", "")
    if graphs and graphs not in GRAPHS:
        sys.exit(f"the lab knows {' and '.join(GRAPHS)} for graphs, and no {graphs!r}")
    _record(mechanism, graphs)
    if not graphs:
        mechanism.install(graphs)
        return
    from . import capture  # here, because it imports torch

    guard = capture.Guard()
    capture.install(guard)  # first: vLLM's custom operators are made known to torch while its modules are imported
    mechanism.install(graphs)
    from . import graphs as gpu_steps

    gpu_steps.install(guard, record=graphs == "record")


def _record(mechanism: Mechanism, graphs: str) -> None:
    """Checks the release once a boot: vLLM's first process writes the file, and the others find it there."""
    path = os.environ.get("REPRO_LAB_FACTS")
    if path and Path(path).exists():
        return
    found = survey(mechanism.parts_with(graphs), _source)
    if path:
        write_once(Path(path), {"mechanism": mechanism.name, **found.as_fields()})
    if found.missing:
        sys.exit(f"the lab cannot run this release: it has no {', '.join(found.missing)}")


def _source(part: Part) -> tuple[str, Path] | None:
    """Where the part's module lies: its name below the folder of packages, and its path. Imports nothing."""
    package, *rest = part.module.split(".")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0])
    for path in (folder.joinpath(*rest).with_suffix(".py"), folder.joinpath(*rest, "__init__.py")):
        if path.is_file():
            return str(path.relative_to(folder.parent)), path
    return None
