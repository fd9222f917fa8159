"""What runs that were killed have left on this host, whatever its kind."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_repro.errors import InfraError
from vllm_repro.host.processes import LeftProcess, list_left, remove_left
from vllm_repro.servers.docker_orphans import Leftover, list_leftovers, remove_leftovers

__all__ = ["Left", "find", "remove", "sweep"]


@dataclass(frozen=True)
class Left:
    """Processes and Docker objects whose owner is gone. docker_error: why Docker could not be asked, if it could not."""

    processes: tuple[LeftProcess, ...]
    docker: tuple[Leftover, ...]
    docker_error: str = ""

    def lines(self) -> list[str]:
        """One line for people each; a record without a living process is not worth one."""
        found = [f"process {', '.join(map(str, item.pids))}: {item.command}" for item in self.processes if item.pids]
        return found + [
            f"{item.kind} {item.name} ({item.image} {item.state})".replace("( )", "") for item in self.docker
        ]


def find() -> Left:
    """Looks, and touches nothing."""
    processes = tuple(list_left())
    try:
        return Left(processes, tuple(list_leftovers()))
    except InfraError as error:
        return Left(processes, (), str(error))


def remove(left: Left) -> None:
    """Removes what `find` found, and nothing else."""
    remove_left(left.processes)
    if left.docker:
        remove_leftovers(left.docker)


def sweep() -> list[str]:
    """What the next run does first: finds, removes, and returns the lines that say so. What cannot be removed does not stop a run."""
    left = find()
    try:
        remove(left)
    except InfraError as error:
        return [*left.lines(), f"not everything: {error}; vllm-repro clean --yes tries again"]
    return left.lines()
