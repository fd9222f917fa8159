"""Body fields that an installed vLLM reads, from the schema of its API server. No server is started."""

from __future__ import annotations

import json
import subprocess

from vllm_repro.client.client import fields_of
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.releases.provision import ReleaseCache

__all__ = ["request_fields"]

_APPS = ("launchers.app", "openai.api_server")
_ARGUMENTS = ("common.cli_args", "launchers.cli_args", "openai.cli_args")
"""Modules below `vllm.entrypoints`, the newest first."""

_PROGRAM = """
import importlib, inspect, json, sys
sys.path.insert(0, sys.argv[1])
app, arguments = (importlib.import_module(f"vllm.entrypoints.{name}") for name in sys.argv[2:])
parsed = arguments.make_arg_parser(arguments.FlexibleArgumentParser()).parse_args([])
takes = inspect.signature(app.build_app).parameters
made = app.build_app(parsed, **({"supported_tasks": ("generate",)} if "supported_tasks" in takes else {}))
print("\\n" + json.dumps(made.openapi()))
"""


def request_fields(source: str) -> dict[str, frozenset[str]]:
    """Return the body fields that each endpoint of a vLLM in the cache reads.

    Raises `InfraError` if it is not there, and `Unsupported` if it does not show them.
    """
    release = ReleaseCache().get(source)
    if release is None:
        raise InfraError(
            f"vLLM {source} is not in the cache",
            hint=f"vllm-repro run SCENARIO --server lab --vllm {source} installs it",
        )
    below = release.packages / "vllm" / "entrypoints"
    found = [
        next((name for name in names if (below / f"{name.replace('.', '/')}.py").is_file()), names[-1])
        for names in (_APPS, _ARGUMENTS)
    ]
    command = [str(release.python), "-I", "-c", _PROGRAM, str(release.packages), *found]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    fields = fields_of(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else {}
    if not fields:
        why = (done.stderr.splitlines() or ["it has no schema"])[-1]
        raise Unsupported(
            f"cannot read the request fields of vLLM {release.version}: {why}", hint="name another release"
        )
    return fields
