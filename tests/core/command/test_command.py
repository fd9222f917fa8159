from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.command.drawn import commands, flags
from tests.core.command.test_parse import REPORTED
from vllm_repro.command.command import ServeCommand
from vllm_repro.command.compose import compose_text, service
from vllm_repro.command.container import (
    PARALLEL_SHM_BYTES,
    ContainerSpec,
    GpuRequest,
    Mount,
    Publish,
    Ulimit,
    parse_size,
)
from vllm_repro.command.flags import Flag, is_switch, loading_flags
from vllm_repro.command.parse import parse
from vllm_repro.errors import CommandError, UsageError
from vllm_repro.secret_names import variable_mistakes

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
    assert edited.model == re.findall(r"^(?!--)\w+|(?<=--model.)\w+", argv)[0]


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


DOCKER = parse(
    "docker run --gpus all -p 9000:8000 -v /home/reporter:/x -e HF_TOKEN=hf_reporter -e"
    " VLLM_USE_V1=1 --ipc host --ulimit memlock=-1 --network host --name theirs vllm/vllm-openai:v1"
    " --model m --port 9 --host 1.2.3.4"
)
SPEC = ContainerSpec(
    image="i:1",
    argv=("m", "--x", '{"a": 1}', "--y"),
    name="n",
    env=(("HF_TOKEN", "hf_secret"), ("A", "b c")),
    labels=(("l", "v"),),
    mounts=(Mount("/a,b", "/c", readonly=True),),
    gpus="device=0,1",
    shm_size=512 * 1024**2,
    ipc="private",
    network="net",
    publish=(Publish(80), Publish(81, 82)),
    entrypoint=("vllm", "serve"),
    ulimits=(Ulimit("nofile", 1, 2),),
)
PATHS = st.text("/ab,\" '=.", min_size=1, max_size=8)


class TestFromCommand:
    def test_keeps_what_the_bug_may_need(self) -> None:
        spec = ContainerSpec.from_command(DOCKER, image="vllm/vllm-openai:v1", port=5000, env={})
        assert spec == ContainerSpec(
            image="vllm/vllm-openai:v1",
            argv=("--model", "m"),
            env=(("VLLM_USE_V1", "1"),),
            ipc="host",
            publish=(Publish(5000, 8000),),
            ulimits=(Ulimit("memlock", -1, -1),),
        )

    def test_takes_what_this_machine_adds(self) -> None:
        spec = ContainerSpec.from_command(
            DOCKER, image="i", port=1, env={"HF_TOKEN": "t", "VLLM_USE_V1": "0"}
        )
        assert dict(spec.env) == {"HF_TOKEN": "t", "VLLM_USE_V1": "0"}

    @pytest.mark.parametrize(
        ("text", "shm"),
        [
            ("docker run i m -tp 2", PARALLEL_SHM_BYTES),
            ("docker run i m", None),
            ("docker run --ipc host i m -tp 2", None),
            ("docker run --shm-size 2g i m -tp 2", 2 * 1024**3),
        ],
    )
    def test_several_ranks_get_shared_memory(self, text: str, shm: int | None) -> None:
        assert ContainerSpec.from_command(parse(text), image="i", port=1, env={}).shm_size == shm

    @pytest.mark.parametrize(
        ("text", "entrypoint"),
        [
            ("docker run --entrypoint vllm i serve m", ("vllm", "serve")),
            ("docker run --entrypoint /start.sh i m", None),
            ("docker run i bash -c 'vllm serve m'", ("vllm", "serve")),
            ("docker run i m", None),
        ],
    )
    def test_only_an_entrypoint_that_starts_vllm_is_kept(
        self, text: str, entrypoint: tuple[str, ...] | None
    ) -> None:
        spec = ContainerSpec.from_command(parse(text), image="i", port=1, env={})
        assert (spec.entrypoint, spec.argv) == (entrypoint, ("m",))


class TestRender:
    def test_every_field_is_printed_and_secrets_only_by_name(self) -> None:
        assert SPEC.render().split(" \\\n") == [
            "docker run",
            "  --name n",
            "  --init",
            "  --cap-drop ALL --cap-add CAP_DAC_OVERRIDE --security-opt no-new-privileges",
            "  --gpus '\"device=0,1\"'",
            "  --ipc private",
            "  --shm-size 512m",
            "  --network net",
            "  -p 127.0.0.1:80:8000",
            "  -p 127.0.0.1:81:82",
            "  --ulimit nofile=1:2",
            "  --mount 'type=bind,\"source=/a,b\",target=/c,readonly'",
            "  -e HF_TOKEN",
            "  -e 'A=b c'",
            "  --label l=v",
            "  --entrypoint vllm",
            "  i:1 serve",
            "    m",
            "    --x '{\"a\": 1}'",
            "    --y",
        ]

    def test_the_printed_line_is_the_argv(self) -> None:
        assert tuple(shlex.split(SPEC.render().replace("\\\n", ""))) == SPEC.docker_argv()


@pytest.mark.parametrize(
    ("gpus", "request_"),
    [
        (None, None),
        ("all", GpuRequest(-1)),
        ("2", GpuRequest(2)),
        ("device=3", GpuRequest(None, ("3",))),
        ('"device=0,GPU-5f"', GpuRequest(None, ("0", "GPU-5f"))),
    ],
)
def test_gpus_are_parsed(gpus: str | None, request_: GpuRequest | None) -> None:
    assert ContainerSpec(image="i", gpus=gpus).gpu_request() == request_


def test_gpus_of_cdi_are_devices_of_the_engine() -> None:
    spec = ContainerSpec(image="i", gpus="device=nvidia.com/gpu=0,nvidia.com/gpu=3")
    request, argv = spec.gpu_request(), spec.docker_argv()
    assert (request is not None and request.cdi, "--gpus" in argv) == (True, False)
    devices = [argv[n + 1] for n, word in enumerate(argv) if word == "--device"]
    assert devices == ["nvidia.com/gpu=0", "nvidia.com/gpu=3"]


@pytest.mark.parametrize(
    ("make", "text", "message"),
    [
        *(
            (lambda text: ContainerSpec(image="i", gpus=text).gpu_request(), text, "not understood")
            for text in ("", "devices", "-1")
        ),
        *((parse_size, text, "is not a size") for text in ("", "-1g", "1x")),
        (Ulimit.parse, "memlock", "is not a ulimit"),
    ],
)
def test_other_gpus_sizes_and_ulimits_are_refused(
    make: Callable[[str], object], text: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16g", 16 * 1024**3),
        ("64MB", 64 * 1024**2),
        ("512", 512),
        ("1.5GiB", 3 * 512 * 1024**2),
        ("8b", 8),
    ],
)
def test_sizes_are_parsed_and_printed(text: str, size: int) -> None:
    assert parse_size(text) == size
    words = replace(SPEC, shm_size=size).docker_argv()
    assert parse_size(words[words.index("--shm-size") + 1]) == size


@settings(max_examples=50)
@given(PATHS, PATHS, st.booleans())
def test_a_mount_is_one_line_of_csv(source: str, target: str, readonly: bool) -> None:
    fields = next(csv.reader([Mount(source, target, readonly).render()]))
    assert fields == [
        "type=bind",
        f"source={source}",
        f"target={target}",
        *(["readonly"] if readonly else []),
    ]


def test_every_field_is_written() -> None:
    body = service(SPEC, profile="p")
    device = {"driver": "nvidia", "capabilities": ["gpu"], "device_ids": ["0", "1"]}
    assert body == {
        "image": "i:1",
        "profiles": ["p"],
        "entrypoint": ["vllm", "serve"],
        "command": ["m", "--x", '{"a": 1}', "--y"],
        "init": True,
        "cap_drop": ["ALL"],
        "cap_add": ["CAP_DAC_OVERRIDE"],
        "security_opt": ["no-new-privileges"],
        "environment": {"HF_TOKEN": None, "A": "b c"},
        "ports": ["127.0.0.1:80:8000", "127.0.0.1:81:82"],
        "volumes": [{"type": "bind", "source": "/a,b", "target": "/c", "read_only": True}],
        "ipc": "private",
        "shm_size": 512 * 1024**2,
        "network_mode": "net",
        "ulimits": {"nofile": {"soft": 1, "hard": 2}},
        "deploy": {"resources": {"reservations": {"devices": [device]}}},
    }


@pytest.mark.parametrize(("gpus", "count"), [("all", "all"), ("2", 2)])
def test_gpus_may_be_a_count(gpus: str, count: object) -> None:
    body = service(ContainerSpec(image="i", gpus=gpus))
    assert body["deploy"] == {
        "resources": {
            "reservations": {
                "devices": [{"driver": "nvidia", "capabilities": ["gpu"], "count": count}]
            }
        }
    }


def test_a_file_has_a_heading_indented_lists_and_doubled_dollars() -> None:
    spec = ContainerSpec(image="i", argv=("m", "a$b"), publish=(Publish(8),))
    assert compose_text({"s": service(spec)}, heading="one\ntwo").splitlines() == [
        "# one",
        "# two",
        "services:",
        "  s:",
        "    image: i",
        "    command:",
        "      - m",
        "      - a$$b",
        "    init: true",
        "    cap_drop:",
        "      - ALL",
        "    cap_add:",
        "      - CAP_DAC_OVERRIDE",
        "    security_opt:",
        "      - no-new-privileges",
        "    ports:",
        "      - 127.0.0.1:8:8000",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LD_PRELOAD", "/tmp/x.so"),
        ("PATH", "/tmp"),
        ("PYTHONPATH", "."),
        ("PYTHONWARNINGS", "all:0:antigravity.x:0:0"),
        ("BROWSER", "/bin/sh -c 'id'"),
        ("BASH_ENV", "x"),
        ("VLLM_REPRO_CACHE", "1"),  # steers the harness
        ("VLLM_NCCL_SO_PATH", "x.so"),
        ("VLLM_LOGGING_CONFIG_PATH", "log.json"),
        ("CUDA_HOME", "cuda"),
        ("TORCHINDUCTOR_CACHE_DIR", "/tmp/x"),
        ("NCCL_TUNER_PLUGIN", "x"),
        ("VLLM_RPC_BASE", "../x"),
        ("HF_ENDPOINT", "https://hub.example"),
        ("RAY_ADDRESS", "192.0.2.1:6379"),
        ("RAY_RUNTIME_ENV_HOOK", "os.system"),
    ],
)
def test_a_variable_that_may_run_a_strangers_code_is_a_mistake(name: str, value: str) -> None:
    (mistake,) = variable_mistakes([("VLLM_USE_V1", "1"), (name, value)])
    assert mistake.startswith(f"{name} ")
    assert "remove it" in mistake


def test_switches_urls_and_secrets_are_allowed() -> None:
    command = parse(
        "export VLLM_LOGGING_LEVEL=DEBUG"
        " VLLM_USAGE_STATS_SERVER=https://stats.example\nHF_TOKEN=$HF_TOKEN"
        " CUDA_VISIBLE_DEVICES=0,1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True vllm serve m"
    )
    assert len(command.env) == 5
    assert variable_mistakes(command.env) == []


@pytest.mark.parametrize(
    "flag",
    [
        "--trust-remote-code",
        "--middleware evil.module",
        "--tool-parser-plugin evil.py",
        "--chat-template template.jinja",
        "--config=more.yaml",
        "--download-dir /etc/evil",
        "--ssl-keyfile ../key",
        "--lora-modules a=/srv/evil",
        """--kv-transfer-config '{"kv_connector_module_path": "evil"}'""",
    ],
)
def test_a_flag_that_loads_code_or_files_is_named(flag: str) -> None:
    command = parse(
        f"vllm serve org/model --max-model-len 8192 --dtype bfloat16 {flag} --served-model-name a/b"
    )
    (named,) = loading_flags(command.flags)
    assert named.split()[0].partition("=")[0] == flag.split()[0].partition("=")[0]
