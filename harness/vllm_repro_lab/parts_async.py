"""Names replaced by the mechanism `async`. Imports neither torch nor vllm."""

from __future__ import annotations

from .record import Part

__all__ = ["PARTS"]

PARTS = (
    Part(
        "vllm.platforms.cpu",
        "CpuPlatform.check_and_update_config",
        "it switches asynchronous scheduling off",
        "the scheduler runs a step ahead unless --no-async-scheduling is given, as on a GPU. Scheduler, batch and sampler are vLLM's own. "
        "The CPU computes a step before it returns, so copies and kernels never overlap",
        runs=True,
    ),
    Part(
        "vllm.v1.worker.cpu_model_runner",
        "_torch_cuda_wrapper",
        "its streams cannot wait before 0.25.1, and torch has no CUDA stream here",
        "streams and events do nothing while the model runner is made, as they do later",
        runs=True,
    ),
    Part("vllm.engine.protocol", "StreamingInput", runs=True),
)
