"""Anonymous id of a host: eight hex digits, the same from night to night.

A keyed hash of the GPUs' UUIDs, else of systemd's machine id, so that nobody can recover either.
Without both, a hash of the hardware: two machines of the same kind then share an id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_repro.errors import InfraError
from vllm_repro.host.machine import nvidia_smi

_KEY = b"vllm-repro: the host of a run"
_MACHINE_ID = Path("/etc/machine-id")


def host_id(machine: Mapping[str, Any], gpus: Sequence[str] = (), number: str = "") -> str:
    """Return the anonymous id of a machine: a hash of GPU UUIDs, machine id or hardware.

    machine: its record in a journal. gpus: UUIDs of its GPUs. number: systemd's machine id.
    """
    if gpus:
        text = json.dumps(["gpus", sorted(gpus)])
    elif number:
        text = json.dumps(["machine", number])
    else:
        kinds = sorted(str(gpu["name"]) for gpu in machine["gpus"])
        text = json.dumps(["kind", machine["cpus"], round(float(machine["memory_gb"])), kinds])
    return hashlib.blake2s(text.encode(), key=_KEY, digest_size=4).hexdigest()


def hosted_by(machine: Mapping[str, Any]) -> str:
    """Return the anonymous id of this machine. machine: its record in a journal."""
    return host_id(machine, _gpu_uuids(), _systemd_machine_id())


def hardware(machine: Mapping[str, Any]) -> str:
    """Return a machine's hardware in words: `2 x NVIDIA H200` or `2 CPUs`."""
    names = [str(gpu["name"]) for gpu in machine["gpus"]]
    if names:
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{machine['cpus']} CPUs"


def _gpu_uuids() -> list[str]:
    """Return the UUIDs of this machine's GPUs; empty if `nvidia-smi` fails."""
    try:
        numbers = nvidia_smi("uuid")
    except InfraError:
        return []
    return [number for (number,) in numbers if number.startswith(("GPU-", "MIG-"))]


def _systemd_machine_id() -> str:
    """Return systemd's id of this machine; empty in a container without one."""
    try:
        return _MACHINE_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
