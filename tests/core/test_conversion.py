"""Records made from plain data in several threads at once."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.secret_names import is_recorded, is_secret_name
from vllm_repro.tiny_model import TinyModel

FIRST_USES = """
import sys, threading
from dataclasses import make_dataclass
from vllm_repro.conversion import convert

sys.setswitchinterval(1e-6)
NAMES = "abcdefgh"
LEAF = dict.fromkeys(NAMES, 1)
BRANCH = dict.fromkeys(NAMES, LEAF)


def new_types():
    leaf = make_dataclass("Leaf", [(name, int) for name in NAMES])
    branch = make_dataclass("Branch", [(name, leaf) for name in NAMES])
    return {branch: BRANCH, leaf: LEAF, leaf | None: LEAF}


def first_uses(number):
    for types in rounds:
        together.wait()
        kind = list(types)[number % len(types)]
        convert(types[kind], kind)


rounds = [new_types() for _ in range(400)]
together = threading.Barrier(8)
threads = [threading.Thread(target=first_uses, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_may_use_a_type_for_the_first_time_at_once() -> None:
    # In a process of its own: without the lock it ends with a segmentation fault.
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


SECRET = """
    MY_PASSPHRASE SLACK_WEBHOOK SLACK_WEBHOOK_URL VLLM_AUTH_HEADER
    VLLM_KEYX VLLM_API_KEY HF_TOKEN HF_TOKEN_2 HUGGING_FACE_HUB_TOKEN
    AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN GITHUB_PAT DB_PASS
    MYSQL_PWD PGPASSWORD SENTRY_DSN OPENAI_KEY TOKEN KEY
    MYTOKEN
    Cookie Set-Cookie Authorization x-api-key --api-key --hf-token --token
    --password token api_keys apiKey AccountKey _authToken
    client_secret db_pwd access_token
""".split()  # noqa: SIM905  # a table of names
HARMLESS = """
    TOKENIZERS_PARALLELISM VLLM_MOE_TOKENS_PER_CHUNK
    VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD MAX_TOKENS
    EOS_TOKEN HF_HOME HF_TOKEN_PATH
    PWD OLDPWD PATH SSH_AUTH_SOCK VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_USE_V1 PYTORCH_CUDA_ALLOC_CONF
    max_tokens prompt_tokens stop_token_ids eos_token next_token token_ids key keys cache_key
    forward_pass pass_config KeyError author
    --tokenizer --tokenizer-mode --max-num-batched-tokens --allow-credentials --ssl-keyfile
    hf_overrides user_token_id tokens
""".split()  # noqa: SIM905  # a table of names


@pytest.mark.parametrize("name", SECRET)
def test_secret_names(name: str) -> None:
    assert is_secret_name(name)
    assert not is_recorded(name)


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_names(name: str) -> None:
    assert not is_secret_name(name)


@given(
    st.sampled_from(["", "MY_", "VLLM_", "X2_"]),
    st.sampled_from(["PASSWORD", "API_KEY", "AUTH", "TOKEN", "SECRET", "PASSPHRASE"]),
    st.sampled_from(["", "_2"]),
)
def test_a_secret_name_is_secret_in_each_spelling(before: str, word: str, after: str) -> None:
    name = before + word + after
    assert is_secret_name(name)
    if word != "TOKEN":  # in lower case a token may be one of a text
        assert is_secret_name(name.lower())
        assert is_secret_name("--" + name.lower().replace("_", "-"))


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("VLLM_USE_V1", True),
        ("TOKENIZERS_PARALLELISM", True),
        ("CUDA_VISIBLE_DEVICES", True),
        ("HF_HUB_OFFLINE", True),
        ("HF_TOKEN", False),
        ("VLLM_API_KEY", False),
        ("VLLM_REPRO_REPORTS", False),
        ("MY_VLLM_X", False),
        ("HOME", False),
    ],
)
def test_only_variables_of_vllm_and_its_libraries_are_recorded(name: str, recorded: bool) -> None:
    assert is_recorded(name) is recorded


DEEPSEEK: dict[str, Any] = {
    "family": "deepseek_v4",
    "kinds": ("sliding", "sparse", "compressed", "sparse"),
    "heads": 64,
    "kv_heads": 1,
    "head_dim": 512,
    "window": 128,
}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"family": "mamba"}, "no tiny model of family 'mamba'"),
        ({"heads": 4, "kv_heads": 3}, "evenly"),
        ({"kinds": ()}, "count from 1"),
        ({"drafts": -1}, "count from 1"),
        ({"kinds": ("full", "sliding"), "window": 128}, "qwen3 has no sliding layers, only full"),
        (
            {"family": "deepseek_v4", "kinds": ("full",), "window": 128},
            "deepseek_v4 has no full layers",
        ),
        ({"window": 128}, "window=… goes with sliding layers"),
        ({"family": "gemma3"}, "window=… goes with sliding layers"),
        ({"drafts": 1}, "no drafter for qwen3"),
        ({"vocab": 264}, "at least 265 tokens"),
        ({"fp8": True}, "fp8=… is for deepseek_v4"),
    ],
)
def test_a_shape_that_no_model_has_is_refused(shape: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyModel(**shape)


def test_the_shape_is_said_in_words() -> None:
    assert str(TinyModel()) == "2 layers, 4 heads, 2 KV heads of 32"
    assert str(TinyModel(vocab=151936)) == "2 layers, 4 heads, 2 KV heads of 32, 151,936 token ids"
    assert (
        str(TinyModel("mimo", ("full",), 24, 4, 256, drafts=1))
        == "1 layer and 1 that drafts, 24 heads, 4 KV heads of 256"
    )
    assert (
        str(TinyModel(**DEEPSEEK))
        == "4 layers (sliding then sparse then compressed then sparse attention, with a window of"
        " 128 tokens), 64 heads, 1 KV head of 512"
    )


def test_a_mimo_is_as_wide_as_its_heads_together() -> None:
    assert TinyModel("mimo", heads=24, kv_heads=4, head_dim=256, hidden=256).width == 6144
    assert TinyModel(heads=24, kv_heads=4, head_dim=256, hidden=256).width == 256


def test_each_tiny_model_has_a_folder_of_its_own() -> None:
    others = [
        TinyModel(),
        TinyModel(hidden=64),
        TinyModel(vocab=300),
        TinyModel(max_position=64),
        TinyModel("mimo"),
        TinyModel("mimo", drafts=1),
    ]
    assert len({one.slug for one in others}) == len(others)
    assert TinyModel().slug == TinyModel().slug
    assert TinyModel().slug.startswith("qwen3-2x4x2x32-")
