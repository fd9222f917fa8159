"""Server commands of an issue's text, in every form that issues use.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, compress, count, islice
from typing import Any, TypeVar

import yaml

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.parse import parse
from vllm_repro.errors import CommandError
from vllm_repro.secret_names import is_secret_name
from vllm_repro_intake.text import LONGEST, Block, environment, shortened

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
_ASSIGNMENT = re.compile(
    rf"{_LEAD}(?P<export>export[ \t]+)?(?P<name>[A-Za-z_]\w*)="
    r"(?P<value>'[^'\n]*'|\"[^\"\n]*\"|[^\s'\";&|]+)[ \t;]*(?:#.*)?"
)
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)")
_BULLET = re.compile(
    r"[ \t]*(?:[-*•+][ \t]+|\d{1,2}[.)][ \t]+)?`*(--[a-z][\w.-]+[^`\n]*?)[`,; \t\\]*$"
)
_BOX = re.compile(r"(?:docker|podman|nerdctl)[ \t]")
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
_ASSIGNED = re.compile(r"(?m)^[ \t]*([A-Za-z_]\w*)[ \t]*=(?=[ \t]*[\[{\"'\d(frb])")
_MOST_LINES = 80
_MOST_NODES = 2_000
_MOST_CALLS = 50
_UNREADABLE = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Found:
    """One vLLM server command that was found in a text, and where it stands."""

    command: ServeCommand
    words: str
    # its form if it is not a line of a shell
    how: str = ""
    # the heading and the line above it
    above: str = ""
    # arguments that are no literals
    unread: tuple[str, ...] = ()
    # how often the text has it
    times: int = 1


def find_commands(blocks: Sequence[Block], model: str = "") -> tuple[list[Found], list[str]]:
    """Return the distinct commands, the most likely first, and why each other one is unreadable.

    model: for a list of flags alone. The command that the text repeats counts most, then one below
    a heading such as "Reproduce".
    """
    commands: dict[ServeCommand, Found] = {}
    unread: list[str] = []
    whole = "\n".join(line for block in blocks for line in block.lines)
    variables: dict[str, tuple[bool, str]] = {}
    for name in list(dict.fromkeys(_USED.findall(whole)))[:_MOST_CALLS]:
        if stated := re.search(
            rf"(?<![\w$]){name}\W{{0,2}}(?:=| is |: )['\"`]?([\w./:\[\]-]+)", whole
        ):
            variables[name] = (False, stated[1].rstrip(".,:"))
    for block in blocks:
        for match in chain(
            *(
                (
                    _shell(block, unread, variables),
                    _listed(block, model),
                    _python(block),
                    _logged(block),
                )
            )
        ):
            known = commands.get(match.command)
            commands[match.command] = replace(known, times=known.times + 1) if known else match
    matches = commands.values() or _bare_flags(blocks, model, unread)
    return sorted(matches, key=least_likely_last), list(dict.fromkeys(unread))


def _bare_flags(blocks: Sequence[Block], model: str, unread: list[str]) -> Iterator[Found]:
    """Yield the command of a text that only lists its flags, one a line."""
    flags = [match[1] for block in blocks for line in block.lines if (match := _BULLET.match(line))]
    named = not model or any(re.match(r"--model[= ]", flag) for flag in flags)
    head = "vllm serve" if named else f"vllm serve {shlex.quote(model)}"
    for command in _parsed(" ".join([head, *flags]), "", unread, {}) if flags else ():
        yield replace(command, how="YAML or a list of flags")


def least_likely_last(match: Found) -> tuple[int, int, int]:
    """Return the sort key of a command: the smallest is most likely the reported one."""
    return (
        ["", "YAML", "JSON", "Python", "log"].index(match.how.partition(" ")[0]),
        -match.times,
        _unlikely(match.above),
    )


def _unlikely(lines: str) -> int:
    """Return how unlikely a command is the reported one, by the line and the heading above it."""
    for above in reversed(lines.split("\n")):
        if _OTHER_HEADING.search(above) or _GOOD_HEADING.search(above):
            return 2 if _OTHER_HEADING.search(above) else 0
    return 1


def _shell(
    block: Block, unread: list[str], variables: dict[str, tuple[bool, str]]
) -> Iterator[Found]:
    """Yield the commands of a shell. variables: (exported, value) of those set so far, by name."""
    lines = [_NOTE.sub(r"\1", line) for line in block.lines]
    at = 0
    while at < len(lines):
        if not _START.match(lines[at]):
            if (setting := _ASSIGNMENT.fullmatch(lines[at])) and not environment(block):
                variables[setting["name"]] = (bool(setting["export"]), setting["value"])
            at += 1
            continue
        first = at
        while first and _SETTING.fullmatch(lines[first - 1]):
            first -= 1
        region, at = _region(lines, at)
        settings = lines[first : at - len(region)]
        note = lines[first - 1] if first and lines[first - 1].lstrip().startswith("#") else ""
        earlier = [
            f"export {name}={value}"
            for name, (exported, value) in variables.items()
            if exported and not _BOX.search(region[0])
        ]
        yield from _parsed(
            "\n".join([*earlier, *settings, *region]),
            f"{block.above}\n{note}",
            unread,
            {name: value.strip("'\"") for name, (_, value) in variables.items()},
        )
    if not block.code:
        for span in _INLINE.findall("\n".join(lines)):
            if _START.match(span):
                yield from _parsed(span, block.above, unread, {})


def _region(lines: Sequence[str], start: int) -> tuple[list[str], int]:
    """Return the lines of the command that begins at `start`, and the index after its last line."""
    region, at = [lines[start]], start + 1
    while at < len(lines) and len(region) < _MOST_LINES:
        text = "\n".join(region)
        goes_on = text.rstrip().endswith("\\") or _GOES_ON.match(lines[at])
        if not goes_on and text.count("'") % 2 == 0 and text.count('"') % 2 == 0:
            break
        region.append(lines[at])
        at += 1
    return region, at


def _parsed(
    text: str, above: str, unread: list[str], variables: Mapping[str, str]
) -> Iterator[Found]:
    """Yield the server command in a line of a shell; add one that is unreadable to `unread`."""
    if len(text) > LONGEST:
        unread.append(f"{shortened(text, 80)!r}: it is longer than {LONGEST:,} characters")
        return
    text = re.sub(rf"\A{_LEAD}(?=\S)", "", text)
    text = re.sub(r"\$\{?(\w+)\}?", lambda name: variables.get(name[1], name[0]), text)
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
            starts = (word == "serve" or "api_server" in word for word in words)
            end = next(compress(count(1), starts), 0)
            arguments = words[end:]
            if not any(word.startswith("--") for word in arguments):
                continue
            settings = [word for pair in variables for word in ("-e", "=".join(pair))]
            named = not arguments[0].startswith("-") or any(
                re.match(r"--model(?:=|$)", word) for word in arguments
            )
            head = ["docker", "run", *settings, image] if image else ["vllm", "serve"]
            head += [] if named or not model else ["--model", model]
            try:
                command = parse(shlex.join([*head, *arguments]))
            except CommandError:
                continue
            if not image and not named and model:
                command = replace(
                    command,
                    flags=tuple(flag for flag in command.flags if flag.name != "--model"),
                    model_argument=model,
                )
            part = "" if image or named or end else " list of arguments, perhaps a part of them"
            yield Found(command, shortened(" ".join(words)), how + part, block.above)
        return


def _services(loaded: Any) -> Iterator[tuple[str, list[str], list[tuple[str, str]]]]:
    """Yield image, words and variables of each service in a document.

    A bare list of arguments has only words.
    """
    waiting, seen = [loaded], 0
    while waiting and seen < _MOST_NODES:
        node, seen = waiting.pop(0), seen + 1
        if isinstance(node, Mapping):
            words = [
                word
                for kind in ("entrypoint", "command", r"\w*args", r"\w*arguments")
                for key in node
                if re.fullmatch(kind, str(key), re.IGNORECASE)
                for word in _words(node[key])
            ]
            image = node.get("image") or ""
            if isinstance(image, Mapping):
                image = f"{image.get('repository')}:{image.get('tag') or 'latest'}"
            image = _word(image) or ""
            if words and any("vllm" in word.lower() for word in (image, *words, *map(str, node))):
                yield (
                    _DEFAULT.sub(r"\1", image),
                    words,
                    _variables(node.get("environment") or node.get("env")),
                )
            else:
                waiting += list(node.values())[:_MOST_NODES]
        elif isinstance(node, list):
            if any(isinstance(item, str) and item.startswith("--") for item in node):
                yield "", _words(node), []
            else:
                waiting += node[:_MOST_NODES]


def _words(value: Any) -> list[str]:
    """Return the words of a list, or of a line of a shell.

    In a list, a script with a server is read as such a line.
    """
    items = value if isinstance(value, list) else [value] if isinstance(value, str) else []
    words: list[str] = []
    for item in (
        _DEFAULT.sub(r"\1", word) for entry in items if (word := _word(entry)) is not None
    ):
        try:
            words += shlex.split(item) if isinstance(value, str) or _SCRIPT.search(item) else [item]
        except ValueError:
            return []
    return words


def _word(value: Any) -> str | None:
    """Return a scalar of YAML as a word.

    None for other nodes, whose text may be endless, and for numbers that no flag takes.
    """
    if isinstance(value, int) and abs(value) >= 10**18:
        return None
    return str(value) if isinstance(value, str | int | float) else None


def _variables(value: Any) -> list[tuple[str, str]]:
    """Return the variables of a mapping, a list of `NAME=value`, or a list of name and value."""
    if isinstance(value, Mapping):
        value = [{"name": name, "value": word} for name, word in value.items()]
    pairs = []
    for item in value if isinstance(value, list) else []:
        if isinstance(item, str) and "=" in item:
            name, _, text = item.partition("=")
            pairs.append((name, _DEFAULT.sub(r"\1", text)))
        elif isinstance(item, Mapping) and (word := _word(item.get("value"))) is not None:
            pairs.append((_word(item.get("name")) or "", word))
    return pairs


def _parsed_after(
    text: str, start: re.Pattern[str], end: str, read: Callable[[str], _T]
) -> Iterator[_T]:
    """Yield what `read` makes of the text after each `start`, up to the first `end` it accepts."""
    for match in islice(start.finditer(text), _MOST_CALLS):
        rest = _MARKER.sub("'redacted'", text[match.end() : match.end() + LONGEST])
        for close in islice(re.finditer(re.escape(end), rest), _MOST_CALLS):
            with suppress(*_UNREADABLE):
                yield read(rest[: close.end()])
                break


def calls(
    text: str, name: re.Pattern[str], names: Mapping[str, Any] | None = None
) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Yield (literal keyword arguments, names of other arguments) of each call in Python source.

    names: values of variables.
    """
    for tree in _parsed_after(text, name, ")", _call):
        literals: dict[str, Any] = {}
        unread: list[str] = []
        for key, value in (
            *[("model", value) for value in tree.args[:1]],
            *((word.arg or "**", word.value) for word in tree.keywords),
        ):
            try:
                literals[key] = _value(value, names or {})
            except _UNREADABLE:
                unread.append(key)
        yield literals, tuple(unread)


def assigned(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the variables that the text's Python assigns a readable value to."""
    names: dict[str, Any] = {}
    for block in blocks:
        text = "\n".join(block.lines)
        for match in islice(_ASSIGNED.finditer(text), _MOST_CALLS):
            lines = text[match.end() : match.end() + LONGEST].split("\n")[:_MOST_LINES]
            for end in range(1, len(lines) + 1):
                with suppress(*_UNREADABLE), warnings.catch_warnings(action="ignore"):
                    names[match[1]] = _value(
                        ast.parse("\n".join(lines[:end]).strip(), mode="eval").body, names
                    )
                    break
    return names


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression of literals and `names`. Raises one of `_UNREADABLE`.

    The fields of an f-string stay as they are written: `{i}`.
    """
    match node:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.JoinedStr(values=parts):
            return "".join(
                str(part.value)
                if isinstance(part, ast.Constant)
                else f"{{{ast.unparse(getattr(part, 'value', part))}}}"
                for part in parts
            )
        case ast.Dict(keys=keys, values=values):
            return {
                _value(key, names): _value(item, names)
                for key, item in zip(keys, values, strict=True)
                if key
            }
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, names) for item in items]
        case ast.BinOp(op=ast.Mult(), left=left, right=ast.Constant(value=int(count))):
            part = _value(left, names)
            if isinstance(part, str | list) and len(part) * count <= LONGEST:
                return part * count
        case ast.Call(func=ast.Attribute(attr="dumps"), args=[inner, *_]):
            return _value(inner, names)
    return ast.literal_eval(node)


def _call(arguments: str) -> ast.Call:
    """Return the syntax tree of a Python call with these arguments."""
    with warnings.catch_warnings(action="ignore"):  # an escape that Python does not know
        tree = ast.parse(f"f({arguments}", mode="eval").body
    return tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])


def _python(block: Block) -> Iterator[Found]:
    """Yield the commands of `LLM(…)` and `EngineArgs(…)` calls in Python code."""
    for arguments, unread in calls("\n".join(block.lines), _CALL):
        if arguments:
            yield from _of_arguments(arguments, "Python call of vllm.LLM", block.above, unread)


def _logged(block: Block) -> Iterator[Found]:
    """Yield the commands of the `non-default args` that a server logs."""
    # without the frame of a terminal
    for logged in _parsed_after(
        " ".join(line.strip(" \u2502|") for line in block.lines), _LOGGED, "}", ast.literal_eval
    ):
        if isinstance(logged, dict):
            yield from _of_arguments(
                {str(key): value for key, value in logged.items()}, "log", block.above, ()
            )


def _of_arguments(
    arguments: dict[str, Any], how: str, above: str, unread: tuple[str, ...]
) -> Iterator[Found]:
    """Yield the command with these arguments of vLLM, by their names in Python."""
    model = arguments.pop("model", arguments.pop("model_tag", None))
    words = ["vllm", "serve", *([str(model)] if model else [])]
    first = len(words)
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif (
            isinstance(value, list) and any(isinstance(item, dict) for item in value)
        ) or isinstance(value, dict):
            words.append(f"{flag}={json.dumps(value, default=str)}")
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        elif value is not None:
            words.append(f"{flag}={value}")
    with suppress(CommandError):
        yield Found(
            parse(shlex.join(words)), shortened(" ".join(words[first:])), how, above, unread
        )


def rendered(command: ServeCommand) -> str:
    """Return the command as lines of a shell.

    Of a reported container it has the options that a reproduction needs.
    """
    box = command.container
    if box is None:
        return command.render()
    options = [("--gpus", box.gpus), ("--ipc", box.ipc), ("--shm-size", box.shm_size)]
    options += [("--ulimit", limit) for limit in box.ulimits]
    options += [
        ("-e", name if is_secret_name(name) or value == f"${name}" else f"{name}={value}")
        for name, value in box.env
    ]
    options += [("--entrypoint", box.entrypoint[0])] if box.entrypoint else []
    words = [word for option in options if option[1] for word in option if word]
    first = shlex.join(["docker", "run", *words, box.image, *box.entrypoint[1:]])
    model = [] if command.model_argument is None else [f"  {shlex.quote(command.model_argument)}"]
    body = replace(command, container=None, env=()).render().split(" \\\n")
    return " \\\n".join([first, *model, *body[1:]])
