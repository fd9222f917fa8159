from __future__ import annotations

import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.secrets_planted import PRIVATE, SECRETS, Plant
from vllm_repro.journal.redact import Redactor, known_secrets

REDACTOR = Redactor(
    [("/home/me/work/checkout", "."), ("/home/me", "~")],
    ["gpu-box"],
    {"plainvalue": "VLLM_API_KEY"},
    ["max"],
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://user:p@ss/w@proxy.corp:3128", "http://[redacted:login]@[host]:3128"),
        ("/home/me/work/checkout/.venv/bin/python", "./.venv/bin/python"),
        ("/home/me/.cache/x", "~/.cache/x"),
        ("/home/mercury/x is not /home/me", "/home/[user]/x is not ~"),
        ("gpu-box:12:13 [0] NCCL INFO", "[host]:12:13 [0] NCCL INFO"),
        (
            "--model /mnt/max/m, file:///mnt/nfs/max/m, /scratch/max",
            "--model /mnt/[user]/m, file:///mnt/nfs/[user]/m, /scratch/[user]",
        ),
        ("a key plainvalue anywhere", "a key [redacted:VLLM_API_KEY] anywhere"),
    ],
)
def test_secrets_and_private_names_go(text: str, expected: str) -> None:
    assert REDACTOR.text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "max() arg is an empty sequence, --max-model-len 9, max_seqs",
        (
            "/usr/lib/python3/dist-packages/max/core.py, site-packages/max/a.py, /mnt/maxwell/m,"
            " /mnt/max-1/m, 3/max"
        ),
    ],
)
def test_an_account_may_be_named_as_a_word_or_a_package(text: str) -> None:
    assert REDACTOR.text(text) == text


@pytest.mark.parametrize(
    ("line", "means"),
    [
        (
            "vllm-repro run '/home/me/a scenario.py' --seed 1",
            "vllm-repro run /home/you/a scenario.py --seed 1",
        ),
        (
            "vllm-repro run /home/me/a.py --patch '/home/me/a; b.diff'",
            "vllm-repro run /home/you/a.py --patch /home/you/a; b.diff",
        ),
        ("vllm-repro run '/home/me/checkout/a b.py'", "vllm-repro run ./a b.py"),
        ("vllm-repro run \"it's in\" '/home/me/x y'", "vllm-repro run it's in /home/you/x y"),
    ],
)
def test_a_command_without_names_still_means_the_same_to_a_shell(line: str, means: str) -> None:
    redactor = Redactor([("/home/me/checkout", "."), ("/home/me", "$HOME")])
    shown = subprocess.run(
        ["sh", "-c", f"echo {redactor.command(line)}"],
        env={"HOME": "/home/you"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.rstrip("\n") == means


def test_a_key_that_is_a_word_of_its_own() -> None:
    argv = [
        "vllm",
        "--api-key",
        "sekrit",
        "and more",
        "--hf-token",
        "other",
        "--port",
        "1",
        "X_TOKEN=a b",
    ]
    key, token = "[redacted:api-key]", "[redacted:hf-token]"
    expected = [
        "vllm",
        "--api-key",
        key,
        key,
        "--hf-token",
        token,
        "--port",
        "1",
        "X_TOKEN=[redacted:x-token]",
    ]
    assert REDACTOR.deep(argv) == expected


def test_everything_in_a_structure() -> None:
    data = {
        "a": ["/home/me/x", 1, None],
        "env": {"HF_TOKEN": "x", "N": 1},
        "b": ("AKIAIOSFODNN7EXAMPLE",),
    }
    expected = {
        "a": ["~/x", 1, None],
        "env": {"HF_TOKEN": "[redacted:hf-token]", "N": 1},
        "b": ["[redacted:aws-key]"],
    }
    assert REDACTOR.deep(data) == expected


def test_a_journal_keeps_private_names() -> None:
    of_the_journal = Redactor(names=False)
    for name in PRIVATE.values():
        assert of_the_journal.text(name.written) == name.written


def test_secrets_of_an_environment_are_known_by_name() -> None:
    environ = {
        "VLLM_API_KEY": "plainvalue",
        "HF_TOKEN": "EMPTY",
        "SHORT_KEY": "1234567",  # a word of every log
        "MAX_TOKENS": "123456789",
        "TOKENIZERS_PARALLELISM": "false-ish",
    }
    assert known_secrets(environ) == {"plainvalue": "VLLM_API_KEY"}


_PLANTS = [*SECRETS.values(), *PRIVATE.values()]
_AROUND = st.text(st.sampled_from("ab 1.,;:='\"{}[]()/\\-_@\n"), max_size=12)


@settings(max_examples=100)
@given(st.lists(st.tuples(_AROUND, st.sampled_from(_PLANTS)), min_size=1, max_size=4), _AROUND)
def test_twice_is_once_and_nothing_is_left(parts: list[tuple[str, Plant]], end: str) -> None:
    text = " ".join(f"{before} {plant.written}" for before, plant in parts) + " " + end
    once = REDACTOR.text(text)
    assert REDACTOR.text(once) == once
    for _, plant in parts:
        assert plant.hidden not in once


PIECES = (
    # shorter than a list
    "a _ - a- a_ token cookie -u ['-- pypi- :// a:b@ --api-key host= eyJ 1.1.1.1. ' /home/ : [ x@".split()  # noqa: SIM905
)


@pytest.mark.parametrize("piece", [*PIECES, " --api-key ", "bearer ", "basic "])
def test_time_is_linear_in_the_length_of_a_text(piece: str) -> None:
    def seconds(size: int) -> float:
        text = piece * (size // len(piece)) + " token host curl bearer"  # each pattern is tried
        started = time.process_time()
        REDACTOR.text(text)
        return time.process_time() - started

    assert seconds(200_000) < 40 * max(seconds(20_000), 0.02)


def test_a_secret_that_begins_with_another_goes_whole() -> None:
    redactor = Redactor(secrets={"abcdefgh": "A_TOKEN", "abcdefghijkl": "B_TOKEN"}, names=False)
    assert "ijkl" not in redactor.text("it said abcdefghijkl twice: abcdefgh")


def test_a_host_goes_where_it_is_a_whole_name() -> None:
    redactor = Redactor(hosts=["gpubox"])
    for others in ("gpubox2", "my-gpubox", "gpubox-7", "mygpubox", "a.gpubox"):
        assert others in redactor.text(f"ask {others}: now")
    for text in ("gpubox: x", "at gpubox.", "http://gpubox:8000/"):
        assert "gpubox" not in redactor.text(text)
