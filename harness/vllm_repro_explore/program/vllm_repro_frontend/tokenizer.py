"""Tokenizer without a model: a token for each byte, and for each text that is added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def make(tokens: Sequence[str], kind: Any = PreTrainedTokenizerFast) -> Any:
    """Return a tokenizer of transformers with a token for each byte and for each of `tokens`.

    kind: its class.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: index for index, byte in enumerate(alphabet)}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = kind(tokenizer_object=bpe)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys(tokens)])
    return tokenizer


class _Vocabulary(dict[str, int]):
    """Vocabulary that adds the texts that it lacks to `lacks` when they are looked up."""

    def __init__(self, ids: dict[str, int], lacks: set[str]) -> None:
        super().__init__(ids)
        self._lacks = lacks

    def _look_up(self, text: Any) -> None:
        if isinstance(text, str) and text not in self.keys():
            self._lacks.add(text)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the id of a text, or `default`."""
        self._look_up(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> int:
        self._look_up(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._look_up(key)
        return super().__contains__(key)


class _Recording(PreTrainedTokenizerFast):  # type: ignore[misc]  # not installed where it is checked
    """Tokenizer that records in `lacks` the texts that are looked up as tokens and are none."""

    lacks: set[str]

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary, which records."""
        return _Vocabulary(super().get_vocab(), self.lacks)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the ids of tokens, or the id of a token; record those that are none."""
        vocabulary = _Vocabulary(super().get_vocab(), self.lacks)
        for token in [tokens] if isinstance(tokens, str) else tokens:
            vocabulary.get(token)
        return super().convert_tokens_to_ids(tokens)


def needed_tokens(construct: Callable[[Any], object]) -> list[str]:
    """Return the texts that parsers look up as tokens when `construct` gets a tokenizer.

    Raises what `construct` raises with a tokenizer that has all of them.
    """
    needed: list[str] = []
    while True:
        _Recording.lacks = set()
        tokenizer = make(needed, _Recording)
        _Recording.lacks = lacks = set[str]()  # without what the constructor looked up
        try:
            construct(tokenizer)
        except Exception:
            if lacks <= {*needed}:
                raise
        new = sorted(lacks - {*needed})
        if not new:
            return needed
        needed += new
