"""`vllm-repro diagnose`: the cause of death in a log, or the state of a live server."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from packaging.version import Version

from vllm_repro.cli.common import add_common, print_json
from vllm_repro.errors import UsageError
from vllm_repro.journal.redact import Redactor, known_secrets
from vllm_repro.scenario.catalogue import all_scenarios, folder_words, to_stderr
from vllm_repro.scenario.ledger import ledger_values
from vllm_repro.scenario.matching import Match, matches, other_bugs, standstills, twins
from vllm_repro.scenario.prices import kept_prices
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.verdict.verdict import Expected
from vllm_repro_diagnosis.diagnosis import Diagnosis, diagnose
from vllm_repro_diagnosis.live import command_of, observe, tree_of
from vllm_repro_diagnosis.log_text import read_lines
from vllm_repro_diagnosis.output import (
    as_values,
    banner_of,
    details,
    first_death,
    live_lines,
    live_values,
    next_steps,
    of_files,
    verdict,
    where,
)
from vllm_repro_diagnosis.signature import How
from vllm_repro_diagnosis.standstill import Kind, judge


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vllm-repro diagnose` to its parser."""
    add_common(
        parser,
        example="vllm-repro diagnose server.log --json",
        prints="whether it died, the cause, and the matching scenarios",
    )
    parser.add_argument(
        "--exit-code",
        action="store_true",
        help="exit with 1 if an engine died or hangs, 0 if not, 2 if it cannot tell",
    )
    parser.add_argument("--url", metavar="URL", help="read a live server that seems to hang")
    parser.add_argument("--pid", metavar="N", type=int, help="the same, by any of its processes")
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="*",
        help="a log or a pasted traceback, - for standard input; logs of several ranks or roles",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the cause of death in a log, or the state of a live server; return the exit status.

    The status is 0 without `--exit-code`. Raises `UsageError` unless either logs or a server are
    named.
    """
    live = arguments.url is not None or arguments.pid is not None
    if live == bool(arguments.file):
        hint = "name either a log file, or a live server with --url or --pid"
        raise UsageError("a log and a server" if live else "nothing to diagnose", hint=hint)
    folders = folder_words()
    if live:
        return _diagnose_live(arguments, folders)
    options = {"--json": arguments.json, "--exit-code": arguments.exit_code}
    words = ["vllm-repro", "diagnose", "-", *folders, *filter(options.get, options)]
    diagnoses = {name: _diagnose_file(name, shlex.join(words)) for name in arguments.file}
    name = first_death(diagnoses)
    diagnosis, known = diagnoses[name], all_scenarios(warn=to_stderr)
    matching = matches(diagnosis, known)
    exits = {each.died: {True: 1, None: 2, False: 0}[each.died] for each in diagnoses.values()}
    status = exits.get(True, max(exits.values())) if arguments.exit_code else 0
    shown = Redactor(secrets=known_secrets(os.environ), names=False).text
    unknown = diagnosis.died and not matching
    message = shown(diagnosis.message or "")
    nexts = next_steps(diagnosis, shlex.quote(name), message) if unknown else []
    if arguments.json:
        values = as_values(diagnosis)
        values |= {key: shown(str(values[key])) for key in ("message", "why") if values[key]}
        described = [_match_values(match, known, folders) for match in matching]
        files = {file: shown(verdict(each)) for file, each in diagnoses.items()}
        print_json({**values, "file": name, "files": files, "next": nexts, "matches": described})
        return status
    at = where(diagnosis, name if len(diagnoses) > 1 else "")
    exact = next(iter(matching), None)
    if exact is not None and exact.how is not How.MATCH and not exact.reported_again:
        exact = None
    head = [verdict(diagnosis), f"next: {'; '.join(nexts)}" if nexts else "", at]
    if exact:
        why = head[0] if " explains it: " in head[0] else ""
        head = [_match_line(exact), f"do: {_remedy(exact)}", f"died: {at}", why]
    frames = details(diagnosis, "" if exact else head[0])
    body = [banner_of(diagnosis), *head, *of_files(diagnoses), *frames]
    for match in matching:
        body += [_match_line(match)] if match is not exact else []
        if match.against:
            body.append(f"  not the same without a closer look: {match.against}")
        for twin in twins(match.scenario, known) if diagnosis.vllm_version is None else ():
            from_release = f"from {match.scenario.status.first_good} on"
            body.append(f"  or, {from_release}: {twin.id}: {twin.title}. The text names no release")
        body += [f"  {line}" for line in advice(match, known, _command(match, folders))]
    if diagnosis.exception and not matching:
        body.append("no known scenario has this signature")
    # The name of a file is no secret of a server, and a command needs all of it.
    command = f"vllm-repro intake {shlex.quote(name)}"
    for line in filter(None, body):
        print(command.join(shown(part) for part in line.split(command)))
    return status


# Exit status of `--exit-code` for a live server; 1 for the other kinds.
_EXIT = {Kind.SLOW: 0, Kind.IDLE: 0, Kind.UNKNOWN: 2}


def _has_vllm(pid: int) -> bool:
    """Return True if a process is named after vLLM, or has loaded its compiled code.

    True for a process of another user, too, because its files cannot be read.
    """
    if "vllm" in command_of(pid).lower():
        return True
    try:
        return "/vllm/" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # another user's
        return True


def _diagnose_live(arguments: argparse.Namespace, folders: list[str]) -> int:
    """Read a live server, print its state, and return the exit status: 0 without `--exit-code`.

    folders: the `--scenarios` words of printed commands. Raises `UsageError` for a URL that is not
    http, or a process that is none of vLLM's.
    """
    url, pids = arguments.url or "", tree_of(arguments.pid) if arguments.pid else []
    if url and not (urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname):
        raise UsageError(f"{url!r} is not an http URL", hint="--url http://127.0.0.1:8000")
    if not url and not pids:
        raise UsageError(f"there is no process {arguments.pid} here", hint="ps -ef | grep -i vllm")
    if pids and not _has_vllm(pids[0]):  # the API server, if there is one
        raise UsageError(
            f"process {arguments.pid} is none of a vLLM server",
            hint="name its API server, VLLM::EngineCore or a worker: ps -ef | grep -i vllm",
        )
    reading = observe(url, pids)
    finding = judge(reading)
    known = all_scenarios(warn=to_stderr) if finding.kind.hangs else []
    matching = standstills(finding, reading, known)
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if arguments.json:
        described = [_match_values(match, known, folders) for match in matching]
        print_json({**live_values(finding, reading), "time": at, "matches": described})
    else:
        lines = live_lines(finding, reading, at)
        for match in matching:
            lines += [
                _match_line(match),
                *(f"  {line}" for line in advice(match, known, _command(match, folders))),
            ]
        print(Redactor(secrets=known_secrets(os.environ), names=False).text("\n".join(lines)))
    return _EXIT.get(finding.kind, 1) if arguments.exit_code else 0


def _match_line(match: Match) -> str:
    """Return the line that names a matching scenario, its issue, and how it matches."""
    scenario = match.scenario
    return f"{match.how}: {scenario.id} ({scenario.issue}): {scenario.title}: {match.url}"


def _remedy(match: Match) -> str:
    """Return what to do about a known death: the release, or a flag with its price."""
    flag = match.lives_with[0] if match.lives_with else "no known change of flags avoids it"
    price = "".join(f" (price: {sentence})" for sentence in kept_prices(match.scenario.id)[:1])
    return "; ".join(
        filter(None, (_release_advice(match), match.reported_again, f"or {flag}{price}"))
    )


def _match_values(match: Match, known: Sequence[Scenario], folders: list[str]) -> dict[str, object]:
    """Return a matching scenario for `--json`: its ids, releases, workarounds and command.

    folders: the `--scenarios` words of the command.
    """
    status = match.scenario.status
    return {
        "scenario": match.scenario.id,
        "how": match.how,
        "issue": match.scenario.issue,
        "url": match.url,
        **ledger_values(match.scenario.id),
        "title": match.scenario.title,
        "ranges": {"bad": status.bad, "good": status.good},
        "fixed_in": status.first_good,
        "reported_again": match.reported_again,
        "lives_with": match.lives_with,
        "prices": kept_prices(match.scenario.id),
        "other_bugs": [other.id for other in other_bugs(match.scenario, known)],
        "run": _command(match, folders),
    }


def advice(match: Match, known: Sequence[Scenario], command: str) -> list[str]:
    """Return lines: releases without the bug, changes that avoid it, the `command` to show it."""
    lines = [_release_advice(match)]
    if match.how is How.MATCH and (others := other_bugs(match.scenario, known)):
        lines[0] += (
            ". That release or a later one has these bugs, with the same KV cache or connector:"
        )
        lines += [f"  {other.id} (bad {other.status.bad}): {other.title}" for other in others]
    patched = any(arm.patches and arm.expected is Expected.LIVES for arm in match.scenario.arms)
    no_flag = "with no known change of flags" + (", only with a patch of vLLM" if patched else "")
    lives = "; or ".join(match.lives_with) or no_flag
    prices = [f"price: {sentence}" for sentence in kept_prices(match.scenario.id)]
    lines += [match.reported_again] if match.reported_again else []
    return [*lines, f"lives: {lives}", *prices, f"to see it: {command}"]


def _release_advice(match: Match) -> str:
    """Return a phrase: `fixed in RELEASE`, the releases declared good, or `open`."""
    status = match.scenario.status
    if status.first_good is None:
        past = f"; {status.first_past} is the first not declared bad" if status.first_past else ""
        return f"open: no release is declared good{past}"
    if status.first_bad is not None and Version(status.first_bad) > Version(status.first_good):
        return f"declared good: {status.good}"
    # The crash may be in a release that is declared good.
    return f"{'declared ' if match.against else ''}fixed in {status.first_good}"


def _command(match: Match, folders: list[str]) -> str:
    """Return the `vllm-repro run` command of a matching scenario. folders: `--scenarios` words."""
    return shlex.join(["vllm-repro", "run", match.scenario.id, *folders])


# First bytes of compressed files, and the command that reads them.
_COMPRESSED = (
    (b"\x1f\x8b", "zcat"),
    (b"\xfd7zXZ\x00", "xzcat"),
    (b"\x28\xb5\x2f\xfd", "zstdcat"),
    (b"BZh", "bzcat"),
    (b"PK\x03\x04", "unzip -p"),
)


def _diagnose_file(name: str, again: str) -> Diagnosis:
    """Return the diagnosis of the log file `name`; `-` is standard input.

    again: the command that reads standard input instead, for the hint. Raises `UsageError` if the
    file cannot be read or is compressed.
    """
    hint = "name a log file, or - to paste one"
    if not name:
        raise UsageError("no file is named", hint=hint)
    if name == "-" and sys.stdin is None:
        raise UsageError(
            "standard input is closed", hint="name a log file, or give a text on standard input"
        )
    try:
        if name == "-":
            return _diagnose_stream(sys.stdin.buffer, name, again)
        with Path(name).open("rb") as file:
            return _diagnose_stream(file, name, again)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}", hint=hint) from error


def _diagnose_stream(file: BinaryIO, name: str, again: str) -> Diagnosis:
    """Return the diagnosis of an open log; raise `UsageError` if it is compressed.

    name, again: as for `_diagnose_file`.
    """
    first = file.peek(8) if isinstance(file, io.BufferedReader) else b""
    for begins, reads in _COMPRESSED:
        if first.startswith(begins):
            source = "FILE" if name == "-" else shlex.quote(name)
            raise UsageError("this file is compressed", hint=f"{reads} {source} | {again}")
    return diagnose(file if isinstance(file, io.BufferedReader) else read_lines(file))
