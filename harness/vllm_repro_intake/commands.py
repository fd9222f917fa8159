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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, compress, count, islice
from math import prod
from typing import Any, TypeVar

import yaml

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.flag_table import KNOWN
from vllm_repro.command.flags import canonical, positive
from vllm_repro.command.parse import parse
from vllm_repro.errors import CommandError
from vllm_repro.secret_names import is_secret_name
from vllm_repro_intake.text import LONGEST, Block, environment, shortened

_LEAD = (
    r"[ \t]*(?:(?:\([^()\n]*\)[ \t]*)?(?:[\w.\[\]-]+@[\w.\[\]-]+[^\n$%#]{0,80})?[$%#>]["
    r" \t]+|(?:CMD|RUN|[-*•+])[ \t]+|(?:INFO|DEBUG) [^\n]{0,80}\][ \t]+"
    r"|[^\n:：]{0,30}(?i:command|\bcmd|命令)[^\n:：]{0,10}[:：][ \t]+"
    r"|[^\n:：`]{0,40}[:：][ \t]+(?=vllm[ \t]+serve[ \t]))?"
)
_PREFIX = (
    r"(?:(?:[A-Za-z_]\w*=(?:'[^'\n]*'|\"[^\"\n]*\"|\S*)|sudo|env|exec|nohup|time|numactl"
    r" \S+|(?:uv|poetry|pixi) run|srun(?:[ \t]+-\S+)*"
    r"|(?:apptainer|singularity)[ \t]+exec(?:[ \t]+\S+)*?[ \t]+\S+\.sif)[ \t]+)*"
)
_BENCH_OF_ENGINE = (
    r"(?:[\w./~-]*/)?(?:vllm[ \t]+bench[ \t]+(?:latency|throughput)\b"
    r"|python[\d.]*[ \t]+\S*benchmark_(?:latency|throughput)\.py)"
)
"""A benchmark that starts an engine with the flags of a server."""
_START = re.compile(
    rf"{_LEAD}{_PREFIX}(?:(?:[\w./~$\{{}}-]*/)?vllm[ \t]+serve\b"
    rf"|(?:[\w./~-]*/)?python[\d.]*[ \t]+-m[ \t]+vllm\.entrypoints\.openai\.api_server"
    rf"|{_BENCH_OF_ENGINE}"
    rf"|(?:[\w./-]*/)?(?:ba|z)?sh[ \t]+-l?c[ \t]+['\"][^'\"\n]*\bvllm[ \t]+serve\b"
    rf"|(?:docker|podman|nerdctl)[ \t]+(?:container[ \t]+)?run\b)"
)
_IS = r"[ \t]*=[ \t]*"
_STRING = re.compile(
    r"(?m)^(?P<lead>[ \t]*)(?:\w+[ \t]*=|[\w.]+\()[ \t]*(?P<kind>[rf]?)"
    r"(?P<quote>\"{3}|'{3}|[\"'])"
    rf"\\?\s*(?P<line>{_START.pattern}(?:(?!(?P=quote))[\s\S])*)(?P=quote).*$"
)
"""A command of a shell in a string of Python."""
_ARITHMETIC = re.compile(r"\$\(\(([^()\n]{1,80})\)\)")
_FLAG_OF_VARIABLE = re.compile(
    r"(--[a-z][\w.-]+)(?:=|[ \t]+)[\"']?\$(?:\{|\(\([^()\n]*?)?"
    r"([A-Za-z_]\w*)(?:\}|[^()\n]*\)\))?[\"']?(?=\s|$)"
)
"""A flag whose value is a variable."""
_ON_OR_OFF = re.compile(
    r"(?<!\S)--(?=(?:enable|disable|trust|enforce|async)-)([a-z][\w-]+)[ \t]+([Tt]rue|[Ff]alse)\b"
)
_SETTING = re.compile(rf"{_LEAD}(?:export[ \t]+)?[A-Za-z_]\w*=\S.*")
_ASSIGNMENT = re.compile(
    rf"{_LEAD}(?P<export>(?:export|declare|readonly|local)[ \t]+)?(?P<name>[A-Za-z_]\w*)"
    r"(?P<more>\+?)="
    r"(?P<value>'[^']*'|\"(?:[^\"\\]|\\[\s\S])*\"|\([^()]*\)|[^\s'\"();&|]+)[ \t;]*(?:#.*)?"
)
_BRANCH = re.compile(
    r"[ \t]*(?:if|while|until|for|case)\b.*(?:\bthen\b|\bdo\b|\]|\bin)[ \t]*$"
    r"|[ \t]*(?P<end>fi|done|esac)\b"
)
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)")
_EXPANDED = re.compile(
    r"(?P<quoted>\"?)\$(?:\{(?P<name>\w+)(?P<items>\[[@*]\])?(?::?-(?P<default>[^{}]*))?\}"
    r"|(?P<plain>[A-Za-z_]\w*))(?P<end>\"(?=\s|$))?"
)
_LEFT = re.compile(
    r"(?<=\s)(?P<before>(?!(?:serve|run|\S*api_server|\S*vllm\S*:\S+)\s)"
    r"(?:[^\s-]\S*|--\S+=\S*|--(?:enable|disable|no|trust|enforce|async|headless)\b[\w-]*)"
    r"(?:[ \t]|\\?\n)+)(?:[\"']?\$(?:\{\w+(?:\[[@*]\])?\}|\w+|[@*])[\"']?(?:[ \t]+|\s*$|(?=\s)))+"
)
"""Words that are only variables without a value, and take no place of a flag's value."""
_BULLET = re.compile(
    r"[ \t]*(?:[-*•+][ \t]+|\d{1,2}[.)][ \t]+)?`*(--[a-z][\w.-]+[^`\n]*?)[`,; \t\\]*$"
)
_BOX = re.compile(r"(?:docker|podman|nerdctl)[ \t]")
_GOES_ON = re.compile(
    r"[ \t]*(?:--?[A-Za-z]|[\u2013\u2014]|['\"]?\{|['\"]?[\w./-]+[ \t]*\\[ \t]*$)"
)
_NOTE = re.compile(r"(\\)[ \t]+#.*$")
_INLINE = re.compile(r"`+([^`\n]{8,})`+")
_CALL = re.compile(r"(?<![\w.])(?:vllm\.)?(LLM|EngineArgs|AsyncEngineArgs)\(")
_LOGGED = re.compile(r"non-default args: (?=\{)")
_DOCUMENT = re.compile(r"(?m)^[ \t]*(?:- |\[|[\w.-]+:(?: |$))")
_DEFAULT = re.compile(r"\$\{\w+:?-([^}]*)\}")  # compose reads ${NAME:-value} so
# in place of a value and its quotes
_MARKER = re.compile(r"(?<!['\"])\[redacted:[\w-]+\](?!['\"])")
_SCRIPT = re.compile(r"\bvllm serve |api_server ")
_GOOD_HEADING = re.compile(
    r"repro|crash|fail|(?<![\w/])bad\b|broken|\bdies\b|command|steps|launch|server|describe the bug"
    r"|how (?:you|to)",
    re.IGNORECASE,
)
_OTHER_HEADING = re.compile(
    r"works?\b|(?<![\w/])(?:good|fine|ok)\b"
    r"|workaround|expected|benchmark|fix notes|test plan|comparison|validation|client",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(
    r"(?m)^[ \t]*([A-Za-z_]\w*)[ \t]*=(?=[ \t]*(?:[\[{\"'\d(frb]|os\.|True\b|False\b))"
)
_MOST_LINES = 80
_MOST_NODES = 2_000
_LEAST_OF_FILE = 2
"""A mapping with more flags than this, and few other keys, is a file for `--config`."""
_MOST_CALLS = 50
_UNREADABLE = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
_T = TypeVar("_T")
_Service = tuple[str, str, list[str], list[tuple[str, str]]]
Variables = dict[str, tuple[bool | None, str]]
"""(exported, value) of each variable of a shell; None instead of a bool: prose states the value."""


@dataclass(frozen=True)
class ReportedCommand:
    """One vLLM server command that was found in a text, and where it stands."""

    command: ServeCommand
    # its text on one line, cut after 120 characters, to show to a person
    words: str
    # its form if it is not a plain line of a shell with a server, such as "the file of --config"
    how: str = ""
    # the heading and the line above it
    above: str = ""
    # arguments that are no literals, or $variables of a shell line without a known value
    unread: tuple[str, ...] = ()
    # how often the text has it
    times: int = 1


def find_commands(
    blocks: Sequence[Block], model: str = ""
) -> tuple[list[ReportedCommand], list[str]]:
    """Return the distinct commands, the most likely first, and why each other one is unreadable.

    The command that the text repeats counts most, then one below a heading such as "Reproduce".
    model: for a list of flags or arguments that names none.
    """
    commands: dict[ServeCommand, ReportedCommand] = {}
    blocks = [
        replace(block, lines=tuple(_STRING.sub(_of_string, "\n".join(block.lines)).split("\n")))
        for block in blocks
    ]
    unread: list[str] = []
    whole = "\n".join(line for block in blocks for line in block.lines)
    variables: Variables = {}
    for name in list(dict.fromkeys(_USED.findall(whole)))[:_MOST_CALLS]:
        if stated := re.search(
            rf"(?<![\w$]){name}\W{{0,2}}(?:= ?| is |: )(['\"`]?)([\w/][\w./:\[\]-]*)\1(?![\w$])",
            whole,
        ):
            variables[name] = (None, stated[2].rstrip(".,:"))
    names = assigned(blocks)
    for block in blocks:
        listed = [*_listed(block, model)]
        before = dict(variables)
        # A service has the image and the variables of its own script, too.
        services = {(each.command.model, each.command.flags) for each in listed}
        shell = [*_shell(block, unread, variables)]
        # Another command is of another shell.
        variables = before if shell and block.code else variables
        in_shell = [
            match for match in shell if (match.command.model, match.command.flags) not in services
        ]
        for match in chain(in_shell, listed, _python(block, names), _logged(block)):
            known = commands.get(match.command)
            commands[match.command] = replace(known, times=known.times + 1) if known else match
    matches = _with_file([*commands.values()]) or _bare_flags(blocks, model, unread)
    return sorted(matches, key=least_likely_last), list(dict.fromkeys(unread))


def _with_file(commands: list[ReportedCommand]) -> list[ReportedCommand]:
    """Return the commands, with the options of the text's YAML file in place of `--config`.

    The file is then no command of its own. Unchanged without a `--config`, or if the text has not
    exactly one such file.
    """
    files = [each for each in commands if each.how.startswith("YAML")]
    users = [each for each in commands if each.command.get("--config") and each not in files]
    if len(files) != 1 or files[0].command.container is not None or not users:
        return commands
    merged = []
    for each in users:
        stated = {positive(flag.name) for flag in each.command.flags}
        stated |= {"--model"} if each.command.model else set()
        flags = (
            *(flag for flag in each.command.flags if flag.name != "--config"),
            *(flag for flag in files[0].command.flags if positive(flag.name) not in stated),
        )
        command = replace(each.command, flags=flags)
        merged.append(
            replace(each, command=command, words=files[0].words, how="the file of --config")
        )
    return merged + [each for each in commands if each not in (*users, *files)]


def _bare_flags(
    blocks: Sequence[Block], model: str, unread: list[str]
) -> Iterator[ReportedCommand]:
    """Yield the command of a text that only lists its flags, one a line; nothing without flags.

    unread: gets the reason if the command cannot be read.
    """
    flags = [flag for block in blocks for flag in _listed_flags(block)]
    named = not model or any(re.match(r"--model[= ]", flag) for flag in flags)
    head = "vllm serve" if named else f"vllm serve {shlex.quote(model)}"
    for command in _parsed(" ".join([head, *flags]), "", unread, {}) if flags else ():
        yield replace(command, how="YAML or a list of flags")


def _listed_flags(block: Block) -> list[str]:
    """Return the flags that lines of a block begin with; none unless most of them are vLLM's."""
    lines = re.sub(
        rf"(?m)^(?![ \t]*(?:[-*•+`]|\d+[.)]|$))(?!{_START.pattern})"
        r"[^\n]*[ \t][\\`^][ \t]*\n(?:[^\n]*[ \t][\\`^][ \t]*\n)*[^\n]*$",
        "",
        "\n".join(block.lines),
    ).split("\n")
    flags = [match[1] for line in lines if (match := _BULLET.match(line))]
    known = sum(positive(canonical(re.split(r"[=. ]", flag)[0])) in KNOWN for flag in flags)
    return flags if known * 2 > len(flags) else []


def least_likely_last(match: ReportedCommand) -> tuple[int, int, int]:
    """Return the sort key of a command: the smallest is most likely the reported one.

    Add the first word of a new `how` here: an unknown one raises `ValueError`.
    """
    return (
        ["", "YAML", "JSON", "a", "the", "Python", "log"].index(match.how.partition(" ")[0]),
        -match.times,
        _unlikely(match.above),
    )


def _unlikely(lines: str) -> int:
    """Return how unlikely a command is the reported one, by the line and the heading above it.

    0 if they name a reproduction, 2 if something else such as a workaround, 1 if neither.
    """
    for above in reversed(lines.split("\n")):
        if _OTHER_HEADING.search(above) or _GOOD_HEADING.search(above):
            return 2 if _OTHER_HEADING.search(above) else 0
    return 1


def _shell(block: Block, unread: list[str], variables: Variables) -> Iterator[ReportedCommand]:
    """Yield the commands of a shell.

    unread: gets the commands that cannot be read. variables: those set so far; it gets more.
    """
    lines = [
        _NOTE.sub(r"\1", _of_shell(line if block.code else line.replace("**", "")))
        for line in block.lines
    ]
    at = depth = 0
    while at < len(lines):
        if not _START.match(lines[at]):
            if branch := _BRANCH.match(lines[at]):
                depth = max(0, depth + (-1 if branch["end"] else 1))
            if several := re.split(r";[ \t]*(?=export[ \t])", lines[at])[1:]:
                lines[at : at + 1] = [lines[at].split(";")[0], *several]
            setting, at = _assignment(lines, at)
            if setting and (setting["export"] or not environment(block)):
                _set(variables, setting, certain=depth == 0)
            continue
        first = at
        while first and _SETTING.fullmatch(lines[first - 1]):
            first -= 1
        region, at = _region(lines, at)
        used = set(_USED.findall("\n".join(region)))
        settings = [
            line
            for line in lines[first : at - len(region)]
            if not (
                (set_here := _ASSIGNMENT.fullmatch(line))
                and (set_here["name"] in used or variables.get(set_here["name"], (False, ""))[0])
            )
        ]
        note = lines[first - 1] if first and lines[first - 1].lstrip().startswith("#") else ""
        earlier = [
            f"export {name}={shlex.quote(value)}"
            for name, (exported, value) in variables.items()
            if exported and not _BOX.search(region[0])
        ]
        yield from _parsed(
            "\n".join([*earlier, *settings, *region]), f"{block.above}\n{note}", unread, variables
        )
    if not block.code:
        for span in _INLINE.findall("\n".join(lines)):
            if _START.match(span):
                yield from _parsed(span, block.above, unread, {})


def _of_shell(line: str) -> str:
    """Return a line of PowerShell, cmd.exe or systemd as one of a shell, and others as they are."""
    replaced: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
        (r"[ \t][`^][ \t]*$", r" \\"),
        (
            rf"^[ \t]*ExecStart{_IS}[@:+!-]*(?:/\S*/(?:env[ \t]+|(?=(?:docker|podman)[ \t])))?",
            "",
        ),
        # a container of podman for systemd
        (r"^[ \t]*Exec=(?=--model|\S*/)", "vllm serve "),
        (rf"^[ \t]*Environment{_IS}(.*)", _exported),
        (r"^[A-Z][a-z]\w*=.*", ""),
    )
    for pattern, replacement in replaced:
        line = re.sub(pattern, replacement, line)
    return line


def _exported(match: re.Match[str]) -> str:
    """Return the variables of a line of systemd as exports of a shell."""
    words = re.findall(r"(['\"]?)(\w+)=(.*?)\1(?:\s|$)", match[1])
    return "; ".join(f"export {name}={quote}{value}{quote}" for quote, name, value in words)


def _of_string(match: re.Match[str]) -> str:
    """Return the shell's command in a Python string; fields of an f-string become `${NAME}`."""
    line = match["line"]
    return match["lead"] + (re.sub(r"\{(\w+)\}", r"${\1}", line) if match["kind"] == "f" else line)


def _computed(text: str, variables: Variables) -> str:
    """Return the number that a shell computes; the quoted `$((…))` if a variable has no value."""
    text = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], ("", name[0]))[1], text)
    if re.fullmatch(r"\s*\d{1,9}(?:\s*[*+]\s*\d{1,9}){0,3}\s*", text):
        return str(sum(prod(map(int, term.split("*"))) for term in text.split("+")))
    return shlex.quote(f"$(({text}))")


def _switched(match: re.Match[str]) -> str:
    """Return a switch with the value true or false as a flag without a value."""
    return f"--{match[1]}" if match[2].lower() == "true" else f"--no-{match[1]}"


def _assignment(lines: Sequence[str], at: int) -> tuple[re.Match[str] | None, int]:
    """Return the assignment that begins at a line, if any, and the index after it."""
    opens = re.match(rf"{_LEAD}(?:export[ \t]+)?[A-Za-z_]\w*\+?=['\"(]", lines[at])
    for end in range(at + 1, min(len(lines), at + (_MOST_LINES if opens else 1)) + 1):
        if match := _ASSIGNMENT.fullmatch("\n".join(lines[at:end])):
            return match, end
    return None, at + 1


def _set(variables: Variables, setting: re.Match[str], *, certain: bool) -> None:
    """Set a shell variable, in place of a value that the issue's prose states.

    certain: False in a branch or loop, which may not run: then only drop the value of the prose.
    """
    name, value = setting["name"], setting["value"]
    exported, before = variables.get(name, (None, ""))
    if exported is None:
        # Nothing is known of a variable that only a branch sets; prose may state its last value.
        before = ""
        variables.pop(name, None)
    if not certain:
        return
    value = value[1:-1].replace('\\"', '"') if value[0] in "'\"(" else value
    value = f"{before} {value}" if setting["more"] else value
    value = _expanded(value, variables | {name: (exported, before)})
    value = re.sub(r"\\?\n[ \t]*", " ", value).strip()
    variables[name] = (bool(exported) or "export" in (setting["export"] or ""), value)


def _expanded(text: str, variables: Variables) -> str:
    """Return a text of a shell with the values of its variables, as far as they are known."""

    def value(match: re.Match[str]) -> str:
        """Return the value of a variable; its text if it has no known value."""
        name = match["name"] or match["plain"]
        if name not in variables and match["default"] is None:
            return match[0]
        word = variables.get(name, (None, ""))[1] or (match["default"] or "").strip("'\"")
        if match["quoted"] and match["end"]:
            return word if match["items"] else shlex.quote(word)
        return f"{match['quoted']}{word}{match['end'] or ''}"

    return _EXPANDED.sub(value, text)


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
    text: str, above: str, unread: list[str], variables: Variables
) -> Iterator[ReportedCommand]:
    """Yield the server command in a line of a shell; add one that is unreadable to `unread`.

    If it is unreadable because variables are values of flags, these flags are left out.
    """
    if len(text) > LONGEST:
        unread.append(f"{shortened(text, 80)!r}: it is longer than {LONGEST:,} characters")
        return
    text = _expanded(re.sub(rf"\A{_LEAD}(?=\S)", "", text), variables)
    words = shortened(text)
    bench = re.search(rf"(?m)^{_PREFIX}{_BENCH_OF_ENGINE}", text)
    text = re.sub(_BENCH_OF_ENGINE, "vllm serve", text, count=1)
    left = _USED.findall(" ".join(match[0] for match in _LEFT.finditer(text)))
    text = _ARITHMETIC.sub(
        lambda match: _computed(match[1], variables),
        _ON_OR_OFF.sub(_switched, _LEFT.sub(r"\g<before>", text)),
    )
    try:
        command = parse(text)
    except CommandError as error:
        if re.search(r"\b(?:nvidia|rocm|amd)-smi\b", text) and "vllm" not in text:
            return
        unread.append(f"{shortened(text, 80)!r}: {error}")
        try:
            command = parse(_FLAG_OF_VARIABLE.sub("", re.sub(r"\s+\([^()\n]*\)\s*$", "", text)))
        except CommandError:
            return
        unread.pop()
        left += [name for _, name in _FLAG_OF_VARIABLE.findall(text)]
    flags = (flag for flag in command.flags if positive(flag.name.split(".")[0]) in KNOWN)
    command = replace(command, flags=tuple(flags)) if bench else command
    name = command.model or ""
    # else "vllm serve crashes", or a container without a server
    if command.flags or re.search(r"[/\d<$]", name):
        yield ReportedCommand(
            command,
            words,
            "the flags of a benchmark's engine" if bench else "",
            above,
            tuple(f"${name}" for name in left),
        )


def _listed(block: Block, model: str) -> Iterator[ReportedCommand]:
    """Yield the commands of services in YAML, JSON or a Dockerfile, or of lists of arguments.

    Those that cannot be read are skipped. model: for a command that names none.
    """
    text = re.sub(r"(?m)^[ \t]*(?:#[ \t]*)?(?:\.{3}|\u2026)[ \t]*$", "", "\n".join(block.lines))
    services = [("a Dockerfile", service) for service in _dockerfile(text)]
    keys = re.findall(r"(?m)^[ \t]*([A-Za-z][\w-]+):", text)
    is_read = (
        (re.search("--|vllmConfig", text) or _known(keys) > _LEAST_OF_FILE)
        and len(text) <= LONGEST
        and _DOCUMENT.search(text)
    )
    for how in ("YAML", "JSON") if is_read else ():
        with suppress(yaml.YAMLError, ValueError, RecursionError, TypeError):
            loaded = (yaml.safe_load if how == "YAML" else json.loads)(text)
            services += [(how, service) for service in _services(loaded)]
            break
    for how, (name, image, words, variables) in services:
        starts = (word == "serve" or "api_server" in word for word in words)
        end = next(compress(count(1), starts), 0)
        arguments = words[end:]
        if not end and not any(word.startswith("--") for word in arguments):
            continue
        settings = ["=".join(pair) for pair in variables if re.fullmatch(r"[A-Za-z_]\w*", pair[0])]
        boxed = chain.from_iterable(("-e", setting) for setting in settings)
        named = (
            not arguments
            or not arguments[0].startswith("-")
            or any(re.match(r"--model(?:=|$)", word) for word in arguments)
        )
        head = ["docker", "run", *boxed, image] if image else [*settings, "vllm", "serve"]
        if model and not named:
            head += ["--model", model] if image else [model]
        try:
            command = parse(_ON_OR_OFF.sub(_switched, shlex.join([*head, *arguments])))
        except CommandError:
            continue
        part = "" if image or named or end else " list of arguments, perhaps a part of them"
        above = f"{block.above}\n{name}"
        yield ReportedCommand(command, shortened(" ".join(words)), how + part, above)


def _dockerfile(text: str) -> Iterator[_Service]:
    """Yield ("", image, words of the command, variables) of a Dockerfile that starts a server."""
    lines = re.sub(r"\\[ \t]*\n", " ", text)
    images = re.findall(r"(?m)^[ \t]*FROM[ \t]+(\S+)", lines)
    items: dict[str, list[str]] = {"ENV": [], "ENTRYPOINT": [], "CMD": []}
    for name, value in re.findall(r"(?m)^[ \t]*(ENV|ENTRYPOINT|CMD)[ \t]+(\S.*)", lines):
        with suppress(ValueError):
            items[name] += json.loads(value) if value.startswith("[") else shlex.split(value)
    words = _words(items["ENTRYPOINT"] + items["CMD"])
    if images and words and "vllm" in f"{images[-1]} {' '.join(words)}":
        yield "", images[-1], words, _variables(items["ENV"])


def _services(loaded: Any) -> Iterator[_Service]:
    """Yield (name, image, words of the command, variables) of each service in a document.

    A bare list of arguments has only words.
    """
    waiting, seen = [("", loaded)], 0
    while waiting and seen < _MOST_NODES:
        (name, node), seen = waiting.pop(0), seen + 1
        if isinstance(node, Mapping):
            words = [
                word
                for kind in ("entrypoint", "command", r"\w*args", r"\w*arguments", "vllmConfig")
                for key in node
                if re.fullmatch(kind, str(key), re.IGNORECASE)
                for word in (_options(node[key]) if kind == "vllmConfig" else _words(node[key]))
            ]
            image = node.get("image") or ""
            if isinstance(image, Mapping):
                image = f"{image.get('repository')}:{image.get('tag') or 'latest'}"
            elif not image and "repository" in node and "tag" in node:
                image = f"{_word(node['repository'])}:{_word(node['tag'])}"
            image = _word(image) or ""
            words = [*filter(None, [_word(node.get("modelURL"))]), *words]
            names = (name, image, *words, *map(str, node), str(node.get("name")))
            if words and any("vllm" in word.lower() for word in names):
                yield (
                    name,
                    _DEFAULT.sub(r"\1", image),
                    words,
                    _variables(node.get("environment") or node.get("env")),
                )
            elif _known(node) > max(_LEAST_OF_FILE, len(node) // 2):
                yield "", "", _options(node), []
            else:
                waiting += [(str(key), item) for key, item in list(node.items())[:_MOST_NODES]]
        elif isinstance(node, list):
            if any(isinstance(item, str) and item.startswith("--") for item in node):
                yield "", "", _words(node), []
            else:
                waiting += [("", item) for item in node[:_MOST_NODES]]


def _options(value: Any) -> list[str]:
    """Return engine options of a Helm chart, such as `enableChunkedPrefill: false`, as flags.

    Options that are no flags of vLLM are left out.
    """
    words: list[str] = []
    for key, item in value.items() if isinstance(value, Mapping) else ():
        flag = flag_of(key)
        if key == "extraArgs":
            words += _words(item)
        elif flag in KNOWN and item is not None:
            words.append(f"--no-{flag[2:]}" if item is False else flag)
            if isinstance(item, Mapping):
                words.append(json.dumps(item, default=str))
            elif not isinstance(item, bool):
                words.append(_word(item) or "")
    return words


def _known(keys: Iterable[Any]) -> int:
    """Return the number of these options of a file that are flags of vLLM."""
    return sum(flag_of(key) in KNOWN for key in keys)


def flag_of(key: Any) -> str:
    """Return the flag of an option of a file: `maxModelLen`, `max_model_len` or `max-model-len`."""
    return "--" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", "-", str(key)).lower()


def _words(value: Any) -> list[str]:
    """Return the words of a list, or of a line of a shell.

    In a list, a script with a server is read as such a line. Empty if a quotation mark is not
    closed, and for other values.
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
    return (
        str(value) if isinstance(value, str | int | float) or hasattr(value, "isoformat") else None
    )


def _variables(value: Any) -> list[tuple[str, str]]:
    """Return (name, value) of variables: of a mapping, or of a list of them or of `NAME=value`.

    Empty for other values.
    """
    if isinstance(value, Mapping):
        value = [{"name": name, "value": word} for name, word in value.items()]
    pairs = []
    for item in value if isinstance(value, list) else []:
        if isinstance(item, str) and "=" in item:
            name, _, text = item.partition("=")
            pairs.append((name, _DEFAULT.sub(r"\1", text)))
        elif isinstance(item, Mapping) and (word := _word(item.get("value"))) is not None:
            pairs.append((_word(item.get("name")) or "", _DEFAULT.sub(r"\1", word)))
    return pairs


def _parsed_after(
    text: str, start: re.Pattern[str], end: str, read: Callable[[str], _T]
) -> Iterator[_T]:
    """Yield what `read` makes of the text after each `start`, up to the first `end` it accepts.

    read: raises one of `_UNREADABLE` for a text that it does not accept.
    """
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

    The first argument without a name is `model`; further ones are ignored. name: matches the call
    up to its open parenthesis. names: values of variables.
    """
    for tree in _parsed_after(text, name, ")", _call):
        literals: dict[str, Any] = {}
        unread: list[str] = []
        for key, value in (
            *[("model", value) for value in tree.args if ast.unparse(value) != "'POST'"][:1],
            *((word.arg or "**", word.value) for word in tree.keywords),
        ):
            try:
                literals[key] = _value(value, names or {})
            except _UNREADABLE:
                unread.append(key)
        yield literals, tuple(unread)


def assigned(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the values of the variables that the text's Python assigns a readable value to."""
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
            return dict(
                pair
                for key, item in zip(keys, values, strict=True)
                for pair in (
                    [(_value(key, names), _value(item, names))]
                    if key
                    else dict(_value(item, names)).items()
                )
            )
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return {**_value(left, names), **_value(right, names)}
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, names) for item in items]
        case ast.BinOp(op=ast.Mult(), left=left, right=ast.Constant(value=int(count))):
            part = _value(left, names)
            if isinstance(part, int | float) or len(part) * count <= LONGEST:
                return part * count
        case (
            ast.Call(func=ast.Attribute(attr="dumps"), args=[inner, *_])
            # the default of a variable of the environment
            | ast.Call(func=ast.Attribute(attr="getenv" | "get"), args=[ast.Constant(), inner])
        ):
            return _value(inner, names)
    return ast.literal_eval(node)


def _call(arguments: str) -> ast.Call:
    """Return the tree of a Python call; `arguments` end with `)`. Raises one of `_UNREADABLE`."""
    with warnings.catch_warnings(action="ignore"):  # an escape that Python does not know
        tree = ast.parse(f"f({arguments}", mode="eval").body
    return tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])


def _python(block: Block, names: Mapping[str, Any]) -> Iterator[ReportedCommand]:
    """Yield the commands of `LLM(…)` and `EngineArgs(…)` calls in Python code."""
    text = "\n".join(block.lines)
    settings = re.findall(
        r"\bos\.environ(?:\.setdefault\(|\[)[\"'](\w+)[\"'](?:\]\s*=|,)\s*[\"']([^\"'\n]*)[\"']",
        text,
    )
    how = f"Python call of {' or '.join(dict.fromkeys(_CALL.findall(text)))}"
    for arguments, unread in calls(text, _CALL, names):
        if arguments:
            yield from _of_arguments(arguments, how, block.above, unread, settings)


def _logged(block: Block) -> Iterator[ReportedCommand]:
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
    arguments: dict[str, Any],
    how: str,
    above: str,
    unread: tuple[str, ...],
    settings: Sequence[tuple[str, str]] = (),
) -> Iterator[ReportedCommand]:
    """Yield the command with these arguments of vLLM, by their names in Python.

    It removes the model from `arguments`. Nothing if the command cannot be read. settings: name and
    value of variables.
    """
    model = arguments.pop("model", arguments.pop("model_tag", None))
    words = [*map("=".join, settings), "vllm", "serve", *([str(model)] if model else [])]
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
        yield ReportedCommand(
            parse(shlex.join(words)), shortened(" ".join(words[first:])), how, above, unread
        )


def rendered(command: ServeCommand) -> str:
    """Return the command as lines of a shell.

    Of a reported container it has the options that a reproduction needs, and of a variable with a
    secret the name alone.
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
