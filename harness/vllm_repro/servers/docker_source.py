"""Files of vLLM in an image.

Only the interpreter that runs vLLM knows where it is installed. So it runs a short program in a
separate container. All calls block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from vllm_repro.command.container import CAPABILITIES, SECURITY, ContainerSpec
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.host.lease import Lease
from vllm_repro.servers.docker_engine import (
    LEASE_LABEL,
    RUN_LABEL,
    Engine,
    engine_errors,
    explain,
    image_facts,
)

# The first line of the `vllm` script names the interpreter. An image without the script starts
# `python3 -m vllm…`.
_BY_ITS_PYTHON = """
python=python3
if vllm=$(command -v vllm) && IFS= read -r first <"$vllm"; then
    case $first in "#!"*python*) python=${first#??} ;; esac
fi
exec $python "$@"
"""

_READ = """
import importlib.util, json, os, sys
sys.path[:] = filter(None, sys.path)  # no server has the working folder on its path
spec = importlib.util.find_spec("vllm")
places = list(spec.submodule_search_locations or ()) if spec else []
folder = os.path.dirname(places[0]) if places else None
files = {}
for name in sys.argv[1:] if folder else ():
    path = os.path.join(folder, name)
    if os.path.isfile(path):
        compiled = importlib.util.cache_from_source(path)
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
        compiled = compiled if os.path.exists(compiled) else ""
        files[name] = {"path": path, "text": text, "compiled": compiled}
found = {"folder": folder, "pythonpath": os.environ.get("PYTHONPATH", ""), "files": files}
print(json.dumps(found))
"""


@dataclass(frozen=True)
class SourceFile:
    """A Python file of vLLM in a Docker image: its path and text, and its .pyc's path."""

    # in the container
    path: str
    text: str
    # path of its .pyc file, or ""
    compiled: str


@dataclass(frozen=True)
class ImageSource:
    """Python files of vLLM in a Docker image, by name, and the PYTHONPATH of its containers."""

    # PYTHONPATH in its containers
    pythonpath: str
    # by name below site-packages; files that the image lacks are left out
    files: Mapping[str, SourceFile]


def image_source(
    engine: Engine, spec: ContainerSpec, files: Sequence[str], run: str
) -> ImageSource:
    """Read these `files` of vLLM's source from the image of `spec`, in a short-lived container.

    run: id of the run, for the labels. Raises `Unsupported` for an image without vLLM, and
    `InfraError` if the image is missing or its Python does not run.
    """
    image = image_facts(engine, spec.image)
    if image.rehearsal:
        raise Unsupported(
            f"the image {spec.image} holds the rehearsal engine, and no vLLM whose source could be"
            " changed",
            hint="--image names one with a vLLM",
        )
    sources = _find_files(engine, spec, files, run)
    if sources["folder"] is None:
        raise Unsupported(
            f"the Python of the image {spec.image} finds no vLLM whose source could be changed",
            hint="--image names one with a vLLM",
        )
    return ImageSource(
        sources["pythonpath"], {name: SourceFile(**file) for name, file in sources["files"].items()}
    )


def _find_files(
    engine: Engine, spec: ContainerSpec, files: Sequence[str], run: str
) -> dict[str, Any]:
    """Run the image's Python to find vLLM's folder, PYTHONPATH and `files`; return its JSON.

    Keys: `folder` (None without vLLM), `pythonpath`, and `files`, by name with the fields of
    `SourceFile`. Raises `InfraError` or `Unsupported` if it does not run.
    """
    from docker.errors import ContainerError

    lease = Lease(f"the run {run}")
    try:
        output = engine.client.containers.run(
            spec.image,
            entrypoint=["/bin/sh"],
            command=["-c", _BY_ITS_PYTHON, "sh", "-c", _READ, *files],
            environment=dict(spec.env),
            labels={RUN_LABEL: run, LEASE_LABEL: lease.path.name},
            network_mode="none",
            cap_drop=["ALL"],
            cap_add=list(CAPABILITIES),
            security_opt=[SECURITY],
            remove=True,
        )
    except ContainerError as error:
        lease.release()
        errors = " ".join(cast(bytes, error.stderr).decode(errors="replace").split())[-300:]
        raise InfraError(
            f"the image {spec.image} does not say where its vLLM is:"
            f" {errors or f'exit status {error.exit_status}'}",
            hint="it needs a /bin/sh, and a Python that has vLLM",
        ) from error
    except engine_errors() as error:
        lease.free()  # the container may exist
        raise explain(error) from error
    lease.release()
    sources: dict[str, Any] = json.loads(output.splitlines()[-1])
    return sources
