"""`Site`: where the servers of one run come from.

Each kind of server has one, in its own module (`vllm_repro.servers.kinds`).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, cast

from vllm_repro.errors import InfraError, ReproError, Unsupported, UsageError
from vllm_repro.host.gpu_lease import leased_gpus
from vllm_repro.host.machine import gpus
from vllm_repro.host.ports import free_port
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.base import Exit, Server, ServerFacts
from vllm_repro.servers.kinds import ServerKind, kinds
from vllm_repro.servers.launch import Launch
from vllm_repro.servers.multi_node import Nodes
from vllm_repro.servers.options import ServerOptions, lacking, needs_of, unfit
from vllm_repro.servers.overlay import PatchedSource
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_diagnosis.evidence import Evidence

Notify = Callable[[str], None]

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
"""Bugs that the rehearsal engine imitates (fixtures/rehearsal/rules.py).

It survives all other bugs, which proves nothing.
"""

_NO_HARDWARE = (
    "with needs=Needs() and dummy=Dummy(…) in the file, --server process --weights dummy --vllm"
    " RELEASE runs a tiny model on this CPU; --server rehearsal shows it at work without vLLM"
)


class Offer(NamedTuple):
    """Answer of one kind of server to `--server auto`: whether it runs the scenario, and why."""

    accepted: bool
    why: str = ""


class ServerChoice(NamedTuple):
    """The kind of server of a run, and why it was chosen; empty if the command line names it."""

    kind: ServerKind
    why: str


class Site(ABC):
    """One kind of server, such as Docker or a local vLLM, opened for one run."""

    kind: ServerKind
    evidence: Evidence
    engine_version: str | None = None
    """Version of the Docker Engine."""
    version: str | None = None
    """Release that a running server reports."""
    unchangeable = ""
    """Reason that vLLM's source cannot be changed here; empty if it can."""
    gpus: tuple[str, ...] = ()
    """Indices of the leased GPUs, as `nvidia-smi` counts."""
    others: Nodes | None = None
    """Hosts of a server's further nodes; None for this host."""

    @abstractmethod
    def __init__(
        self, options: ServerOptions, scenario: Scenario, notify: Notify = lambda _: None
    ) -> None: ...

    @classmethod
    @abstractmethod
    def offer(
        cls, scenario: Scenario, options: ServerOptions, *, missing: str, download: bool
    ) -> Offer:
        """Answer `--server auto`: accept the scenario if this kind of server can run it here.

        missing: what this machine lacks for it, as a sentence; empty if nothing. download: a
        release may be downloaded.
        """

    def prepare(self, notify: Notify) -> None:
        """Fetch what the servers need, which may take minutes; by default nothing.

        Raises `InfraError` or `Unsupported`.
        """
        return

    @contextlib.contextmanager
    def leased(self, scenario: Scenario, options: ServerOptions, notify: Notify) -> Iterator[None]:
        """Lease the GPUs of the servers, for all boots of a run; block while other runs hold them.

        Set `gpus` to their indices; empty if the servers use no GPU, are attached, or this machine
        lacks what they need. Raises `InfraError` if too few GPUs are left.
        """
        needs = needs_of(scenario, options)
        on_gpus = (
            self.evidence is Evidence.GPU and self.kind.facts.started and not lacking(needs, gpus())
        )
        with leased_gpus(
            max(1, needs.gpus) if on_gpus else 0, partial(unfit, needs), notify
        ) as self.gpus:
            yield

    @abstractmethod
    def launch(
        self, scenario: Scenario, arm: Arm, port: int, *, run: str = "", number: int = 1
    ) -> Launch:
        """Return exactly what will run for `arm`, with its differences from the bug report.

        run: name of the run's folder; empty for `show`. number: of the trial.
        """

    def server(
        self, scenario: Scenario, arm: Arm, number: int, log: Path, run: str
    ) -> tuple[Launch, Server]:
        """Return the launch and the server of one trial, not started.

        If it cannot run here, its `start` raises the reason. number: of the trial. log: the file
        that the server will write. run: name of the run's folder.
        """
        refusal: ReproError | None = None
        try:
            if why := self.why_not(arm):
                refusal = Unsupported(why, hint=self._hint(arm))
        except InfraError as error:
            refusal = error
        if refusal is not None:
            unchanged = replace(arm, patches=())
            return self.launch(
                scenario, unchanged, free_port(), run=run, number=number
            ), _Unavailable(refusal, log)
        return self._server(scenario, arm, number, log, run)

    @abstractmethod
    def _server(
        self, scenario: Scenario, arm: Arm, number: int, log: Path, run: str
    ) -> tuple[Launch, Server]:
        """Return the launch and the server of a trial that can run here, not started."""

    def _hint(self, arm: Arm) -> str:
        """Return what to do instead if `arm` cannot run here; empty if there is nothing."""
        if not arm.patches:
            return _NO_HARDWARE
        return "" if self.unchangeable else "--vllm names another release, or leave the patch out"

    def why_not(self, arm: Arm) -> str:
        """Return why this site cannot run `arm`, as a sentence; empty if it can.

        This patches vLLM for the arm. Raises `InfraError` if that cannot be done.
        """
        if arm.patches and self.unchangeable:
            return self.unchangeable
        try:
            self.patched_source(arm)
        except Unsupported as error:
            return f"{error}"
        return ""

    def patched_source(self, arm: Arm) -> PatchedSource:
        """Return the variables and mounts by which a server runs the arm's patched vLLM.

        Make the overlay on first use; by default there is none. Raises `Unsupported` if a patch
        does not fit, and `InfraError` if the overlay cannot be made.
        """
        return PatchedSource()

    def usual_arms(self, scenario: Scenario, arms: Sequence[Arm]) -> list[Arm]:
        """Return those of `arms` that a run boots if the user names none.

        By default these are the arms without patches.
        """
        return [arm for arm in arms if not arm.patches]

    def imitates(self, scenario: Scenario) -> bool:
        """Return False for a rehearsal of a bug that the rehearsal engine lacks; else True."""
        return self.evidence is not Evidence.REHEARSAL or scenario.issue in IMITATED

    def ends_after(self, outcome: Outcome, *, launched: bool) -> bool:
        """Return True if this outcome makes further trials useless.

        A machine that cannot start the server of one arm can start none. launched: the server of
        this trial was started.
        """
        return outcome is Outcome.UNSUPPORTED and not launched


class _Unavailable(Server):
    """Stand-in for a server that cannot run on this machine: `start` raises the reason."""

    def __init__(self, refusal: ReproError, log: Path) -> None:
        self.refusal = refusal
        self.base_url = "http://127.0.0.1:0"
        self.log_path = log

    async def start(self) -> ServerFacts:
        """Raise the reason why the server cannot run here."""
        raise self.refusal

    async def exited(self) -> Exit:
        """Raise the reason why the server cannot run here."""
        raise self.refusal

    async def stop(self) -> None:
        return None


def site_class(kind: ServerKind) -> type[Site]:
    """Import and return the `Site` class of a kind of server.

    Its module is loaded here, because some load heavy libraries such as the Docker SDK.
    """
    module, _, name = kind.facts.site.partition(":")
    return cast(type[Site], getattr(import_module(module), name))


def choose(scenario: Scenario, options: ServerOptions, *, download: bool = True) -> ServerChoice:
    """Choose the kind of server for `--server auto`: the first that can run the scenario here.

    Ask Docker and the cache to find out. Raises `UsageError` if none can.

    download: releases may be downloaded. A test suite that runs unattended must not fill a disk
    with gigabytes.
    """
    missing = lacking(needs_of(scenario, options), gpus())
    if missing and not lacking(needs_of(scenario, replace(options, weights="dummy")), gpus()):
        missing += "; --weights dummy runs on it"
    declined: list[str] = []
    for kind in kinds(
        lambda facts: facts.any_source or not options.vllm or bool(options.vllm.release)
    ):
        accepted, why = site_class(kind).offer(
            scenario, options, missing=missing, download=download
        )
        if accepted:
            return ServerChoice(kind, why or "; ".join(declined))
        declined += [why] if why else []
    raise UsageError(
        f"no kind of server runs {options.vllm} for {scenario.id}: {'; '.join(declined)}",
        hint="name a release with --vllm",
    )


def open_site(
    scenario: Scenario,
    options: ServerOptions,
    choice: ServerChoice,
    notify: Notify,
    *,
    chosen: Callable[[Site, str], None] = lambda *_: None,
) -> Site:
    """Return the `Site` of `choice` with all it needs fetched, ready for its first server.

    `chosen` gets the site and the reason before anything is fetched.

    If `auto` chose the lab and its release cannot be installed, open the rehearsal instead and call
    `chosen` again. Raises `UsageError` for options that do not go together, and `InfraError` or
    `Unsupported` if this kind cannot run here.
    """
    site = site_class(choice.kind)(options, scenario, notify)
    chosen(site, choice.why)
    try:
        site.prepare(notify)
    except InfraError as error:
        if options.server != "auto" or choice.kind is not ServerKind.LAB:
            raise
        site = site_class(ServerKind.REHEARSAL)(options, scenario, notify)
        chosen(site, f"the lab cannot be set up: {error}")
    return site
