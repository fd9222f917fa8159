"""Parts of an issue's text: blocks of code and prose, and statements.

The text may be GitHub's Markdown, a mail, or a page whose fences and tables were lost. So code is
also looked for outside of fences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

NOT = (
    r"\b(?:\w+n['\u2019]t"
    r"|(?:do(?:es)?|did|is|was|are|were|ca|wo|could|would|should|has|have|had)nt)\b"
)
"""Negated verbs, also without their apostrophe; not the end of `client` or `event`."""
_FENCE = re.compile(r"[ \t]*(?:`{3,}|~{3,})")
_HEADING = re.compile(
    r"#{1,6} +(?P<marked>.+)|\*\*(?P<bold>[^*]+)\*\*:?|(?P<plain>[A-Z][\w ()'/-]{2,60}):?"
)
_TAG = re.compile(r"</?(?:details|summary|p|br|code|pre|div)\b[^>]{0,80}>", re.IGNORECASE)
_ITEM = re.compile(r"[ \t]*(?:[-*+•◦] |\d{1,2}[.)] |\|)")
_APART = re.compile(
    r"(?m)(\\[ \t]*\n)(?:[ \t]*\n)+"
    r"(?=[ \t]*-|(?![^\n]*\b(?:vllm|python3?|curl|docker) )[^\n]*\\[ \t]*$)"
)
"""Empty lines between two lines of one command of a shell."""
_SHARED = re.compile(
    r"(?<![\w.\]:/$-])(?P<root>(?:file://)?/(?:mnt|data\d*|nfs\w*|scratch\w*"
    r"|raid\d*|storage|shared?|ssd\d*"
    r"|nvme\d*|disks?\d*|lustre|gpfs|fsx|efs|volumes?|media|projects?|cluster|workspace|work|u)"
    r"|(?<![\w.])[A-Za-z]:(?=[\\/][\w.-]))(?P<folders>(?:(?:/|\\{1,2})[\w.@\[\]-]+)+)"
)
"""A path on a disk that users share."""
_NO_OWNER = re.compile(
    r"(?i)(?:(?:hf|huggingface|local|nvme|ssd|disk|vol(?:ume)?|mnt|gpu)s?[\d_-]*|data(?:sets?)?\d*"
    r"|models?|weights|check-?points?|ckpts?|hub|\.?cache|caches|snapshots?"
    r"|loras?|adapters?|llms?|vllm"
    r"|shared?|public|homes?|users|storage|te?mp|logs?|work(?:space)?s?"
    r"|projects?|src|code|repos?|bin|lib"
    r"|v?envs?|\.venv|configs?|scripts|templates|images?|inputs?|outputs?"
    r"|results|nfs|scratch|opt|usr"
    r"|(?:mini|ana)?conda\d?|docker|runs?|program files|windows|appdata|root|\[[\w:-]+\])"
)
"""A folder that is no name of a user or a project."""
_FAMILY = re.compile(
    r"(?i)qwen|llama|deepseek|glm|gemma|mi[sx]tral|phi-?\d|opt-|gpt|kimi|minimax|falcon|yi-|whisper"
    r"|bert|e5|bge|nemotron|granite|command-r|instruct|moe|awq|gptq|fp8"
)
"""A word of a model's name."""
_SENT_TO = re.compile(
    r"(?<![\w./@\[-])(?!localhost|host\.docker)(?=[\w.-]*[a-z])[\w-]+(?:\.[\w-]+)*(?=:\d{2,5}/v\d/)"
)
"""A host in an address without a scheme."""
_HOST = re.compile(
    r"(?<![\w./@:-])(?![\w.-]*(?:github|k8s|kubernetes|huggingface"
    r"|nvidia|pytorch|vllm|openai|docker|python)\.)"
    r"(?=[a-z0-9.]*[\d-])[a-z][a-z0-9-]*"
    r"(?:\.[a-z0-9-]+)*\.(?:com|net|org|edu|gov|io|de|fr|eu|uk|ru|cn|jp)\b"
    r"(?![\w/-]|\.\w)"
)
_PHONE = re.compile(
    r"(?i)((?:\b(?:tel|phone|mobile|fax)[a-z]*|电话|手机)[.:： ]{1,3}"
    r"|(?<!\S)(?=\+\d{1,3}[ (.-]+\d))"
    r"[+(]?\d[\d ()./-]{5,}\d(?: ext\.? ?\d+)?"
)
_PROMPT = re.compile(r"(?m)(?<![\w.@-])[a-z_][\w.-]*@[\w.-]+(?=[ :][^\n\]$#%]{0,60}\]?[$#%] )")
_ANSWERED = re.compile(
    r"(?i)\?\s[\s>]*(?=(?:\*\*[^*\n]{1,40}\*\*:?[ \t]+|@?[\w-]{1,20}:[ \t]+)?"
    r"(?:yes|yep|yeah|no|nope|not|never|still|works?|same|also|correct|it (?:is|does))\b)"
)
"""The end of a question, before its answer: both are one statement."""
LONGEST = 10_000
"""Longest command, call or line that is read, in characters.

Only the diagnosis reads longer lines.
"""
_LONGEST_SENTENCE = 1_500
GLUED = re.compile(
    r"(?<=[a-z0-9])(?=(?:Same|Still|Boots|Works|Crash(?:es)?|Fails|No crash|OK|Fine)\b)"
)
"""Border of two cells of a table that a web page lost."""
_SENTENCE_END = re.compile(
    r"(?<=[.!?;])(?<!^\d\.)(?<!^\d\d\.)[ \t]+(?=[A-Z`*(])|(?<=[。！？])"
    r"|(?<=[\w)`][.!?;])(?<!^\d\.)[ \t]+(?=--|[a-z]\w*[=_]|v?\d+\.\d+\.\d)"
)


@dataclass(frozen=True)
class Block:
    """Consecutive lines: a fenced block of code, or a paragraph."""

    # the last one above it
    heading: str
    # the line of prose before it
    lead: str
    lines: tuple[str, ...]
    code: bool

    @property
    def above(self) -> str:
        """Return the heading above the block and, on a second line, the prose before it."""
        return f"{self.heading}\n{self.lead}"


def clean(text: str) -> str:
    """Return the text with plain line ends and without a mail's quotation marks.

    Blanks replace other control characters, and `[host]` or the like replaces telephone numbers,
    hosts, users and the owners of shared folders.
    """
    # A page may show each line of a command as a paragraph.
    text = _APART.sub(r"\1", text.replace("\r\n", "\n"))
    lines = [
        "".join(char if char.isprintable() else " " for char in line) for line in text.split("\n")
    ]
    filled = [line for line in lines if line.strip()]
    if filled and sum(line.lstrip().startswith(">") for line in filled) * 2 > len(filled):
        lines = [re.sub(r"^(?:[ \t]*> ?)+", "", line) for line in lines]
    text = _PHONE.sub(r"\1[phone]", _SHARED.sub(_without_owner, "\n".join(lines)))
    text = _HOST.sub("[host]", _ANSWERED.sub("?\u00a0", text))
    return _PROMPT.sub("[user]@[host]", _SENT_TO.sub("[host]", text))


def _without_owner(match: re.Match[str]) -> str:
    """Return a path with `[user]` in place of the folders that may name a user or a project.

    Those of an installed package stay, and the last one if it may be a file or a model.
    """
    parts = re.split(r"(/|\\+)", match["folders"])
    last = len(parts) - 1
    for at in range(2, len(parts), 2):
        if re.fullmatch(r"(?:site|dist)-packages|python\d.*|vllm", parts[at]):
            break
        named = at < last or re.fullmatch(r"[a-z]+\.?", parts[at])
        named = named or re.fullmatch(r"(?:home|user)s?", parts[at - 2])
        if named and not _NO_OWNER.fullmatch(parts[at]) and not _FAMILY.search(parts[at]):
            parts[at] = "[user]"
    return match["root"] + "".join(parts)


def read_blocks(text: str) -> list[Block]:
    """Return the blocks of a cleaned text in order.

    A fence that is not closed ends with the text. Lines are cut at 10,000 characters.
    """
    blocks: list[Block] = []
    heading, lines, fenced = "", [""], False

    def close(*, code: bool) -> None:
        """Make a block of the lines so far, unless all are blank, and begin with no lines."""
        if any(line.strip() for line in lines):
            before = blocks[-1] if blocks and not blocks[-1].code else None
            blocks.append(Block(heading, before.lines[-1] if before else "", tuple(lines), code))
        lines.clear()

    for raw in (line[:LONGEST] for line in text.split("\n")):
        if _FENCE.match(raw) and (fenced or "`" not in raw.strip().lstrip("`~")):
            close(code=fenced)
            fenced = not fenced
            continue
        line = raw if fenced else _TAG.sub(" ", raw)
        if fenced:
            lines.append(line)
        elif not line.strip():
            close(code=False)
            if len(blocks) and (above := _title(blocks[-1])):
                heading = above
        elif line.startswith("#") and (title := _HEADING.fullmatch(line.strip())):
            close(code=False)
            heading = title["marked"] or heading
        else:
            lines.append(line)
    close(code=fenced)
    return blocks


def _title(block: Block) -> str:
    """Return the text of a paragraph that is a heading without `#`; "" for other blocks."""
    match = (
        None if block.code or len(block.lines) != 1 else _HEADING.fullmatch(block.lines[0].strip())
    )
    return (match["marked"] or match["bold"] or match["plain"]) if match else ""


def statements(blocks: Sequence[Block]) -> Iterator[str]:
    """Yield each distinct sentence, item or table row of the prose.

    Lines that a mail wrapped are joined. Sentences above 1,500 characters are left out.
    """
    seen: set[str] = set()
    for block in blocks:
        if block.code:
            continue
        items: list[str] = []
        for line in block.lines:
            if (
                items
                and not (
                    _ITEM.match(line) or (line.lstrip().startswith("-") and GLUED.search(line))
                )
                and not items[-1].startswith("|")
            ):
                items[-1] += f" {line.strip()}"
            else:
                items.append(line.strip())
        for item in items:
            for sentence in [item] if item.startswith("|") else _SENTENCE_END.split(item):
                if sentence.strip() and sentence not in seen and len(sentence) <= _LONGEST_SENTENCE:
                    seen.add(sentence)
                    yield sentence.strip()


_ENVIRONMENT = re.compile(r"(?im)\A.*environment|collect_env|^[ \t]*LD_LIBRARY_PATH=")


def environment(block: Block) -> bool:
    """Return True for a block of `collect_env`, or below the heading of the environment."""
    return _ENVIRONMENT.search("\n".join((block.heading, *block.lines))) is not None


def shortened(text: str, most: int = 120) -> str:
    """Return the text on one line, cut after `most` characters."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def with_public_stores(text: str, redacted: Callable[[str], str]) -> str:
    """Return the text as `redacted` returns it, but keep a model's name in the address of a store.

    In `s3://Qwen3-8B` it looks like a host.
    """
    # The bucket has the name of a model, or the store has only public models.
    return redacted(
        re.sub(
            r"\b(hf|(?:s3|gs|oss)(?=://(?=[\w.-]*[A-Z])(?=[\w.-]*\d)[\w-]+(?![\w./:@-])))://",
            "\\1:\0",
            text,
        )
    ).replace(":\0", "://")
