"""`Launch`: exactly what runs for an arm of a scenario, and every difference from the report.

`vllm-repro show` prints a `Launch` and a run starts one, so both have the same command.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.container import CAPABILITIES, LOOPBACK, ContainerSpec, Mount
from vllm_repro.command.flags import group_by_flag
from vllm_repro.errors import HarnessBug
from vllm_repro.releases.families import model_config
from vllm_repro.scenario.scenario import Arm, Model, Scenario
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.tiny_model import TinyModel
from vllm_repro_diagnosis.evidence import Evidence

if TYPE_CHECKING:  # most servers are no release of the cache
    from vllm_repro.releases.provision import Release

CONTAINER_MODEL = "/models/tiny"
"""Where a container sees a local model folder."""
CPU_ENV = {
    # GiB: the default is a share of the host's memory for each server
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
ON_CPU = "on the CPU, with " + ", ".join(f"{name}={value}" for name, value in CPU_ENV.items())
OFFLINE_ENV = {"HF_HUB_OFFLINE": "1"}  # vLLM waits minutes for a hub that does not answer
NO_SOURCE_TO_CHANGE = (
    "a rehearsal runs no vLLM, so there is no source to change: an arm that does so needs docker,"
    " process or the lab"
)
_CPU_SHM_BYTES = 2**30
_IMITATED = "no vLLM at all: a rehearsal engine that imitates it"
_NO_WEIGHTS = "none: a rehearsal"
_DUMMY = "--load-format dummy"
FIRST_RUNNER = ("VLLM_USE_V2_MODEL_RUNNER", "0")
"""Variable that makes vLLM use its first model runner."""
WHY_FIRST_RUNNER = (
    "the lab is made for the first model runner; on GPUs the second is the default from 0.29.0 on,"
    " and for some models from 0.22.0 on"
)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model that a server loads: its name, folder, and whether its weights are random."""

    name: str
    # a local folder; None if the server downloads `name`
    path: Path | None = None
    # random weights
    dummy: bool = False
    # shape of the tiny model in `path`
    tiny_model: TinyModel | None = None

    def depth(self, reported: Model) -> tuple[int, int] | None:
        """Return the numbers of layers served and reported; None if another model is served."""
        if self.tiny_model is not None:
            return self.tiny_model.layers, reported.layers
        return (reported.layers, reported.layers) if self.name == reported.name else None

    def __str__(self) -> str:
        """Return which weights are served, for a report."""
        if self.tiny_model is not None:
            return (
                f"{'dummy' if self.dummy else 'made'}: {self.tiny_model}, run by vLLM's"
                f" {self.tiny_model.family}"
            )
        return f"{'dummy, in the shape of' if self.dummy else 'real, of'} {self.name}"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Launch of an arm: command, environment, container, differences from the bug report."""

    kind: ServerKind
    evidence: Evidence
    command: ServeCommand
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    container: ContainerSpec | None = None
    # from the reported command, as sentences
    differences: tuple[str, ...] = ()
    port: int = 0
    # the served weights, in words; empty if unknown
    weights: str = ""
    # as in `ServedModel`
    depth: tuple[int, int] | None = None
    # the one that is served, if any
    tiny_model: TinyModel | None = None
    # as in `ServerFacts`
    source: str | None = None
    # as in `ServerFacts`
    compiled: str | None = None
    # None if the vLLM is not in the cache
    release: Release | None = None
    # ids of the leased GPUs; empty without a lease
    gpus: tuple[str, ...] = ()

    def render(self) -> str:
        """Return the command for a POSIX shell, without the name and labels of one run."""
        if self.container is not None:
            return replace(self.container, name=None, labels=()).render()
        flags = self.argv.index("serve") + 1 if "serve" in self.argv else 1
        flags += flags > 1 and not self.argv[flags].startswith("-")  # a model without --model
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        lines += [shlex.join(self.argv[:flags])]
        lines += [f"  {shlex.join(group)}" for group in group_by_flag(self.argv[flags:])]
        return " \\\n".join(lines)


def _with_model(
    scenario: Scenario, arm: Arm, weights: ServedModel, seen_as: str
) -> tuple[ServeCommand, list[str]]:
    """Return the command of `arm` for the served model, and how it differs from the bug report.

    seen_as: name or path of the model for the server. Also leave out `--api-key`.
    """
    command = scenario.command_of(arm)
    differences: list[str] = []
    if weights.tiny_model is not None:
        dummy = scenario.dummy
        command = scenario.command_with_dummy(arm).with_model(seen_as)
        differences = [
            _in_place_of_reported(
                f"{'dummy' if weights.dummy else 'made'} weights in the shape"
                f" {weights.tiny_model},",
                dummy.why if dummy else scenario.model.why,
            ),
            *(f"{change}: {change.why}" for change in (dummy.changes if dummy else ())),
            *(
                f"{edit.in_dummy} in place of {edit.words.removeprefix('with ')}, sized for the"
                " tiny model's pool"
                for edit in arm.edits
                if edit.in_dummy
            ),
        ]
        another = (
            scenario.model.architecture not in model_config(weights.tiny_model)["architectures"]
        )
        if scenario.needs.gpus and another and FIRST_RUNNER[0] not in dict(command.env):
            command = replace(command, env=(*command.env, FIRST_RUNNER))
            differences.append(
                "=".join(FIRST_RUNNER)
                + ": from 0.22 on vLLM chooses the model runner by architecture, and the reported"
                " model has the first"
            )
    elif seen_as != command.model:
        served = "dummy weights in a local folder" if weights.dummy else weights.name
        differences = [_in_place_of_reported(served, scenario.model.why)]
        command = command.with_model(seen_as)
    if weights.dummy:
        command = command.with_flags(_DUMMY)
        harmless = scenario.tiny_model is not None
        why = "since this death does not depend on them" if harmless else "which are not downloaded"
        differences.append(f"{_DUMMY}: random weights, {why}")
    if command.has("--api-key"):
        command = command.without("--api-key")
        differences.append("--api-key is left out: server and harness take a key from VLLM_API_KEY")
    return command, differences


def _in_place_of_reported(served: str, why: str) -> str:
    """Return the difference that names the model served in place of the reported one."""
    return f"model: {served} in place of the reported one" + (f" ({why})" if why else "")


def process_launch(
    scenario: Scenario,
    arm: Arm,
    *,
    vllm: tuple[str, ...],
    env: Mapping[str, str],
    weights: ServedModel,
    port: int,
    evidence: Evidence,
    gpus: tuple[str, ...] = (),
) -> Launch:
    """Return the launch of `arm` as a process of a local vLLM.

    vllm: the words that call it. env: further variables, such as those of an overlay. gpus: indices
    of the leased ones, as `nvidia-smi` counts.
    """
    command, differences = _with_model(scenario, arm, weights, str(weights.path or weights.name))
    command = command.with_flags(f"--host {LOOPBACK}", f"--port {port}")
    on_cpu = evidence is Evidence.CPU
    return Launch(
        kind=ServerKind.PROCESS,
        evidence=evidence,
        command=command,
        argv=(*vllm, "serve", *command.argv()),
        env={
            **dict(command.env),
            **(CPU_ENV if on_cpu else {}),
            **env,
            **(OFFLINE_ENV if weights.path else {}),
            **gpu_env(gpus),
        },
        differences=(
            *differences,
            *arm.patch_sentences(),
            f"bound to {LOOPBACK}, on a free port",
            *([ON_CPU] if on_cpu else []),
        ),
        gpus=gpus,
        port=port,
        weights=str(weights),
        depth=weights.depth(scenario.model),
        tiny_model=weights.tiny_model,
    )


def gpu_env(gpus: Sequence[str]) -> dict[str, str]:
    """Return the CUDA variables that limit a process to these GPUs, counted as by `nvidia-smi`.

    Empty for no GPUs: the process then sees all.
    """
    return (
        {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    )


def rehearsal_launch(
    scenario: Scenario, arm: Arm, *, engine: tuple[str, ...], version: str, model: str, port: int
) -> Launch:
    """Return the launch of the rehearsal engine, which imitates the vLLM release `version`.

    engine: the words that call it.
    """
    command, differences = _with_model(scenario, arm, ServedModel(name=model), model)
    command = command.with_flags(f"--host {LOOPBACK}", f"--port {port}")
    return Launch(
        kind=ServerKind.REHEARSAL,
        evidence=Evidence.REHEARSAL,
        command=command,
        argv=(*engine, "serve", *command.argv()),
        env={**dict(command.env), **_rehearsal_env(scenario, version)},
        differences=(*differences, _IMITATED),
        port=port,
        weights=_NO_WEIGHTS,
    )


def _rehearsal_env(scenario: Scenario, version: str) -> dict[str, str]:
    """Return the variables that tell the rehearsal engine which release and model to imitate."""
    return {
        "VLLM_REHEARSAL_VERSION": version,
        "VLLM_REHEARSAL_SHAPE": json.dumps(scenario.model.rehearsal_shape()),
    }


def container_launch(
    scenario: Scenario,
    arm: Arm,
    *,
    image: str,
    weights: ServedModel,
    port: int,
    evidence: Evidence,
    name: str | None = None,
    version: str | None = None,
    mounts: Sequence[Mount] = (),
    more_env: Mapping[str, str] | None = None,
    gpus: tuple[str, ...] = (),
) -> Launch:
    """Return the launch of a container of `image`, with GPUs if the evidence is to be of a GPU.

    port: on the host. mounts, more_env: the overlay with the arm's changes of vLLM's source. gpus:
    ids of the leased ones, in place of the reported `--gpus`. version: the release that a rehearsal
    imitates; None for `try_with`. Raises `HarnessBug` for evidence that no container gives.
    """
    command, differences = _with_model(
        scenario, arm, weights, CONTAINER_MODEL if weights.path else weights.name
    )
    model = (
        [Mount(str(weights.path.resolve()), CONTAINER_MODEL, readonly=True)] if weights.path else []
    )
    env: dict[str, str] = {}
    request = f"device={','.join(gpus)}" if gpus else None
    match evidence:
        case Evidence.REHEARSAL:
            env = _rehearsal_env(scenario, version or scenario.try_with)
            differences.append(_IMITATED)
        case Evidence.CPU:
            env = dict(CPU_ENV)
            differences.append(ON_CPU)
        case Evidence.GPU:
            request = (
                request
                or (command.container.gpus if command.container else None)
                or str(scenario.needs.gpus)
            )
        case Evidence.LAB | Evidence.SCHEDULER | Evidence.UNKNOWN:
            raise HarnessBug(f"a container cannot be evidence of {evidence}")
        case _:
            assert_never(evidence)
    spec = replace(
        ContainerSpec.from_command(
            command,
            image=image,
            port=port,
            env=env | (OFFLINE_ENV if weights.path else {}) | dict(more_env or {}),
        ),
        name=name,
        gpus=request,
        mounts=(*model, *mounts),
    )
    if evidence is Evidence.CPU and spec.shm_size is None and spec.ipc is None:
        # On a CPU the worker is always a process of its own, and Docker's default of 64 MiB is too
        # small for its queue.
        spec = replace(spec, shm_size=_CPU_SHM_BYTES)
        differences.append(
            "--shm-size 1g: on a CPU the worker is a process of its own and needs it"
        )
    return Launch(
        kind=ServerKind.DOCKER,
        evidence=evidence,
        command=command,
        argv=spec.argv,
        env=dict(spec.env),
        container=spec,
        differences=(
            *differences,
            *arm.patch_sentences(),
            (
                f"published on {LOOPBACK} only, without Linux capabilities but"
                f" {' '.join(CAPABILITIES)}"
            ),
        ),
        gpus=gpus,
        port=port,
        weights=_NO_WEIGHTS if evidence is Evidence.REHEARSAL else str(weights),
        depth=weights.depth(scenario.model),
        tiny_model=weights.tiny_model,
    )
