"""Template of a message: its text without what differs between two prints of one bug."""

from __future__ import annotations

import re

from vllm_repro_diagnosis.root_cause import squeeze
from vllm_repro_diagnosis.tracebacks import shorten

__all__ = ["template"]

# Identifiers come before numbers, so that deepseek_v4_attention.py, fp8 and v1/worker keep their
# digits.
_MASKS = re.compile(
    r"(?P<place>(?P<file>[\w./\\-]{0,200}\w\.pyx?):\d+(?=:|\b))"
    r"|(?P<memory>0x[0-9A-Fa-f]+)"
    r"|(?P<address>\b\d{1,3}(?:\.\d{1,3}){3}(?:\]?:\d+)?)"
    r"|(?P<request>\b(?:chatcmpl|cmpl|req)-[\w-]+)"
    r"|(?P<uuid>\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b)"
    r"|(?P<path>(?<![\w.}])/(?:[\w.+@-]{1,255}/){1,60}[\w.+@-]+)"
    r"|(?P<word>[^\W\d][\w]*(?:[./\\-]\w+){0,40})"
    r"|(?P<number>(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?"
    r"(?:\s?(?:[KMGT]i?B|[Bb]ytes?|%|ms|s)(?!\w))?)"
)
_DIGEST = re.compile(r"(?=[0-9a-f]*\d)[0-9a-f]{12,}")


_MASKED = {"memory": "{hex}", "address": "{address}", "request": "{request}", "uuid": "{id}"}


def template(message: str) -> str:
    """Return the message with what differs between two prints of one bug masked.

    These are numbers with their units, addresses, ids and paths.
    """
    return _MASKS.sub(_mask, squeeze(message))


def _mask(match: re.Match[str]) -> str:
    kind, text = match.lastgroup or "", match[0]
    match kind:
        case "place":
            return f"{shorten(match['file'])}:{{line}}"
        case "path":
            return shorten(text)
        case "word":
            return "{hex}" if _DIGEST.fullmatch(text) else text
    return _MASKED.get(kind, "{n}")
