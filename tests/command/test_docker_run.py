"""A reported `docker run` or `podman run`."""

from __future__ import annotations

import pytest

from tests.command.texts import PLAIN, assert_refused, said
from vllm_repro.command.command import Container, parse, render_docker


@pytest.mark.parametrize(
    "text",
    [
        "podman run --rm -it -p8000:8000 image:1 org/m --max-model-len 4096 --enforce-eager",
        "docker run --entrypoint vllm image:1 serve org/m --max-model-len 4096 --enforce-eager",
        "docker run image:1 vllm serve org/m --max-model-len 4096 --enforce-eager",
        "docker run i bash -lc 'true && vllm serve org/m --max-model-len 4096 --enforce-eager'",
        "docker run --entrypoint sh i -c 'exec vllm serve org/m --max-model-len 4096 --enforce-eager'",
    ],
)
def test_all_say_the_same(text: str) -> None:
    assert said(text) == PLAIN


def test_docker_options_are_read() -> None:
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


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("docker run --gpus all -p 1:1", 1, "names no image"),
        ("docker run --gpus", 1, "has no value"),
        ("docker run i bash -c 'echo vllm'", 1, "starts no vLLM server"),
    ],
)
def test_each_points_at_its_line(text: str, line: int, message: str) -> None:
    assert_refused(text, line, message)
