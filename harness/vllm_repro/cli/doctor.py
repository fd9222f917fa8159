"""`vllm-repro doctor`: the scenarios that this machine can run, and what is missing for the others."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_repro.cli.common import add_common, print_json
from vllm_repro.errors import InfraError, ReproError
from vllm_repro.host.lease import lease_folder
from vllm_repro.host.machine import gpus, look
from vllm_repro.host.ports import free_port
from vllm_repro.releases.disk import human_size
from vllm_repro.releases.local_vllm import local_vllm
from vllm_repro.releases.provision import LARGEST_INSTALL, ReleaseCache
from vllm_repro.scenario.catalogue import all_scenarios, to_stderr
from vllm_repro.servers.docker_engine import connect
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.orphans import find_orphans
from vllm_repro.servers.site import choose


@dataclass(frozen=True)
class Check:
    """One line of output. ok: it is present. detail: what it is, or what to do."""

    what: str
    ok: bool
    detail: str


def add(parser: argparse.ArgumentParser) -> None:
    add_common(parser, example="vllm-repro doctor", prints="a list of checks, each with its result and details")


def run(arguments: argparse.Namespace) -> int:
    found = list(checks())
    if arguments.json:
        print_json([asdict(check) for check in found])
        return 0
    width = max(len(check.what) for check in found)
    for check in found:
        print(f"{'yes' if check.ok else 'no ':3}  {check.what.ljust(width)}  {check.detail}")
    return 0


def checks() -> Iterator[Check]:
    machine = look()
    yield Check(
        "machine", True, f"{machine.os}, {machine.cpus} CPUs, {machine.memory_gb:g} GB, Python {machine.python}"
    )
    cards = gpus()
    yield Check(
        "NVIDIA GPUs",
        bool(cards),
        "; ".join(f"{g.name}, {g.memory_gb:g} GB, driver {g.driver}" for g in cards) or "nvidia-smi finds none",
    )
    yield from _docker()
    local = local_vllm()
    yield Check(
        "vllm on PATH",
        local is not None,
        f"{local.version} at {local.executable}"
        if local
        else "not installed; --vllm V installs a release into the cache",
    )
    cache = ReleaseCache()
    cached = cache.cached()
    releases = ", ".join(release.version for release in cached)
    yield Check(
        "cached releases",
        bool(releases),
        f"{releases or 'none'} in {cache.root}",
    )
    compiler = shutil.which("g++") or shutil.which("clang++")
    yield Check(
        "C++ compiler",
        compiler is not None,
        compiler or "none: a release on the CPU compiles its sampler at the first request, and dies where it cannot",
    )
    folder = next(path for path in (cache.root, *cache.root.parents) if path.exists())
    free, needed = shutil.disk_usage(folder).free, LARGEST_INSTALL
    yield Check(
        "disk for releases",
        free >= needed,
        f"{human_size(free)} free in {folder}" + ("" if free >= needed else f"; up to {human_size(needed)} are needed"),
    )
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    yield Check(
        "Hugging Face cache",
        hub.is_dir(),
        str(hub) if hub.is_dir() else f"none at {hub}; a real model is downloaded by the server",
    )
    try:
        yield Check("loopback ports", True, f"a free one is {free_port()}")
    except OSError as error:
        yield Check("loopback ports", False, f"none can be bound: {error.strerror}")
    left = find_orphans().lines
    yield Check(
        "nothing left over",
        not left,
        "; ".join(left) + "; vllm-repro clean --yes" if left else f"leases in {lease_folder()}",
    )
    for scenario in all_scenarios(warn=to_stderr):
        try:
            choice = choose(scenario, ServerOptions())
            real = choice.kind.facts.runs_vllm
            how = f"would run by {choice.kind}" if real else "would only be rehearsed by itself"
            hint = (
                ""
                if real or scenario.needs.gpus
                else f"; --server process --vllm {scenario.try_with} runs the real one"
            )
            yield Check(scenario.id, real, f"{how}: {choice.why}{hint}")
        except ReproError as error:
            yield Check(scenario.id, False, str(error))


def _docker() -> Iterator[Check]:
    try:
        engine = connect()
    except InfraError as error:
        yield Check("docker", False, f"{error}" + (f"; {error.hint}" if error.hint else ""))
        return
    nvidia = "nvidia" in engine.runtimes
    yield Check("docker", True, f"engine {engine.version} at {engine.host}")
    yield Check(
        "NVIDIA runtime",
        nvidia,
        "registered with the engine" if nvidia else "not registered with the engine: a GPU request may fail at start",
    )
