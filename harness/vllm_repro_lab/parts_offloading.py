"""Names replaced by the mechanism `offloading`. Imports neither torch nor vllm."""

from __future__ import annotations

from .record import Part

__all__ = ["PARTS"]

_SPEC = "vllm.v1.kv_offload.cpu.spec"

PARTS = (
    Part(
        _SPEC,
        "CPUOffloadingSpec.get_worker",
        "it copies with CUDA streams, events and kernels",
        "a transfer moves no data and is reported one poll after it began. Which blocks are transferred, and when, is decided in vLLM's "
        "scheduler half, where the bug is and nothing is replaced. Answers from loaded blocks prove nothing",
        otherwise=("CPUOffloadingSpec.get_handlers",),
    ),
)
