"""Which host a run was made on, as eight hex digits that say nothing else of it.

The same machine has the same id from night to night, and another one another. It is made from random numbers that the machine has
anyway (those of its GPUs; else systemd's machine id), by a keyed hash, so neither name nor number can be read back. Where there are none
it is made from what the hardware is, so that two machines of the same kind have one id.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["gpu_numbers", "hardware", "host_id", "hosted_by", "machine_number"]

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
    return host_id(machine, gpu_numbers(), machine_number())


def hardware(machine: Mapping[str, Any]) -> str:
    """`2 x NVIDIA H200`, or `2 CPUs`: what a reader knows a host by."""
    names = [str(gpu["name"]) for gpu in machine["gpus"]]
    if names:
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{machine['cpus']} CPUs"


def gpu_numbers() -> list[str]:
    """The UUIDs of the GPUs by `nvidia-smi`; none where it is absent or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        query = [tool, "--query-gpu=uuid", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [line for line in lines if line.startswith(("GPU-", "MIG-"))]


def machine_number() -> str:
    """systemd's id of this machine; empty in a container that has none."""
    try:
        return _MACHINE_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
