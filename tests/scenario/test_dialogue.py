"""A growing chat: alternating speakers, and tool results after calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.scenario.dialogue import Dialogue

TOOL = {"type": "function", "function": {"name": "read_file", "parameters": {}}}


@given(st.integers(1, 8))
def test_without_tools_user_and_assistant_take_turns(turns: int) -> None:
    dialogue = Dialogue()
    for _ in range(turns):
        dialogue.take({**dialogue.opening, "content": "x"})
    assert [message["role"] for message in dialogue.said] == ["user", "assistant"] * turns
    assert not any("tool_calls" in message for message in dialogue.said)


@given(st.integers(2, 8))
def test_with_tools_every_result_answers_the_call_before_it(turns: int) -> None:
    dialogue = Dialogue([TOOL])
    for _ in range(turns):
        dialogue.take({**dialogue.opening, "content": "x"})
    assert [message["role"] for message in dialogue.said] == ["user", "assistant", *["tool", "assistant"] * (turns - 1)]
    for reply, result in zip(dialogue.said[1::2], dialogue.said[2::2], strict=False):
        (call,) = reply["tool_calls"]
        assert call["function"]["name"] == "read_file"
        assert result["tool_call_id"] == call["id"]
    assert len({reply["tool_calls"][0]["id"] for reply in dialogue.said[1::2]}) == turns
