"""Takes out of a text what a report must not carry: keys and tokens, and whatever tells whose machine it was made on. Pure.

Twice: the journal is written without secrets, each with a marker in its place; a report loses the private names too. Journal and logs
stay on this machine, and keep the paths that a later command needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from vllm_repro.journal.private_names import HOST, without_private_names
from vllm_repro.journal.secrets import is_secret_name, marker, without_secrets

__all__ = ["Redactor", "known_secrets"]

_LEAST = 8
"""Letters of a value that is looked for by itself; shorter ones (EMPTY, true) are words of every log."""

_REMEMBERED = 4_096
_LONGEST_REMEMBERED = 20_000
"""A run says the same things in each of its boots, so a text is often met again: it is looked through once."""


def known_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The values of an environment that are secrets by their names: value to name. They are found in any text, whatever stands beside."""
    return {value: name for name, value in environ.items() if is_secret_name(name) and len(value) >= _LEAST}


@dataclass(frozen=True)
class Redactor:
    """folders: (path, what stands for it), the longer path first. hosts: names of this machine. secrets: value to the name in its marker.

    names: False leaves private names where they are, and takes secrets only.
    """

    folders: Sequence[tuple[str, str]] = ()
    hosts: Sequence[str] = ()
    secrets: Mapping[str, str] = field(default_factory=dict)
    names: bool = True

    def text(self, value: str) -> str:
        return self._looked_up(value) if len(value) <= _LONGEST_REMEMBERED else self._without(value)

    @cached_property
    def _looked_up(self) -> Callable[[str], str]:
        return lru_cache(_REMEMBERED)(self._without)

    def _without(self, value: str) -> str:
        for secret in sorted(self.secrets, key=len, reverse=True):
            value = value.replace(secret, marker(self.secrets[secret]))
        value = without_secrets(value)
        if not self.names:
            return value
        for folder, stand_in in self.folders:
            if len(folder) > 1:
                # Whole names only: a run in /data must turn neither /database nor /mnt/data into something with a dot.
                value = re.sub(rf"(?<![\w.\]-]){re.escape(folder)}(?![\w-])", stand_in, value)
        for host in self.hosts:
            value = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", HOST, value)
        return without_private_names(value)

    def command(self, line: str) -> str:
        """`text` of a command line, which still means the same to a shell: the name that stands for a folder is left out of its quotes."""
        found = self.text(line)
        for _, stand_in in self.folders:
            if stand_in.startswith("$"):
                found = re.sub(rf"(?<!\S)'{re.escape(stand_in)}(?=/)", f'"{stand_in}"' + "'", found)
        return found

    def deep(self, value: Any) -> Any:
        """Every string in a structure of JSON's types, those below a name that says secret whole."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.deep(key): _all_gone(item, key) if is_secret_name(str(key)) else self.deep(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return self._words(value)
        return value

    def _words(self, words: Sequence[Any]) -> list[Any]:
        """A list, read as an argument vector too: what follows `--api-key` there is a secret, up to the next flag."""
        found: list[Any] = []
        flag = ""
        for word in words:
            if not isinstance(word, str):
                found.append(self.deep(word))
                continue
            if word.startswith("-"):
                flag = word if re.fullmatch(r"[\w-]+", word) and is_secret_name(word) else ""
            elif flag:
                found.append(_all_gone(word, flag))
                continue
            found.append(self._word(word))
        return found

    def _word(self, word: str) -> str:
        """One word of an argument vector: all that follows a secret name and `=` is its value, spaces too."""
        name, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[\w.-]+", name) and is_secret_name(name):
            return f"{self.text(name)}={_all_gone(value, name)}"
        return self.text(word)


def _all_gone(value: Any, name: str) -> Any:
    """`value` with a marker for each text in it; numbers, and an empty text, are no secrets."""
    if isinstance(value, str):
        kind = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        return value if not value or value.startswith("[redacted:") else marker(kind)
    if isinstance(value, Mapping):
        return {key: _all_gone(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_all_gone(item, name) for item in value]
    return value
