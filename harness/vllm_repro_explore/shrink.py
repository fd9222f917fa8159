"""Shrinking: from a failing case to the smallest that fails in the same way. Pure.

First drop requests or send them in turn, then switch options off, then lower numbers. Keep each
change with which the case still fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm_repro_explore.case import Case, Request, least_blocks, least_length

_PLAIN: tuple[tuple[str, Any], ...] = (
    ("draft", 0),
    ("asynchronous", False),
    ("runner", 1),
    ("lazy", False),
    ("load_polls", 0),
    ("store_polls", 1),
    ("hybrid", True),
    ("caching", True),
    ("layers", ("full",)),
    ("layers", ("full", "sliding")),
    ("layers", ("sliding", "full")),
    ("layers", ("mamba", "full")),
    ("block", 32),
    ("window", 128),
    ("seqs", 8),
    ("priority", False),
    ("loras", 0),
    ("threshold", 0),
    ("grammar_looks", 0),
    ("whole_images", False),
    ("image_cache", 0),
    ("cut", False),
    ("chunk_blocks", 1),
    ("eagle", False),
    ("stats", False),
    ("events", False),
)
"""Values that a live server in the lab has, and those of a case without a feature."""

_PLAIN_REQUEST: tuple[tuple[str, Any], ...] = (
    ("abort", -1),
    ("after", 0),
    ("shared", 0),
    ("mid", False),
    ("priority", 0),
    ("lora", 0),
    ("salt", 0),
    ("grammar", ""),
    ("eos", 0),
    ("stops", False),
    ("remote", False),
    ("fails", False),
    ("fetch", False),
    ("segments", ()),
    ("images", ()),
    ("refused", False),
    ("family", 0),
    ("follows", -1),
    ("switch", 0),
    ("least", 0),
)

_LEAST = {"blocks": 4, "chunk": 16, "window": 16, "cpu_blocks": 1, "prompt": 8, "answer": 1}
"""Lower bounds. A server cannot be sent a prompt of fewer tokens."""


def shrink(case: Case, fails: Callable[[Case], bool], budget: int = 300) -> Shrunk:
    """Shrink a failing case; return the smallest that fails, with the number of cases tried.

    fails: runs a case, and returns True if it fails in the same way. It is called at most `budget`
    times, and not with `case` itself.
    """
    shrunk = Shrunk(case, fails, budget)
    before = None
    while shrunk.tried < budget and shrunk.case != before:
        before = shrunk.case
        shrunk.drop_requests()
        shrunk.switch_off()
        shrunk.lower_numbers()
    return shrunk


@dataclass
class Shrunk:
    """A failing case while it is shrunk: the smallest that still fails."""

    case: Case
    fails: Callable[[Case], bool]
    budget: int
    # cases that were played to find it
    tried: int = 0

    def _take(self, candidate: Case) -> bool:
        """Run a candidate; if it still fails, make it the case and return True, else False.

        It is not run if it equals the case, if the budget is spent, or if a request cannot fit.
        """
        if candidate == self.case or self.tried >= self.budget or _has_no_room(candidate):
            return False
        self.tried += 1
        if not self.fails(candidate):
            return False
        self.case = candidate
        return True

    def drop_requests(self) -> None:
        """Drop waves and requests, large pieces first; then send a wave's requests in turn."""
        size = len(self.case.waves)
        while size:
            start = 0
            while start < len(self.case.waves) > 1:
                rest = self.case.waves[:start] + self.case.waves[start + size :]
                if not rest or not self._take(replace(self.case, waves=rest)):
                    start += size
            size //= 2
        for number in reversed(range(len(self.case.waves))):
            for place in reversed(range(len(self.case.waves[number]))):
                wave = self.case.waves[number]
                if len(wave) > 1:
                    self._take(self._with_wave(number, wave[:place] + wave[place + 1 :]))
        # Send in turn rather than together: a server gets concurrent requests in one step only by
        # chance.
        for number in reversed(range(len(self.case.waves))):
            apart = tuple((ask,) for ask in self.case.waves[number])
            before, after = self.case.waves[:number], self.case.waves[number + 1 :]
            self._take(replace(self.case, waves=(*before, *apart, *after)))

    def switch_off(self) -> None:
        """Set options and features to their plain values, and drop cache resets and pauses."""
        for name, value in _PLAIN:
            if name != "layers" or len(value) < len(self.case.setup.layers):
                self._take(self._with_setup(name, value))
        for operation in self.case.setup.ops:
            rest = tuple(kept for kept in self.case.setup.ops if kept != operation)
            self._take(self._with_setup("ops", rest))
        for name, plain in _PLAIN_REQUEST:
            self._set_in_requests(name, plain)

    def _set_in_requests(self, name: str, value: Any) -> None:
        """Set a field of all requests; if the case no longer fails, try one request at a time."""
        if self._take(self._map(lambda ask: replace(ask, **{name: value}))):
            return
        for number, wave in enumerate(self.case.waves):
            for place, ask in enumerate(wave):
                changed = (*wave[:place], replace(ask, **{name: value}), *wave[place + 1 :])
                if self._take(self._with_wave(number, changed)):
                    wave = self.case.waves[number]

    def lower_numbers(self) -> None:
        """Lower lengths, times and limits."""
        for name in ("prompt", "answer", "shared", "after", "abort"):
            for value in sorted({getattr(ask, name) for ask in self.case.asks}, reverse=True):
                self._lower(value, _LEAST.get(name, 0), partial(self._with_field, name))
        longest = least_length(self.case.setup, self.case.asks)
        self._lower(self.case.setup.max_len, longest, partial(self._with_limit, "max_len"))
        for name in ("blocks", "chunk", "window", "cpu_blocks"):
            self._lower(
                getattr(self.case.setup, name), _LEAST[name], partial(self._with_limit, name)
            )

    def _lower(self, value: int, least: int, at: Callable[[int, int], Case]) -> None:
        """Lower a number by halving steps while the case still fails.

        at: returns the case with the first value replaced by the second. least: the smallest value
        to try.
        """
        if value <= least:
            return
        if self._take(at(value, least)):
            return
        step = (value - least) // 2
        while step >= 1 and self.tried < self.budget:
            if value - step >= least and self._take(at(value, value - step)):
                value -= step
            else:
                step //= 2

    def _with_field(self, name: str, old: int, new: Any) -> Case:
        """Return the case with `old` replaced by `new` in a field of its requests."""
        return self._map(
            lambda ask: _tidy(replace(ask, **{name: new})) if getattr(ask, name) == old else ask
        )

    def _map(self, change: Callable[[Request], Request]) -> Case:
        """Return the case with each request changed by `change`."""
        return replace(self.case, waves=tuple(tuple(map(change, wave)) for wave in self.case.waves))

    def _with_wave(self, number: int, wave: tuple[Request, ...]) -> Case:
        """Return the case with wave `number` replaced by `wave`."""
        return replace(
            self.case, waves=(*self.case.waves[:number], wave, *self.case.waves[number + 1 :])
        )

    def _with_limit(self, name: str, _: int, new: int) -> Case:
        """Return the case with another value in a field of its setup."""
        return self._with_setup(name, new)

    def _with_setup(self, name: str, value: Any) -> Case:
        """Return the case with one server flag set to `value`."""
        return replace(self.case, setup=replace(self.case.setup, **{name: value}))


def _has_no_room(case: Case) -> bool:
    """Return True if `max_len` or the KV blocks are too few for the longest request.

    That request would wait for ever.
    """
    setup = case.setup
    return (
        setup.max_len < least_length(setup, case.asks)
        or setup.blocks < least_blocks(setup) + setup.draft
    )


def _tidy(ask: Request) -> Request:
    """Return the request without images and shared tokens that no longer fit into its prompt."""
    inside = tuple(image for image in ask.images if image[0] + image[1] <= ask.prompt)
    return replace(ask, shared=min(ask.shared, ask.prompt), images=inside)
