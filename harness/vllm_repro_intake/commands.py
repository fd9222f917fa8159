"""The server commands of an issue's text, in every form in which issues give them.

A line of a shell, a list of arguments in YAML or JSON, a Kubernetes or compose service, `LLM(…)` in
Python, and the arguments that a server logs. All become the words of one command line, which
`vllm_repro.command.parse` reads.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import yaml

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.parse import parse
from vllm_repro.errors import CommandError
from vllm_repro.secret_names import is_secret_name
from vllm_repro_intake.text import LONGEST, Block, shortened

__all__ = ["Found", "calls", "find_commands", "likelihood", "rendered"]

_LEAD = (
    r"[ \t]*(?:(?:\([^()\n]*\)[ \t]*)?(?:[\w.\[\]-]+@[\w.\[\]-]+[^\n$%#]{0,80})?[$%#>]["
    r" \t]+|(?:CMD|RUN|[-*•])[ \t]+)?"
)
_PREFIX = (
    r"(?:(?:[A-Za-z_]\w*=(?:'[^'\n]*'|\"[^\"\n]*\"|\S*)|sudo|env|exec|nohup|time|numactl"
    r" \S+|(?:uv|poetry|pixi) run)[ \t]+)*"
)
_START = re.compile(
    rf"{_LEAD}{_PREFIX}(?:(?:[\w./~$\{{}}-]*/)?vllm[ \t]+serve\b"
    rf"|(?:[\w./~-]*/)?python[\d.]*[ \t]+-m[ \t]+vllm\.entrypoints\.openai\.api_server"
    rf"|(?:docker|podman|nerdctl)[ \t]+(?:container[ \t]+)?run\b)"
)
_SETTING = re.compile(rf"{_LEAD}(?:export[ \t]+)?[A-Za-z_]\w*=\S.*")
_GOES_ON = re.compile(
    r"[ \t]*(?:--?[A-Za-z]|[\u2013\u2014]|['\"]?\{|['\"]?[\w./-]+[ \t]*\\[ \t]*$)"
)
_NOTE = re.compile(r"(\\)[ \t]+#.*$")
_INLINE = re.compile(r"`+([^`\n]{8,})`+")
_CALL = re.compile(r"(?<![\w.])(?:vllm\.)?(?:LLM|EngineArgs|AsyncEngineArgs)\(")
_LOGGED = re.compile(r"non-default args: (?=\{)")
_DOCUMENT = re.compile(r"(?m)^[ \t]*(?:- |\[|[\w.-]+:(?: |$))")
_DEFAULT = re.compile(r"\$\{\w+:?-([^}]*)\}")  # compose reads ${NAME:-value} so
# in place of a value and its quotes
_MARKER = re.compile(r"(?<!['\"])\[redacted:[\w-]+\](?!['\"])")
_SCRIPT = re.compile(r"\bvllm serve |api_server ")
_GOOD_HEADING = re.compile(
    r"repro|crash|fail|\bdies\b|command|steps|launch|server|describe the bug|how (?:you|to)",
    re.IGNORECASE,
)
_OTHER_HEADING = re.compile(
    r"works?\b|workaround|expected|benchmark|fix notes|test plan|comparison|validation|client",
    re.IGNORECASE,
)
_MOST_LINES = 80
_MOST_NODES = 2_000
_MOST_CALLS = 50


@dataclass(frozen=True)
class Found:
    """One server command.

    how: its form if it is not a line of a shell. above: the heading and the line above it. unread:
    arguments that are no literals. times: how often the text has it.
    """

    command: ServeCommand
    words: str
    how: str = ""
    above: str = ""
    unread: tuple[str, ...] = ()
    times: int = 1


def find_commands(blocks: Sequence[Block], model: str = "") -> tuple[list[Found], list[str]]:
    """Return the distinct commands, the most likely one first, and a sentence for each that cannot be read.

    model: for a list of flags alone. The command that the text repeats counts most, then one below
    a heading such as "Reproduce".
    """
    found: list[Found] = []
    unread: list[str] = []
    for block in blocks:
        for one in (
            *_shell(block, unread),
            *_listed(block, model),
            *_python(block),
            *_logged(block),
        ):
            same = next(
                (at for at, known in enumerate(found) if known.command == one.command), None
            )
            if same is None:
                found.append(one)
            else:
                found[same] = replace(found[same], times=found[same].times + 1)
    return sorted(found, key=likelihood), list(dict.fromkeys(unread))


def likelihood(one: Found) -> tuple[int, int, int]:
    """Return the place of a command among others: the smallest is most likely the reported one."""
    order = ["", "YAML", "JSON", "Python", "log"]
    return order.index(one.how.partition(" ")[0]), -one.times, _unlikely(one.above)


def _unlikely(lines: str) -> int:
    """Return how unlikely a command is the reported one, by the line and the heading above it."""
    for above in reversed(lines.split("\n")):
        if _OTHER_HEADING.search(above) or _GOOD_HEADING.search(above):
            return 2 if _OTHER_HEADING.search(above) else 0
    return 1


def _shell(block: Block, unread: list[str]) -> Iterator[Found]:
    lines = [_NOTE.sub(r"\1", line) for line in block.lines]
    at = 0
    while at < len(lines):
        if not _START.match(lines[at]):
            at += 1
            continue
        first = at
        while first and _SETTING.fullmatch(lines[first - 1]):
            first -= 1
        region, at = _region(lines, at)
        settings = lines[first : at - len(region)]
        note = lines[first - 1] if first and lines[first - 1].lstrip().startswith("#") else ""
        yield from _parsed("\n".join([*settings, *region]), f"{block.above}\n{note}", unread)
    if not block.code:
        for span in _INLINE.findall("\n".join(lines)):
            if _START.match(span):
                yield from _parsed(span, block.above, unread)


def _region(lines: Sequence[str], start: int) -> tuple[list[str], int]:
    """Return the lines of the command that begins at `start`, and the index of the line after it."""
    region, at = [lines[start]], start + 1
    while at < len(lines) and len(region) < _MOST_LINES:
        text = "\n".join(region)
        goes_on = text.rstrip().endswith("\\") or _GOES_ON.match(lines[at])
        if not goes_on and text.count("'") % 2 == 0 and text.count('"') % 2 == 0:
            break
        region.append(lines[at])
        at += 1
    return region, at


def _parsed(text: str, above: str, unread: list[str]) -> Iterator[Found]:
    if len(text) > LONGEST:
        unread.append(f"{shortened(text, 80)!r}: it is longer than {LONGEST:,} characters")
        return
    text = re.sub(rf"\A{_LEAD}(?=\S)", "", text)
    settings = dict(
        re.findall(
            r"(?m)^[ \t$#%]*(?:export[ \t]+)?([A-Za-z_]\w*)=['\"]?([\w./:-]+)['\"]?[ \t]*$", text
        )
    )
    text = re.sub(r"\$\{?(\w+)\}?", lambda name: settings.get(name[1], name[0]), text)
    try:
        command = parse(text)
    except CommandError as error:
        unread.append(f"{shortened(text, 80)!r}: {error}")
        return
    name = command.model or ""
    # else "vllm serve crashes", or a container without a server
    if command.flags or re.search(r"[/\d<$]", name):
        yield Found(command, shortened(text), above=above)


def _listed(block: Block, model: str) -> Iterator[Found]:
    """Yield the commands of a YAML or JSON document: a service, or a list of arguments."""
    text = "\n".join(block.lines)
    if "--" not in text or len(text) > LONGEST or not _DOCUMENT.search(text):
        return
    for how in ("YAML", "JSON"):
        try:
            loaded = (yaml.safe_load if how == "YAML" else json.loads)(text)
        except (yaml.YAMLError, ValueError, RecursionError, TypeError):
            continue
        for image, words, variables in _services(loaded):
            end = next(
                (
                    at + 1
                    for at, word in enumerate(words)
                    if word == "serve" or "api_server" in word
                ),
                0,
            )
            arguments = words[end:]
            if not any(word.startswith("--") for word in arguments):
                continue
            settings = [word for pair in variables for word in ("-e", "=".join(pair))]
            named = any(re.match(r"--model(?:=|$)", word) for word in arguments) or not arguments[
                0
            ].startswith("-")
            head = ["docker", "run", *settings, image] if image else ["vllm", "serve"]
            try:
                command = parse(
                    shlex.join(
                        [*head, *([] if named or not model else ["--model", model]), *arguments]
                    )
                )
            except CommandError:
                continue
            if not image and not named and model:
                flags = tuple(flag for flag in command.flags if flag.name != "--model")
                command = replace(command, flags=flags, model_argument=model)
            part = "" if image or named or end else " list of arguments, perhaps a part of them"
            yield Found(command, shortened(" ".join(words)), how + part, block.above)
        return


def _services(loaded: Any) -> Iterator[tuple[str, list[str], list[tuple[str, str]]]]:
    """Yield image, words and variables of each service in a document; of a bare list of arguments only its words."""
    waiting, seen = [loaded], 0
    while waiting and seen < _MOST_NODES:
        node, seen = waiting.pop(0), seen + 1
        if isinstance(node, Mapping):
            words = [
                word for key in ("entrypoint", "command", "args") for word in _words(node.get(key))
            ]
            image = _word(node.get("image")) or ""
            if words and any("vllm" in one.lower() for one in (image, *words)):
                yield (
                    _DEFAULT.sub(r"\1", image),
                    words,
                    _variables(node.get("environment") or node.get("env")),
                )
            elif words:
                yield "", words, []
            else:
                waiting += list(node.values())[:_MOST_NODES]
        elif isinstance(node, list):
            if any(isinstance(one, str) and one.startswith("--") for one in node):
                yield "", _words(node), []
            else:
                waiting += node[:_MOST_NODES]


def _words(value: Any) -> list[str]:
    """Return the words of a list, or of a line of a shell.

    In a list, a script with a server is read as such a line.
    """
    items = value if isinstance(value, list) else [value] if isinstance(value, str) else []
    words: list[str] = []
    for item in (_DEFAULT.sub(r"\1", word) for one in items if (word := _word(one)) is not None):
        try:
            words += shlex.split(item) if isinstance(value, str) or _SCRIPT.search(item) else [item]
        except ValueError:
            return []
    return words


def _word(value: Any) -> str | None:
    """Return a scalar of YAML as a word; None for other nodes, whose text may be endless, and for numbers that no flag takes."""
    if isinstance(value, int) and abs(value) >= 10**18:
        return None
    return str(value) if isinstance(value, str | int | float) else None


def _variables(value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        value = [
            f"{name}={word}" for name, one in value.items() if (word := _word(one)) is not None
        ]
    pairs = []
    for one in value if isinstance(value, list) else []:
        if isinstance(one, str) and "=" in one:
            pairs.append((one.partition("=")[0], _DEFAULT.sub(r"\1", one.partition("=")[2])))
        elif isinstance(one, Mapping) and (word := _word(one.get("value"))) is not None:
            pairs.append((_word(one.get("name")) or "", word))
    return pairs


def calls(text: str, name: re.Pattern[str]) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Yield the literal keyword arguments of each call in Python source, and the names of those that are no literals."""
    for start in islice(name.finditer(text), _MOST_CALLS):
        rest = _MARKER.sub("'redacted'", text[start.end() : start.end() + LONGEST])
        for end in islice(re.finditer(r"\)", rest), _MOST_CALLS):
            try:
                # an escape that Python does not know
                with warnings.catch_warnings(action="ignore"):
                    tree = ast.parse(f"f({rest[: end.end()]}", mode="eval").body
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            given: dict[str, Any] = {}
            unread: list[str] = []
            positional = (
                [("model", one) for one in tree.args[:1]] if isinstance(tree, ast.Call) else []
            )
            keywords = (
                [(one.arg or "**", one.value) for one in tree.keywords]
                if isinstance(tree, ast.Call)
                else []
            )
            for key, value in (*positional, *keywords):
                try:
                    given[key] = ast.literal_eval(value)
                except (ValueError, TypeError, RecursionError, MemoryError):
                    unread.append(key)
            yield given, tuple(unread)
            break


def _python(block: Block) -> Iterator[Found]:
    for given, unread in calls("\n".join(block.lines), _CALL):
        if given:
            yield from _of_arguments(given, "Python call of vllm.LLM", block.above, unread)


def _logged(block: Block) -> Iterator[Found]:
    # without the frame of a terminal
    text = " ".join(line.strip(" \u2502|") for line in block.lines)
    for found in islice(_LOGGED.finditer(text), _MOST_CALLS):
        rest = _MARKER.sub("'redacted'", text[found.end() : found.end() + LONGEST])
        for end in islice(re.finditer(r"\}", rest), _MOST_CALLS):
            try:
                given = ast.literal_eval(rest[: end.end()])
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
            if isinstance(given, dict):
                yield from _of_arguments(
                    {str(key): value for key, value in given.items()}, "log", block.above, ()
                )
            break


def _of_arguments(
    given: dict[str, Any], how: str, above: str, unread: tuple[str, ...]
) -> Iterator[Found]:
    """Yield the command with these arguments of vLLM, by their names in Python."""
    model = given.pop("model_tag", None)
    model = given.pop("model", model)
    words: list[str] = []
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True or value is False:
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, dict) or (
            isinstance(value, list) and any(isinstance(one, dict) for one in value)
        ):
            words.append(f"{flag}={json.dumps(value, default=str)}")
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        elif value is not None:
            words.append(f"{flag}={value}")
    try:
        command = parse(shlex.join(["vllm", "serve", *([str(model)] if model else []), *words]))
    except CommandError:
        return
    yield Found(command, shortened(" ".join(words)), how, above, unread)


def rendered(command: ServeCommand) -> str:
    """Return the command as lines of a shell, with the options of a reported container that a reproduction needs."""
    box = command.container
    if box is None:
        return command.render()
    options = [
        ("--gpus", box.gpus), ("--ipc", box.ipc), ("--shm-size", box.shm_size),
        *(("--ulimit", limit) for limit in box.ulimits),
        *(("-e", name if is_secret_name(name) or value == f"${name}" else f"{name}={value}") for name, value in box.env),
        ("--entrypoint", box.entrypoint[0] if box.entrypoint else None),
    ]  # fmt: skip
    start = [
        "docker",
        "run",
        *(word for name, value in options if value for word in (name, value)),
        box.image,
    ]
    lines = [shlex.join([*start, *box.entrypoint[1:]])]
    body = replace(command, container=None, env=()).render().split(" \\\n")
    model = [] if command.model_argument is None else [f"  {shlex.quote(command.model_argument)}"]
    return " \\\n".join([*lines, *model, *body[1:]])
