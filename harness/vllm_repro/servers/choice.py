"""Which server a run uses: what the command line says of it, and the answer to `--server auto`.

Docker when an engine has what the scenario needs, else a local vLLM with the GPUs it needs, else the lab where the scenario has one, else
the rehearsal engine. The answer comes with its reason, since what a run is evidence of depends on it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_repro.errors import InfraError, UsageError
from vllm_repro.host.machine import Gpu, gpus, memory_gb
from vllm_repro.releases.localvllm import local_vllm
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.tinymodel import cached_model
from vllm_repro.scenario.scenario import Needs, Scenario
from vllm_repro.servers.base import ServerKind
from vllm_repro.servers.docker_engine import connect, image_facts
from vllm_repro.servers.launch import Weights
from vllm_repro.tiny_model import StandIn

__all__ = [
    "Choice",
    "Options",
    "choose",
    "default_image",
    "lacking",
    "needs_of",
    "stand_in_of",
    "usual_release",
    "weights_for",
]


@dataclass(frozen=True)
class Options:
    """What the command line says about servers."""

    server: str = "auto"
    url: str | None = None
    image: str | None = None
    vllm: str | None = None
    model: str | None = None
    weights: str | None = None
    port: int | None = None
    log: Path | None = None
    patch: Path | None = None
    guard: bool = False
    record: bool = False


@dataclass(frozen=True)
class Choice:
    """The kind that `auto` picked, and the sentence that says why."""

    kind: ServerKind
    why: str


def default_image(scenario: Scenario, version: str) -> str:
    """The reported image for the release that the scenario names, and for any other release the official one of it."""
    reported = scenario.reported().container
    pinned = reported is not None and not reported.image.endswith((":nightly", ":latest"))  # those have moved on since
    if reported is not None and pinned and scenario.needs.gpus and version == scenario.try_with:
        return reported.image
    repository = "vllm/vllm-openai" if scenario.needs.gpus else "vllm/vllm-openai-cpu"
    return f"{repository}:v{version.partition('+')[0]}"  # a tag cannot hold a build's own suffix


def usual_release(scenario: Scenario, kind: ServerKind) -> str | None:
    """The release of a run that names none; None where the server decides."""
    return {ServerKind.REHEARSAL: scenario.try_with, ServerKind.LAB: scenario.try_in_lab}.get(kind)


def lacking(needs: Needs, here: tuple[Gpu, ...]) -> str:
    """What this machine lacks, as a sentence; empty where nothing is."""
    if len(here) < needs.gpus:
        count = "no NVIDIA GPU" if not here else f"{len(here)} NVIDIA GPU" + ("s" if len(here) > 1 else "")
        return f"the scenario needs {needs}, and this machine has {count}"
    for gpu in here[: needs.gpus]:
        if needs.gpu_memory_gb and gpu.memory_gb < needs.gpu_memory_gb * 0.98:  # a 16 GB card reports somewhat less
            return f"the scenario needs {needs}; {gpu.name} has {gpu.memory_gb:g} GB"
        if needs.capability and gpu.capability and gpu.capability < needs.capability:
            return f"the scenario needs {needs}; {gpu.name} has capability {gpu.capability:g}"
    if needs.memory_gb * 0.9 > memory_gb():  # part of what is installed is the system's
        return f"the scenario needs {needs}, and this machine has {memory_gb():g} GB"
    return ""


def stand_in_of(scenario: Scenario, options: Options) -> StandIn | None:
    """The model that is made for a run with `options`; None where one is served that is there already."""
    asked = options.weights == "dummy" or (options.weights is None and scenario.model.tiny_will_do)
    return scenario.stand_in if asked and not options.model else None


def needs_of(scenario: Scenario, options: Options) -> Needs:
    """What a run with `options` needs. A stand-in fits any GPU, so that only their number and capability are left of the reported ones."""
    made = stand_in_of(scenario, options) is not None
    return replace(scenario.needs, gpu_memory_gb=0) if made else scenario.needs


def weights_for(scenario: Scenario, options: Options) -> Weights:
    """The model to serve. Raises `UsageError` for a folder that is no model."""
    if options.model:
        folder = Path(options.model).expanduser()
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise UsageError(
                    f"{options.model} has no config.json, so it is no model folder",
                    hint="name the folder that holds config.json, or a model's name on the hub",
                )
            return Weights(folder.name, folder.resolve(), dummy=options.weights == "dummy")
        if options.model.startswith(("/", "./", "../", "~")):
            raise UsageError(
                f"there is no folder {options.model}", hint="name a model folder, or a model's name on the hub"
            )
        return Weights(options.model, dummy=options.weights == "dummy")
    stand_in = stand_in_of(scenario, options)
    if stand_in is not None:
        return Weights(stand_in.slug, cached_model(stand_in), dummy=True, stand_in=stand_in)
    return Weights(scenario.model.name, dummy=options.weights == "dummy")


def choose(scenario: Scenario, options: Options, *, download: bool = True) -> Choice:
    """What `--server auto` means for this scenario on this machine.

    download: whether gigabytes may be fetched for the lab. A test suite that nobody watches does not fill a disk unasked.
    """
    if options.url:
        return Choice(ServerKind.ATTACH, "a URL was given")
    needs = needs_of(scenario, options)
    missing = lacking(needs, gpus())
    # Where a CPU's bug goes to the lab, a release as it is installed here lacks something for it.
    alone = not needs.gpus and scenario.lab is None
    if missing and not lacking(needs_of(scenario, replace(options, weights="dummy")), gpus()):
        missing += "; --weights dummy runs on it"
    docker = _docker_has(scenario, options, missing)
    if docker:
        return Choice(ServerKind.DOCKER, docker)
    if options.image:
        return Choice(ServerKind.DOCKER, "an image was given")
    if not missing:
        if options.vllm and alone:
            return Choice(
                ServerKind.PROCESS, f"vLLM {options.vllm} runs on this CPU, which is all that the scenario needs"
            )
        found = local_vllm()
        if found is not None:
            return Choice(
                ServerKind.PROCESS,
                f"vllm {found.version or ''} is installed here, with what the scenario needs".replace("  ", " "),
            )
        if alone and ReleaseCache().get(scenario.try_with):
            return Choice(
                ServerKind.PROCESS,
                f"vLLM {scenario.try_with} is in the cache, and a CPU is all that the scenario needs",
            )
        why = "no vllm is installed here, and no image of it" if not needs.gpus else "no vllm is installed here"
    else:
        why = missing
    version = options.vllm or scenario.try_in_lab
    if scenario.lab is not None and not options.model and options.weights != "real":
        if download or ReleaseCache().get(version):
            return Choice(ServerKind.LAB, why)
        why += f"; --scenario-server lab installs vLLM {version} and runs it without"
    return Choice(ServerKind.REHEARSAL, why)


def _docker_has(scenario: Scenario, options: Options, missing: str) -> str:
    """Why Docker will do, or an empty string."""
    if missing:
        return ""
    image = options.image or default_image(scenario, options.vllm or scenario.try_with)
    with (
        contextlib.suppress(InfraError),  # no engine, or one without the image, is an answer
        contextlib.closing(connect()) as engine,
    ):
        if not scenario.needs.gpus or "nvidia" in engine.runtimes:
            image_facts(engine, image)
            return f"Docker {engine.version} has the image {image}"
    return ""
