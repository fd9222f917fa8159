"""What must have happened inside the engine for a trial to mean anything, and the proof that it did.

Conditions are small, compose with `&` and `|`, and read as a sentence:

    trigger=chunked_prefill(chunks=2) & continuation_over(128)

Each is a pure function of `TriggerFacts` and comes back with its evidence: a quiet trial whose condition was not met is
`untriggered`, never `clean`. The facts are the server's own: the prompt length that its tokenizer counted or its `usage` reported,
the tokens that came from its prefix cache, the sizes of its steps, the lines of its boot, the scheduler's dump in a crash. None of
them is a word count of ours.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Asked",
    "Condition",
    "Finding",
    "SchedulerStep",
    "TriggerFacts",
    "attention_backend",
    "chunked_prefill",
    "continuation_over",
    "sent_with",
]


@dataclass(frozen=True)
class Asked:
    """One request that was sent, and what the server said about it.

    prompt_tokens: as the answer's usage reports it, else as `/tokenize` counted it before it was sent; None where neither is known.
    counted_by: "usage" or "tokenize".
    cached_tokens: prompt tokens taken from the prefix cache; None where the server does not say (a died request never does).
    steps: what the engine recorded in `vllm:iteration_tokens_total` while it was the only request, largest first; see `metrics`.
    fields: names and values of the body fields beyond the usual ones.
    status: HTTP status; None where no answer came.
    """

    name: str
    prompt_tokens: int | None
    counted_by: str = "usage"
    cached_tokens: int | None = None
    steps: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    status: int | None = 200
    died: bool = False

    @property
    def accepted(self) -> bool:
        """The engine got it: answered with success, or died of something while it was in flight."""
        return self.died or self.status == 200


@dataclass(frozen=True)
class SchedulerStep:
    """The step in which an engine died, from the dump in its log: tokens computed before it, and scheduled in it."""

    computed: tuple[int, ...]
    scheduled: tuple[int, ...]


@dataclass(frozen=True)
class TriggerFacts:
    """All that conditions may look at.

    batch: `max_num_batched_tokens` in force (the boot line's word before the flag's), None where unknown.
    chunked: whether chunked prefill is on, None where unknown. backend: attention backend that the boot line names, None where there is
    no such line.
    """

    asked: tuple[Asked, ...] = ()
    batch: int | None = None
    chunked: bool | None = None
    backend: str | None = None
    dump: SchedulerStep | None = None


@dataclass(frozen=True)
class Finding:
    """The answer of a condition: crossed or not, with the sentences that say why, and a phrase short enough for a table."""

    crossed: bool
    evidence: tuple[str, ...]
    brief: str = ""


class Condition(ABC):
    """A statement about what the engine was made to do. Compose with `&` and `|`."""

    @abstractmethod
    def find(self, facts: TriggerFacts) -> Finding: ...

    def __and__(self, other: Condition) -> Condition:
        return _All(self, other)

    def __or__(self, other: Condition) -> Condition:
        return _Any(self, other)


@dataclass(frozen=True)
class _All(Condition):
    left: Condition
    right: Condition

    def find(self, facts: TriggerFacts) -> Finding:
        first, second = self.left.find(facts), self.right.find(facts)
        brief = ", ".join(filter(None, (first.brief, second.brief)))
        return Finding(first.crossed and second.crossed, first.evidence + second.evidence, brief)

    def __str__(self) -> str:
        return f"{self.left} & {self.right}"


@dataclass(frozen=True)
class _Any(Condition):
    left: Condition
    right: Condition

    def find(self, facts: TriggerFacts) -> Finding:
        first, second = self.left.find(facts), self.right.find(facts)
        if first.crossed == second.crossed:
            brief = ", ".join(filter(None, (first.brief, second.brief)))
            return Finding(first.crossed, first.evidence + second.evidence, brief)
        return first if first.crossed else second

    def __str__(self) -> str:
        return f"({self.left} | {self.right})"


def chunks_of(tokens: int, batch: int, *, chunked: bool = True) -> tuple[int, ...]:
    """How a scheduler cuts a lone prompt of `tokens` uncached tokens: full chunks of `batch`, then the remainder."""
    if not chunked or tokens <= batch:
        return (tokens,) if tokens > 0 else ()
    full, rest = divmod(tokens, batch)
    return (batch,) * full + ((rest,) if rest else ())


def _count(asked: Asked) -> str:
    source = "usage" if asked.counted_by == "usage" else "/tokenize"
    cached = f", {asked.cached_tokens} of them cached" if asked.cached_tokens else ""
    return f"{asked.name}: {asked.prompt_tokens} prompt tokens by {source}{cached}"


def _uncached(asked: Asked) -> int | None:
    return None if asked.prompt_tokens is None else asked.prompt_tokens - (asked.cached_tokens or 0)


def _plus(chunks: tuple[int, ...]) -> str:
    if len(chunks) > 4:
        return f"{len(chunks) - 1} x {chunks[0]} + {chunks[-1]}"
    return " + ".join(map(str, chunks))


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


@dataclass(frozen=True)
class _ChunkedPrefill(Condition):
    chunks: int

    def find(self, facts: TriggerFacts) -> Finding:
        if facts.dump is not None and any(facts.dump.computed):
            dump = facts.dump
            computed, scheduled = _listed(dump.computed), _listed(dump.scheduled)
            text = f"the scheduler's dump: {computed} tokens computed before the step that died, {scheduled} in it"
            return Finding(True, (text,), f"{computed} + {scheduled} tokens")
        if facts.batch is None:
            return Finding(False, ("the batch size in force is not known, so chunks cannot be counted",))
        if facts.chunked is False:
            return Finding(False, ("chunked prefill is off",))
        notes: list[str] = []
        for asked in facts.asked:
            tokens = _uncached(asked)
            if tokens is None:
                continue
            cut = chunks_of(tokens, facts.batch)
            if not asked.accepted:
                notes.append(f"{_count(asked)}, but the server refused it with {asked.status}")
            elif len(cut) >= self.chunks:
                seen = f"; iterations recorded: {', '.join(asked.steps)}" if asked.steps else ""
                return Finding(
                    True, (f"{_count(asked)}, cut at {facts.batch} into {_plus(cut)}{seen}",), f"{_plus(cut)} tokens"
                )
            else:
                notes.append(f"{_count(asked)}, {len(cut)} step of at most {facts.batch}")
        return Finding(
            False, tuple(notes[-1:]) or ("no request reached the engine",), "1 step" if notes else "no request"
        )

    def __str__(self) -> str:
        return f"chunked_prefill(chunks={self.chunks})"


@dataclass(frozen=True)
class _ContinuationOver(Condition):
    tokens: int

    def find(self, facts: TriggerFacts) -> Finding:
        largest = 0
        for asked in facts.asked:
            uncached = _uncached(asked)
            if uncached is None or facts.batch is None or not asked.accepted:
                continue
            cut = chunks_of(uncached, facts.batch, chunked=facts.chunked is not False)
            continued = cut if asked.cached_tokens else cut[1:]
            largest = max(largest, *continued, 0)
        if facts.dump is not None and any(facts.dump.computed):
            largest = max(largest, *facts.dump.scheduled, 0)
        if largest > self.tokens:
            return Finding(True, (f"a continuation of {largest} tokens, more than {self.tokens}",))
        if largest:
            return Finding(
                False,
                (f"the largest continuation had {largest} tokens, not more than {self.tokens}",),
                f"not over {self.tokens}",
            )
        return Finding(False, ("no prompt was continued",))

    def __str__(self) -> str:
        return f"continuation_over({self.tokens})"


# Success, or a refusal of what is in the request. Other refusals (a key, a path, a rate) come before anybody looked at it.
_JUDGED = frozenset({200, 400, 422})


@dataclass(frozen=True)
class _SentWith(Condition):
    names: tuple[str, ...]

    def find(self, facts: TriggerFacts) -> Finding:
        wanted = " and ".join(self.names)
        for asked in facts.asked:
            if all(asked.fields.get(name) for name in self.names) and (asked.died or asked.status in _JUDGED):
                values = ", ".join(f"{name}={json.dumps(asked.fields[name])}" for name in self.names)
                end = "the engine died with it in flight" if asked.died else f"answered {asked.status}"
                return Finding(True, (f"{asked.name} carried {values}: {end}",), end)
        return Finding(False, (f"no answered request carried {wanted}",), f"no {wanted}")

    def __str__(self) -> str:
        return f"sent_with({', '.join(map(repr, self.names))})"


@dataclass(frozen=True)
class _AttentionBackend(Condition):
    name: str

    def find(self, facts: TriggerFacts) -> Finding:
        if facts.backend == self.name:
            return Finding(True, (f"the boot line names the attention backend {self.name}",))
        seen = f"names {facts.backend}" if facts.backend else "is missing"
        return Finding(
            False, (f"the attention backend is not shown to be {self.name}: the boot line {seen}",), f"not {self.name}"
        )

    def __str__(self) -> str:
        return f"attention_backend({self.name!r})"


def attention_backend(name: str) -> Condition:
    """The boot log names this attention backend. A flag may be accepted and yet no layer use it, and then nothing is proved."""
    return _AttentionBackend(name)


def chunked_prefill(*, chunks: int = 2) -> Condition:
    """A prompt was cut into at least `chunks` pieces by `max_num_batched_tokens`."""
    if chunks < 2:
        raise ValueError("chunked_prefill(chunks=…) starts at 2: one chunk is every prompt")
    return _ChunkedPrefill(chunks)


def continuation_over(tokens: int) -> Condition:
    """A chunk with context before it (an earlier chunk, or cached blocks) had more than `tokens` tokens."""
    return _ContinuationOver(tokens)


def sent_with(*names: str) -> Condition:
    """A request that carried all these body fields got an answer, or killed the engine. A refusal (400) counts: it is an answer."""
    if not names:
        raise ValueError("sent_with() takes the names of body fields")
    return _SentWith(names)
