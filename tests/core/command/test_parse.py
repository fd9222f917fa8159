"""Commands as pasted: prompts, fences, quotes, line continuations, containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_repro.command.command import ReportedContainer
from vllm_repro.command.flags import Flag
from vllm_repro.command.parse import parse
from vllm_repro.errors import CommandError

REPORTED = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parents[2] / "data" / "commands").glob("*.txt"))
    if path.stem != "42085"  # a compose file's list of arguments
}


@pytest.mark.parametrize(
    "text",
    [
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
        "bash -c 'vllm serve org/m --max-model-len 4096 --enforce-eager'",
        "podman run --rm -it -p8000:8000 image:1 org/m --max-model-len 4096 --enforce-eager",
        "docker run --entrypoint vllm image:1 serve org/m --max-model-len 4096 --enforce-eager",
        "docker run --gpus all\nimage:1 org/m --max-model-len 4096\n--enforce-eager",
        "docker run i bash -lc 'true && vllm serve org/m --max-model-len 4096 --enforce-eager'",
        (
            "docker run --entrypoint sh i -c 'exec vllm serve org/m --max-model-len 4096"
            " --enforce-eager'"
        ),
        (
            "vllm serve org/m --max-model-len 4096 --enforce-eager\n\nvllm serve org/m"
            " --max-model-len=4096 --enforce-eager"
        ),
    ],
)
def test_all_are_the_same_command(text: str) -> None:
    command = parse(text)
    assert command.model_argument == "org/m"
    assert command.flags == (
        Flag(name="--max-model-len", values=("4096",)),
        Flag(name="--enforce-eager"),
    )


def test_a_reported_placeholder_and_short_form_stay() -> None:
    command = parse(REPORTED["41700"])
    assert command.get("--master-addr") == "<HEAD_IP>"
    assert command.number("--tensor-parallel-size") == 2
    assert "-tp" in command.argv()
    assert "--headless" not in command.argv()


@pytest.mark.parametrize("name", REPORTED)
def test_backslashes_make_no_difference(name: str) -> None:
    text = REPORTED[name]
    bare = text.replace("\\\n", "\n")
    lines = bare.rstrip("\n").splitlines()
    with_backslashes = "".join(f"{line} \\\n" for line in lines if not line.startswith("#"))
    assert parse(bare) == parse(text)
    assert parse(with_backslashes) == parse(text)
    assert parse(with_backslashes.replace("\\\n", "\\  \r\n")) == parse(text)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("'a b'", "a b"),
        ('"a \\"b\\" \\$c \\d"', 'a "b" $c \\d'),
        ("a\\ b'c'\"d\"", "a bcd"),
        ("'a;b'", "a;b"),
        ("a&b", "a&b"),
        ("<HEAD IP>", "<HEAD IP>"),
        ("$(hostname -i)", "$(hostname -i)"),
        ("a#b", "a#b"),
        ("'\n% a'", "\n% a"),
    ],
)
def test_words_lose_their_quotes(word: str, text: str) -> None:
    assert parse(f"vllm serve m --chat-template {word} --port 1").get("--chat-template") == text


def test_variables_come_from_assignments_exports_and_env() -> None:
    text = "export A=1\nB='x y'\nsudo -E env C=3 D= vllm serve m --port 1"
    assert parse(text).env == (("A", "1"), ("B", "x y"), ("C", "3"), ("D", ""))


def test_docker_options_that_a_reproduction_needs_are_read() -> None:
    command = parse(
        "docker run -d --gpus '\"device=0,1\"' --ipc=host --shm-size 16g -e HF_TOKEN -eA=b --init"
        " --ulimit memlock=-1 --network host --name v --runtime nvidia -v /a:/b"
        " --mount type=bind,source=/a,target=/b --cap-add SYS_PTRACE --privileged img:1 --model m"
    )
    assert command.container == ReportedContainer(
        image="img:1",
        gpus="device=0,1",
        env=(("HF_TOKEN", "$HF_TOKEN"), ("A", "b")),
        shm_size="16g",
        ipc="host",
        ulimits=("memlock=-1",),
    )


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("vllm serve m\n--chat-template 'a\n--port 1", 2, "never closed"),
        ("\npip install vllm", 2, "no server command"),
        ("vllm serve m --port 1\nvllm serve m --port 2", 2, "two different server commands"),
        ("docker run --gpus all -p 1:1", 1, "names no image"),
        ("docker run --gpus", 1, "has no value"),
        ("docker run i bash -c 'echo vllm'", 1, "starts no vLLM server"),
        ("vllm serve m \\\n --port 1 2", 2, "belongs to no flag"),
        ("vllm serve m --enforce-eager true", 1, "belongs to no flag"),
        ("vllm serve a b", 1, "belongs to no flag"),
        ("vllm serve a \\\n --model b", 2, "two models"),
        ("vllm serve --model", 1, "has no value"),
        ("vllm serve m\n--port 1\n--max-model-len long", 3, "not a whole number"),
        ('vllm serve m\n--speculative-config {"method":"mtp"}', 2, "is not JSON"),
    ],
)
def test_errors_point_at_the_line(text: str, line: int, message: str) -> None:
    with pytest.raises(CommandError, match=message) as caught:
        parse(text)
    assert caught.value.line == line
    assert caught.value.hint
