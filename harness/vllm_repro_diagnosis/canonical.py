"""Messages and paths as they are the same in every print and on every machine. Pure."""

from __future__ import annotations

import re

_PACKAGES = re.compile(
    "asyncio|concurrent|fastapi|flashinfer|multiprocessing|ray|starlette|torch|transformers|triton"
    "|torch_npu|uvicorn|uvloop|vllm_(?:ascend|gaudi|neuron|repro_lab|spyre)|xgrammar"
)
_EGG = re.compile(r"^[^/]+\.egg/")


def squeeze(text: str) -> str:
    """Return a text with single blanks and straight quotes: pasting and wrapping change both."""
    return " ".join(text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}).split())


def shorten(path: str) -> str:
    """Return a source file's path from its package on, which is the same on every machine."""
    path = path.replace("\\", "/")
    for root in ("/site-packages/", "/dist-packages/"):
        if root in path:
            return _EGG.sub("", path.rpartition(root)[2])
    parts = [part for part in path.split("/") if part not in ("", ".", "..", "...")]
    for at in range(len(parts) - 2, -1, -1):
        if parts[at] == "vllm":
            return "/".join(parts[at:])
    for at, part in enumerate(parts[:-1]):
        if _PACKAGES.fullmatch(part):
            return "/".join(parts[at:])
        if re.fullmatch(r"python\d\.\d+", part):
            return "/".join(parts[at + 1 :])
    absolute = path.startswith(("/", "~")) or re.match(r"[A-Za-z]:/", path)
    return parts[-1] if absolute and parts else "/".join(parts)
