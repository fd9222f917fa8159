"""A steady load for a long time, and what is counted of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_repro.verdict.throughput import Point

__all__ = ["LOAD", "Soak", "SoakCount"]

LOAD = Point(128, 128, 4)
"""Small enough for every `--max-model-len` that a scenario has, and never near the boundary of a long prompt."""

_PARTS = 10


@dataclass(frozen=True)
class Soak:
    """A soak that is over. seconds: how long it went on, of `asked` ones. errors: requests without a whole answer. restarts: of the engine.
    tenths: output tokens that came in each tenth of the time that was asked for."""

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
        """Tokens a second in the last tenth over those in the first; None where it was cut short, or the first one had none."""
        return self.tenths[-1] / self.tenths[0] if self.whole and self.tenths[0] else None


@dataclass
class SoakCount:
    """Counts while it goes on. `began`: on the clock of the times that `take` is given."""

    asked: float
    began: float
    requests: int = 0
    errors: int = 0
    tenths: list[float] = field(default_factory=lambda: [0.0] * _PARTS)

    def take(self, chunks: Sequence[float], tokens: int, *, ok: bool) -> None:
        """One request: when each piece of its answer came, and how many tokens they were."""
        self.requests += 1
        self.errors += not ok
        for moment in chunks:
            part = int((moment - self.began) / self.asked * _PARTS)
            if 0 <= part < _PARTS:  # what is in flight at the end is answered after it
                self.tenths[part] += tokens / len(chunks)

    def end(self, now: float, *, restarts: int) -> Soak:
        seconds = min(now - self.began, self.asked)
        return Soak(self.asked, seconds, self.requests, self.errors, restarts, tuple(self.tenths))
