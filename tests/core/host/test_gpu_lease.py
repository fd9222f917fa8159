"""Leases of GPUs, with stubs of nvidia-smi and dmesg (fixtures/gpu_stubs)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.conftest import StubGpus
from vllm_repro.errors import InfraError
from vllm_repro.host import machine
from vllm_repro.host.gpu_lease import await_free_memory, leased_gpus
from vllm_repro.host.machine import Gpu, GpuUse, gpu_trouble, gpu_use, gpus, nvidia_smi, worst_use

HOLD = """
import sys, time
from vllm_repro.host.gpu_lease import leased_gpus
with leased_gpus(int(sys.argv[1]), lambda gpu: "") as cards:
    print(",".join(cards), flush=True)
    time.sleep(60)
"""


def any_card(_: Gpu) -> str:
    return ""


def taken(count: int = 1) -> tuple[tuple[str, ...], list[str]]:
    """Return the cards of a lease of `count`, and the lines about cards that were set aside."""
    lines: list[str] = []
    with leased_gpus(count, any_card, lines.append) as cards:
        return cards, lines


@pytest.mark.usefixtures("stub_gpus")
def test_processes_share_no_card_and_a_killed_one_frees_its() -> None:
    words = [sys.executable, "-c", HOLD, "2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert (process.stdout.readline(), taken(2)[0]) == ("0,1\n", ("2", "3"))
        threading.Timer(0.5, process.kill).start()
        began = time.monotonic()
        assert taken(3)[0] == ("0", "1", "2"), "it waits for the killed one"
        assert time.monotonic() - began > 0.3


def test_one_process_cannot_wait_for_its_own_card(stub_gpus: StubGpus) -> None:
    stub_gpus.say(cards=[{}])
    with (
        leased_gpus(1, any_card),
        pytest.raises(InfraError, match="GPU 0 is in use by this process"),
    ):
        taken()
    assert taken()[0] == ("0",)


def test_a_card_is_waited_for_until_its_memory_is_free(stub_gpus: StubGpus) -> None:
    stub_gpus.say(cards=[{"memory.used": [70000, 30000, 4]}])
    assert taken() == (("0",), [])
    stub_gpus.say(cards=[{}, {"memory.used": [70000, 30000, 4]}])
    assert await_free_memory(["1"]) > 0
    assert nvidia_smi("memory.used") == [["4"], ["4"]]


def test_memory_that_is_not_freed_names_card_and_mib(
    stub_gpus: StubGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_repro.host.gpu_lease._DRAIN_S", 1.0)
    stub_gpus.say(cards=[{}, {"memory.used": 70000}])
    busy = r"GPU 1 \(stub of an H200\) is busy: 70,000 MiB of it are in use"
    for wait in (lambda: await_free_memory(["0", "1"]), lambda: taken(2)):
        with pytest.raises(InfraError, match=busy) as caught:
            wait()
        assert "vllm-repro clean" in caught.value.hint
    await_free_memory(["0"])
    await_free_memory([])


@pytest.mark.parametrize(
    ("state", "xid", "why"),
    [
        ({"memory.used": 70000}, "", "is busy: 70,000 MiB of it are in use; set aside"),
        ({"clocks_throttle_reasons.hw_slowdown": "Active"}, "", "slowed down by its hardware"),
        (
            {},
            "79, pid=<unknown>, GPU has fallen off the bus.",
            "had Xid 79 since this machine booted; set aside",
        ),
        # That Xid is of the program.
        ({}, "31, pid=1, name=VLLM::EngineCor", None),
    ],
)
def test_a_busy_slowed_or_failed_card_is_set_aside_and_named(
    stub_gpus: StubGpus, state: dict[str, object], xid: str, why: str | None
) -> None:
    stub_gpus.say(cards=[state, {}])
    tool = Path(os.environ["TMPDIR"]) / "dmesg"
    tool.unlink()
    tool.write_text(f"#!/bin/sh\necho '[ 12.3] NVRM: Xid (PCI:0000:17:00): {xid}'\n", "utf-8")
    tool.chmod(0o755)
    cards, lines = taken()
    assert (cards, len(lines)) == (("0",), 0) if why is None else (("1",), 1)
    assert all(line.startswith("GPU 0 (stub of an H200) ") for line in lines)
    assert all((why or "") in line for line in lines)


def test_only_cards_that_do_and_that_are_visible_are_taken(
    stub_gpus: StubGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_gpus.say(cards=[{"memory.total": 24576}, {}, {}])

    def large(gpu: Gpu) -> str:
        return "" if gpu.memory_gb > 100 else "small"

    with leased_gpus(1, large) as cards:
        assert cards == ("1",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert taken()[0] == ("2",)
    with pytest.raises(InfraError, match="2 GPUs are needed: CUDA_VISIBLE_DEVICES=2 leaves 1"):
        taken(2)


def test_the_error_of_a_failing_nvidia_smi_is_kept(stub_gpus: StubGpus) -> None:
    words = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    stub_gpus.say(fail=words)
    assert (gpus(), gpu_trouble()) == ((), f"nvidia-smi fails: {words}")
    with pytest.raises(InfraError, match=words):
        gpu_use(["0"])
    stub_gpus.say()
    assert (len(gpus()), gpu_trouble()) == (4, "")


def test_a_hanging_nvidia_smi_is_waited_for_once(
    stub_gpus: StubGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_PATIENCE_S", 1.0)
    stub_gpus.say(sleep=30)
    assert gpus() == ()
    monkeypatch.setattr("subprocess.run", None)  # a second call would be a TypeError
    assert gpus() == ()
    assert gpu_trouble() == "nvidia-smi did not answer in 1 s"


def test_the_worst_of_the_leased_cards(stub_gpus: StubGpus) -> None:
    hot = {
        "temperature.gpu": 70,
        "clocks.sm": 1200,
        "clocks_throttle_reasons.hw_slowdown": "Active",
    }
    stub_gpus.say(cards=[{}, hot, {"power.draw": "[N/A]", "temperature.gpu": 90}, {}])
    assert gpu_use(["0", "1"]) == GpuUse(
        memory_mib=4, temperature_c=70, power_w=120.5, clock_mhz=1200, slowed=True
    )
    assert gpu_use(["2"]) == GpuUse(
        memory_mib=4, temperature_c=90, power_w=None, clock_mhz=1980, slowed=False
    )
    assert gpu_use(["7"]) == worst_use([]) is None
