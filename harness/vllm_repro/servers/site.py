"""Where servers come from in one run: one site, of the kind that was chosen, and a server of it for each trial."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from vllm_repro.errors import InfraError, ReproError, Unsupported, UsageError
from vllm_repro.host.machine import gpus
from vllm_repro.releases.localvllm import local_vllm
from vllm_repro.releases.provision import Provisioned, provision
from vllm_repro.resources import rehearsal_engine
from vllm_repro.running.assess import Conclusion
from vllm_repro.scenario.patch import Patch
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.attach import AttachServer
from vllm_repro.servers.base import Evidence, Exit, Server, ServerFacts, ServerKind
from vllm_repro.servers.choice import Choice, Options, default_image, lacking, needs_of, weights_for
from vllm_repro.servers.docker import DockerServer
from vllm_repro.servers.docker_engine import connect, image_facts, our_labels
from vllm_repro.servers.launch import Launch, Weights, container_launch, process_launch, rehearsal_launch
from vllm_repro.servers.overlay import Laid, over_container, over_installed, over_release
from vllm_repro.servers.process import ProcessServer, free_port
from vllm_repro.servers.ranked import RankedServer
from vllm_repro.servers.ranks import containers_over_nodes, nodes_of, over_nodes
from vllm_repro.verdict.outcome import Outcome

__all__ = ["Site", "make_site", "open_site", "process_server"]

Say = Callable[[str], None]

IMITATED = frozenset(
    {
        "vllm-project/vllm#40807",
        "vllm-project/vllm#41700",
        "vllm-project/vllm#41726",
        "vllm-project/vllm#42085",
        "vllm-project/vllm#42808",
        "vllm-project/vllm#44053",
        "vllm-project/vllm#53180",
        "vllm-project/vllm#54195",
    }
)
"""The bugs whose mechanism the rehearsal engine has (fixtures/rehearsal/defects). It lives through all others, which proves nothing."""


_NO_HARDWARE = "--server rehearsal shows the scenario at work without the hardware"


class Site(ABC):
    """One kind of server for one run."""

    kind: ServerKind
    evidence: Evidence
    attached = False
    engine_version: str | None = None
    unchangeable = ""
    """Why no arm with changes of vLLM's source can run here; empty where one can."""

    def prepare(self, say: Say) -> None:
        """Fetches what its servers need, which may take minutes. Raises `InfraError`."""
        return

    def _hint(self, arm: Arm) -> str:
        if not arm.patches:
            return _NO_HARDWARE
        return "" if self.unchangeable else "--vllm names another release, or leave the patch out"

    @abstractmethod
    def launch(self, scenario: Scenario, arm: Arm, port: int, *, run: str = "", number: int = 1) -> Launch:
        """Exactly what will be run for `arm`."""

    def server(self, scenario: Scenario, arm: Arm, number: int, log: Path, run: str) -> tuple[Launch, Server]:
        """A server for one trial, not started; one that cannot be says so when it is started."""
        refusal: ReproError | None = None
        try:
            if why := self.cannot(arm):
                refusal = Unsupported(why, hint=self._hint(arm))
        except InfraError as error:
            refusal = error
        if refusal is not None:
            unchanged = replace(arm, patches=())
            return self.launch(scenario, unchanged, free_port(), run=run, number=number), _Unavailable(refusal, log)
        return self._server(scenario, arm, number, log, run)

    @abstractmethod
    def _server(self, scenario: Scenario, arm: Arm, number: int, log: Path, run: str) -> tuple[Launch, Server]: ...

    def cannot(self, arm: Arm) -> str:
        """What keeps this site from running `arm`, as a sentence; empty where nothing does."""
        if arm.patches and self.unchangeable:
            return self.unchangeable
        try:
            self.laid(arm)
        except Unsupported as error:
            return f"{error}"
        return ""

    def laid(self, arm: Arm) -> Laid:
        """What makes a server of this site run the changes of vLLM's source that `arm` has.

        Raises `Unsupported` where they do not fit, and `InfraError` where they cannot be laid over it.
        """
        return Laid()

    def usual_arms(self, scenario: Scenario, arms: Sequence[Arm]) -> list[Arm]:
        """Those of `arms` that a run takes where none is named."""
        return [arm for arm in arms if not arm.patches]

    def imitates(self, scenario: Scenario) -> bool:
        """Whether an engine of this site can die of the scenario's bug at all: a rehearsal only of those that it imitates."""
        return self.evidence is not Evidence.REHEARSAL or scenario.issue in IMITATED

    def ends_after(self, conclusion: Conclusion) -> bool:
        """Whether no further trial makes sense after this one: a machine that cannot start one arm's server can start none."""
        return conclusion.outcome is Outcome.UNSUPPORTED and not conclusion.launched


class _PortChooser:
    def __init__(self, port: int | None) -> None:
        self._port = port

    def next(self) -> int:
        return self._port or free_port()


class RehearsalSite(Site):
    kind = ServerKind.REHEARSAL
    evidence = Evidence.REHEARSAL
    unchangeable = "a rehearsal runs no vLLM, so there is no source to change: an arm that does so needs docker, process or the lab"

    def __init__(self, options: Options, scenario: Scenario) -> None:
        self._version = options.vllm or scenario.try_with
        self._model = options.model
        self._ports = _PortChooser(options.port)

    def launch(self, scenario: Scenario, arm: Arm, port: int, *, run: str = "", number: int = 1) -> Launch:
        engine = (sys.executable, str(rehearsal_engine()))
        return rehearsal_launch(
            scenario, arm, engine=engine, version=self._version, model=self._model or scenario.model.name, port=port
        )

    def _server(self, scenario: Scenario, arm: Arm, number: int, log: Path, run: str) -> tuple[Launch, Server]:
        launch = self.launch(scenario, arm, self._ports.next())
        return process_server(launch, log)


class ProcessSite(Site):
    """A local `vllm`; raises `Unsupported` when a server is made for a scenario whose GPUs are not here."""

    kind = ServerKind.PROCESS

    def __init__(self, options: Options, scenario: Scenario, say: Say) -> None:
        self.evidence = Evidence.GPU if scenario.needs.gpus else Evidence.CPU
        self._lacking = lacking(needs_of(scenario, options), gpus())
        self._ports = _PortChooser(options.port)
        self._weights = weights_for(scenario, options)
        self._say = say
        self._release: Provisioned | None = None
        self._vllm: tuple[str, ...]
        if options.vllm:
            if self._lacking:
                # The releases that can be installed here are CPU builds; nothing is downloaded for a trial that cannot run.
                self._vllm = ("vllm",)
                return
            if not scenario.needs.gpus:
                self._release = provision(options.vllm, say)
                self._vllm = self._release.argv_prefix
                return
        found = local_vllm()
        if options.vllm and (found is None or (found.version or "").partition("+")[0] != options.vllm):
            here = f"the vllm that is installed here is {found.version}" if found else "no vllm is installed here"
            raise InfraError(
                f"{here}, and a release that vllm-repro installs is a CPU build",
                hint=f"--server docker runs vLLM {options.vllm}; or install it, so that `vllm` on PATH is that one",
            )
        if found is None:
            raise InfraError(
                "no vllm is installed here", hint=f"name a release to install into a cache: --vllm {scenario.try_with}"
            )
        self._vllm = (str(found.executable),)

    def launch(self, scenario: Scenario, arm: Arm, port: int, *, run: str = "", number: int = 1) -> Launch:
        laid = self.laid(arm)
        return process_launch(
            scenario,
            arm,
            vllm=laid.vllm or self._vllm,
            env=laid.env,
            weights=self._weights,
            port=port,
            evidence=self.evidence,
        )

    def _server(self, scenario: Scenario, arm: Arm, number: int, log: Path, run: str) -> tuple[Launch, Server]:
        launch = self.launch(scenario, arm, self._ports.next())
        return process_server(launch, log, partial(ProcessServer, patched=self.laid(arm).digests))

    def laid(self, arm: Arm) -> Laid:
        if not arm.patches:
            return Laid()
        if self._release is not None:
            return over_release(self._release, arm.patches, self._say)
        return over_installed(Path(self._vllm[0]), arm.patches, self._say)

    def cannot(self, arm: Arm) -> str:
        return self._lacking or super().cannot(arm)


class DockerSite(Site):
    kind = ServerKind.DOCKER

    def __init__(self, options: Options, scenario: Scenario, say: Say = lambda _: None) -> None:
        engine = connect()
        self.engine_version = engine.version
        self._version = options.vllm or scenario.try_with
        self._image = options.image or default_image(scenario, self._version)
        try:
            facts = image_facts(engine, self._image)
        finally:
            engine.close()
        if facts.rehearsal:
            self.evidence = Evidence.REHEARSAL
            self.unchangeable = RehearsalSite.unchangeable
            self._weights = Weights(options.model or scenario.model.name)
        else:
            self.evidence = Evidence.GPU if scenario.needs.gpus else Evidence.CPU
            self._weights = weights_for(scenario, options)
        self._ports = _PortChooser(options.port)
        self._scenario, self._say = scenario, say
        self._laid: dict[tuple[Patch, ...], Laid] = {}

    def laid(self, arm: Arm) -> Laid:
        if arm.patches and arm.patches not in self._laid:
            unchanged = self.launch(self._scenario, replace(arm, patches=()), 0)
            assert unchanged.container is not None
            self._laid[arm.patches] = over_container(unchanged.container, arm.patches, "source", self._say)
        return self._laid.get(arm.patches, Laid())

    def launch(self, scenario: Scenario, arm: Arm, port: int, *, run: str = "", number: int = 1) -> Launch:
        laid = self.laid(arm)
        labels = (
            {**our_labels(run), "org.vllm-repro.scenario": scenario.id, "org.vllm-repro.arm": arm.name} if run else {}
        )
        return container_launch(
            scenario,
            arm,
            image=self._image,
            weights=self._weights,
            port=port,
            evidence=self.evidence,
            labels=labels,
            name=f"vllm-repro-{run[-6:]}-{arm.name}-{number}" if run else None,
            version=self._version,
            mounts=laid.mounts,
            more_env=laid.env,
        )

    def _server(self, scenario: Scenario, arm: Arm, number: int, log: Path, run: str) -> tuple[Launch, Server]:
        launch = self.launch(scenario, arm, self._ports.next(), run=run, number=number)
        assert launch.container is not None
        laid = self.laid(arm) if arm.patches else None
        if nodes_of(launch) == 1:
            return launch, DockerServer(launch.container, log=log, run=run, evidence=self.evidence, laid=laid)
        head, others = containers_over_nodes(launch)
        assert head.container is not None
        followers = [
            DockerServer(
                spec,
                log=log.with_suffix(f".rank{rank}.log"),
                run=run,
                evidence=self.evidence,
                port=launch.port,
                laid=laid,
            )
            for rank, spec in enumerate(others, 1)
        ]
        return head, RankedServer(
            DockerServer(head.container, log=log, run=run, evidence=self.evidence, laid=laid), followers
        )


class AttachSite(Site):
    """A running server. Whether it is a rehearsal is asked of it, so that one cannot pass for a vLLM."""

    kind = ServerKind.ATTACH
    attached = True
    unchangeable = "the source of a server that already runs cannot be changed: an arm that does so needs docker, process or the lab"

    def __init__(self, options: Options, scenario: Scenario, *, rehearsal: bool) -> None:
        if options.url is None:
            raise UsageError("--server attach needs a URL", hint="--url http://127.0.0.1:8000")
        self._url = options.url
        self._log = options.log
        self.evidence = Evidence.REHEARSAL if rehearsal else Evidence.GPU if scenario.needs.gpus else Evidence.CPU

    def launch(self, scenario: Scenario, arm: Arm, port: int, *, run: str = "", number: int = 1) -> Launch:
        command = scenario.command_of(arm)
        return Launch(
            ServerKind.ATTACH,
            self.evidence,
            command,
            differences=(f"the server was already running at {self._url}: its flags are not known to this report",),
        )

    def _server(self, scenario: Scenario, arm: Arm, number: int, log: Path, run: str) -> tuple[Launch, Server]:
        server = AttachServer(self._url, log=self._log, copy_to=log, evidence=self.evidence)
        return self.launch(scenario, arm, 0), server

    def ends_after(self, conclusion: Conclusion) -> bool:
        return conclusion.outcome not in (Outcome.CLEAN, Outcome.UNTRIGGERED)


class _Unavailable(Server):
    """Stands for a server that this machine cannot run: starting it says why."""

    def __init__(self, refusal: ReproError, log: Path) -> None:
        self.refusal = refusal
        self.base_url = "http://127.0.0.1:0"
        self.log_path = log

    async def start(self) -> ServerFacts:
        raise self.refusal

    async def exited(self) -> Exit:
        raise self.refusal

    async def stop(self) -> None:
        return None


def process_server(
    launch: Launch, log: Path, make: Callable[..., ProcessServer] = ProcessServer
) -> tuple[Launch, Server]:
    """A server of this host, of as many processes as the command has nodes. `make` takes what a `ProcessServer` does."""
    head, followers = over_nodes(launch, free_port()) if nodes_of(launch) > 1 else (launch, ())
    first = make(head.argv, port=head.port, log=log, env=head.env, kind=head.kind, evidence=head.evidence)
    if not followers:
        return head, first
    others = [
        make(
            follower.argv,
            port=free_port(),
            log=log.with_suffix(f".rank{follower.rank}.log"),
            env=follower.env,
            kind=head.kind,
            evidence=head.evidence,
        )
        for follower in followers
    ]
    return head, RankedServer(first, others)


def make_site(scenario: Scenario, options: Options, kind: ServerKind, say: Say, *, rehearsal_url: bool = False) -> Site:
    """The site of one run. Raises `UsageError`, `InfraError` or `Unsupported` before anything is started."""
    from vllm_repro.servers.lab import LabSite  # here, because it builds on this module

    makers: Mapping[ServerKind, Callable[[], Site]] = {
        ServerKind.REHEARSAL: lambda: RehearsalSite(options, scenario),
        ServerKind.PROCESS: lambda: ProcessSite(options, scenario, say),
        ServerKind.DOCKER: lambda: DockerSite(options, scenario, say),
        ServerKind.ATTACH: lambda: AttachSite(options, scenario, rehearsal=rehearsal_url),
        ServerKind.LAB: lambda: LabSite(options, scenario),
    }
    maker = makers.get(kind)
    if maker is None:
        raise Unsupported(f"{scenario.id} has no {kind} server", hint="--server rehearsal, process, docker or attach")
    return maker()


def open_site(
    scenario: Scenario,
    options: Options,
    choice: Choice,
    say: Say,
    *,
    chosen: Callable[[Site, str], None] = lambda *_: None,
    rehearsal_url: bool = False,
) -> Site:
    """The site of `choice`, ready for its first server. `chosen` is told of it, and why it is that one, before anything is fetched.

    Where `auto` picked the lab and its release cannot be installed, that is the rehearsal, and `chosen` is told again. Raises as
    `make_site`.
    """
    site = make_site(scenario, options, choice.kind, say, rehearsal_url=rehearsal_url)
    chosen(site, choice.why)
    try:
        site.prepare(say)
    except InfraError as error:
        if options.server != "auto" or choice.kind is not ServerKind.LAB:
            raise
        site = make_site(scenario, options, ServerKind.REHEARSAL, say)
        chosen(site, f"the lab cannot be set up: {error}")
    return site
