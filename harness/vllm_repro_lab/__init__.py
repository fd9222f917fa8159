"""vLLM general plugin that replaces parts of a release, so that the rest runs on a CPU.

vLLM loads it in each of its processes, on vLLM's interpreter: it may import the standard library,
torch and vllm, but not `vllm_repro`. It does nothing unless REPRO_LAB_MECHANISM is set. The names
do not start with VLLM_: vLLM warns of unknown names of that form.

    REPRO_LAB_MECHANISM  a key of `MECHANISMS`, for example "turboquant"
    REPRO_LAB_EVIDENCE   the mark of the log's first line: LAB, or SCHEDULER ONLY if no model runs
    REPRO_LAB_FACTS      the JSON file to write: replaced names, and those that this release lacks
    REPRO_LAB_CAPTURE    "guard" or "record": check, or also record, the capture of CUDA graphs
    REPRO_LAB_GRAPHS     the CUDA graph mode of the command line; the CPU platform removes it from
                         vLLM's configuration
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from .parts import GRAPHS, MECHANISMS, Mechanism
from .record import Part, survey, write_atomically

_done = False


def register() -> None:
    """Install the mechanism that REPRO_LAB_MECHANISM names; vLLM's plugin entry point.

    Do nothing without that variable, or if called again. Exit with a message for an unknown value,
    or if this release lacks a name that the mechanism replaces or uses.
    """
    global _done
    name = os.environ.get("REPRO_LAB_MECHANISM")
    if not name or _done:
        return
    _done = True
    mechanism = MECHANISMS.get(name)
    if mechanism is None:
        sys.exit(f"the lab has no mechanism {name!r}; choose one of {', '.join(MECHANISMS)}")
    graphs = os.environ.get("REPRO_LAB_CAPTURE", "")
    if graphs and graphs not in GRAPHS:
        sys.exit(f"REPRO_LAB_CAPTURE is {graphs!r}; it must be {' or '.join(GRAPHS)}")
    _check_release(mechanism, graphs)
    if graphs:
        from . import capture  # here, because it imports torch

        guard = capture.Guard()
        # first: importing vLLM's modules registers its custom operators with torch
        capture.install(guard)
    mechanism.install(graphs)
    _keep_one_operator_library()
    if graphs:
        from . import graphs as gpu_steps

        gpu_steps.install(guard, record=graphs == "record")


def _keep_one_operator_library() -> None:
    """Make `import vllm._C` raise ImportError if vLLM has loaded `_C_AVX512` or `_C_AVX2` instead.

    TurboQuant imports vLLM's ROCm platform, which imports `vllm._C` and handles an ImportError.
    Without this, torch aborts the process, because both libraries register the same operators.
    """
    if "/_C_AVX" in Path("/proc/self/maps").read_text(encoding="utf-8"):
        sys.modules.setdefault("vllm._C", None)  # type: ignore[arg-type]  # None refuses an import


def _check_release(mechanism: Mechanism, graphs: str) -> None:
    """Check, once per boot, that the release has the names that the lab replaces; exit if not.

    Write the names to the file of REPRO_LAB_FACTS, and print the mark of the log. vLLM's first
    process does this; if the file exists, do nothing. graphs: the value of REPRO_LAB_CAPTURE.
    """
    path = os.environ.get("REPRO_LAB_FACTS")
    if path and Path(path).exists():
        return
    surveyed = survey(mechanism.parts_with(graphs), _source)
    if path:
        write_atomically(Path(path), {"mechanism": mechanism.name, **surveyed.as_fields()})
    if surveyed.missing:
        sys.exit(f"the lab cannot run this release: it has no {', '.join(surveyed.missing)}")
    # So that a log shows it, even if somebody attaches to this server or pastes its log.
    print(
        f"{os.environ.get('REPRO_LAB_EVIDENCE', 'LAB')}: vllm_repro_lab replaces parts of this vLLM"
        f" (mechanism {mechanism.name})",
        file=sys.stderr,
        flush=True,
    )


def _source(part: Part) -> tuple[str, Path] | None:
    """Return (path below site-packages, full path) of the part's module; None if it is missing.

    The module is not imported.
    """
    package, *rest = part.module.split(".")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0])
    for path in (folder.joinpath(*rest).with_suffix(".py"), folder.joinpath(*rest, "__init__.py")):
        if path.is_file():
            return str(path.relative_to(folder.parent)), path
    return None
