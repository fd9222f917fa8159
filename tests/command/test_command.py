"""The four reported commands as they are read, what a command is asked, and how an arm edits it."""

from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.command.drawn import flags
from tests.command.texts import reported
from vllm_repro.command.command import Container, Flag, ServeCommand, parse
from vllm_repro.command.flag_syntax import is_switch
from vllm_repro.errors import CommandError

COMMAND = parse("vllm serve m --port 1 --enable-prefix-caching -cc.mode 3 --seed=7")


def test_chunked_prefill_has_a_flag_a_line_and_no_backslash() -> None:
    command = parse(reported("41726"))
    assert command.model == "/home/yk/AI/Models/models/qwen3.5-9b-nvfp4-ptq"
    assert command.container is None
    assert len(command.flags) == 12
    assert command.number("--max-num-batched-tokens") == 4096
    assert command.get("kv_cache_dtype") == "turboquant_4bit_nc"
    assert command.has("--language-model-only")
    assert json.loads(command.get("--default-chat-template-kwargs") or "") == {"enable_thinking": True}


def test_mtp_is_a_docker_run() -> None:
    command = parse(reported("40807"))
    assert command.model == "Lorbus/Qwen3.6-27B-int4-AutoRound"
    assert command.container == Container(
        image="vllm/vllm-openai:nightly",
        gpus="all",
        ports=("8000:8000",),
        volumes=("/path/to/hf-cache:/root/.cache/huggingface",),
    )
    assert command.argv()[:2] == ("--model", "Lorbus/Qwen3.6-27B-int4-AutoRound")
    assert json.loads(command.get("--speculative-config") or "")["num_speculative_tokens"] == 3


def test_two_nodes_keep_the_placeholder_and_the_short_form() -> None:
    command = parse(reported("41700"))
    assert command.model == "pastapaul/DeepSeek-V4-Flash-W4A16-FP8"
    assert command.get("--master-addr") == "<HEAD_IP>"
    assert command.number("--tensor-parallel-size") == 2
    assert "-tp" in command.argv()
    assert "--headless" not in command.argv()


def test_a_preview_branch_sets_a_variable_and_runs_from_a_path() -> None:
    command = parse(reported("41700-preview"))
    assert command.model == "deepseek-ai/DeepSeek-V4-Flash"
    assert command.env == (("PYTHONPATH", "~/tmp/vllm-bench-ds4-sm120-full"),)


def test_offload_is_a_yaml_list_of_flags() -> None:
    command = parse(reported("42085"))
    assert command.model is None
    assert len(command.flags) == 12
    assert json.loads(command.get("--kv-transfer-config") or "")["kv_role"] == "kv_both"
    assert command.enabled("--disable-hybrid-kv-cache-manager") is False
    assert command.argv() == tuple(line[2:] for line in reported("42085").splitlines())


def test_the_last_one_wins() -> None:
    command = parse("vllm serve m --port 1 --enable-prefix-caching --port 2 --no-enable-prefix-caching")
    assert command.get("port") == "2"
    assert not command.has("--enable-prefix-caching")
    assert command.has("--no-enable-prefix-caching")
    assert command.enabled("enable_prefix_caching") is False
    assert command.enabled("--enforce-eager") is None


def test_replacing_keeps_the_place() -> None:
    edited = COMMAND.with_flags("--port 2", "--no-enable-prefix-caching", "--enforce-eager")
    words = "m --port 2 --no-enable-prefix-caching -cc.mode 3 --seed=7 --enforce-eager"
    assert edited.argv() == tuple(words.split())


def test_one_text_may_hold_several_flags() -> None:
    assert COMMAND.with_flags("--port 2 --seed 8").argv()[1:3] == ("--port", "2")


def test_removing_takes_the_keys_below() -> None:
    left = COMMAND.without("--compilation-config", "seed")
    assert left.argv() == ("m", "--port", "1", "--enable-prefix-caching")


def test_removing_what_is_not_there_names_near_ones() -> None:
    with pytest.raises(CommandError) as caught:
        COMMAND.without("--enable-prefix-cache")
    assert "--enable-prefix-caching" in caught.value.hint


def test_the_model_is_replaced_where_it_stood() -> None:
    command = parse("docker run i --port 1 --model=a --seed 2").with_model("b")
    assert command.argv() == ("--port", "1", "--model=b", "--seed", "2")
    assert parse("vllm serve a --port 1").with_model("b").argv() == ("b", "--port", "1")
    assert command.without("--port").argv() == ("--model=b", "--seed", "2")


def test_environment_is_added() -> None:
    assert COMMAND.with_env(A="1").with_env(A="2", B="3").env == (("A", "2"), ("B", "3"))


def test_a_bare_word_is_no_flag() -> None:
    with pytest.raises(CommandError, match="is not a flag"):
        COMMAND.with_flags("enforce-eager")


@settings(max_examples=100)
@given(st.lists(flags(), max_size=4), flags())
def test_an_edit_sets_exactly_its_flag(chosen: list[Flag], new: Flag) -> None:
    command = ServeCommand("m", tuple(chosen))
    edited = command.with_flags(shlex.join(new.words()))
    assert [flag for flag in edited.flags if flag.name == new.name] == [new]
    others = [flag for flag in command.flags if flag.name != new.name]
    assert [flag for flag in edited.flags if flag.name != new.name] == others
    if is_switch(new.name):
        assert edited.has(new.name)
    assert not edited.without(new.name).has(new.name)
