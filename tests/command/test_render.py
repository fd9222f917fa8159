from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.command.drawn import commands
from tests.command.test_parse import REPORTED
from vllm_repro.command.command import ServeCommand
from vllm_repro.command.parse import parse
from vllm_repro.command.render import render_serve


@pytest.mark.parametrize("name", REPORTED)
def test_a_reported_command_is_read_back(name: str) -> None:
    command = parse(REPORTED[name])
    assert parse(render_serve(command)).argv() == command.argv()


@settings(max_examples=60)
@given(command=commands())
def test_any_command_is_read_back(command: ServeCommand) -> None:
    again = parse(render_serve(command))
    assert again == command
    assert again.argv() == command.argv()


def test_secrets_are_left_to_the_caller() -> None:
    text = render_serve(parse("HF_TOKEN=hf_abc A='b c' vllm serve m --port 1"))
    assert text.split(" \\\n") == ['HF_TOKEN="$HF_TOKEN"', "A='b c'", "vllm serve m", "  --port 1"]
