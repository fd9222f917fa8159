"""How vLLM's flags are written: which words belong together, which spellings mean the same.

No release's parser is at hand when a report is read, so this goes by rules: a word that does not start with a
dash is the value of the flag before it, unless that flag is a switch. `vllm_repro.command.flag_table` lists where the
rule alone would be wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from vllm_repro.command.flag_table import (
    JSON_FLAGS,
    JSON_IN_BRACES,
    MULTI_VALUED,
    SHORT_FORMS,
    SWITCH_PREFIXES,
    SWITCHES,
    VALUED_IN_SPITE_OF_PREFIX,
)
from vllm_repro.command.shell_words import Word
from vllm_repro.errors import CommandError

__all__ = [
    "Arguments",
    "Flag",
    "canonical",
    "is_switch",
    "parse_number",
    "positive",
    "read_arguments",
]

_OPTIMIZATION = re.compile(r"-O(?P<level>\w+)")
# Text that went through a word processor or a web page has its two dashes joined into one long one.
_LONG_DASH = re.compile(r"^(?:[\u2013\u2014]-?)(?=[a-z])")
_NEGATIVE = re.compile(r"-\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_HUMAN = re.compile(r"(?P<number>-?\d+(?:\.\d+)?)(?P<unit>[kKmMgGtT]?)")
_JSON_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')
_JSON_HUMAN = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_BOOLEAN_WORDS = frozenset({"true", "false", "yes", "no", "on", "off"})


def canonical(name: str) -> str:
    """The one name of a flag: `max_model_len`, `--max_model_len` and `--max-model-len` are the same, and so
    are `-tp` and its long form.

    What follows a dot is a key inside a config and stays as written: `-cc.cudagraph_mode` is
    `--compilation-config.cudagraph_mode`.
    """
    head, dot, key = name.partition(".")
    if not head.startswith("-"):
        head = f"--{head}"
    if not head.startswith("--"):
        return SHORT_FORMS.get(head, head) + dot + key
    return head.replace("_", "-") + dot + key


def positive(name: str) -> str:
    """A canonical name without its `--no-`."""
    return f"--{name[5:]}" if name.startswith("--no-") else name


def is_switch(name: str) -> bool:
    """Whether a flag, by canonical name, stands alone, so that the word after it is not its value."""
    if name in VALUED_IN_SPITE_OF_PREFIX or "." in name:
        return False
    return name in SWITCHES or name.startswith(SWITCH_PREFIXES)


def is_flag_word(text: str) -> bool:
    """Whether a word begins a flag rather than being a value; `-1` and `-0.5` are values."""
    if _LONG_DASH.match(text):
        return True
    return len(text) > 1 and text.startswith("-") and _NEGATIVE.fullmatch(text) is None


@dataclass(frozen=True)
class Flag:
    """One flag of a server.

    name: canonical, for example `--max-model-len` or `--compilation-config.cudagraph_mode`. value: its value,
    None for a switch. more: the further words of a flag that takes several. written, separator: how it was
    spelled (`-tp`, `=`, a blank, or nothing as in `-O3`). Two spellings of one flag are equal.
    """

    name: str
    value: str | None = None
    more: tuple[str, ...] = ()
    written: str = field(default="", compare=False)
    separator: str = field(default=" ", compare=False)

    @property
    def values(self) -> tuple[str, ...]:
        return () if self.value is None else (self.value, *self.more)

    @property
    def text(self) -> str | None:
        """The value in one string, several words with blanks between them."""
        return None if self.value is None else " ".join(self.values)

    def words(self) -> tuple[str, ...]:
        """As words of a command line, in the reported spelling wherever that can be read back."""
        name = self.written or self.name
        if self.value is None:
            return (name,)
        separable = not is_switch(self.name) and not is_flag_word(self.value)
        if self.more or (self.separator == " " and separable):
            return (name, *self.values)
        if self.separator == "" and _OPTIMIZATION.fullmatch(f"{name}{self.value}"):
            return (f"{name}{self.value}",)
        return (f"{name}={self.value}",)


@dataclass(frozen=True)
class Arguments:
    """Arguments of a server. model_at: None for a positional model, else the place of `--model` among the
    flags."""

    model: str | None
    flags: tuple[Flag, ...]
    model_flag: Flag | None = None
    model_at: int | None = None


def read_arguments(words: Sequence[Word]) -> Arguments:
    """The arguments after `vllm serve` or after an image. Raises `CommandError` with the line of the word in
    question."""
    found: list[tuple[Flag, int]] = []
    model: tuple[str, int] | None = None
    model_flag: Flag | None = None
    model_at: int | None = None
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if not is_flag_word(word.text):
            if model is not None:
                raise _stray(word, model[0], found)
            if found and found[-1][0].value is None and word.text.lower() in _BOOLEAN_WORDS:
                raise _stray(word, None, found)
            model = (word.text, word.line)
            continue
        flag, taken = _read_flag(word, words[i:])
        i += taken
        if flag.name == "--model":
            if model is not None:
                raise CommandError(
                    f"two models: {model[0]!r} and {flag.text!r}",
                    line=word.line,
                    hint="keep the one that was served: the first argument, or --model",
                )
            if flag.value is None:
                raise CommandError("--model has no value", line=word.line, hint="name the model after it")
            model, model_flag, model_at = (flag.value, word.line), flag, len(found)
            continue
        found.append((flag, word.line))
    for flag, line in found:
        _check(flag, line)
    return Arguments(model[0] if model else None, tuple(flag for flag, _ in found), model_flag, model_at)


def _read_flag(word: Word, rest: Sequence[Word]) -> tuple[Flag, int]:
    """The flag at `word` and how many of the `rest` are its values."""
    text = _LONG_DASH.sub("--", word.text)
    if glued := _OPTIMIZATION.fullmatch(text):
        return Flag(canonical("-O"), glued["level"], written="-O", separator=""), 0
    written, equals, value = text.partition("=")
    name = canonical(written)
    if equals:
        return Flag(name, value, written=written, separator="="), 0
    if is_switch(name):
        return Flag(name, written=written), 0
    limit = len(rest) if name in MULTI_VALUED else 1
    values: list[str] = []
    for following in rest[:limit]:
        if is_flag_word(following.text):
            break
        values.append(following.text)
    if not values:
        return Flag(name, written=written), 0
    return Flag(name, values[0], tuple(values[1:]), written=written), len(values)


def _stray(word: Word, model: str | None, found: Iterable[tuple[Flag, int]]) -> CommandError:
    flags = [flag for flag, _ in found]
    if flags and flags[-1].value is None and is_switch(flags[-1].name):
        name = flags[-1].written
        hint = f"{name} takes no value: write {name} or --no-{positive(flags[-1].name)[2:]}"
    elif flags:
        hint = f"quote the value of {flags[-1].written} if it holds blanks, or name the flag of {word.text!r}"
    else:
        hint = f"the model is {model!r}; one server serves one model"
    return CommandError(f"the value {word.text!r} belongs to no flag", line=word.line, hint=hint)


def _check(flag: Flag, line: int) -> None:
    told = (flag.value or "").lstrip()
    if (flag.name in JSON_FLAGS and told not in {"", "None"}) or (flag.name in JSON_IN_BRACES and told[:1] == "{"):
        try:
            json.loads(_with_plain_numbers(flag.value or ""))
        except ValueError as error:
            raise CommandError(
                f"the value of {flag.name} is not JSON: {error}", line=line, hint=_json_hint(told)
            ) from None
    if flag.name == "--max-model-len" and flag.value != "auto":
        parse_number(flag.name, flag.value, line)


def _with_plain_numbers(value: str) -> str:
    """Newer releases read `{"cpu_bytes_to_use": 80m}`; what stands in quotes is left alone."""
    parts = _JSON_STRING.split(value)
    parts[::2] = [_JSON_HUMAN.sub(lambda match: str(parse_number("", match[0])), part) for part in parts[::2]]
    return "".join(parts)


def _json_hint(value: str) -> str:
    if re.search("[\u201c\u201d\u2018\u2019]", value):
        return "the quotes are typographic ones; type them again as \" and '"
    if '"' not in value:
        return "a shell eats the double quotes inside: put the whole value in single quotes"
    return "compare it with the report; braces and quotes must be closed"


def parse_number(name: str, value: str | None, line: int = 1) -> int:
    """The integer that vLLM reads: `4096`, `4k` (4000), `4K` (4096), `25.6k`; likewise m/M, g/G, t/T.
    `CommandError` otherwise."""
    match = _HUMAN.fullmatch(value or "")
    if match is not None:
        unit = match["unit"]
        base = 1000 if unit.islower() else 1024
        number = Decimal(match["number"]) * base ** _POWERS[unit.lower()]
        # vLLM takes decimals only with the powers of 1000: 25.6K would not be a whole number.
        if ("." not in match["number"] or unit.islower()) and number == int(number):
            return int(number)
    raise CommandError(
        f"the value of {name} is not a whole number: {value!r}",
        line=line,
        hint="write 4096, 4k (4000) or 4K (4096)",
    )
