"""The soak: a steady load for a long time, and its counts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_repro.verdict.throughput import Point

__all__ = ["LOAD", "Soak", "SoakCount"]

LOAD = Point(128, 128, 4)
"""Fits the `--max-model-len` of every scenario and stays far from the boundary of a long prompt."""

_PARTS = 10


@dataclass(frozen=True, kw_only=True)
class Soak:
    """A finished soak.

    seconds: how long it ran, of `asked`. errors: requests without a whole answer. restarts: of the engine. tenths: output tokens
    received in each tenth of `asked`.
    """

    asked: float
    seconds: float
    requests: int
    errors: int
    restarts: int
    tenths: tuple[float, ...]

    @property
    def whole(self) -> bool:
        return self.seconds >= self.asked

    @property
    def drift(self) -> float | None:
        """Tokens of the last tenth over those of the first; None if it was cut short or the first had none."""
        return self.tenths[-1] / self.tenths[0] if self.whole and self.tenths[0] else None


@dataclass(kw_only=True)
class SoakCount:
    """The counts of a running soak. began: on the clock of the times that `take` gets."""

    asked: float
    began: float
    requests: int = 0
    errors: int = 0
    tenths: list[float] = field(default_factory=lambda: [0.0] * _PARTS)

    def take(self, chunks: Sequence[float], tokens: int, *, ok: bool) -> None:
        """Count one request: the time of each chunk of its answer, and its tokens."""
        self.requests += 1
        self.errors += not ok
        for moment in chunks:
            part = int((moment - self.began) / self.asked * _PARTS)
            if 0 <= part < _PARTS:  # requests in flight at the end are answered later
                self.tenths[part] += tokens / len(chunks)

    def end(self, now: float, *, restarts: int) -> Soak:
        seconds = min(now - self.began, self.asked)
        return Soak(
            asked=self.asked,
            seconds=seconds,
            requests=self.requests,
            errors=self.errors,
            restarts=restarts,
            tenths=tuple(self.tenths),
        )
