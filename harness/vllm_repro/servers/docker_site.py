"""Containers as the servers of a run.

A container that exits at once tests whether the Docker Engine gives GPUs: no field of the engine
shows it. The reason for a refusal is the engine's message.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.host.ports import free_port
from vllm_repro.scenario.patch import Patch
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.base import Server
from vllm_repro.servers.docker import DockerServer
from vllm_repro.servers.docker_engine import Engine, connect, gpu_prefix, image_facts
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import NO_SOURCE_TO_CHANGE, Launch, ServedModel, container_launch
from vllm_repro.servers.multi_node import container_nodes, node_log, one_server
from vllm_repro.servers.options import ServerOptions, default_image, weights_for
from vllm_repro.servers.overlay import PatchedSource, patch_container
from vllm_repro.servers.site import Notify, Offer, Site
from vllm_repro_diagnosis.evidence import Evidence


class DockerSite(Site):
    """The servers of `--server docker`: containers of one image.

    An image of the rehearsal engine makes the run a rehearsal.
    """

    kind = ServerKind.DOCKER

    def __init__(
        self, options: ServerOptions, scenario: Scenario, notify: Notify = lambda _: None
    ) -> None:
        self._version = f"{options.vllm or scenario.try_with}"
        self._image = options.image or default_image(scenario, self._version)
        with contextlib.closing(connect()) as engine:
            self.engine_version = engine.version
            rehearsal = image_facts(engine, self._image).rehearsal
            self._gpu_prefix = (
                "" if rehearsal or not scenario.needs.gpus else _gpu_prefix(engine, self._image)
            )
        if rehearsal:
            self.evidence = Evidence.REHEARSAL
            self.unchangeable = NO_SOURCE_TO_CHANGE
            self._weights = ServedModel(name=options.model or scenario.model.name)
        else:
            self.evidence = Evidence.GPU if scenario.needs.gpus else Evidence.CPU
            self._weights = weights_for(scenario, options)
        self._scenario, self._notify = scenario, notify
        self._patched: dict[tuple[Patch, ...], PatchedSource] = {}

    @classmethod
    def offer(
        cls, scenario: Scenario, options: ServerOptions, *, missing: str, download: bool
    ) -> Offer:
        """Accept for `--server auto` if nothing is missing here, and Docker can run the image.

        Also accept if `--image` was given: the run then reports what is missing. With GPUs, start a
        container for a moment to find out.
        """
        image = options.image or default_image(scenario, f"{options.vllm or scenario.try_with}")
        refused = ""
        if not missing:
            try:
                with contextlib.closing(connect()) as engine:
                    facts = image_facts(engine, image)
                    if scenario.needs.gpus and not facts.rehearsal:
                        gpu_prefix(engine, image)
                    return Offer(True, f"Docker {engine.version} has the image {image}")
            except Unsupported as error:
                refused = f"{error}"
            except InfraError:  # no engine, or one without the image
                pass
        return Offer(bool(options.image), "an image was given" if options.image else refused)

    def patched_source(self, arm: Arm) -> PatchedSource:
        """Return the mounts and variables by which a container runs the arm's patched vLLM.

        Empty for an arm without patches. The first call for an arm starts a container to read the
        image's files. Raises like `Site.patched_source`.
        """
        if arm.patches and arm.patches not in self._patched:
            unchanged = self.launch(self._scenario, replace(arm, patches=()), 0)
            assert unchanged.container is not None
            self._patched[arm.patches] = patch_container(
                unchanged.container, arm.patches, "source", self._notify
            )
        return self._patched.get(arm.patches, PatchedSource())

    def launch(
        self, scenario: Scenario, arm: Arm, port: int, *, run: str = "", number: int = 1
    ) -> Launch:
        """Return the container that will run `arm`, with its differences from the bug report."""
        source = self.patched_source(arm)
        return container_launch(
            scenario,
            arm,
            image=self._image,
            weights=self._weights,
            port=port,
            evidence=self.evidence,
            name=f"vllm-repro-{run[-6:]}-{arm.name}-{number}" if run else None,
            version=self._version,
            mounts=source.mounts,
            more_env=source.env,
            gpus=tuple(f"{self._gpu_prefix}{gpu}" for gpu in self.gpus),
        )

    def _server(
        self, scenario: Scenario, arm: Arm, number: int, log: Path, run: str
    ) -> tuple[Launch, Server]:
        """Return the launch and the server of one trial, not started: one container per node."""
        launch = self.launch(scenario, arm, free_port(), run=run, number=number)
        patched = self.patched_source(arm).digests
        nodes = container_nodes(launch)
        servers = [
            DockerServer(
                node.container,
                port=launch.port,
                log=node_log(log, rank),
                run=run,
                evidence=self.evidence,
                patched=patched,
            )
            for rank, node in enumerate(nodes)
            if node.container is not None
        ]
        return nodes[0], one_server(servers)


def _gpu_prefix(engine: Engine, image: str) -> str:
    """Return `gpu_prefix`, or "" if Docker refuses GPUs: the trial then reports why."""
    try:
        return gpu_prefix(engine, image)
    except (InfraError, Unsupported):
        return ""
