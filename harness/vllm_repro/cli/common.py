"""Parser, values of options, and output: shared by all verbs."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from textwrap import TextWrapper
from typing import Any, NoReturn

WRONG_USAGE = 64


class Parser(argparse.ArgumentParser):
    """Argument parser that reports a mistake in one line and exits with status 64."""

    def error(self, message: str) -> NoReturn:
        """Print a mistake in one line, and exit with status 64."""
        self.exit(WRONG_USAGE, f"{self.prog}: {message}\n  next: {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise argparse's error with the nearest choice for a `value` that is not a choice."""
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            meant = did_you_mean(str(value), choices)
            raise argparse.ArgumentError(
                action, f"{value!r} is none of {', '.join(choices)}{meant}"
            )

    def refuse_unknown(self, words: list[str]) -> NoReturn:
        """Print the words that no option takes, with the nearest option; exit with status 64."""
        meant = did_you_mean(words[0].partition("=")[0], self._option_string_actions)
        self.error(f"unrecognized arguments: {' '.join(words)}{meant}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean x?` for the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def add_common(
    parser: argparse.ArgumentParser,
    *,
    example: str,
    prints: str = "",
    more: str = "",
    scenarios: bool = True,
) -> None:
    """Add what all verbs have: an example, `--scenarios`, and `--json` if the verb prints data.

    Wrap the description at the terminal's width.

    prints: that data; empty for a verb without `--json`. more: the end of the help text; paragraphs
    are wrapped, indented lines kept. scenarios: the verb reads scenarios, so add `--scenarios`.
    """
    wrapper = TextWrapper(
        shutil.get_terminal_size().columns - 2, break_long_words=False, break_on_hyphens=False
    )
    parser.description = wrapper.fill(parser.description or "")
    parser.epilog = re.sub(
        r"^\S.*(?:\n\S.*)*",
        lambda paragraph: wrapper.fill(paragraph[0]),
        f"example:\n  {example}{more}",
        flags=re.MULTILINE,
    )
    if scenarios:
        parser.add_argument(
            "--scenarios",
            dest="scenario_folders",
            metavar="DIR",
            action="append",
            default=[],
            help="a folder with more scenario files; may be given again",
        )
    if prints:
        parser.add_argument("--json", action="store_true", help=f"print JSON: {prints}")


def use_scenario_folders(arguments: argparse.Namespace) -> None:
    """Add the folders of `--scenarios` to the catalogue, here and in child processes.

    They go to the environment variable VLLM_REPRO_SCENARIOS.
    """
    known = [
        folder for folder in os.environ.get("VLLM_REPRO_SCENARIOS", "").split(os.pathsep) if folder
    ]
    more = [folder for folder in getattr(arguments, "scenario_folders", []) if folder not in known]
    if more:
        os.environ["VLLM_REPRO_SCENARIOS"] = os.pathsep.join([*known, *more])


def print_json(value: Any) -> None:
    """Print JSON, in ASCII if the terminal has another encoding than UTF-8."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(json.dumps(value, indent=2, ensure_ascii=not encoding.lower().startswith("utf")))


def number(text: str, *, least: int, most: int, what: str) -> int:
    """Return an option's text as a whole number from `least` to `most`.

    Raises `argparse.ArgumentTypeError`. what: the noun of the message.
    """
    if not re.fullmatch(r"\s*-?[0-9]+\s*", text) or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no {what} from {least} to {most:,}")
    return int(text)


def seconds(text: str) -> float:
    """Return an option's text as a number of seconds greater than 0.

    Raises `argparse.ArgumentTypeError`.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def duration(text: str) -> float:
    """Return an option's text, such as `90`, `90s`, `30m` or `2h`, in seconds.

    Raises `argparse.ArgumentTypeError`.
    """
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:].lower())
    try:
        return seconds(text if unit is None else text[:-1]) * (unit or 1)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time, such as 90s, 30m or 2h") from None
