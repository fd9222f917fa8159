"""The errors of this package, as a tree:

    ReproError
    ├── UsageError        wrong command line, unknown scenario or arm            exit 64
    ├── ScenarioError     a scenario file does not say what it must              exit 64
    ├── CommandError      a pasted command line cannot be read                   exit 64
    ├── Unsupported       this machine or this vLLM cannot do it                 outcome `unsupported`, exit 2
    ├── InfraError        host, engine, disk, network or install trouble         outcome `infra`, exit 2
    └── HarnessBug        this package did something that it must not            exit 70

Each carries the sentence that says what happened and, in `hint`, what to do next. What an engine does (it dies, it hangs, it never
becomes ready) is never an error of this package: it is an outcome, see `vllm_repro.verdict.outcome`.
"""

from __future__ import annotations

__all__ = [
    "INTERRUPTED",
    "CommandError",
    "HarnessBug",
    "InfraError",
    "ReproError",
    "ScenarioError",
    "Unsupported",
    "UsageError",
]

INTERRUPTED = 130
"""Exit status after a signal, which is no error of this package either."""


class ReproError(Exception):
    """Root of the tree. `str(error)` is one sentence for people; `hint` is the next step, or an empty string."""

    exit_status = 70

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def told(self) -> str:
        """Both in one line."""
        return f"{self} ({self.hint})" if self.hint else f"{self}"


class UsageError(ReproError):
    """The command line asks for something that does not exist."""

    exit_status = 64


class ScenarioError(ReproError):
    """A scenario file does not say what it must; the message holds one `file:line: problem` a line."""

    exit_status = 64


class CommandError(ReproError):
    """A pasted `vllm serve` or `docker run` cannot be read.

    `line` counts from 1 within the pasted text, so that a scenario file can point at the line in question.
    """

    exit_status = 64

    def __init__(self, message: str, *, line: int = 1, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.line = line


class Unsupported(ReproError):
    """This machine or this vLLM release cannot do what the scenario needs."""

    exit_status = 2


class InfraError(ReproError):
    """Trouble that says nothing about the engine under test: the host, Docker, the disk, an install."""

    exit_status = 2


class HarnessBug(ReproError):
    """A promise of this package was broken; please report it."""

    exit_status = 70
