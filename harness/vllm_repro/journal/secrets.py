"""What a key, a token or a password looks like around vLLM, and the marker that takes its place. Pure.

Two ways to know one: by its own shape (`hf_…`), or by the name beside it (`--api-key`, `HF_TOKEN=`, `'api_key': [`). A marker names what
was there, `[redacted:hf-token]`, is one word of a command line, and is left alone by a second pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

__all__ = ["is_secret_name", "marker", "without_secrets"]

_MARKED = r"\[redacted:"

_SHAPES = {
    # Words of vLLM's own begin so too (hf_overrides), so a short one needs a digit or a change of case.
    "hf-token": r"hf_(?=[A-Za-z]*\d|[a-z]+[A-Z]|[A-Z]+[a-z])[A-Za-z0-9]{10,}|hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{10,}",
    "anthropic-key": r"sk-ant-[\w-]{10,}",
    "openai-key": r"sk-[\w-]{16,}",
    "api-key": r"(?:gsk|fw|r8|rpa|tgp_v1|sk_live|rk_live|lsv2_pt|lsv2_sk|wandb_v1)_[\w-]{16,}|(?:xai|pplx|tskey|pk-lf|local)-[\w-]{20,}"
    r"|dapi[0-9a-f]{32}|hv[sb]\.[\w-]{20,}",
    "github-token": r"gh[pousr]_[A-Za-z0-9]{10,}|github_pat_\w{10,}",
    "gitlab-token": r"gl(?:pat|ptt|dt|rt|cbt|oas)-[\w-]{10,}",
    "aws-key": r"(?:AKIA|ASIA|AROA|AIDA|AGPA)[0-9A-Z]{16}",
    "google-key": r"AIza[\w-]{30,}|ya29\.[\w-]{10,}|GOCSPX-[\w-]{10,}",
    "nvidia-key": r"nvapi-[\w-]{16,}",
    "slack-token": r"xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}",
    "docker-token": r"dckr_[po]at_[\w-]{10,}",
    "jwt": r"eyJ[\w-]{6,}\.eyJ[\w-]{2,}(?:\.[\w-]*)?",
}
_SHAPE = re.compile(r"(?<![A-Za-z0-9])(?:" + "|".join(f"({one})" for one in _SHAPES.values()) + ")")

_PEM = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\A[A-Za-z0-9+/=\s\\]*-----END [A-Z ]*PRIVATE KEY-----",  # the end of one, where a log was cut
    re.DOTALL,
)
_WEBHOOK = re.compile(r"(hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/)[\w/-]+")
_LOGIN = re.compile(  # a password may hold an @, and some hold a slash
    rf"(?<=://)(?!{_MARKED})(?:[^\s/:@'\"]{{0,100}}:(?!\d+/)[^\s'\"]{{1,400}}|[^\s/'\"]{{1,400}})@"
)
_QUERY = re.compile(
    r"(?i)([?&](?:[\w-]{0,40}token|[\w-]{0,40}key|sig|[\w-]{0,40}signature|x-amz-credential|awsaccesskeyid|password|auth|code)=)"
    rf"(?!{_MARKED})[^&\s'\"#<>)\]]+"
)
_SCHEME = re.compile(rf"(?i)\b(bearer|basic) (?!{_MARKED})(?=[\w+/.~-]{{0,400}}[\d+/._~-])[\w+/.~-]{{4,}}=*")

_PLAIN_NAME = (
    r"api[_-]?keys?|secret(?:[_-]?(?:access[_-]?)?key|s)?|password|passwd|passphrase|access[_-]?key(?:[_-]?id)?|credentials?|authorization"
    r"|(?:private|account|storage|master|encryption|signing|license)[_-]?key"
    r"|(?:hf|hub|api|access|auth|refresh|id|bearer|session|security|github|gitlab|git|oauth|user|client|bot|login|registry|deploy)[_-]?token"
)
_NAME = rf"(?:(?i:{_PLAIN_NAME})|(?<![a-z])TOKEN)"
_NOTHING = r"(?:None|null|[Tt]rue|[Ff]alse|\$\{?[A-Z_][A-Z0-9_]*\}?)(?![\w-])"
_VALUE = (
    r"(?:(?P<quote>\\?[\"'])(?:(?!(?P=quote))[^\n])*(?P=quote)|\\?[\"'][^\n]*"  # a quote that a cut line leaves open
    r"|\[[^\]\n]*\]?|(?:SecretStr)?\([^)\n]*\)?"
    r"|[^\s\"',;&)\]}<>|](?:[^\s,;&)\]}<>|]|[,;&)\]}<>|](?![\s,;&)\]}<>|\"']|\Z))*)"  # what closes a value may also stand in it
)
_NAMED = re.compile(
    rf"(?P<name>{_NAME})(?P<between>\\?[\"']?(?:\s*=\s*|\s*:(?!//)\s*))"
    rf"(?!{_NOTHING}|\\?[\"']?{_MARKED}|\[\\?[\"']?{_MARKED}|\\?[\"']\\?[\"']|\[\])(?P<scheme>(?i:bearer|basic) )?{_VALUE}"
)
_FLAG = re.compile(
    rf"(?P<flag>(?<![\w-])--?(?:[\w-]{{0,40}}-)?(?:(?i:{_PLAIN_NAME})|token))(?P<gap>=|[ \t]+)(?!-)"
    r"(?P<words>(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s'\"\\|;&]+)+"
    r"(?:[ \t]+(?![-\\|;&])(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s'\"\\|;&]+)+)*)"
)
_SECRET_NAME = re.compile(rf"(?:(?i:{_PLAIN_NAME})|(?<![a-z])TOKEN|^token|(?i:passw|secret|cookie|_dsn|webhook)\w*)$")


def marker(kind: str) -> str:
    """What stands where a secret of this kind stood."""
    return f"[redacted:{kind}]"


@lru_cache(1_024)
def is_secret_name(name: str) -> bool:
    """Whether the value of a variable, field or flag of this name is one: `HF_TOKEN`, `api_key`, `--api-key`; not `max_tokens`."""
    return bool(_SECRET_NAME.search(name))


def without_secrets(text: str) -> str:
    """`text` with a marker in place of every key, token and password. Doing it twice changes nothing."""
    lowered = text.lower()
    for hints, pattern, stand_in in _STEPS:
        if any(hint in lowered for hint in hints):  # most lines have none, and looking for a word costs next to nothing
            text = pattern.sub(stand_in, text)
    return text


def _kind(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _shaped(found: re.Match[str]) -> str:
    return marker(list(_SHAPES)[(found.lastindex or 1) - 1])


def _named(found: re.Match[str]) -> str:
    quote = found["quote"] or ""
    return f"{found['name']}{found['between']}{found['scheme'] or ''}{quote}{marker(_kind(found['name']))}{quote}"


def _flagged(found: re.Match[str]) -> str:
    if found["words"].strip("'\"").startswith("[redacted:"):
        return found[0]
    return f"{found['flag']}{found['gap']}{marker(_kind(found['flag']))}"


_WORDS = ("key", "token", "secret", "passw", "passphrase", "credential", "authorization")

_STEPS: tuple[tuple[tuple[str, ...], re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (("private key-----",), _PEM, marker("private-key")),
    (("hooks",), _WEBHOOK, rf"\1{marker('webhook')}"),
    (("://",), _LOGIN, f"{marker('login')}@"),
    (("?", "&"), _QUERY, rf"\1{marker('query')}"),
    (_WORDS, _FLAG, _flagged),
    (_WORDS, _NAMED, _named),
    (("bearer ", "basic "), _SCHEME, rf"\1 {marker('credentials')}"),
    (
        ("_", "-", "akia", "asia", "aroa", "aida", "agpa", "aiza", "ya29.", "dapi", "hvs.", "hvb.", "eyj"),
        _SHAPE,
        _shaped,
    ),
)
