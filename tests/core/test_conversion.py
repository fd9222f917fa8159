"""Records made from plain data in several threads at once."""

from __future__ import annotations

import subprocess
import sys

FIRST_USES = """
import sys, threading
from dataclasses import make_dataclass
from vllm_repro.conversion import convert

sys.setswitchinterval(1e-6)
NAMES = "abcdefgh"
LEAF = dict.fromkeys(NAMES, 1)
BRANCH = dict.fromkeys(NAMES, LEAF)


def new_types():
    leaf = make_dataclass("Leaf", [(name, int) for name in NAMES])
    branch = make_dataclass("Branch", [(name, leaf) for name in NAMES])
    return {branch: BRANCH, leaf: LEAF, leaf | None: LEAF}


def first_uses(number):
    for types in rounds:
        together.wait()
        kind = list(types)[number % len(types)]
        convert(types[kind], kind)


rounds = [new_types() for _ in range(400)]
together = threading.Barrier(8)
threads = [threading.Thread(target=first_uses, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_may_use_a_type_for_the_first_time_at_once() -> None:
    # In a process of its own: without the lock it ends with a segmentation fault.
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
