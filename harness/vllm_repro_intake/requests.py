"""Requests and prompt sizes that an issue's text states, in order, and workarounds it tried."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.flag_table import KNOWN
from vllm_repro.command.flags import canonical, is_switch, positive
from vllm_repro.command.words import split_commands
from vllm_repro.errors import CommandError
from vllm_repro.scenario.writer import Source, literal
from vllm_repro_diagnosis.boot_facts import ScheduledChunk
from vllm_repro_intake.commands import assigned, calls
from vllm_repro_intake.text import GLUED, LONGEST, NOT, Block, shortened


@dataclass(frozen=True)
class Asked:
    """Request or requests at once that a text states, by the size of the prompt or by a body."""

    # length of its prompt; 0 if `body` holds the prompt itself
    tokens: int = 0
    # its `max_tokens`; 0 if not stated
    answer: int = 0
    # of the text, if it is not exact
    words: str = ""
    path: str = "/v1/chat/completions"
    body: Mapping[str, Any] | None = None
    # it is sent at the same time as the one before
    beside: bool = False
    # requests at once, of the sizes in `sizes`; 0 for a single request
    at_once: int = 0
    sizes: tuple[int, ...] = ()
    # the sizes are the ends of a range
    spread: bool = False
    # the model that it names, if the command does not serve it
    model: str = ""
    # arguments that are no literals
    unread: tuple[str, ...] = ()
    # another server than the reported one, that it is sent to
    elsewhere: str = ""
    # the words that were read of the sentence `words`
    used: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tried:
    """Flags that the text reports as tried, and whether the engine then lived."""

    flags: tuple[str, ...]
    # the engine then lived
    lives: bool
    words: str
    # the flags were left out
    removed: bool = False
    # a part of the sentence, and the words of it that were read
    used: tuple[str, tuple[str, ...]] = ("", ())


DIGITS = r"[1-9]\d{0,2}(?:[ ,.'_\u2019\u00a0\u202f]\d{3})+(?![\d.,]*\d)|\d(?:[\d,]*\d)?(?:\.\d+)?"
_NUMBER = (
    r"(?P<about>~|≈|>|about |around |roughly |over |approximately"
    rf" )?(?P<number>{DIGITS})(?P<kilo> ?[kKM](?![A-Za-z]))?"
)
_SIZE = rf"(?:{DIGITS})(?: ?[kKM](?![A-Za-z]))?"
_SEVERAL = re.compile(
    rf"(?<![\w.])(?P<first>{_SIZE})(?:[ -]?tokens?)?"
    rf"(?P<between> ?(?:to|up to|-|–|—|~|～|至|到|\.\.|through) ?|, | ?/ ?| (?:and|or) )"
    rf"(?P<others>(?:{_SIZE}(?:, (?:and |or )?| ?/ ?| (?:and|or) )){{0,20}}{_SIZE})[ -]?tokens?\b"
)
_SIZES_LAST = re.compile(
    r"\b(?:ISL|(?i:input|prompt)[ -](?:tokens?|len(?:gth)?s?))(?: of| is| are| from)?[ =:]{1,3}"
    rf"(?P<sizes>{_SIZE}(?:(?:, (?:and |or )?| ?/ ?| (?:and|or|to) | ?[-–~] ?){_SIZE}){{0,20}})"
    r"(?![\w%])"
)
"""Sizes of prompts after the words for them: "ISL 1k-8k"."""
_CONCURRENT = re.compile(
    r"(?P<before>\d{1,5}) (?:\w+ ){0,2}?"
    r"(?:concurrent|parallel|simultaneous|in (?:flight|parallel)|at (?:once|a time))"
    r"|(?:\b(?:concurrency|parallelism|batch size)(?: level)?|并发[数量]?)(?: of| =|[=:：为是])?"
    r" ?(?P<after>\d{1,5})\b"
    r"|(?P<clients>\d{1,5}) (?:simulated |virtual )?"
    r"(?:clients|users|VUs?|threads|workers|conversations|sessions)\b",
    re.IGNORECASE,
)
_SIZES = (
    re.compile(rf"{_NUMBER}[ -]?(?:prompt|input)[ -]tokens?\b"),
    re.compile(
        rf"{_NUMBER}[ -]?tokens?[ -](?:long |in the |of |per )?(?:\w+["
        r" -]){0,1}?(?:prompts?|inputs?|requests?|messages?|conversations?)\b"
    ),
    re.compile(
        r"(?i:\b(?:prompts?|inputs?|requests?(?:"
        rf" [A-Z]?\d{{1,2}})?)\b)[^.;\d<>]{{0,30}}?(?<![\w.]){_NUMBER}[ -]?tokens?\b"
    ),
)
_EXACT = re.compile(r"prompt_token_ids_len=(\d+)")
_BENCHED = re.compile(
    r"--(?:random-)?(?P<name>input-len|output-len|max-concurrency|num-prompts|batch-size"
    r"|request-rate|endpoint|backend)[= ]+(?P<value>[\w./-]+)"
)
_NO_PROMPT = re.compile(
    r"cache|throughput|per second|/s\b|computed|scheduled|chunk|resum|remain|output|generat"
    r"|window|budget|capacity|shared|system|max[ _-]",
    re.IGNORECASE,
)
_ORDINALS = re.compile(
    r"\b(?:first|second|third|fourth|1st|2nd|3rd)\b(?!"
    r" (?:few|chunk|token|step))|\b(?:request|prompt) (?:[A-Z]\d?|#?\d)\b|\bS\d\b",
    re.IGNORECASE,
)
_FIRST = ("first", "1st")
"""Labels of a request whose size may have been stated before, without a label."""
_COUNTED = re.compile(
    r"\b(?P<count>two|three|four|five|2|3|4|5|6|8|10|16|32|64)\b(?: \w+){0,3}?"
    r" \S*(?:requests|prompts)\b",
    re.IGNORECASE,
)
COUNTS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "eight": 8, "sixteen": 16}
_AT_ONCE = re.compile(r"concurren|simultan|parallel|at the same time", re.IGNORECASE)
_LIVED = re.compile(
    r"\b(?:works?|succeeds?|fine|ok|lower\w*|reduc\w+|below|under|shorter|less|fewer|up to)\b|\bno"
    r" (?:more )?(?:crash|error|issue)",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(rf"<[^<>]*?{_NUMBER}[ -]?tokens?[^<>]*>")
_ANSWER = re.compile(
    r"max_(?:completion_|new_)?tokens['\"`]?(?:\s{0,3}[=:]\s{0,3}| (?:of |is |was )?)(\d{1,6})\b"
)
_OUTPUT = re.compile(
    rf"(?<![\w.,-])({DIGITS})[ -](?:output|generated|completion)[ -]tokens?\b"
    r"|(?:\b(?:OSL|(?i:output|generated|completion)[ -](?:tokens?|len(?:gth)?))(?: of| is)?"
    r"[ =:]{1,3}|输出(?:长度)?[为是:： ]{0,2})(\d+)\b(?! ?[kKM\d~到至-])"
)
_SENDS = re.compile(
    r"\.(?:(?P<what>chat\.completions|completions|embeddings)\.create|post"
    r"|(?:stream|request)(?=\(\s*(?:method\s*=\s*)?[\"']POST[\"']))\("
)
_CURL = re.compile(r"(?:^|[\s`;&|($])curl\s")
_LOOP = re.compile(
    r"\bfor \w+ in (?:[$`]\(?seq (?:1 )?(\d{1,5})[)`]|\{1\.\.(\d{1,5})\}"
    r"|(\d{1,5}(?: \d{1,5})*) *(?:;|\n|$))"
)
_QUOTED = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_LOCAL = re.compile(r"localhost|127\.[\d.]+|0\.0\.0\.0|\[::1\]|host\.docker\.internal")
_ELSEWHERE = re.compile(r"github|huggingface|pypi|pytorch|nvidia\.com")
"""Hosts that are no server of vLLM."""
_MOST_LINES = 80
_MOST_EQUAL = 3
_MORE_THAN = re.compile(
    r"(?:(?<!no )(?<!not )\b(?:more|longer|larger|greater|bigger) than"
    r"|\bexceed\w*|\b(?:over|above|beyond)|>)\s?$",
    re.IGNORECASE,
)
_CLOSE = 0.06
"""Two sizes within this part of each other are one size, rounded: "1.3K" and 1,304."""
_MOST = 64
_MOST_AT_ONCE = 4_096


def answer_length(text: str) -> int:
    """Return the one `max_tokens` of the text; 0 without one, or with several.

    A text without `max_tokens` may state the output tokens instead.
    """
    lengths = {int(number) for number in _ANSWER.findall(text)} - {0}
    lengths = lengths or {tokens_of(number or osl) for number, osl in _OUTPUT.findall(text)} - {0}
    return lengths.pop() if len(lengths) == 1 else 0


def find_requests(
    blocks: Sequence[Block],
    statements: Sequence[str],
    dump: Sequence[ScheduledChunk],
    served: Collection[str] = (),
    commands: Sequence[ServeCommand] = (),
) -> list[Asked]:
    """Return the requests that the text states.

    They are read from code, else from the scheduler's dump, else from a benchmark's options or the
    sizes in prose. At most 64.

    statements: those of the prose. dump: the step in which the engine crashed. served: the adapters
    that a request may name as its model. commands: the servers of the text, the reported one first.
    """
    names = assigned(blocks)
    bodies = [[*_bodies(block, names)] for block in blocks]
    elsewhere = _elsewhere([url for block in bodies for url, _, _ in block], blocks, commands)
    per_block = [
        sent
        for block in bodies
        if (
            sent := [
                replace(request, beside=beside, elsewhere=elsewhere.get(url, ""))
                for url, body, beside in block
                if (request := _asked(_path(url), body, served))
            ]
        )
    ]
    if sent := [
        request
        for at, some in enumerate(per_block)
        if some not in per_block[:at]
        for request in some
    ]:
        return sent[:_MOST]
    if dumped := _dumped(blocks, dump):
        return dumped
    if embeds := re.search(
        r"POST /v1/embeddings\b[^\n]{0,40}|[^\n]{0,90}\bembeddings? (?:requests?|endpoint)"
        r"|[\"'][^\s\"']{0,80}/v1/embeddings[\"']|\b[Cc]reate_?[Ee]mbeddings?\([^\n]{0,60}"
        r"|\bembeddings\.create\([^\n]{0,60}",
        "\n".join(line for block in blocks for line in block.lines),
    ):
        return [Asked(0, 0, shortened(embeds[0], 300), "/v1/embeddings", {"input": "hello"})]
    return _benched(blocks) or _in_prose(statements)


def _elsewhere(
    urls: Sequence[str], blocks: Sequence[Block], commands: Sequence[ServeCommand]
) -> dict[str, str]:
    """Return `host:port` by URL, for URLs of another server than the reported command's."""
    hosts = {
        url: match
        for url in urls
        if (match := re.match(r"(?:https?://)?(?P<host>[\w.\[\]-]+)(?::(?P<port>\d+))?/", url))
    }
    ports = [command.get("--port") or "8000" for command in commands] or ["8000"]
    published = re.compile(rf"(?<![\d.])(\d+):{re.escape(ports[0])}\b")
    ours = {ports[0], *published.findall("\n".join(line for b in blocks for line in b.lines))}
    # Without --port in the command, a proxy or a container may publish another port.
    strict = bool(commands and commands[0].get("--port")) or any(
        match["port"] in ours for match in hosts.values()
    )
    at_ours = [match["host"] for match in hosts.values() if match["port"] in (None, *ours)]
    this = {*filter(_LOCAL.fullmatch, at_ours)} or {*at_ours[:1]}
    return {
        url: match[0].rpartition("//")[2].rstrip("/")
        for url, match in hosts.items()
        if (match["port"] not in (None, *ours) and (strict or match["port"] in ports))
        or (this and not _LOCAL.fullmatch(match["host"]) and match["host"] not in this)
    }


def _bodies(block: Block, names: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield (URL, body, sent at the same time as the one before) of each POST in a block.

    They are those of curl and of Python clients, and a block that is only a body in JSON, perhaps
    below its `POST` line. The key "" of a body lists its arguments that are no literals. names:
    values of Python's variables.
    """
    background = False
    for text, words, times in _curls(block.lines):
        beside = re.search(r"(?<![&>|])&(?![&>\d])", _QUOTED.sub("", text)) is not None
        urls = [word for word in words if re.match(r"\w+://|[\w.$\{}\[\]-]+(?::\S+)?/", word)]
        data = [
            words[at + 1]
            for at, word in enumerate(words[:-1])
            if re.fullmatch(r"-d|--data(?:-\w+)?|--json", word)
        ]
        path = next((url for url in urls if url not in data), "")
        with contextlib.suppress(ValueError, RecursionError):
            typed = data[-1] if data else "{}"
            if typed.startswith("${"):  # $'…' in the shell
                typed = typed[1:].replace("\\\\", "\\")
            body = json.loads(typed, strict=False)
            if (
                _path(path)
                and (data or re.search(r"(?:-X|--request)[ =]?POST\b", text))
                and isinstance(body, dict)
            ):
                yield from ((path, body, beside if at else background) for at in range(times))
        background = beside
    text = "\n".join(block.lines)
    for match in _SENDS.finditer(text):
        for body, unread in islice(calls(text[match.start() :], _SENDS, names), 1):
            if not match["what"]:
                path = f"{body.pop('model', '')}{body.pop('url', '')}"
                sent = body.get("json", body.get("data"))
                if _path(path) and isinstance(sent, dict):
                    yield path, sent, False
            elif not set(unread) & {"messages", "prompt", "input", "**"}:
                body |= body.pop("extra_body", {}) | {"": [*unread]}
                bases = {*re.findall(r"\bbase_url\s*=\s*f?[\"'](https?://[^\"'/]+)/", text)}
                route = f"/v1/{match['what'].replace('.', '/')}"
                yield (f"{bases.pop()}{route}" if len(bases) == 1 else route), body, False
    alone = re.fullmatch(r"\s*(?P<post>POST \S[^{]*)?(?P<body>\{[\s\S]*)", text)
    if block.code and alone:
        with contextlib.suppress(ValueError, RecursionError):
            body = json.loads(alone["body"], strict=False)
            above = alone["post"] or block.above
            named = re.search(r"/((?:chat/)?completions|embeddings|responses)\b", above)
            route = "chat/completions" if body.get("messages") else "completions"
            if body.get("messages") or body.get("prompt") or (named and body.get("input")):
                yield f"/v1/{named[1] if named else route}", body, False


def _curls(lines: Sequence[str]) -> Iterator[tuple[str, list[str], int]]:
    """Yield (text, words, times that a loop runs it) of each curl command."""
    at = 0
    while at < len(lines):
        end = at + 1
        while _CURL.search(lines[at]) and end <= min(len(lines), at + _MOST_LINES):
            text = "\n".join(lines[at:end]).strip(" `")
            with contextlib.suppress(CommandError):
                if len(text) <= LONGEST and not text.endswith("\\"):
                    sent = (
                        words
                        for words in split_commands(text)
                        if any(word.text == "curl" for word in words[:3])
                    )
                    for number, words in enumerate(sent, 1):
                        before = "\n".join([*lines[:at], *text.split("curl")[:number]])
                        loop = _LOOP.search(re.split(r"(?m)(?:^|[;&])\s*done\b", before)[-1])
                        turns = loop and (loop[1] or loop[2] or len(loop[3].split()))
                        typed, after = _heredoc(text, lines[end:])
                        end += after
                        yield (
                            text,
                            [typed if word.text == "@-" else word.text for word in words],
                            min(int(turns or 1), _MOST),
                        )
                    break
            end += 1
        else:
            end = at + 1
        at = end


def _heredoc(text: str, following: Sequence[str]) -> tuple[str, int]:
    """Return the document that a command reads from the lines after it, and their number.

    ("@-", 0) without one.
    """
    mark = re.search(r"<<-?[ \t]*(['\"]?)(\w+)\1", text)
    for at, line in enumerate(following[:_MOST_LINES] if mark else ()):
        if mark and line.strip() == mark[2]:
            return "\n".join(following[:at]), at + 1
    return "@-", 0


def _path(url: str) -> str:
    """Return path and query of a URL; empty without a path, and for hosts such as GitHub."""
    # A client may have the host.
    url = f"client{url}" if re.match(r"/v\d/\w", url) else url
    host, _, path = re.sub(r"^\w+://", "", url).partition("/")
    return f"/{path}" if path and host and not _ELSEWHERE.search(host) else ""


def _asked(path: str, body: dict[str, Any], served: Collection[str]) -> Asked | None:
    """Return the request of a POST; without body if its prompt is like `<4096 tokens>`.

    None for one that no scenario file can hold, and without a prompt. body: its key "" (see
    `_bodies`) is removed. served: adapters; another model is left out of the body.
    """
    unread = tuple(name for name in body.pop("", ()) if name != "model")
    try:
        text = json.dumps(folded(body), default=str, allow_nan=False)
    except (ValueError, RecursionError):  # an infinite number
        return None
    if len(text) > LONGEST or re.search(r"\d{18}", text):
        return None
    answer = next(
        (
            length
            for length in (body.get(key) for key in ("max_tokens", "max_completion_tokens"))
            if isinstance(length, int)
        ),
        0,
    )
    size = _PLACEHOLDER.search(text)
    if size and _tokens(size):
        return Asked(_tokens(size), answer, shortened(size[0]), path)
    model = body.get("model")
    adapter = isinstance(model, str) and model in served
    kept = {key: value for key, value in body.items() if key != "model" or adapter}
    if not any(kept.get(key) for key in ("messages", "prompt", "input")) and re.search(
        r"/(?:completions|embeddings)$", path
    ):
        return None
    return Asked(
        path=path,
        answer=answer,
        body=kept,
        unread=unread,
        model="" if adapter else f"{model or ''}",
    )


def folded(value: Any) -> Any:
    """Return a JSON value whose lists of four or more equal items are source: `["a"] * 700`."""
    if isinstance(value, dict):
        return {key: folded(item) for key, item in value.items()}
    if isinstance(value, list):
        if len(value) > _MOST_EQUAL and all(item == value[0] for item in value):
            return Source(f"[{literal(folded(value[0]))}] * {len(value)}")
        return [folded(item) for item in value]
    return value


def _tokens(size: re.Match[str]) -> int:
    """Return the number of tokens that a match states."""
    return tokens_of(size["number"], (size["kilo"] or "").strip())


def tokens_of(number: str, unit: str = "") -> int:
    """Return a number of tokens: "25 002", "25.002" and "25,002" are one, "1.3k" is 1300."""
    number = number[:20]
    if unit:
        return round(float(number.replace(",", "")) * (1_000_000 if unit == "M" else 1_000))
    if re.fullmatch(r"\d{1,3}(?:\D\d{3})+", number):
        return int(re.sub(r"\D", "", number))
    return round(float(number.replace(",", "") or 0))


def _dumped(blocks: Sequence[Block], dump: Sequence[ScheduledChunk]) -> list[Asked]:
    """Return the prompts that were prefilled in the step in which the engine crashed.

    Empty without a dump.
    """
    first = next(
        (line for block in blocks for line in block.lines if "SchedulerOutput(" in line), ""
    )
    sizes = [size for number in _EXACT.findall(first) if (size := int(number))]
    words = "prompt_token_ids_len of the scheduler's dump"
    if not sizes:  # a step of few tokens is one of an answer
        chunks = [chunk for chunk in dump if chunk.scheduled > 16]
        sizes = [chunk.computed + chunk.scheduled for chunk in chunks]
        words = "the scheduler's dump: " + ", ".join(
            f"{chunk.computed:,} + {chunk.scheduled:,} tokens" for chunk in chunks
        )
    return [
        Asked(size, words=shortened(words), beside=at > 0) for at, size in enumerate(sizes[:_MOST])
    ]


def _benched(blocks: Sequence[Block]) -> list[Asked]:
    """Return the first load of `vllm bench` as requests at once; empty without an input length."""
    for block in blocks:
        matches = [*_BENCHED.finditer("\n".join(block.lines))]
        options = {match["name"]: match["value"] for match in matches}
        numbers = {name: int(value) for name, value in options.items() if value.isdecimal()}
        if size := numbers.get("input-len", 0):
            # Without a limit and a rate, the benchmark sends all prompts at once.
            prompts = numbers.get("num-prompts", _MOST_AT_ONCE)
            limit = numbers.get("max-concurrency") or numbers.get("batch-size")
            unlimited = options.get("request-rate", "inf") == "inf" and "num-prompts" in numbers
            count = max(1, min(limit or (prompts if unlimited else 1), prompts, _MOST_AT_ONCE))
            route = (
                "chat/" if "chat" in f"{options.get('endpoint')} {options.get('backend')}" else ""
            )
            request = Asked(
                size,
                numbers.get("output-len", 0),
                " … ".join(match[0] for match in matches),
                f"/v1/{route}completions",
            )
            if count > _MOST:
                return [replace(request, sizes=(size,), at_once=count)]
            return [replace(request, beside=at > 0) for at in range(count)]
    return []


def _in_prose(statements: Sequence[str]) -> list[Asked]:
    """Return the requests whose prompt sizes the sentences state, in order."""
    requests: list[Asked] = []
    labels: set[str] = set()
    for raw in statements:
        statement = _SIZES_LAST.sub(r"prompts of \g<sizes> tokens", raw)
        if re.search(r"\b(?:vs|versus)\b", statement):
            continue  # which of the two has the bug is not known
        if several := _several(statement):
            if not _verdicts(statement)[0]:
                together = next(filter(None, map(at_once, (statement, *statements))), 0)
                used = tuple(match[0] for match in _CONCURRENT.finditer(statement))
                requests.append(
                    replace(several, at_once=together, words=shortened(raw, 300), used=used)
                )
            continue
        sizes = [
            size for rx in _SIZES for size in rx.finditer(statement) if _of_prompt(statement, size)
        ]
        clauses = (clause for clause in statement.split("; ") if sizes and sizes[0][0] in clause)
        clause = next(clauses, "")
        if not sizes or (
            (_LIVED.search(clause) or _verdicts(clause)[0]) and not _ORDINALS.search(statement)
        ):
            continue
        size = next(
            (
                other
                for other in sizes
                if _exact(other) and _alike(_tokens(other), _tokens(sizes[0]))
            ),
            sizes[0],
        )
        before = statement[: size.start("number")][-20:]
        tokens, label = _tokens(size) + bool(_MORE_THAN.search(before)), _ORDINALS.search(statement)
        name = label[0].lower() if label else ""
        count = _COUNTED.search(statement)
        read = [*sizes, label, count, _CONCURRENT.search(statement), _OUTPUT.search(statement)]
        used = tuple(
            match[0]
            for match in read
            if match and (match not in sizes or _alike(_tokens(match), tokens))
        )
        request = Asked(tokens, answer_length(statement), shortened(raw, 300), used=used)
        alike = [at for at, known in enumerate(requests) if _alike(tokens, known.tokens)]
        expected = COUNTS.get(count["count"].lower()) or int(count["count"]) if count else 1
        if count is not None and len(alike) < expected:
            more = replace(request, beside=bool(_AT_ONCE.search(statement)))
            requests += [
                replace(more, beside=more.beside and at > 0) for at in range(len(alike), expected)
            ]
        elif not alike and at_once(statement):
            requests.append(replace(request, at_once=at_once(statement), sizes=(tokens,)))
        elif not alike or (name not in {"", *labels} and (labels or name not in _FIRST)):
            requests.append(request)
        elif _exact(size):  # the exact size of one that was rounded before
            requests[alike[0]] = replace(
                request, answer=request.answer or requests[alike[0]].answer
            )
        labels |= {name} - {""}
    return requests[:_MOST]


def _several(statement: str) -> Asked | None:
    """Return a range or list of prompt sizes as one `Asked`; None for another statement."""
    match = _SEVERAL.search(statement)
    if match is None:
        return None
    after = re.split(r"[,;]", statement[match.end() : match.end() + 30])[0]
    if _NO_PROMPT.search(f"{statement[max(0, match.start() - 30) : match.end()]}{after}"):
        return None
    written = [
        (size.rstrip(" kKM"), size[-1].strip() if size[-1] in "kKM" else "")
        for size in (match["first"], *re.findall(_SIZE, match["others"]))
    ]
    last, last_unit = written[-1]
    sizes = tuple(
        tokens_of(
            number, unit or (last_unit if tokens_of(number) < min(100, tokens_of(last)) else "")
        )
        for number, unit in written
    )
    if not all(0 < size <= 10_000_000 for size in sizes):
        return None
    return Asked(
        max(sizes),
        answer_length(statement),
        shortened(statement, 300),
        sizes=sizes,
        spread=len(sizes) == 2
        and (
            not re.search(r",|/|and|or", match["between"])
            or re.search(r"(?i)\bbetween \W?$", statement[: match.start()]) is not None
        ),
    )


def at_once(statement: str) -> int:
    """Return the number of requests that a statement sends at the same time; 0 if it has none."""
    match = _CONCURRENT.search(statement)
    count = int(next(filter(None, match.groups()))) if match else 0
    count += bool(match and _MORE_THAN.search(statement[: match.start()]))
    return count if 1 < count <= _MOST_AT_ONCE else 0


def _exact(size: re.Match[str]) -> bool:
    """Return True if a size is stated exactly: not like `about 4000`, `4k` or `1M`."""
    return not size["about"] and not size["kilo"]


def _alike(tokens: int, other: int) -> bool:
    """Return True if two numbers of tokens differ by 6 % at most: one may be rounded."""
    return abs(tokens - other) <= _CLOSE * other


def _of_prompt(statement: str, size: re.Match[str]) -> bool:
    """Return True if a size is that of a prompt, and not of a cache or an answer."""
    near = statement[max(0, size.start() - 30) : size.end()]
    near += re.split(r"[,;.]|\band\b", statement[size.end() : size.end() + 30])[0]
    return _tokens(size) > 0 and _tokens(size) <= 10_000_000 and not _NO_PROMPT.search(near)


# ── workarounds

_THE_BUG = r"(?:(?:the |this )?(?:bug|crash|error|freeze|hang|issue|problem) )?"
_FAILS = re.compile(
    r"\bsame (?:crash|error|issue|problem|failure)|\bstill"
    r" (?:crash|fail|happen|occur|die|hang|broken|present|reproduc|see|get)\w*"
    rf"|(?:\b(?:never|not|cannot)|{NOT}) (?:fixed|solved|resolved|avoided|finish\w*"
    r"|pass\w*|starts?|started|serv\w*|accepted|right"
    r"|correct|fine|normal\w*|stable|ok(?:ay)?)\b"
    r"|\b(?:does|did|do)(?:n[o']?t| not)"
    r" (?:help|fix|work|resolve|matter|avoid|change|affect|prevent)|\bnot influenced"
    r"|\bno (?:effect|difference|improvement|change)|\bnothing changes|[:,] same\b"
    r"|(?:→|->|=>|\|) ?(?:crash\w*|wrong|fail\w*|hang\w*|bad|die[sd]|garbage|❌)(?!\w)"
    rf"|\balso (?:crash|fail)\w*|\b(?:crash|fail|hang|die)\w* (?:as well|too|anyway|again)\b"
    rf"|\b{_THE_BUG}(?:persists?|remains?)\b"
    r"|\b(?:happens|occurs) (?:too|also|anyway)",
    re.IGNORECASE,
)
_WORKS = re.compile(
    r"\bworks?\b(?!"
    r" around)|\bworked\b|\b(?:avoid|succeed)(?:s|ed)\b|\bresolve[sd]\b|\bfixe[sd]\b|\bboots and"
    r" serves|\bprevents\b"
    r"|\bworkarounds? (?:is|are)\b|\bworkaround:|\bstable\b"
    r"|\b(?:is|was|are|were) always (?:right|correct|fine|ok)\b"
    r"|\bno (?:more |longer |such )?(?:crash|hang|freez|deadlock|error|failure|issue|problem)\w*"
    r"|\b(?:never|not) (?:crash|happen|occur|reproduce|hang|die|fail|freez|deadlock|come[sd]?\b)\w*"
    rf"|\b(?:makes? )?{_THE_BUG}(?:go(?:es)? away|disappears?|(?:is|was) gone)\b"
    r"|\b(?:can(?:'t|not| not)|unable to|could(?:n't| not)) reproduce\b|\bnot reproducible\b"
    r"|\b(?:solve|cure)[sd]?\b|\bhelps\b"
    r"|\b(?:does|did)(?:n't| not)"
    r" (?:crash|happen|occur|reproduce|hang|die|freeze|deadlock|come|appear)"
    r"|\b(?:runs?|is|was|are) (?:fine|ok(?:ay)?)\b"
    r"|(?:→|->|=>|:|\|) ?(?:fine|ok|good|right|correct|passed|✅)(?!\w)"
    r"|\bstarts? (?:normally|fine|up|again|ok(?:ay)?)\b"
    r"|\bstart normally\b|\bserves\b|\bpass(?:es|ed)\b|\baccepted\b|\bsurvive[sd]?\b"
    r"|\bfinish(?:es|ed)\b|\bnormally\b|\b(?:is|are|was|were) (?:right|correct|good|gone)\b",
    re.IGNORECASE,
)
_CRASHES = re.compile(
    r"(?i)(?<!not )(?<!n't )(?<!never )(?<!no )(?<!longer )(?<!without )"
    r"\b(?:crash(?:es|ed)|hangs?|hung|dies|died|fails|failed|segfaults|freezes|froze)\b"
)
"""A plain failure. It is no result of a workaround: the bug may need the flag."""
_ARGUMENT = re.compile(r"(?a)(?<![\w.-])([a-z][a-z0-9_]*)\s?=\s?[\"']?([\w./-]*\w)[\"']?")
"""A flag as an argument of Python: `enforce_eager=True`."""
_SECOND = re.compile(
    r"(?a)(?<![\w.-])[A-Za-z]\w*=\S|\b(?:TP|PP|DP|EP|CP) ?\d"
    r"|\b(?:one|single|1) (?:\w+ ){0,2}at a time"
    r"|\b(?:\d+|one|two|a single|single) (?:\w+ )?(?:users?|clients?|requests?|VUs?|prompts?"
    r"|sequences?|tokens?|threads?|workers?|GPUs?|nodes?|cards?)\b|\bconcurrency\b|\bbatch size\b"
    r"|\b(?:smaller|shorter|fewer|lower|lowering|reduc\w+|another|different|older|newer) \w"
    r"|\bother (?:model|GPU|card|node|machine|kernel|driver|backend)"
    r"|(?<!\w)(?:and|plus|\+|together with) [`'\"]*\x00(?! *(?:it|the|works?)\b)"
    r"|\x00[`'\"]*(?: [\w.]*\d[\w.]*)?[`'\"]* (?:and|plus|\+|together with)"
    r" (?!\W*\x00|(?:it|the|everything|all|no|then|works?|serves?)\b)"
)
"""A second condition of a result beside a flag, for which `\0` stands."""
_DOUBT = re.compile(
    r"\?|\b(?:would|should|could|might|may|try|please|perhaps|maybe|sometimes|usually|seems?|if"
    r" you|expected?|unless|until|once|after|PR"
    r"|patch(?:ed)?)\b|\bv?0\.\d{1,2}\.\d",
    re.IGNORECASE,
)
_FLAG = re.compile(
    r"(?<![\w-])(?P<name>--[a-z][a-z0-9_-]+(?:\.[\w.]+)?)"
    r"(?:(?P<gap>=|[ ]+)(?!--)(?P<value>'[^']*'|\"[^\"]*\"|[^\s`|,;()]+))?"
)
_A_VALUE = re.compile(
    r".*\d|[A-Z_]{3,}|[a-z]+_[a-z_]+|['\"{].*"
    r"|(?:none|auto|true|false|eager|off|on|spawn|fork|mp|ray|uni)\.?",
    re.DOTALL,
)
_TAKEN_OUT = re.compile(
    r"\b(?:without|remov\w+|dropp\w+|omit\w+|disabl\w+|leaving out|unset\w*)\W{0,3}(?:the |flag"
    r" )?\W{0,2}$",
    re.IGNORECASE,
)
_FEATURES = {
    "prefix caching": "--no-enable-prefix-caching",
    "chunked prefill": "--no-enable-chunked-prefill",
    "async scheduling": "--no-async-scheduling",
    "cuda ?graphs?": "--enforce-eager",
    r"mtp|spec(?:ulative)?[- ]dec\w+": "",
}
_CLAUSES = re.compile(r",\s+|;\s+|\bbut\b|\bwhile\b|\bwhereas\b")
_NEXT = re.compile(r"(?<=[\w)`][.!?])\s+(?=[a-z])")
"""The end of a sentence, before one that begins with a small letter."""
_OFF = re.compile(
    rf"\b(?:disabl\w+|without|(?:turn|switch)\w* off) (?:the )?\W{{0,2}}"
    rf"(?P<what>{'|'.join(_FEATURES)})\b",
    re.IGNORECASE,
)


def find_tried(statements: Sequence[str], command: ServeCommand) -> tuple[list[Tried], list[str]]:
    """Return (flags tried with a clear result, statements about flags without one).

    Flags that do not change `command`, the reported one, are left out.
    """
    tried_flags: list[Tried] = []
    unclear: list[str] = []
    for raw, sentence in ((whole, part) for whole in statements for part in _NEXT.split(whole)):
        whole = _ARGUMENT.sub(_as_flag, GLUED.sub(" | ", sentence))
        parts = re.split(r";\s+", whole)
        if all(any(_verdicts(part)) or not list(_flags_of(part)) for part in parts):
            whole = "; ".join(part for part in parts if list(_flags_of(part)))
        clauses = _CLAUSES.split(whole) if all(_verdicts(whole)) else [whole]
        clear = (clause for clause in clauses if _WORKS.search(clause) or _FAILS.search(clause))
        if any(not list(_flags_of(clause)) for clause in clear):
            clauses = [whole]  # a result of something else
        for clause in clauses:
            works, fails = _verdicts(clause)
            for flags, removed in _flags_of(clause):
                known = next(
                    (
                        tried
                        for tried in tried_flags
                        if (tried.flags, tried.removed) == (flags, removed)
                    ),
                    None,
                )
                if not _changes(flags, removed, command):
                    continue
                if (
                    works != fails
                    and (works or _FAILS.search(clause))
                    and all(positive(flag.split()[0].partition(".")[0]) in KNOWN for flag in flags)
                    and not _DOUBT.search(clause)
                    and not _has_second_condition(clause)
                    and (known is None or known.lives == works)
                ):
                    used = _used(flags, clause if clause in raw else raw)
                    tried_flags += [Tried(flags, works, shortened(raw, 300), removed, used)]
                elif works or fails:
                    unclear.append(shortened(raw, 300))
    return tried_flags, list(dict.fromkeys(unclear))


def _used(flags: tuple[str, ...], part: str) -> tuple[str, tuple[str, ...]]:
    """Return a part of a sentence, and the words of it that state the result of these flags."""
    names = {flag.split()[0] for flag in flags}
    read = [match[0] for rx in (_OFF, _FAILS, _WORKS) for match in rx.finditer(part)]
    read += [at[0] for at in _ARGUMENT.finditer(part) if _as_flag(at).split()[0] in names]
    for match in _FLAG.finditer(part):
        name = canonical(match["name"])
        if name in names:
            taken_out = _TAKEN_OUT.search(part[: match.start()])
            read += [taken_out[0].strip("`*' ")] if taken_out else []
            read.append(match["name"] if is_switch(name) and match["gap"] != "=" else match[0])
    return part, tuple(read)


def _verdicts(statement: str) -> tuple[bool, bool]:
    """Return (works, fails): a statement may report a success, a failure, or both."""
    fails = _FAILS.search(statement) or _CRASHES.search(statement)
    return bool(_WORKS.search(_FAILS.sub(" ", statement))), bool(fails)


def _as_flag(match: re.Match[str]) -> str:
    """Return an argument of Python as a flag, if vLLM has it, else as it is."""
    flag = f"--{match[1].replace('_', '-')}"
    if flag not in KNOWN:
        return match[0]
    return {"True": flag, "False": f"--no-{flag[2:]}"}.get(match[2], f"{flag} {match[2]}")


def _has_second_condition(statement: str) -> bool:
    """Return True if a result also depends on something beside flags."""
    flags = re.sub(r"(?<![\w-])--[a-z][\w.-]*(?:=[^\s`|,;()]+)?", "\0", statement)
    # Several flags are one condition.
    between = r"(\x00[`'\"]*(?: [\w.]*\d[\w.]*)?[`'\"]*) (?:and|or|plus|\+) (?=[`'\"]*\x00)"
    return _SECOND.search(re.sub(between, r"\1 ", flags)) is not None


def _flags_of(statement: str) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield (flags, left out) for each group of flags in a statement.

    A flag without its value ends the search and drops its group. If the statement has an "or", each
    flag is a group.
    """
    apart = re.search(r"\bn?or\b|\beither\b", statement) is not None
    group: list[str] = []
    for match in _FLAG.finditer(statement):
        name, value = canonical(match["name"]), match["value"] or ""
        if _TAKEN_OUT.search(statement[: match.start()]):
            yield (name,), True
        elif (
            value
            and not is_switch(name)
            and (
                match["gap"] == "="
                or statement[match.end() :].lstrip().startswith("--")
                or _A_VALUE.fullmatch(value.rstrip(".:"))
            )
        ):
            word = value[1:-1] if value[0] in "'\"" else value.rstrip(".:")
            group.append(f"{name} {shlex.quote(word)}")
        elif is_switch(name):
            group.append(name)
        else:
            return
        if apart and group:
            yield (group.pop(),), False
    if group:
        yield tuple(group), False
    for match in _OFF.finditer(statement):
        flag = next(
            flag
            for what, flag in _FEATURES.items()
            if re.fullmatch(what, match["what"], re.IGNORECASE)
        )
        yield ((flag,), False) if flag else (("--speculative-config",), True)


def _changes(flags: tuple[str, ...], removed: bool, command: ServeCommand) -> bool:
    """Return True if setting the flags, or leaving them out, changes the reported command."""
    if removed:
        return any(positive(flag.name) == positive(flags[0]) for flag in command.flags)
    try:
        return command.with_flags(*flags) != command
    except CommandError:
        return False
