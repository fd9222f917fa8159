"""Names replaced by the mechanisms `deepseek` and `interpreter`. Imports neither torch nor vllm."""

from __future__ import annotations

from . import parts_dry_run
from .record import Part

__all__ = ["INTERPRETER", "PARTS"]

_ATTENTION = "vllm.models.deepseek_v4.nvidia.flashmla"
_CLASS = "DeepseekV4FlashMLAAttention"
_CACHE = "vllm.models.deepseek_v4.common.ops.cache_utils"
_INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
_KERNEL = "a kernel for CUDA"
_AFTER = "in PyTorch. The workspace is asked for, and its assertion raised, before it"

INTERPRETER = (
    Part(
        "vllm.triton_utils",
        "triton",
        "the CPU build puts a placeholder there, since Triton as it is published has no backend for CPUs",
        "none: it is the real Triton with TRITON_INTERPRET=1, so that vLLM's own kernels run, slowly",
        runs=True,
    ),
    Part("vllm.triton_utils", "tl", "the same placeholder", "none: the language of the real Triton", runs=True),
    Part("triton", "jit", runs=True),
)

PARTS = (
    *INTERPRETER,
    *parts_dry_run.PARTS,
    *parts_dry_run.PROFILE,
    Part(
        "vllm.platforms.cpu",
        "CpuPlatform.check_and_update_config",
        "on a CPU without AMX it turns chunked prefill and prefix caching off for this model, and raises max_num_batched_tokens to "
        "max_model_len",
        "sizes as on a GPU: these three stay as the command line has them",
        runs=True,
    ),
    Part(
        "vllm.models.deepseek_v4.cpu.model",
        "DeepseekV4CPUAttention",
        "the CPU's attention class asks for no workspace",
        "puts the lines of the bug there: a subclass of it with forward_mqa, _forward_prefill, _forward_decode and both backends of "
        f"vLLM's own {_CLASS}, as the release or the arm has them",
        runs=True,
    ),
    Part(_ATTENTION, "dequantize_and_gather_k_cache", _KERNEL, f"none: the same values, {_AFTER}"),
    Part(_ATTENTION, "combine_topk_swa_indices", _KERNEL, f"none: the same indices, {_AFTER}"),
    Part(_ATTENTION, "flash_mla_sparse_fwd", _KERNEL, f"none: the same attention, {_AFTER}"),
    Part(
        _ATTENTION,
        "flash_mla_with_kvcache",
        _KERNEL,
        "none: vLLM's own kernel for CPUs, with its arguments rearranged; decoding asks for no workspace",
    ),
    Part(
        "vllm.v1.attention.backends.mla.sparse_swa",
        "get_mla_metadata",
        "it plans a CUDA kernel's tiles",
        "none: the plan is an empty object, which nothing reads",
    ),
    Part(
        _INDEXER,
        "SparseAttnIndexer.forward_cpu",
        "on a CPU the indexer reserves nothing in a dummy run",
        "gives the locked size that a GPU has: a dummy run goes through the indexer's own forward_cuda, which then does nothing but "
        "reserve. Real steps stay on the CPU's path",
        runs=True,
    ),
    Part(
        "vllm.v1.worker.workspace",
        "WorkspaceManager._get_workspace_id",
        "to see what a prefill asks for",
        "none: it returns the same value, and logs the size that a prefill requests before it is compared with the lock",
        runs=True,
    ),
    # Called or read, not replaced.
    Part(_ATTENTION, f"{_CLASS}.forward_mqa", parameters=("q", "kv", "positions", "output"), runs=True),
    Part(_ATTENTION, f"{_CLASS}._forward_prefill", parameters=("q", "swa_metadata"), runs=True),
    Part(_ATTENTION, f"{_CLASS}._forward_decode", runs=True),
    Part(_ATTENTION, f"{_CLASS}.backend_cls", runs=True),
    Part(_ATTENTION, f"{_CLASS}.swa_backend_cls", runs=True),
    Part(
        _CACHE,
        "dequantize_and_gather_k_cache",
        parameters=("out", "k_cache", "seq_lens", "gather_lens", "block_table", "block_size", "offset"),
    ),
    Part(
        _CACHE,
        "combine_topk_swa_indices",
        parameters=("topk_indices", "query_start_loc", "seq_lens", "gather_lens", "window_size", "compress_ratio", "topk", "M", "N", "out"),
    ),
    Part("vllm._custom_ops", "flash_mla_with_kvcache_cpu"),
    Part(_INDEXER, "SparseAttnIndexer.forward_cuda", parameters=("hidden_states", "q_quant", "k", "weights"), runs=True),
    Part("vllm.v1.worker.workspace", "WorkspaceManager._ensure_workspace_size", parameters=("required_bytes",), runs=True),
    Part("vllm.v1.worker.workspace", "WorkspaceManager.is_locked", runs=True),
)  # fmt: skip
