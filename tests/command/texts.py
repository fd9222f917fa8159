"""Texts of commands: the reported ones, what every way to write one plain command says, and how one with a mistake is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_repro.command.command import Flag, parse
from vllm_repro.errors import CommandError

FOLDER = Path(__file__).parents[1] / "data" / "commands"
REPORTED = sorted(path.stem for path in FOLDER.glob("*.txt"))
PLAIN = ("org/m", (Flag("--max-model-len", "4096"), Flag("--enforce-eager")))
"""What `vllm serve org/m --max-model-len 4096 --enforce-eager` says, however it is written."""


def reported(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def said(text: str) -> tuple[str | None, tuple[Flag, ...]]:
    """Model and flags."""
    command = parse(text)
    return command.model, command.flags


def assert_refused(text: str, line: int, message: str) -> None:
    with pytest.raises(CommandError, match=message) as caught:
        parse(text)
    assert caught.value.line == line
    assert caught.value.hint
