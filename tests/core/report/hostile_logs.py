"""Hostile texts, and hostile or huge logs in a run's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.report_examples import REHEARSAL

HOSTILE = [
    "```",
    "````````````````````````````````````",
    "`" * 40_000,
    "~~~\n~~~",
    "</details></details>\n\n# out",
    "<!-- swallowed",
    "<script>alert(1)</script> <img src=x onerror=y> <b>bold</b>",
    "@vllm-project/maintainers and @user, see #123, vllm-project/vllm#1, GH-12",
    "https://github.com/vllm-project/vllm/issues/1 http://x.y/z www.github.com",
    "[a](https://evil.example) ![b](https://evil.example/c.png) [d]: https://evil.example",
    "a | b | c\n|---|---|",
    "\x1b[31mred\x1b[0m \x00 \ud800 \u202eevil\u2066 \r\n\r x \x85 \u2028 y",
    "$$x$$ **bold** _it_ ~~gone~~ &amp; &#64;user \\@user",
    "- list\n1. one\n> quote\n# head\n===\n---\n    code",
    "x" * 1_000_000,
    "语言模型" * 30_000,
    "`@user` ``#1`` `<b>`",
]

MARKUP = """<script>window.hacked = "script"</script>
</pre></details></main></body></html><script>window.hacked = "end"</script>
</script><script>window.hacked = "close"</script> </style> --> <!-- ]]> <![CDATA[
<img src=x onerror="window.hacked='img'"> <svg onload="window.hacked='svg'">
<iframe srcdoc="<script>parent.hacked=1</script>">
" onmouseover="window.hacked='attribute'" ' onfocus='window.hacked=1' autofocus x="
{{ 7 * 7 }} {% for x in y %} {# comment #} ${7*7} <%= 7*7 %> &lt;b&gt; &#60;b&#62;
<base href="https://evil.example/"> <meta http-equiv="refresh" content="0;url=https://evil.example/">
<link rel=stylesheet href=//evil.example>
\x1b[31mred\x1b[0m \x1b]8;;https://evil.example\x07link\x1b]8;;\x07 \x1b[2J \x00 \x08
\x9b31m \u202egnp.exe\u2066
"""


def run_folder(folder: Path) -> Path:
    """Make a run folder with the example's journal and no log."""
    (folder / "logs").mkdir(parents=True)
    shutil.copy(REHEARSAL / "journal.jsonl", folder / "journal.jsonl")
    return folder


def write_hostile(folder: Path) -> None:
    """Write markup, broken UTF-8, a line of 50 MB, and 200 MB in all into the first arms' logs."""
    logs = folder / "logs"
    (logs / "reported-1.log").write_bytes(
        MARKUP.encode() * 20
        + b"ERROR \xff\xfe\xc3( broken \xed\xa0\x80\nAssertionError: "
        + MARKUP.encode()
    )
    (logs / "eager-1.log").write_bytes(b"x" * (50 << 20))
    with (logs / "near-miss-129-1.log").open("wb") as file:
        line = (
            b"(EngineCore pid=7) INFO 11-21 10:00:00 [core.py:1] "
            + MARKUP.splitlines()[1].encode()
            + b"\n"
        )
        block = line * ((1 << 20) // len(line))
        for _ in range(200):
            file.write(block)
        file.write(b"ERROR the end\nAssertionError: late\n")
