"""Case of the search: the flags of one scheduler, and the requests that it gets. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Case", "Request", "Setup"]


@dataclass(frozen=True)
class Request:
    """One request of a case.

    prompt, answer: tokens. shared: leading prompt tokens that equal those of all other sharing requests.
    after: scheduler steps between the start of the wave and this request.
    abort: steps after which the client disconnects; -1 for never.
    """

    prompt: int
    answer: int
    shared: int = 0
    after: int = 0
    abort: int = -1


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Server flags of a case, and how long KV transfers take.

    layers: `full` or `sliding`, in the model's order. window, block, chunk, max_len: tokens.
    cpu_blocks: capacity of an offloading connector, in blocks of one layer.
    store_polls, load_polls: polls before a transfer is complete.
    draft: draft tokens per step. runner: version of vLLM's model runner, 1 or 2.
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
    """Server flags and requests of one case.

    waves: each wave is sent after the previous one was answered.
    seed: seed of the token ids and of the number of accepted draft tokens.
    """

    setup: Setup
    waves: tuple[tuple[Request, ...], ...]
    seed: int

    @property
    def asks(self) -> tuple[Request, ...]:
        return tuple(ask for wave in self.waves for ask in wave)

    def as_json(self) -> dict[str, Any]:
        """Return the flat object that the driver reads."""
        waves = [[asdict(ask) for ask in wave] for wave in self.waves]
        return asdict(self.setup) | {"layers": list(self.setup.layers), "waves": waves, "seed": self.seed}
