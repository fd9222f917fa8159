"""Boot steps of the GPU worker that the CPU worker lacks.

They create the workspace, profile, and run the capture, which locks the workspace.

`parts_kernels` lists each replaced name with its reason. All sizes and the lock come from vLLM.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker import gpu_model_runner, workspace
from vllm.v1.worker.cpu_worker import CPUWorker

from .wrapping import wrap

logger = init_logger("vllm.repro_lab")


def install(*, profile: bool = False) -> None:
    """Give the CPU worker the GPU worker's boot steps; profile: also its profile run."""
    wrap(CPUWorker, "init_device", init_device)
    wrap(CPUWorker, "compile_or_warm_up_model", compile_or_warm_up_model)
    if profile:
        wrap(CPUWorker, "determine_available_memory", determine_available_memory)


def init_device(original: Any, worker: Any, device: Any = None) -> Any:
    """Create the workspace manager, then run the original, as the GPU worker does.

    device: of the workspace; the CPU by default.
    """
    workspace.init_workspace_manager(
        torch.device("cpu") if device is None else device,
        2 if worker.vllm_config.parallel_config.enable_dbo else 1,
    )
    return original(worker)


def determine_available_memory(original: Any, worker: Any) -> Any:
    """Run vLLM's profile_run() before memory is measured, as the GPU worker does."""
    worker.model_runner.profile_run()
    return original(worker)


def compile_or_warm_up_model(original: Any, worker: Any) -> Any:
    """Run vLLM's capture_model() after the warm-up, unless graphs are off: it locks the workspace.

    No graph is captured. Return the warm-up's result.
    """
    result = original(worker)
    mode = os.environ.get("REPRO_LAB_GRAPHS", "").upper()
    if worker.model_config.enforce_eager or mode == "NONE":
        logger.info(
            "LAB: graphs are turned off, so capture_model() is not called and the workspace"
            " stays unlocked."
        )
    else:
        with _as_on_a_gpu(worker):
            worker.model_runner.capture_model()
    return result


@contextlib.contextmanager
def _as_on_a_gpu(worker: Any) -> Iterator[None]:
    """Set the graph mode, sizes and CUDA replacements for capture_model(); restore them on exit."""
    config, runner = worker.vllm_config.compilation_config, worker.model_runner
    before = (
        config.cudagraph_mode,
        config.cudagraph_capture_sizes,
        config.max_cudagraph_capture_size,
    )
    config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    config.cudagraph_capture_sizes = config.max_cudagraph_capture_size = None
    worker.vllm_config._set_cudagraph_sizes()
    dispatcher = runner.cudagraph_dispatcher
    dispatcher.initialize_cudagraph_keys(config.cudagraph_mode, runner.uniform_decode_query_len)
    try:
        with (
            mock.patch.object(
                gpu_model_runner, "graph_capture", return_value=contextlib.nullcontext()
            ),
            mock.patch.object(torch.cuda, "mem_get_info", return_value=(0, 0)),
            mock.patch.object(torch.accelerator, "synchronize", return_value=None),
            mock.patch.object(torch.accelerator, "empty_cache", return_value=None),
        ):
            yield
    finally:
        config.cudagraph_mode, config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = (
            before
        )
        for keys in dispatcher.cudagraph_keys.values():
            keys.clear()
        dispatcher.initialize_cudagraph_keys(config.cudagraph_mode, runner.uniform_decode_query_len)
