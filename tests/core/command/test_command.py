from __future__ import annotations

import json
import re
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.command.drawn import commands, flags
from tests.core.command.test_parse import REPORTED
from vllm_repro.command.command import ServeCommand
from vllm_repro.command.flags import Flag, is_switch
from vllm_repro.command.parse import parse
from vllm_repro.errors import CommandError

COMMAND = parse("vllm serve m --port 1 --enable-prefix-caching -cc.mode 3 --seed=7")
SPELLED = parse("docker run i --port 1 --model=a --seed 2")


def test_the_last_one_wins() -> None:
    command = parse(
        "vllm serve m --port 1 --enable-prefix-caching --port 2 --no-enable-prefix-caching"
    )
    assert (command.get("port"), command.enabled("enable_prefix_caching")) == ("2", False)
    names = ("--enable-prefix-caching", "--no-enable-prefix-caching")
    assert [command.has(name) for name in names] == [False, True]
    assert command.enabled("--enforce-eager") is None


@pytest.mark.parametrize(
    ("edited", "argv"),
    [
        # A replacement keeps its place.
        (
            COMMAND.with_flags("--port 2 --no-enable-prefix-caching", "--enforce-eager"),
            "m --port 2 --no-enable-prefix-caching -cc.mode 3 --seed=7 --enforce-eager",
        ),
        # Keys below a removed flag go too.
        (COMMAND.without("--compilation-config", "seed"), "m --port 1 --enable-prefix-caching"),
        (SPELLED.with_model("b"), "--port 1 --model=b --seed 2"),
        (SPELLED.with_flags("--model c"), "--port 1 --model c --seed 2"),
        (parse("vllm serve a --port 1").with_model("b"), "b --port 1"),
        (parse("vllm serve a --port 1").with_flags("--model b"), "b --port 1"),
    ],
)
def test_an_edited_command(edited: ServeCommand, argv: str) -> None:
    assert edited.argv() == tuple(argv.split())
    assert edited.model == re.search(r"^(?!--)\w+|(?<=--model.)\w+", argv)[0]  # type: ignore[index]


def test_removing_a_missing_flag_names_near_ones() -> None:
    with pytest.raises(CommandError) as caught:
        COMMAND.without("--enable-prefix-cache")
    assert "--enable-prefix-caching" in caught.value.hint


def test_a_bare_word_is_no_flag() -> None:
    with pytest.raises(CommandError, match="is not a flag"):
        COMMAND.with_flags("enforce-eager")


def test_json_values_are_kept_word_for_word() -> None:
    command = parse("vllm serve m --hf-overrides '{\"a\": [1, 2]}'")
    assert json.loads(command.get("hf_overrides") or "") == {"a": [1, 2]}


@settings(max_examples=100)
@given(st.lists(flags(), max_size=4), flags())
def test_an_edit_sets_exactly_its_flag(chosen: list[Flag], new: Flag) -> None:
    command = ServeCommand(model_argument="m", flags=tuple(chosen))
    edited = command.with_flags(shlex.join(new.words()))
    assert [flag for flag in edited.flags if flag.name == new.name] == [new]
    others = [flag for flag in command.flags if flag.name != new.name]
    assert [flag for flag in edited.flags if flag.name != new.name] == others
    if is_switch(new.name):
        assert edited.has(new.name)
    assert not edited.without(new.name).has(new.name)


@pytest.mark.parametrize("name", REPORTED)
def test_a_reported_command_is_read_back(name: str) -> None:
    command = parse(REPORTED[name])
    assert parse(command.render()).argv() == command.argv()


@settings(max_examples=60)
@given(command=commands())
def test_any_command_is_read_back(command: ServeCommand) -> None:
    again = parse(command.render())
    assert again == command
    assert again.argv() == command.argv()


def test_secrets_are_left_to_the_caller() -> None:
    text = parse("HF_TOKEN=hf_abc A='b c' vllm serve m --port 1").render()
    assert text.split(" \\\n") == ['HF_TOKEN="$HF_TOKEN"', "A='b c'", "vllm serve m", "  --port 1"]
