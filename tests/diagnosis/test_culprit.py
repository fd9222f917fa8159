"""With which rank a death over several nodes began."""

from __future__ import annotations

import pytest

from vllm_repro.diagnosis.culprit import NodeLog, culprits, lost_worker
from vllm_repro.diagnosis.diagnosis import Phase, diagnose
from vllm_repro.diagnosis.log_text import read_lines
from vllm_repro.diagnosis.signature import Signature

SIGNATURE = Signature("AssertionError", "Workspace is locked", ("_forward_prefill",), Phase.REQUEST)
LOCKED = 'Traceback (most recent call last):\n  File "vllm/a.py", line 1, in _forward_prefill\nAssertionError: Workspace is locked\n'
CLOSED = 'Traceback (most recent call last):\n  File "vllm/b.py", line 1, in all_reduce\nRuntimeError: Connection closed by peer\n'


def node(number: int, text: str) -> NodeLog:
    return NodeLog(number, diagnose(text), lost_worker(read_lines(text)))


@pytest.mark.parametrize(
    ("head", "other", "ranks"),
    [
        (
            CLOSED,
            "ERROR x Worker proc VllmWorker-1 died unexpectedly (exit code: None), shutting down executor.\n",
            (1,),
        ),
        ("ERROR x Worker proc VllmWorker-0 died unexpectedly (exit code: -9)\n", CLOSED, (0,)),
        (LOCKED, LOCKED, (0, 1)),
        (CLOSED, LOCKED, (1,)),
        (LOCKED, CLOSED, (0,)),
        # With two workers a node the second node's first one is worker 2, and its log is that of node 1.
        (CLOSED, "ERROR x Worker proc VllmWorker-2 died unexpectedly, shutting down executor.\n", (1,)),
        (CLOSED, "", (0,)),
        ("", "", ()),
    ],
)
def test_who_was_first(head: str, other: str, ranks: tuple[int, ...]) -> None:
    assert culprits([node(0, head), node(1, other)], SIGNATURE) == ranks


def test_one_node_has_no_ranks_to_name() -> None:
    assert culprits([], SIGNATURE) == ()
