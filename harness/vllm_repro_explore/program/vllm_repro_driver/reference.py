"""Hash transformer: tokens that depend on every earlier token, position, salt and LoRA. Pure.

Each layer hashes a position's state with the sum of what it reads of the positions in its window.
`states` computes this over a plain array; the executor computes the same over block tables. One
wrong value read is a wrong token, except by chance (1 in `len(TEXT)`). Compiled by Numba, which
vLLM installs: arrays of a few numbers take NumPy ten times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit

Numbers = np.ndarray[Any, np.dtype[np.uint64]]

EOS = 2
TEXT = range(16, 4000)
"""Tokens of prompts and of answers without a grammar."""
STOPS = range(16, 76)
"""Stop token ids of requests that have some."""
REPETITION = {"max_pattern_size": 2, "min_count": 3}
"""vLLM's `repetition_detection` of requests that have it."""
PLACEHOLDER = 5
"""Token of a prompt where an image is."""
IMAGES = 1 << 16
"""The least id of an image's embedding."""

_TOKEN, _PLACE, _READ, _OWN = (
    np.uint64(number)
    for number in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7, 0xAEF17502108EF2D9)
)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@njit(cache=True)
def _scramble(number: Any) -> Any:
    """Apply the finalizer of splitmix64."""
    number = (number ^ (number >> np.uint64(30))) * _FIRST
    number = (number ^ (number >> np.uint64(27))) * _SECOND
    return number ^ (number >> np.uint64(31))


@njit(cache=True)
def _key(state: Any, place: int) -> Any:
    """Return the hash of a state and its position, as a layer reads it."""
    return _scramble(state + np.uint64(place) * _READ)


@njit(cache=True)
def _embed(ids: Any, start: int, key: int) -> Numbers:
    """Return the hash of each token with its position and the request's key."""
    states = np.empty(len(ids), dtype=np.uint64)
    for place in range(len(ids)):
        # As GPUModelRunner clamps the -1 of drafts that are not known yet.
        token = np.uint64(max(ids[place], 0))
        states[place] = _scramble(
            token * _TOKEN + np.uint64(start + place) * _PLACE + np.uint64(key)
        )
    return states


def embed(tokens: Sequence[int], start: int, key: int) -> Numbers:
    """Return the state of each token before the first layer.

    start: position of the first token. key: `key_of` the request's salt and LoRA.
    """
    states: Numbers = _embed(np.asarray(tokens, dtype=np.int64), start, key)
    return states


def image(number: int, length: int) -> list[int]:
    """Return the encoder's output for an image: one id per position, beyond those of tokens."""
    return [(number + 1) * IMAGES + place for place in range(length)]


@njit(cache=True)
def attend(
    current: Numbers, read: Numbers, first: int, start: int, window: int, layer: int
) -> Numbers:
    """Return the states after an attention layer, from those that it reads of the KV cache.

    current: states of the positions from `start` on. read: what the cache holds for the positions
    from `first` on. window: 0 for all.
    """
    states = np.empty(len(current), dtype=np.uint64)
    total = np.uint64(0)
    for at in range(len(read)):
        total += _key(read[at], first + at)
        if window and at >= window:
            total -= _key(read[at - window], first + at - window)
        place = first + at - start
        if place >= 0:
            states[place] = _scramble(current[place] * _OWN + total + np.uint64(layer + 1))
    return states


@njit(cache=True)
def _block(table: Any, at: int, size: int) -> Any:
    """Return the block of a table that holds a position; the last one beyond its end."""
    return table[min(at // size, len(table) - 1)]


@njit(cache=True)
def attend_in(
    memory: Any, table: Any, size: int, current: Numbers, start: int, window: int, layer: int
) -> Numbers:
    """Return the states after an attention layer that reads a KV cache in blocks. See `attend`.

    memory: the layer's cache. table: the request's blocks; positions past them are read in the last
    one. size: positions in a block.
    """
    first = max(0, start - window + 1) if window else 0
    read = np.empty(start + len(current) - first, dtype=np.uint64)
    for place in range(len(read)):
        read[place] = memory[_block(table, first + place, size), (first + place) % size]
    return attend(current, read, first, start, window, layer)


@njit(cache=True)
def write(memory: Any, table: Any, size: int, states: Numbers, start: int) -> None:
    """Write the states of the positions from `start` on to the blocks of a table in `memory`."""
    for place in range(len(states)):
        memory[_block(table, start + place, size), (start + place) % size] = states[place]


@njit(cache=True)
def recur(current: Numbers, before: Any, start: int, layer: int) -> tuple[Numbers, Numbers]:
    """Return the states after a Mamba layer, and what the layer keeps after each position.

    It hashes as `attend` without a window does.

    current: states of the positions from `start` on. before: what the layer kept after the position
    before `start`.
    """
    kept, states = np.empty(len(current), dtype=np.uint64), np.empty(len(current), dtype=np.uint64)
    total = np.uint64(before)
    for at in range(len(current)):
        total += _key(current[at], start + at)
        kept[at] = total
        states[at] = _scramble(current[at] * _OWN + total + np.uint64(layer + 1))
    return states, kept


def layers(tokens: Sequence[int], key: int, windows: Sequence[int]) -> list[Numbers]:
    """Return the states before each attention layer and after the last, computed without blocks.

    The cache of a layer holds the states before it.
    """
    states = [embed(tokens, 0, key)]
    for layer, window in enumerate(windows):
        states.append(attend(states[-1], states[-1], 0, 0, window, layer))
    return states


def states(tokens: Sequence[int], key: int, windows: Sequence[int]) -> Numbers:
    """Return the states after the last layer, computed without blocks."""
    return layers(tokens, key, windows)[-1]


def pick(state: Any, row: Any = None, eos: int = 0) -> int:
    """Return the token that the model gives for a state, also under a grammar's bitmask.

    row: bitmask of a grammar, or `endless`; None for none. eos: one state in so many ends the
    answer; 0 for none; -N for one of N tokens. Return 0 if the bitmask allows no token.
    """
    number = int(state)
    ends = eos > 0 and (number >> 32) % eos == 0
    first = EOS if ends else TEXT[number % (len(TEXT) if eos >= 0 else -eos)]
    if row is None:
        return first
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    if not len(allowed) or first in allowed:
        return first if len(allowed) else 0
    return int(allowed[np.argmax(_liking(state, allowed))])


def ended(answer: list[int], least: int, *, stops: bool, repeats: bool) -> int:
    """Return the number of tokens after which an answer must end by its tokens; 0 if by none.

    least: fewest tokens of the answer. stops, repeats: the request has `STOPS`, and `REPETITION`.
    """
    size, count = REPETITION.values()
    for number, token in enumerate(answer, 1):
        again = any(
            answer[number - period * count : number] == answer[number - period : number] * count
            for period in range(1, size + 1)
            if period * count <= number
        )
        if token == EOS or (stops and token in STOPS) or (repeats and again and number >= least):
            return number
    return 0


def endless(size: int) -> Any:
    """Return the bitmask of a vocabulary of `size` tokens without `EOS`."""
    return np.packbits(np.arange(size) != EOS, bitorder="little")


def logits(state: Any, eos: int, size: int) -> Any:
    """Return logits for which a greedy sampler gives the token of `pick`, also under a bitmask.

    size: of the vocabulary.
    """
    values = _liking(state, np.arange(size))
    values[pick(state, None, eos)] = 2.0**25
    return values


def _liking(state: Any, tokens: Any) -> Any:
    """Return for each token how much a state prefers it, as a number of 24 bits."""
    return _liking_of(np.uint64(state), tokens.astype(np.uint64))


@njit(cache=True)
def _liking_of(state: Any, tokens: Any) -> Any:
    """Return 24 bits of a hash for each token, which a float32 holds exactly."""
    likings = np.empty(len(tokens), dtype=np.float32)
    for place in range(len(tokens)):
        likings[place] = np.float32(_scramble(tokens[place] * _TOKEN + state) >> np.uint64(40))
    return likings
