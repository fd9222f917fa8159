"""Names replaced by the mechanism `turboquant`. Imports neither torch nor vllm."""

from __future__ import annotations

from .record import Part

__all__ = ["FLASH", "PARTS"]

_KERNEL = "a Triton kernel, and there is no Triton driver for this CPU"
_NUMBERS = "none: the same bytes by the same formulas, in PyTorch. The workspace is asked for, and its assertion raised, before the kernel"
_DECODE = "vllm.v1.attention.ops.triton_turboquant_decode"
_STORE = "vllm.v1.attention.ops.triton_turboquant_store"
_BACKEND = "vllm.v1.attention.backends.turboquant_attn"
_LAYOUT = ("BLOCK_SIZE", "MSE_BYTES", "KPS", "VQB", "VAL_DATA_BYTES", "MSE_BITS", "KEY_FP8", "NORM_CORRECTION")
_CACHE = ("KV_cache_ptr", "Block_table_ptr", "Centroids_ptr", "HEAD_DIM", *_LAYOUT)
_SLOTS = ("Value_ptr", "KV_cache_ptr", "Slot_mapping_ptr", "D", "H", "BLOCK_SIZE", "KPS", "VQB")
_MERGE = ("Mid_O", "o", "lse", "B_Seqlen", "NUM_KV_SPLITS", "Lv")
_STRIDES = ("stride_cache_block", "stride_cache_pos", "stride_cache_head")

PARTS = (
    Part(
        "vllm.platforms.cpu",
        "CpuPlatform.get_attn_backend_cls",
        "the CPU platform answers CPU_ATTN for every cache",
        "none: for a turboquant cache it answers with vLLM's own TURBOQUANT backend, as the CUDA platform does",
    ),
    Part(
        "vllm.triton_utils.importing",
        "TritonPlaceholder",
        "vLLM's stand-in for the module triton lacks next_power_of_2 in some releases",
        "none: the missing function is added, and gives the kernels their block sizes",
        runs=True,
    ),
    Part(_STORE, "_tq_fused_store_mse", _KERNEL, _NUMBERS, ("Y_ptr", "Norms_ptr", "Midpoints_ptr", "MSE_BITS", *_SLOTS, *_STRIDES)),
    Part(_STORE, "_tq_fused_store_fp8", _KERNEL, _NUMBERS, ("Key_ptr", *_SLOTS, *_STRIDES)),
    Part(
        _DECODE,
        "_tq_decode_stage1",
        _KERNEL,
        _NUMBERS,
        ("Q_rot_ptr", "Seq_lens_ptr", "Mid_o_ptr", "stride_bt_b", "NUM_KV_HEADS", "NUM_KV_SPLITS", "KV_GROUP_SIZE", "ATTN_SCALE", *_CACHE),
    ),
    Part(_DECODE, "_tq_full_dequant_kv", _KERNEL, _NUMBERS, ("K_out_ptr", "V_out_ptr", *_CACHE)),
    Part(_DECODE, "_fwd_kernel_stage2", _KERNEL, _NUMBERS),
    Part(_BACKEND, "_tq_full_dequant_kv", _KERNEL, _NUMBERS),
    # Called, not replaced. The kernel is replaced in the module where TurboQuant calls it.
    Part(_BACKEND, "TurboQuantAttentionBackend", runs=True),
    Part("vllm.v1.attention.ops.triton_decode_attention", "_fwd_kernel_stage2", parameters=_MERGE),
)  # fmt: skip

_FLASH = "FlashAttention has kernels for GPUs only, so on a CPU TurboQuant takes its path without it"

FLASH = (
    Part(
        _BACKEND,
        "_HAS_FLASH_ATTN",
        _FLASH,
        "none: it is True, as on a GPU, so TurboQuant chooses between its paths as it does there",
    ),
    Part(_BACKEND, "flash_attn_varlen_func", _FLASH, "none: causal attention of each sequence in the call, in PyTorch"),
)
"""Also replaced by the mechanism `turboquant-flash`."""
