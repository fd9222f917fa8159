from __future__ import annotations

import re
import socket
from dataclasses import asdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.host.host_id import hardware, host_id, hosted_by
from vllm_repro.host.machine import look

MACHINE: dict[str, Any] = {
    "os": "Linux 6.1",
    "cpus": 16,
    "memory_gb": 125.7,
    "gpus": [{"name": "NVIDIA H200"}] * 2,
}


def test_a_machine_keeps_its_id_with_another_kernel() -> None:
    assert host_id(MACHINE) == host_id({**MACHINE, "os": "Linux 6.2", "memory_gb": 125.9})
    assert host_id(MACHINE) != host_id({**MACHINE, "gpus": []})
    assert host_id(MACHINE, ["GPU-b", "GPU-a"]) == host_id(
        {**MACHINE, "cpus": 8}, ["GPU-a", "GPU-b"], "x"
    )
    assert host_id(MACHINE, ["GPU-a"]) != host_id(MACHINE, ["GPU-b"])
    assert host_id(MACHINE, number="x") != host_id(MACHINE, number="y")


@given(st.text(max_size=30))
def test_an_id_is_eight_hex_digits(number: str) -> None:
    assert re.fullmatch("[0-9a-f]{8}", host_id(MACHINE, number=number))


def test_an_id_holds_no_name_of_this_machine() -> None:
    machine = asdict(look())
    found = hosted_by(machine)
    assert found == hosted_by(machine)
    assert socket.gethostname() not in found + hardware(machine)


def test_hardware_in_words() -> None:
    assert (hardware(MACHINE), hardware({**MACHINE, "gpus": []})) == ("2 x NVIDIA H200", "16 CPUs")
