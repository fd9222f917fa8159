r"""A server command as a value: query its flags, edit it for an arm, render it as words.

    command = parse("vllm serve org/model --max-model-len 32k --speculative-config.method mtp")
    eager = command.without("--speculative-config").with_flags("--enforce-eager")
    print(eager.render())

`parse` is in `vllm_repro.command.parse`.
"""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass, replace

from vllm_repro.command.flags import (
    Flag,
    canonical,
    group_by_flag,
    is_switch,
    parse_number,
    positive,
    read_arguments,
)
from vllm_repro.command.words import split_words
from vllm_repro.errors import CommandError
from vllm_repro.secret_names import is_secret_name

_FALSE = frozenset({"false", "no", "off", "0"})


@dataclass(frozen=True, kw_only=True)
class ReportedContainer:
    """Parts of a reported `docker run` that a reproduction needs, as written."""

    image: str
    # `all`, a count or `device=0,1`.
    gpus: str | None = None
    # `-e NAME`, without a value, has the value `$NAME`.
    env: tuple[tuple[str, str], ...] = ()
    ipc: str | None = None
    shm_size: str | None = None
    ulimits: tuple[str, ...] = ()
    # Words that start vLLM; empty if the image's own entrypoint starts it.
    entrypoint: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """A `vllm serve` command: its model, flags, variables and container."""

    # In the reported order.
    flags: tuple[Flag, ...]
    # Positional model; None if `--model` gives it.
    model_argument: str | None = None
    # Variables set in front of the command, or exported before it.
    env: tuple[tuple[str, str], ...] = ()
    container: ReportedContainer | None = None

    @property
    def model(self) -> str | None:
        """Return the model to serve, from the argument or `--model`; None without one."""
        if self.model_argument is not None:
            return self.model_argument
        flag = self._last("--model")
        return flag.text if flag else None

    def get(self, name: str) -> str | None:
        """Return the value of the last flag of this name; None without such a flag or its value.

        The name is `--max-model-len` or `max_model_len`. Several words are joined by blanks. Use
        `has` for switches.
        """
        if canonical(name) == "--model":
            return self.model
        flag = self._last(canonical(name))
        return flag.text if flag and flag.name == canonical(name) else None

    def has(self, name: str) -> bool:
        """Return True if a flag is set; `--no-x` and `--x=false` set `--no-x`, not `--x`."""
        canonical_name = canonical(name)
        if canonical_name == "--model":
            return self.model is not None
        flag = self._last(canonical_name)
        return flag is not None and (flag.name == canonical_name) == (not _is_false(flag))

    def enabled(self, name: str) -> bool | None:
        """Return True for `--name`, False for `--no-name` or `--name=false`; None without it.

        The last one counts.
        """
        return None if self._last(canonical(name)) is None else self.has(name)

    def number(self, name: str) -> int | None:
        """Return a flag's value as vLLM parses numbers (`4096`, `4k`, `4K`); None without the flag.

        Raises `CommandError` if the value is not a number.
        """
        value = self.get(name)
        return None if value is None else parse_number(canonical(name), value)

    def with_flags(self, *words: str) -> ServeCommand:
        """Return a copy with flags set, each written as `"--max-num-seqs 8"`, `"--enforce-eager"`.

        A flag takes the place of one of the same name, also of its `--no-…` form; a new one comes
        last. Raises `CommandError` for a word that is no flag, or a value that cannot be parsed.
        """
        model, added = read_arguments([word for text in words for word in split_words(text)])
        if model is not None:
            raise CommandError(
                f"{model!r} is not a flag",
                hint="write the flag before its value, or use with_model()",
            )
        flags, argument = list(self.flags), self.model_argument
        for new in added:
            if new.name == "--model" and self.model_argument is not None:
                argument = new.text
                continue
            same = [i for i, flag in enumerate(flags) if positive(flag.name) == positive(new.name)]
            if same:
                flags[same[0]] = new
                flags = [flag for i, flag in enumerate(flags) if i not in same[1:]]
            else:
                flags.append(new)
        return replace(self, flags=tuple(flags), model_argument=argument)

    def without(self, *names: str) -> ServeCommand:
        """Return a copy without these flags, whether written as `--x` or as `--no-x`.

        The keys below a flag, such as `--compilation-config.mode`, are removed with it.

        Raises `CommandError` for a flag that the command does not have.
        """
        flags = self.flags
        for name in map(canonical, names):
            kept = tuple(
                flag
                for flag in flags
                if positive(flag.name) != positive(name) and not flag.name.startswith(f"{name}.")
            )
            if kept == flags:
                known = sorted({flag.name for flag in flags})
                near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
                hint = (
                    f"near: {', '.join(near)}"
                    if near
                    else f"it has {', '.join(known) or 'no flags'}"
                )
                raise CommandError(f"the command does not carry {name}", hint=hint)
            flags = kept
        return replace(self, flags=flags)

    def with_model(self, model: str) -> ServeCommand:
        """Return a copy with this model where the command names it: an argument or `--model`."""
        if self._last("--model") is None:
            return replace(self, model_argument=model)
        flags = (
            replace(flag, values=(model,)) if flag.name == "--model" else flag
            for flag in self.flags
        )
        return replace(self, flags=tuple(flags))

    def argv(self) -> tuple[str, ...]:
        """Return the words after `vllm serve`."""
        model = () if self.model_argument is None else (self.model_argument,)
        return (*model, *(word for flag in self.flags for word in flag.words()))

    def render(self) -> str:
        """Return `vllm serve` for a POSIX shell, one flag a line.

        The variables of the container and the command stand in front. A secret variable is taken
        from the caller's environment.
        """
        variables = {**(dict(self.container.env) if self.container else {}), **dict(self.env)}
        lines = [
            (
                f'{name}="${name}"'
                if is_secret_name(name) or value == f"${name}"
                else f"{name}={shlex.quote(value)}"
            )
            for name, value in variables.items()
        ]
        model = [] if self.model_argument is None else [self.model_argument]
        lines.append(shlex.join(["vllm", "serve", *model]))
        lines += [f"  {shlex.join(group)}" for group in group_by_flag(self.argv()[len(model) :])]
        return " \\\n".join(lines)

    def _last(self, name: str) -> Flag | None:
        """Return the last flag of this name, also as `--no-…`; None without one."""
        same = [flag for flag in self.flags if positive(flag.name) == positive(name)]
        return same[-1] if same else None


def _is_false(flag: Flag) -> bool:
    """Return True if a flag's value switches it off, as in `--enforce-eager=false`."""
    value = (flag.text or "").lower()
    return value == "false" or (is_switch(flag.name) and value in _FALSE)
