from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.secret_names import is_recorded, is_secret_name

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
