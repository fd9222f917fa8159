"""Removal of keys, tokens and passwords from text.

A secret is found by its shape (`hf_…`) or by the name beside it (`--api-key`, `HF_TOKEN=`,
`'api_key': [`). A marker such as `[redacted:hf-token]` replaces it. The marker is one word of a
command line, and a second pass does not change it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from vllm_repro.secret_names import is_secret_name

_MARKED = r"\[redacted:"

_SHAPES = {
    # vLLM has words such as hf_overrides, so a short token needs a digit or a change of case.
    "hf-token": (
        r"hf_(?=[A-Za-z]*\d|[a-z]+[A-Z]|[A-Z]+[a-z])[A-Za-z0-9]{10,}|hf_[A-Za-z0-9]{16,}"
        r"|api_org_[A-Za-z0-9]{10,}"
    ),
    "anthropic-key": r"sk-ant-[\w-]{10,}",
    "openai-key": r"sk-[\w-]{16,}",
    "api-key": (
        r"(?:gsk|fw|r8|rpa|tgp_v1|sk_live|rk_live|lsv2_pt|lsv2_sk|wandb_v1)_[\w-]{16,}"
        r"|(?:xai|pplx|tskey|pk-lf|local)-[\w-]{20,}"
        r"|dapi[0-9a-f]{32}|hv[sb]\.[\w-]{20,}"
    ),
    "github-token": r"gh[pousr]_[A-Za-z0-9]{10,}|github_pat_\w{10,}",
    "gitlab-token": r"gl(?:pat|ptt|dt|rt|cbt|oas)-[\w-]{10,}",
    "aws-key": r"(?:AKIA|ASIA|AROA|AIDA|AGPA)[0-9A-Z]{16}",
    "google-key": r"AIza[\w-]{30,}|ya29\.[\w-]{10,}|GOCSPX-[\w-]{10,}",
    "nvidia-key": r"nvapi-[\w-]{16,}",
    "slack-token": r"xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}",
    "docker-token": r"dckr_[po]at_[\w-]{10,}",
    # not pypi-attestations-0.0.21
    "package-token": r"npm_[A-Za-z0-9]{30,}|pypi-(?=[a-z0-9_-]{0,60}[A-Z])[\w-]{16,}",
    "jwt": r"eyJ[\w-]{6,}\.eyJ[\w-]{2,}(?:\.[\w-]*)?",
}
_SHAPE = re.compile(
    r"(?<![A-Za-z0-9])(?:" + "|".join(f"({shape})" for shape in _SHAPES.values()) + ")"
)

_BLOCK = r"(?:[A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?|PGP MESSAGE)-----"
_PEM = re.compile(
    rf"-----BEGIN {_BLOCK}.*?(?:-----END {_BLOCK}|\Z)"
    rf"|\A[A-Za-z0-9+/=\s\\]*-----END {_BLOCK}",  # the end of a block whose start was cut off
    re.DOTALL,
)
_WEBHOOK = re.compile(
    r"(hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/)[\w/-]+"
)
_LOGIN = re.compile(  # a password may contain @ and /
    rf"(?<=://)(?!{_MARKED})(?:[^\s/:@'\"]{{0,100}}:(?!\d+/)[^\s'\"]{{1,400}}|[^\s/'\"]{{1,400}})@"
)
_CURL_USER = re.compile(
    r"(?<![\w-])((?:-u|--user|--proxy-user)["
    rf" \t=]*['\"]?)(?!{_MARKED}|\d+:\d+(?![^\s'\"]))[^\s:'\"]+:[^\s'\"]+"
)
_QUERY = re.compile(rf"([?&]([\w-]{{1,60}})=)(?!{_MARKED})[^&\s'\"#<>)\]]+")
_QUERY_NAMES = re.compile(
    r"(?i)sig|code|key|auth|.*(?:token|key|signature|-credential)|awsaccesskeyid"
)
_SCHEME = re.compile(
    rf"(?i)\b(basic|bearer) (?!{_MARKED})"
    r"(?:(?<=basic )(?=[\w+/]{0,400}(?:\d|=|(?-i:[a-z][A-Z])))[\w+/]{6,}=*"
    r"|(?<=bearer )(?:(?=[\w+/.~-]{0,400}[\d+/._~-])[\w+/.~-]{4,}=*"
    # A bearer token may hold letters only. These words begin prose about bearer tokens.
    r"|(?!(?:auth|author|credential|format|header|method|prefix|realm|scheme|token)[a-z]*\b)"
    r"\w{6,}=*))"
)
_COOKIE = re.compile(
    r"(?i)((?<![\w-])(?:set-)?cookie\\?[\"']?[ \t]{0,9}[:=]["
    rf" \t]{{0,9}}\\?[\"']?)(?!{_MARKED})[^\s'\"\\\[({{][^'\"\\\n]*"
)

_NOTHING = r"(?:None|null|[Tt]rue|[Ff]alse|\$\{?[A-Z_][A-Z0-9_]*\}?)(?![\w-])"
_NAME = re.compile(
    r"(?<![\w-])(?P<name>[\w-]+)(?P<between>(?:\\?[\"']\]?)?[ \t]{0,9}(?:=|:(?!//))[ \t]{0,9})"
)
_VALUE = re.compile(
    rf"(?!=|{_NOTHING}|\\?[\"']?{_MARKED}|\[\\?[\"']?{_MARKED}|\\?[\"']\\?[\"']|\[\]|\{{\}})"
    r"(?P<scheme>(?i:basic|bearer|digest|token) )?"
    # a quote that a cut line leaves open
    r"(?:(?P<quote>\\?[\"'])(?:(?!(?P=quote))[^\n])*(?P=quote)|\\?[\"'][^\n]*"
    r"|\[[^\]\n]*\]?|\{[^}\n]*\}?|(?:SecretStr)?\([^)\n]*\)?"
    # What closes a value may also be part of it, except a last quote: it closes what the name is
    # in, as in -H "Authorization: Bearer x".
    r"|[^\s\"',;&)\]}<>|](?:[^\s,;&)\]}<>|]|[,;&)\]}<>|](?![\s,;&)\]}<>|\"']|\Z))*(?<![\"'\\]))"
)
_WORD = r"(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s'\"\\|;&]+)+"
_FLAG = re.compile(r"(?<![\w-])(?P<name>--?[A-Za-z][\w-]*)(?:=|[ \t]+)")
_FLAG_VALUES = re.compile(rf"(?!-|['\"]?{_MARKED}){_WORD}(?:[ \t]+(?![-\\|;&]){_WORD})*")
_QUOTED_FLAG = re.compile(r"(?P<quote>\\?['\"])(?P<name>--?[A-Za-z][\w-]*)")
_ITEM = rf"(?!\\?['\"](?:-|{_MARKED}))\\?(?:'[^'\n]*'|\"[^\"\n]*\")"
_ITEMS = re.compile(
    rf"(?P<comma>\\?['\"]\s{{0,9}},\s{{0,9}}){_ITEM}(?:\s{{0,9}},\s{{0,9}}{_ITEM})*"
)
_EQUALS = re.compile(rf"=(?!{_MARKED})[^\"'\\\n]+")


def marker(kind: str) -> str:
    """Return `[redacted:KIND]`, the text that replaces a secret of this kind."""
    return f"[redacted:{kind}]"


def kind_of(name: str) -> str:
    """Return the kind of secret that a name holds: `HF_TOKEN` gives `hf-token`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def without_secrets(text: str) -> str:
    """Return `text` with markers in place of its secrets. A second pass changes nothing."""
    lowered = text.lower()
    for hints, step in _STEPS:
        for hint in hints:
            if hint in lowered:  # for speed: most lines hold no hint
                text = step(text)
                break
    return text


def _marker_by_shape(match: re.Match[str]) -> str:
    """Return the marker for a secret that was recognised by its shape."""
    return marker(list(_SHAPES)[(match.lastindex or 1) - 1])


def _replace(
    text: str, name: re.Pattern[str], value: Callable[[str, re.Match[str]], tuple[int, str] | None]
) -> str:
    """Return `text` with the values after secret names replaced.

    name: matches a name, as its group `name`. value: returns (where the value after such a match
    ends, what replaces it), or None to keep the text.
    """
    parts: list[str] = []
    done = at = 0
    while match := name.search(text, at):
        at = match.end("name")  # the value of another name may hold a secret name: `env=HF_TOKEN=x`
        if is_secret_name(match["name"]) and (replaced := value(text, match)):
            parts += (text[done : match.end()], replaced[1])
            done = at = replaced[0]
    return "".join((*parts, text[done:]))


def _assigned(text: str, match: re.Match[str]) -> tuple[int, str] | None:
    """Return the end of the value after `NAME=` or `NAME:`, and its marker.

    None for prose, or without a value.
    """
    value = _VALUE.match(text, match.end())
    name, between = match["name"], match["between"]
    # Prose and source code: `token = next(ids)`, `token: the last one`, `token=42`.
    if (
        name == "token"
        and not (between == "=" and value and not value[0].isdecimal())
        and between[:1] not in "\\\"'"
    ):
        return None
    quote = value["quote"] or "" if value else ""
    return value and (value.end(), f"{value['scheme'] or ''}{quote}{marker(kind_of(name))}{quote}")


def _after_flag(text: str, match: re.Match[str]) -> tuple[int, str] | None:
    """Return the end of the values after a flag such as `--api-key`, and their marker, or None."""
    values = _FLAG_VALUES.match(text, match.end())
    return values and (values.end(), marker(kind_of(match["name"])))


def _after_quoted_flag(text: str, match: re.Match[str]) -> tuple[int, str] | None:
    """Return the end of a flag's value in a printed list of arguments, and its marker.

    Such as `['--api-key', 'x']` or `'--api-key=x'`. None without a value.
    """
    kind = marker(kind_of(match["name"]))
    if items := _ITEMS.match(text, match.end()):
        return items.end(), f"{items['comma']}{match['quote']}{kind}{match['quote']}"
    value = _EQUALS.match(text, match.end())
    return value and (value.end(), f"={kind}")


def _hide_in_query(match: re.Match[str]) -> str:
    """Return a matched parameter of a URL, with a marker as its value if that is a secret."""
    secret = is_secret_name(match[2]) or _QUERY_NAMES.fullmatch(match[2])
    return f"{match[1]}{marker('query')}" if secret else match[0]


_NAME_PARTS = (
    # shorter than a list
    [
        "key",
        "token",
        "secret",
        "passw",
        "passphrase",
        "credential",
        "auth",
        "webhook",
        "cookie",
        "_pass",
        "_pwd",
        "-pwd",
        "_pat",
        "_dsn",
        "_sas",
        "_jwt",
        "_otp",
    ]
)
_STEPS: tuple[tuple[Sequence[str], Callable[[str], str]], ...] = (
    (("private key", "pgp message"), partial(_PEM.sub, marker("private-key"))),
    (("hooks",), partial(_WEBHOOK.sub, rf"\1{marker('webhook')}")),
    (("://",), partial(_LOGIN.sub, f"{marker('login')}@")),
    (("curl", "wget"), partial(_CURL_USER.sub, rf"\1{marker('login')}")),
    (("?", "&"), partial(_QUERY.sub, _hide_in_query)),
    (("cookie",), partial(_COOKIE.sub, rf"\1{marker('cookie')}")),
    (_NAME_PARTS, partial(_replace, name=_QUOTED_FLAG, value=_after_quoted_flag)),
    (_NAME_PARTS, partial(_replace, name=_FLAG, value=_after_flag)),
    (_NAME_PARTS, partial(_replace, name=_NAME, value=_assigned)),
    (("bearer ", "basic "), partial(_SCHEME.sub, rf"\1 {marker('credentials')}")),
    (
        (
            "_",
            "-",
            "akia",
            "asia",
            "aroa",
            "aida",
            "agpa",
            "aiza",
            "ya29.",
            "dapi",
            "hvs.",
            "hvb.",
            "eyj",
        ),
        partial(_SHAPE.sub, _marker_by_shape),
    ),
)
"""Steps of `without_secrets`, each with the texts of which one must be present."""
