"""`vllm-repro intake`: a draft scenario from an upstream issue, a pasted command or a log.

It runs nothing of what it reads.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from vllm_repro.cli.common import add_common, print_json
from vllm_repro.cli.source_option import source
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.journal.redact import Redactor, known_secrets
from vllm_repro.releases.known import NEWEST
from vllm_repro.releases.request_fields import server_flags
from vllm_repro.releases.sources import Source
from vllm_repro.report.files import write_file
from vllm_repro.report.format import plural
from vllm_repro.scenario.catalogue import all_scenarios, folder_words, to_stderr
from vllm_repro.scenario.matching import Match, matches
from vllm_repro.scenario.reader import read
from vllm_repro_diagnosis.signature import How
from vllm_repro_intake.draft import draft
from vllm_repro_intake.facts import read_facts
from vllm_repro_intake.text import with_public_stores

_ISSUE = re.compile(
    r"https://github\.com/([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/issues/(\d{1,7})(?:[/?#]\S*)?"
)
_LARGEST = 16 << 20


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm-repro intake`."""
    add_common(
        parser,
        example="vllm-repro intake issue.md -o scenarios/my_bug.py",
        prints="the draft, what it guessed, and what was not read of the text",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="write the draft to FILE, a new .py (default: print it)",
    )
    parser.add_argument(
        "--vllm",
        type=source,
        metavar="V",
        help="the release to try and to check the flags against, if not the text's own",
    )
    parser.add_argument(
        "text",
        metavar="FILE|URL",
        help=(
            "an issue, a mail, a command or a log; - for standard input; a GitHub issue is read"
            " with gh"
        ),
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `vllm-repro intake`: write or print the draft, print its gaps to stderr, and return 0.

    Raises `UsageError` for a wrong or existing output file, and for a text without a command.
    """
    output: Path | None = arguments.output
    if output is not None and not re.fullmatch(r"[a-z0-9]+(?:_[a-z0-9]+)*\.py", output.name):
        raise UsageError(
            f"{output.name} is no name of a scenario file", hint="name it like my_bug.py"
        )
    if output is not None and output.exists():
        raise UsageError(f"{output} is already there", hint="name another file, or remove that one")
    text, more, issue = _read(arguments.text)
    redactor = Redactor(secrets=known_secrets(os.environ))
    facts = read_facts(
        with_public_stores(text, redactor.text),
        with_public_stores(more, redactor.text),
        issue=issue,
    )
    known = all_scenarios(warn=to_stderr)
    number = facts.issue.partition("#")[2]
    name = output.stem.replace("_", "-") if output else f"issue-{number}" if number else "my-bug"
    release = next((named.value for named in facts.versions if named.has_it is not False), "")
    source = arguments.vllm or (Source(release=release) if release else None)
    made = draft(
        facts,
        name,
        models=[scenario.model for scenario in known],
        known_flags=server_flags(source) if source else None,
        version=f"{arguments.vllm or ''}",
        newest=NEWEST,
    )
    path = output or Path(name.replace("-", "_") + ".py")
    _, problems = read(path, made.text)
    if output is not None:
        write_file(output, made.text, hint="-o FILE writes it elsewhere")
    crashes = matches(facts.diagnosis, known)
    if arguments.json:
        print_json(
            {
                "file": str(output) if output else None,
                "scenario": made.id,
                "draft": made.text,
                "gaps": made.gaps,
                "guesses": made.guesses,
                "problems": [problem.text for problem in problems],
                "matches": [match.scenario.id for match in crashes],
            }
        )
    elif output is None:
        print(made.text, end="")
    nexts = f"Once you have read it: vllm-repro check {path} && vllm-repro run {path}"
    if output is None:
        vllm = f" --vllm {arguments.vllm}" if arguments.vllm else ""
        nexts = f"To keep it: vllm-repro intake {shlex.quote(arguments.text)}{vllm} -o {path}"
    # What the draft lacks, and the next command.
    lines = [
        *(f"gap: {gap}" for gap in made.gaps),
        *(f"check: {problem.text}" for problem in problems),
        *(
            f"known: {_likeness(match)}: vllm-repro run"
            f" {' '.join([match.scenario.id, *folder_words()])}"
            for match in crashes
        ),
        (
            f"{path if output else made.id}: {plural(len(made.gaps), 'gap')},"
            f" {plural(len(made.guesses), 'guessed part')}. {nexts}"
        ),
    ]
    if output and "Dummy(" in made.text:
        lines.append(
            f"without a GPU: replace needs= by the line below it, then vllm-repro run {path}"
            f" --server process --weights dummy --vllm {made.release} (a tiny model, marked CPU)"
        )
    print("\n".join(lines), file=sys.stderr)
    return 0


def _read(name: str) -> tuple[str, str, str]:
    """Read a file, `-` or an issue's address; return (text, comments, issue name).

    The last two are "" for a file. Raises `UsageError` for one that cannot be read or is longer
    than 16 MiB, and the errors of `_from_github`.
    """
    if name.startswith(("http://", "https://")):
        return _from_github(name)
    if not name or (name == "-" and sys.stdin is None):
        raise UsageError("no text is named", hint="name a file, or - to paste the text")
    try:
        if name == "-":
            content = sys.stdin.buffer.read(_LARGEST + 1)
        else:
            with Path(name).open("rb") as file:
                content = file.read(_LARGEST + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read {name}: {error.strerror}", hint="name a file, or - to paste the text"
        ) from error
    if len(content) > _LARGEST:
        raise UsageError("the text is longer than 16 MiB", hint="keep a log's boot and its death")
    return (
        content.decode(
            "utf-16" if (content[:2] in (b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig", "replace"
        ),
        "",
        "",
    )


def _from_github(url: str) -> tuple[str, str, str]:
    """Run gh for up to 60 s to read an issue; return (title and text, comments, name).

    Raises `UsageError` for another address or without gh, and `InfraError` if gh fails.
    """
    by_hand = "paste the issue's text into a file: vllm-repro intake FILE"
    address = _ISSUE.fullmatch(url)
    if address is None:
        raise UsageError(f"{url} is no issue on GitHub", hint=by_hand)
    repository, number = address.groups()
    program = shutil.which("gh")
    if program is None:
        raise UsageError(
            "gh, GitHub's command line, is not installed, so the issue cannot be read", hint=by_hand
        )
    command = [program, "issue", "view", number, "--repo", repository]
    why = "it does not answer"
    try:
        done = subprocess.run(
            [*command, "--json", "title,body,comments"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        loaded = json.loads(done.stdout) if done.returncode == 0 else None
        why = (done.stderr.strip().splitlines() or ["it prints no issue"])[-1]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        loaded = None
    if not isinstance(loaded, dict):
        raise InfraError(f"gh cannot read {url}: {why}", hint=by_hand)
    return (
        f"# {loaded.get('title') or ''}\n\n{loaded.get('body') or ''}",
        "\n\n".join(
            str(comment.get("body") or "")
            for comment in [each for each in loaded.get("comments") or [] if isinstance(each, dict)]
        ),
        f"{repository}#{number}",
    )


def _likeness(match: Match) -> str:
    """Return how sure it is that the death is that of a scenario."""
    if match.how is How.MATCH:
        return f"the death has the signature of {match.scenario.id}"
    return f"the death resembles that of {match.scenario.id}, but {match.against}"
