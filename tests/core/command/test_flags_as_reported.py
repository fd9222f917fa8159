"""The four reported commands, from the issue's text to the argv of the started process."""

from __future__ import annotations

import shlex
from pathlib import Path

import psutil
import pytest

from tests.core.servers.docker_helpers import running
from vllm_repro.command.command import ServeCommand
from vllm_repro.command.parse import parse
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import ServerChoice, open_site

ISSUES = Path(__file__).parents[2] / "data" / "commands"
OURS = {"--host", "--port", "--master-addr", "--master-port"}
"""Addresses of the reporter's machine."""


def flags(command: ServeCommand) -> dict[str, tuple[str, ...]]:
    return {flag.name: flag.values for flag in command.flags if flag.name not in OURS}


def reported(issue: str) -> ServeCommand:
    text = (ISSUES / f"{issue}.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    # a compose file's list of arguments; the model stands elsewhere in the issue
    if lines[0].startswith("- "):
        words = [line.removeprefix("- ") for line in lines]
        return parse("vllm serve reported " + " ".join(f"'{word}'" for word in words))
    return parse("\n".join(lines))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("scenario", "issue"),
    [
        ("tq-chunked-prefill", "41726"),
        ("tq-mtp-cudagraphs", "40807"),
        ("dsv4-tp2", "41700"),
        ("sco-hybrid", "42085"),
    ],
)
async def test_the_flags_of_the_issue_are_those_of_the_process(
    tmp_path: Path, scenario: str, issue: str
) -> None:
    declared = find(scenario)
    assert len(flags(reported(issue))) > 5
    assert flags(declared.reported()) == flags(reported(issue))
    site = open_site(
        declared, ServerOptions(server="rehearsal"), ServerChoice(ServerKind.REHEARSAL, ""), print
    )

    _, server = site.server(declared, declared.arms[0], 1, tmp_path / "log", "run")
    words: list[str] = []
    async with running(server) as facts:
        while not words:  # empty for a moment after exec
            words = psutil.Process(facts.pid).cmdline()
    process = parse(shlex.join(["vllm", *words[words.index("serve") :]]))
    assert flags(process) == flags(declared.reported())
