"""A command as YAML says it: a list of arguments, a compose service, a pod."""

from __future__ import annotations

import json

import pytest

from tests.command.texts import PLAIN, assert_refused, said
from vllm_repro.command.command import Container, parse, render_compose


@pytest.mark.parametrize(
    "text",
    [
        (
            "kind: Pod\nspec:\n  containers:\n  - image: sidecar\n  - image: vllm/vllm-openai\n"
            "    args: [org/m, --max-model-len, 4096, --enforce-eager]\n"
        ),
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
def test_all_say_the_same(text: str) -> None:
    assert said(text) == PLAIN


def test_compose_service_is_read() -> None:
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


def test_unquoted_json_in_a_list_is_taken_as_text() -> None:
    command = parse('- --speculative-config={"method": "mtp", "num_speculative_tokens": 3}  # K3\n- --port=1')
    assert json.loads(command.get("--speculative-config") or "")["num_speculative_tokens"] == 3
    assert command.get("--port") == "1"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("image: i\ncommand:\n  - --port=1\n bad", 4, "not YAML"),
        ('image: i\ncommand:\n  - --x={"a": 1}', 3, "not one string"),
        ("services:\n  a: {image: vllm/x}\n  b: {image: vllm/y}", 3, "2 services"),
        ("image: i\ncommand: {a: b}", 2, "one string or a list"),
        ("name: x\nother: y", 1, "no image and no command"),
        ("- --port=1\n- '--x", 2, "never closed"),
    ],
)
def test_each_points_at_its_line(text: str, line: int, message: str) -> None:
    assert_refused(text, line, message)
