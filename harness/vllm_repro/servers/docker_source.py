"""vLLM's own files in an image, and in a container that runs it: asked of the Python that is in there.

Where vLLM is installed differs from image to image, and only the interpreter that its command names knows. So a short program is run by
that interpreter: in a container of its own to read the files, and in the running server's to hash them. Blocking calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_repro.command.container import ContainerSpec
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.servers.docker_engine import Engine, image_facts, our_labels
from vllm_repro.servers.docker_errors import ENGINE_ERRORS, explain
from vllm_repro.servers.docker_orphans import remove_container

__all__ = ["ImageSource", "SourceFile", "hashes_inside", "image_source"]

# The first line of the `vllm` script names the interpreter that has it; an image without the script starts `python3 -m vllm…`.
_BY_ITS_PYTHON = """
python=python3
if vllm=$(command -v vllm) && IFS= read -r first <"$vllm"; then
    case $first in "#!"*python*) python=${first#??} ;; esac
fi
exec $python "$@"
"""

_READ = """
import importlib.util, json, os, sys
sys.path[:] = filter(None, sys.path)  # the folder that this is asked in is on no server's path
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
        files[name] = {"path": path, "text": text, "compiled": compiled if os.path.exists(compiled) else ""}
found = {"python": sys.executable, "folder": folder, "pythonpath": os.environ.get("PYTHONPATH", ""), "files": files}
print(json.dumps(found))
"""

_HASH = """
import hashlib, json, sys
print(json.dumps([hashlib.sha256(open(path, "rb").read()).hexdigest() for path in sys.argv[1:]]))
"""


@dataclass(frozen=True)
class SourceFile:
    """A file of vLLM's in an image. path: in there. compiled: the path of what Python compiled it to; empty where there is none."""

    path: str
    text: str
    compiled: str


@dataclass(frozen=True)
class ImageSource:
    """Files of the vLLM in an image, by their names below the folder of packages; those that it lacks are left out.

    python: the interpreter's path in there. pythonpath: what PYTHONPATH is in its containers.
    """

    python: str
    pythonpath: str
    files: Mapping[str, SourceFile]


def image_source(engine: Engine, spec: ContainerSpec, files: Sequence[str], run: str) -> ImageSource:
    """The `files` as a container of `spec` would have them. run: id of the run, for the labels of the one that is asked.

    Raises `Unsupported` for an image without a vLLM, and `InfraError` where nothing in it can be asked.
    """
    image = image_facts(engine, spec.image)
    if image.rehearsal:
        raise Unsupported(
            f"the image {spec.image} holds the rehearsal engine, and no vLLM whose source could be changed",
            hint="--image names one with a vLLM",
        )
    found = _asked(engine, spec, files, run)
    if found["folder"] is None:
        raise Unsupported(
            f"the Python of the image {spec.image} finds no vLLM whose source could be changed",
            hint="--image names one with a vLLM",
        )
    return ImageSource(
        found["python"], found["pythonpath"], {name: SourceFile(**file) for name, file in found["files"].items()}
    )


def hashes_inside(engine: Engine, container: str, python: str, paths: Sequence[str]) -> tuple[str, ...]:
    """sha256 of files as a program finds them that is run in a running container. Raises `InfraError` where it cannot be run."""
    try:
        made = engine.client.api.exec_create(container, [python, "-c", _HASH, *paths], stderr=True)
        output, errors = engine.client.api.exec_start(made["Id"], demux=True)
        return tuple(json.loads(output or b""))
    except ENGINE_ERRORS as error:
        raise explain(error, "") from error
    except ValueError:
        said = " ".join((errors or b"").decode(errors="replace").split())[-300:]
        raise InfraError(f"the files in container {container[:12]} cannot be hashed: {said}") from None


def _asked(engine: Engine, spec: ContainerSpec, files: Sequence[str], run: str) -> dict[str, Any]:
    container: str | None = None
    try:
        made = engine.client.containers.create(
            spec.image,
            entrypoint=["/bin/sh"],
            command=["-c", _BY_ITS_PYTHON, "sh", "-c", _READ, *files],
            environment=dict(spec.env),
            labels=our_labels(run),
            network_mode="none",
        )
        container = made.id
        assert container is not None
        made.start()
        status = made.wait()["StatusCode"]
        said = made.logs(stdout=True, stderr=False).decode(errors="replace")
        if status:
            errors = " ".join(made.logs(stdout=False, stderr=True).decode(errors="replace").split())[-300:]
            raise InfraError(
                f"the image {spec.image} does not say where its vLLM is: {errors or f'exit status {status}'}",
                hint="it needs a /bin/sh, and a Python that has vLLM",
            )
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found
    except ENGINE_ERRORS as error:
        raise explain(error, spec.image) from error
    finally:
        if container is not None:
            remove_container(engine, container)
