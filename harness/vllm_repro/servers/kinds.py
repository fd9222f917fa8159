"""Registry of server kinds. To add a kind, write a module with its `Site` and add it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from vllm_repro.scenario.scenario import Scenario
from vllm_repro_diagnosis.evidence import Evidence


class ServerKind(StrEnum):
    """Kind of server that a run uses, as in `--server`.

    `--server auto` takes the first one that accepts the scenario.
    """

    ATTACH = "attach"
    DOCKER = "docker"
    PROCESS = "process"
    LAB = "lab"
    SCHEDULER = "scheduler"
    REHEARSAL = "rehearsal"

    @property
    def facts(self) -> KindFacts:
        """Return the registered facts about this kind."""
        return KINDS[self]


@dataclass(frozen=True, kw_only=True)
class KindFacts:
    """Facts about a kind of server: its `Site` class, its options, its evidence."""

    # `module:class` of its `Site`, imported when it is opened
    site: str
    # one line for help and docs
    summary: str
    # the harness starts and stops the server
    started: bool = True
    # the server is a container
    container: bool = False
    # its runs need the scenario's GPUs
    on_gpus: bool = False
    # None if the site decides: GPU or CPU
    evidence: Evidence | None = None
    # names of `ServerOptions` that only some kinds read
    options: frozenset[str] = frozenset()
    # `--vllm` may name a vLLM that is no release
    any_source: bool = False
    # release of a run that names none
    release: Callable[[Scenario], str | None] = lambda _: None

    @property
    def runs_vllm(self) -> bool:
        """Return True if the server runs vLLM's own code; False if it only imitates vLLM.

        True for `attach` and `docker`, although theirs may imitate it: their `Site` finds out.
        """
        return self.evidence is not Evidence.REHEARSAL

    @property
    def in_lab(self) -> bool:
        """Return True if runs use the commands, sizes and model of the scenario's `lab=`."""
        return self.evidence in (Evidence.LAB, Evidence.SCHEDULER)


KINDS: Mapping[ServerKind, KindFacts] = {
    ServerKind.ATTACH: KindFacts(
        site="vllm_repro.servers.attach:AttachSite",
        summary="a server that already runs, at --url",
        started=False,
        options=frozenset({"url", "log"}),
    ),
    ServerKind.DOCKER: KindFacts(
        site="vllm_repro.servers.docker_site:DockerSite",
        summary="a container of vLLM's image",
        container=True,
        on_gpus=True,
        options=frozenset({"image", "patch"}),
    ),
    ServerKind.PROCESS: KindFacts(
        site="vllm_repro.servers.process:ProcessSite",
        summary="the installed vllm, or on a CPU a release installed into a cache",
        on_gpus=True,
        options=frozenset({"patch"}),
        any_source=True,
    ),
    ServerKind.LAB: KindFacts(
        site="vllm_repro.servers.lab:LabSite",
        summary="a real release on the CPU, with parts of it replaced",
        evidence=Evidence.LAB,
        options=frozenset({"patch"}),
        any_source=True,
        release=lambda scenario: scenario.lab_release,
    ),
    ServerKind.SCHEDULER: KindFacts(
        site="vllm_repro.servers.lab:SchedulerSite",
        summary="the lab without a model, for bugs that the scheduler decides",
        evidence=Evidence.SCHEDULER,
        options=frozenset({"patch"}),
        any_source=True,
        release=lambda scenario: scenario.lab_release,
    ),
    ServerKind.REHEARSAL: KindFacts(
        site="vllm_repro.servers.rehearsal:RehearsalSite",
        summary="an engine that imitates vLLM, and proves nothing about it",
        evidence=Evidence.REHEARSAL,
        release=lambda scenario: scenario.try_with,
    ),
}


def kinds(condition: Callable[[KindFacts], bool] = lambda _: True) -> list[ServerKind]:
    """Return the kinds whose facts satisfy `condition`, in the order of preference."""
    return [kind for kind in ServerKind if condition(kind.facts)]
