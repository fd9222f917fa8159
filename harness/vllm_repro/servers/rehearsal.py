"""The rehearsal engine as a kind of server: a process that imitates vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

from packaging.version import Version

from vllm_repro.errors import UsageError
from vllm_repro.host.ports import free_port
from vllm_repro.resources import rehearsal_engine
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.base import Server
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import NO_SOURCE_TO_CHANGE, Launch, rehearsal_launch
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.process import process_server
from vllm_repro.servers.site import Notify, Offer, Site
from vllm_repro_diagnosis.evidence import Evidence

_OLDEST, _NEWEST = (0, 7), (0, 32)
"""Oldest and newest release that its rules cover.

It would also run as a release that does not exist, and show no bug.
"""


class RehearsalSite(Site):
    """The servers of `--server rehearsal`: processes that imitate one release of vLLM."""

    kind = ServerKind.REHEARSAL
    evidence = Evidence.REHEARSAL
    unchangeable = NO_SOURCE_TO_CHANGE

    def __init__(
        self, options: ServerOptions, scenario: Scenario, notify: Notify = lambda _: None
    ) -> None:
        self._version = f"{options.vllm or scenario.try_with}"
        named, known = (Version(text).release[:2] for text in (self._version, scenario.try_with))
        if not min(_OLDEST, known) <= named <= max(_NEWEST, known):
            raise UsageError(
                f"the rehearsal engine imitates vLLM {'.'.join(map(str, _OLDEST))} to"
                f" {'.'.join(map(str, _NEWEST))}, not {self._version}",
                hint="--vllm names another release, or --server lab runs real vLLM",
            )
        self._model = options.model

    @classmethod
    def offer(
        cls, scenario: Scenario, options: ServerOptions, *, missing: str, download: bool
    ) -> Offer:
        """Accept every scenario: `--server auto` asks this kind last."""
        return Offer(True)

    def launch(
        self, scenario: Scenario, arm: Arm, port: int, *, run: str = "", number: int = 1
    ) -> Launch:
        """Return the command that will start the rehearsal engine for `arm`."""
        engine = (sys.executable, str(rehearsal_engine()))
        return rehearsal_launch(
            scenario,
            arm,
            engine=engine,
            version=self._version,
            model=self._model or scenario.model.name,
            port=port,
        )

    def _server(
        self, scenario: Scenario, arm: Arm, number: int, log: Path, run: str
    ) -> tuple[Launch, Server]:
        """Return the launch and the imitated server of one trial, not started."""
        return process_server(self.launch(scenario, arm, free_port()), arm, log, self.others)
