"""vLLM's own capture of CUDA graphs on its CPU platform, under the guard of `capture`.

The steps of the GPU worker that the CPU worker lacks run here, in the same order and under the same
conditions. `parts_kernels` lists each replaced name with its reason.
"""

from __future__ import annotations

import contextlib
import inspect
from functools import partial
from typing import Any

import torch
import vllm.compilation.cuda_graph as cuda_graph
import vllm.utils.cpu_triton_utils as cpu_kernels
from vllm.config import CUDAGraphMode
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from . import dry_run
from .capture import Guard, replace_waits
from .memory import DEVICE, claim
from .record import observe
from .refusals import STATE
from .wrapping import keep, wrap


def install(guard: Guard, *, record: bool) -> None:
    """Let vLLM's CPU worker capture CUDA graphs under the guard, in this process.

    record: record graphs, and replay them while serving.
    """
    STATE.recording = record
    keep(
        CpuPlatform,
        "compilation_config.cudagraph_mode",
        "compilation_config.cudagraph_capture_sizes",
        "compilation_config.max_cudagraph_capture_size",
    )
    CpuPlatform.support_static_graph_mode = classmethod(lambda _: True)
    CpuPlatform.graph_pool_handle = classmethod(lambda _: (0, 0))
    if not record:  # capture plain caches
        CPUAttentionMetadataBuilder._cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    if hasattr(cpu_kernels, "_FuncWrapper"):  # newer releases have plain functions instead
        wrap(cpu_kernels._FuncWrapper, "__getitem__", accept_more_arguments)
    wrap(CPUModelRunner, "__init__", split_memory)
    CPUModelRunner._postprocess_tensors = lambda _: None
    wrap(CPUModelRunner, "load_model", load_model)
    CPUModelRunner.get_model = GPUModelRunner.get_model
    cuda_graph.weak_ref_tensors = lambda value: value
    gpu_model_runner.graph_capture = lambda **_: contextlib.nullcontext()
    wrap(CPUWorker, "init_device", partial(init_device, guard))
    wrap(CPUWorker, "determine_available_memory", determine_available_memory)
    wrap(CPUWorker, "compile_or_warm_up_model", partial(compile_or_warm_up_model, guard))


def accept_more_arguments(original: Any, kernels: Any, *grid: Any) -> Any:
    """Return a kernel that accepts arguments it does not know, if the value of each is false."""
    kernel = original(kernels, *grid)
    taken = inspect.signature(kernel).parameters
    if any(
        parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in taken.values()
    ):
        return kernel

    def call(*args: Any, **keywords: Any) -> Any:
        unknown = {name for name in keywords if name not in taken}
        if not unknown or any(keywords[name] for name in unknown):
            return kernel(*args, **keywords)
        known = {name: value for name, value in keywords.items() if name in taken}
        return kernel(*args[: len(taken) - len(known)], **known)

    return call


def split_memory(original: Any, runner: Any, vllm_config: Any, _: Any) -> None:
    """Make the runner on `DEVICE`, so that its buffers have a host and a device half, as on a GPU.

    Replace torch's waits again.
    """
    original(runner, vllm_config, DEVICE)
    replace_waits()  # the CPU runner replaces them from 0.21.0 on


def load_model(original: Any, runner: Any, *args: Any, **keywords: Any) -> Any:
    """Mark all weights as device memory, and wrap the model for graphs as the GPU runner does."""
    result = original(runner, *args, **keywords)
    for model in (runner.model, getattr(getattr(runner, "drafter", None), "model", None)):
        if isinstance(model, torch.nn.Module):
            _claim(model)
    if runner.compilation_config.cudagraph_mode.has_full_cudagraphs():
        runner.model = cuda_graph.CUDAGraphWrapper(
            runner.model, runner.vllm_config, runtime_mode=CUDAGraphMode.FULL
        )
    return result


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


def init_device(guard: Guard, original: Any, worker: Any) -> Any:
    """Start the guard, and create the workspace manager on the guard's device."""
    guard.start()
    return dry_run.init_device(original, worker, DEVICE)


def determine_available_memory(original: Any, worker: Any) -> Any:
    """Run the original, then capture the largest graphs once, as the GPU worker does.

    Capture none if graphs are off.
    """
    result = original(worker)
    if worker.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
        worker.model_runner.profile_cudagraph_memory()
    return result


def compile_or_warm_up_model(guard: Guard, original: Any, worker: Any) -> Any:
    """Capture after the warm-up, as the GPU worker does; stop the guard and log its counts.

    In eager mode nothing is captured. Without a recording, the server then runs without graphs.
    """
    result = original(worker)
    if not worker.model_config.enforce_eager:
        worker.model_runner.capture_model()
    guard.stop()
    observe(
        "capture",
        captures=STATE.captures,
        checked=STATE.checked,
        refused=STATE.refused,
        recorded=STATE.recording,
    )
    if not STATE.recording:
        _serve_eagerly(worker.model_runner)
    return result


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
