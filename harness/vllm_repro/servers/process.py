"""A local vLLM as a process in a new session."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from vllm_repro.command.container import LOOPBACK
from vllm_repro.errors import InfraError
from vllm_repro.host.machine import cpu_flags, gpus
from vllm_repro.host.ports import check_port, free_port
from vllm_repro.host.processes import Session, start
from vllm_repro.releases.local_vllm import LocalVllm, local_vllm
from vllm_repro.releases.provision import Release, ReleaseCache, provision
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.secret_names import is_recorded
from vllm_repro.servers.base import Exit, Server, ServerFacts
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import Launch, process_launch
from vllm_repro.servers.multi_node import Meeting, Nodes, node_log, one_server, process_nodes
from vllm_repro.servers.options import ServerOptions, lacking, needs_of, weights_for
from vllm_repro.servers.overlay import PatchedSource, patch_installed, patch_packages
from vllm_repro.servers.site import Notify, Offer, Site
from vllm_repro.tiny_model import TinyModel
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_diagnosis.live import listeners


class ProcessServer(Server):
    """A vLLM server as a local process: `argv`, which must make it listen on `port`."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        port: int,
        log: Path,
        # set on top of the caller's environment
        env: Mapping[str, str],
        kind: ServerKind,
        evidence: Evidence,
        # seconds between SIGTERM and SIGKILL
        grace: float = 15.0,
        # sha256 of each changed file of vLLM, by its name below site-packages
        patched: Mapping[str, str] | None = None,
        # these two as in `ServerFacts`
        source: str | None = None,
        compiled: str | None = None,
    ) -> None:
        self.argv = tuple(argv)
        self.port = port
        self.log_path: Path = log
        self.env = dict(env)
        self.kind = kind
        self.evidence = evidence
        self.grace = grace
        self.patched = dict(patched or {})
        self.source, self.compiled = source, compiled
        self.base_url = f"http://{LOOPBACK}:{port}"
        self._session: Session | None = None

    async def start(self) -> ServerFacts:
        """Start the process with its output in the log; return its command and pid.

        Raises `InfraError` if the port is taken or the process cannot be started.
        """
        check_port(self.port)
        # PYTHONOPTIMIZE would remove the assertions of which some engines die.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONOPTIMIZE"}
        self._session = start(self.argv, inherited | self.env, self.log_path)
        return ServerFacts(
            kind=self.kind,
            evidence=self.evidence,
            argv=self.argv,
            env={key: value for key, value in (inherited | self.env).items() if is_recorded(key)},
            source=self.source,
            compiled=self.compiled,
            pid=self._session.popen.pid,
        )

    async def exited(self) -> Exit:
        """Wait until the server's process has ended, and return its exit status or signal.

        Raises `InfraError` if it was never started.
        """
        if self._session is None:
            raise InfraError("the server was never started")
        while (code := self._session.exit_code()) is None:
            await asyncio.sleep(0.02)
        how = f"exit status {code}" if code >= 0 else f"ended by signal {-code}"
        return Exit(code=code, detail=f"the server's process is gone, {how}", at=time.time())

    async def stop(self) -> None:
        """End the server and its children with SIGTERM, then SIGKILL; return when they are gone."""
        if self._session is not None:
            # Shielded: a cancelled run must still wait until the server is gone.
            await asyncio.shield(asyncio.to_thread(self._session.end, self.grace))

    def other_listener(self) -> str:
        """Return, as a phrase, the pids of others that listen on the server's port; else ''."""
        # Another process may take a free port before a slow boot binds it.
        listening = listeners(self.port)
        if not listening or set(listening) & set(self.processes()):
            return ""
        return f"pid {', '.join(map(str, listening))}"

    def processes(self) -> tuple[int, ...]:
        """Return the pids of the server and its children, the API server first.

        Empty if it was not started.
        """
        return self._session.pids() if self._session else ()


def process_server(
    launch: Launch,
    arm: Arm,
    log: Path,
    others: Nodes | None,
    make: Callable[..., ProcessServer] = ProcessServer,
) -> tuple[Launch, Server]:
    """Return the first node's launch, and the server, not started, with one process per node.

    make: takes the arguments of `ProcessServer`. others: hosts of all nodes but the first; None for
    this host.
    """
    address = others.address if others else LOOPBACK
    meeting = Meeting(address=address, port=free_port(address))
    nodes = process_nodes(launch, meeting)
    make = partial(
        make,
        kind=launch.kind,
        evidence=launch.evidence,
        source=launch.source,
        compiled=launch.compiled,
    )
    servers = [
        (
            make(
                node.argv,
                port=free_port() if rank else node.port,
                log=node_log(log, rank),
                env=node.env,
            )
            if others is None or not rank
            else others.server(arm, rank, meeting, node_log(log, rank))
        )
        for rank, node in enumerate(nodes)
    ]
    return nodes[0], one_server(servers)


def with_release(launch: Launch, release: Release | None) -> Launch:
    """Return `launch` with its `release`; unchanged if that is None.

    For a vLLM that is no release, or has the compiled parts of another one, also set `source` and
    `compiled`, and add a difference from the report.
    """
    if release is None:
        return launch
    launch = replace(launch, release=release)
    is_release = bool(release.source.release)
    if is_release and not release.compiled:
        return launch
    what = f"vLLM {release.version}, which has no CPU build" if is_release else f"{release.source}"
    difference = (
        f"the Python of {what}, over the compiled parts of {release.compiled}: {release.fit}"
    )
    return replace(
        launch,
        source=None if is_release else f"{release.source}",
        compiled=release.compiled or None,
        differences=(*launch.differences, difference if release.compiled else f"vLLM from {what}"),
    )


def misfit(release: Release | None, model: TinyModel | None, *, attention: bool = True) -> str:
    """Return why the compiled parts of `release` cannot serve `model`; empty if they can.

    attention: False if the lab replaces the attention, so that its operators do not matter.
    """
    if release is None or release.fit is None:
        return ""
    experts = model is not None and model.family == "deepseek_v4"
    needed = {"attention": attention, "experts": experts, "linear": "amx_tile" in cpu_flags()}
    missing = release.fit.missing([path for path, need in needed.items() if need])
    if not missing:
        return ""
    return (
        f"the compiled parts of {release.compiled} do not fit the Python of {release.version}:"
        f" {', '.join(map(str, missing))}"
    )


class ProcessSite(Site):
    """The servers of `--server process`: processes of a local vLLM.

    It is the vLLM on PATH or, for a scenario without GPUs, the one that `--vllm` names. Opening it
    installs that into the cache, for minutes. Raises `InfraError` if there is no such vLLM.
    """

    kind = ServerKind.PROCESS

    def __init__(
        self, options: ServerOptions, scenario: Scenario, notify: Notify = lambda _: None
    ) -> None:
        self.evidence = Evidence.GPU if scenario.needs.gpus else Evidence.CPU
        self._lacking = lacking(needs_of(scenario, options), gpus())
        self._scenario = scenario
        self._weights = weights_for(scenario, options)
        self._notify = notify
        self._release: Release | None = None
        if options.vllm and self._lacking:
            # nothing is downloaded for a trial that cannot run
            self._vllm: tuple[str, ...] = ("vllm",)
        elif options.vllm and not scenario.needs.gpus:
            self._release = provision(options.vllm, notify, unchecked=True)
            self._vllm = (str(self._release.executable),)
        else:
            installed = _installed(options, scenario)
            self._vllm = (str(installed.executable),)
            of_cpu = "+cpu" in (installed.version or "") or not gpus()
            self.evidence = Evidence.CPU if of_cpu else Evidence.GPU

    @classmethod
    def offer(
        cls, scenario: Scenario, options: ServerOptions, *, missing: str, download: bool
    ) -> Offer:
        """Accept the scenario for `--server auto` if a local vLLM and this hardware can run it."""
        if missing:
            return Offer(False, missing)
        # A bug of the CPU has a lab only if a plain release cannot show the bug.
        any_release = not scenario.needs.gpus and scenario.lab is None
        if options.vllm and any_release:
            return Offer(
                True, f"vLLM {options.vllm} runs on this CPU, which is all that the scenario needs"
            )
        if (local := local_vllm()) is not None:
            name = f"vllm {local.version}" if local.version else "vllm"
            return Offer(True, f"{name} is installed here, with what the scenario needs")
        if any_release and ReleaseCache().get(Source(release=scenario.try_with)):
            return Offer(
                True,
                f"vLLM {scenario.try_with} is in the cache, and a CPU is all that the scenario"
                " needs",
            )
        return Offer(
            False,
            "no vllm is installed here" + ("" if scenario.needs.gpus else ", and no image of it"),
        )

    def launch(
        self, scenario: Scenario, arm: Arm, port: int, *, run: str = "", number: int = 1
    ) -> Launch:
        """Return the process that will run `arm`, with its differences from the bug report."""
        launch = process_launch(
            scenario,
            arm,
            vllm=self._vllm,
            env=self.patched_source(arm).env,
            weights=self._weights,
            port=port,
            evidence=self.evidence,
            gpus=self.gpus,
        )
        return with_release(launch, self._release)

    def _server(
        self, scenario: Scenario, arm: Arm, number: int, log: Path, run: str
    ) -> tuple[Launch, Server]:
        """Return the launch and the server of one trial, not started: one process per node."""
        launch = self.launch(scenario, arm, free_port())
        return process_server(
            launch,
            arm,
            log,
            self.others,
            partial(ProcessServer, patched=self.patched_source(arm).digests),
        )

    def patched_source(self, arm: Arm) -> PatchedSource:
        """Return the variables by which a process runs the arm's vLLM, with its patches if any."""
        if not arm.patches:
            # A vllm on the user's PYTHONPATH would come before that of the release.
            return PatchedSource(
                env={"PYTHONPATH": ""} if self._release and "PYTHONPATH" in os.environ else {}
            )
        if self._release is not None:
            return patch_packages(self._release.packages, arm.patches, self._notify)
        return patch_installed(Path(self._vllm[0]), arm.patches, self._notify)

    def why_not(self, arm: Arm) -> str:
        """Return why this machine or its vLLM cannot run `arm`, as a sentence; empty if it can."""
        return (
            self._lacking
            or misfit(self._release, self._scenario.tiny_model)
            or super().why_not(arm)
        )


def _installed(options: ServerOptions, scenario: Scenario) -> LocalVllm:
    """Return the `vllm` on PATH.

    Raises `InfraError` if there is none, or if `--vllm` names another one.
    """
    local = local_vllm()
    if options.vllm and (
        local is None or (local.version or "").partition("+")[0] != options.vllm.release
    ):
        here = (
            f"the vllm that is installed here is {local.version}"
            if local
            else "no vllm is installed here"
        )
        raise InfraError(
            f"{here}, and a release that vllm-repro installs is a CPU build",
            hint=(
                f"--server docker runs vLLM {options.vllm}; or install it, so that `vllm` on PATH"
                " is that one"
                if options.vllm.release
                else f"install {options.vllm} and leave out --vllm: then `vllm` on PATH runs"
            ),
        )
    if local is None:
        raise InfraError(
            "no vllm is installed here",
            hint=f"name a release to install into a cache: --vllm {scenario.try_with}",
        )
    return local
