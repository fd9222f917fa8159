"""Redaction of text before it is written.

The journal is written without secrets. Reports also lose private names: paths, hosts, users.
Journal and logs stay on this machine and keep the paths that later commands need.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from vllm_repro.journal.private_names import HOST, USER, without_private_names
from vllm_repro.journal.secrets import kind_of, marker, without_secrets
from vllm_repro.secret_names import is_secret_name

_LEAST = 8
"""Shortest value that is searched for by itself.

Shorter ones (`EMPTY`, `true`) are ordinary words of a log.
"""

_REMEMBERED = 4_096
_LONGEST_REMEMBERED = 20_000
"""Texts up to this length are cached: a run repeats most of them in each boot."""


def known_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the secret values of an environment, each with its variable's name (`HF_TOKEN`).

    Values of less than 8 characters are left out.
    """
    return {
        value: name
        for name, value in environ.items()
        if is_secret_name(name) and len(value) >= _LEAST
    }


@dataclass(frozen=True)
class Redactor:
    """Remover of secrets and private names from texts, commands and JSON data."""

    # (path, replacement), longer paths first
    folders: Sequence[tuple[str, str]] = ()
    # names of this machine
    hosts: Sequence[str] = ()
    # from the value to the name in its marker
    secrets: Mapping[str, str] = field(default_factory=dict)
    # names of this account, removed only from paths such as /mnt/NAME and /mnt/nfs/NAME: in a
    # message they may be ordinary words
    users: Sequence[str] = ()
    # False: keep private names and remove only secrets
    names: bool = True

    def text(self, value: str) -> str:
        """Return `value` without secrets and, unless `names` is False, without private names.

        A second pass changes nothing.
        """
        return (
            self._redact_cached(value) if len(value) <= _LONGEST_REMEMBERED else self._redact(value)
        )

    @cached_property
    def _redact_cached(self) -> Callable[[str], str]:
        """Return the function that redacts short texts and remembers its results."""
        return lru_cache(_REMEMBERED)(self._redact)

    def _redact(self, value: str) -> str:
        """Return `value` redacted as by `text`, without the cache."""
        for secret in self._longest_first:
            value = value.replace(secret, marker(self.secrets[secret]))
        value = without_secrets(value)
        if not self.names:
            return value
        for name, pattern, replacement in self._names_here:
            value = pattern.sub(replacement, value) if name in value else value  # for speed
        return without_private_names(value)

    @cached_property
    def _longest_first(self) -> list[str]:
        """Return the known secret values, longest first: one may contain another."""
        return sorted(self.secrets, key=len, reverse=True)

    @cached_property
    def _names_here(self) -> list[tuple[str, re.Pattern[str], str]]:
        """This machine's folders, hosts and users, each with its pattern and what replaces it."""
        # Whole names only: /data must not match in /database or /mnt/data. Two processes may print
        # on one line without a space, so a hidden folder and the end of a page's name count too.
        folders = [
            (
                folder,
                rf"(?<![\w.\]-]){name}(?![\w-])|(?<=\.html){name}(?![\w-])|{name}(?=/\.)",
                replacement,
            )
            for folder, replacement in self.folders
            if len(folder) > 1 and (name := re.escape(folder))
        ]
        hosts = [(host, rf"(?<![\w.-]){re.escape(host)}(?![\w-])", HOST) for host in self.hosts]
        # Not deeper: a package may have the name, and frames are compared by their paths.
        above = r"(?<![\w.\]-])((?:/[\w.-]+){1,2}/)"
        users = [
            (user, rf"{above}{re.escape(user)}(?![\w.-])", rf"\1{USER}") for user in self.users
        ]
        return [(name, re.compile(text), new) for name, text, new in (*folders, *hosts, *users)]

    def command(self, line: str) -> str:
        """Return a redacted command line that means the same to a shell.

        Replacements such as $HOME stay outside single quotes.
        """
        redacted = self.text(line)
        for _, replacement in self.folders:
            if replacement.startswith("$"):
                redacted = re.sub(
                    rf"(?<!\S)'{re.escape(replacement)}(?=/)", f'"{replacement}"' + "'", redacted
                )
        return redacted

    def deep(self, value: Any) -> Any:
        """Return JSON data with each string redacted, and each string below a secret name replaced.

        Words after a secret flag in a list are replaced, too. Numbers stay.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.deep(key): (
                    _replace_texts(item, key) if is_secret_name(str(key)) else self.deep(item)
                )
                for key, item in value.items()
            }
        return self._redact_list(value) if isinstance(value, list | tuple) else value

    def _redact_list(self, words: Sequence[Any]) -> list[Any]:
        """Return a redacted list, which may be an argument vector.

        Words after a secret flag, such as `--api-key`, are secret up to the next flag.
        """
        redacted: list[Any] = []
        flag = ""
        for word in words:
            if not isinstance(word, str):
                redacted.append(self.deep(word))
                continue
            if word.startswith("-"):
                flag = word if re.fullmatch(r"[\w-]+", word) and is_secret_name(word) else ""
            elif flag:
                redacted.append(_replace_texts(word, flag))
                continue
            redacted.append(self._redact_word(word))
        return redacted

    def _redact_word(self, word: str) -> str:
        """Return a redacted argument. All after a secret name and `=` is secret, with spaces."""
        name, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[\w.-]+", name) and is_secret_name(name):
            return f"{self.text(name)}={_replace_texts(value, name)}"
        return self.text(word)


def _replace_texts(value: Any, name: str) -> Any:
    """Return `value` with a marker for each non-empty text in it. Numbers stay.

    name: the secret's, for the marker.
    """
    if isinstance(value, str):
        return value if not value or value.startswith("[redacted:") else marker(kind_of(name))
    if isinstance(value, Mapping):
        return {key: _replace_texts(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_texts(item, name) for item in value]
    return value
