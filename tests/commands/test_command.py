from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro.commands.command import (
    Container,
    Flag,
    ServeCommand,
    parse,
    render_compose,
    render_docker,
    render_serve,
)
from vllm_repro.commands.flag_syntax import is_switch
from vllm_repro.errors import CommandError

DATA = Path(__file__).parents[1] / "data" / "commands"
REPORTED = sorted(path.name for path in DATA.glob("*.txt"))
Render = Callable[[ServeCommand], str]
RENDERERS: list[Render] = [render_serve, render_docker, render_compose]


def reported(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


class TestReportedCommands:
    def test_chunked_prefill_has_a_flag_a_line_and_no_backslash(self) -> None:
        command = parse(reported("41726.txt"))
        assert command.model == "/home/yk/AI/Models/models/qwen3.5-9b-nvfp4-ptq"
        assert command.container is None
        assert len(command.flags) == 12
        assert command.number("--max-num-batched-tokens") == 4096
        assert command.get("kv_cache_dtype") == "turboquant_4bit_nc"
        assert command.has("--language-model-only")
        assert json.loads(command.get("--default-chat-template-kwargs") or "") == {"enable_thinking": True}

    def test_mtp_is_a_docker_run(self) -> None:
        command = parse(reported("40807.txt"))
        assert command.model == "Lorbus/Qwen3.6-27B-int4-AutoRound"
        assert command.container == Container(
            image="vllm/vllm-openai:nightly",
            gpus="all",
            ports=("8000:8000",),
            volumes=("/path/to/hf-cache:/root/.cache/huggingface",),
        )
        assert command.argv()[:2] == ("--model", "Lorbus/Qwen3.6-27B-int4-AutoRound")
        assert json.loads(command.get("--speculative-config") or "")["num_speculative_tokens"] == 3

    def test_two_nodes_keep_the_placeholder_and_the_short_form(self) -> None:
        command = parse(reported("41700.txt"))
        assert command.model == "pastapaul/DeepSeek-V4-Flash-W4A16-FP8"
        assert command.get("--master-addr") == "<HEAD_IP>"
        assert command.number("--tensor-parallel-size") == 2
        assert "-tp" in command.argv()
        assert "--headless" not in command.argv()

    def test_a_preview_branch_sets_a_variable_and_runs_from_a_path(self) -> None:
        command = parse(reported("41700-preview.txt"))
        assert command.model == "deepseek-ai/DeepSeek-V4-Flash"
        assert command.env == (("PYTHONPATH", "~/tmp/vllm-bench-ds4-sm120-full"),)

    def test_offload_is_a_yaml_list_of_flags(self) -> None:
        command = parse(reported("42085.txt"))
        assert command.model is None
        assert len(command.flags) == 12
        assert json.loads(command.get("--kv-transfer-config") or "")["kv_role"] == "kv_both"
        assert command.enabled("--disable-hybrid-kv-cache-manager") is False
        assert command.argv() == tuple(line[2:] for line in reported("42085.txt").splitlines())

    @pytest.mark.parametrize("name", REPORTED)
    def test_backslashes_make_no_difference(self, name: str) -> None:
        text = reported(name)
        bare = text.replace("\\\n", "\n")
        lines = bare.rstrip("\n").splitlines()
        with_backslashes = "".join(f"{line} \\\n" for line in lines if not line.startswith("#"))
        assert parse(bare) == parse(text)
        if not text.startswith("-"):
            assert parse(with_backslashes) == parse(text)
            assert parse(with_backslashes.replace("\\\n", "\\  \r\n")) == parse(text)

    @pytest.mark.parametrize("name", REPORTED)
    @pytest.mark.parametrize("render", RENDERERS)
    def test_each_is_written_back_and_read_again(self, name: str, render: Render) -> None:
        command = parse(reported(name))
        again = parse(render(command))
        assert (again.model, again.flags) == (command.model, command.flags)
        assert again.argv() == command.argv()


class TestLayouts:
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
            "podman run --rm -it -p8000:8000 image:1 org/m --max-model-len 4096 --enforce-eager",
            "docker run --entrypoint vllm image:1 serve org/m --max-model-len 4096 --enforce-eager",
            "docker run image:1 vllm serve org/m --max-model-len 4096 --enforce-eager",
            "docker run i bash -lc 'true && vllm serve org/m --max-model-len 4096 --enforce-eager'",
            "docker run --entrypoint sh i -c 'exec vllm serve org/m --max-model-len 4096 --enforce-eager'",
            "vllm serve org/m --max-model-len 4096 --enforce-eager \\",
            (
                "kind: Pod\nspec:\n  containers:\n  - image: sidecar\n  - image: vllm/vllm-openai\n"
                "    args: [org/m, --max-model-len, 4096, --enforce-eager]\n"
            ),
            "bash -c 'vllm serve org/m --max-model-len 4096 --enforce-eager'",
            "- org/m\n- --max-model-len\n- 4096\n- --enforce-eager",
            "- vllm\n- serve\n- org/m\n- --max-model-len=4096\n- --enforce-eager",
            (
                "services:\n  db: {image: postgres}\n  llm:\n    image: vllm/vllm-openai:v1\n"
                "    command: org/m --max-model-len 4096 --enforce-eager\n"
            ),
            "image: i\ncommand: >\n  --model org/m\n  --max-model-len 4096\n  --enforce-eager\n",
            "image: i\ncommand: [org/m, --max-model-len, 4096, --enforce-eager]\n",
            (
                "llm:\n  image: i\n  entrypoint: [python3, -m, vllm.entrypoints.openai.api_server]\n"
                "  command: [org/m, --max-model-len, '4096', --enforce-eager]\n"
            ),
            (
                "- name: pod\n  image: i\n  command: [vllm, serve]\n"
                "  args: [org/m, --max-model-len, '4096', --enforce-eager]\n"
            ),
            (
                "name: pod\nimage: i\ncommand: [/bin/sh, -c]\n"
                "args:\n  - vllm serve org/m --max-model-len 4096 --enforce-eager\n"
            ),
        ],
    )
    def test_all_say_the_same(self, text: str) -> None:
        command = parse(text)
        assert command.model == "org/m"
        assert command.flags == (Flag("--max-model-len", "4096"), Flag("--enforce-eager"))

    def test_variables_come_from_assignments_exports_and_env(self) -> None:
        text = "export A=1\nB='x y'\nsudo -E env C=3 D= vllm serve org/m --port 1"
        assert parse(text).env == (("A", "1"), ("B", "x y"), ("C", "3"), ("D", ""))

    def test_docker_options_are_read(self) -> None:
        command = parse(
            "docker run -d --gpus '\"device=0,1\"' --ipc=host --shm-size 16g -e HF_TOKEN -eA=b --init"
            " --ulimit memlock=-1 --network host --name v --runtime nvidia"
            " --mount type=bind,source=/a,target=/b --cap-add SYS_PTRACE img:1 --model m"
        )
        assert command.container == Container(
            image="img:1",
            gpus="device=0,1",
            mounts=("type=bind,source=/a,target=/b",),
            env=(("HF_TOKEN", "$HF_TOKEN"), ("A", "b")),
            shm_size="16g",
            ipc="host",
            network="host",
            name="v",
            ulimits=("memlock=-1",),
            init=True,
            runtime="nvidia",
            other=("-d", "--cap-add", "SYS_PTRACE"),
        )
        assert parse(render_docker(command)) == command
        assert command.flags == ()

    def test_compose_service_is_read(self) -> None:
        command = parse(
            """
            image: img:1
            command: ["--model", "m", "--chat-template", "a$$b"]
            environment: [HF_TOKEN, A=b]
            ports: ["8000:8000"]
            volumes: ["/a:/b:ro"]
            ipc: host
            shm_size: 8gb
            ulimits: {memlock: -1, nofile: {soft: 1, hard: 2}}
            deploy:
              resources: {reservations: {devices: [{device_ids: ["0", "3"], capabilities: [gpu]}]}}
            """
        )
        assert command.get("--chat-template") == "a$b"
        assert command.container == Container(
            image="img:1",
            gpus="device=0,3",
            ports=("8000:8000",),
            volumes=("/a:/b:ro",),
            env=(("HF_TOKEN", "$HF_TOKEN"), ("A", "b")),
            shm_size="8gb",
            ipc="host",
            ulimits=("memlock=-1", "nofile=1:2"),
        )
        assert parse(render_compose(command)) == command

    def test_unquoted_json_in_a_list_is_taken_as_text(self) -> None:
        command = parse('- --speculative-config={"method": "mtp", "num_speculative_tokens": 3}  # K3\n- --port=1')
        assert json.loads(command.get("--speculative-config") or "")["num_speculative_tokens"] == 3
        assert command.get("--port") == "1"


class TestQuestions:
    def test_the_last_one_wins(self) -> None:
        command = parse("vllm serve m --port 1 --enable-prefix-caching --port 2 --no-enable-prefix-caching")
        assert command.get("port") == "2"
        assert not command.has("--enable-prefix-caching")
        assert command.has("--no-enable-prefix-caching")
        assert command.enabled("enable_prefix_caching") is False
        assert command.enabled("--enforce-eager") is None

    def test_short_forms_and_levels_have_long_names(self) -> None:
        command = parse("vllm serve m -tp 2 -O3 -cc.cudagraph_mode none -q fp8")
        assert command.get("--tensor-parallel-size") == "2"
        assert command.get("-O") == command.get("--optimization-level") == "3"
        assert command.get("--compilation-config.cudagraph_mode") == "none"
        assert command.argv() == ("m", "-tp", "2", "-O3", "-cc.cudagraph_mode", "none", "-q", "fp8")
        assert command == parse(
            "vllm serve m --tensor-parallel-size=2 --optimization-level 3"
            " --compilation-config.cudagraph_mode=none --quantization fp8"
        )

    def test_several_values_stay_together(self) -> None:
        command = parse("vllm serve m --served-model-name a b --cudagraph-capture-sizes 1 2 4 --port 1")
        assert command.get("--served-model-name") == "a b"
        assert command.flags[1].values == ("1", "2", "4")

    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("4096", 4096),
            ("4k", 4000),
            ("4K", 4096),
            ("25.6k", 25600),
            ("1m", 10**6),
            ("2G", 2 * 1024**3),
            ("-1", -1),
        ],
    )
    def test_numbers_as_vllm_reads_them(self, text: str, number: int) -> None:
        assert parse(f"vllm serve m --max-model-len {text}").number("max_model_len") == number

    @pytest.mark.parametrize("text", ["4096 tokens", "25.6K", "many", "", "1.5"])
    def test_other_numbers_are_refused(self, text: str) -> None:
        command = parse("vllm serve m").with_flags(f"--max-num-seqs '{text}'")
        with pytest.raises(CommandError, match="not a whole number"):
            command.number("--max-num-seqs")

    def test_auto_length_is_not_an_error(self) -> None:
        assert parse("vllm serve m --max-model-len auto").get("--max-model-len") == "auto"

    def test_numbers_with_units_inside_json(self) -> None:
        text = 'vllm serve m --kv-transfer-config \'{"cpu_bytes_to_use": 80m, "x": "8q"}\''
        assert parse(text).get("--kv-transfer-config") is not None


class TestEdits:
    COMMAND = parse("vllm serve m --port 1 --enable-prefix-caching -cc.mode 3 --seed=7")

    def test_replacing_keeps_the_place(self) -> None:
        edited = self.COMMAND.with_flags("--port 2", "--no-enable-prefix-caching", "--enforce-eager")
        assert edited.argv() == (
            *(
                "m",
                "--port",
                "2",
                "--no-enable-prefix-caching",
                "-cc.mode",
                "3",
                "--seed=7",
                "--enforce-eager",
            ),
        )

    def test_one_text_may_hold_several_flags(self) -> None:
        assert self.COMMAND.with_flags("--port 2 --seed 8").argv()[1:3] == ("--port", "2")

    def test_removing_takes_the_keys_below(self) -> None:
        assert self.COMMAND.without("--compilation-config", "seed").argv() == (
            *("m", "--port", "1", "--enable-prefix-caching"),
        )

    def test_removing_what_is_not_there_names_near_ones(self) -> None:
        with pytest.raises(CommandError) as caught:
            self.COMMAND.without("--enable-prefix-cache")
        assert "--enable-prefix-caching" in caught.value.hint

    def test_the_model_is_replaced_where_it_stood(self) -> None:
        command = parse("docker run i --port 1 --model=a --seed 2").with_model("b")
        assert command.argv() == ("--port", "1", "--model=b", "--seed", "2")
        assert parse("vllm serve a --port 1").with_model("b").argv() == ("b", "--port", "1")
        assert command.without("--port").argv() == ("--model=b", "--seed", "2")

    def test_environment_is_added(self) -> None:
        assert self.COMMAND.with_env(A="1").with_env(A="2", B="3").env == (("A", "2"), ("B", "3"))

    def test_a_bare_word_is_no_flag(self) -> None:
        with pytest.raises(CommandError, match="is not a flag"):
            self.COMMAND.with_flags("enforce-eager")


class TestErrors:
    @pytest.mark.parametrize(
        ("text", "line", "message"),
        [
            ("vllm serve m\n--chat-template 'a\n--port 1", 2, "never closed"),
            ('vllm serve m --x "a', 1, "never closed"),
            ("\npip install vllm", 2, "no server command"),
            ("docker run --gpus all -p 1:1", 1, "names no image"),
            ("docker run --gpus", 1, "has no value"),
            ("docker run i bash -c 'echo vllm'", 1, "starts no vLLM server"),
            ("vllm serve m \\\n --port 1 2", 2, "belongs to no flag"),
            ("vllm serve m --enforce-eager true", 1, "belongs to no flag"),
            ("vllm serve a \\\n --model b", 2, "two models"),
            ("vllm serve m --port 1\nvllm serve m --port 2", 2, "two different server commands"),
            ("vllm serve m\n--port 1\n--max-model-len long", 3, "not a whole number"),
            ('vllm serve m\n--speculative-config {"method":"mtp"}', 2, "is not JSON"),
            ("vllm serve m --kv-transfer-config '{\u201ca\u201d: 1}'", 1, "is not JSON"),
            ("image: i\ncommand:\n  - --port=1\n bad", 4, "not YAML"),
            ('image: i\ncommand:\n  - --x={"a": 1}', 3, "not one string"),
            ("services:\n  a: {image: vllm/x}\n  b: {image: vllm/y}", 3, "2 services"),
            ("image: i\ncommand: {a: b}", 2, "one string or a list"),
            ("name: x\nother: y", 1, "no image and no command"),
            ("- --port=1\n- '--x", 2, "never closed"),
        ],
    )
    def test_each_points_at_its_line(self, text: str, line: int, message: str) -> None:
        with pytest.raises(CommandError, match=message) as caught:
            parse(text)
        assert caught.value.line == line
        assert caught.value.hint

    def test_typographic_quotes_are_named(self) -> None:
        with pytest.raises(CommandError) as caught:
            parse("vllm serve m --hf-overrides '{\u201ca\u201d: 1}'")
        assert "typographic" in caught.value.hint

    def test_the_same_command_twice_is_one(self) -> None:
        assert parse("vllm serve m --port 1\n\nvllm serve m --port=1").model == "m"


class TestRendering:
    def test_secrets_are_left_to_the_caller(self) -> None:
        command = parse("HF_TOKEN=hf_abc vllm serve m")
        for render in RENDERERS:
            assert "hf_abc" not in render(command)
        assert 'HF_TOKEN="$HF_TOKEN"' in render_serve(command)

    def test_compose_says_what_it_cannot_say(self) -> None:
        text = render_compose(parse("docker run --privileged --mount type=bind,src=/a,dst=/b,ro i --port 1"))
        assert text.startswith("# not said here: --privileged")
        service = yaml.safe_load(text)["services"]["vllm"]
        assert service["volumes"] == [{"type": "bind", "source": "/a", "target": "/b", "read_only": True}]

    def test_a_plain_command_gets_a_plain_container(self) -> None:
        text = render_docker(parse("vllm serve m --port 9"), image="vllm/vllm-openai:v0.23.0")
        assert text.splitlines()[1:4] == [
            "  --gpus all \\",
            "  -p 127.0.0.1:9:9 \\",
            "  vllm/vllm-openai:v0.23.0 \\",
        ]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab '\"\\{}$#`\n\t:é<>|&;", max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab .'", max_size=3), inner, max_size=2),
    max_leaves=4,
)
TEXTS = st.text("abz09 .,:;'\"\\{}[]$#`!*?~&|<>()=%-_/é\n\t", max_size=12) | st.sampled_from(
    [
        "",
        "-1",
        "-0.5",
        "--x",
        "-x",
        "$HOME",
        "null",
        "yes",
        "1e3",
        "- a",
        "# a",
        "a: b",
        "\n",
        " ",
        "$$",
        "${A}",
        "'",
    ]
)
NAMES = st.sampled_from(["--port", "--seed", "--dtype", "-q", "-tp", "--x-y", "--attention-config.flash_attn_version"])
SWITCH_NAMES = st.sampled_from(["--enforce-eager", "--no-enable-prefix-caching", "--headless", "--enable-lora"])
BARE = TEXTS.filter(lambda text: not text.startswith("-"))


@st.composite
def flags(draw: st.DrawFn) -> Flag:
    kind = draw(st.sampled_from(["value", "json", "switch", "several"]))
    separator = draw(st.sampled_from([" ", "="]))
    if kind == "switch":
        return Flag(draw(SWITCH_NAMES))
    if kind == "several":
        first, *more = draw(st.lists(BARE, min_size=1, max_size=3))
        return Flag("--served-model-name", first, tuple(more))
    if kind == "json":
        name = draw(st.sampled_from(["--speculative-config", "--compilation-config", "--hf-overrides"]))
        return Flag(name, json.dumps(draw(JSON_VALUES), indent=draw(st.sampled_from([None, 1]))), separator=separator)
    written = draw(NAMES)
    name = {"-q": "--quantization", "-tp": "--tensor-parallel-size"}.get(written, written)
    return Flag(name, draw(TEXTS), written=written, separator=separator)


@st.composite
def commands(draw: st.DrawFn) -> ServeCommand:
    chosen = tuple(draw(st.lists(flags(), max_size=5)))
    model = draw(st.none() | BARE.filter(bool))
    if model is not None and draw(st.booleans()):
        spelled = Flag("--model", model, separator=draw(st.sampled_from([" ", "="])))
        return ServeCommand(model, chosen, model_flag=spelled, model_at=draw(st.integers(0, len(chosen))))
    return ServeCommand(model, chosen)


@pytest.mark.parametrize("render", RENDERERS)
@settings(max_examples=150, deadline=None)
@given(command=commands())
def test_what_is_written_is_read_again(render: Render, command: ServeCommand) -> None:
    again = parse(render(command))
    assert (again.model, again.flags) == (command.model, command.flags)
    assert again.argv() == command.argv()


@settings(max_examples=100, deadline=None)
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
