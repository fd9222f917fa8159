"""A command written back, as a shell line, as `docker run` and as a compose file; what is written is read as the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml
from hypothesis import given, settings

from tests.command.drawn import commands
from tests.command.texts import REPORTED, reported
from vllm_repro.command.command import ServeCommand, parse, render_compose, render_docker, render_serve

Render = Callable[[ServeCommand], str]
RENDERERS: list[Render] = [render_serve, render_docker, render_compose]


def assert_read_again(render: Render, command: ServeCommand) -> None:
    again = parse(render(command))
    assert (again.model, again.flags) == (command.model, command.flags)
    assert again.argv() == command.argv()


@pytest.mark.parametrize("name", REPORTED)
@pytest.mark.parametrize("render", RENDERERS)
def test_each_is_written_back_and_read_again(name: str, render: Render) -> None:
    assert_read_again(render, parse(reported(name)))


@pytest.mark.parametrize("render", RENDERERS)
@settings(max_examples=150)
@given(command=commands())
def test_what_is_written_is_read_again(render: Render, command: ServeCommand) -> None:
    assert_read_again(render, command)


def test_secrets_are_left_to_the_caller() -> None:
    command = parse("HF_TOKEN=hf_abc vllm serve m")
    for render in RENDERERS:
        assert "hf_abc" not in render(command)
    assert 'HF_TOKEN="$HF_TOKEN"' in render_serve(command)


def test_compose_says_what_it_cannot_say() -> None:
    text = render_compose(parse("docker run --privileged --mount type=bind,src=/a,dst=/b,ro i --port 1"))
    assert text.startswith("# not said here: --privileged")
    service = yaml.safe_load(text)["services"]["vllm"]
    assert service["volumes"] == [{"type": "bind", "source": "/a", "target": "/b", "read_only": True}]


def test_a_plain_command_gets_a_plain_container() -> None:
    text = render_docker(parse("vllm serve m --port 9"), image="vllm/vllm-openai:v0.23.0")
    assert text.splitlines()[1:4] == [
        "  --gpus all \\",
        "  -p 127.0.0.1:9:9 \\",
        "  vllm/vllm-openai:v0.23.0 \\",
    ]
