from __future__ import annotations

import pytest

from vllm_repro.client.answer import DEAD_MESSAGE, Answer


@pytest.mark.parametrize(
    ("status", "kind", "named"),
    [(500, "body", True), (503, "body", True), (200, "event", True), (400, "body", False), (400, "event", False)],
)
def test_only_a_failure_of_the_server_names_a_dead_engine(status: int, kind: str, named: bool) -> None:
    """A 400 may quote the prompt that it refuses."""
    answer = Answer(sent=1.0, ended=2.0, status=status, error=f"bad prompt: {DEAD_MESSAGE}", error_kind=kind)
    assert answer.names_dead_engine is named
