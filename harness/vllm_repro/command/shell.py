"""A reported command as shell text: its lines put together, its variables, and the one command that starts
the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_repro.command.docker_run import Container, find_docker_run, read_docker_run, resolve_program
from vllm_repro.command.flag_syntax import canonical, is_switch
from vllm_repro.command.shell_words import ASSIGNMENT, Word, find_server, split_commands
from vllm_repro.errors import CommandError

__all__ = ["Launch", "read_shell"]

_OTHER_PROGRAMS = frozenset(
    {
        "cd",
        "conda",
        "curl",
        "echo",
        "export",
        "git",
        "pip",
        "set",
        "sleep",
        "source",
        "unset",
        "uv",
        "vllm",
        "wget",
    }
)


@dataclass(frozen=True)
class Launch:
    """A server being started: the variables set for it, its container if it has one, its arguments, and the
    line it begins on."""

    env: tuple[tuple[str, str], ...]
    container: Container | None
    arguments: tuple[Word, ...]
    line: int


def read_shell(text: str) -> list[Launch]:
    """Every server that the text starts. Raises `CommandError` where it starts none."""
    commands = [command for command in _joined(split_commands(text)) if command]
    env: dict[str, str] = {}
    found: list[Launch] = []
    for words in commands:
        leading, rest = _assignments(words)
        if (server := _server(rest)) is not None:
            container, arguments = server
            variables = tuple({**env, **leading}.items())
            found.append(Launch(variables, container, tuple(arguments), words[0].line))
        elif not rest:
            # A line of assignments sets them for the lines below; the author's `export` may have been lost.
            env.update(leading)
    if not found:
        raise CommandError(
            "no server command found",
            line=commands[0][0].line if commands else 1,
            hint="expected `vllm serve …`, `docker run … IMAGE …`, a compose service or a YAML list of flags",
        )
    return found


def _server(words: Sequence[Word]) -> tuple[Container | None, list[Word]] | None:
    """Container and arguments of a simple command, None where it starts no server."""
    texts = [word.text for word in words]
    span = find_server(texts)
    options_at = find_docker_run(texts)
    if options_at is not None and (span is None or options_at < span[1]):
        return read_docker_run(words[options_at:])
    if span is not None:
        return None, list(words[span[1] :])
    if texts[:1] and any("vllm" in text and " " in text for text in texts):
        container, arguments = resolve_program(Container(image=""), words)
        return (None, arguments) if container.program else None
    return None


def _assignments(words: Sequence[Word]) -> tuple[dict[str, str], list[Word]]:
    """Leading `NAME=value` words, also after `sudo`, `env` and `export`, and what follows them."""
    found: dict[str, str] = {}
    i = 0
    while i < len(words):
        match = ASSIGNMENT.fullmatch(words[i].text)
        if match:
            found[match["name"]] = match["value"]
        elif words[i].text not in {"sudo", "env", "export", "exec", "nohup", "time"} and not (
            i and words[i].text.startswith("-") and words[i - 1].text in {"sudo", "env"}
        ):
            break
        i += 1
    return found, list(words[i:])


def _joined(lines: Sequence[list[Word]]) -> list[list[Word]]:
    """Lines put together that belong to one command although no backslash says so."""
    commands: list[list[Word]] = []
    for words in lines:
        if commands and _continues(commands[-1], words):
            commands[-1] = [*commands[-1], *words]
        else:
            commands.append(list(words))
    return commands


def _continues(command: Sequence[Word], words: Sequence[Word]) -> bool:
    first = words[0].text
    if first.startswith(("-", "\u2013", "\u2014")):
        return True
    texts = [word.text for word in command]
    options_at = find_docker_run(texts)
    if options_at is not None and _lacks_image(command[options_at:]):
        return True
    if first in _OTHER_PROGRAMS or ASSIGNMENT.fullmatch(first) or first.rsplit("/", 1)[-1] in {"vllm", "docker"}:
        return False
    if options_at is None and find_server(texts) is None:
        return False
    last = texts[-1]
    waits = last.startswith("--") and "=" not in last and not is_switch(canonical(last))
    return waits or first.startswith("{") or texts[-2:] == ["vllm", "serve"]


def _lacks_image(words: Sequence[Word]) -> bool:
    try:
        read_docker_run(words)
    except CommandError:
        return True
    return False
