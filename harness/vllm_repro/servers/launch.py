"""`Launch`: exactly what runs for an arm of a scenario, and every difference from the report.

`vllm-repro show` prints a `Launch` and a run starts one, so both have the same command.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.container import LOOPBACK, ContainerSpec, Mount
from vllm_repro.evidence import Evidence
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.tiny_model import TinyModel

__all__ = [
    "CONTAINER_MODEL",
    "NO_SOURCE_TO_CHANGE",
    "Launch",
    "ServedModel",
    "container_launch",
    "process_launch",
    "rehearsal_launch",
]

CONTAINER_MODEL = "/models/tiny"

CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: the default takes a share of the host's memory for each server
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_SHM_BYTES = 2**30
NO_SOURCE_TO_CHANGE = (
    "a rehearsal runs no vLLM, so there is no source to change: an arm that does so needs docker, process or the lab"
)
_IMITATED = "no vLLM at all: a rehearsal engine that imitates it"
_NO_WEIGHTS = "none: a rehearsal"
_DUMMY = "--load-format dummy"
_WHY_DUMMY = f"{_DUMMY}: random weights, since this death does not depend on them"
OFFLINE_ENV = {"HF_HUB_OFFLINE": "1"}  # a hub that does not answer costs minutes


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model to serve.

    path: a local folder; None if the server downloads `name`. dummy: random weights. tiny_model: shape of the tiny model in `path`.
    """

    name: str
    path: Path | None = None
    dummy: bool = False
    tiny_model: TinyModel | None = None

    def __str__(self) -> str:
        """Return which weights are served, for a report."""
        if self.tiny_model is not None:
            return f"{'dummy' if self.dummy else 'made'}: {self.tiny_model}, run by vLLM's {self.tiny_model.family}"
        return f"{'dummy, in the shape of' if self.dummy else 'real, of'} {self.name}"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What will run.

    differences: from the reported command, as sentences. weights: the served ones, in words; empty if unknown. tiny_model: the tiny model
    that is served, if one is.
    """

    kind: ServerKind
    evidence: Evidence
    command: ServeCommand
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    container: ContainerSpec | None = None
    differences: tuple[str, ...] = ()
    port: int = 0
    weights: str = ""
    tiny_model: TinyModel | None = None

    def render(self) -> str:
        """Return the command for a POSIX shell, without the name and labels that tie a container to one run."""
        if self.container is not None:
            return replace(self.container, name=None, labels=()).render()
        prefix = self._prefix()
        groups: list[list[str]] = []  # a flag and its values
        for word in self.argv[prefix:]:
            if word.startswith("-") or not groups:
                groups.append([])
            groups[-1].append(word)
        head = [*(f"{key}={shlex.quote(value)}" for key, value in self.env.items()), shlex.join(self.argv[:prefix])]
        return " \\\n".join(head) + "".join(f" \\\n  {shlex.join(group)}" for group in groups)

    def _prefix(self) -> int:
        """Return the number of words up to the model."""
        try:
            return self.argv.index("serve") + 2
        except ValueError:
            return 1


def _with_model(scenario: Scenario, arm: Arm, weights: ServedModel, seen_as: str) -> tuple[ServeCommand, list[str]]:
    if weights.tiny_model is not None:
        return _with_tiny_model(scenario, arm, weights.tiny_model, seen_as)
    command = scenario.command_of(arm)
    differences: list[str] = []
    if seen_as != command.model:
        served = "dummy weights in a local folder" if weights.dummy else weights.name
        differences.append(
            f"model: {served} in place of the reported one" + (f" ({scenario.model.why})" if scenario.model.why else "")
        )
        command = command.with_model(seen_as)
    if weights.dummy:
        command = command.with_flags(_DUMMY)
        differences.append(_WHY_DUMMY)
    return command, differences


def _with_tiny_model(
    scenario: Scenario, arm: Arm, tiny_model: TinyModel, seen_as: str
) -> tuple[ServeCommand, list[str]]:
    why = scenario.dummy.why if scenario.dummy else scenario.model.why
    differences = [
        f"model: dummy weights in the shape {tiny_model}, in place of the reported one" + (f" ({why})" if why else ""),
        *(f"{change}: {change.why}" for change in (scenario.dummy.changes if scenario.dummy else ())),
        *(
            f"{edit.in_dummy} in place of {edit.words.removeprefix('with ')}, sized for the tiny model's pool"
            for edit in arm.edits
            if edit.in_dummy
        ),
        _WHY_DUMMY,
    ]
    return scenario.command_with_dummy(arm).with_model(seen_as).with_flags(_DUMMY), differences


def process_launch(
    scenario: Scenario,
    arm: Arm,
    *,
    vllm: tuple[str, ...],
    env: Mapping[str, str],
    weights: ServedModel,
    port: int,
    evidence: Evidence,
) -> Launch:
    """Return the launch of a local vLLM. vllm: the words that call it."""
    command, differences = _with_model(scenario, arm, weights, str(weights.path or weights.name))
    command = command.with_flags(f"--host {LOOPBACK}", f"--port {port}")
    variables = {**dict(command.env), **(CPU_ENV if evidence is Evidence.CPU else {}), **env}
    if weights.path is not None:
        variables |= OFFLINE_ENV
    differences += [*arm.changed_source(), f"bound to {LOOPBACK}, on a free port"]
    if evidence is Evidence.CPU:
        differences.append("on the CPU, with " + ", ".join(f"{key}={value}" for key, value in CPU_ENV.items()))
    argv = (*vllm, "serve", *command.argv())
    return Launch(
        kind=ServerKind.PROCESS,
        evidence=evidence,
        command=command,
        argv=argv,
        env=variables,
        differences=tuple(differences),
        port=port,
        weights=str(weights),
        tiny_model=weights.tiny_model,
    )


def rehearsal_launch(
    scenario: Scenario, arm: Arm, *, engine: tuple[str, ...], version: str, model: str, port: int
) -> Launch:
    """Return the launch of the rehearsal engine as the release `version`. engine: the words that call it."""
    command, differences = _with_model(scenario, arm, ServedModel(name=model), model)
    command = command.with_flags(f"--host {LOOPBACK}", f"--port {port}")
    return Launch(
        kind=ServerKind.REHEARSAL,
        evidence=Evidence.REHEARSAL,
        command=command,
        argv=(*engine, "serve", *command.argv()),
        env=rehearsal_env(scenario, version),
        differences=(*differences, _IMITATED),
        port=port,
        weights=_NO_WEIGHTS,
    )


def rehearsal_env(scenario: Scenario, version: str) -> dict[str, str]:
    """Return the variables that select the release and model to imitate."""
    return {"VLLM_REHEARSAL_VERSION": version, "VLLM_REHEARSAL_SHAPE": json.dumps(scenario.model.shape())}


def container_launch(
    scenario: Scenario,
    arm: Arm,
    *,
    image: str,
    weights: ServedModel,
    port: int,
    evidence: Evidence,
    labels: Mapping[str, str],
    name: str | None = None,
    version: str | None = None,
    mounts: Sequence[Mount] = (),
    more_env: Mapping[str, str] | None = None,
) -> Launch:
    """Return the launch of a container of `image`, with GPUs if the evidence is to be of a GPU.

    mounts, more_env: the overlay with the arm's changes of vLLM's source.
    """
    inside = CONTAINER_MODEL if weights.path is not None else weights.name
    command, differences = _with_model(scenario, arm, weights, inside)
    model = [Mount(str(weights.path.resolve()), CONTAINER_MODEL, readonly=True)] if weights.path is not None else []
    env: dict[str, str] = {}
    if evidence is Evidence.REHEARSAL:
        env |= rehearsal_env(scenario, version or scenario.try_with)
        differences.append(_IMITATED)
    elif evidence is Evidence.CPU:
        env |= CPU_ENV
        differences.append("on the CPU, with " + ", ".join(f"{key}={value}" for key, value in CPU_ENV.items()))
    if weights.path is not None:
        env |= OFFLINE_ENV
    gpus = None
    if evidence is Evidence.GPU:
        gpus = (command.container.gpus if command.container else None) or str(scenario.needs.gpus)
    spec = ContainerSpec.from_command(
        command,
        port=port,
        image=image,
        labels=labels,
        name=name,
        env=env | dict(more_env or {}),
        gpus=gpus,
        mounts=[*model, *mounts],
    )
    if evidence is Evidence.CPU and spec.shm_size is None and spec.ipc is None:
        # On a CPU the worker is always a process of its own, and Docker's default of 64 MiB is too small for its queue.
        spec = replace(spec, shm_size=CPU_SHM_BYTES)
        differences.append("--shm-size 1g: on a CPU the worker is a process of its own and needs it")
    differences += [*arm.changed_source(), f"published on {LOOPBACK} only"]
    served = _NO_WEIGHTS if evidence is Evidence.REHEARSAL else str(weights)
    return Launch(
        kind=ServerKind.DOCKER,
        evidence=evidence,
        command=command,
        argv=spec.argv,
        env=dict(spec.env),
        container=spec,
        differences=tuple(differences),
        port=port,
        weights=served,
        tiny_model=weights.tiny_model,
    )
