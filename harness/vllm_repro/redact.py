"""Takes out of a text what a report must not carry: keys and tokens, the user's home, the folder that the command was started in. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Redactor"]

_SECRETS = (
    (re.compile(r"\b(hf|sk|ghp|gho|ghs|github_pat|glpat|xox[abp])[-_][A-Za-z0-9_-]{10,}"), r"\1_[redacted]"),
    (re.compile(r"\bAKIA[0-9A-Z]{16}\b"), "[redacted]"),
    (re.compile(r"(--(?:api-key|hf-token)[= ]|[Bb]earer )\S+"), r"\1[redacted]"),
    (re.compile(r"('api_key': \[?)'[^']*'"), r"\1'[redacted]'"),
    (re.compile(r"(://[^/\s:@]+:)[^@\s/]+@"), r"\1[redacted]@"),
    (re.compile(r"\b([A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|API_KEY)=)\S+"), r"\1[redacted]"),
    (re.compile(r"/home/[^/\s'\"]+"), "/home/[user]"),
    (re.compile(r"/Users/[^/\s'\"]+"), "/Users/[user]"),
)

_SECRET_FLAGS = ("--api-key", "--hf-token")
"""Their values are words of their own in an argument vector."""


@dataclass(frozen=True)
class Redactor:
    """`folders`: (path, what stands for it), the longer path first."""

    folders: Sequence[tuple[str, str]] = ()

    def text(self, value: str) -> str:
        for folder, stand_in in self.folders:
            if len(folder) > 1:
                # Whole names only: a run in /data must not turn /database into "./base".
                value = re.sub(rf"{re.escape(folder)}(?![\w-])", stand_in, value)
        for pattern, stand_in in _SECRETS:
            value = pattern.sub(stand_in, value)
        return value

    def deep(self, value: Any) -> Any:
        """Every string in a structure of JSON's types."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self.deep(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            before = (None, *value)
            return [
                "[redacted]" if isinstance(item, str) and flag in _SECRET_FLAGS else self.deep(item)
                for flag, item in zip(before, value, strict=False)
            ]
        return value
