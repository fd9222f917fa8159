"""Cases near a given one: the same workload with a few numbers and options changed. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from vllm_repro_explore.case import Case, Request, Setup, least_blocks, least_length
from vllm_repro_explore.draw import fitting, other_images

_Change = Callable[[Random, Setup, list[list[Request]]], Setup]
"""Random change of a case: it edits the waves in place, and returns the changed setup."""


def vary(case: Case, rng: Random, *, far: bool = False) -> Case:
    """Return a case with one to three random changes, and with another seed.

    Lengths and KV blocks are raised so that vLLM accepts it. far: also add and drop features.
    """
    waves = [list(wave) for wave in case.waves]
    setup = case.setup
    for _ in range(rng.randint(1, 3)):
        changes = _FEATURES if far and rng.random() < 0.4 else _CHANGES
        setup = rng.choice(changes)(rng, setup, waves)
    kept = [[fitting(ask) for ask in wave] for wave in waves if wave]
    varied = Case.numbered(setup, kept, rng.randrange(1 << 30))
    longest = least_length(setup, varied.asks)
    setup = replace(
        setup,
        max_len=max(setup.max_len, longest),
        chunk=max(setup.chunk, setup.seqs * (setup.draft + 1)),
    )
    return replace(varied, setup=replace(setup, blocks=max(setup.blocks, least_blocks(setup))))


def _request(change: Callable[[Random, Request, int], Request]) -> _Change:
    """Return a change of one random request.

    change: gets the random generator, the request and the block size; returns the request.
    """

    def changed(rng: Random, setup: Setup, waves: list[list[Request]]) -> Setup:
        wave = rng.choice([wave for wave in waves if wave])
        place = rng.randrange(len(wave))
        wave[place] = change(rng, wave[place], setup.block)
        return setup

    return changed


def _prompt(rng: Random, ask: Request, block: int) -> Request:
    """Change the length of a prompt."""
    more = rng.choice((-block, -1, 1, block, rng.randint(-4 * block, 4 * block)))
    return replace(ask, prompt=max(1, ask.prompt + more))


def _answer(rng: Random, ask: Request, block: int) -> Request:
    """Change the length of an answer; a prefill for another server has one token."""
    if ask.remote:
        return ask
    return replace(ask, answer=rng.choice((1, 2, block, rng.randint(1, 4 * block))))


def _shared(rng: Random, ask: Request, _: int) -> Request:
    """Change how much of the prompt is shared."""
    return replace(
        ask, shared=rng.choice((0, ask.prompt, rng.randint(0, ask.prompt))), family=rng.randrange(2)
    )


def _start(rng: Random, ask: Request, _: int) -> Request:
    """Change when a request comes."""
    return replace(ask, after=max(0, ask.after + rng.choice((-5, -1, 1, 5, 20))))


def _abort(rng: Random, ask: Request, _: int) -> Request:
    """Let a client stay, or disconnect at another time."""
    return replace(ask, abort=rng.choice((-1, 0, 1, 2, 5, 20)), mid=rng.random() < 0.5)


def _priority(rng: Random, ask: Request, _: int) -> Request:
    """Change how urgent a request is."""
    return replace(ask, priority=rng.randrange(4))


def _fetch(rng: Random, ask: Request, _: int) -> Request:
    """Let the fetch of a prompt's blocks fail or not."""
    return replace(ask, fails=ask.fetch and rng.random() < 0.5)


def _salt(rng: Random, ask: Request, _: int) -> Request:
    """Change the cache salt of a request that continues none."""
    return ask if ask.follows >= 0 else replace(ask, salt=rng.randrange(3))


def _images(rng: Random, setup: Setup, waves: list[list[Request]]) -> Setup:
    """Give a request the images of another, or other images of the same sizes."""
    wave = rng.choice([wave for wave in waves if wave])
    place = rng.randrange(len(wave))
    images = rng.choice([ask for wave in waves for ask in wave]).images
    if rng.random() < 0.5:
        images = other_images(rng, images)
    if wave[place].follows < 0:
        wave[place] = replace(wave[place], images=images)
    return setup


def _operation(rng: Random, setup: Setup, waves: list[list[Request]]) -> Setup:
    """Add a cache reset or a pause, or drop all of them."""
    last = max(ask.after for wave in waves for ask in wave)
    pauses = ("pause-keep-10", "pause-wait-3", "pause-abort-3")
    what = rng.choice(("reset", "reset-running", "reset-connector", *pauses))
    added = (*setup.ops, (rng.randint(0, last + 30), what))
    return replace(setup, ops=() if rng.random() < 0.3 else tuple(sorted(added)))


def _threshold(rng: Random, setup: Setup, _: list[list[Request]]) -> Setup:
    """Change the threshold of a long prefill."""
    return replace(setup, threshold=rng.choice((0, 1, 2, 3)) * setup.block)


def _repeat(rng: Random, setup: Setup, waves: list[list[Request]]) -> Setup:
    """Send a request once more, in the same wave or once the engine is idle."""
    wave = rng.choice([wave for wave in waves if wave])
    ask = rng.choice(wave)
    if rng.random() < 0.5:
        wave.append(ask)
    else:
        waves.append([replace(ask, after=0)])
    return setup


def _drop(rng: Random, setup: Setup, waves: list[list[Request]]) -> Setup:
    """Leave out a request, unless it is the only one of its wave."""
    wave = rng.choice([wave for wave in waves if wave])
    if len(wave) > 1:
        wave.pop(rng.randrange(len(wave)))
    return setup


def _number(name: str, *steps: int) -> _Change:
    """Return a change that adds one of the steps to a number of the setup; it stays above 0."""

    def changed(rng: Random, setup: Setup, _: list[list[Request]]) -> Setup:
        value = max(1, getattr(setup, name) + rng.choice(steps))
        return replace(setup, **{name: value})

    return changed


def _option(name: str) -> _Change:
    """Return a change that switches an option of the setup."""

    def changed(_: Random, setup: Setup, __: list[list[Request]]) -> Setup:
        value: Any = not getattr(setup, name)
        return replace(setup, **{name: value})

    return changed


def _tight(_: Random, setup: Setup, waves: list[list[Request]]) -> Setup:
    """Allow no more tokens than the longest request has."""
    asks = [ask for wave in waves for ask in wave]
    return replace(setup, max_len=least_length(setup, asks))


def _full(_: Random, setup: Setup, __: list[list[Request]]) -> Setup:
    """Leave the fewest KV blocks that vLLM accepts."""
    return replace(setup, blocks=least_blocks(setup))


def _seed(_: Random, setup: Setup, __: list[list[Request]]) -> Setup:
    """Change nothing but the tokens."""
    return setup


_CHANGES: tuple[_Change, ...] = (
    _seed,
    *(_request(change) for change in (_prompt, _answer, _shared, _start, _abort)),
    _request(_prompt),
    _repeat,
    _drop,
    _tight,
    _full,
    _number("blocks", -4, -1, 1, 4, 20),
    _number("chunk", -16, -1, 1, 16),
    _number("seqs", -1, 1),
    _number("store_polls", -1, 1, 4),
    _number("load_polls", -1, 1, 4),
    _option("asynchronous"),
)
_FEATURES: tuple[_Change, ...] = (
    *(_request(change) for change in (_priority, _fetch, _salt)),
    _images,
    _operation,
    _threshold,
    _number("window", -16, -1, 1, 16),
    _number("cpu_blocks", -16, -4, -1, 1, 4, 64),
    *map(_option, ("caching", "lazy", "whole_images", "priority", "stats", "events")),
)
"""Changes that add or drop a feature, or change what it depends on."""
