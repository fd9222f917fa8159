"""Containers and networks of this package whose run was killed.

Each carries the labels of the process that made it. Only what has the label of a run is looked at, since the
engine may be shared, and only what belongs to a process that is gone for sure is removed. Blocking calls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vllm_repro.errors import InfraError
from vllm_repro.host.owner import Owner, is_alive
from vllm_repro.servers.docker_engine import OWNER_LABEL, RUN_LABEL, Engine, connect
from vllm_repro.servers.docker_errors import ENGINE_ERRORS, explain, is_gone

__all__ = ["Kind", "Leftover", "list_leftovers", "remove_container", "remove_leftovers"]

_GONE_TIMEOUT_S = 60.0


class Kind(StrEnum):
    CONTAINER = "container"
    NETWORK = "network"


@dataclass(frozen=True)
class Leftover:
    """One thing that a killed run left. state: the engine's word, for example "running"; empty for a
    network.
    """

    kind: Kind
    id: str
    name: str
    run: str
    owner: Owner
    image: str = ""
    state: str = ""


def list_leftovers(engine: Engine | None = None) -> list[Leftover]:
    """What killed runs left in the engine, containers first. Raises `InfraError` where no engine answers."""
    with _engine(engine) as used:
        labelled = {"label": RUN_LABEL}
        containers: list[dict[str, Any]] = used.client.api.containers(all=True, filters=labelled)
        networks: list[dict[str, Any]] = used.client.api.networks(filters=labelled)
    return [
        *_leftovers(Kind.CONTAINER, containers),
        *_leftovers(Kind.NETWORK, networks),
    ]


def remove_leftovers(leftovers: Iterable[Leftover] | None = None, engine: Engine | None = None) -> list[Leftover]:
    """Removes `leftovers`, or all that there are, and returns those that were removed.

    Raises `InfraError` at the first one that the engine will not remove.
    """
    with _engine(engine) as used:
        removed = []
        for leftover in list_leftovers(used) if leftovers is None else leftovers:
            if leftover.kind is Kind.CONTAINER:
                remove_container(used, leftover.id)
            else:
                try:
                    used.client.api.remove_network(leftover.id)
                except ENGINE_ERRORS as error:
                    if not is_gone(error):
                        raise
            removed.append(leftover)
    return removed


def remove_container(engine: Engine, container: str) -> None:
    """Kills and removes a container with its unnamed volumes, and returns when the engine knows it no more.

    Raises what the SDK raises where it cannot be removed, `InfraError` where its removal does not end.
    """
    try:
        engine.client.api.remove_container(container, v=True, force=True)
    except ENGINE_ERRORS as error:
        if not is_gone(error):
            raise
    deadline = time.monotonic() + _GONE_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            engine.client.api.inspect_container(container)
        except ENGINE_ERRORS as error:
            if is_gone(error):
                return
            raise
        time.sleep(0.05)
    raise InfraError(f"the Docker Engine did not remove container {container[:12]} in {_GONE_TIMEOUT_S:.0f} s")


@contextlib.contextmanager
def _engine(engine: Engine | None) -> Iterator[Engine]:
    """`engine`, or one of our own that is closed afterwards; what it refuses is an error of this package."""
    used = engine or connect()
    try:
        yield used
    except ENGINE_ERRORS as error:
        raise explain(error, "") from error
    finally:
        if engine is None:
            used.close()


def _leftovers(kind: Kind, listed: list[dict[str, Any]]) -> Iterator[Leftover]:
    for item in listed:
        labels: dict[str, str] = item.get("Labels") or {}
        owner = Owner.from_labels(labels, OWNER_LABEL)
        if RUN_LABEL not in labels or owner is None or is_alive(owner):
            continue
        name = str(item["Name"] if kind is Kind.NETWORK else (item.get("Names") or [""])[0]).lstrip("/")
        yield Leftover(
            kind,
            item["Id"],
            name,
            labels[RUN_LABEL],
            owner,
            str(item.get("Image", "")),
            str(item.get("State", "")),
        )
