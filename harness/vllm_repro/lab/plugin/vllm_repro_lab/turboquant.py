"""vLLM's TurboQuant attention backend on its CPU platform. `parts` says in words what each function here replaces, and why."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import vllm.triton_utils as triton_utils
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker import gpu_model_runner, workspace
from vllm.v1.worker.cpu_worker import CPUWorker

from . import kernels

__all__ = ["install"]

logger = init_logger("vllm.repro_lab")


def install(*, graphs: bool) -> None:
    """Puts every replacement in place in this process, apart from the kernels: they come with the backend, when it is chosen.

    graphs: whether `graphs` makes the workspace and captures.
    """
    _choose_backend()
    if not graphs:
        _make_workspace()
        _capture_after_warm_up()


def _choose_backend() -> None:
    own = CpuPlatform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *args: Any, **keywords: Any
    ) -> Any:
        if not str(attn_selector_config.kv_cache_dtype or "").startswith("turboquant_"):
            return own(cls, selected_backend, attn_selector_config, *args, **keywords)
        replace_kernels()
        logger.info(
            "Using TURBOQUANT attention backend out of potential backends: ['TURBOQUANT']. "
            "(LAB: this platform's own answer would be CPU_ATTN.)"
        )
        return AttentionBackendEnum.TURBOQUANT.get_path()

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def replace_kernels() -> None:
    """Not at install: the backend's modules import more of vLLM than is there when plugins are loaded."""
    if not hasattr(triton_utils.triton, "next_power_of_2"):
        triton_utils.triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    decode: Any = import_module("vllm.v1.attention.ops.triton_turboquant_decode")
    store: Any = import_module("vllm.v1.attention.ops.triton_turboquant_store")
    backend: Any = import_module("vllm.v1.attention.backends.turboquant_attn")
    if isinstance(store._tq_fused_store_mse, kernels.StandIn):
        return
    store._tq_fused_store_mse = kernels.StandIn(store._tq_fused_store_mse, kernels.store_mse)
    store._tq_fused_store_fp8 = kernels.StandIn(store._tq_fused_store_fp8, kernels.store_fp8)
    decode._tq_decode_stage1 = kernels.StandIn(decode._tq_decode_stage1, kernels.decode_splits)
    decode._fwd_kernel_stage2 = kernels.StandIn(decode._fwd_kernel_stage2, kernels.merge_splits)
    unpack = kernels.StandIn(decode._tq_full_dequant_kv, kernels.unpack_cache)
    decode._tq_full_dequant_kv = backend._tq_full_dequant_kv = unpack


def _make_workspace() -> None:
    own = CPUWorker.init_device

    def init_device(self: Any) -> Any:
        workspace.init_workspace_manager(torch.device("cpu"), 2 if self.vllm_config.parallel_config.enable_dbo else 1)
        return own(self)

    CPUWorker.init_device = init_device


def _capture_after_warm_up() -> None:
    own = CPUWorker.compile_or_warm_up_model

    def compile_or_warm_up_model(self: Any) -> Any:
        result = own(self)
        asked = os.environ.get("REPRO_LAB_GRAPHS", "").upper()
        if self.model_config.enforce_eager or asked == "NONE":
            logger.info(
                "LAB: graphs are turned off, so capture_model() is not called and the workspace stays unlocked."
            )
        else:
            with _as_on_a_gpu(self):
                self.model_runner.capture_model()
        return result

    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model


@contextlib.contextmanager
def _as_on_a_gpu(worker: Any) -> Iterator[None]:
    """What capture_model() needs around it: a graph mode, its sizes, and no CUDA. All of it is undone after."""
    config, runner = worker.vllm_config.compilation_config, worker.model_runner
    before = (config.cudagraph_mode, config.cudagraph_capture_sizes, config.max_cudagraph_capture_size)
    config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    config.cudagraph_capture_sizes = config.max_cudagraph_capture_size = None
    worker.vllm_config._set_cudagraph_sizes()
    dispatcher = runner.cudagraph_dispatcher
    dispatcher.initialize_cudagraph_keys(config.cudagraph_mode, runner.uniform_decode_query_len)
    try:
        with (
            mock.patch.object(gpu_model_runner, "graph_capture", return_value=contextlib.nullcontext()),
            mock.patch.object(torch.cuda, "mem_get_info", return_value=(0, 0)),
            mock.patch.object(torch.accelerator, "synchronize", return_value=None),
            mock.patch.object(torch.accelerator, "empty_cache", return_value=None),
        ):
            yield
    finally:
        config.cudagraph_mode, config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = before
        for keys in dispatcher.cudagraph_keys.values():
            keys.clear()
        dispatcher.initialize_cudagraph_keys(config.cudagraph_mode, runner.uniform_decode_query_len)
