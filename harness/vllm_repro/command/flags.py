"""Flags of a vLLM server: parsing, spelling, numbers.

A report is parsed without any release's own parser. So a word without a dash is the value of the
flag before it, unless that flag is a switch. `vllm_repro.command.flag_table` lists the switches and
the other exceptions.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from vllm_repro.command import flag_table
from vllm_repro.command.words import Word
from vllm_repro.errors import CommandError

_OPTIMIZATION = re.compile(r"-O(?P<level>\w+)")
# web pages join two dashes into a long one
_LONG_DASH = re.compile(r"^(?:[\u2013\u2014]-?)(?=[a-z])")
_NEGATIVE = re.compile(r"-\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_NUMBER = re.compile(r"(?P<number>-?\d+(?:_\d+)*(?:\.\d+)?)(?P<unit>[kKmMgGtT]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_BOOLEANS = frozenset({"true", "false", "yes", "no", "on", "off"})
_JSON_NAMES = ("-config", "-kwargs", "-overrides", "-per-prompt")
_JSON_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')
_JSON_NUMBER = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of a server. Two spellings of one flag are equal."""

    # Canonical, such as `--max-model-len` or `--compilation-config.cudagraph_mode`.
    name: str
    # Empty for a switch.
    values: tuple[str, ...] = ()
    # Reported spelling, such as `-tp`.
    written: str = field(default="", compare=False)
    # `=`, a blank, or nothing as in `-O3`.
    separator: str = field(default=" ", compare=False)

    @property
    def text(self) -> str | None:
        """The values joined by blanks, None for a switch."""
        return " ".join(self.values) if self.values else None

    def words(self) -> tuple[str, ...]:
        """Return the flag as words of a command line, such as `--max-num-seqs` and `8`.

        Keep the reported spelling if `read_arguments` can parse it again.
        """
        name = self.written or self.name
        if not self.values:
            return (name,)
        separable = not is_switch(self.name) and not _is_flag_word(self.values[0])
        if len(self.values) > 1 or (self.separator == " " and separable):
            return (name, *self.values)
        if self.separator == "" and _OPTIMIZATION.fullmatch(f"{name}{self.values[0]}"):
            return (f"{name}{self.values[0]}",)
        return (f"{name}={self.values[0]}",)


def canonical(name: str) -> str:
    """Return the canonical name of a flag.

    `max_model_len` and `--max_model_len` become `--max-model-len`, `-tp` its long form. A key after
    a dot stays as written: `-cc.cudagraph_mode` becomes `--compilation-config.cudagraph_mode`.
    """
    head, dot, key = name.partition(".")
    if not head.startswith("-"):
        head = f"--{head}"
    if not head.startswith("--"):
        return flag_table.SHORT_FORMS.get(head, head) + dot + key
    return head.replace("_", "-") + dot + key


def positive(name: str) -> str:
    """Return a canonical name without its `--no-`."""
    return f"--{name[5:]}" if name.startswith("--no-") else name


def is_switch(name: str) -> bool:
    """Return True if a flag, by canonical name, takes no value from the next word."""
    if name in flag_table.VALUED_IN_SPITE_OF_PREFIX or "." in name:
        return False
    return name in flag_table.SWITCHES or name.startswith(flag_table.SWITCH_PREFIXES)


def group_by_flag(words: Iterable[str]) -> list[tuple[str, ...]]:
    """Group the words of a command line: each flag with the words that follow it.

    Words before the first flag are one group.
    """
    groups: list[tuple[str, ...]] = []
    for word in words:
        starts_flag = word.startswith("--") or (word.startswith("-") and word[1:2].isalpha())
        if starts_flag or not groups:
            groups.append((word,))
        else:
            groups[-1] += (word,)
    return groups


def read_arguments(words: Sequence[Word]) -> tuple[str | None, tuple[Flag, ...]]:
    """Parse the words after `vllm serve` or after an image into the positional model and the flags.

    Raises `CommandError` with the line of the wrong word.
    """
    model: str | None = None
    flags: list[Flag] = []
    served: str | None = None
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if not _is_flag_word(word.text):
            if served is not None or (
                flags and not flags[-1].values and word.text.lower() in _BOOLEANS
            ):
                raise _stray_word_error(word, served, flags)
            model = served = word.text
            continue
        flag, taken = _read_flag(word, words[i:])
        i += taken
        _check_value(flag, word.line)
        if flag.name == "--model":
            if served is not None:
                raise CommandError(
                    f"two models: {served!r} and {flag.text!r}",
                    line=word.line,
                    hint="keep the one that was served: the first argument, or --model",
                )
            if not flag.values:
                raise CommandError(
                    "--model has no value", line=word.line, hint="name the model after it"
                )
            served = flag.text
        flags.append(flag)
    return model, tuple(flags)


def _is_flag_word(text: str) -> bool:
    """Return True if a word is a flag; False for a value such as a negative number."""
    if _LONG_DASH.match(text):
        return True
    return len(text) > 1 and text.startswith("-") and _NEGATIVE.fullmatch(text) is None


def _read_flag(word: Word, following: Sequence[Word]) -> tuple[Flag, int]:
    """Return the flag at `word` and the number of `following` words that are its values."""
    text = _LONG_DASH.sub("--", word.text)
    if glued := _OPTIMIZATION.fullmatch(text):
        return Flag(name=canonical("-O"), values=(glued["level"],), written="-O", separator=""), 0
    written, equals, value = text.partition("=")
    name = canonical(written)
    if equals:
        return Flag(name=name, values=(value,), written=written, separator="="), 0
    limit = 0 if is_switch(name) else len(following) if name in flag_table.MULTI_VALUED else 1
    values: list[str] = []
    for next_word in following[:limit]:
        if _is_flag_word(next_word.text):
            break
        values.append(next_word.text)
    return Flag(name=name, values=tuple(values), written=written), len(values)


def _stray_word_error(word: Word, model: str | None, flags: Sequence[Flag]) -> CommandError:
    """Return the error for a word that is no flag's value, with the likely reason.

    model: the one named before it, if any. flags: those before it.
    """
    if flags and not flags[-1].values and is_switch(flags[-1].name):
        name = flags[-1].written
        hint = f"{name} takes no value: write {name} or --no-{positive(flags[-1].name)[2:]}"
    elif flags:
        hint = (
            f"quote the value of {flags[-1].written} if it holds blanks, or name the flag of"
            f" {word.text!r}"
        )
    else:
        hint = f"the model is {model!r}; one server serves one model"
    return CommandError(f"the value {word.text!r} belongs to no flag", line=word.line, hint=hint)


def _check_value(flag: Flag, line: int) -> None:
    """Raise `CommandError` if a flag's JSON or `--max-model-len` cannot be parsed."""
    value = flag.text or ""
    if flag.name.endswith(_JSON_NAMES) and value.lstrip().startswith("{"):
        try:
            json.loads(_with_plain_numbers(value))
        except ValueError as error:
            hint = "compare it with the report; braces and quotes must be closed"
            if re.search("[\u201c\u201d\u2018\u2019]", value):
                hint = "the quotes are typographic ones; type them again as \" and '"
            elif '"' not in value:
                hint = "a shell eats the double quotes inside: put the whole value in single quotes"
            raise CommandError(
                f"the value of {flag.name} is not JSON: {error}", line=line, hint=hint
            ) from None
    if flag.name == "--max-model-len" and value != "auto":
        parse_number(flag.name, value, line)


def _with_plain_numbers(value: str) -> str:
    """Replace numbers such as the 80m of `{"cpu_bytes_to_use": 80m}`, which newer releases read."""
    parts = _JSON_STRING.split(value)
    parts[::2] = [
        _JSON_NUMBER.sub(lambda match: str(parse_number("", match[0])), part) for part in parts[::2]
    ]
    return "".join(parts)


def parse_number(name: str, value: str | None, line: int = 1) -> int:
    """Return the integer that vLLM parses: `4096`, `4k` (4000), `4K` (4096), `25.6k`.

    Likewise m/M, g/G and t/T. Raises `CommandError` naming the flag `name` for other texts.
    """
    if match := _NUMBER.fullmatch(value or ""):
        unit = match["unit"]
        base = 1000 if unit.islower() else 1024
        number = Decimal(match["number"]) * base ** _POWERS[unit.lower()]
        # vLLM takes decimals only with powers of 1000: 25.6K is not a whole number.
        if ("." not in match["number"] or unit.islower()) and number == int(number):
            return int(number)
    raise CommandError(
        f"the value of {name} is not a whole number: {value!r}",
        line=line,
        hint="write 4096, 4k (4000) or 4K (4096)",
    )


def flag_mistakes(flags: Iterable[Flag]) -> list[str]:
    """Return one sentence for each flag that is misspelt, lacks a value, or is in no release.

    A name unlike any known flag passes: the table does not have every flag of every release.
    """
    mistakes = ((flag.name, _mistake(flag)) for flag in flags)
    return [f"{name}: {why}" for name, why in mistakes if why]


def _mistake(flag: Flag) -> str:
    """Return why a flag is wrong (in no release, no value, typo); empty if it is not."""
    base = positive(flag.name.partition(".")[0])
    replacement = flag_table.NEVER_DEFINED.get(base)
    if replacement is not None:
        instead = f"write {replacement}" if replacement else "leave it out"
        return f"not defined in any release from 0.19.1 to 0.32.0: {instead}"
    if base in flag_table.KNOWN:
        optional = (
            flag.name not in flag_table.KNOWN
            or flag.name in flag_table.VALUE_OPTIONAL
            or is_switch(flag.name)
        )
        return "" if flag.values or optional else "has no value"
    # One wrong letter lowers the similarity of a short name more than that of a long one.
    alike = difflib.get_close_matches(
        base, flag_table.KNOWN, n=1, cutoff=0.8 if len(base) <= 10 else 0.9
    )
    if not alike:
        return ""
    meant = f"--no-{alike[0][2:]}" if flag.name.startswith("--no-") else alike[0]
    return f"probably a typo of {meant}"


_LOADS = re.compile(
    r"--(?:chat-template|config|io-processor-plugin|logits-processors|middleware"
    r"|reasoning-parser-plugin|scheduler-cls|tool-parser-plugin|trust-remote-code|worker-cls"
    r"|worker-extension-cls)"
)
_A_PATH = re.compile(r"(?:^|[=\s\"'])(?:~|\.{0,2}/)|\.\./|module_path")


def loading_flags(flags: Iterable[Flag]) -> list[str]:
    """Return, with values, the flags by which vLLM loads code or uses files of this host.

    They are allowed, but shown to the user.
    """
    return [
        " ".join(flag.words())
        for flag in flags
        if _LOADS.fullmatch(flag.name) or _A_PATH.search(flag.text or "")
    ]
