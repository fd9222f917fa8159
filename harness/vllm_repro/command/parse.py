"""Parser for the server command that an issue reports.

It accepts `vllm serve`, `python -m vllm.entrypoints.openai.api_server` and `docker run`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from vllm_repro.command.command import ReportedContainer, ServeCommand
from vllm_repro.command.flags import canonical, is_switch, read_arguments
from vllm_repro.command.words import Word, split_commands
from vllm_repro.errors import CommandError

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_SERVER_MODULE = "vllm.entrypoints.openai.api_server"
_SERVER_FILE = "vllm/entrypoints/openai/api_server.py"
_CONTAINER_TOOLS = frozenset({"docker", "podman", "nerdctl"})
_SHELLS = frozenset({"bash", "sh", "zsh"})
_OTHER_PROGRAMS = re.compile(
    "cd|conda|curl|docker|echo|export|git|pip|set|sleep|source|unset|uv|vllm|wget"
)
_PREFIXES = frozenset({"sudo", "env", "export", "exec", "nohup", "time"})
_DOCKER_SWITCHES = re.compile(
    "--(?:detach|help|init|interactive|no-healthcheck|oom-kill-disable|privileged|publish-all"
    "|quiet|read-only|replace|rm|tty)"
)
_DOCKER_SHORT_SWITCHES = "ditPq"


@lru_cache(maxsize=128)
def parse(text: str) -> ServeCommand:
    """Return the one server command in a pasted text.

    The same command twice counts as one. Raises `CommandError` with a line if there is no command,
    two different ones, or one that is wrong.
    """
    env: dict[str, str] = {}
    servers: list[ServeCommand] = []
    commands = _join_lines(split_commands(text))
    for words in commands:
        leading, program = _split_assignments(words)
        server = _read_server(program)
        if server is not None:
            container, arguments = server
            model, flags = read_arguments(arguments)
            variables = tuple({**env, **leading}.items())
            command = ServeCommand(
                model_argument=model, flags=flags, env=variables, container=container
            )
            servers.append(command)
            if command != servers[0]:
                raise CommandError(
                    "two different server commands",
                    line=words[0].line,
                    hint="keep the one whose engine crashed",
                )
        elif not program:
            # Assignments hold for the lines below: `export` may have been lost in the paste.
            env.update(leading)
    if not servers:
        raise CommandError(
            "no server command found",
            line=commands[0][0].line if commands else 1,
            hint="expected `vllm serve …` or `docker run … IMAGE …`",
        )
    return servers[0]


def _read_server(words: Sequence[Word]) -> tuple[ReportedContainer | None, list[Word]] | None:
    """Return the container and the arguments of a simple command, None if it starts no server.

    The container is None without `docker run`. Raises `CommandError` for an incomplete
    `docker run`, or a `bash -c` script with "vllm" in it that starts no server.
    """
    texts = [word.text for word in words]
    end = _first_argument(texts)
    options = _first_docker_option(texts)
    # A look at the machine is no server: `docker run --rm nvidia/cuda nvidia-smi`.
    if options is not None and (
        not re.search(
            r"(?: |^)[^- ]\S* (?:\w+-smi|pip|ls|cat|env)(?: |$)", " ".join(texts[options:])
        )
        if end is None
        else options < end
    ):
        return _read_docker_run(words[options:])
    if end is not None:
        return None, list(words[end:])
    if any("vllm" in text and " " in text for text in texts):  # `bash -c 'vllm serve …'`
        program, arguments = _split_program(words)
        return (None, arguments) if program else None
    return None


def _first_argument(words: Sequence[str]) -> int | None:
    """Return the index of the first argument of the server; None if no server is started."""
    for i, word in enumerate(words):
        if word.rsplit("/", 1)[-1] == "vllm" and words[i + 1 : i + 2] == ["serve"]:
            return i + 2
        if word == _SERVER_MODULE or word.endswith(_SERVER_FILE):
            return i + 1
    return None


def _first_docker_option(words: Sequence[str]) -> int | None:
    """Return the index of the first word after `docker run`, None if there is no such command."""
    for i, word in enumerate(words):
        if word.rsplit("/", 1)[-1] in _CONTAINER_TOOLS:
            return words.index("run", i) + 1 if "run" in words[i:] else None
    return None


def _read_docker_run(words: Sequence[Word]) -> tuple[ReportedContainer, list[Word]]:
    """Return the container and the server's arguments, from the words after `docker run`.

    Raises `CommandError` without an image, or for an option without its value.
    """
    options: dict[str, list[str]] = defaultdict(list)
    i = 0
    while i < len(words) and words[i].text.startswith("-"):
        name, value, taken = _read_option(words, i)
        options[name].append(value)
        i += taken
    if i >= len(words):
        line = words[-1].line if words else 1
        raise CommandError(
            "`docker run` names no image", line=line, hint="the image follows the options"
        )
    last = {name: values[-1] for name, values in options.items()}
    entrypoint = [Word(last["--entrypoint"], words[i].line)] if last.get("--entrypoint") else []
    program, arguments = _split_program([*entrypoint, *words[i + 1 :]])
    container = ReportedContainer(
        image=words[i].text,
        gpus=last["--gpus"].strip("\"'") if "--gpus" in last else None,
        env=tuple(_variable(text) for text in options["--env"]),
        ipc=last.get("--ipc"),
        shm_size=last.get("--shm-size"),
        ulimits=tuple(options["--ulimit"]),
        # Drop a path or a wrapper script of the reporter: the image used here does not have it.
        entrypoint=(
            program if any(word == "vllm" or word.startswith("vllm.") for word in program) else ()
        ),
    )
    return container, arguments if program else list(words[i + 1 :])


def _read_option(words: Sequence[Word], at: int) -> tuple[str, str, int]:
    """Return name, value and number of words of the `docker run` option at `at`.

    The value of a switch is empty. `-e` is named `--env`, other short options as they are written.
    Raises `CommandError` if an option lacks its value.
    """
    text = words[at].text
    if text.startswith("--"):
        name, equals, value = text.partition("=")
        if equals or _DOCKER_SWITCHES.fullmatch(name):
            return name, value, 1
    else:
        letters = text[1:].lstrip(_DOCKER_SHORT_SWITCHES)  # `-itp 8000:8000`
        if not letters:
            return text, "", 1
        name = {"-e": "--env"}.get(f"-{letters[0]}", text)
        if glued := letters[1:].removeprefix("="):
            return name, glued, 1
    if at + 1 >= len(words):
        raise CommandError(
            f"{text} has no value", line=words[at].line, hint="complete the line from the report"
        )
    return name, words[at + 1].text, 2


def _variable(text: str) -> tuple[str, str]:
    """Return name and value of an `-e` option; `-e NAME` has the value `$NAME`."""
    name, equals, value = text.partition("=")
    return name, value if equals else f"${name}"


def _split_program(words: Sequence[Word]) -> tuple[tuple[str, ...], list[Word]]:
    """Split the words that a container runs: (start of the server, its arguments).

    Both are empty if the words start no server. In `bash -c "pip install …; vllm serve …"` only the
    server's command counts; raises `CommandError` for a script without one.
    """
    texts = [word.text for word in words]
    script = _find_script(texts)
    if script is None:
        end = _first_argument(texts)
        return (tuple(texts[:end]), list(words[end:])) if end is not None else ((), [])
    for command in split_commands(texts[script], words[script].line):
        end = _first_argument([word.text for word in command])
        if end is not None:
            return ("vllm", "serve"), command[end:]
    raise CommandError(
        "the container's script starts no vLLM server",
        line=words[script].line,
        hint=f"a script must hold `vllm serve …` or `python -m {_SERVER_MODULE} …`",
    )


def _find_script(texts: Sequence[str]) -> int | None:
    """Return the index of SCRIPT in `bash -c SCRIPT`; None if the words have no such script."""
    for i, text in enumerate(texts):
        if text.rsplit("/", 1)[-1] in _SHELLS:
            for j in range(i + 1, len(texts) - 1):
                if not texts[j].startswith("-"):
                    break
                if texts[j].endswith("c") and not texts[j].startswith("--"):
                    return j + 1
    return None


def _split_assignments(words: Sequence[Word]) -> tuple[dict[str, str], list[Word]]:
    """Return the leading `NAME=value` words as a dictionary, and the words after them.

    Drop words such as `sudo`, `env` and `export` that stand before or between them.
    """
    assignments: dict[str, str] = {}
    i = 0
    while i < len(words):
        text = words[i].text
        if match := _ASSIGNMENT.fullmatch(text):
            assignments[match["name"]] = match["value"]
        elif text not in _PREFIXES and not (
            i and text.startswith("-") and words[i - 1].text in {"sudo", "env"}
        ):
            break
        i += 1
    return assignments, list(words[i:])


def _join_lines(lines: Sequence[list[Word]]) -> list[list[Word]]:
    """Join lines of one command that lack the backslash between them."""
    commands: list[list[Word]] = []
    for words in lines:
        if commands and _continues(commands[-1], words[0].text):
            commands[-1] += words
        else:
            commands.append(list(words))
    return commands


def _continues(command: Sequence[Word], first: str) -> bool:
    """Return True if a line that begins with the word `first` continues `command`."""
    if first.startswith(("-", "\u2013", "\u2014")):
        return True
    texts = [word.text for word in command]
    options = _first_docker_option(texts)
    if options is not None and _lacks_image(command[options:]):
        return True
    if _ASSIGNMENT.fullmatch(first) or _OTHER_PROGRAMS.fullmatch(first.rsplit("/", 1)[-1]):
        return False
    if options is None and _first_argument(texts) is None:
        return False
    last = texts[-1]
    lacks_value = last.startswith("--") and "=" not in last and not is_switch(canonical(last))
    return lacks_value or first.startswith("{") or texts[-2:] == ["vllm", "serve"]


def _lacks_image(words: Sequence[Word]) -> bool:
    """Return True if the words after `docker run` cannot be parsed, as if lines were missing."""
    try:
        _read_docker_run(words)
    except CommandError:
        return True
    return False
