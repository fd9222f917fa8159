"""Sizes in tokens, relative to a flag or different in the lab."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.command.parse import parse
from vllm_repro.errors import ScenarioError
from vllm_repro.scenario.workload import flag, resolve, sized

COMMAND = parse("vllm serve m --max-num-batched-tokens 4k --block-size 32")


@given(st.integers(0, 9), st.integers(-99, 99))
def test_a_flags_size_follows_the_flag_everywhere(times: int, plus: int) -> None:
    size = flag("--block-size") * times + plus
    assert resolve(size, COMMAND) == resolve(size, COMMAND, in_lab=True) == 32 * times + plus


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(-99, 99), st.integers(1, 9))
def test_a_size_of_the_report_has_another_in_the_lab(tokens: int, lab: int, plus: int, times: int) -> None:
    size = (sized(tokens, lab=lab) + plus) * times
    assert resolve(size, COMMAND) == (tokens + plus) * times
    assert resolve(size, COMMAND, in_lab=True) == (lab + plus) * times


def test_sizes_read_as_they_are_meant() -> None:
    assert str(flag("--block-size") * 2 - 3) == "2 x --block-size - 3"
    assert str(sized(90_109, lab=5_693) - 3) == "90106 (in the lab 5690)"


def test_what_is_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match="1 or more"):
        sized(90_109, lab=0)
    with pytest.raises(ValueError, match="as it is written on the command line"):
        flag("block-size")
    with pytest.raises(ScenarioError, match="does not carry"):
        resolve(flag("--max-model-len"), COMMAND)
