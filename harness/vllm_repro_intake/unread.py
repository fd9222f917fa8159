"""Parts of an issue's text that its draft does not have.

A sentence of prose or a line of code is unread if the draft neither has nor quotes a number, flag,
field, route, variable or release of it. A sentence about a workaround is unread, too, and a pause
or a number of requests at once in code. Logs, tracebacks and the output
of `collect_env` are left out: the diagnosis reads them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from textwrap import wrap

from vllm_repro.command.flags import canonical
from vllm_repro.secret_names import steers_vllm
from vllm_repro_intake.commands import flag_of
from vllm_repro_intake.facts import KIND, OUTCOME, Used
from vllm_repro_intake.requests import COUNTS, DIGITS, tokens_of
from vllm_repro_intake.text import Block, statements

_LONGEST = 240
_MOST = 150
_LOG = re.compile(
    r"(?i:\b(?:info|warning|error|debug|critical)\b.{0,14}\d\d[-:]\d\d)"
    r"|^\W*[A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d \S+ \S+: "
    r"|^\W*\d{4}-\d\d-\d\d[T ]\d\d:"
    r"|^\W*(?:\(\w[^)]*pid=\d+\)|\[rank\d|[A-Z]\d{4} \d\d:|Traceback \(|File \"|\^|[\w.]+(?:Error"
    r"|Exception)(?:: |$))|SchedulerOutput\(|non-default args"
)
_MARKER = re.compile(
    r"^\s*(?:[-*+•◦]|\(?\d{1,2}[.)])\s+|^`[\w.]+(?:Error|Exception)\b[^`]*`[\s,.:;]*(?=\w|\*\*)"
)
"""The mark of an item, or an exception before the words of a sentence."""
_MODEL = re.compile(
    r"(?<![\w/.-])[A-Za-z][\w.-]+/(?=[\w.-]*[A-Z])(?=[\w.-]*\d)[\w.-]*\w(?![\w/])"
    r"|(?<![\w/.:-])[\w.-]+(?:/[\w.-]+)+(?<!\.py):v?\d[\w.-]*\w"
)
"""The public name of a model, or an image with its tag."""
_NAME = re.compile(
    rf"(?<![\w-]){KIND}"
    r"|(?<![\w/.-])(?:[Bb]?[Ff][Pp]?(?:4|8|16|32)|b?float(?:16|32)|[Ii][Nn][Tt][48]|NVFP4|MXFP[48]"
    r"|AWQ|GPTQ)(?![\w-])"
    r"|(?<![\w.])[A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+(?!\w)|(?<![\w.-])V[01](?![\w-])"
    r"|(?<![\w/.-])[A-Z][\w.]*(?:-[\w.]+)*-\d+(?:\.\d+)?B\b(?:-\w+)*"
)
"""Kind of a GPU, type of numbers, or a model without its organization, in prose."""
_COUNTED = re.compile(
    rf"(?i)\b(?!one){'|'.join(('(?:seven', *COUNTS, 'nine|ten|twelve|dozens|hundreds|thousands)'))}"
    r" (?:\w+ ){0,2}?(?:adapters?|clients?|days|gpus|hours?|images?|instances|machines|minutes"
    r"|nodes|pods|prompts|replicas|requests|runs|seconds|servers|sessions|streams|tokens|users"
    r"|videos|weeks|workers|of (?:them|these|those))\b"
)
"""A count in words."""
_POLITE = re.compile(
    r"(?i)(?:hi|hello|hey|dear)(?:[ ,]+\w+){0,4}\W*$"
    r"|(?:many )?(?:thanks?|cheers|regards|sent from|best,)"
    r"|(?:best|kind|warm)(?:est)? (?:regards|wishes)\b"
)
"""A greeting, or the end of a letter."""
_A_FACT = re.compile(
    r"--[a-z]|\d\.\d|[=_]|\d ?(?:[kx]|tokens?|[GM]i?B|m?s|min|hours?|requests?|gpus?|images?)\b"
    rf"|{OUTCOME.pattern}",
    re.IGNORECASE,
)
_SMI = re.compile(r"(?m)^[|+].*\bNVIDIA-SMI\b")
_OF_SMI = re.compile(r"\s*[|+].*[|+]\s*$|\w{3} \w{3} +\d+ [\d:]+ \d{4}$")
_OF_MACHINE = re.compile(
    r"(?:ExecStartP|ExecStop|ExecReload|Restart|Timeout|StartLimit"
    r"|Kill|Standard|Syslog|Watchdog)\w*="
    r"|(?:User|Group|WantedBy|After|Wants|Requires|Type|Description|WorkingDirectory)="
    r"|(?!.*vllm).*\b(?:nvidia|rocm|amd)-smi\b|\s*- [\"']?\d+:\d+[\"']?$"
)
"""A line of a systemd unit, or a look at the machine, that a reproduction does not need."""
_FRAME = re.compile(r"\bFile \"[^\"]+\", line \d+")
_COLLECTED = re.compile(
    r"collect_env|(?m:^LD_LIBRARY_PATH=)"
    r"|(?m:^(?:PyTorch version|GCC version|Is CUDA available|CPU family"
    r"|Is debug build|NIC Legend|Vulnerability \w+|\[pip3\]|\[conda\])\b)"
)
_ENTRY = re.compile(
    r"(?!(?:.*\s)?\W*"
    r"(?:VLLM|NCCL|CUDA|LMCACHE|FLASHINFER|HF|NIXL|OMP|PYTORCH|RAY|TORCH|TRITON|UCX)_"
    r"(?!USAGE_SOURCE|VERSION|HOME|PATH|NVML_BASED|MODULE_LOADING|CUDA_ARCH_LIST)[A-Z0-9_]+=)"
    r"(?:[\w() #/\[\]*.-]{1,60}[:=\t]|\[(?:pip3|conda)\]|\s*(?:GPU|NIC|CPU)\d)"
)
"""A line of `collect_env`, except variables that may steer vLLM and that it does not set itself."""
_OF_A_BODY = re.compile(
    r"[\"']?\b(?:model|stream|role|content|messages)[\"']?\s?[:=]\s?(?:[\"'`\[]|[Tt]rue|[Ff]alse)"
    r"|^\s*\w+\s*=\s*[\[(]?[rf]?[\"']{1,3}[^\"'\n]* "
)
"""A line of a request's body, or the text of a prompt."""
_OF_A_BOX = re.compile(
    r"(?<!\S)(?:(?:-v|-p|-w|--volume|--mount|--name|--network|--net|--runtime|--restart|--hostname"
    r"|--publish|--pull|--platform)(?:=|[ \t]+)\S+|--(?:rm|detach|privileged|init)\b|-[dit]+\b)"
)
"""Options of a container that a reproduction does not need."""
_IN_A_BOX = re.compile(r"\b(?:docker|podman|nerdctl)\s+(?:container\s+)?run\s")
_LINK = re.compile(
    r"\d?>>?&?\d?|(?:https?://)?[\w.\[\]-]+:\d+(?=/)"
    r"|https?://(?:[\w-]+\.)+[a-z]{2,}(?!:\d)[^\s)\"'>]*|(?<![\w/])[\w./-]*#\d+\b"
)
SENDS = re.compile(
    r"(?:^|[\s;&|(`])curl\s+(?!.*/(?:metrics|health|models)\b).*(?:/|\\$)"
    r"|\.(?:[Cc]reate(?:[A-Z]\w+)?|post|generate|chat|encode)\((?!\w*\))"
)
"""A line that sends a request."""
_FLAG = re.compile(r"(?a)(?<![\w-])--(?!data|header|request\b|json\b|location\b)[a-z][\w-]+")
_SET = re.compile(
    r"(?a)(--[a-z][\w-]+|(?<![\w-])-[tpd]p)(?:=|[ \t]+)['\"]?([\w.:/-]*\d[\w.:/-]*\b)"
)
_VARIABLE = re.compile(
    r"(?a)\b(?:VLLM|NCCL|TORCH|CUDA|PYTORCH|FLASHINFER|TRITON|HF|OMP|GLOO|RAY|NVSHMEM|UCX"
    r"|LMCACHE)_[A-Z0-9_]+|(?<=\bname: )[A-Z][A-Z0-9]*_[A-Z0-9_]+"
    r"|\b[A-Z][A-Z0-9]*_[A-Z0-9_]+(?==)"
)
_SETTING = re.compile(
    r"(?a)\b([A-Z][A-Z0-9_]{2,}(?==)|[A-Z][A-Z0-9]*_[A-Z0-9_]+)[\"'`]?"
    r"(?:=| ?[:|] ?| (?:is |was )?(?:set )?to | value: ?)"
    r"[\"'`]?(\w[\w./:,-]*)"
)
"""A variable and its value, also in YAML, a table or prose."""
_ROUTE = re.compile(
    r"(?:\b(?:GET|POST|PUT|DELETE) |[`\"']|https?://[^/\s\"'`]+"
    r"|\b(?:localhost|127\.0\.0\.1)(?::\d+)?)"
    r"(?P<route>/[a-z][\w/.-]*\w(?:\?[\w=&.-]+)?)(?=[\s\"'`),;.]|$)"
)
_TICKED = re.compile(r"`(_?[a-z]+(?:_[a-z0-9]+)+)(?=[=:`])")
_FIELD = re.compile(
    r"[\"'](\w+)[\"']\s*:|(?<![\w.-])([a-z]\w*)(?:=(?![=\s])|: (?=[\"'`\[{\w].*[,\[{}]$))"
)
"""A field of JSON, of a call in Python, or of an object in JavaScript."""
_PAIR = re.compile(
    r"(?a)[\"']?(\w[\w-]*)[\"']?\s*[:=]\s*(-?\d+(?:\.\d+)?|[Tt]rue|[Ff]alse)(?![\w.]*\w)"
)
_OF_A_CLIENT = frozenset(
    [
        *(
            "api_key",
            "base_url",
            "content",
            "extra_body",
            "headers",
            "host",
            "http",
            "https",
            "indent",
            "json",
            "key",
        ),
        *("method", "model", "name", "role", "text", "type", "url", "user"),
    ]
)
"""Fields of clients and of messages, which no request loses."""
_TOGETHER = re.compile(
    r"(?:Semaphore|ThreadPoolExecutor|ProcessPoolExecutor|\bPool)\((?:max_workers=)?(\d+)\)"
    r"|\bmax_workers=(\d+)|\bxargs\b.* -P ?(\d+)|\bparallel\b.* -j ?(\d+)"
)
"""Number of requests that code sends at once."""
_PAUSE = re.compile(
    r"^\s*(?:sleep [\d.]+|wait)\s*(?:#.*)?$|\btimeout (?:-\S+ )*\d[\w.]* curl\b"
    r"|^\s*for \w+ in (?=[A-Za-z])[\w./ -]+(?:;|$)"
    r"|\b(?:time|asyncio)\.sleep\("
    r"|\.(?:abort\w*|cancel|aclose|wake_up|reset_\w+)\("
    r"|(?:^|\s)#.*\b(?:tried|works?|crash\w*|fails?|hangs?"
    r"|clos\w+|abort\w*|cancel\w*|disconnect\w*)\b"
)
"""A pause, a call by which a client leaves or an engine changes, or a comment on a result."""
_TELLS = re.compile(
    r"(?i)\b(?:(?:expected|actual)(?=(?: \w+)?[:：])"
    r"|work(?:s|ed|around)|ok|okay|fine|finish(?:es|ed)|surviv\w+|remov(?:e|ing)|dropping"
    r"|(?:no|not|never|still|without) (?:a )?(?:crash\w*|dead|die[sd]?|hang\w*|trigger\w*)"
    r"|all good|succeed(?:s|ed)?|runs?(?: (?:fine|well|ok|through|stable))?(?=[.,!;)]|$)"
    r"|(?:un|not )set(?:ting)? (?=\W?[A-Z]+_)|delet(?:e[ds]?|ing)|roll(?:ed|ing)? back"
    r"|leaving out|alone|not affected|unaffected|only (?:if|when|with|in|on|for|happens|occurs)"
    r"|cures?|helps?|stops? it"
    r"|(?<!-)(?:dis|en)abl(?:e[ds]?|ing)|(?:turn|switch)(?:ed|ing)? o(?:n|ff)"
    r"|restart\w*|normally|(?<!-)serve[sd](?!-)"
    r"|pass(?:es|ed)?|accepted|depends? on|required|needed"
    r"|wrong|incorrect|garbage|gibberish|NaNs?|it starts|reproduc(?:es|ible)"
    r"|(?:is|are|was|were) (?:right|correct)"
    r"|(?:does|did|do)(?: not|n't) (?:\w+ )?(?:segfault|happen|occur|reproduce|crash|die|fail|hang)"
    r"|never happens"
    r"|makes it start|keeps? (?:answering|running|serving|up)|stays? (?:alive|healthy|up)"
    r"|instead of|freshly"
    r"|(?:gives?|gets?|got|returns?|shows?) (?:the )?(?:correct|expected|right))\b"
    r"|正常|不会|没有(?:这个)?问题|解决|ません"
)
"""Words of a sentence about a workaround, or about a setup without the bug."""
_REST = re.compile(
    rf"(?i)\b(?:not|never|no|without|cannot|neither|only|unless|except)\b|n[\u2019']t\b"
    rf"|{OUTCOME.pattern}"
)
"""Words of the rest of a sentence that are a result, or turn one around."""
_PLAIN = re.compile(r"(?<!\S)[^\W\d_]+(?=[\s.,:;!?]|$)")
_LEAST_OF_SENTENCE = 3
"""Plain words of a sentence; a piece of a command has fewer."""
_COMMAND = re.compile(r"\bvllm serve\b|api_server\b|\bdocker run\b")
_FOREIGN = re.compile(
    r"(?i)[^\W\d_a-zµ]|\b(?:und|mit|ohne|nicht|ist|wird|con|sin|que|una?|pero|avec|sans|mais|les"
    r"|est|com|sem|mas|n[ãa]o|non|senza"
    r"|um|por|para|ao|se|il|di|der|das|le|la|du|des|sur|pour|dans)\b"
)
"""A word of prose that is not English, whose results no other expression knows."""
_OPTION = re.compile(r"(?a)(?<![\w/.-])(?:--)?([a-z]+(?:[-_][a-z0-9]+)+)")
"""An option of the server in prose, with or without hyphens before it."""
_REPEATED = re.compile(
    r"(?i)\b(?:twice|again)\b|\b(?:two|three|several|many|a (?:few|couple(?: of)?)) times\b"
    r"|\b(?:one|two|three|half|some|most) (?:in|out of) (?:every )?(?:[a-z]+|\d+) of the\b"
    r"|\bone (?:after (?:the |an)other|by one)\b|\bof them\b"
    r"|\?\s(?:\*\*[^*]+\*\*:?\s|@?[\w-]+:\s)?(?:yes|yep|yeah|no|nope|not|still|works?|same|also)\b"
    r"|\bsequential\w*|\bin a loop\b|\bno concurrency\b"
    r"|\brepeatedly\b|\bevery (?:\w+ ){0,2}(?:day|hours?|minutes?|night|request|seconds?|time)\b"
    r"|\b(?:abort(?:s|ed|ing)?|cancel\w*|disconnect\w*)\b"
    r"|\b(?:clos|drop)\w+ (?:\w+ ){0,3}(?:connections?|streams?|sockets?|tabs?)\b"
    r"|两次|多次"
)
"""Words of a request that is sent more than once, or whose client leaves."""
_NUMBER = re.compile(
    r"(?a)(?:(?<![\w./:#-])(?:v(?=\d+\.\d+\.\d))?|(?<=\.\.))(?<!\d[,'])"
    rf"(?P<number>\d+(?:\.\d+){{2,}}\w*|{DIGITS})"
    r"(?: ?(?P<unit>[kKM])(?![A-Za-z]))?|(?<=[\s\d]\d[-–])(?P<last>\d+)\b(?!\.\d)"
)
_LISTED = re.compile(r"\W*[\d.]+\W*")
"""An item of a list of arguments."""
_LEAST_OF_CODE = 3
"""Numbers below it are indexes and switches, in a line of code without a field."""


def unread(
    blocks: Sequence[Block],
    values: Sequence[str],
    quoted: Sequence[str],
    used: Sequence[Used],
    made_up: Collection[str],
    sent: int,
    title: str,
) -> Iterator[str]:
    """Yield the parts of the text that the draft does not have; nearby lines of code are one part.

    values: the draft's values, without the shape of a known model. quoted: its comments. used:
    parts of sentences, and the words of them that were read. made_up: placeholders for numbers that
    the text does not state. sent: number of requests with a body in the draft. After 150 parts the
    last one states how many more there are.
    """
    stated = [(title, False), *(part for block in blocks for part in _parts(block, blocks))]
    headings = (block.heading for block in blocks if _REPEATED.search(block.heading))
    stated += [(heading, False) for heading in dict.fromkeys(headings)]
    # Which of several requests was not read is not known: quote each.
    lost = sum(SENDS.search(text) is not None for text, _ in stated) > sent
    parts = []
    everything = "\n".join(values), "\n".join(quoted)
    for at, (text, code) in enumerate(stated):
        rest = text if code else _rest(text, used)
        facts = rest
        # The draft has the title: only its names and numbers are looked for.
        for words in () if at else (_TELLS, OUTCOME, _FOREIGN):
            facts = words.sub("…", facts)
        again = at and title in text and len(text) <= len(title) + 30
        if not code and (again or text in everything[1]):
            continue
        if (lost and (SENDS.search(text) or (code and _OF_A_BODY.search(text)))) or any(
            _missing(facts, code, *everything, made_up)
        ):
            parts.append((at, rest, code))
    joined: list[str] = []
    last, code = -1, False
    for at, text, is_code in parts:
        if joined and code and is_code and len(joined[-1]) + len(text) < _LONGEST:
            joined[-1] += f" ⏎ {text}" if at == last + 1 else f" … {text}"
        else:
            joined.append(text)
        last, code = at, is_code
    yield from joined[:_MOST]
    if len(joined) > _MOST:
        yield f"and {len(joined) - _MOST} more parts of the text"


def _parts(block: Block, blocks: Sequence[Block]) -> Iterator[tuple[str, bool]]:
    """Yield (text, it is code) of each sentence or line of a block, without logs and environments.

    blocks: all of the text; one with the same heading may show that this is an environment.
    """
    collected = any(
        _COLLECTED.search("\n".join(other.lines))
        for other in blocks
        if other is block or (block.heading and other.heading == block.heading)
    )
    smi = block.code and _SMI.search("\n".join(block.lines))
    frame, of_form = False, not block.code and re.match(r"(?i)expected|actual", block.heading)
    expected = f"{block.heading}: " if of_form else ""
    # Name and value of a variable in YAML belong together.
    lines = re.sub(r"(?<=\S)\n(?=[ \t]*value: *\S)", " ", "\n".join(block.lines)).split("\n")
    for raw in lines if block.code else tuple(statements([block])):
        line = raw if block.code else _MARKER.sub("", raw)
        skipped = frame or _LOG.search(line[:300]) or (collected and _ENTRY.match(line))
        if block.code:
            skipped = skipped or _OF_MACHINE.match(line) or (smi and _OF_SMI.match(line))
        else:
            skipped = skipped or (_POLITE.match(line) and not _A_FACT.search(line))
        frame = _FRAME.search(line[:300]) is not None
        # Cut between words, so that no number is cut.
        for piece in (
            wrap(line, _LONGEST, break_long_words=False, break_on_hyphens=False)
            if not skipped
            else ()
        ):
            yield expected + " ".join(piece.split()), block.code


def _missing(
    text: str, code: bool, values: str, quoted: str, made_up: Collection[str]
) -> Iterator[str]:
    """Yield each fact of a sentence or line that the draft does not have.

    A line on a pause, a repetition or a workaround that no comment quotes is yielded whole.
    code: the text is a line of code. values, quoted, made_up: as in `unread`, each joined.
    """
    if "…" in text and _REST.search(text):
        yield text
    everything = f"{values}\n{quoted}"
    text = _OF_A_BOX.sub(" ", text) if code or _IN_A_BOX.search(text) else text
    told: object = _PAUSE.search(text) if code else _TELLS.search(text) or _REPEATED.search(text)
    if not code and len(_PLAIN.findall(text)) >= _LEAST_OF_SENTENCE and not told:
        told = _FOREIGN.search(text) or ("…" not in text and OUTCOME.search(text))
        options = () if "…" in text or _COMMAND.search(text) else _OPTION.findall(text)
        # Nothing of it was read, but the draft has an option that it is about.
        told = told or any(_has(values, flag_of(name)) for name in options)
    if told and text[:40] not in quoted:
        yield text
    yield from () if code else (match[0] for match in _COUNTED.finditer(text))
    for match in _TOGETHER.finditer(text) if code else ():
        if f"at_once({next(filter(None, match.groups()))}," not in values:
            yield match[0]
    plain = _LINK.sub(" ", text)
    for flag in _FLAG.findall(text):
        if not any(_has(everything, name) for name in (flag, canonical(flag))):
            yield flag
    for flag, value in _SET.findall(plain):
        written = (
            rf"(?:{re.escape(flag)}|{re.escape(canonical(flag))})[ =]['\"]?{re.escape(value)}(?!\w)"
        )
        if not re.search(written, everything):
            yield value
    plain = _SET.sub(" ", plain)
    for match in _SETTING.finditer(text):
        name, value = match.groups()
        if not (
            re.search(rf"{name}=['\"]?{re.escape(value)}(?!\w)", everything)
            or f"left out: {name}" in quoted
            or (not steers_vllm(name) and _has(values, value))
        ):
            yield match[0]
    plain = _SETTING.sub(" ", plain)
    names = [
        *_VARIABLE.findall(text),
        *_TICKED.findall(text),
        *_MODEL.findall(plain),
        *(() if code else (match[0] for match in _NAME.finditer(plain))),
        *(route for route in [match["route"] for match in _ROUTE.finditer(text)] if route != "/v1"),
    ]
    if code:
        names += re.findall(r"(?:^|- )((?!vllm)[a-z]\w*Config|ipc|shm_size|ulimits):", text)
        names += sorted(
            {name for pair in _FIELD.findall(text) for name in pair if name} - _OF_A_CLIENT
        )
    for name in names:
        if not (_has(everything, name) or _has(everything, flag_of(name))):
            yield name
    numbers = {_value(match) for match in _NUMBER.finditer(values)}.difference(made_up)
    pairs = {(name, value.lower()) for name, value in _PAIR.findall(everything)}
    for name, value in _PAIR.findall(plain):
        on = {"true": "--", "false": "--no-"}.get(value.lower())
        written = re.escape(flag_of(name)).replace("\\-\\-", on or "--", 1)
        written += "" if on else rf"[ =]{value}"
        flag = re.search(rf"{written}\b", everything)
        # A variable of a shell has its value in the command.
        if not ((name, value.lower()) in pairs or flag or (name.isupper() and value in numbers)):
            yield value
    plain = _PAIR.sub(" ", plain)
    for match in _NUMBER.finditer(plain):
        value = _value(match)
        near = plain[max(0, match.start() - 6) : match.end() + 6].strip()
        after = re.escape(plain[match.start() : match.end() + 8].strip())
        is_near = near in quoted or re.search(rf"(?<![\d.,]){after}", quoted)
        small = value.isdecimal() and int(value) < (
            0 if _LISTED.fullmatch(text) else _LEAST_OF_CODE if code else 10
        )
        if not (is_near or (value in numbers and not small) or (code and small)):
            yield match[0]


def _rest(text: str, used: Sequence[Used]) -> str:
    """Return a sentence with `…` in place of the words of it that were read."""
    rest = text
    for part, words in used:
        part = " ".join(part.rstrip("…").split())
        part = text if text in part else part
        for each in re.finditer(re.escape(part), text) if part else ():
            for word in filter(None, words):
                whole = re.escape(" ".join(word.split()))
                pattern = re.compile(rf"(?<![A-UW-Za-uw-z\d_]){whole}[a-z]*(?![A-Za-z\d_])")
                match = pattern.search(rest, each.start())
                if match and match.start() < each.end():
                    blank = "\0" * len(match[0])
                    rest = f"{rest[: match.start()]}{blank}{rest[match.end() :]}"
    return re.sub(r"\0[\0\s]*\0|\0", "…", rest)


def _has(text: str, name: str) -> bool:
    """Return True if the text has this name as a whole word."""
    return re.search(rf"(?a)(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None


def _value(match: re.Match[str]) -> str:
    """Return a matched number in one form, so that `1,000` and `1k` are equal."""
    number = match["number"] or match["last"]
    if number.count(".") > 1 or (re.fullmatch(r"\d+\.\d+", number) and not match["unit"]):
        return number if not re.fullmatch(r"[1-9]\d*\.\d{3}", number) else number.replace(".", "")
    return str(tokens_of(number, match["unit"] or ""))
