"""Comparison of the lab's kernels with vLLM's own TurboQuant kernels in Triton's interpreter.

    TRITON_INTERPRET=1 PYTHONPATH=<release>:<plugin> <release's python> compare_kernels.py

Print one line per preset: equal, or what differs and by how much.
"""

from __future__ import annotations

import math
import sys
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language
import vllm.triton_utils as triton_utils

from vllm_repro_lab import kernels

HEADS, QUERY_HEADS, SIZE, BLOCK, BLOCKS, TOKENS = 2, 4, 32, 32, 5, 70
BF16_STEP = 2**-8


def load() -> tuple[Any, Any, Any]:
    """Load vLLM's modules with the real Triton, which a CPU build replaces by a placeholder."""
    for name in ("backend", "backends.fa_utils", "backends.utils"):
        import_module(f"vllm.v1.attention.{name}")
    import_module("vllm.v1.worker.workspace")
    triton_utils.triton, triton_utils.tl = triton, triton.language
    import_module("vllm.v1.attention.ops.triton_decode_attention")
    return (
        import_module("vllm.v1.attention.ops.triton_turboquant_decode"),
        import_module("vllm.v1.attention.ops.triton_turboquant_store"),
        import_module("vllm.v1.attention.backends.turboquant_attn"),
    )


def stand_in(module: Any, name: str, body: Any) -> None:
    setattr(module, name, kernels.TorchKernel(getattr(module, name).fn, body))


def results(decode: Any, store: Any, backend: Any, preset: str) -> tuple[torch.Tensor, ...]:
    """Return cache bytes, a decode's result, and unpacked keys and values for fixed inputs."""
    config_of = import_module(
        "vllm.model_executor.layers.quantization.turboquant.config"
    ).TurboQuantConfig
    centroids_of = import_module(
        "vllm.model_executor.layers.quantization.turboquant.centroids"
    ).get_centroids
    config = config_of.from_cache_dtype(preset, SIZE)
    random = torch.Generator().manual_seed(7)
    key, value = (
        torch.randn(TOKENS, HEADS, SIZE, generator=random).to(torch.bfloat16) for _ in range(2)
    )
    query = torch.randn(6, QUERY_HEADS, SIZE, generator=random).to(torch.bfloat16)
    table = torch.tensor([[3, 1, 4]], dtype=torch.int32)
    place = torch.arange(TOKENS)
    slots = table[0].long()[place // BLOCK] * BLOCK + place % BLOCK
    slots[11] = -1  # padding
    rotation = backend._build_hadamard(SIZE, "cpu")
    centroids = centroids_of(SIZE, config.centroid_bits).float()
    ordered = centroids.sort()[0]
    bits, packed, value_bits = (
        config.key_mse_bits,
        config.key_packed_size,
        config.effective_value_quant_bits,
    )
    cache = torch.zeros(BLOCKS, BLOCK, HEADS, config.slot_size_aligned, dtype=torch.uint8)
    middle = (ordered[:-1] + ordered[1:]) / 2
    store.triton_turboquant_store(
        key, value, cache, slots, rotation, middle, bits, packed, value_bits, config.key_fp8
    )
    answers = decode.triton_turboquant_decode_attention(
        query, cache, table.expand(6, -1),
        torch.arange(TOKENS - 5, TOKENS + 1, dtype=torch.int32), rotation, centroids,
        SIZE**-0.5, bits, packed, value_bits, config.key_fp8, config.norm_correction,
        PiT=rotation, max_num_kv_splits=4,
    )  # fmt: skip
    keys, values = (torch.zeros(1, HEADS, 3 * BLOCK, SIZE, dtype=torch.float16) for _ in range(2))
    backend._tq_full_dequant_kv[(3 * BLOCK, HEADS)](
        cache, table, centroids, keys, values,
        *keys.stride()[:3], *values.stride()[:3], *cache.stride()[:3], table.stride(0),
        HEAD_DIM=SIZE, BLOCK_SIZE=BLOCK, NUM_KV_HEADS=HEADS,
        MSE_BYTES=math.ceil(SIZE * bits / 8), KPS=packed, VQB=value_bits,
        VAL_DATA_BYTES=math.ceil(SIZE * value_bits / 8), MSE_BITS=bits,
        KEY_FP8=int(config.key_fp8), BLOCK_D=SIZE,
        NORM_CORRECTION=int(config.norm_correction), FP8_E4B15=0, num_warps=4,
    )  # fmt: skip
    return cache, answers.float(), keys[:, :, :TOKENS].float(), values[:, :, :TOKENS].float()


def compare(own: tuple[torch.Tensor, ...], ours: tuple[torch.Tensor, ...]) -> str:
    differing = int((own[0] != ours[0]).sum())
    answers, keys, values = (
        float((a - b).abs().max()) for a, b in zip(own[1:], ours[1:], strict=True)
    )
    if not differing and not keys and not values and answers <= BF16_STEP:
        return "same bytes, same keys and values, same answers"
    return (
        f"{differing} bytes differ; at most: answers {answers:.1e}, keys {keys:.1e}, values"
        f" {values:.1e}"
    )


def flash_difference() -> float:
    """Return the largest difference of the FlashAttention replacement from the formula.

    Compare a row at a time: one prompt, one continuation.
    """
    random = torch.Generator().manual_seed(7)
    bounds = [(0, 9, 0, 9), (9, 15, 9, 35)]  # 9 tokens after none; 6 after 20
    query, key, value = (
        torch.randn(rows, heads, SIZE, generator=random)
        for rows, heads in ((15, QUERY_HEADS), (35, HEADS), (35, HEADS))
    )
    starts = [torch.tensor([0, *ends]) for ends in ((9, 15), (9, 35))]
    found = kernels.flash_attention(
        query, key, value, starts[0], starts[1], SIZE**-0.5, causal=True, max_seqlen_q=9
    )
    worst = 0.0
    for start, end, first, last in bounds:
        for row in range(start, end):
            seen = slice(first, last - (end - 1 - row))
            for head in range(QUERY_HEADS):
                group = head // (QUERY_HEADS // HEADS)
                weights = torch.softmax(key[seen, group] @ query[row, head] * SIZE**-0.5, 0)
                worst = max(
                    worst, float((weights @ value[seen, group] - found[row, head]).abs().max())
                )
    return worst


def main() -> int:
    decode, store, backend = load()
    presets = ("turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
    own = {preset: results(decode, store, backend, preset) for preset in presets}
    stand_in(store, "_tq_fused_store_mse", kernels.store_mse)
    stand_in(decode, "_tq_decode_stage1", kernels.decode_splits)
    stand_in(decode, "_fwd_kernel_stage2", kernels.merge_splits)
    stand_in(backend, "_tq_full_dequant_kv", kernels.unpack_cache)
    for preset in presets:
        print(preset, compare(own[preset], results(decode, store, backend, preset)))
    print(
        "flash_attention",
        "same answers" if (worst := flash_difference()) < 1e-5 else f"differs by {worst:.1e}",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
