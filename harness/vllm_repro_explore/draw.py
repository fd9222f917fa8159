"""Random cases from seeds, over every axis of the search. Pure.

Most pools are just large enough for the longest request, because block bugs appear when blocks are short.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from vllm_repro_explore.case import Case, Request, Setup

__all__ = ["AXES", "draw", "least_blocks", "waves_of"]

_LAYERS = (
    ("full",),
    ("full", "sliding"),
    ("sliding", "full"),
    ("full", "sliding", "sliding"),
    ("sliding", "sliding", "full"),
    ("sliding", "full", "sliding"),
)
AXES = (
    "layers and their order, window, block size, blocks of the pool, chunk, requests at once, prefix caching, hybrid manager, room and "
    "mode of the connector, steps that stores and loads take, asynchronous scheduling, model runner, draft tokens, lengths of prompts "
    "and answers, shared prefixes, requests in flight together or late, clients that go away"
)


def draw(seed: int, connector: str = "") -> Case:
    """Return the case of a seed; it is the same for every release."""
    rng = Random(f"{seed}")
    block = rng.choice((16, 32, 32, 64))
    chunk = block * rng.choice((2, 4, 8, 16, 32)) + rng.choice((0, 0, 0, 0, 1, block // 2, block - 1))
    waves = waves_of(rng, block, chunk)
    asks = [ask for wave in waves for ask in wave]
    max_len = max(ask.prompt + ask.answer for ask in asks) + rng.choice((1, 8, 2 * block))
    seqs = rng.choice((1, 2, 4, 8))
    setup = Setup(
        layers=rng.choice(_LAYERS),
        window=rng.choice((block // 2, block, 2 * block, 4 * block, 100)),
        block=block,
        chunk=max(chunk, seqs),
        seqs=seqs,
        max_len=max_len,
        caching=rng.random() < 0.95,
        hybrid=rng.random() < 0.9,
        connector=connector,
        lazy=rng.random() < 0.2,
        store_polls=rng.choice((0, 1, 1, 1, 2, 5)),
        load_polls=rng.choice((0, 0, 1, 4)),
        asynchronous=rng.random() < 0.25,
        runner=rng.choice((1, 1, 2)),
        draft=rng.choice((0, 0, 0, 0, 0, 1, 3)),
    )
    least = least_blocks(setup)
    blocks = least + int(least * rng.choice((0.0, 0.05, 0.1, 0.3, 1.0)) * rng.random())
    cpu_blocks = max(4, int(blocks * rng.choice((0.25, 0.5, 1, 4, 4, 4))))
    drafts = 0 if setup.asynchronous else setup.draft
    setup = replace(setup, blocks=blocks, cpu_blocks=cpu_blocks, draft=drafts)
    return Case(setup, waves, rng.randrange(10_000))


def least_blocks(setup: Setup) -> int:
    """Return the fewest blocks that vLLM accepts: those of the longest request, and the null block."""
    whole = -(-setup.max_len // setup.block)
    inflight = setup.chunk * (2 if setup.asynchronous else 1)
    window = -(-min(setup.window - 1 + inflight, setup.max_len) // setup.block) + 1
    sliding = setup.layers.count("sliding") if setup.hybrid else 0
    # vLLM groups layers of one kind; the group size is the count of the rarer kind.
    return whole + sliding * window + setup.layers.count("mamba") * (2 + setup.draft) + 1


def waves_of(rng: Random, block: int, chunk: int) -> tuple[tuple[Request, ...], ...]:
    """Return one to six waves whose prompts have one to three different lengths, as real traffic has."""
    longest = rng.choice((chunk, 2 * chunk, 4 * chunk, 8 * chunk))
    longest = max(2 * block, min(longest, 240 * block))
    usual = [rng.randint(1, longest) for _ in range(rng.choice((1, 1, 2, 3)))]
    answers = [rng.choice((1, 2, 8, block, 3 * block)) for _ in range(rng.choice((1, 2)))]
    shares, late, leaves = rng.random() < 0.4, rng.random() < 0.4, rng.random() < 0.2
    waves = []
    for _ in range(rng.randint(1, 6)):
        width = rng.choice((1, 1, 1, 2, 3, 5))
        waves.append(
            tuple(_ask(rng, rng.choice(usual), rng.choice(answers), shares, late, leaves) for _ in range(width))
        )
    return tuple(waves)


def _ask(rng: Random, prompt: int, answer: int, shares: bool, late: bool, leaves: bool) -> Request:
    shared = rng.choice((0, prompt, prompt // 2, rng.randint(0, prompt))) if shares else 0
    after = rng.choice((0, 1, 3, 10)) if late else 0
    abort = rng.choice((-1, -1, 0, 1, 2, 5, 20)) if leaves else -1
    return Request(prompt, answer, shared, after, abort)
