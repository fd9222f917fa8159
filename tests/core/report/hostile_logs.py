"""Hostile or huge logs in a run's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.report_examples import REHEARSAL

MARKUP = """<script>window.hacked = "script"</script>
</pre></details></main></body></html><script>window.hacked = "end"</script>
</script><script>window.hacked = "close"</script> </style> --> <!-- ]]> <![CDATA[
<img src=x onerror="window.hacked='img'"> <svg onload="window.hacked='svg'"> <iframe srcdoc="<script>parent.hacked=1</script>">
" onmouseover="window.hacked='attribute'" ' onfocus='window.hacked=1' autofocus x="
{{ 7 * 7 }} {% for x in y %} {# comment #} ${7*7} <%= 7*7 %> &lt;b&gt; &#60;b&#62;
<base href="https://evil.example/"> <meta http-equiv="refresh" content="0;url=https://evil.example/">
<link rel=stylesheet href=//evil.example>
\x1b[31mred\x1b[0m \x1b]8;;https://evil.example\x07link\x1b]8;;\x07 \x1b[2J \x00 \x08 \x9b31m \u202egnp.exe\u2066
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
        MARKUP.encode() * 20 + b"ERROR \xff\xfe\xc3( broken \xed\xa0\x80\nAssertionError: " + MARKUP.encode()
    )
    (logs / "eager-1.log").write_bytes(b"x" * (50 << 20))
    with (logs / "near-miss-129-1.log").open("wb") as file:
        line = b"(EngineCore pid=7) INFO 11-21 10:00:00 [core.py:1] " + MARKUP.splitlines()[1].encode() + b"\n"
        block = line * ((1 << 20) // len(line))
        for _ in range(200):
            file.write(block)
        file.write(b"ERROR the end\nAssertionError: late\n")
