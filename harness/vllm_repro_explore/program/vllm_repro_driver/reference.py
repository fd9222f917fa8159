"""Hash transformer: tokens that depend on every earlier token, position, salt and LoRA of a request. Pure.

Each layer hashes a position's state with the sum of what it reads of the positions in its window. `states` computes this over a plain
array; the executor computes the same over block tables. One wrong value read is a wrong token, except by chance (1 in `len(TEXT)`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["EOS", "STOPS", "TEXT", "attend", "embed", "layers", "logits", "pick", "recur", "states"]

Numbers = np.ndarray[Any, np.dtype[np.uint64]]

EOS = 2
TEXT = range(16, 4000)
"""Tokens of prompts and of answers without a grammar."""
STOPS = range(16, 76)
"""Stop token ids of requests that have some."""

_TOKEN, _PLACE, _READ, _OWN = (
    np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7, 0xAEF17502108EF2D9)
)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _scramble(numbers: Numbers) -> Numbers:
    """Apply the finalizer of splitmix64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _SECOND
    return numbers ^ (numbers >> np.uint64(31))


def embed(tokens: Sequence[int], start: int, key: int) -> Numbers:
    """Return the states before the first layer. key: of the request's salt and LoRA."""
    # As GPUModelRunner clamps the -1 of drafts that are not known yet.
    ids = np.maximum(np.asarray(tokens, dtype=np.int64), 0).astype(np.uint64)
    places = np.arange(start, start + len(ids), dtype=np.uint64)
    return _scramble(ids * _TOKEN + places * _PLACE + np.uint64(key))


def attend(own: Numbers, read: Numbers, first: int, start: int, window: int, layer: int) -> Numbers:
    """Return the states after a layer.

    own: states of the positions from `start` on. read: what the cache holds for the positions from `first` on. window: 0 for all.
    """
    places = np.arange(first, start + len(own), dtype=np.uint64)
    sums = np.cumsum(_scramble(read + places * _READ), dtype=np.uint64)
    seen = sums[start - first :].copy()
    if window:
        left = np.arange(start, start + len(own)) - window - first
        seen[left >= 0] -= sums[left[left >= 0]]
    return _scramble(own * _OWN + seen + np.uint64(layer + 1))


def recur(own: Numbers, before: Any, start: int, layer: int) -> tuple[Numbers, Numbers]:
    """Return the states after a Mamba layer, and what the layer keeps after each position. It hashes as `attend` without a window does.

    own: states of the positions from `start` on. before: what the layer kept after the position before `start`.
    """
    places = np.arange(start, start + len(own), dtype=np.uint64)
    sums = np.cumsum(_scramble(own + places * _READ), dtype=np.uint64) + np.uint64(before)
    return _scramble(own * _OWN + sums + np.uint64(layer + 1)), sums


def layers(tokens: Sequence[int], key: int, windows: Sequence[int]) -> list[Numbers]:
    """Return the states before each attention layer, which its cache holds, and after the last, computed without blocks."""
    found = [embed(tokens, 0, key)]
    for layer, window in enumerate(windows):
        found.append(attend(found[-1], found[-1], 0, 0, window, layer))
    return found


def states(tokens: Sequence[int], key: int, windows: Sequence[int]) -> Numbers:
    """Return the states after the last layer."""
    return layers(tokens, key, windows)[-1]


def pick(state: Any, row: Any = None, eos: int = 0) -> int:
    """Return the token of a state. row: bitmask of a grammar. eos: one state in so many ends the answer; 0 for none."""
    number = int(state)
    first = EOS if eos and (number >> 32) % eos == 0 else TEXT[number % len(TEXT)]
    if row is None:
        return first
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    if not len(allowed) or first in allowed:
        return first if len(allowed) else 0
    return int(allowed[np.argmax(_liking(state, allowed))])


def logits(state: Any, eos: int, size: int) -> Any:
    """Return the logits of which a greedy sampler takes `pick`, also under a mask. size: of the vocabulary."""
    found = _liking(state, np.arange(size))
    found[pick(state, None, eos)] = 2.0**25
    return found


def _liking(state: Any, tokens: Any) -> Any:
    """Return 24 bits for each token, which a float32 holds exactly."""
    return (_scramble(tokens.astype(np.uint64) * _TOKEN + state) >> np.uint64(40)).astype(np.float32)
