"""Errors of this package, as a tree.

    ReproError
    ├── UsageError     wrong command line, unknown scenario or arm     exit 64
    ├── ScenarioError  invalid scenario file                           exit 64
    ├── CommandError   unreadable pasted command line                  exit 64
    ├── Unsupported    this machine or this vLLM cannot do it          exit 2, `unsupported`
    ├── InfraError     host, engine, disk, network or install trouble  exit 2, `infra`
    └── HarnessBug     fault of this package                           exit 70

A message states what happened, `hint` what to do next. What an engine does (crash, hang, failed
boot) is an outcome, not an error: see `vllm_repro.verdict.outcome`.
"""

from __future__ import annotations

INTERRUPTED = 130
"""Exit status after a signal."""


class ReproError(Exception):
    """Base of this package's errors: a text of one sentence, and a `hint`, which may be empty."""

    exit_status = 70

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"next: {hint}")  # a traceback prints it

    @property
    def with_hint(self) -> str:
        """Return message and hint in one line."""
        return f"{self} ({self.hint})" if self.hint else f"{self}"


class UsageError(ReproError):
    """The user asked for something that cannot be done as asked."""

    exit_status = 64


class ScenarioError(ReproError):
    """A scenario file is invalid; the message has one `file:line: problem` per line."""

    exit_status = 64


class CommandError(ReproError):
    """A pasted `vllm serve` or `docker run` cannot be read.

    `line` counts from 1 within the pasted text.
    """

    exit_status = 64

    def __init__(self, message: str, *, line: int = 1, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.line = line


class Unsupported(ReproError):
    """This machine or this vLLM release cannot do what the scenario needs."""

    exit_status = 2


class InfraError(ReproError):
    """The host, Docker, the disk or an install failed; no statement about the engine under test."""

    exit_status = 2


class HarnessBug(ReproError):
    """This package has a fault; please report it."""

    exit_status = 70
