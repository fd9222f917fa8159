"""Which host a run was made on, as eight hex digits that say nothing else of it.

The same machine has the same id from night to night, and another one another. It is made from random numbers that the machine has
anyway (those of its GPUs; else systemd's machine id), by a keyed hash, so neither name nor number can be read back. Where there are none
it is made from what the hardware is, so that two machines of the same kind have one id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_repro.errors import InfraError
from vllm_repro.host.machine import nvidia_smi

__all__ = ["hardware", "host_id", "hosted_by"]

_KEY = b"vllm-repro: the host of a run"
_MACHINE_ID = Path("/etc/machine-id")


def host_id(machine: Mapping[str, Any], gpus: Sequence[str] = (), number: str = "") -> str:
    """Of `machine`, as a journal's first line has it. gpus: their UUIDs. number: systemd's machine id. Pure."""
    if gpus:
        told = json.dumps(["gpus", sorted(gpus)])
    elif number:
        told = json.dumps(["machine", number])
    else:
        kinds = sorted(str(gpu["name"]) for gpu in machine["gpus"])
        told = json.dumps(["kind", machine["cpus"], round(float(machine["memory_gb"])), kinds])
    return hashlib.blake2s(told.encode(), key=_KEY, digest_size=4).hexdigest()


def hosted_by(machine: Mapping[str, Any]) -> str:
    """The id of this machine, which `machine` describes."""
    return host_id(machine, _gpu_numbers(), _machine_number())


def hardware(machine: Mapping[str, Any]) -> str:
    """`2 x NVIDIA H200`, or `2 CPUs`: what a reader knows a host by."""
    names = [str(gpu["name"]) for gpu in machine["gpus"]]
    if names:
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{machine['cpus']} CPUs"


def _gpu_numbers() -> list[str]:
    """The UUIDs of the GPUs; none where `nvidia-smi` is absent, fails or does not answer."""
    try:
        found = nvidia_smi("uuid")
    except InfraError:
        return []
    return [number for (number,) in found if number.startswith(("GPU-", "MIG-"))]


def _machine_number() -> str:
    """systemd's id of this machine; empty in a container that has none."""
    try:
        return _MACHINE_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
