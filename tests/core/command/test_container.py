from __future__ import annotations

import csv
import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro.command.container import (
    PARALLEL_SHM_BYTES,
    ContainerSpec,
    GpuRequest,
    Mount,
    Publish,
    Ulimit,
    parse_size,
)
from vllm_repro.command.parse import parse
from vllm_repro.errors import UsageError

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
