"""A case of the search: the flags that a scheduler is made from, and the requests that it gets. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["Case", "Request", "Setup", "case_from"]


@dataclass(frozen=True)
class Request:
    """A request. prompt, answer: in tokens. shared: how many of the prompt's first tokens are those that all cases' sharing requests begin
    with. after: steps of the scheduler since its wave began. abort: steps after which its client goes away; -1 for never."""

    prompt: int
    answer: int
    shared: int = 0
    after: int = 0
    abort: int = -1


@dataclass(frozen=True)
class Setup:
    """What a server would be told, and how long copies take.

    layers: `full` or `sliding`, in the model's order; vLLM makes its groups of them. window, block, chunk, max_len: in tokens.
    cpu_blocks: the room of an offloading connector, in blocks of one layer. store_polls, load_polls: how often a transfer is asked
    for before it is over. draft: tokens that are proposed a step. runner: which of vLLM's model runners the scheduler serves.
    """

    layers: tuple[str, ...] = ("full", "sliding")
    window: int = 128
    block: int = 32
    blocks: int = 330
    chunk: int = 2048
    seqs: int = 8
    max_len: int = 7600
    caching: bool = True
    hybrid: bool = True
    connector: str = ""
    lazy: bool = False
    cpu_blocks: int = 1320
    store_polls: int = 1
    load_polls: int = 0
    asynchronous: bool = False
    runner: int = 1
    draft: int = 0


@dataclass(frozen=True)
class Case:
    """waves: each is sent when the one before it has been answered. seed: of token ids, and of how many drafts are taken."""

    setup: Setup
    waves: tuple[tuple[Request, ...], ...]
    seed: int

    @property
    def asks(self) -> tuple[Request, ...]:
        return tuple(ask for wave in self.waves for ask in wave)

    def as_json(self) -> dict[str, Any]:
        """One flat object, as the driver takes it."""
        waves = [[asdict(ask) for ask in wave] for wave in self.waves]
        return asdict(self.setup) | {"layers": list(self.setup.layers), "waves": waves, "seed": self.seed}


def case_from(value: Mapping[str, Any]) -> Case:
    """What `as_json` gave. Raises KeyError, TypeError or ValueError for anything else."""
    names = [field.name for field in fields(Setup)]
    setup = Setup(**{name: value[name] for name in names} | {"layers": tuple(value["layers"])})
    waves = tuple(tuple(Request(**ask) for ask in wave) for wave in value["waves"])
    return Case(setup, waves, value["seed"])
