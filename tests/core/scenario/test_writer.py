from __future__ import annotations

import ast
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.scenario.reader import read
from vllm_repro.scenario.writer import ScenarioWriter, command_text, literal, one_a_line

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
