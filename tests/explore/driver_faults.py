"""Faults to plant in the rules of the program that plays the cases."""

from __future__ import annotations

from pathlib import Path

FAULTS: dict[str, tuple[str, str, str]] = {
    "a resumed request keeps its blocks": (
        "plain",
        "known.blocks = [list(group) for group in blocks]",
        "[mine.extend(more) for mine, more in zip(known.blocks, blocks)]",
    ),
    "a resumed request keeps all its tokens": (
        "ops",
        "            del known.tokens[known.prompt + answered :]\n",
        "",
    ),
    "rejected drafts stay computed": ("async", "computed[name] = self._reached[name]", "pass"),
    "placeholders are read as drafts": (
        "async",
        "drafts = (known.drafts + [1] * len(drafts))[: len(drafts)]",
        "pass",
    ),
    "a partial prefill has a token": (
        "plain",
        "if row.start + len(row.tokens) < len(known.tokens):",
        "if False:",
    ),
    "a bitmask has one row for each request": ("grammar", "at += counts[place]", "at += 1"),
    "each draft has the first row of the bitmask": (
        "grammar",
        "[rows[name] + place] if",
        "[rows[name]] if",
    ),
    "every draft is accepted": ("spec", "new[-1] != drafts[place] or place", "place"),
    "an answer ends before its least tokens": (
        "ends",
        "if max(answered, 0) < known.traits.least:",
        "if False:",
    ),
    "drafts end beyond the longest request": (
        "spec",
        'self.case["draft"] <= self.case["max_len"]',
        "0 < 1e9",
    ),
    "loads do not begin": ("off", "half.start()", "self._pending"),
    "a state stays in its block": ("mamba", "if before not in (-1, now):", "if False:"),
    "a step starts from the first state": (
        "mamba",
        "return self.slot(name) + right - 1",
        "return self.slot(name)",
    ),
    "a request that was left out keeps its count": (
        "mamba-ops",
        "for name in stepped if name in self._next",
        "for name in self._next",
    ),
    "a state at the end of a block is not kept": (
        "mamba-off",
        "if whole * self._block < first:",
        "if whole >= 0:",
    ),
    "recomputed outputs are a prefill": (
        "mamba-ops",
        "decoding = count <= 1 + (",
        "decoding = count == 1 + drafts + (0 * ",
    ),
    "encoder outputs stay": ("images", "self._encoded.pop(image, None)", "pass"),
    "each part of an image is its first": (
        "images",
        "encoded[low - first : high - first]",
        "encoded[: high - low]",
    ),
    "placeholders after a prompt are a prefill": (
        "mamba",
        "((_TAILS or self._second) and",
        "(False and",
    ),
}
"""Mix, and text of the program with what replaces it."""
SECOND: dict[str, tuple[str, str, str]] = {
    "the scheduler's count is taken": (
        "v2",
        "                computed[name] = known.reached\n",
        "",
    ),
    "a request that was left out keeps no count": (
        "v2-mamba",
        "self._right = dict(self._next)",
        "self._right = {name: self._next[name] for name in stepped if name in self._next}",
    ),
    "recomputed outputs are no prefill": ("v2-mamba", "len(tokens) if second else len", "len"),
}
"""The same of the second model runner, which needs a GPU: a fault in its rules is a finding."""


def plant(program: Path, mix: str, was: str, now: str) -> str:
    """Replace the text, which stands once in the program, and return the mix that sees it."""
    texts = {
        file: (program / file).read_text(encoding="utf-8") for file in ("executor.py", "mamba.py")
    }
    (file,) = (file for file, text in texts.items() if text.count(was) == 1)
    (program / file).write_text(texts[file].replace(was, now), encoding="utf-8")
    return mix
