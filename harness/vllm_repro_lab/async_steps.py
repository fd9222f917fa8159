"""Asynchronous scheduling on vLLM's CPU platform.

`parts_connectors` lists the replaced names with their reasons.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform

from .wrapping import keep


class _Nothing:
    """Stand-in for a CUDA stream or event: on a CPU each step is done when its call returns."""

    device = torch.device("cpu")

    def __init__(self, *_: object, **__: object) -> None:
        """Accept any options."""

    def record(self, *_: object) -> None:
        """Record nothing."""

    synchronize = wait_stream = record


def install() -> None:
    """Let vLLM schedule asynchronously on a CPU: replace CUDA streams and events."""
    cuda: Any = torch.cuda
    torch.Event = cuda.Event = cuda.Stream = cuda.current_stream = _Nothing
    # from 0.23.0 on it replaces them with its own streams and events
    import vllm.v1.worker.cpu_worker  # noqa: F401  # imported for its effect
    from vllm.v1.worker import cpu_model_runner

    cpu_model_runner._torch_cuda_wrapper = nullcontext
    keep(CpuPlatform, "scheduler_config.async_scheduling")
