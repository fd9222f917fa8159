"""`vllm-repro diagnose`: the cause of death in a server log or a pasted traceback."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from packaging.version import Version

from vllm_repro.cli.common import add_common, print_json
from vllm_repro.errors import UsageError
from vllm_repro.journal.redact import Redactor, known_secrets
from vllm_repro.scenario.catalogue import all_scenarios, folder_words, to_stderr
from vllm_repro.scenario.matching import Match, matches, other_bugs, twins
from vllm_repro.scenario.prices import kept_prices
from vllm_repro.scenario.scenario import Scenario, Status
from vllm_repro.verdict.verdict import Expected
from vllm_repro_diagnosis.diagnosis import Diagnosis, diagnose
from vllm_repro_diagnosis.log_text import read_lines
from vllm_repro_diagnosis.output import as_lines, as_values


def add(parser: argparse.ArgumentParser) -> None:
    add_common(
        parser,
        example="vllm-repro diagnose server.log --json",
        prints="whether it died, the cause, and the matching scenarios",
    )
    parser.add_argument(
        "--exit-code",
        action="store_true",
        help="exit with 1 if an engine died, 0 if not, 2 if the text cannot tell",
    )
    parser.add_argument(
        "file", metavar="FILE", help="a log or a pasted traceback; - for standard input"
    )


def run(arguments: argparse.Namespace) -> int:
    folders = folder_words()
    options = {"--json": arguments.json, "--exit-code": arguments.exit_code}
    words = ["vllm-repro", "diagnose", "-", *folders, *filter(options.get, options)]
    diagnosis = _read(arguments.file, shlex.join(words))
    known = all_scenarios(warn=to_stderr)
    matching = matches(diagnosis, known)
    status = {True: 1, False: 0, None: 2}[diagnosis.died] if arguments.exit_code else 0
    shown = Redactor(secrets=known_secrets(os.environ), names=False).text
    if arguments.json:
        print_json(
            {
                **as_values(diagnosis),
                "message": diagnosis.message and shown(diagnosis.message),
                "why": shown(diagnosis.why),
                "matches": [
                    {
                        "scenario": match.scenario.id,
                        "how": match.how,
                        "fixed_in": match.scenario.status.first_good,
                        "lives_with": match.lives_with,
                        "prices": kept_prices(match.scenario.id),
                        "other_bugs": [other.id for other in other_bugs(match.scenario, known)],
                        "run": _command(match, folders),
                    }
                    for match in matching
                ],
            }
        )
        return status
    for line in as_lines(diagnosis):
        print(shown(line))
    for match in matching:
        print(f"{match.how}: {match.scenario.id} ({match.scenario.issue}): {match.scenario.title}")
        if match.against:
            print(f"  not the same without a closer look: {match.against}")
        for twin in twins(match.scenario, known) if diagnosis.vllm_version is None else ():
            print(
                f"  or, from {match.scenario.status.first_good} on: {twin.id}: {twin.title}. The"
                " text names no release"
            )
        for line in advice(match, known, _command(match, folders)):
            print(f"  {line}")
    if diagnosis.exception and not matching:
        print("no known scenario has this signature")
    return status


def advice(match: Match, known: Sequence[Scenario], command: str) -> list[str]:
    """Return the advice: releases without the bug, changes that avoid it, a command to show it."""
    status = match.scenario.status
    lines = [_release_advice(status)]
    if others := other_bugs(match.scenario, known):
        lines[0] += (
            ". That release or a later one has these bugs, with the same KV cache or connector:"
        )
        lines += [f"  {other.id} (bad {other.status.bad}): {other.title}" for other in others]
    patched = any(arm.patches and arm.expected is Expected.LIVES for arm in match.scenario.arms)
    no_flag = "with no known change of flags" + (", only with a patch of vLLM" if patched else "")
    lives = "; or ".join(match.lives_with) or no_flag
    prices = [f"price: {sentence}" for sentence in kept_prices(match.scenario.id)]
    return [*lines, f"lives: {lives}", *prices, f"to see it: {command}"]


def _release_advice(status: Status) -> str:
    if status.first_good is None:
        past = f"; {status.first_past} is the first not declared bad" if status.first_past else ""
        return f"open: no release is declared good{past}"
    if status.first_bad is not None and Version(status.first_bad) > Version(status.first_good):
        return f"declared good: {status.good}"
    return f"fixed in {status.first_good}"


def _command(match: Match, folders: list[str]) -> str:
    return shlex.join(["vllm-repro", "run", match.scenario.id, *folders])


# First bytes of compressed files, and the command that reads them.
_COMPRESSED = (
    (b"\x1f\x8b", "zcat"),
    (b"\xfd7zXZ\x00", "xzcat"),
    (b"\x28\xb5\x2f\xfd", "zstdcat"),
    (b"BZh", "bzcat"),
    (b"PK\x03\x04", "unzip -p"),
)


def _read(name: str, again: str) -> Diagnosis:
    """Return the diagnosis of a file. again: the command that reads standard input instead."""
    hint = "name a log file, or - to paste one"
    if not name:
        raise UsageError("no file is named", hint=hint)
    if name == "-" and sys.stdin is None:
        raise UsageError(
            "standard input is closed", hint="name a log file, or give a text on standard input"
        )
    try:
        if name == "-":
            return _from(sys.stdin.buffer, name, again)
        with Path(name).open("rb") as file:
            return _from(file, name, again)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}", hint=hint) from error


def _from(file: BinaryIO, name: str, again: str) -> Diagnosis:
    first = file.peek(8) if isinstance(file, io.BufferedReader) else b""
    for begins, reads in _COMPRESSED:
        if first.startswith(begins):
            source = "FILE" if name == "-" else shlex.quote(name)
            raise UsageError("this file is compressed", hint=f"{reads} {source} | {again}")
    return diagnose(file if isinstance(file, io.BufferedReader) else read_lines(file))
