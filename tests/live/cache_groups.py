"""Run by vLLM 0.21.0's interpreter: how its own code cuts DeepSeek-V4's KV cache into groups, and what it says of a pool.

Reads {"ratios": [[0, 4, 128], …], "blocks": n, "longest": n, "batch": n} from stdin: how many tokens each layer makes one of, for several
models, the pool, and two flags. Prints a list with block size and window of each group, bytes of a block, and the pool in tokens. The
layers are stated as `deepseek_v4_attention.py`, `deepseek_compressor.py` and `sparse_swa.py` register them; no device is needed for that.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any


def layers(ratios: list[int]) -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    def state(block_size: int, width: int, window: int) -> Any:
        return SlidingWindowMLASpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=width,
            dtype=torch.float32,
            sliding_window=window,
            alignment=576,
        )

    def cache(kind: Any, block_size: int, width: int, **more: Any) -> Any:
        return kind(block_size=block_size, num_kv_heads=1, head_size=width, dtype=torch.uint8, alignment=576, **more)

    packed = {"cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}
    found: dict[str, Any] = {}
    for index, ratio in enumerate(ratios):
        if ratio == 4:
            found[f"{index}.compressor"] = state(4, 2048, 8)
            found[f"{index}.indexer.compressor"] = state(4, 512, 8)
            found[f"{index}.indexer"] = cache(MLAAttentionSpec, 256, 132, compress_ratio=4)
        if ratio == 128:
            found[f"{index}.compressor"] = state(8, 1024, 128)
        found[f"{index}.window"] = cache(SlidingWindowMLASpec, 64, 512, sliding_window=128, **packed)
        if ratio > 1:
            found[f"{index}"] = cache(MLAAttentionSpec, 256, 512, compress_ratio=ratio, **packed)
    return found


def main() -> None:
    from vllm.v1.core import kv_cache_utils

    asked = json.load(sys.stdin)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=asked["batch"]),
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=asked["longest"]),
        cache_config=SimpleNamespace(num_gpu_blocks_override=asked["blocks"]),
    )
    found = []
    for ratios in asked["ratios"]:
        groups = kv_cache_utils.get_kv_cache_groups(config, layers(ratios))
        pool = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, 2**40)
        often = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, pool)
        specs = [next(iter(group.kv_cache_spec.kv_cache_specs.values())) for group in groups]
        found.append(
            {
                "groups": [(spec.block_size, getattr(spec, "sliding_window", None) or 0) for spec in specs],
                "block_bytes": kv_cache_utils._pool_bytes_per_block(groups),
                "tokens": int(often * asked["longest"]),
            }
        )
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
