"""Asynchronous scheduling on vLLM's CPU platform. `parts_async` lists the replaced name with its reason."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform

__all__ = ["install"]


def install() -> None:
    """Install the replacement in this process."""
    platform: Any = CpuPlatform
    original = platform.check_and_update_config.__func__

    def keep(cls: Any, vllm_config: Any) -> None:
        decided = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = decided

    platform.check_and_update_config = classmethod(keep)
