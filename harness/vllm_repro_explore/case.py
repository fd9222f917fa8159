"""Case of the search: the flags of one engine, and what it gets to do. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

__all__ = [
    "Case",
    "Request",
    "Setup",
    "beyond_scheduler",
    "least_blocks",
    "longest_of",
    "true_texts",
]


@dataclass(frozen=True)
class Request:
    """One request. Its tokens depend on the seed, its number and its family alone.

    prompt, answer: tokens. shared: leading prompt tokens that equal those of all other sharing
    requests of its family. after: steps between the start of the wave and this request. abort:
    steps after which the client disconnects; -1 for never. mid: the abort arrives within a step.
    eos: one token in so many ends the answer; 0 for none. stops: whether it has stop token ids.
    remote: a prefill whose blocks another server fetches. fetch: its prompt's blocks come from a
    prefill server. fails: they do not come. segments: for a streaming session, steps from its start
    to each further part; the last part ends it. images: (offset, tokens, number) of each image in
    the prompt; images of one number are the same. refused: the API server processes its images, and
    then refuses it.
    """

    prompt: int
    answer: int
    shared: int = 0
    after: int = 0
    abort: int = -1
    number: int = 0
    family: int = 0
    mid: bool = False
    priority: int = 0
    lora: int = 0
    salt: int = 0
    grammar: str = ""
    eos: int = 0
    stops: bool = False
    remote: bool = False
    fetch: bool = False
    fails: bool = False
    segments: tuple[int, ...] = ()
    images: tuple[tuple[int, int, int], ...] = ()
    refused: bool = False


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Server flags of a case, and how long KV transfers take.

    layers: `full`, `sliding` or `mamba`, in the model's order. window, block, chunk, max_len:
    tokens. cpu_blocks: capacity of an offloading connector, in blocks of one layer. store_polls,
    load_polls: polls before a transfer is complete. draft: draft tokens per step. runner: version
    of vLLM's model runner, 1 or 2. ops: (step, operation); `pause-keep-clear-10` pauses for 10
    steps in the mode "keep" and clears the caches; `-sleep-` also sleeps. grammar_looks: looks of
    the scheduler before a grammar is compiled. threshold: `--long-prefill-token-threshold`; 0 for
    none. load_failures: `kv_load_failure_policy` of a server that fetches blocks. largest_image:
    the most tokens of an image; 0 for a model without. whole_images: `--disable-chunked-mm-input`.
    image_cache: room in the cache of processed images, in image tokens; 0 for none.
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
    draft: int = 0
    runner: int = 1
    priority: bool = False
    loras: int = 0
    threshold: int = 0
    grammar_looks: int = 0
    load_failures: str = ""
    largest_image: int = 0
    whole_images: bool = False
    image_cache: int = 0
    ops: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Case:
    """Server flags and requests of one case.

    waves: each wave is sent after the previous one was answered. seed: seed of the token ids.
    """

    setup: Setup
    waves: tuple[tuple[Request, ...], ...]
    seed: int

    @classmethod
    def numbered(cls, setup: Setup, waves: Iterable[Iterable[Request]], seed: int) -> Case:
        """Return the case with the requests numbered from 1 on."""
        numbers = count(1)
        return cls(
            setup,
            tuple(tuple(replace(ask, number=next(numbers)) for ask in wave) for wave in waves),
            seed,
        )

    @property
    def asks(self) -> tuple[Request, ...]:
        return tuple(ask for wave in self.waves for ask in wave)

    def as_json(self) -> dict[str, Any]:
        """Return the flat object that the driver reads."""
        waves = [[asdict(ask) for ask in wave] for wave in self.waves]
        return asdict(self.setup) | {
            "layers": list(self.setup.layers),
            "waves": waves,
            "seed": self.seed,
        }


def least_blocks(setup: Setup) -> int:
    """Return the fewest blocks that vLLM accepts: for the longest request, and the null block."""
    whole = -(-setup.max_len // setup.block)
    inflight = setup.chunk * (2 if setup.asynchronous else 1)
    window = -(-min(setup.window - 1 + inflight, setup.max_len) // setup.block) + 1
    sliding = setup.layers.count("sliding") if setup.hybrid else 0
    # vLLM groups layers of one kind; the group size is the count of the rarer kind.
    return whole + sliding * window + setup.layers.count("mamba") * (2 + setup.draft) + 1


def longest_of(asks: Iterable[Request], block: int) -> int:
    """Return the most tokens of a request. A part of a session has up to two blocks."""
    return max(
        ask.prompt + ask.answer + len(ask.segments) * (2 * block + ask.answer) for ask in asks
    )


def beyond_scheduler(case: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the features of a case that the scheduler alone cannot play.

    case: as `Case.as_json` has it.
    """
    asks = [ask for wave in case["waves"] for ask in wave]
    features = {
        "Mamba layers": "mamba" in case["layers"],
        "prefills for another server": any(ask["remote"] for ask in asks),
        "prompts from a prefill server": any(ask["fetch"] for ask in asks),
        "priorities": case["priority"],
        "LoRA adapters": case["loras"],
        "a long prefill threshold": case["threshold"],
        "cache resets or pauses": case["ops"],
        "prompts of two families": len({ask["family"] for ask in asks if ask["shared"]}) > 1,
        "salts": any(ask["salt"] for ask in asks),
        "grammars": any(ask["grammar"] for ask in asks),
        "answers that end by their tokens": any(ask["eos"] or ask["stops"] for ask in asks),
        "streaming sessions": any(ask["segments"] for ask in asks),
        "images": any(ask["images"] for ask in asks),
        "aborts within a step": any(ask["mid"] and ask["abort"] >= 0 for ask in asks),
    }
    return true_texts(features)


def true_texts(conditions: Mapping[str, object]) -> tuple[str, ...]:
    """Return the texts whose condition holds."""
    return tuple(text for text, holds in conditions.items() if holds)
