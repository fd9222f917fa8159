"""Orphans: servers on this host whose harness was killed, together with its guard. `python -m` ends those of one owner."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_repro.errors import InfraError
from vllm_repro.host.owner import Owner, is_gone
from vllm_repro.host.processes import OrphanSession, end_orphan_sessions, orphan_sessions
from vllm_repro.servers.docker_engine import (
    OWNER_LABEL,
    RUN_LABEL,
    Engine,
    connect,
    engine_errors,
    explain,
    remove_container,
)

__all__ = ["OrphanContainer", "Orphans", "end_orphans", "find_orphans", "orphan_containers", "sweep"]


@dataclass(frozen=True, kw_only=True)
class OrphanContainer:
    """A container whose owner is gone. state: in Docker's words, such as "running"."""

    id: str
    name: str
    run: str
    owner: Owner
    image: str
    state: str

    def __str__(self) -> str:
        return (
            f"container {self.name} ({self.image} {self.state}), started by pid {self.owner.pid} for the run {self.run}"
        )


@dataclass(frozen=True, kw_only=True)
class Orphans:
    """Servers whose owner is gone. docker_error: why Docker could not be asked; empty if it was."""

    sessions: tuple[OrphanSession, ...]
    containers: tuple[OrphanContainer, ...]
    docker_error: str = ""

    def lines(self) -> list[str]:
        """Return one line per server. A record without a living process is none."""
        return [*(str(one) for one in self.sessions if one.pids), *map(str, self.containers)]


def find_orphans(mine: Callable[[Owner], bool] = lambda _: True) -> Orphans:
    """Return the orphans of this user whose owner satisfies `mine`."""
    sessions = tuple(one for one in orphan_sessions() if mine(one.record.owner))
    try:
        with contextlib.closing(connect()) as engine:
            containers = tuple(one for one in orphan_containers(engine) if mine(one.owner))
    except InfraError as error:
        return Orphans(sessions=sessions, containers=(), docker_error=str(error))
    return Orphans(sessions=sessions, containers=containers)


def orphan_containers(engine: Engine) -> Iterator[OrphanContainer]:
    """Return the containers with our labels whose owner is gone. Raises `InfraError`."""
    try:
        listed: list[dict[str, Any]] = engine.client.api.containers(
            all=True, filters={"label": [RUN_LABEL, OWNER_LABEL]}
        )
    except engine_errors() as error:
        raise explain(error) from error
    for one in listed:
        with contextlib.suppress(msgspec.MsgspecError):  # not a label of ours
            owner = msgspec.json.decode(one["Labels"][OWNER_LABEL], type=Owner)
            if is_gone(owner):
                yield OrphanContainer(
                    id=one["Id"],
                    name=str((one.get("Names") or [""])[0]).lstrip("/"),
                    run=one["Labels"][RUN_LABEL],
                    owner=owner,
                    image=str(one.get("Image", "")),
                    state=str(one.get("State", "")),
                )


def end_orphans(orphans: Orphans) -> None:
    """End and remove `orphans`, and nothing else. Raises `InfraError` at the first container that Docker does not remove."""
    end_orphan_sessions(orphans.sessions)
    if not orphans.containers:
        return
    with contextlib.closing(connect()) as engine:
        for container in orphans.containers:
            try:
                remove_container(engine, container.id)
            except engine_errors() as error:
                raise explain(error) from error


def sweep() -> list[str]:
    """End all orphans before a run, and return one line per orphan. An orphan that cannot be ended does not stop the run."""
    orphans = find_orphans()
    try:
        end_orphans(orphans)
    except InfraError as error:
        return [*orphans.lines(), f"not everything: {error}; vllm-repro clean --yes tries again"]
    return orphans.lines()


def _end_orphans_of(pid: int) -> None:
    """End what the harness with this pid, the parent of this guard, has left."""
    deadline = time.monotonic() + 10.0
    while os.getppid() == pid and time.monotonic() < deadline:  # the pipe closes shortly before the process is gone
        time.sleep(0.05)
    for _ in range(3):  # again: Docker may still be creating a container that was asked for
        with contextlib.suppress(InfraError):
            end_orphans(find_orphans(lambda owner: owner.pid == pid))
        time.sleep(1.0)


if __name__ == "__main__":
    _end_orphans_of(int(sys.argv[1]))
