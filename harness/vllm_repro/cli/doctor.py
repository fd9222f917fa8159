"""`vllm-repro doctor`: the scenarios that this machine can run, and what the others need."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from vllm_repro.cli.common import add_common, print_json
from vllm_repro.errors import InfraError, ReproError, Unsupported
from vllm_repro.host.lease import lease_folder
from vllm_repro.host.machine import gpu_trouble, gpus, look
from vllm_repro.releases.disk import human_size
from vllm_repro.releases.local_vllm import local_vllm
from vllm_repro.releases.provision import LARGEST_INSTALL, ReleaseCache
from vllm_repro.scenario.catalogue import all_scenarios, to_stderr
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.servers.docker_engine import Engine, connect, gpu_prefix
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.orphans import find_orphans
from vllm_repro.servers.site import choose


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that this machine has or lacks, such as Docker: a line of output."""

    what: str
    # it is present
    ok: bool
    # what it is, or what to do
    detail: str


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vllm-repro doctor` to its parser."""
    add_common(
        parser,
        example="vllm-repro doctor",
        prints="a list of checks, each with its result and details",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what this machine has and which scenarios it can run, and return 0."""
    results = list(checks())
    if arguments.json:
        print_json([asdict(check) for check in results])
        return 0
    width = max(len(check.what) for check in results)
    for check in results:
        print(f"{'yes' if check.ok else 'no ':3}  {check.what.ljust(width)}  {check.detail}")
    return 0


def checks() -> Iterator[Check]:
    """Yield what this machine has, then whether each scenario can run on it."""
    machine, local, cache = look(), local_vllm(), ReleaseCache()
    about = f"{machine.os}, {machine.cpus} CPUs, {machine.memory_gb:g} GB, Python {machine.python}"
    yield _check("machine", about)
    cards = [f"{gpu.name}, {gpu.memory_gb:g} GB, driver {gpu.driver}" for gpu in gpus()]
    yield _check("NVIDIA GPUs", "; ".join(cards), gpu_trouble() or "nvidia-smi finds none")
    yield from _docker()
    on_path = f"{local.version} at {local.executable}" if local else ""
    yield _check(
        "vllm on PATH", on_path, "not installed; --vllm V installs a release into the cache"
    )
    releases = ", ".join(release.version for release in cache.cached())
    yield _check(
        "cached releases", releases and f"{releases} in {cache.root}", f"none in {cache.root}"
    )
    yield _check(
        "C++ compiler",
        shutil.which("g++") or shutil.which("clang++") or "",
        "none: a release on the CPU compiles its sampler at the first request, and dies where it"
        " cannot",
    )
    folder = next(path for path in (cache.root, *cache.root.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    space = f"{human_size(free)} free in {folder}"
    needed = f"{space}; up to {human_size(LARGEST_INSTALL)} are needed"
    yield _check("disk for releases", free >= LARGEST_INSTALL and space, needed)
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    missing = f"none at {hub}; a real model is downloaded by the server"
    yield _check("Hugging Face cache", hub.is_dir() and str(hub), missing)
    orphans = find_orphans().lines
    clean = not orphans and f"leases in {lease_folder()}"
    yield _check("nothing left over", clean, f"{'; '.join(orphans)}; vllm-repro clean --yes")
    yield from map(_runnable, all_scenarios(warn=to_stderr))


def _check(what: str, present: str | Literal[False], missing: str = "") -> Check:
    """Return a line of output: `present` if it is not empty, else `missing`, what to do."""
    return Check(what=what, ok=bool(present), detail=present or missing)


def _docker() -> Iterator[Check]:
    """Yield whether a Docker Engine answers here and, if so, whether its containers get GPUs."""
    try:
        with contextlib.closing(connect()) as engine:
            yield _check("docker", f"engine {engine.version} at {engine.host}")
            yield _gpus_in_containers(engine)
    except InfraError as error:
        yield _check("docker", "", f"{error}" + (f"; {error.hint}" if error.hint else ""))


def _gpus_in_containers(engine: Engine) -> Check:
    """Return whether the Docker Engine accepts a request for GPUs, and in which form."""
    try:
        how = "by CDI" if gpu_prefix(engine) else "with --gpus"
        return _check("GPUs in containers", f"the engine accepts a request for them, {how}")
    except (InfraError, Unsupported) as error:
        return _check("GPUs in containers", "", error.with_hint)


def _runnable(scenario: Scenario) -> Check:
    """Return whether this machine can run a scenario with vLLM's own code, and how."""
    try:
        choice = choose(scenario, ServerOptions())
    except ReproError as error:
        return _check(scenario.id, "", str(error))
    if choice.kind.facts.runs_vllm:
        return _check(scenario.id, f"would run by {choice.kind}: {choice.why}")
    why = f"would only be rehearsed by itself: {choice.why}"
    hint = f"; --server process --vllm {scenario.try_with} runs the real one"
    return _check(scenario.id, "", why if scenario.needs.gpus else why + hint)
