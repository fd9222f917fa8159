"""Files of vLLM that the processes of an environment opened, as they log it themselves.

`vllm_repro_opened` runs at the start of each process of the environment, also of those that are killed later.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["log_opened", "opened_files"]

_LOG = "vllm_repro_opened.txt"

_HOOK = """import os, sys
log = os.path.join(os.path.dirname(os.path.abspath(__file__)), {log!r})
seen = set()
def hook(event, args):
    if event != "open" or not isinstance(args[0], (str, bytes)):
        return
    _, below, name = os.fsdecode(args[0]).rpartition("/vllm/")
    if below and name not in seen:
        seen.add(name)
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, os.fsencode(name) + b"\\n")
        os.close(file)
sys.addaudithook(hook)
"""


def log_opened(packages: Path) -> None:
    """Make each process of the environment with these packages log the files of `vllm/` that it opens."""
    (packages / "vllm_repro_opened.py").write_text(_HOOK.format(log=_LOG), encoding="utf-8")
    (packages / "vllm_repro_opened.pth").write_text("import vllm_repro_opened\n", encoding="utf-8")


def opened_files(packages: Path) -> frozenset[str]:
    """Return the files as in `vllm/envs.py`; none if none are known. A compiled file stands for its source."""
    try:
        names = (packages / _LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return frozenset()
    return frozenset("vllm/" + re.sub(r"__pycache__/([^./]+)\.[^/]*$", r"\1.py", name) for name in names)
