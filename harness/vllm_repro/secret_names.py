"""Rules for names: which values are secret, which variables of vLLM may be recorded or set."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_HARMLESS = re.compile(
    r"^allow_|(?:^|_)(?:budget|count|dir|directory|enabled|file|folder|interval|length"
    r"|limit|path|sizes?|sock|socket|threshold|timeout|ttl|type)$"
)
"""A place, a count or a switch: `HF_TOKEN_PATH`."""
_SECRET = re.compile(
    r"secret|passw|passphrase|credential|webhook|cookie|apikey|authorization|(?:^|_)auth(?:_|$)"
    r"|_pwd$|^token$"
    r"|(?:^|_)(?:access|account|api|bot|client|consumer|deploy|encryption|hmac|license|master"
    r"|private|publishable|service|shared|signing|ssh|storage|subscription)_keys?(?:_|$)"
    r"|(?:^|_)(?:access|api|app|auth|bearer|bot|client|csrf|deploy|git|github|gitlab|hf|hub|id|job"
    r"|login|oauth|personal|refresh|registry|security|session|sso)_token(?:_|$)"
)
"""In any case: `api_key` and `hf_token` are secret, `cache_key` and `next_token` are not."""
_SECRET_IN_CAPITALS = re.compile(
    r"_(?:pass|pat|dsn|sas|jwt|otp)$|(?:^|_)key(?!board|file|word)[a-z]*(?:_\d+)?$|token(?:_\d+)?$"
)
"""Environment variables: `DB_PASS` is secret, `forward_pass` is not."""
_MODEL_TOKEN = re.compile(
    r"(?:^|_)(?:bos|cls|end|eos|image|last|mask|max|min|new|next|num|pad|per|prompt|sep|special"
    r"|start|stop|think|unk)_token(?:_\d+)?$"
)

_STEERS = re.compile(
    r"PYTHONHASHSEED"  # of the hashes of cached blocks
    r"|(?:AITER|ASCEND|CUBLAS|CUDA|CUDNN|FLASHINFER|FLASH_ATTN|GLOO|GOMP|HF|HIP|HSA|KMP|LMCACHE"
    r"|MKL|MOONCAKE|NCCL|NIXL|NUMBA|NUMEXPR|NVIDIA|NVSHMEM|NVTE|OMP|OPENBLAS|PYTORCH|RAY|RCCL|ROCM"
    r"|ROCR|SAFETENSORS|TOKENIZERS|TORCH|TORCHDYNAMO|TORCHINDUCTOR|TRANSFORMERS|TRITON|UCX|VLLM"
    r"|XLA)_\w+"
)


@lru_cache(4_096)
def is_secret_name(name: str) -> bool:
    """Return True if the value of a variable, field or flag of this name must not be shown.

    Examples: `HF_TOKEN`, `api_key`, `--api-key`.
    """
    words = "_".join(_WORD.findall(name)).lower()
    if _HARMLESS.search(words):
        return False
    capitals = not any(letter.islower() for letter in name)
    return bool(
        _SECRET.search(words)
        or (capitals and _SECRET_IN_CAPITALS.search(words) and not _MODEL_TOKEN.search(words))
    )


def steers_vllm(name: str) -> bool:
    """Return True for a variable of vLLM or of a library that it uses, such as `NCCL_DEBUG`.

    False for `VLLM_REPRO_…`, the variables of this package.
    """
    return bool(_STEERS.fullmatch(name)) and not name.startswith("VLLM_REPRO_")


def is_recorded(name: str) -> bool:
    """Return True for a variable that steers vLLM or its libraries and is not secret.

    Values of others are not recorded.
    """
    return steers_vllm(name) and not is_secret_name(name)


_NAMES_A_PATH = re.compile(r"_(?:DIR|DIRECTORY|FILE|HOME|LIB|LIBRARY|PATH|PLUGIN|ROOT)$")
_CALLS_OUT = re.compile(r"^(?:HF_ENDPOINT|RAY_ADDRESS|RAY_RUNTIME_ENV_HOOK)$")
"""Variables that name a machine of the reporter's choice, or a function to call.

The caller's token or the engine would go to that machine.
"""


def variable_mistakes(variables: Iterable[tuple[str, str]]) -> list[str]:
    """Return a message for each (name, value) of a reported command that must not be set here.

    The command may come from a stranger, and its server runs on this host. `LD_PRELOAD`,
    `PYTHONWARNINGS` or `PATH` would run the stranger's code; so would a library at a path that the
    stranger chose.

    Allowed: switches and numbers of vLLM and its libraries (`VLLM_…`, `NCCL_…`), URLs, and secrets,
    whose values come from the caller.
    """
    mistakes = []
    for name, value in variables:
        if is_secret_name(name):
            continue
        if not steers_vllm(name):
            mistakes.append(f"{name} is not a variable of vLLM or its libraries: remove it")
        elif _CALLS_OUT.match(name):
            mistakes.append(
                f"{name} connects this host to one of the reporter's choice: remove it, or set it"
                " yourself"
            )
        elif _NAMES_A_PATH.search(name) or (
            "/" in value and not value.startswith(("http://", "https://"))
        ):
            mistakes.append(f"{name} names a path on the reporter's machine: remove it")
    return mistakes
