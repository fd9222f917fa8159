"""Case of the search: the flags of one engine, and what it gets to do. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from typing import Any


@dataclass(frozen=True)
class Request:
    """One request. Its prompt's tokens are drawn from the case's seed, `number` and `family`."""

    # tokens, as `answer`
    prompt: int
    answer: int
    # leading prompt tokens that equal those of all other sharing requests of its family
    shared: int = 0
    # steps between the start of the wave and this request
    after: int = 0
    # steps after which the client disconnects; -1 for never
    abort: int = -1
    number: int = 0
    family: int = 0
    # the abort arrives within a step
    mid: bool = False
    # a smaller one is scheduled first
    priority: int = 0
    # number of its LoRA adapter, and of its cache salt; 0 for none
    lora: int = 0
    salt: int = 0
    # name in the driver's `GRAMMARS`; empty for none
    grammar: str = ""
    # one token in so many ends the answer; 0 for none; -N for answers of N tokens, over and over,
    # that end as they repeat themselves (`repetition_detection`)
    eos: int = 0
    # it has stop token ids
    stops: bool = False
    # a prefill whose blocks another server fetches
    remote: bool = False
    # its prompt's blocks come from a prefill server
    fetch: bool = False
    # the fetch fails: no block comes
    fails: bool = False
    # for a streaming session, steps from its start to each further part; the last part ends it
    segments: tuple[int, ...] = ()
    # (offset, tokens, number) of each image in the prompt; images of one number are the same
    images: tuple[tuple[int, int, int], ...] = ()
    # the API server processes its images, and then refuses it
    refused: bool = False
    # number of the request whose prompt and answer its prompt begins with; -1 for none
    follows: int = -1
    # tokens before which the answer must not end by a token (`min_tokens`)
    least: int = 0
    # index from which on the shared tokens are those of the other family; 0 for none
    switch: int = 0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Server flags of a case, and how long KV transfers take."""

    # `full`, `sliding` or `mamba`, in the model's order
    layers: tuple[str, ...] = ("full", "sliding")
    # tokens, as `block`, `chunk` and `max_len`
    window: int = 128
    block: int = 32
    # `--num-gpu-blocks-override`
    blocks: int = 330
    # `--max-num-batched-tokens`
    chunk: int = 2048
    # `--max-num-seqs`
    seqs: int = 8
    max_len: int = 7600
    caching: bool = True
    # the hybrid KV cache manager is on
    hybrid: bool = True
    # name of vLLM's KV connector; empty for none
    connector: str = ""
    # `lazy_offload` of SimpleCPUOffloadConnector
    lazy: bool = False
    # capacity of an offloading connector, in blocks of one layer
    cpu_blocks: int = 1320
    # polls before a transfer is complete, as `load_polls`
    store_polls: int = 1
    load_polls: int = 0
    asynchronous: bool = False
    # draft tokens per step
    draft: int = 0
    # version of vLLM's model runner, 1 or 2
    runner: int = 1
    # `--scheduling-policy priority`
    priority: bool = False
    # `--max-loras`; 0 for none
    loras: int = 0
    # `--long-prefill-token-threshold`; 0 for none
    threshold: int = 0
    # looks of the scheduler before a grammar is compiled
    grammar_looks: int = 0
    # `kv_load_failure_policy` of a server that fetches blocks
    load_failures: str = ""
    # the most tokens of an image; 0 for a model without
    largest_image: int = 0
    # `--disable-chunked-mm-input`
    whole_images: bool = False
    # room in the cache of processed images, in image tokens; 0 for none
    image_cache: int = 0
    # (step, operation); `pause-keep-clear-10` pauses for 10 steps in the mode "keep" and clears
    # the caches; `-sleep-` also sleeps
    ops: tuple[tuple[int, str], ...] = ()
    # answers may end at `max_len`
    cut: bool = False
    # blocks of each offloaded chunk
    chunk_blocks: int = 1
    # the drafts are those of EAGLE or MTP, whose blocks hold a token less
    eagle: bool = False
    # the engine keeps statistics
    stats: bool = False
    # `--kv-events-config`
    events: bool = False


@dataclass(frozen=True)
class Case:
    """One input of the search: a server's flags, and waves of requests to send to it.

    A wave is sent once the requests of the one before are answered.
    """

    setup: Setup
    # each is sent after the previous one was answered
    waves: tuple[tuple[Request, ...], ...]
    # seed of the token ids
    seed: int

    @classmethod
    def numbered(cls, setup: Setup, waves: Iterable[Iterable[Request]], seed: int) -> Case:
        """Return a case whose requests are numbered from 1 on.

        `follows` gets the new number too, or -1 if the request that it names is gone.
        """
        kept, numbers = [list(wave) for wave in waves], count(1)
        # a copy of a request has its number; followers follow the last one
        renamed = {ask.number: number for ask, number in zip(chain(*kept), count(1))}
        return cls(
            setup,
            tuple(
                tuple(
                    replace(ask, number=next(numbers), follows=renamed.get(ask.follows, -1))
                    for ask in wave
                )
                for wave in kept
            ),
            seed,
        )

    @property
    def asks(self) -> tuple[Request, ...]:
        """Return the requests of all waves, in order."""
        return tuple(ask for wave in self.waves for ask in wave)

    def as_json(self) -> dict[str, Any]:
        """Return the case as the flat JSON object that the driver process reads."""
        waves = [[asdict(ask) for ask in wave] for wave in self.waves]
        return asdict(self.setup) | {
            "layers": list(self.setup.layers),
            "waves": waves,
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Case:
        """Return the case of an object of `as_json`; what it lacks has its default."""
        setup = {name: _tuples(value[name]) for name in Setup.__dataclass_fields__ if name in value}
        waves = [
            tuple(Request(**{name: _tuples(part) for name, part in ask.items()}) for ask in wave)
            for wave in value["waves"]
        ]
        return cls(Setup(**setup), tuple(waves), value["seed"])


def _tuples(value: Any) -> Any:
    """Return a JSON value with tuples in place of lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def least_blocks(setup: Setup) -> int:
    """Return the fewest KV blocks that vLLM accepts: for `max_len` tokens and a null block."""
    whole = -(-setup.max_len // setup.block)
    inflight = setup.chunk * (2 if setup.asynchronous else 1)
    window = -(-min(setup.window - 1 + inflight, setup.max_len) // setup.block) + 1
    sliding = setup.layers.count("sliding") if setup.hybrid else 0
    # vLLM groups layers of one kind; the group size is the count of the rarer kind.
    return whole + sliding * window + setup.layers.count("mamba") * (2 + setup.draft) + 1


def longest_of(asks: Iterable[Request], block: int) -> int:
    """Return the most tokens, prompt and answers together, that one of the requests can reach.

    Each further part of a session adds two blocks and an answer. Return 0 without requests.
    """
    return max(
        (ask.prompt + ask.answer + len(ask.segments) * (2 * block + ask.answer) for ask in asks),
        default=0,
    )


def least_length(setup: Setup, asks: Sequence[Request]) -> int:
    """Return the least `max_len` with which vLLM accepts the requests and all they grow to.

    With `setup.cut`, only streaming sessions get room for their answers.
    """
    whole = [ask for ask in asks if ask.segments or not setup.cut]
    return max(*(ask.prompt + 1 for ask in asks), 0, longest_of(whole, setup.block))


def beyond_scheduler(case: Mapping[str, Any]) -> tuple[str, ...]:
    """Return in words the features of a case that a test of vLLM's scheduler alone cannot run.

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
        "chats": any(ask["follows"] >= 0 for ask in asks),
        "answers that end at the model's length": case["cut"],
        "offloaded chunks of several blocks": case["chunk_blocks"] > 1,
        "EAGLE drafts": case["eagle"],
        "prompts that switch families": any(ask.get("switch") for ask in asks),
        "statistics": case["stats"],
        "KV events": case["events"],
        "aborts within a step": any(ask["mid"] and ask["abort"] >= 0 for ask in asks),
    }
    return true_texts(features)


def true_texts(conditions: Mapping[str, object]) -> tuple[str, ...]:
    """Return the keys of `conditions` whose value is true, in order."""
    return tuple(text for text, holds in conditions.items() if holds)
