"""What leased cards do beside a load, by the stub of nvidia-smi."""

from __future__ import annotations

import pytest

from tests.conftest import StubGpus
from vllm_repro.errors import InfraError
from vllm_repro.host.machine import GpuUse, gpu_use, worst_use


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
    alone = gpu_use(["2"])
    assert alone is not None
    assert (alone.power_w, alone.temperature_c, alone.slowed) == (None, 90, False)
    assert gpu_use(["7"]) is None


def test_a_driver_that_fails_has_no_reading(stub_gpus: StubGpus) -> None:
    stub_gpus.say(fail="Failed to initialize NVML")
    with pytest.raises(InfraError, match="Failed to initialize NVML"):
        gpu_use(["0"])
    assert worst_use([]) is None
