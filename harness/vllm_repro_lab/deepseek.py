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

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.workspace import WorkspaceManager

from . import dry_run, interpreter

logger = init_logger("vllm.repro_lab")


def install() -> None:
    """Install every replacement in this process. Install Triton's interpreter first.

    The attention class is replaced later, just before the worker creates its model.
    """
    _keep_the_scheduler_as_asked()
    dry_run.make_workspace()
    dry_run.profile_before_memory()
    dry_run.capture_after_warm_up()
    _replace_attention_first()


def _keep_the_scheduler_as_asked() -> None:
    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chosen = (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
        )
        original(cls, vllm_config)
        (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
        ) = chosen

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _replace_attention_first() -> None:
    original = CPUWorker.init_device

    def init_device(self: Any) -> Any:
        # Not in `install`: the model's modules import parts of vLLM that are not loaded yet when
        # plugins are.
        interpreter.insist()
        _replace_attention()
        return original(self)

    CPUWorker.init_device = init_device


def _replace_attention() -> None:
    from . import deepseek_kernels as kernels

    attention: Any = import_module("vllm.models.deepseek_v4.nvidia.flashmla")
    model: Any = import_module("vllm.models.deepseek_v4.cpu.model")
    windows: Any = import_module("vllm.v1.attention.backends.mla.sparse_swa")
    indexer: Any = import_module("vllm.model_executor.layers.sparse_attn_indexer")
    gpu = attention.DeepseekV4FlashMLAAttention

    # vLLM is not installed where this is checked
    class FlashMLAOnCPU(model.DeepseekV4CPUAttention):  # type: ignore[misc]
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
    _reserve_in_dummy_runs(indexer)
    _watch_prefills(gpu)
    name = gpu.backend_cls.get_name()
    logger.info(
        "Using %s attention backend. (LAB: without the lab, this platform chooses"
        " CPU_V4_MLA_SPARSE.)",
        name,
    )


def _reserve_in_dummy_runs(indexer: Any) -> None:
    original = indexer.SparseAttnIndexer.forward_cpu

    def forward_cpu(self: Any, hidden_states: Any, q_quant: Any, k: Any, weights: Any) -> Any:
        if not isinstance(indexer.get_forward_context().attn_metadata, dict):
            return self.forward_cuda(hidden_states, q_quant, k, weights)
        return original(self, hidden_states, q_quant, k, weights)

    indexer.SparseAttnIndexer.forward_cpu = forward_cpu


def _watch_prefills(attention: Any) -> None:
    """Log the bytes that a prefill requests, before vLLM compares them with the lock.

    No lab frame is then in the traceback.
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
    chunk = slice(prefill["chunk_start"], prefill["chunk_end"])
    seen = {
        "bytes": needed,
        "prompts": prefill["seq_lens"][chunk].tolist(),
        "tokens": len(prefill["q"]),
        "ratio": prefill["self"].compress_ratio,
        "locked": locked,
    }
    logger.info("LAB observed prefill %s", json.dumps(seen))
