"""vLLM's own capture of CUDA graphs on its CPU platform, under the guard of `capture`.

The steps of the GPU worker that the CPU worker lacks run here, in the same order and under the same
conditions. `parts_kernels` lists each replaced name with its reason.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable
from typing import Any

import torch
import vllm.compilation.cuda_graph as cuda_graph
import vllm.utils.cpu_triton_utils as cpu_kernels
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.worker import gpu_model_runner, workspace
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from .capture import Guard, replace_waits
from .memory import DEVICE, claim
from .refusals import STATE

logger = init_logger("vllm.repro_lab")


def install(guard: Guard, *, record: bool) -> None:
    """Install every replacement in this process.

    record: record graphs, and replay them while serving.
    """
    STATE.recording = record
    _keep_graph_mode()
    if not record:
        _capture_plain_caches()
    _accept_more_arguments()
    _split_memory()
    _wrap_model()
    _work_as_on_a_gpu(guard, record=record)


def _keep_graph_mode() -> None:
    platform: Any = CpuPlatform
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        config = vllm_config.compilation_config
        chosen = (
            config.cudagraph_mode,
            config.cudagraph_capture_sizes,
            config.max_cudagraph_capture_size,
        )
        original(cls, vllm_config)
        config.cudagraph_mode, config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = (
            chosen
        )

    platform.check_and_update_config = classmethod(check_and_update_config)
    platform.support_static_graph_mode = classmethod(lambda _: True)
    platform.graph_pool_handle = classmethod(lambda _: (0, 0))


def _capture_plain_caches() -> None:
    CPUAttentionMetadataBuilder._cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


def _accept_more_arguments() -> None:
    if not hasattr(cpu_kernels, "_FuncWrapper"):
        return  # this release has plain functions instead
    original = cpu_kernels._FuncWrapper.__getitem__

    def item(self: Any, *grid: Any) -> Callable[..., Any]:
        kernel = original(self, *grid)
        taken = inspect.signature(kernel).parameters
        if any(
            parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            for parameter in taken.values()
        ):
            # vLLM is not installed where this is checked
            return kernel  # type: ignore[no-any-return]

        def call(*args: Any, **keywords: Any) -> Any:
            unknown = {name for name in keywords if name not in taken}
            if not unknown or any(keywords[name] for name in unknown):
                return kernel(*args, **keywords)
            known = {name: value for name, value in keywords.items() if name in taken}
            return kernel(*args[: len(taken) - len(known)], **known)

        return call

    cpu_kernels._FuncWrapper.__getitem__ = item


def _split_memory() -> None:
    """Give the runner `DEVICE` as its device, and buffers in two halves, as on a GPU."""
    own_init = CPUModelRunner.__init__

    def init(self: Any, vllm_config: Any, _: Any) -> None:
        own_init(self, vllm_config, DEVICE)
        replace_waits()  # the CPU runner replaces them from 0.21.0 on

    CPUModelRunner.__init__ = init
    CPUModelRunner._postprocess_tensors = lambda _: None


def _wrap_model() -> None:
    original = CPUModelRunner.load_model

    def load_model(self: Any, *args: Any, **keywords: Any) -> Any:
        result = original(self, *args, **keywords)
        for model in (self.model, getattr(getattr(self, "drafter", None), "model", None)):
            if isinstance(model, torch.nn.Module):
                _claim(model)
        if self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            self.model = cuda_graph.CUDAGraphWrapper(
                self.model, self.vllm_config, runtime_mode=CUDAGraphMode.FULL
            )
        return result

    CPUModelRunner.load_model = load_model
    CPUModelRunner.get_model = GPUModelRunner.get_model
    cuda_graph.weak_ref_tensors = lambda value: value


def _claim(model: torch.nn.Module) -> None:
    """Mark all weights as device memory, also tensors that a layer keeps as plain attributes."""
    for module in model.modules():
        for tensor in (
            *module.parameters(recurse=False),
            *module.buffers(recurse=False),
            *vars(module).values(),
        ):
            if isinstance(tensor, torch.Tensor):
                claim(tensor)


def _work_as_on_a_gpu(guard: Guard, *, record: bool) -> None:
    own_init, own_memory = CPUWorker.init_device, CPUWorker.determine_available_memory
    own_warm_up = CPUWorker.compile_or_warm_up_model
    gpu_model_runner.graph_capture = lambda **_: contextlib.nullcontext()

    def init_device(self: Any) -> Any:
        guard.start()
        workspace.init_workspace_manager(
            DEVICE, 2 if self.vllm_config.parallel_config.enable_dbo else 1
        )
        return own_init(self)

    def determine_available_memory(self: Any) -> Any:
        result = own_memory(self)
        if self.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            self.model_runner.profile_cudagraph_memory()
        return result

    def compile_or_warm_up_model(self: Any) -> Any:
        result = own_warm_up(self)
        if not self.model_config.enforce_eager:
            self.model_runner.capture_model()
        guard.stop()
        _log_capture(record=record)
        if not record:
            _serve_eagerly(self.model_runner)
        return result

    CPUWorker.init_device = init_device
    CPUWorker.determine_available_memory = determine_available_memory
    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model


def _log_capture(*, record: bool) -> None:
    seen = {
        "captures": STATE.captures,
        "checked": STATE.checked,
        "refused": STATE.refused,
        "recorded": record,
    }
    logger.info("LAB observed capture %s", json.dumps(seen))


def _serve_eagerly(runner: Any) -> None:
    """Serve without graphs from here on: nothing was recorded that could be replayed."""
    if isinstance(runner.model, cuda_graph.CUDAGraphWrapper):
        runner.model = runner.model.unwrap()
    runner.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    drafter = getattr(getattr(runner, "drafter", None), "cudagraph_dispatcher", None)
    for dispatcher, query_tokens in (
        (runner.cudagraph_dispatcher, runner.uniform_decode_query_len),
        (drafter, 1),
    ):
        if dispatcher is not None:
            for keys in dispatcher.cudagraph_keys.values():
                keys.clear()
            dispatcher.initialize_cudagraph_keys(CUDAGraphMode.NONE, query_tokens)
