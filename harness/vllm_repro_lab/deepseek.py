"""DeepSeek-V4's NVIDIA attention class on vLLM's CPU platform.

`parts_kernels` lists each replaced name with its reason.

The model is vLLM's CPU model. Its attention layers get the methods of the class for Hopper GPUs,
which reserve and request workspace; their kernels are replaced by PyTorch. Triton's interpreter
runs the kernels of the metadata builders.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.workspace import WorkspaceManager

from . import dry_run, interpreter
from .wrapping import keep, wrap

logger = init_logger("vllm.repro_lab")


def install() -> None:
    """Install DeepSeek-V4's replacements in this process. Install Triton's interpreter first.

    The attention class is replaced later, just before the worker creates its model.
    """
    keep(
        CpuPlatform,
        "scheduler_config.enable_chunked_prefill",
        "scheduler_config.max_num_batched_tokens",
        "cache_config.enable_prefix_caching",
    )
    dry_run.install(profile=True)
    wrap(CPUWorker, "init_device", init_device)


def init_device(original: Any, worker: Any) -> Any:
    """Replace the attention class, then run the worker's own `init_device`, and return its result.

    Not in `install`: the model's modules import parts of vLLM that are not loaded yet when plugins
    are.
    """
    interpreter.exit_if_late()
    _replace_attention()
    return original(worker)


def _replace_attention() -> None:
    """Give the CPU model the methods of vLLM's FlashMLA class, with kernels in PyTorch."""
    from . import deepseek_kernels as kernels

    attention: Any = import_module("vllm.models.deepseek_v4.nvidia.flashmla")
    model: Any = import_module("vllm.models.deepseek_v4.cpu.model")
    windows: Any = import_module("vllm.v1.attention.backends.mla.sparse_swa")
    indexer: Any = import_module("vllm.model_executor.layers.sparse_attn_indexer")
    gpu = attention.DeepseekV4FlashMLAAttention

    class FlashMLAOnCPU(model.DeepseekV4CPUAttention):  # type: ignore[misc]  # no vLLM here
        backend_cls, swa_backend_cls = gpu.backend_cls, gpu.swa_backend_cls
        forward_mqa, _forward_prefill, _forward_decode = (
            gpu.forward_mqa,
            gpu._forward_prefill,
            gpu._forward_decode,
        )

    model.DeepseekV4CPUAttention = FlashMLAOnCPU
    attention.dequantize_and_gather_k_cache = kernels.gather
    attention.combine_topk_swa_indices = kernels.combine
    attention.flash_mla_sparse_fwd = kernels.attend
    attention.flash_mla_with_kvcache = kernels.attend_cached
    windows.get_mla_metadata = lambda: (windows.FlashMLASchedMeta(), None)
    wrap(indexer.SparseAttnIndexer, "forward_cpu", forward_cpu)
    _watch_prefills(gpu)
    name = gpu.backend_cls.get_name()
    logger.info(
        "Using %s attention backend. (LAB: without the lab, this platform chooses"
        " CPU_V4_MLA_SPARSE.)",
        name,
    )


def forward_cpu(
    original: Any, indexer: Any, hidden_states: Any, q_quant: Any, k: Any, weights: Any
) -> Any:
    """Run `forward_cuda` in a dummy run, which reserves workspace; else the original."""
    if not isinstance(get_forward_context().attn_metadata, dict):
        return indexer.forward_cuda(hidden_states, q_quant, k, weights)
    return original(indexer, hidden_states, q_quant, k, weights)


def _watch_prefills(attention: Any) -> None:
    """Make vLLM's workspace manager log the bytes that a prefill requests, if a new maximum.

    It logs them before vLLM compares them with the lock, so no lab frame is in the traceback.
    attention: the class whose `_forward_prefill` requests them.
    """
    original, largest = WorkspaceManager._get_workspace_id, [0]
    ensures, prefills = (
        WorkspaceManager._ensure_workspace_size.__code__,
        attention._forward_prefill.__code__,
    )

    def _get_workspace_id(self: Any) -> int:
        index: int = original(self)
        asking = sys._getframe(1)
        caller = asking.f_back and asking.f_back.f_back  # the caller of get_simultaneous
        if asking.f_code is ensures and caller is not None and caller.f_code is prefills:
            needed = asking.f_locals["required_bytes"]
            if needed > largest[0]:
                largest[0] = needed
                _observe_prefill(needed, self.is_locked(), caller.f_locals)
        return index

    WorkspaceManager._get_workspace_id = _get_workspace_id


def _observe_prefill(needed: int, locked: bool, prefill: Any) -> None:
    """Log a prefill chunk: workspace bytes needed, prompt lengths, tokens and the lock.

    prefill: local variables of `_forward_prefill`.
    """
    chunk = slice(prefill["chunk_start"], prefill["chunk_end"])
    seen = {
        "bytes": needed,
        "prompts": prefill["seq_lens"][chunk].tolist(),
        "tokens": len(prefill["q"]),
        "ratio": prefill["self"].compress_ratio,
        "locked": locked,
    }
    logger.info("LAB observed prefill %s", json.dumps(seen))
