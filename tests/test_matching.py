"""Which scenario a death is, where two share a signature."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_repro.autopsy.diagnosis import Diagnosis, diagnose
from vllm_repro.autopsy.signature import How
from vllm_repro.catalogue import find
from vllm_repro.matching import matches

CHUNKED, UNRESERVED, MIN_TOKENS = map(find, ("tq-chunked-prefill", "tq-prefix-hit-unreserved", "min-tokens-stop-ids"))
DEATH = """\
Traceback (most recent call last):
  File "vllm/v1/attention/backends/turboquant_attn.py", line 600, in _prefill_attention
  File "vllm/v1/attention/backends/turboquant_attn.py", line 747, in _continuation_prefill
  File "vllm/v1/worker/workspace.py", line 110, in get_simultaneous
  File "vllm/v1/worker/workspace.py", line 157, in _ensure_workspace_size
AssertionError: Workspace is locked but allocation from 'turboquant_attn.py:747:_continuation_prefill' requires 16.00 MB, \
current size is 1.02 MB. Workspace growth is not allowed after locking.
"""


def dead_of(version: str | None) -> Diagnosis:
    return replace(diagnose(DEATH), vllm_version=version)


@pytest.mark.parametrize(
    ("version", "scenario"),
    [
        (None, CHUNKED),
        ("0.20.2rc1.dev35+g4845aee6b", CHUNKED),
        ("0.21.0", CHUNKED),
        ("0.23.0", CHUNKED),
        ("0.24.0", UNRESERVED),
        ("0.32.0", UNRESERVED),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_of_two_that_share_a_death_the_release_decides(version: str | None, scenario: object, turned: bool) -> None:
    known = [CHUNKED, UNRESERVED, MIN_TOKENS][:: -1 if turned else 1]
    assert [(match.scenario, match.how) for match in matches(dead_of(version), known)] == [(scenario, How.MATCH)]


def test_a_scenario_whose_twin_is_not_known_here_is_named() -> None:
    assert [match.scenario for match in matches(dead_of("0.21.0"), [UNRESERVED])] == [UNRESERVED]


def test_no_death_no_match() -> None:
    assert matches(diagnose("INFO:     Application startup complete."), [CHUNKED, UNRESERVED]) == []
