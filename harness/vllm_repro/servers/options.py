"""Options that choose a server, and the image, model and needs that they imply."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_repro.command.command import ServeCommand
from vllm_repro.errors import UsageError
from vllm_repro.host.machine import Gpu, gpu_trouble, memory_gb
from vllm_repro.releases.tiny_model_folder import cached_model
from vllm_repro.scenario.scenario import Arm, Edit, Needs, Scenario
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import ServedModel
from vllm_repro.tiny_model import TinyModel

if TYPE_CHECKING:  # `show` takes no time without it
    from vllm_repro.releases.sources import Source


RANDOM_WEIGHTS = ("random", "dummy")
"""Values of `--weights` whose model is not trained: all its layers, or a tiny one."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options of the command line about servers. Their flags have the same names."""

    server: str = "auto"
    url: str | None = None
    image: str | None = None
    vllm: Source | None = None
    model: str | None = None
    weights: str | None = None
    log: Path | None = None
    patch: tuple[Path, ...] = ()

    def check(self) -> None:
        """Raise `UsageError` for an unknown kind of server or of weights."""
        servers, weights = ("auto", *ServerKind), ("real", *RANDOM_WEIGHTS)
        for name, known in (("server", servers), ("weights", weights)):
            value = getattr(self, name)
            if value is not None and value not in known:
                near = difflib.get_close_matches(str(value), known, n=1)
                raise UsageError(
                    f"{name}={value!r} is none of {', '.join(known)}",
                    hint=f"did you mean {near[0]}?" if near else f"name one of these {name}",
                )


def default_image(scenario: Scenario, version: str) -> str:
    """Return the Docker image to run: the reported one if it fits, else vLLM's own of `version`.

    The reported image fits if `version` is the scenario's `try_with`, the scenario needs GPUs, and
    the tag is neither `nightly` nor `latest`.
    """
    reported = scenario.reported().container
    # such tags have moved since
    pinned = reported is not None and not reported.image.endswith((":nightly", ":latest"))
    if reported is not None and pinned and scenario.needs.gpus and version == scenario.try_with:
        return reported.image
    repository = "vllm/vllm-openai" if scenario.needs.gpus else "vllm/vllm-openai-cpu"
    return f"{repository}:v{version.partition('+')[0]}"  # a tag cannot contain a build suffix


def unfit(needs: Needs, gpu: Gpu) -> str:
    """Return why `gpu` does not meet `needs`, as a phrase; empty if it does."""
    # a 16 GB card reports somewhat less
    if needs.gpu_memory_gb and gpu.memory_gb < needs.gpu_memory_gb * 0.98:
        return f"{gpu.name} has {gpu.memory_gb:g} GB"
    if needs.capability and gpu.capability and gpu.capability < needs.capability:
        return f"{gpu.name} has capability {gpu.capability:g}"
    return ""


def lacking(needs: Needs, here: tuple[Gpu, ...]) -> str:
    """Return what this machine lacks of `needs`, such as GPUs, as a sentence; empty if nothing."""
    if len(here) < needs.gpus:
        count = (
            "no NVIDIA GPU"
            if not here
            else f"{len(here)} NVIDIA GPU" + ("s" if len(here) > 1 else "")
        )
        return f"the scenario needs {needs}, and this machine has {count}" + (
            f": {why}" if (why := gpu_trouble()) else ""
        )
    small = [why for gpu in here if (why := unfit(needs, gpu))]
    if len(here) - len(small) < needs.gpus:
        return f"the scenario needs {needs}; {small[0]}"
    if needs.memory_gb * 0.9 > memory_gb():  # the system reserves part of the memory
        return f"the scenario needs {needs}, and this machine has {memory_gb():g} GB"
    return ""


def tiny_model_of(scenario: Scenario, options: ServerOptions) -> TinyModel | None:
    """Return the tiny model to make for a run; None if an existing model is served."""
    dummy = options.weights == "dummy" or (options.weights is None and scenario.model.tiny_will_do)
    return scenario.tiny_model if dummy and not options.model else None


def needs_of(scenario: Scenario, options: ServerOptions) -> Needs:
    """Return the hardware that a run of `scenario` with `options` needs: GPUs, memory.

    A tiny model fits any GPU, so only their number and capability count.
    """
    made = tiny_model_of(scenario, options) is not None
    return replace(scenario.needs, gpu_memory_gb=0) if made else scenario.needs


def weights_for(scenario: Scenario, options: ServerOptions) -> ServedModel:
    """Return the model that a run serves: that of `--model`, a tiny one, or the scenario's.

    Make the folder of a tiny model in the cache on first use. Raises `UsageError` for a folder that
    is not there or holds no model.
    """
    if options.model:
        folder = Path(options.model).expanduser()
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise UsageError(
                    f"{options.model} has no config.json, so it is no model folder",
                    hint="name the folder that holds config.json, or a model's name on the hub",
                )
            return ServedModel(
                name=folder.name, path=folder.resolve(), dummy=options.weights in RANDOM_WEIGHTS
            )
        if options.model.startswith(("/", "./", "../", "~")):
            raise UsageError(
                f"there is no folder {options.model}",
                hint="name a model folder, or a model's name on the hub",
            )
        return ServedModel(name=options.model, dummy=options.weights in RANDOM_WEIGHTS)
    tiny_model = tiny_model_of(scenario, options)
    if tiny_model is not None:
        return ServedModel(
            name=tiny_model.slug, path=cached_model(tiny_model), dummy=True, tiny_model=tiny_model
        )
    return ServedModel(name=scenario.model.name, dummy=options.weights in RANDOM_WEIGHTS)


def edited_command(
    scenario: Scenario, arm: Arm, kind: ServerKind, options: ServerOptions
) -> tuple[ServeCommand, TinyModel | None, Sequence[Edit]]:
    """Return the command of `arm` on servers of `kind`, its tiny model, and that model's edits.

    Flags that every server gets, such as `--port`, are not in it. The tiny model is None if there
    is none. Outside the lab, its folder is made on first use.
    """
    if kind.facts.in_lab and scenario.lab is not None:
        return (
            scenario.command_in_lab(arm),
            scenario.lab.shape(scenario.model),
            scenario.lab.changes,
        )
    if kind.facts.runs_vllm and (tiny_model := weights_for(scenario, options).tiny_model):
        return (
            scenario.command_with_dummy(arm),
            tiny_model,
            scenario.dummy.changes if scenario.dummy else (),
        )
    return scenario.command_of(arm), None, ()
