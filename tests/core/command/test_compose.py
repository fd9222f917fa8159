from __future__ import annotations

import pytest

from tests.core.command.test_container import SPEC
from vllm_repro.command.compose import compose_text, service
from vllm_repro.command.container import ContainerSpec, Publish


def test_every_field_is_written() -> None:
    body = service(SPEC, profile="p")
    device = {"driver": "nvidia", "capabilities": ["gpu"], "device_ids": ["0", "1"]}
    assert body == {
        "image": "i:1",
        "profiles": ["p"],
        "entrypoint": ["vllm", "serve"],
        "command": ["m", "--x", '{"a": 1}', "--y"],
        "init": True,
        "cap_drop": ["ALL"],
        "cap_add": ["CAP_DAC_OVERRIDE"],
        "security_opt": ["no-new-privileges"],
        "environment": {"HF_TOKEN": None, "A": "b c"},
        "ports": ["127.0.0.1:80:8000", "127.0.0.1:81:82"],
        "volumes": [{"type": "bind", "source": "/a,b", "target": "/c", "read_only": True}],
        "ipc": "private",
        "shm_size": 512 * 1024**2,
        "network_mode": "net",
        "ulimits": {"nofile": {"soft": 1, "hard": 2}},
        "deploy": {"resources": {"reservations": {"devices": [device]}}},
    }


@pytest.mark.parametrize(("gpus", "count"), [("all", "all"), ("2", 2)])
def test_gpus_may_be_a_count(gpus: str, count: object) -> None:
    body = service(ContainerSpec(image="i", gpus=gpus))
    assert body["deploy"] == {
        "resources": {
            "reservations": {
                "devices": [{"driver": "nvidia", "capabilities": ["gpu"], "count": count}]
            }
        }
    }


def test_a_file_has_a_heading_indented_lists_and_doubled_dollars() -> None:
    spec = ContainerSpec(image="i", argv=("m", "a$b"), publish=(Publish(8),))
    assert compose_text({"s": service(spec)}, heading="one\ntwo").splitlines() == [
        "# one",
        "# two",
        "services:",
        "  s:",
        "    image: i",
        "    command:",
        "      - m",
        "      - a$$b",
        "    init: true",
        "    cap_drop:",
        "      - ALL",
        "    cap_add:",
        "      - CAP_DAC_OVERRIDE",
        "    security_opt:",
        "      - no-new-privileges",
        "    ports:",
        "      - 127.0.0.1:8:8000",
    ]
