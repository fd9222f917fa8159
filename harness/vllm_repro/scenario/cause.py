"""Records of `vllm-repro causes`: source changes of a release, to find which one breaks or protects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_repro.scenario.patch import Patch
from vllm_repro.verdict.verdict import Expected

__all__ = ["Cause", "Causes", "Lengths"]


@dataclass(frozen=True)
class Lengths:
    """Prompt lengths: `blocks` whole blocks and `over` more tokens, each a (least, most) pair, inclusive."""

    blocks: tuple[int, ...]
    over: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, pair, least in (("blocks", self.blocks, 1), ("over", self.over, 0)):
            if len(pair) != 2 or not least <= pair[0] <= pair[1]:
                raise ValueError(f"{name}=(least, most) are two numbers from {least} on")

    @property
    def between(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(least, most) of blocks and of tokens over."""
        return (self.blocks[0], self.blocks[-1]), (self.over[0], self.over[-1])


@dataclass(frozen=True)
class Cause:
    """One change of `release`. expected: `dies` or `lives`, with the change. arm: whose server runs it.

    believed: who took it for a fix that it is not.
    """

    name: str
    release: str
    expected: Expected
    patches: tuple[Patch, ...] = ()
    arm: str = "reported"
    believed: str = ""


@dataclass(frozen=True)
class Causes:
    """Changes, and the trials to run with each.

    With `prompts`, a trial runs vLLM's scheduler alone: `requests` distinct prompts of one random length, one after the other, each with
    an answer of `answer` tokens. Without `prompts`, a trial boots a server and sends the workload of the change's arm.
    """

    changes: Sequence[Cause]
    prompts: Lengths | None = None
    answer: int = 0
    requests: int = 0

    def __post_init__(self) -> None:
        if (self.prompts is None) != (self.answer == 0) or (self.prompts is None) != (self.requests == 0):
            raise ValueError("prompts=, answer= and requests= go together: a workload for the scheduler alone")
