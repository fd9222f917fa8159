"""`vllm-repro show`: the exact command of an arm.

Modules that only one form or a patch needs are imported there: the usual command should take no
time.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from vllm_repro.cli.common import add_common, print_json
from vllm_repro.cli.server_options import add_server_options, server_options
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.features import additions, load
from vllm_repro.scenario.catalogue import find, find_arms, to_stderr
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.launch import ServedModel, container_launch, process_launch
from vllm_repro.servers.options import ServerOptions, default_image, weights_for
from vllm_repro_diagnosis.evidence import Evidence

STYLES = ("docker", "serve", "compose", "lab", "python", "curl")
SHOWN_PORT = 8000


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vllm-repro show` to its parser."""
    add_common(
        parser,
        example="vllm-repro show tq-chunked-prefill --arm eager --as docker",
        prints="the command, its scenario and its arm",
    )
    parser.add_argument("scenario", metavar="SCENARIO")
    parser.add_argument("--arm", default=None, help="one arm (default: the first)")
    parser.add_argument(
        "--as",
        dest="style",
        choices=(*STYLES, *additions("show_forms")),
        default="serve",
        help="its form (default: serve)",
    )
    add_server_options(parser, names=("image", "vllm", "model", "weights", "patch"))


def run(arguments: argparse.Namespace) -> int:
    """Print the exact command of an arm in the form that `--as` names, and return 0."""
    scenario = find(arguments.scenario)
    arm = find_arms(scenario, [arguments.arm] if arguments.arm else None)[0]
    options = server_options(arguments)
    if len(options.patch) > 1:
        raise UsageError(
            "show prints one command, with one --patch", hint="vllm-repro run compares several"
        )
    for path in options.patch:
        from vllm_repro.scenario.patch import read_diff

        arm = replace(arm, patches=(*arm.patches, *read_diff(path)))
    text = command_text(scenario, arm, options, arguments.style)
    if arguments.json:
        print_json(
            {"scenario": scenario.id, "arm": arm.name, "as": arguments.style, "command": text}
        )
    else:
        print(text)
    return 0


def command_text(scenario: Scenario, arm: Arm, options: ServerOptions, style: str) -> str:
    """Return the command of `arm` as a run would start it, on port 8000.

    For an arm with patches, write the patched files that the command uses. A container is started
    for a moment to read those of an image.

    style: a value of `--as`. Raises `InfraError` if there is no vLLM to patch, and `UsageError` if
    the arm has no such form.
    """
    if style in ("python", "curl"):
        from vllm_repro.report.script import curl, script

        return (
            script(scenario, arm).rstrip() if style == "python" else curl(scenario, arm, SHOWN_PORT)
        )
    if style in additions("show_forms"):
        return str(load("show_forms", style)(scenario, arm)).rstrip()
    if style == "lab":
        from vllm_repro.servers.lab import LabSite

        return LabSite(replace(options, model=None, weights=None), scenario).text(arm, SHOWN_PORT)
    weights = weights_for(scenario, options)
    evidence = Evidence.GPU if scenario.needs.gpus else Evidence.CPU
    if style == "serve":
        vllm, env = _patched_locally(arm, options) if arm.patches else ("vllm", {})
        return process_launch(
            scenario,
            arm,
            vllm=(vllm,),
            env=env,
            weights=weights,
            port=SHOWN_PORT,
            evidence=evidence,
        ).render()
    if options.vllm and not options.vllm.release:
        raise UsageError(
            f"an image has a release, not {options.vllm}",
            hint="--as lab shows a command that runs it, once it is in the cache",
        )
    version = f"{options.vllm or scenario.try_with}"
    image = options.image or default_image(scenario, version)
    if _is_rehearsal(image):
        evidence = Evidence.REHEARSAL
        weights = ServedModel(name=options.model or scenario.model.name)
    launch = partial(
        container_launch,
        scenario,
        image=image,
        weights=weights,
        port=SHOWN_PORT,
        evidence=evidence,
        version=version,
    )
    shown = launch(replace(arm, patches=()))
    if arm.patches:
        from vllm_repro.servers.overlay import patch_container

        assert shown.container is not None
        source = patch_container(shown.container, arm.patches, "show", to_stderr)
        shown = launch(arm, mounts=source.mounts, more_env=source.env)
    assert shown.container is not None
    if style == "compose":
        from vllm_repro.command.compose import compose_text, service

        return compose_text({arm.name: service(shown.container)}).rstrip()
    return shown.render()


def _patched_locally(arm: Arm, options: ServerOptions) -> tuple[str, Mapping[str, str]]:
    """Write an arm's patched files to the cache; return the program `vllm`, and variables for it.

    The program is that of the release of `--vllm` in the cache; without `--vllm`, the one on PATH.
    The variables make it import the patched files. Raises `InfraError` if the program is not here,
    and `Unsupported` if a patch does not fit.
    """
    from vllm_repro.releases.local_vllm import local_vllm
    from vllm_repro.releases.provision import ReleaseCache
    from vllm_repro.servers.overlay import patch_installed, patch_packages

    if options.vllm and (release := ReleaseCache().get(options.vllm)):
        return str(release.executable), patch_packages(release.packages, arm.patches, to_stderr).env
    local = None if options.vllm else local_vllm()
    if local is None:
        raise InfraError(
            (
                f"vLLM {options.vllm} is not in the cache, and the arm {arm.name} changes its files"
                if options.vllm
                else f"no vllm is installed here, and the arm {arm.name} changes files of it"
            ),
            hint="run it once with --server process --vllm V, or show it --as lab",
        )
    return str(local.executable), patch_installed(local.executable, arm.patches, to_stderr).env


def _is_rehearsal(image: str) -> bool:
    """Return True if a container engine here knows the image, and it holds the rehearsal engine."""
    from vllm_repro.servers.docker_engine import connect, image_facts

    with (
        contextlib.suppress(InfraError),  # an unknown image is taken for a vLLM
        contextlib.closing(connect()) as engine,
    ):
        return image_facts(engine, image).rehearsal
    return False
