"""Renderer of a server command for a POSIX shell."""

from __future__ import annotations

import shlex

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.flags import group_by_flag
from vllm_repro.secret_names import is_secret_name

__all__ = ["render_serve"]


def render_serve(command: ServeCommand) -> str:
    """Return `vllm serve` with one flag a line, and the variables of command and container in front.

    A secret variable is taken from the caller's environment.
    """
    variables = {**(dict(command.container.env) if command.container else {}), **dict(command.env)}
    model = [] if command.model_argument is None else [command.model_argument]
    lines = [_assignment(name, value) for name, value in variables.items()]
    lines.append(shlex.join(["vllm", "serve", *model]))
    lines += [f"  {shlex.join(group)}" for group in group_by_flag(command.argv()[len(model) :])]
    return " \\\n".join(lines)


def _assignment(name: str, value: str) -> str:
    if is_secret_name(name) or value == f"${name}":
        return f'{name}="${name}"'
    return f"{name}={shlex.quote(value)}"
