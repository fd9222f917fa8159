"""Orphans: servers on this host whose harness was killed.

`python -m` ends those of some leases; it is the guard's program.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_repro.errors import InfraError
from vllm_repro.host.lease import LeaseFacts, free_leases, remove_lease
from vllm_repro.host.processes import end_sessions, session_members, sessions_writing_to
from vllm_repro.servers.docker_engine import (
    LEASE_LABEL,
    Engine,
    connect,
    engine_errors,
    explain,
    remove_container,
)


@dataclass(frozen=True, kw_only=True)
class Orphans:
    """Leases whose harness is gone, and the processes and containers that their servers left."""

    leases: dict[Path, LeaseFacts]
    # one line for each server
    lines: tuple[str, ...]
    # ids of sessions
    sessions: tuple[int, ...]
    # ids of containers
    containers: tuple[str, ...]
    # why Docker could not be asked; empty if it was
    docker_error: str


def find_orphans(leases: Collection[str] | None = None) -> Orphans:
    """Return servers whose harness was killed: all of this user, or those of the named `leases`.

    Docker is asked only if one of them was a container; see `docker_error`.
    """
    free = {
        path: facts
        for path, facts in free_leases().items()
        if leases is None or path.name in leases
    }
    lines: list[str] = []
    sessions: list[int] = []
    for facts in free.values():
        if facts.log is not None and (live_sessions := sessions_writing_to(facts.log)):
            sessions += live_sessions
            pids = ", ".join(
                str(process.pid)
                for session in live_sessions
                for process in session_members(session)
            )
            lines.append(f"process {pids}, {_starter(facts)}: {facts.server}")
    containers: list[dict[str, Any]] = []
    docker_error = ""
    by_name = {path.name: facts for path, facts in free.items() if facts.log is None}
    try:
        if by_name:
            with contextlib.closing(connect()) as engine:
                containers = [
                    container
                    for container in _leased_containers(engine)
                    if container["Labels"][LEASE_LABEL] in by_name
                ]
    except InfraError as error:
        docker_error = str(error)
    for container in containers:
        name = str((container.get("Names") or [""])[0]).lstrip("/")
        facts = by_name[container["Labels"][LEASE_LABEL]]
        lines.append(
            f"container {name} ({container['Image']} {container['State']}), {_starter(facts)} for"
            f" {facts.server}"
        )
    return Orphans(
        # Without Docker the containers are unknown, so their leases must stay.
        leases={path: facts for path, facts in free.items() if facts.log or not docker_error},
        lines=tuple(lines),
        sessions=tuple(sessions),
        containers=tuple(container["Id"] for container in containers),
        docker_error=docker_error,
    )


def _starter(facts: LeaseFacts) -> str:
    """Return a phrase for the process and the folder that a server was started from."""
    return f"started by pid {facts.pid} in {facts.folder}"


def _leased_containers(engine: Engine) -> list[dict[str, Any]]:
    """Return the containers that this package started, as the Docker Engine lists them.

    Raises `InfraError` if it does not.
    """
    try:
        listed: list[dict[str, Any]] = engine.client.api.containers(
            all=True, filters={"label": LEASE_LABEL}
        )
    except engine_errors() as error:
        raise explain(error) from error
    return listed


def end_orphans(orphans: Orphans) -> None:
    """End the processes and remove the containers and leases of `orphans`, and nothing else.

    Raises `InfraError` at the first container that Docker does not remove.
    """
    _end_servers(orphans)
    for path, facts in orphans.leases.items():
        remove_lease(path, facts.temporary)


def _end_servers(orphans: Orphans) -> None:
    """End the processes and containers, and keep the lease files.

    A later try finds the rest by them. Raises `InfraError` at the first container that Docker does
    not remove.
    """
    end_sessions(orphans.sessions)
    if orphans.containers:
        with contextlib.closing(connect()) as engine:
            for container in orphans.containers:
                try:
                    remove_container(engine, container)
                except engine_errors() as error:
                    raise explain(error) from error


def sweep() -> list[str]:
    """End servers that killed runs left, before a new run, and return one line for each.

    An orphan that cannot be ended does not stop the run: another line reports it.
    """
    orphans = find_orphans()
    try:
        end_orphans(orphans)
    except InfraError as error:
        return [*orphans.lines, f"not everything: {error}; vllm-repro clean --yes tries again"]
    return list(orphans.lines)


def _end_orphans_of(leases: Collection[str]) -> None:
    """End the servers of `leases`, whose harness just exited, and remove these leases.

    Try it three times, a second apart, before the leases go.
    """
    # the locks may outlive the pipe, and Docker may still be creating a container
    for _ in range(3):
        orphans = find_orphans(leases)
        with contextlib.suppress(InfraError):
            _end_servers(orphans)
        time.sleep(1.0)
    end_orphans(find_orphans(leases))


if __name__ == "__main__":
    _end_orphans_of(sys.argv[1:])
