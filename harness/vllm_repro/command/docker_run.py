"""A reported `docker run` (or `podman run`): its options, the image, and what comes after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_repro.command.shell_words import Word, find_server, split_commands
from vllm_repro.errors import CommandError
from vllm_repro.secret_names import is_secret_name

__all__ = ["ENGINES", "Container", "docker_options", "find_docker_run", "read_docker_run", "resolve_program"]

ENGINES = frozenset({"docker", "podman", "nerdctl"})

_LONG_SWITCHES = frozenset(
    {
        "--detach",
        "--help",
        "--init",
        "--interactive",
        "--no-healthcheck",
        "--no-hosts",
        "--oom-kill-disable",
        "--privileged",
        "--publish-all",
        "--quiet",
        "--read-only",
        "--replace",
        "--rm",
        "--rmi",
        "--tty",
    }
)
_SHORT_SWITCHES = frozenset("ditPq")
_SHORT_TO_LONG = {
    "-e": "--env",
    "-p": "--publish",
    "-v": "--volume",
    "-w": "--workdir",
    "-u": "--user",
    "-h": "--hostname",
    "-l": "--label",
    "-m": "--memory",
}
_SINGLE = {
    "--gpus": "gpus",
    "--shm-size": "shm_size",
    "--ipc": "ipc",
    "--network": "network",
    "--net": "network",
    "--name": "name",
    "--runtime": "runtime",
}
_REPEATED = {"--publish": "ports", "--volume": "volumes", "--mount": "mounts", "--ulimit": "ulimits"}


@dataclass(frozen=True)
class Container:
    """The container of a report, in the words of `docker run`; it describes the reporter's machine, not this
    one.

    gpus: `all`, a count or `device=0,1`. ports, volumes, mounts, ulimits: as given to `-p`, `-v`, `--mount`,
    `--ulimit`. env: a variable passed on from the caller's environment (`-e NAME`) has the value `$NAME`.
    entrypoint: as `--entrypoint`. program: words between image and arguments, for example `("vllm",
    "serve")`. other: the remaining options, word for word.
    """

    image: str
    gpus: str | None = None
    ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    shm_size: str | None = None
    ipc: str | None = None
    network: str | None = None
    name: str | None = None
    entrypoint: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    ulimits: tuple[str, ...] = ()
    init: bool = False
    runtime: str | None = None
    other: tuple[str, ...] = ()


def find_docker_run(words: Sequence[str]) -> int | None:
    """Where the options of `docker run` begin; None where `words` run no container."""
    for i, word in enumerate(words):
        if word.rsplit("/", 1)[-1] in ENGINES:
            if "run" not in words[i:]:
                return None
            return words.index("run", i) + 1
    return None


def read_docker_run(words: Sequence[Word]) -> tuple[Container, list[Word]]:
    """The container and the server's arguments, from the words after `docker run`. Raises `CommandError`
    where no image follows."""
    single: dict[str, str] = {}
    repeated: dict[str, list[str]] = {field: [] for field in _REPEATED.values()}
    env: list[tuple[str, str]] = []
    other: list[str] = []
    entrypoint: tuple[str, ...] = ()
    init = False
    i = 0
    while i < len(words) and words[i].text.startswith("-"):
        name, value, taken = _option(words, i)
        i += taken
        if name in _SINGLE and value is not None:
            single[_SINGLE[name]] = value
        elif name in _REPEATED and value is not None:
            repeated[_REPEATED[name]].append(value)
        elif name == "--env" and value is not None:
            key, equals, text = value.partition("=")
            env.append((key, text if equals else f"${key}"))
        elif name == "--entrypoint" and value is not None:
            entrypoint = (value,) if value else ()
        elif name == "--init":
            init = value != "false"
        else:
            other += [word.text for word in words[i - taken : i]]
    if i >= len(words):
        line = words[-1].line if words else 1
        raise CommandError("`docker run` names no image", line=line, hint="the image follows the options")
    container = Container(
        image=words[i].text,
        gpus=single["gpus"].strip("\"'") if "gpus" in single else None,
        ports=tuple(repeated["ports"]),
        volumes=tuple(repeated["volumes"]),
        mounts=tuple(repeated["mounts"]),
        env=tuple(env),
        shm_size=single.get("shm_size"),
        ipc=single.get("ipc"),
        network=single.get("network"),
        name=single.get("name"),
        entrypoint=entrypoint,
        ulimits=tuple(repeated["ulimits"]),
        init=init,
        runtime=single.get("runtime"),
        other=tuple(other),
    )
    return resolve_program(container, words[i + 1 :])


def resolve_program(container: Container, words: Sequence[Word]) -> tuple[Container, list[Word]]:
    """Separates the program from its arguments in what a container runs: its entrypoint, then `words`.

    A script given to a shell (`bash -c "pip install …; vllm serve …"`) is looked into. What it does before
    the server starts is not kept, and the container is then one that starts the server itself.
    """
    before = [Word(text, words[0].line if words else 1) for text in container.entrypoint]
    everything = [*before, *words]
    texts = [word.text for word in everything]
    if (script := _script(texts)) is not None:
        inner = everything[script]
        for command in split_commands(inner.text, inner.line):
            inner_texts = [word.text for word in command]
            if (span := find_server(inner_texts)) is not None:
                container = replace(container, entrypoint=("vllm",), program=("serve",))
                return container, command[span[1] :]
        raise CommandError(
            "the container's script starts no vLLM server",
            line=inner.line,
            hint="a script must hold `vllm serve …` or `python -m vllm.entrypoints.openai.api_server …`",
        )
    span = find_server(texts)
    if span is None:
        return container, list(words)
    arguments_at = max(span[1] - len(before), 0)
    return replace(container, program=tuple(texts[len(before) : span[1]])), list(words[arguments_at:])


def docker_options(container: Container) -> list[tuple[str, ...]]:
    """The options of `docker run` for a reported container, the image and program last, each with its value.

    Variables that look like secrets appear by name only.
    """
    groups: list[tuple[str, ...]] = []
    if container.name:
        groups.append(("--name", container.name))
    if container.init:
        groups.append(("--init",))
    if container.runtime:
        groups.append(("--runtime", container.runtime))
    if container.gpus is not None:
        # Docker reads the value as CSV: without quotes inside, `device=0,1` would be two fields.
        groups.append(("--gpus", f'"{container.gpus}"' if "," in container.gpus else container.gpus))
    for option, value in (
        ("--ipc", container.ipc),
        ("--shm-size", container.shm_size),
        ("--network", container.network),
    ):
        if value:
            groups.append((option, value))
    groups += [("-p", port) for port in container.ports]
    groups += [("--ulimit", limit) for limit in container.ulimits]
    groups += [("-v", volume) for volume in container.volumes]
    groups += [("--mount", mount) for mount in container.mounts]
    for key, value in container.env:
        groups.append(("-e", key if value == f"${key}" or is_secret_name(key) else f"{key}={value}"))
    groups += _option_groups(container.other)
    if container.entrypoint:
        groups.append(("--entrypoint", container.entrypoint[0]))
    groups.append((container.image, *container.entrypoint[1:], *container.program))
    return groups


def _option(words: Sequence[Word], at: int) -> tuple[str, str | None, int]:
    """Name in its long form, value, and the number of words of the option at `at`."""
    text = words[at].text
    if text.startswith("--"):
        name, equals, value = text.partition("=")
        if equals:
            return name, value, 1
        if name in _LONG_SWITCHES:
            return name, None, 1
    else:
        letters = text[1:]
        switches = len(letters) - len(letters.lstrip("".join(_SHORT_SWITCHES)))
        if switches == len(letters):
            return text, None, 1
        name = _SHORT_TO_LONG.get(f"-{letters[switches]}", text)
        if glued := letters[switches + 1 :].removeprefix("="):
            return name, glued, 1
    if at + 1 >= len(words):
        raise CommandError(f"{text} has no value", line=words[at].line, hint="complete the line from the report")
    return name, words[at + 1].text, 2


def _option_groups(words: Sequence[str]) -> list[tuple[str, ...]]:
    groups: list[tuple[str, ...]] = []
    for word in words:
        if word.startswith("-") or not groups:
            groups.append((word,))
        else:
            groups[-1] = (*groups[-1], word)
    return groups


def _script(texts: Sequence[str]) -> int | None:
    """The place of the script in `bash -c SCRIPT`."""
    for i, text in enumerate(texts[:-1]):
        name = text.rsplit("/", 1)[-1]
        if name not in {"bash", "sh", "zsh"}:
            continue
        for j in range(i + 1, len(texts) - 1):
            if not texts[j].startswith("-"):
                break
            if texts[j].endswith("c") and not texts[j].startswith("--"):
                return j + 1
    return None
