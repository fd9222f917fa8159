"""The command of a report: read from what people paste, edited by arms, and written back.

    command = parse('vllm serve org/model --max-model-len 32k --speculative-config \'{"method": "mtp"}\'')
    eager = command.without("--speculative-config").with_flags("--enforce-eager")
    print(render_serve(eager))

`parse` understands `vllm serve`, `python -m vllm.entrypoints.openai.api_server`, `docker run`, a YAML list of
arguments and a compose service. Two commands that mean the same have equal `model` and `flags`, however they
were spelled; each is written back as it was reported. Everything here is pure.
"""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass, field, replace

from vllm_repro.command.compose_parse import looks_like_yaml, read_yaml
from vllm_repro.command.compose_render import dump_compose
from vllm_repro.command.container import group_arguments
from vllm_repro.command.docker_run import Container, docker_options
from vllm_repro.command.flag_syntax import (
    Arguments,
    Flag,
    canonical,
    is_switch,
    parse_number,
    positive,
    read_arguments,
)
from vllm_repro.command.shell import read_shell
from vllm_repro.command.shell_words import split_words
from vllm_repro.errors import CommandError
from vllm_repro.secret_names import is_secret_name

__all__ = [
    "DEFAULT_IMAGE",
    "Container",
    "Flag",
    "ServeCommand",
    "parse",
    "render_compose",
    "render_docker",
    "render_serve",
]

DEFAULT_IMAGE = "vllm/vllm-openai:latest"

_FALSE_WORDS = frozenset({"false", "no", "off", "0"})


@dataclass(frozen=True)
class ServeCommand:
    """A server's command.

    model: from the first argument or `--model`; None where the text had none (a compose fragment). flags:
    without the model, in the reported order. env: variables set in front of the command, or exported before
    it. container: what the command ran in, where the report says so.
    """

    model: str | None
    flags: tuple[Flag, ...]
    env: tuple[tuple[str, str], ...] = ()
    container: Container | None = None
    model_flag: Flag | None = field(default=None, compare=False)
    """How `--model` was spelled; None for a positional model."""
    model_at: int | None = field(default=None, compare=False)
    """How many flags stood before `--model`."""

    def get(self, name: str) -> str | None:
        """The value of the last flag of this name (`--max-model-len` or `max_model_len`), None where there is
        none or it is a switch.

        Several words are joined by blanks. Use `has` for switches.
        """
        if canonical(name) == "--model":
            return self.model
        flag = self._last(canonical(name))
        return flag.text if flag and flag.name == canonical(name) else None

    def has(self, name: str) -> bool:
        """Whether the flag is set: given last, in this polarity, and not as `=false`."""
        wanted = canonical(name)
        if wanted == "--model":
            return self.model is not None
        flag = self._last(wanted)
        if flag is None:
            return False
        return (flag.name == wanted) == (not _is_false(flag))

    def enabled(self, name: str) -> bool | None:
        """True or False as the last of `--name` and `--no-name` says, None where neither is given and the
        default decides."""
        return None if self._last(canonical(name)) is None else self.has(name)

    def number(self, name: str) -> int | None:
        """The value as vLLM reads numbers (`4096`, `4k`, `4K`), None where it is not given; `CommandError` if
        it is no number."""
        value = self.get(name)
        return None if value is None else parse_number(canonical(name), value)

    def with_flags(self, *words: str) -> ServeCommand:
        """With these flags, each as on a command line: `"--max-num-batched-tokens 8192"`,
        `"--enforce-eager"`.

        A flag that is there already is replaced in its place, whichever polarity it had; a new one goes to
        the end.
        """
        arguments = read_arguments([word for text in words for word in split_words(text)])
        command = self
        if arguments.model is not None:
            if arguments.model_flag is None:
                raise CommandError(
                    f"{arguments.model!r} is not a flag",
                    hint="write the flag before its value, or use with_model()",
                )
            command = command.with_model(arguments.model)
        flags = list(command.flags)
        for new in arguments.flags:
            twins = [i for i, flag in enumerate(flags) if positive(flag.name) == positive(new.name)]
            if twins:
                flags[twins[0]] = new
                flags = [flag for i, flag in enumerate(flags) if i not in twins[1:]]
            else:
                flags.append(new)
        return replace(command, flags=tuple(flags))

    def without(self, *names: str) -> ServeCommand:
        """Without these flags, in either polarity, and without the keys set below them
        (`--compilation-config.mode`).

        Raises `CommandError` for a name that the command does not carry: an arm must not remove what is not
        there.
        """
        command = self
        for name in names:
            command = command._without(canonical(name))
        return command

    def _without(self, name: str) -> ServeCommand:
        if name == "--model" and self.model is not None:
            return replace(self, model=None, model_flag=None, model_at=None)
        below = f"{name}."
        kept = tuple(
            flag for flag in self.flags if positive(flag.name) != positive(name) and not flag.name.startswith(below)
        )
        if len(kept) == len(self.flags):
            known = sorted({flag.name for flag in self.flags})
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"near: {', '.join(near)}" if near else f"it has {', '.join(known) or 'no flags'}"
            raise CommandError(f"the command does not carry {name}", hint=hint)
        model_at = self.model_at
        if model_at is not None:
            model_at = sum(flag in kept for flag in self.flags[:model_at])
        return replace(self, flags=kept, model_at=model_at)

    def with_model(self, model: str) -> ServeCommand:
        """With another model, named where the reported one was."""
        flag = replace(self.model_flag, value=model) if self.model_flag else None
        return replace(self, model=model, model_flag=flag)

    def with_env(self, **variables: str) -> ServeCommand:
        """With these variables set in front of the command."""
        return replace(self, env=tuple({**dict(self.env), **variables}.items()))

    def argv(self) -> tuple[str, ...]:
        """The words after `vllm serve`."""
        flags = list(self.flags)
        words: list[str] = []
        if self.model is not None:
            if self.model_flag is None:
                words.append(self.model)
            else:
                flags.insert(min(self.model_at or 0, len(flags)), replace(self.model_flag, value=self.model))
        return (*words, *(word for flag in flags for word in flag.words()))

    def _last(self, name: str) -> Flag | None:
        same = [flag for flag in self.flags if positive(flag.name) == positive(name)]
        return same[-1] if same else None


def parse(text: str) -> ServeCommand:
    """The one server command in `text`; see the head of this module. Raises `CommandError` with the line that
    is at fault."""
    if looks_like_yaml(text):
        container, words = read_yaml(text)
        return _command(read_arguments(words), (), container)
    launches = read_shell(text)
    commands = [_command(read_arguments(launch.arguments), launch.env, launch.container) for launch in launches]
    for launch, command in zip(launches, commands, strict=True):
        if command != commands[0]:
            raise CommandError(
                f"two different server commands, in lines {launches[0].line} and {launch.line}",
                line=launch.line,
                hint="keep the one that died",
            )
    return commands[0]


def render_serve(command: ServeCommand) -> str:
    """`vllm serve` for a POSIX shell, one flag a line, with the variables of the command and of its container
    in front."""
    variables = {**(dict(command.container.env) if command.container else {}), **dict(command.env)}
    lines = [_assignment(name, value) for name, value in variables.items()]
    groups = group_arguments(command.argv())
    head: tuple[str, ...] = ("vllm", "serve")
    if command.model is not None and command.model_flag is None:
        head, groups = (*head, *groups[0]), groups[1:]
    lines.append(" ".join(shlex.quote(word) for word in head))
    lines += [f"  {shlex.join(group)}" for group in groups]
    return " \\\n".join(lines)


def render_docker(command: ServeCommand, *, image: str | None = None) -> str:
    """The reported `docker run`, one option a line; with `image`, of that one. A command without a container
    gets a plain one.

    This is the report said again. The container that this package creates is
    `vllm_repro.command.container.ContainerSpec`.
    """
    container = _container(command, image)
    options = [shlex.join(group) for group in docker_options(container)]
    arguments = [f"    {shlex.join(group)}" for group in group_arguments(command.argv())]
    return " \\\n".join(["docker run", *(f"  {option}" for option in options), *arguments])


def render_compose(command: ServeCommand, service: str = "vllm", *, image: str | None = None) -> str:
    """A compose file with the command as its one service."""
    return dump_compose(service, _container(command, image), command.argv())


def _container(command: ServeCommand, image: str | None) -> Container:
    """The reported container, or a plain one with all GPUs, with the command's variables inside."""
    base = command.container or Container(
        image=DEFAULT_IMAGE,
        gpus="all",
        ports=(f"127.0.0.1:{command.get('--port') or 8000}:{command.get('--port') or 8000}",),
        ipc="host" if (command.get("--tensor-parallel-size") or "1") != "1" else None,
    )
    variables = {**dict(base.env), **dict(command.env)}
    return replace(base, image=image or base.image, env=tuple(variables.items()))


def _command(arguments: Arguments, env: tuple[tuple[str, str], ...], container: Container | None) -> ServeCommand:
    return ServeCommand(arguments.model, arguments.flags, env, container, arguments.model_flag, arguments.model_at)


def _is_false(flag: Flag) -> bool:
    value = (flag.value or "").lower()
    return value == "false" or (is_switch(flag.name) and value in _FALSE_WORDS)


def _assignment(name: str, value: str) -> str:
    """A variable in front of a command; one that is a secret, or came from the caller, is taken from the
    caller's environment."""
    if is_secret_name(name) or value == f"${name}":
        return f'{name}="${name}"'
    return f"{name}={shlex.quote(value)}"
