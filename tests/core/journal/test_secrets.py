"""Secrets in texts: every known form is removed, and other text stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.journal.secrets import without_secrets

_NPM, _PYPI = "npm_" + "aB3dE5gH7j" * 4, "pypi-" + "AgEIcHlwaS5v" * 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf_abcdefghijklmnop", "[redacted:hf-token]"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer [redacted:authorization]"),
        ("Authorization: Token abcdef", "Authorization: Token [redacted:authorization]"),
        ("got Bearer sekritword", "got Bearer [redacted:credentials]"),
        ("proxy: Basic dXNlcjpwYXNz", "proxy: Basic [redacted:credentials]"),
        (
            "vllm serve m --api-key sekrit --port 1",
            "vllm serve m --api-key [redacted:api-key] --port 1",
        ),
        ("--api-key one 'number two' --port 1", "--api-key [redacted:api-key] --port 1"),
        ("--api-key=sekrit", "--api-key=[redacted:api-key]"),
        (
            "argv: ['--api-key', 'x', 'y', '--port', '1']",
            "argv: ['--api-key', '[redacted:api-key]', '--port', '1']",
        ),
        ('["--api-key", "x"]', '["--api-key", "[redacted:api-key]"]'),
        ("['--api-key=x', '--port', '1']", "['--api-key=[redacted:api-key]', '--port', '1']"),
        (
            "HF_TOKEN=abc VLLM_API_KEY=x y",
            "HF_TOKEN=[redacted:hf-token] VLLM_API_KEY=[redacted:vllm-api-key] y",
        ),
        ("env=HF_TOKEN=abc", "env=HF_TOKEN=[redacted:hf-token]"),
        ("os.environ['HF_TOKEN'] = 'abc'", "os.environ['HF_TOKEN'] = '[redacted:hf-token]'"),
        (
            "AWS_SECRET_ACCESS_KEY='a b' y",
            "AWS_SECRET_ACCESS_KEY='[redacted:aws-secret-access-key]' y",
        ),
        ("MY_PASSPHRASE=x", "MY_PASSPHRASE=[redacted:my-passphrase]"),
        ("DB_PASS=x DB_PWD=y", "DB_PASS=[redacted:db-pass] DB_PWD=[redacted:db-pwd]"),
        ("VLLM_AUTH_HEADER: x", "VLLM_AUTH_HEADER: [redacted:vllm-auth-header]"),
        ("token=x", "token=[redacted:token]"),
        ('{"token": "x"}', '{"token": "[redacted:token]"}'),
        ("Cookie: a=b; c=d", "Cookie: [redacted:cookie]"),
        ("curl -H 'Cookie: a=b; c=d' -k", "curl -H 'Cookie: [redacted:cookie]' -k"),
        ("curl -u user:pw http://x", "curl -u [redacted:login] http://x"),
        ("curl --user 'user:p w' x", "curl --user '[redacted:login] w' x"),
        ("{'api_key': ['a', 'b'], 'port': 1}", "{'api_key': [redacted:api-key], 'port': 1}"),
        ("cookies={'session': 'x'}", "cookies=[redacted:cookies]"),
        (r"{\"HF_TOKEN\": \"abc\"}", r"{\"HF_TOKEN\": \"[redacted:hf-token]\"}"),
        ("https://h/x?a=1&access_token=x&b=2", "https://h/x?a=1&access_token=[redacted:query]&b=2"),
        ("https://h/x?sig=x", "https://h/x?sig=[redacted:query]"),
        (_NPM, "[redacted:package-token]"),
        (_PYPI, "[redacted:package-token]"),
        (
            "-----BEGIN PRIVATE KEY-----\nMII\n-----END PRIVATE KEY-----\nx",
            "[redacted:private-key]\nx",
        ),
        (
            "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQ=\n-----END PGP PRIVATE KEY BLOCK-----",
            "[redacted:private-key]",
        ),
    ],
)
def test_secrets_go(text: str, expected: str) -> None:
    assert without_secrets(text) == expected


HARMLESS = [
    "max_tokens=16, --tokenizer x --max-num-batched-tokens 8192, 35.1 tokens/s, tokens: 12",
    (
        "hf_overrides={}, hf_text_config, hf_token=None, eos_token='<|im_end|>',"
        " TOKENIZERS_PARALLELISM=false"
    ),
    (
        "max_tokens: 8, stop_token_ids=[1, 2], prompt_tokens=100, token=42,"
        " VLLM_MOE_TOKENS_PER_CHUNK=64"
    ),
    "token = next(ids); key=lambda x: x, cache_key=abc, KeyError: 'x'",
    "VLLM_API_KEY=${VLLM_API_KEY} PWD=/workspace HF_TOKEN_PATH=/x",
    (
        "Invalid API key: ask for one; a Bearer of bad news; bearer authentication is on; Basic"
        " tests. Basic usage"
    ),
    "docker run -u 1000:1000 x; curl -u 1000:1000",
    "nvidia-curand-cu12==10.3.5.147, pypi-attestations-0.0.21, npm_config_registry=x",
    "turboquant_attn.py:747 stays, and so do 08:24:30 and c10d::add",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_texts_stay(text: str) -> None:
    assert without_secrets(text) == text


@given(
    st.sampled_from(
        ["HF_TOKEN", "MY_PASSPHRASE", "api_key", "DB_PASS", "x-api-key", "client_secret"]
    ),
    st.text("abcXYZ019-_./+", min_size=1, max_size=12).filter(lambda value: value.strip("-=/.")),
    st.sampled_from(
        [
            "{0}={1}",
            "-e {0}={1} x",
            "env: {0}: {1}",
            "{{'{0}': '{1}'}}",
            '{{"{0}": "{1}", "n": 1}}',
            "['{0}={1}']",
        ]
    ),
)
def test_the_value_of_a_secret_name_goes_in_each_form(name: str, value: str, form: str) -> None:
    shown = without_secrets(form.format(name, f"S{value}S"))
    assert f"S{value}S" not in shown
    assert name in shown


@given(
    st.lists(
        st.sampled_from([*HARMLESS, "INFO 11-20 [core.py:1]", '  File "x.py", line 3, in f']),
        max_size=4,
    )
)
def test_lines_of_a_harmless_log_stay(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert without_secrets(text) == text
