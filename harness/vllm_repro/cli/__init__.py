"""Command line.

A verb is a module with `add(parser)`, and `run(arguments)` that returns the exit status.

A verb's module is imported only when that verb is called, because some take a second to import.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType

from vllm_repro import __version__
from vllm_repro.cli.common import WRONG_USAGE, Parser, did_you_mean, use_scenario_folders
from vllm_repro.errors import INTERRUPTED, InfraError, ReproError
from vllm_repro.features import additions, load

HARNESS_FAULT = 70
HOST_TROUBLE = InfraError.exit_status

CORE_VERBS: Mapping[str, tuple[str, str]] = {
    "list": ("vllm_repro.cli.list_", "list the scenarios"),
    "show": ("vllm_repro.cli.show", "print the exact command of an arm, ready to paste"),
    "check": ("vllm_repro.cli.check", "find mistakes in scenario files, with file and line"),
    "doctor": ("vllm_repro.cli.doctor", "list what this machine can run, and why not"),
    "run": (
        "vllm_repro.cli.run",
        "boot a bug's flags, cross its boundary, watch the engine, and report what happened",
    ),
    "report": ("vllm_repro.cli.report", "render the reports of a run again from its journal"),
    "diagnose": (
        "vllm_repro.cli.diagnose",
        "find in a server log or a pasted traceback whether an engine died, and why",
    ),
    "clean": ("vllm_repro.cli.clean", "list what killed runs left behind; with --yes remove it"),
    "completion": ("vllm_repro.cli.completion", "print the completion of this command for a shell"),
}
"""Module and help line of each verb of the core."""


@cache
def verbs() -> Mapping[str, tuple[str, str]]:
    """Return {verb: (module, help line)}, with the verbs that features add last.

    A feature cannot replace a verb of the core.
    """
    added = [load("verbs", feature).items() for feature in additions("verbs")]
    return {**dict(itertools.chain(CORE_VERBS.items(), *added)), **CORE_VERBS}


def parser(verb: str | None = None) -> Parser:
    """Return the parser of the command; it has the options of `verb` alone.

    The other verbs are only named: their modules are not imported.
    """
    top = Parser(
        prog="vllm-repro",
        description="Reproduce an upstream vLLM engine death with one command, and prove it.",
        epilog="example:\n  vllm-repro run tq-chunked-prefill --server rehearsal",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"vllm-repro {__version__}")
    parsers = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    # Entry points of features are read only if they are needed: it takes 30 ms.
    for name, (module, does) in (CORE_VERBS if verb in CORE_VERBS else verbs()).items():
        added = parsers.add_parser(
            name,
            help=does,
            description=does[0].upper() + does[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == verb:
            imported = importlib.import_module(module)
            imported.add(added)
            added.set_defaults(function=imported.run, parser=added)
    return top


def main(argv: Sequence[str] | None = None, *, parsed: Callable[[], None] = lambda: None) -> int:
    """Run the command `vllm-repro` and return its exit status.

    An error is printed, not raised; wrong options raise `SystemExit` with status 64. Once the
    command line is parsed, SIGTERM, SIGHUP and SIGQUIT raise `KeyboardInterrupt`.

    argv: by default the words of this process. parsed: called once the verb's modules are imported.
    """
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        importlib.import_module("vllm_repro.cli.completion").complete(parser)
    words = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in words if not word.startswith("-")), None)
    if verb is not None and verb not in CORE_VERBS and verb not in verbs():
        print(
            f"vllm-repro: no verb is named {verb!r}{did_you_mean(verb, verbs())}\n  next:"
            " vllm-repro --help",
            file=sys.stderr,
        )
        return WRONG_USAGE
    arguments, unknown = parser(verb).parse_known_args(words)
    if unknown:
        arguments.parser.refuse_unknown(unknown)
    parsed()
    use_scenario_folders(arguments)
    # KeyboardInterrupt undoes a started install or check; a run has handlers of its own.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _as_interrupt)
    # print a character that the terminal's encoding lacks as an escape
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = int(arguments.function(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where an error is handled
        return status
    except ReproError as error:
        print(f"vllm-repro: {error}", file=sys.stderr)
        if error.hint:
            print(f"  next: {error.hint}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("vllm-repro: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return _fault(error)
        # Python flushes standard output again at exit.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # until the exit
        print(
            f"vllm-repro: cannot write: {error.strerror}\n  next: make room, or write elsewhere",
            file=sys.stderr,
        )
        return HOST_TROUBLE
    except Exception as error:
        return _fault(error)


def _as_interrupt(number: int, _frame: FrameType | None) -> None:
    """Turn a signal into a `KeyboardInterrupt` that names it."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def _fault(error: Exception) -> int:
    """Print an unexpected error with its traceback, and return exit status 70."""
    traceback.print_exception(error)
    print(
        f"vllm-repro: a fault of the harness itself: {type(error).__name__}: {error}\n"
        "  next: please report it with the traceback above",
        file=sys.stderr,
    )
    return HARNESS_FAULT
