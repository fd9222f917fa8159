"""Body fields and flags that an installed vLLM reads, from its API server's schema and parser.

No server is started.
"""

from __future__ import annotations

import json
import subprocess

from vllm_repro.client.client import fields_of
from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.releases.provision import Release, ReleaseCache
from vllm_repro.releases.sources import Source

_APPS = ("launchers.app", "openai.api_server")
_ARGUMENTS = ("common.cli_args", "launchers.cli_args", "openai.cli_args")
"""Modules below `vllm.entrypoints`, the newest first."""

_PROGRAM = """
import importlib, inspect, json, sys
sys.path.insert(0, sys.argv[1])
app, arguments = (importlib.import_module(f"vllm.entrypoints.{name}") for name in sys.argv[2:])
parsed = arguments.make_arg_parser(arguments.FlexibleArgumentParser()).parse_args([])
takes = inspect.signature(app.build_app).parameters
more = {"supported_tasks": ("generate",)} if "supported_tasks" in takes else {}
made = app.build_app(parsed, **more)
print("\\n" + json.dumps(made.openapi()))
"""

_FLAGS = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
arguments = importlib.import_module(f"vllm.entrypoints.{sys.argv[2]}")
parser = arguments.make_arg_parser(arguments.FlexibleArgumentParser())
print("\\n" + json.dumps([name for action in parser._actions for name in action.option_strings]))
"""


def request_fields(source: Source) -> dict[str, frozenset[str]]:
    """Return the names of the request body fields that a cached vLLM reads, by endpoint.

    Raises `InfraError` if it is not in the cache, `Unsupported` if it does not show them, and
    `UsageError` if `source` is no vLLM.
    """
    release = ReleaseCache().get(source)
    if release is None:
        raise InfraError(
            f"vLLM {source} is not in the cache",
            hint=f"vllm-repro run SCENARIO --server lab --vllm {source} installs it",
        )
    done = _run_program(release, _PROGRAM, _APPS, _ARGUMENTS)
    fields = fields_of(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else {}
    if not fields:
        why = (done.stderr.splitlines() or ["it has no schema"])[-1]
        raise Unsupported(
            f"cannot read the request fields of vLLM {release.version}: {why}",
            hint="name another release",
        )
    return fields


def server_flags(source: Source) -> frozenset[str] | None:
    """Return the flags of `vllm serve` in a cached vLLM, spelt as in its parser.

    None if the vLLM is not in the cache or shows no flags.
    """
    try:
        release = ReleaseCache().get(source)
    except UsageError:  # a version that was never published
        return None
    done = _run_program(release, _FLAGS, _ARGUMENTS) if release else None
    return (
        None
        if done is None or done.returncode
        else frozenset(json.loads(done.stdout.splitlines()[-1]))
    )


def _run_program(
    release: Release, program: str, *modules: tuple[str, ...]
) -> subprocess.CompletedProcess[str]:
    """Run a Python program on the release's interpreter; return its outputs and exit status.

    The program gets as arguments the release's site-packages and a name from each tuple in
    `modules`: the first that the release has, else the last. Raise nothing if it fails.
    """
    below = release.packages / "vllm" / "entrypoints"
    present = [
        next(
            (name for name in names if (below / f"{name.replace('.', '/')}.py").is_file()),
            names[-1],
        )
        for names in modules
    ]
    command = [str(release.python), "-I", "-c", program, str(release.packages), *present]
    return subprocess.run(command, capture_output=True, text=True, check=False)
