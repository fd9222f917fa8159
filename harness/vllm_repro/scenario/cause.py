"""Changes of a release's own source that are held against each other: which brought a bug, which protects, which does not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_repro.scenario.patch import Patch
from vllm_repro.verdict.verdict import Expected

__all__ = ["Cause", "Causes", "Lengths"]


@dataclass(frozen=True)
class Lengths:
    """Prompts of `blocks` whole blocks and `over` tokens more, each between two numbers, both included."""

    blocks: tuple[int, ...]
    over: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, pair, least in (("blocks", self.blocks, 1), ("over", self.over, 0)):
            if len(pair) != 2 or not least <= pair[0] <= pair[1]:
                raise ValueError(f"{name}=(least, most) are two numbers from {least} on")

    @property
    def between(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Least and most of both."""
        return (self.blocks[0], self.blocks[-1]), (self.over[0], self.over[-1])


@dataclass(frozen=True)
class Cause:
    """One change, made in `release` alone. expected: `dies` or `lives`, with the change. arm: whose server it is tried on.

    believed: who took it for the fix, where it is none.
    """

    name: str
    release: str
    expected: Expected
    patches: tuple[Patch, ...] = ()
    arm: str = "reported"
    believed: str = ""


@dataclass(frozen=True)
class Causes:
    """What is played with each change.

    With `prompts`, on vLLM's scheduler alone: `requests` distinct prompts of one length with an answer of `answer` tokens, drawn anew for
    each trial, one after the other. Without them a server is booted for each trial, and gets the workload of the change's arm.
    """

    changes: Sequence[Cause]
    prompts: Lengths | None = None
    answer: int = 0
    requests: int = 0

    def __post_init__(self) -> None:
        if (self.prompts is None) != (self.answer == 0) or (self.prompts is None) != (self.requests == 0):
            raise ValueError("prompts=, answer= and requests= go together: a workload for the scheduler alone")
