"""Sizes in tokens that a scenario states relative to the server's own flags.

    BATCH = flag("--max-num-batched-tokens")
    chat(prompt=BATCH + 129)

A size is resolved against the arm's command, so an arm that edits the flag moves the boundary with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_repro.errors import ScenarioError

if TYPE_CHECKING:
    from vllm_repro.commands.command import ServeCommand

__all__ = ["Size", "flag", "resolve"]


@dataclass(frozen=True)
class Size:
    """`times` x the value of `flag` + `plus`, in tokens."""

    flag: str
    times: int = 1
    plus: int = 0

    def __add__(self, other: int) -> Size:
        return Size(self.flag, self.times, self.plus + other)

    def __sub__(self, other: int) -> Size:
        return Size(self.flag, self.times, self.plus - other)

    def __mul__(self, other: int) -> Size:
        return Size(self.flag, self.times * other, self.plus * other)

    __rmul__ = __mul__
    __radd__ = __add__

    def __str__(self) -> str:
        scaled = self.flag if self.times == 1 else f"{self.times} x {self.flag}"
        return scaled if not self.plus else f"{scaled} {'+' if self.plus > 0 else '-'} {abs(self.plus)}"


def flag(name: str) -> Size:
    """The number that the server was given for `name`, for example `flag("--max-num-batched-tokens")`."""
    if not name.startswith("--"):
        raise ValueError(f"flag() takes a flag as it is written on the command line, such as '--{name.lstrip('-')}'")
    return Size(name)


def resolve(size: int | Size, command: ServeCommand) -> int:
    """`size` in tokens for this command. Raises `ScenarioError` where the command does not carry the flag."""
    if isinstance(size, int):
        return size
    value = command.number(size.flag)
    if value is None:
        raise ScenarioError(
            f"a prompt is sized by {size.flag}, which the command does not carry",
            hint=f"give the arm {size.flag}, or state the size as a number",
        )
    return size.times * value + size.plus
