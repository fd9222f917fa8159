"""A command as people paste it from a shell: prompts, fences, quotes, lines with and without a backslash."""

from __future__ import annotations

import pytest

from tests.command.texts import PLAIN, REPORTED, assert_refused, reported, said
from vllm_repro.command.command import parse


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve org/m --max-model-len 4096 --enforce-eager",
        "$ vllm serve org/m --max-model-len 4096 \\\n  --enforce-eager",
        "(venv) me@box:~/src$ vllm serve org/m --max-model-len 4096 --enforce-eager",
        "```bash\nsudo vllm serve org/m --max-model-len 4096 --enforce-eager\n```",
        "> vllm serve org/m\n> --max-model-len 4096\n> --enforce-eager",
        "vllm serve org/m # the model\n# and the flags\n--max-model-len 4096 --enforce-eager",
        "vllm serve org/m --max-model-len\n4096\n--enforce-eager",
        "cd / && vllm serve org/m --max-model-len 4096 --enforce-eager 2>&1 | tee log",
        "nohup /opt/bin/vllm serve org/m --max-model-len 4096 --enforce-eager > log 2>&1 &",
        "vllm serve org/m \u2013-max-model-len 4096 \u2014enforce-eager",
        "vllm serve org/m --max_model_len 4096 --enforce_eager\ncurl localhost:8000/health",
        "python3 -m vllm.entrypoints.openai.api_server org/m --max-model-len 4096 --enforce-eager",
        "vllm serve org/m --max-model-len 4096 --enforce-eager \\",
        "bash -c 'vllm serve org/m --max-model-len 4096 --enforce-eager'",
    ],
)
def test_all_say_the_same(text: str) -> None:
    assert said(text) == PLAIN


@pytest.mark.parametrize("name", REPORTED)
def test_backslashes_make_no_difference(name: str) -> None:
    text = reported(name)
    bare = text.replace("\\\n", "\n")
    lines = bare.rstrip("\n").splitlines()
    with_backslashes = "".join(f"{line} \\\n" for line in lines if not line.startswith("#"))
    assert parse(bare) == parse(text)
    if not text.startswith("-"):
        assert parse(with_backslashes) == parse(text)
        assert parse(with_backslashes.replace("\\\n", "\\  \r\n")) == parse(text)


def test_variables_come_from_assignments_exports_and_env() -> None:
    text = "export A=1\nB='x y'\nsudo -E env C=3 D= vllm serve org/m --port 1"
    assert parse(text).env == (("A", "1"), ("B", "x y"), ("C", "3"), ("D", ""))


def test_the_same_command_twice_is_one() -> None:
    assert parse("vllm serve m --port 1\n\nvllm serve m --port=1").model == "m"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("vllm serve m\n--chat-template 'a\n--port 1", 2, "never closed"),
        ('vllm serve m --x "a', 1, "never closed"),
        ("\npip install vllm", 2, "no server command"),
        ("vllm serve m --port 1\nvllm serve m --port 2", 2, "two different server commands"),
    ],
)
def test_each_points_at_its_line(text: str, line: int, message: str) -> None:
    assert_refused(text, line, message)
