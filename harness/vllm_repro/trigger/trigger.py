"""What must have happened inside the engine for a trial to mean anything, and the proof that it did.

Conditions are small, compose with `&` and `|`, and read as a sentence:

    trigger=chunked_prefill(chunks=2) & continuation_over(128)

Each is a pure function of `TriggerFacts` and comes back with its evidence: a quiet trial whose condition was not met is
`untriggered`, never `clean`. The facts are the server's own: the prompt length that its tokenizer counted or its `usage` reported,
the tokens that came from its prefix cache, the sizes of its steps, the lines of its boot, the scheduler's dump in a crash. None of
them is a word count of ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_repro.diagnosis.boot_facts import BootFacts, Observed
from vllm_repro.tiny_model import Kind

if TYPE_CHECKING:
    from vllm_repro.command.command import ServeCommand

__all__ = [
    "Asked",
    "AttentionShape",
    "Condition",
    "Continuation",
    "Finding",
    "ScheduledChunk",
    "TriggerFacts",
    "chunks_of",
    "continuations",
]


@dataclass(frozen=True)
class Asked:
    """One request that was sent, and what the server said about it.

    prompt_tokens: as the answer's usage reports it, else as `/tokenize` counted it before it was sent; None where neither is known.
    counted_by: "usage" or "tokenize".
    cached_tokens: prompt tokens taken from the prefix cache; None where the server does not say (a died request never does).
    answer_tokens: as usage reports them, and max_tokens before that; None where neither is known.
    repeats: tokens at its head that an earlier request, which was answered, began with too.
    steps: what the engine recorded in `vllm:iteration_tokens_total` while it was the only request, largest first; see `metrics`.
    fields: names and values of the body fields beyond the usual ones. refusal: what an error answer says.
    status: HTTP status; None where no answer came. died, hung: what the engine did while it was in flight.
    """

    name: str
    prompt_tokens: int | None
    counted_by: str = "usage"
    cached_tokens: int | None = None
    repeats: int = 0
    steps: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""
    status: int | None = 200
    died: bool = False
    hung: bool = False
    answer_tokens: int | None = None

    @property
    def accepted(self) -> bool:
        """The engine got it: answered with success, or died of something while it was in flight."""
        return self.died or self.status == 200


@dataclass(frozen=True)
class ScheduledChunk:
    """One request of the step in which an engine died, from the dump in its log: tokens computed before it, and scheduled in it.

    new: its first step, so that what was computed before it came from the prefix cache.
    """

    computed: int
    scheduled: int
    new: bool = False


@dataclass(frozen=True)
class AttentionShape:
    """Heads, KV heads and head size of the model that is served; block_size: KV-cache block in tokens where no flag sets it.

    kinds: each layer's attention, where it is known. window: of the sliding ones, in tokens. window_groups: block size and window of
    each group of sliding layers, where there are several, with block sizes of their own. group_pages: bytes of a block of each group,
    full attention first.
    """

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    kinds: tuple[Kind, ...] = ()
    window: int | None = None
    window_groups: tuple[tuple[int, int], ...] = ()
    group_pages: tuple[int, ...] = ()


@dataclass(frozen=True)
class TriggerFacts:
    """All that conditions may look at.

    batch: `max_num_batched_tokens` in force (the boot line's word before the flag's), None where unknown.
    chunked: whether chunked prefill is on, None where unknown. backend: attention backend that the boot line names, None where there is
    no such line. dump: the step that was running when the engine died. command: the flags that the server was started with, None for
    one that somebody else started. args: what the server says that it was started with. shape: of the model.
    locked: bytes of workspace that the log says were locked, None where it does not. reserved: whether the log says that room for a
    whole context was asked for at boot. observed: what the lab's plugin saw inside the engine. captured: what the death's message said
    at the holes of the signature. boot: all that the log says of the boot.
    """

    asked: tuple[Asked, ...] = ()
    batch: int | None = None
    chunked: bool | None = None
    backend: str | None = None
    dump: tuple[ScheduledChunk, ...] = ()
    command: ServeCommand | None = None
    args: Mapping[str, object] = field(default_factory=dict)
    shape: AttentionShape | None = None
    locked: int | None = None
    reserved: bool = False
    observed: tuple[Observed, ...] = ()
    captured: Mapping[str, str] = field(default_factory=dict)
    boot: BootFacts = field(default_factory=BootFacts)

    def number(self, flag: str) -> int | None:
        """The number that the server got for `flag`: its own word in the log before the command line; None where neither has it."""
        said = self.args.get(flag.removeprefix("--").replace("-", "_"))
        if isinstance(said, int):
            return said
        return None if self.command is None else self.command.number(flag)

    @property
    def chunk(self) -> int | None:
        """Most tokens of one prompt in a step: the batch, or less where long prompts are held back; None where unknown."""
        held_back = self.number("--long-prefill-token-threshold") or 0
        return min(self.batch, held_back) if self.batch and held_back > 0 else self.batch

    @property
    def block_size(self) -> int:
        """Tokens of a KV-cache block."""
        return self.number("--block-size") or (self.shape.block_size if self.shape else 16)

    def cached(self, asked: Asked) -> int:
        """Prompt tokens that came from the prefix cache, as the server counted them; of a request that died, which no counter tells of,
        the blocks that it must have had. 0 where an engine that lives does not say: then nothing is proved."""
        if asked.cached_tokens is not None:
            return asked.cached_tokens
        return self._reckoned(asked) if asked.died else 0

    def _reckoned(self, asked: Asked) -> int:
        """Tokens of the blocks that an earlier request had filled with the same head."""
        off = self.boot.prefix_caching is False or (
            self.command is not None and self.command.enabled("--enable-prefix-caching") is False
        )
        if off or asked.prompt_tokens is None:
            return 0
        return min(asked.repeats, asked.prompt_tokens - 1) // self.block_size * self.block_size

    def uncached(self, asked: Asked) -> int | None:
        """Prompt tokens that had to be computed, the fewest where the server does not say; None where the length is not known."""
        if asked.prompt_tokens is None:
            return None
        known = asked.cached_tokens
        return asked.prompt_tokens - (self._reckoned(asked) if known is None else known)


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

    def wanted(self) -> tuple[tuple[str, ...], ...]:
        """Body fields of which all those of a group must come in one request."""
        return ()

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

    def wanted(self) -> tuple[tuple[str, ...], ...]:
        return self.left.wanted() + self.right.wanted()

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

    def wanted(self) -> tuple[tuple[str, ...], ...]:
        return self.left.wanted() + self.right.wanted()

    def __str__(self) -> str:
        return f"({self.left} | {self.right})"


@dataclass(frozen=True)
class Continuation:
    """A chunk of a prompt with `context` tokens before it: earlier chunks, or blocks of the prefix cache."""

    context: int
    tokens: int


def chunks_of(tokens: int, batch: int, *, chunked: bool = True) -> tuple[int, ...]:
    """How a scheduler cuts a lone prompt of `tokens` uncached tokens: full chunks of `batch`, then the remainder."""
    if not chunked or tokens <= batch:
        return (tokens,) if tokens > 0 else ()
    full, rest = divmod(tokens, batch)
    return (batch,) * full + ((rest,) if rest else ())


def continuations(facts: TriggerFacts) -> tuple[Continuation, ...]:
    """Every continued chunk that the engine got: of prompts as they are cut, and of the step that it died in."""
    found = [Continuation(chunk.computed, chunk.scheduled) for chunk in facts.dump if chunk.computed]
    for asked in facts.asked:
        uncached = facts.uncached(asked)
        if uncached is None or facts.chunk is None or not asked.accepted:
            continue
        context = facts.cached(asked)
        for tokens in chunks_of(uncached, facts.chunk, chunked=facts.chunked is not False):
            if context:
                found.append(Continuation(context, tokens))
            context += tokens
    return tuple(found)
