"""Launch of a scenario's arm in the lab, with every difference from the report. Pure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.container import LOOPBACK
from vllm_repro.errors import UsageError
from vllm_repro.scenario.scenario import Arm, Lab, Scenario
from vllm_repro.scenario.workload import Size, requests_of
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import (
    CPU_ENV,
    FIRST_RUNNER,
    OFFLINE_ENV,
    ON_CPU,
    WHY_FIRST_RUNNER,
    Launch,
    ServedModel,
)
from vllm_repro.servers.witness import PLUGIN as WITNESS
from vllm_repro_diagnosis.evidence import facts_of
from vllm_repro_lab.parts import MECHANISMS

_FULL_GRAPHS = "--compilation-config.cudagraph_mode FULL_DECODE_ONLY"
_WEIGHTS = {
    "dummy": "dummy weights",
    "made": "random weights by which each token depends on all before it",
}
_WHY_FULL = (
    "without the compiler vLLM turns its default, FULL_AND_PIECEWISE, to NONE. These are the full"
    " graphs of it; the pieces of the others leave attention out"
)


def graph_mode(command: ServeCommand) -> str:
    """Return the CUDA graph mode of the command line in capitals; empty for the default."""
    mode = command.get("--compilation-config.cudagraph_mode")
    if mode is None:
        # not a JSON object: vLLM rejects it
        with contextlib.suppress(ValueError, AttributeError):
            mode = json.loads(command.get("--compilation-config") or "{}").get("cudagraph_mode")
    if mode is None and command.get("--optimization-level") == "0":
        mode = "NONE"  # that level implies it
    return str(mode or "").upper()


def _other_sizes(sizes: Iterable[object]) -> list[Size]:
    """Return the sizes of prompts or answers that differ in the lab, each once, in order."""
    return list(
        dict.fromkeys(size for size in sizes if isinstance(size, Size) and size.lab is not None)
    )


def no_lab(scenario: Scenario) -> UsageError:
    """Return the error for a scenario without `lab=`, with a hint on what runs it instead."""
    real = (
        f"--server docker runs it as reported, with {scenario.needs}"
        if scenario.needs.gpus
        else (
            f"this bug occurs on a CPU without the lab: --server process --vllm {scenario.try_with}"
        )
    )
    return UsageError(
        f"{scenario.id} cannot run in the lab: it has no lab=",
        hint=f"{real}; --server rehearsal simulates it",
    )


def lab_launch(
    scenario: Scenario,
    arm: Arm,
    *,
    vllm: tuple[str, ...],
    version: str,
    plugin: Path,
    model: Path,
    port: int,
    overlay: Path | None = None,
    lab: Lab | None = None,
    kind: ServerKind = ServerKind.LAB,
) -> Launch:
    """Return the command of `arm` in the lab, with its differences from the bug report.

    vllm: the command of release `version`. plugin, model: folders of the lab's plugin and of the
    tiny model. overlay: the folder of the patched package. lab: None for the scenario's. kind: one
    that runs in the lab. Raises `UsageError` for a scenario without `lab=`.
    """
    lab = lab or scenario.lab
    if lab is None:
        raise no_lab(scenario)
    command, tiny_model = scenario.command_in_lab(arm), lab.shape(scenario.model)
    capture, evidence = lab.capture, kind.facts.evidence
    assert evidence is not None, "a kind that runs in the lab has one kind of evidence"
    full = bool(capture) and not graph_mode(command) and not command.has("--enforce-eager")
    if full:
        command = command.with_flags(_FULL_GRAPHS)
    requests = list(requests_of(tuple(scenario.workload_of(arm))))
    differences = [
        (
            f"{facts_of(evidence).mark}: vLLM's own code on a CPU; server.replaced names each part"
            " that is replaced"
        ),
        *(
            [
                (
                    f"vLLM {version} in place of the reported {scenario.try_with}, which cannot be"
                    " installed here"
                )
            ]
            if lab.vllm and version != scenario.try_with
            else []
        ),
        (
            f"model: {_WEIGHTS[lab.weights]} in the shape {tiny_model}, in place of the reported"
            f" one ({lab.why})"
        ),
        *(f"{change}: {change.why}" for change in lab.changes),
        *([f"with {_FULL_GRAPHS}: {_WHY_FULL}"] if full else []),
        *(
            f"prompts of {size.lab} tokens in place of {size.plus}, sized for the tiny model"
            for size in _other_sizes(request.prompt for request in requests)
        ),
        *(
            f"answers of up to {size.lab} tokens in place of {size.plus}, since a CPU takes a"
            " second for each"
            for size in _other_sizes(request.max_tokens for request in requests)
        ),
        *(
            f"{edit.in_lab} in place of {edit.words.removeprefix('with ')}, sized for the tiny"
            " model's pool"
            for edit in arm.edits
            if edit.in_lab
        ),
        ON_CPU,
        *([] if FIRST_RUNNER in command.env else [f"{'='.join(FIRST_RUNNER)}: {WHY_FIRST_RUNNER}"]),
        "VLLM_DEBUG_WORKSPACE=1: vLLM's own lines about the workspace's size",
        (
            "TORCHDYNAMO_DISABLE=1: the sampler is not compiled either, which needs a C++ compiler"
            " and a third of the boot"
        ),
        *arm.patch_sentences(),
        f"bound to {LOOPBACK}, on a free port",
    ]
    if lab.weights == "dummy":
        command = command.with_flags("--load-format dummy")
    command = command.with_model(str(model)).with_flags(f"--host {LOOPBACK}", f"--port {port}")
    path = [str(folder) for folder in (overlay, plugin, WITNESS if arm.patches else None) if folder]
    variables = {
        **dict(command.env),
        **CPU_ENV,
        **OFFLINE_ENV,
        FIRST_RUNNER[0]: FIRST_RUNNER[1],
        "VLLM_DEBUG_WORKSPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "REPRO_LAB_MECHANISM": lab.mechanism,
        "REPRO_LAB_EVIDENCE": facts_of(evidence).mark,
        **MECHANISMS[lab.mechanism].env,
        **({"REPRO_LAB_CAPTURE": capture} if capture else {}),
        **({"REPRO_LAB_GRAPHS": graph_mode(command)} if graph_mode(command) else {}),
        "PYTHONPATH": ":".join(path),
        **(
            {"REPRO_PATCHED": ":".join(sorted({patch.file for patch in arm.patches}))}
            if arm.patches
            else {}
        ),
    }
    return Launch(
        kind=kind,
        evidence=evidence,
        command=command,
        argv=(*vllm, "serve", *command.argv()),
        env=variables,
        differences=tuple(differences),
        port=port,
        weights=str(ServedModel(name="lab", dummy=lab.weights == "dummy", tiny_model=tiny_model)),
        tiny_model=tiny_model,
    )
