"""The command line: one module a verb, each with `add(subparsers)` and a function that returns the exit status."""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from vllm_repro import __version__
from vllm_repro.cli import (
    causes,
    check,
    clean,
    diagnose,
    doctor,
    draft,
    explore,
    history,
    list_,
    nightly,
    report,
    run,
    show,
    versions,
)
from vllm_repro.errors import INTERRUPTED, InfraError, ReproError

__all__ = ["main", "parser"]

WRONG_USAGE = 64
HARNESS_FAULT = 70
HOST_TROUBLE = InfraError.exit_status

VERBS = (list_, show, check, doctor, run, versions, explore, causes, nightly, report, draft, diagnose, history, clean)


class _Parser(argparse.ArgumentParser):
    """argparse with the exit status of the contract for wrong usage."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(WRONG_USAGE, f"{self.prog}: {message}\n{self.prog} --help shows what it takes\n")


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="vllm-repro",
        description="Reproduce an upstream vLLM engine death with one command, and prove it.",
        epilog="example:\n  vllm-repro run tq-chunked-prefill --server rehearsal",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"vllm-repro {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    for verb in VERBS:
        verb.add(verbs)
    return top


def _as_interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # the signature that signal.signal asks for
    raise KeyboardInterrupt(signal.Signals(number).name)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `vllm-repro`; returns the exit status of the contract."""
    arguments = parser().parse_args(argv)
    # What an install or a check has begun is undone on the way out of KeyboardInterrupt; a run has handlers of its own.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _as_interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that has no word for a character still shows the rest
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = int(arguments.function(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where what goes wrong has a name
        return status
    except ReproError as error:
        print(f"vllm-repro: {error}", file=sys.stderr)
        if error.hint:
            print(f"  next: {error.hint}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("vllm-repro: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`vllm-repro list | head`); Python would complain once more while it exits.
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return _fault(arguments, error)
        # Python flushes it once more while it exits.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # open for as long as the process lives
        print(f"vllm-repro: cannot write: {error.strerror}\n  next: make room, or write elsewhere", file=sys.stderr)
        return HOST_TROUBLE
    except Exception as error:  # the last door: a fault of our own must say so and have its exit status
        return _fault(arguments, error)


def _fault(arguments: argparse.Namespace, error: Exception) -> int:
    if getattr(arguments, "verbose", False):
        raise error
    print(
        f"vllm-repro: a fault of the harness itself: {type(error).__name__}: {error}\n"
        "  next: run it again with -v for the traceback, and please report it",
        file=sys.stderr,
    )
    return HARNESS_FAULT
