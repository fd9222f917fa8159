"""Search for an answer whose message depends on the deltas in which it is streamed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from random import Random
from typing import Any

from .answer import Answer, draw
from .limit import HungError, failure_of
from .parsing import EOS, Conversation, Deltas, Parsers, expected
from .smallest import smallest

TOKEN, TOKENS = "one token in a delta", "several tokens in a delta"
PARTS = "one token in a delta, tags in several tokens"
"""Kinds of deltas. Whether a tag is one token depends on the model's tokenizer."""
_WINDOWS = 400
"""Most ways of joining neighboring tokens that are tried for the shortest one."""


class ParserSearch:
    """Search with the answers of one model."""

    def __init__(self, tool: str | None, reasoning: str | None) -> None:
        self.tool, self.reasoning = tool, reasoning
        # how many answers were played, judged and failed
        self.counts = {"answers": 0, "judged": 0, "failed": 0}
        # by seed, what goes wrong by the number of the split into deltas; None for an answer that
        # is not judged. Answers that pass are left out.
        self.outcomes: dict[int, dict[str, str] | None] = {}
        self._parsers = Parsers(tool, reasoning)

    @property
    def modules(self) -> set[str]:
        """Return the names of the modules that have the parsers' code."""
        return self._parsers.modules

    def play(self, seed: int) -> Iterator[dict[str, Any]]:
        """Draw an answer, and yield what goes wrong with it, at most once for each kind of deltas.

        An answer is judged only if the parsers read it as written without streaming.
        """
        rng = Random(seed)
        answer = draw(rng, self.tool, self.reasoning)
        self.counts["answers"] += 1
        conversation = self._parsers.open(answer)
        if not self._reads(conversation, answer):
            self.outcomes[seed] = None
            return
        self.counts["judged"] += 1
        tokens = conversation.tokens
        findings: dict[str, dict[str, Any]] = {}
        outcomes = {}
        splits = (
            (TOKEN, _one_by_one(tokens)),
            (TOKENS, _joined(rng, tokens)),
            (TOKENS, _joined(rng, tokens)),
            (PARTS, _one_by_one(conversation.parts)),
        )
        for number, (kind, split) in enumerate(splits):
            if wrong := _wrong(conversation, split):
                outcomes[str(number)] = f"{kind}: {wrong}"
                # a later one is the same failure if it is wrong in the same way
                findings.setdefault(wrong, self._finding(kind, wrong, answer, split))
        if outcomes:
            self.counts["failed"] += 1
            self.outcomes[seed] = outcomes
        yield from findings.values()

    def _finding(self, kind: str, wrong: str, answer: Answer, deltas: Deltas) -> dict[str, Any]:
        return {
            "tool_parser": self.tool,
            "reasoning_parser": self.reasoning,
            "split": kind,
            "wrong": wrong,
            "answer": answer,
            "deltas": deltas,
        }

    def shrink(self, finding: dict[str, Any]) -> dict[str, Any]:
        """Return the finding with the smallest answer and deltas that fail in the same way.

        It also gets what a script needs: tokens, prompt, and both messages.
        """
        wrong, kind = finding["wrong"], finding["split"]

        def failing(candidate: Answer) -> Deltas | None:
            """Return deltas of the same kind with which an answer fails so; None without any."""
            conversation = self._parsers.open(candidate)
            if not self._reads(conversation, candidate):
                return None
            splits = _splits(conversation, kind)
            return next((split for split in splits if _wrong(conversation, split) == wrong), None)

        answer = smallest(
            finding["answer"], Answer.simpler, lambda candidate: failing(candidate) is not None
        )
        deltas = failing(answer) or finding["deltas"]
        conversation = self._parsers.open(answer)
        if kind == TOKENS:
            windows = _windows(conversation.tokens)
            deltas = next(
                (split for split in windows if _wrong(conversation, split) == wrong), deltas
            )
        return finding | {
            "answer": answer.text,
            "deltas": [list(delta) for delta in deltas],
            "prompt": conversation.prompt,
            # besides those of the deltas
            "tokens": sorted({*self._parsers.looked_up} - {*chain(*deltas)}),
            "eos": EOS,
            "tools": answer.tools,
            "whole": vars(conversation.whole()),
            "streamed": _streamed(conversation, deltas),
        }

    def _reads(self, conversation: Conversation, answer: Answer) -> bool:
        """Return True if the parsers read the answer as written without streaming."""
        try:
            return not conversation.whole().difference(expected(answer))
        except (Exception, HungError):
            return False


def _wrong(conversation: Conversation, deltas: Deltas) -> str:
    """Return what differs between the stream of these deltas and the whole answer, if anything."""
    try:
        return conversation.streamed(deltas).difference(conversation.whole())
    except (Exception, HungError) as error:
        return failure_of(error)


def _streamed(conversation: Conversation, deltas: Deltas) -> Any:
    try:
        return vars(conversation.streamed(deltas))
    except (Exception, HungError) as error:
        return f"{failure_of(error)}: {error}"


def _one_by_one(tokens: list[str]) -> Deltas:
    return [[token] for token in (*tokens, EOS)]


def _joined(rng: Random, tokens: list[str]) -> Deltas:
    """Return the tokens in random deltas of up to 2, 5 or 12.

    Most servers send the first token alone; outputs are merged if a client is slow.
    """
    first, *rest = *tokens, EOS
    deltas = [[first]]
    if rng.random() < 0.3:
        deltas, rest = [], [first, *rest]
    most = rng.choice([2, 5, 12])
    while rest:
        size = rng.randint(1, most)
        deltas.append(rest[:size])
        rest = rest[size:]
    return deltas


def _splits(conversation: Conversation, kind: str) -> Iterator[Deltas]:
    """Yield some deltas of one kind for an answer."""
    tokens = conversation.parts if kind == PARTS else conversation.tokens
    if kind == TOKENS:
        yield from (_joined(Random(seed), tokens) for seed in range(12))
    else:
        yield _one_by_one(tokens)


def _windows(tokens: list[str]) -> Iterator[Deltas]:
    """Yield deltas of a token each but for one of several, the shortest first."""
    deltas = _one_by_one(tokens)
    windows = [(size, at) for size in range(2, len(deltas)) for at in range(len(deltas) - size + 1)]
    for size, at in windows[:_WINDOWS]:
        joined = [token for delta in deltas[at : at + size] for token in delta]
        yield [*deltas[:at], joined, *deltas[at + size :]]
