"""Sizes in tokens, relative to the server's flags.

    BATCH = flag("--max-num-batched-tokens")
    chat(prompt=BATCH + 129)

A size is resolved against an arm's command, so an arm that edits the flag moves the boundary too.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_repro.command.command import ServeCommand
from vllm_repro.errors import ScenarioError

__all__ = ["Size", "flag", "resolve", "sized"]


@dataclass(frozen=True)
class Size:
    """`times` x the value of `flag` + `plus`, in tokens. lab: the size in the lab, if it differs; `flag` is then empty."""

    flag: str
    times: int = 1
    plus: int = 0
    lab: int | None = None

    def __add__(self, other: int) -> Size:
        return Size(self.flag, self.times, self.plus + other, None if self.lab is None else self.lab + other)

    def __sub__(self, other: int) -> Size:
        return self + -other

    def __mul__(self, other: int) -> Size:
        return Size(self.flag, self.times * other, self.plus * other, None if self.lab is None else self.lab * other)

    __rmul__ = __mul__
    __radd__ = __add__

    def __str__(self) -> str:
        if self.lab is not None:
            return f"{self.plus} (in the lab {self.lab})"
        scaled = self.flag if self.times == 1 else f"{self.times} x {self.flag}"
        return scaled if not self.plus else f"{scaled} {'+' if self.plus > 0 else '-'} {abs(self.plus)}"


def flag(name: str) -> Size:
    """Return the number given for a flag, as a size: `flag("--max-num-batched-tokens") + 129`."""
    if not name.startswith("--"):
        raise ValueError(f"flag() takes a flag as it is written on the command line, such as '--{name.lstrip('-')}'")
    return Size(name)


def sized(tokens: int, *, lab: int) -> Size:
    """Return the reported size, with the equivalent for the lab's smaller model and pool: `sized(90_109, lab=5_693)`."""
    if lab < 1 or tokens < 1:
        raise ValueError("sized(…, lab=…) takes two numbers of tokens, 1 or more")
    return Size("", plus=tokens, lab=lab)


def resolve(size: int | Size, command: ServeCommand, *, in_lab: bool = False) -> int:
    """Return `size` in tokens for this command. Raises `ScenarioError` if the command does not have the flag."""
    if isinstance(size, int):
        return size
    if size.lab is not None:
        return size.lab if in_lab else size.plus
    value = command.number(size.flag)
    if value is None:
        raise ScenarioError(
            f"a prompt is sized by {size.flag}, which the command does not carry",
            hint=f"give the arm {size.flag}, or state the size as a number",
        )
    return size.times * value + size.plus
