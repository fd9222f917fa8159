"""vLLM's TurboQuant attention backend on its CPU platform.

`parts_kernels` lists each replaced name with its reason.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import vllm.triton_utils as triton_utils
from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from . import dry_run, kernels
from .wrapping import wrap

logger = init_logger("vllm.repro_lab")


def install(*, graphs: bool, flash: bool = False) -> None:
    """Install the TurboQuant backend on vLLM's CPU platform, in this process.

    The kernels are replaced later, when vLLM chooses the backend.

    graphs: whether the module `graphs` creates the workspace and captures; if not, install
    `dry_run`, which does. flash: also replace FlashAttention.
    """
    wrap(CpuPlatform, "get_attn_backend_cls", partial(get_attn_backend_cls, flash))
    if not graphs:
        dry_run.install()


def get_attn_backend_cls(
    flash: bool,
    original: Any,
    cls: Any,
    selected_backend: Any,
    attn_selector_config: Any,
    *args: Any,
    **keywords: Any,
) -> Any:
    """Return TurboQuant's backend for its caches, and replace its kernels; else vLLM's own choice.

    flash: also replace FlashAttention.
    """
    if not str(attn_selector_config.kv_cache_dtype or "").startswith("turboquant_"):
        return original(cls, selected_backend, attn_selector_config, *args, **keywords)
    replace_kernels()
    if flash:
        _replace_flash_attention()
    logger.info(
        "Using TURBOQUANT attention backend out of potential backends: ['TURBOQUANT']. "
        "(LAB: without the lab, this platform chooses CPU_ATTN.)"
    )
    return AttentionBackendEnum.TURBOQUANT.get_path()


def replace_kernels() -> None:
    """Replace TurboQuant's Triton kernels by PyTorch versions, once in a process.

    Not in `install`: the backend imports parts of vLLM that are not loaded yet when plugins are.
    """
    if not hasattr(triton_utils.triton, "next_power_of_2"):
        triton_utils.triton.next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    decode: Any = import_module("vllm.v1.attention.ops.triton_turboquant_decode")
    store: Any = import_module("vllm.v1.attention.ops.triton_turboquant_store")
    backend: Any = import_module("vllm.v1.attention.backends.turboquant_attn")
    if isinstance(store._tq_fused_store_mse, kernels.TorchKernel):
        return
    for module, name, body in (
        (store, "_tq_fused_store_mse", kernels.store_mse),
        (store, "_tq_fused_store_fp8", kernels.store_fp8),
        (decode, "_tq_decode_stage1", kernels.decode_splits),
        (decode, "_fwd_kernel_stage2", kernels.merge_splits),
        (decode, "_tq_full_dequant_kv", kernels.unpack_cache),
    ):
        setattr(module, name, kernels.TorchKernel(getattr(module, name), body))
    backend._tq_full_dequant_kv = decode._tq_full_dequant_kv


def _replace_flash_attention() -> None:
    """Give the TurboQuant backend the lab's FlashAttention in PyTorch."""
    backend: Any = import_module("vllm.v1.attention.backends.turboquant_attn")
    backend._HAS_FLASH_ATTN = True
    backend.flash_attn_varlen_func = kernels.flash_attention
