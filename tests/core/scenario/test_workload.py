"""Words of a workload: accepted and refused values."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.command.parse import parse
from vllm_repro.errors import ScenarioError
from vllm_repro.scenario.reader import read
from vllm_repro.scenario.workload import (
    Size,
    at_once,
    chat,
    completion,
    conversation,
    flag,
    requests_of,
    resolve,
    sized,
    together,
)
from vllm_repro.scenario.writer import ScenarioWriter, command_text, literal, one_a_line

COMMAND = parse("vllm serve m --max-num-batched-tokens 4k --block-size 32")
TOOL = {"type": "function", "function": {"name": "read_file", "parameters": {"required": ["path"]}}}


@given(st.integers(1, 5000), st.lists(st.integers(1, 500), min_size=1, max_size=8))
def test_each_turn_is_as_long_as_all_before_it(first: int, adds: list[int]) -> None:
    turns = conversation(first=first, adds=adds).turns
    assert [turn.prompt for turn in turns] == [first + sum(adds[:n]) for n in range(len(adds) + 1)]
    assert {turn.conversation for turn in turns} == {"turn"}
    assert [turn.name for turn in turns] == [f"turn {n}" for n in range(1, len(turns) + 1)]


def test_a_turn_may_be_sized_by_a_flag() -> None:
    command = parse("vllm serve m --max-num-batched-tokens 512")
    turns = conversation(first=flag("--max-num-batched-tokens") + 10, adds=[5, 6]).turns
    assert [
        resolve(turn.prompt, command) for turn in turns if isinstance(turn.prompt, int | Size)
    ] == [522, 527, 533]


def test_requests_come_in_order_whatever_holds_them() -> None:
    steps = (chat(prompt=1, name="a"), together(chat(prompt=1, name="b"), chat(prompt=1, name="c")))
    names = [
        request.name for request in requests_of((*steps, conversation(first=9, adds=[1], name="d")))
    ]
    assert names == ["a", "b", "c", "d 1", "d 2"]


def test_tools_go_with_every_turn() -> None:
    listed = conversation(first=9, adds=[1], tools=[TOOL])
    function: Any = TOOL["function"]
    frozen = {**TOOL, "function": {**function, "parameters": {"required": ("path",)}}}
    assert listed == conversation(first=9, adds=(1,), tools=(frozen,))
    assert all(turn.fields["tools"] for turn in listed.turns)
    assert "tools" not in conversation(first=9, adds=[1]).turns[0].fields


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: conversation(first=9, adds=[]), "adds="),
        (lambda: conversation(first=9, adds=[1, 0]), "adds="),
        (lambda: conversation(first=0, adds=[1]), "0 tokens"),
        (lambda: completion(prompt=10, shared=11), "cannot share 11"),
        (lambda: completion(prompt="hello", shared=2), "stated as a size"),
        (lambda: sized(90_109, lab=0), "1 or more"),
        (lambda: at_once(3, prompt=[], spread=True), "sizes of its prompts"),
        (lambda: flag("block-size"), "as it is written on the command line"),
        (lambda: resolve(flag("--max-model-len"), COMMAND), "does not carry"),
    ],
)
def test_what_cannot_be_sent_is_refused(make: Any, message: str) -> None:
    with pytest.raises((ValueError, ScenarioError), match=message):
        make()


@given(st.integers(0, 9), st.integers(-99, 99))
def test_a_flags_size_follows_the_flag_everywhere(times: int, plus: int) -> None:
    size = flag("--block-size") * times + plus
    assert resolve(size, COMMAND) == resolve(size, COMMAND, in_lab=True) == 32 * times + plus


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(-99, 99), st.integers(1, 9))
def test_a_size_of_the_report_has_another_in_the_lab(
    tokens: int, lab: int, plus: int, times: int
) -> None:
    size = (sized(tokens, lab=lab) + plus) * times
    assert resolve(size, COMMAND) == (tokens + plus) * times
    assert resolve(size, COMMAND, in_lab=True) == (lab + plus) * times


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (flag("--block-size") * 2 - 3, "2 x --block-size - 3"),
        (sized(90_109, lab=5_693) - 3, "90106 (in the lab 5690)"),
        (
            completion(prompt=385, shared=256, name="again"),
            "again of 385 tokens, 256 of them shared",
        ),
    ],
)
def test_sizes_read_as_they_are_meant(step: Any, text: str) -> None:
    assert str(step) == text


DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(DATA)
def test_a_literal_is_the_same_data_in_one_line(value: object) -> None:
    written = literal(value)
    assert ast.literal_eval(written) == value
    assert "\n" not in written


@given(st.text())
def test_a_command_keeps_its_text(text: str) -> None:
    value = ast.literal_eval(command_text(text).text)
    assert value in (text, "\n" + "\n".join(f"    {line}" for line in text.split("\n")) + "\n")


@given(st.text(), st.text())
def test_a_file_is_read_back(title: str, about: str) -> None:
    """Check fields in their order, imports of the words used, and comments above their field."""
    about = f"A bug. {about}"
    file = ScenarioWriter()
    file.put("id", "made-up")
    file.comment("GAP: the number")
    file.put("issue", "vllm-project/vllm#1")
    file.put("title", title)
    file.put("command", command_text("vllm serve m\n--seed 1"))
    file.put(
        "model",
        file.block("Model", "m/m", heads=2, kv_heads=1, head_dim=8, layers=1, vocab_size=64),
    )
    file.put("needs", file.call("Needs", gpus=1))
    file.put("status", file.call("Status", bad="==0.32.0"))
    file.put("try_with", "0.32.0")
    file.put("workload", one_a_line([file.call("chat", prompt=7, max_tokens=2)]))
    file.put("trigger", file.call("prefill_over", 6))
    file.put("arms", [file.call("arm", "reported", file.word("hangs"))])
    text = file.text(about)
    assert '    # GAP: the number\n    issue="vllm-project/vllm#1",\n' in text
    scenario, problems = read(Path("made_up.py"), text)
    assert [problem for problem in problems if "title" not in problem.text] == []
    assert scenario is None or (scenario.title, scenario.reported().get("--seed")) == (title, "1")
