"""Removal of names that identify a machine or a user: home paths, host names, addresses, e-mail.

It keeps loopback and wildcard addresses, and public sites in vLLM's messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address

ADDRESS, HOST, USER, EMAIL = "[address]", "[host]", "[user]", "[email]"

_HOME = re.compile(
    r"((?:/|\\\\?)(?:home|Users|users)(?:/|\\\\?))(?!\[user\])[^/\\\s'\":,;()\[\]{}<>|&?#]+"
)

_SCHEMES = (
    r"(?:https?|tcp|udp|wss?|grpcs?|rediss?|nats|amqps?|postgres(?:ql)?|mysql|mongodb(?:\+srv)?"
    r"|ssh|git|s3|gs|zmq|nccl|etcd)"
)
_URL_HOST = re.compile(
    rf"(?i)\b({_SCHEMES}://(?:\[redacted:[\w-]+\]@)?)(?!\[(?:host|address)\])"
    rf"(\[[0-9a-f:.]+(?:%\w+)?\]|[^\s/:?#'\"<>\\()\[\],{{}}|`]+)"
)
_PUBLIC = re.compile(
    r"(?i)(?:[\w-]+\.)*(?:github\.com|githubusercontent\.com|huggingface\.co|hf\.co|vllm\.ai"
    r"|pytorch\.org|python\.org|nvidia\.com|amd\.com|openai\.com|docker\.com|docker\.io"
    r"|readthedocs\.io|ray\.io|modelscope\.cn|arxiv\.org|w3\.org|pydantic\.dev"
    r"|fastapi\.tiangolo\.com)"
)
_SAME_MACHINE = ("localhost", "ip6-localhost", "host.docker.internal", "0.0.0.0", "*")

_INSIDE = re.compile(
    r"(?i)(?<![\w./@-])(?!\d+\.)[a-z0-9][\w-]*(?:\.[a-z0-9][\w-]*)*"
    r"\.(?:internal|lan|corp|intranet|localdomain|home\.arpa|svc|cluster\.local"
    r"|compute\.amazonaws\.com)(?![\w-]|\.\w|\()"
    # without a digit or hyphen: threading.local
    r"|(?<![\w./@-])(?=[\w.]*[\d-])[a-z0-9][\w-]*\.local(?![\w-]|\.\w|\()"
    r"|(?<![\w-])ip-\d{1,3}(?:-\d{1,3}){3}(?:\.[\w.-]*\w)?"
)
_NCCL = re.compile(r"(?<![\w./-])(?!\[host\])[\w.-]+(?=:\d+:\d+ \[\d+\] NCCL )")
_PEER = re.compile(r"(?<=\[)(?!localhost\]|host\]|address\])[A-Za-z][\w.-]*(?=\]:\d{2,5}\b)")
_PROMPT = re.compile(r"(?<![\w.@-])[A-Za-z_][\w.-]*@(?!\[host\])[\w.-]+(?=:[~/]\S*[$#])")
_EMAIL = re.compile(
    r"(?<![\w.+-])[\w.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}(?![\w-])"
)
_NAMED = re.compile(
    r"(?i)((?:(?<![\w-])--(?:host|master-addr|headless-host|node-ip-address|data-parallel-address)"
    r"(?:=|[ \t]+)"
    r"|(?<![\w-])(?:\w*_)?"
    r"(?:hostname|nodename|host|host_ip|master_addr|node_ip(?:_address)?|master_ip)"
    r"(?:=|['\"]\s{0,9}:\s{0,9}))['\"]?)"
    r"(?!\[|none\b|null\b|true\b|false\b)([A-Za-z][\w.-]*)"
)
# 0.10.1.1 is a release: no host has an address that begins with 0.
_IPV4 = re.compile(
    r"(?<![\w.])(?<!==)(?!0\.)((?:\d{1,3}\.){3}\d{1,3})(?![\w]|\.\d)(?=(:\d{2,5}\b)?)"
)
_IPV6 = re.compile(
    r"(?<![\w:.])([0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?:(?<=:)(?:\d{1,3}\.){3}\d{1,3})?)"
    r"(?:%\w+)?(?![\w:.]*\w)"
)


def without_private_names(text: str) -> str:
    """Return `text` with `[user]`, `[host]`, `[address]` and `[email]` in place of names.

    A second pass changes nothing.
    """
    lowered = text.lower()
    for hints, pattern, replacement in _STEPS:
        for hint in hints:
            if hint in lowered:
                text = pattern.sub(replacement, text)
                break
    return text


def _address(word: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address that a word is, or None."""
    try:
        return ip_address(word)
    except ValueError:
        return None


def _is_public(word: str) -> bool:
    """Return True for a loopback or wildcard address, `localhost` or the like, or a public site."""
    address = _address(word.strip("[]"))
    if address is not None:
        return address.is_loopback or address.is_unspecified
    return word.lower() in _SAME_MACHINE or bool(_PUBLIC.fullmatch(word))


def _hide_url_host(match: re.Match[str]) -> str:
    """Return a matched URL without its host, unless that is public."""
    host = match[2]
    if _is_public(host):
        return match[0]
    return match[1] + (ADDRESS if _address(host.strip("[]")) is not None else HOST)


def _hide_named_host(match: re.Match[str]) -> str:
    """Return a matched host setting (`--host NAME`) without its name, unless that is public."""
    return match[0] if _is_public(match[2]) else match[1] + HOST


def _hide_internal_host(match: re.Match[str]) -> str:
    """Return `[host]` for a matched host name of an internal network, unless it is public."""
    return match[0] if _is_public(match[0]) else HOST


def _hide_ipv4(match: re.Match[str]) -> str:
    """Return `[address]` for a matched IPv4 address that may identify a machine."""
    address = _address(match[1])
    if address is None or _is_public(match[1]) or match[1].startswith("255."):
        return match[0]
    # A public address without a port may as well be a package version.
    return ADDRESS if not address.is_global or match[2] else match[0]


def _hide_ipv6(match: re.Match[str]) -> str:
    """Return `[address]` for a matched IPv6 address that may identify a machine."""
    address = _address(match[1])
    if not isinstance(address, IPv6Address) or _is_public(match[1]):
        return match[0]
    # C++ names (c10d::add) parse as addresses of unassigned ranges; assigned ones begin with 2 or
    # 3.
    real = address.is_private or address.ipv4_mapped is not None or match[1][:1] in ("2", "3")
    return ADDRESS if real else match[0]


_STEPS: tuple[
    tuple[tuple[str, ...], re.Pattern[str], str | Callable[[re.Match[str]], str]], ...
] = (
    (("home", "users"), _HOME, rf"\1{USER}"),
    (("://",), _URL_HOST, _hide_url_host),
    (("@",), _PROMPT, f"{USER}@{HOST}"),
    (("@",), _EMAIL, EMAIL),
    (("nccl",), _NCCL, HOST),
    (("]:",), _PEER, HOST),
    (("host", "node", "master", "address"), _NAMED, _hide_named_host),
    (
        (".internal", ".lan", ".corp", ".local", "intranet", ".home", ".svc", "amazonaws", "ip-"),
        _INSIDE,
        _hide_internal_host,
    ),
    ((".",), _IPV4, _hide_ipv4),
    ((":",), _IPV6, _hide_ipv6),
)
